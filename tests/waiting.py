"""A `bitnet` that stops in the middle of its work, for whoever interrupts it."""

from __future__ import annotations

# It prints a line and waits for the end of its input.
WAITS_AFTER_EIGHT_ANSWERS = """
import contextlib, sys
from bitnet_inference.cli import batch, main

@contextlib.contextmanager
def progress_bar(what):
    yield lambda done, total: (print(flush=True), sys.stdin.read()) if done == 8 else None

batch.progress_bar = progress_bar
main()
"""

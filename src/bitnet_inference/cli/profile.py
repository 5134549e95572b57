"""`--profile FILE`: a trace of what the engine did, and where the time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from bitnet_inference.cli.reports import print_table


@contextmanager
def profiling(file: Path | None) -> Iterator[dict[str, Any]]:
    """Arguments of LLM.load with which a trace is written when the block is left; none without a file."""
    if file is None:
        yield {}
        return
    from bitnet_inference.trace import Trace

    with Trace(file) as trace:
        yield {"listener": trace, "profile": True}
    print_table(trace.table(), to_stderr=True)
    typer.echo(f"[trace: {file}; open it at https://ui.perfetto.dev]", err=True)

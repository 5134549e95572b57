"""What holds for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on the device

# What a shell began in the background ignores the first, and what nohup began the second.
signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("shared machine", settings.default, deadline=None)  # a step may take long there
settings.load_profile("shared machine")

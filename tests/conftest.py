"""What holds for all tests."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on the device

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell began in the background

settings.register_profile("shared machine", settings.default, deadline=None)  # a step may take long there
settings.load_profile("shared machine")

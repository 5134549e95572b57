"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; 0 runs its kernels on the device

settings.register_profile("shared machine", settings.default, deadline=None)  # a step may take long there
settings.load_profile("shared machine")

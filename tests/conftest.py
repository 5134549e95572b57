"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared machine", settings.default, deadline=None)  # a step may take long there
settings.load_profile("shared machine")

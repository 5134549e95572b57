"""Calls that wake other threads, kept until the engine's thread lets them run."""

from __future__ import annotations

import logging
from collections.abc import Callable


class Wakeups:
    """A thread that is woken while the engine's thread holds the interpreter only stands in its way.

    So readers are woken when all tokens of a step are out and the model is about to compute. All methods are for the
    engine's thread.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Make this call, which must return soon, at the next `make`."""
        self._calls.append(call)

    def make(self) -> None:
        """Make the calls: the engine's thread is about to compute, or to sleep. Whoever raises concerns no other."""
        if self._calls:
            calls, self._calls = self._calls, []
            for call in calls:
                try:
                    call()
                except Exception:
                    logging.getLogger(__name__).exception("what was to be called at the end of a stream raised")

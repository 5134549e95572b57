"""Calls that wake other threads, kept until the engine's thread lets them run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

# Waking a thread takes as long as a tenth of a small model's step, and twice that while it runs beside the model.
MAX_HELD_S = 0.001


class Wakeups:
    """A thread that is woken while the engine's thread holds the interpreter only stands in its way.

    So readers are woken when all tokens of a step are out and the model is about to compute; and where its steps are
    shorter than MAX_HELD_S, once in that time. All methods are for the engine's thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` tells seconds."""
        self._clock = clock
        self._calls: list[Callable[[], None]] = []
        self._last_made = -math.inf

    def add(self, call: Callable[[], None]) -> None:
        """Make this call, which must return soon, at the next `make`."""
        self._calls.append(call)

    def make(self, busy_s: float = math.inf) -> None:
        """Make the calls: the engine's thread is about to compute for so long, or to sleep.

        They are kept if the next call of this comes early enough for them. Whoever raises concerns no other.
        """
        if not self._calls:
            return
        now = self._clock()
        if now + busy_s <= self._last_made + MAX_HELD_S:
            return
        self._last_made = now
        calls, self._calls = self._calls, []
        for call in calls:
            try:
                call()
            except BaseException:  # SystemExit, for instance, would end the engine
                logging.getLogger(__name__).exception("what was to be called at the end of a stream raised")

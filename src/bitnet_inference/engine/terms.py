"""On which terms a request is served, whatever it asks for."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real

from bitnet_inference.errors import InvalidParams

MAX_PRIORITY = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Who a request belongs to and when it has its turn. Raises InvalidParams for what is impossible.

    No text depends on any of it.

    `priority`: waiting requests of a higher one come first, and when the cache is full, running ones of a lower one
    give way first; within one it is first come, first served. A steady stream of a higher one keeps lower ones waiting.
    `timeout_s`: seconds from submission; then the request ends as "timeout", with the text that it has got.
    `cache_salt`: requests reuse what others have computed of the same beginning only if their salts are equal. Give
    each tenant its own, so that none learns from the time to the first token what others have sent.
    """

    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""

    def __post_init__(self) -> None:
        # Kept as Python's own numbers: NumPy's small ones overflow and round where ranks and deadlines are computed.
        if not _is_number(self.priority, Integral) or abs(int(self.priority)) > MAX_PRIORITY:
            allowed = f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY} (0 is usual, higher comes first)"
            raise InvalidParams(f"priority is {self.priority!r:.60}: give {allowed}")
        object.__setattr__(self, "priority", int(self.priority))
        if not isinstance(self.cache_salt, str):
            raise InvalidParams(f"cache_salt is {self.cache_salt!r}: give a string")
        if self.timeout_s is not None:
            object.__setattr__(self, "timeout_s", _seconds(self.timeout_s))


def _seconds(given: object) -> float:
    if _is_number(given, Real):
        with suppress(OverflowError):  # a huge whole number
            seconds = float(given)  # type: ignore[arg-type]  # a number
            if 0 < seconds < math.inf:
                return seconds
    raise InvalidParams(f"timeout_s is {given!r:.60}: give seconds, more than 0 (None is no limit)")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)

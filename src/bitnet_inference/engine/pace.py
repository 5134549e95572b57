"""How many tokens of prompts a step may have while other requests decode."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence

from bitnet_inference.engine.room import Chunk, Costs, Room, TimedRoom, whole_tiles

# A step with prompt tokens takes at most so many times one without, as far as the estimates are right.
MAX_SLOWER = 3.1
_SHARE_OF_NEWEST = 0.25
_MAX_JUMP = 2.0
_FAR = 1.5  # times what was expected: more than one step differs from the next
_TRUE_FOR, _TRUE_ONCE_FOR = 256, 16  # steps without prompts: so long is known what was measured more than once, or once
_MEASURE_AFTER, _DOUBT_AFTER = 64, 4  # steps with prompts: one without them, and sooner if the last was unexpected
_LIKELY_SLOPE = 0.1  # a step with twice the tokens takes a tenth longer, where weights are what is waited for
_LIKELY_EQUAL = 3000  # positions that a token attends to in the time of its matrix products


class Pace:
    """Estimates from measured steps, so that running streams go on while prompts enter.

    A step costs what its decoding requests cost alone, and for tokens of prompts the same for each and for each
    position that each attends to. What is not known is taken to be expensive. Only a step without prompts tells what
    decoding costs, so there is one now and then while prompts wait, and soon where so many have never decoded. The
    estimates decide how prompts are cut, which no result depends on.
    """

    def __init__(self, tile: int) -> None:
        """A step costs as much as if it had whole multiples of `tile` tokens, those of decoding requests among them."""
        self._tile = tile
        self._decode_s: dict[int, float] = {}  # by the number of tokens, of requests that decode and their drafts
        self._last_s: dict[int, float] = {}  # the newest of each
        self._true_until: dict[int, int] = {}  # a number of steps without prompts
        self._num_steps = 0  # without prompts
        self._is_doubtful = False
        self._num_with_prompts = 0  # steps, since the last one without
        self._costs: Costs | None = None

    def room(self, num_tokens: int, num_decoding: int, slower: float = MAX_SLOWER) -> Room:
        """For prompts in a step of requests that decode: at most so many tokens; none if decoding is to be measured.

        The step takes `slower` times as long as without.
        """
        if self._must_measure(num_decoding):
            return Room(0)
        alone_s = self._alone_s(num_decoding)
        if self._costs is None or not alone_s:
            rest = self._tile - num_decoding % self._tile
            return Room(min(num_tokens, rest if 2 * rest >= self._tile else rest + self._tile))
        return TimedRoom(num_tokens, num_decoding, self._tile, self._costs, alone_s, slower * alone_s)

    def most_s(self, num_decoding: int) -> float | None:
        """How long a step may take for what is computed beside it; None if decoding is to be measured.

        0.0 while nothing is known: no longer than by itself.
        """
        return None if self._must_measure(num_decoding) else MAX_SLOWER * self._alone_s(num_decoding)

    def step_s(self, num_tokens: int) -> float:
        """What a step with so many tokens takes, none of a prompt; kindly estimated where that is not known.

        0.0 while nothing is known, infinity far beyond what is: who wants to know goes there in steps. One step that
        was held up, or was measured while others ran, may not keep anybody from trying again.
        """
        if self._true_until.get(num_tokens, -1) >= self._num_steps:
            return self._decode_s[num_tokens]
        known = sorted(self._decode_s.keys() - {num_tokens})
        if not known or num_tokens < known[0]:
            return self._alone_s(num_tokens)
        at = bisect(known, num_tokens)
        low, high = (known[at - 1], known[at]) if at < len(known) else (known[max(0, at - 2)], known[-1])
        slope = (self._decode_s[high] - self._decode_s[low]) / max(1, high - low)
        if at == len(known):
            low, slope = high, max(slope, _LIKELY_SLOPE * self._decode_s[high] / high)
        is_far = num_tokens > (1 + _MAX_JUMP) * known[-1]
        likely_s = math.inf if is_far else self._decode_s[low] + slope * (num_tokens - low)
        return min(likely_s, self._decode_s.get(num_tokens, math.inf))

    def note_beside(self) -> None:
        """Learn from a step beside which others were computed: nothing but that there was one."""
        self._num_with_prompts += 1

    def note(self, num_decoding: int, prompts: Sequence[Chunk], seconds: float) -> None:
        """Learn from a step."""
        if not prompts:
            self._note_decoding(num_decoding, seconds)
            return
        self._num_with_prompts += 1
        alone_s = self._alone_s(num_decoding) if num_decoding else 0.0
        if seconds <= 0 or (num_decoding and not alone_s):
            return
        num_tokens = whole_tiles(num_decoding + sum(chunk.num_tokens for chunk in prompts), self._tile) - num_decoding
        num_attended = sum(chunk.num_attended for chunk in prompts)
        prompts_s = max(seconds - alone_s, seconds / 4)
        if self._costs is None:
            token_s = prompts_s / (num_tokens + num_attended / _LIKELY_EQUAL)
            self._costs = Costs(token_s, token_s / _LIKELY_EQUAL)
        else:
            likely_s = _moved(self._costs.of(num_tokens, num_attended), prompts_s)
            self._costs = self._costs.moved(num_tokens, num_attended, likely_s)

    def _note_decoding(self, count: int, seconds: float) -> None:
        """The quicker of two steps counts, as any may be held up; where both are far from what is known, at once."""
        likely_s, known_s = min(seconds, self._last_s.get(count, seconds)), self._decode_s.get(count, 0.0)
        self._num_steps += 1
        self._true_until[count] = self._num_steps + (_TRUE_FOR if count in self._last_s else _TRUE_ONCE_FOR)
        is_new = _is_far(likely_s, known_s)
        self._decode_s[count] = likely_s if is_new else known_s + _SHARE_OF_NEWEST * (likely_s - known_s)
        self._last_s[count] = seconds
        self._is_doubtful = not known_s or _is_far(seconds, self._decode_s[count])
        self._num_with_prompts = 0

    def _must_measure(self, num_decoding: int) -> bool:
        if not self._is_due(num_decoding):
            return False
        self._num_with_prompts = 0
        return True

    def _is_due(self, num_decoding: int) -> bool:
        """Whether it is time for a step without prompts."""
        is_known = 4 * abs(self._nearest(num_decoding) - num_decoding) <= num_decoding
        return self._num_with_prompts >= (1 if not is_known else _DOUBT_AFTER if self._is_doubtful else _MEASURE_AFTER)

    def _nearest(self, num_decoding: int) -> int:
        """The nearest number of decoding requests that was measured; 0 before the first."""
        return min(self._decode_s, key=lambda known: abs(known - num_decoding), default=0)

    def _alone_s(self, num_decoding: int) -> float:
        """A step of so many decoding requests, by the nearest number that was measured; 0.0 while there is none."""
        nearest = self._nearest(num_decoding)
        return self._decode_s[nearest] * min(1.0, num_decoding / nearest) if nearest else 0.0


def _is_far(measured: float, known: float) -> bool:
    return not known / _FAR <= measured <= known * _FAR


def _moved(estimate: float, measured: float) -> float:
    """Nearer to what was measured; one step that was held up does not change much."""
    newest = min(max(measured, estimate / _MAX_JUMP), estimate * _MAX_JUMP)
    return estimate + _SHARE_OF_NEWEST * (newest - estimate)

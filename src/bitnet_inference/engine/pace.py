"""How many tokens of prompts a step may have while other requests decode."""

from __future__ import annotations

import math
from bisect import bisect

# A step with prompt tokens takes at most so many times one without, as far as the estimates are right.
MAX_SLOWER = 3.75
_SHARE_OF_NEWEST = 0.25
_MAX_JUMP = 2.0
_LIKELY_SLOPE = 0.1  # a step with twice the tokens takes a tenth longer, where weights are what is waited for


class Pace:
    """Estimates from measured steps, so that running streams go on while prompts enter.

    A step costs what its decoding requests cost alone, and the same for each token of a prompt. What is not known is
    taken to be expensive. The estimates decide how prompts are cut, which no result depends on.
    """

    def __init__(self, tile: int) -> None:
        """A step has a multiple of `tile` tokens, those of the decoding requests among them."""
        self._tile = tile
        self._decode_s: dict[int, float] = {}  # by the number of tokens, of requests that decode and their drafts
        self._prompt_token_s: float | None = None

    def max_prompt_tokens(self, num_decoding: int) -> int:
        """So many tokens of prompts a step may have beside requests that decode: whole tiles, at least half of one."""
        count = float(self._tile)
        if self._decode_s and self._prompt_token_s:
            count = max(count, (MAX_SLOWER - 1) * self._alone_s(num_decoding) / self._prompt_token_s)
        in_tiles = int(num_decoding + count) // self._tile * self._tile - num_decoding
        return in_tiles if 2 * in_tiles >= self._tile else in_tiles + self._tile

    def step_s(self, num_tokens: int) -> float:
        """What a step with so many tokens takes, none of a prompt; kindly estimated where it was never measured.

        0.0 while nothing is known, infinity far beyond what is: who wants to know goes there in steps.
        """
        known = sorted(self._decode_s)
        if num_tokens in self._decode_s or not known or num_tokens < known[0]:
            return self._alone_s(num_tokens)
        at = bisect(known, num_tokens)
        low, high = (known[at - 1], known[at]) if at < len(known) else (known[max(0, at - 2)], known[-1])
        slope = (self._decode_s[high] - self._decode_s[low]) / max(1, high - low)
        if at == len(known):
            low, slope = high, max(slope, _LIKELY_SLOPE * self._decode_s[high] / high)
        is_far = num_tokens > (1 + _MAX_JUMP) * known[-1]
        return math.inf if is_far else self._decode_s[low] + slope * (num_tokens - low)

    def note(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step."""
        if num_prompt_tokens == 0:
            self._decode_s[num_decoding] = _moved(self._decode_s.get(num_decoding), seconds)
            return
        if num_decoding and not self._decode_s:  # prompts never paused: decoding is what they leave, as far as known
            prompts_s = num_prompt_tokens * self._prompt_token_s if self._prompt_token_s else seconds
            self._decode_s[num_decoding] = max(seconds - prompts_s, seconds / 4)
        alone_s = self._alone_s(num_decoding) if num_decoding else 0.0
        self._prompt_token_s = _moved(self._prompt_token_s, max(seconds - alone_s, seconds / 4) / num_prompt_tokens)

    def _alone_s(self, num_decoding: int) -> float:
        """A step of so many decoding requests, by the nearest number that was measured."""
        nearest = min(self._decode_s, key=lambda known: abs(known - num_decoding), default=0)
        return self._decode_s[nearest] * min(1.0, num_decoding / nearest) if nearest else 0.0


def _moved(estimate: float | None, measured: float) -> float:
    """Nearer to what was measured; one step that was held up does not change much."""
    if not estimate:
        return measured
    newest = min(max(measured, estimate / _MAX_JUMP), estimate * _MAX_JUMP)
    return estimate + _SHARE_OF_NEWEST * (newest - estimate)

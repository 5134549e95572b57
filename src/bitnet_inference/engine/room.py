"""What a step has left for prompts."""

from __future__ import annotations

import math
from typing import NamedTuple


class Chunk(NamedTuple):
    """Tokens that a prompt has in a step, from a position on."""

    position: int
    num_tokens: int

    @property
    def num_attended(self) -> float:
        """The positions that its tokens attend to, in sum."""
        return self.num_tokens * (self.position + self.num_tokens / 2)


class Costs(NamedTuple):
    """Seconds that prompts add to a step: for a token, and for each position that it attends to."""

    token_s: float
    position_s: float

    def of(self, num_tokens: int, num_attended: float) -> float:
        """Seconds for so many."""
        return self.token_s * num_tokens + self.position_s * num_attended

    def moved(self, num_tokens: int, num_attended: float, seconds: float) -> Costs:
        """The nearest costs, by what each makes of them, at which so many take so long."""
        tokens_s, attended_s = self.token_s * num_tokens, self.position_s * num_attended
        change = (seconds - tokens_s - attended_s) / (tokens_s**2 + attended_s**2)
        return Costs(self.token_s * (1 + change * tokens_s), self.position_s * (1 + change * attended_s))


def whole_tiles(num_tokens: int, tile: int) -> int:
    """So many tokens, and what fills up the last tile."""
    return -(-num_tokens // tile) * tile


class Room:
    """So many tokens, however long they take. Who gets less than it wants gets the last."""

    def __init__(self, num_tokens: int) -> None:
        """At least 0 tokens."""
        self._num_left = num_tokens

    @property
    def is_left(self) -> bool:
        """Whether the next one to take some gets a token."""
        return self._num_left > 0

    def take(self, position: int, num_wanted: int) -> int:
        """How many tokens a prompt gets that goes on at a position; at least 1 while there `is_left`."""
        count = min(num_wanted, self._num_left)
        self._num_left = self._num_left - count if count == num_wanted else 0
        return count


class TimedRoom(Room):
    """A room that ends, too, when the step is likely to take its time.

    Matrix products do whole tiles of tokens, attention goes by the token. So prompts fill the last tile for which there
    is time; or get a part of one more, where the step has more tokens a second so: far down a long prompt, where it is
    attention that takes the time. Half a tile they get in any case.
    """

    def __init__(
        self, num_tokens: int, num_decoding: int, tile: int, costs: Costs, step_s: float, most_s: float
    ) -> None:
        """At most so many tokens. The step takes `step_s` for those that decode, and may take `most_s`."""
        super().__init__(num_tokens)
        self._tile, self._costs, self._step_s, self._most_s = tile, costs, step_s, most_s
        self._num_decoding = self._num_used = num_decoding  # tokens in the step: at first, and so far

    def take(self, position: int, num_wanted: int) -> int:
        """How many tokens a prompt gets that goes on at a position; at least 1 while there `is_left`."""
        least = 1 if self._num_used > self._num_decoding else max(1, self._tile // 2)
        count = super().take(position, min(num_wanted, max(least, self._num_fitting(position))))
        self._step_s += self._cost_s(position, count)
        self._num_used += count
        if count < num_wanted or not self._num_fitting(0):
            self._num_left = 0
        return count

    def _num_fitting(self, position: int) -> int:
        left_s = self._most_s - self._step_s
        num_paid, token_s = self._num_paid(self._num_used), self._costs.token_s
        last = self._num_used + self._num_in(left_s + token_s * (num_paid - self._num_used), position, token_s)
        end = last // self._tile * self._tile
        in_tiles = max(0, end - self._num_used)
        next_end = end + self._tile
        in_part = self._num_in(left_s - token_s * (next_end - num_paid), position, 0.0)
        in_part = min(in_part, next_end - self._num_used)
        is_better = in_part > in_tiles and self._speed(position, in_part) > self._speed(position, in_tiles)
        return in_part if is_better else in_tiles

    def _num_in(self, seconds: float, position: int, token_s: float) -> int:
        """How many tokens from a position on take so long, of which each costs `token_s` and what it attends to."""
        if seconds <= 0:
            return 0
        linear_s = token_s + self._costs.position_s * position
        return int(2 * seconds / (linear_s + math.sqrt(linear_s**2 + 2 * self._costs.position_s * seconds)))

    def _speed(self, position: int, count: int) -> float:
        num_prompt_tokens = self._num_used - self._num_decoding + count
        return num_prompt_tokens / (self._step_s + self._cost_s(position, count))

    def _cost_s(self, position: int, count: int) -> float:
        num_new = self._num_paid(self._num_used + count) - self._num_paid(self._num_used)
        return self._costs.of(num_new, Chunk(position, count).num_attended)

    def _num_paid(self, num_used: int) -> int:
        """For how many tokens the step's matrix products take their time, where it has so many."""
        return whole_tiles(num_used, self._tile) if num_used > self._num_decoding else num_used

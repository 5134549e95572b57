"""Keys and values of a program whose states hold one sequence each: blocks here, and what the states hold of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.host_blocks import HostBlocks

BLOCK_TOKENS = 32
Rows = NDArray[np.float16]


class Blocks(HostBlocks):
    """Blocks of float16 [2, layers, heads, BLOCK_TOKENS, head_dim]: keys, then values."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int) -> None:
        super().__init__((2, num_layers, num_heads, BLOCK_TOKENS, head_dim), "float16")

    def put(self, table: NDArray[np.int32], first: int, rows: Rows) -> None:
        """Keep rows [2, layers, heads, tokens, head_dim] of the tokens from `first` on of a sequence."""
        for begin, end, block, inside in _pieces(table, first, first + rows.shape[3]):
            self.blocks[block, :, :, :, inside] = rows[:, :, :, begin - first : end - first]

    def get(self, table: NDArray[np.int32], num_tokens: int, context: int) -> Rows:
        """The rows of the first tokens of a sequence, with zeros up to `context` tokens."""
        found = np.zeros((*self.blocks.shape[1:4], context, self.blocks.shape[5]), np.float16)
        for begin, end, block, inside in _pieces(table, 0, num_tokens):
            found[:, :, :, begin:end] = self.blocks[block, :, :, :, inside]
        return found


def _pieces(table: NDArray[np.int32], first: int, last: int) -> list[tuple[int, int, int, slice]]:
    """Where the tokens from `first` to `last` lie: begin, end, block, and the places in it."""
    found = []
    for index in range(first // BLOCK_TOKENS, -(-last // BLOCK_TOKENS)):
        start = index * BLOCK_TOKENS
        begin, end = max(first, start), min(start + BLOCK_TOKENS, last)
        found.append((begin, end, int(table[index]), slice(begin - start, end - start)))
    return found


@dataclass
class Held:
    """A state, and the blocks, in their order, whose first `num_tokens` tokens are in it."""

    state: Any
    blocks: tuple[int, ...] = ()
    num_tokens: int = 0

    def has(self, blocks: tuple[int, ...], num_tokens: int) -> bool:
        """Whether the first tokens in these blocks are in the state; what is behind them is not seen."""
        used = -(-num_tokens // BLOCK_TOKENS)
        return num_tokens <= self.num_tokens and self.blocks[:used] == blocks[:used]


class States:
    """Up to `max_states` states of a program; the one that was used longest ago is given to the next sequence."""

    def __init__(self, make: Callable[[], Any], max_states: int) -> None:
        self._make, self._max = make, max_states
        self._held: list[Held] = []  # the one that was used last stands last

    def take(self, table: NDArray[np.int32], num_tokens: int) -> Held:
        """The state with the first tokens in these blocks; where there is none, one that holds something else."""
        blocks = tuple(map(int, table))
        fitting = [each for each in self._held if num_tokens and each.has(blocks, num_tokens)]
        if fitting:
            found = max(fitting, key=lambda each: each.num_tokens == num_tokens)
        elif len(self._held) < self._max:
            self._held.append(found := Held(self._make()))
        else:
            found = self._held[0]
        self._held.remove(found)
        self._held.append(found)
        return found

    def forget(self, changed: set[int], but: Held | None = None) -> None:
        """No state holds what is in these blocks any more, but one."""
        for each in self._held:
            if each is not but and changed.intersection(each.blocks[: -(-each.num_tokens // BLOCK_TOKENS)]):
                each.blocks, each.num_tokens = (), 0

    def clear(self) -> None:
        """Give the states back."""
        self._held.clear()

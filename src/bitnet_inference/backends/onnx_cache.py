"""The KV cache of a graph that knows no blocks: they are kept here, and gathered for one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.host_blocks import HostBlocks

BLOCK_TOKENS = 32


class OnnxCache(HostBlocks):
    """Blocks [planes, heads, BLOCK_TOKENS, head_dim]; planes are the keys and the values of every layer.

    What the last sequence has come to is kept as it is, so that its next step need not be gathered.
    """

    def __init__(self, num_planes: int, num_heads: int, head_dim: int, dtype: str) -> None:
        super().__init__((num_planes, num_heads, BLOCK_TOKENS, head_dim), dtype)
        self._past, self._present = np.empty(0, dtype), np.empty(0, dtype)
        self._held = (b"", 0)  # the blocks, and how many tokens of them, that are gathered in `_past`

    def reserve(self, num_blocks: int) -> None:
        """See HostBlocks."""
        self._held = (b"", 0)
        super().reserve(num_blocks)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """See HostBlocks."""
        self._held = (b"", 0)
        super().copy(pairs)

    def gather(self, blocks: NDArray[np.int32], num_tokens: int) -> NDArray[Any]:
        """The first tokens that lie in these blocks: [planes, heads, num_tokens, head_dim]; valid until `keep`."""
        past = self._past = _with_room(self._past, self._size(num_tokens))
        view = self._view(past, num_tokens)
        if self._held != (_key(blocks, num_tokens), num_tokens):
            for index, start in enumerate(range(0, num_tokens, BLOCK_TOKENS)):
                end = min(start + BLOCK_TOKENS, num_tokens)
                view[:, :, start:end] = self.blocks[blocks[index], :, :, : end - start]
            self._held = (_key(blocks, num_tokens), num_tokens)
        return view

    def present(self, num_tokens: int) -> NDArray[Any]:
        """Where the same of so many tokens is to be written, to be kept then; valid until `keep`."""
        self._present = _with_room(self._present, self._size(num_tokens))
        return self._view(self._present, num_tokens)

    def keep(self, blocks: NDArray[np.int32], first: int, num_tokens: int) -> None:
        """Put the tokens from `first` on that were written to `present` into these blocks."""
        view = self._view(self._present, num_tokens)
        for index in range(first // BLOCK_TOKENS, -(-num_tokens // BLOCK_TOKENS)):
            start = index * BLOCK_TOKENS
            begin, end = max(first, start), min(start + BLOCK_TOKENS, num_tokens)
            self.blocks[blocks[index], :, :, begin - start : end - start] = view[:, :, begin:end]
        self._past, self._present = self._present, self._past
        self._held = (_key(blocks, num_tokens), num_tokens)

    def close(self) -> None:
        """Give the memory back."""
        self.blocks = self.blocks[:0].copy()
        self._past = self._present = self._past[:0].copy()
        self._held = (b"", 0)

    def _size(self, num_tokens: int) -> int:
        _, num_planes, num_heads, _, head_dim = self.blocks.shape
        return int(num_planes * num_heads * num_tokens * head_dim)

    def _view(self, room: NDArray[Any], num_tokens: int) -> NDArray[Any]:
        shape = (*self.blocks.shape[1:3], num_tokens, self.blocks.shape[4])
        return room[: self._size(num_tokens)].reshape(shape)


def _key(blocks: NDArray[np.int32], num_tokens: int) -> bytes:
    return blocks[: -(-num_tokens // BLOCK_TOKENS)].tobytes()


def _with_room(room: NDArray[Any], size: int) -> NDArray[Any]:
    """The array itself, or a larger one, a half more than is needed: memory that is touched already is faster."""
    return room if len(room) >= size else np.zeros(size * 3 // 2, room.dtype)

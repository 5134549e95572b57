"""The KV cache of a graph that knows no blocks: they are kept here, and gathered for one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.config import available_bytes
from bitnet_inference.errors import OutOfMemory

BLOCK_TOKENS = 32


class OnnxCache:
    """Blocks [planes, heads, BLOCK_TOKENS, head_dim]; planes are the keys and the values of every layer.

    What the last sequence has come to is kept as it is, so that its next step need not be gathered.
    """

    def __init__(self, num_planes: int, num_heads: int, head_dim: int, dtype: str) -> None:
        self._block = (num_planes, num_heads, BLOCK_TOKENS, head_dim)
        self._blocks: NDArray[Any] = np.empty((0, *self._block), dtype)
        self._past, self._present = np.empty(0, dtype), np.empty(0, dtype)
        self._held = (b"", 0)  # the blocks, and how many tokens of them, that are gathered in `_past`
        self.block_bytes: int = int(np.prod(self._block)) * self._blocks.itemsize

    @property
    def num_bytes(self) -> int:
        """Memory of the reserved blocks."""
        return self._blocks.nbytes

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many blocks; what was cached before is gone. Raises OutOfMemory."""
        wanted = num_blocks * self.block_bytes
        too_much = f"a cache of {num_blocks} blocks takes {wanted >> 20} MB: lower the context or the load"
        if wanted > available_bytes():
            raise OutOfMemory(too_much)
        self._held = (b"", 0)
        try:
            self._blocks = np.zeros((num_blocks, *self._block), self._blocks.dtype)
        except MemoryError as error:
            raise OutOfMemory(too_much) from error

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in order."""
        self._held = (b"", 0)
        for source, target in pairs:
            self._blocks[target] = self._blocks[source]

    def gather(self, blocks: NDArray[np.int32], num_tokens: int) -> NDArray[Any]:
        """The first tokens that lie in these blocks: [planes, heads, num_tokens, head_dim]; valid until `keep`."""
        past = self._past = _with_room(self._past, self._size(num_tokens))
        view = self._view(past, num_tokens)
        if self._held != (_key(blocks, num_tokens), num_tokens):
            for index, start in enumerate(range(0, num_tokens, BLOCK_TOKENS)):
                end = min(start + BLOCK_TOKENS, num_tokens)
                view[:, :, start:end] = self._blocks[blocks[index], :, :, : end - start]
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
            self._blocks[blocks[index], :, :, begin - start : end - start] = view[:, :, begin:end]
        self._past, self._present = self._present, self._past
        self._held = (_key(blocks, num_tokens), num_tokens)

    def close(self) -> None:
        """Give the memory back."""
        self._blocks = self._blocks[:0].copy()
        self._past = self._present = self._past[:0].copy()
        self._held = (b"", 0)

    def _size(self, num_tokens: int) -> int:
        return self._block[0] * self._block[1] * num_tokens * self._block[3]

    def _view(self, room: NDArray[Any], num_tokens: int) -> NDArray[Any]:
        shape = (*self._block[:2], num_tokens, self._block[3])
        return room[: self._size(num_tokens)].reshape(shape)


def _key(blocks: NDArray[np.int32], num_tokens: int) -> bytes:
    return blocks[: -(-num_tokens // BLOCK_TOKENS)].tobytes()


def _with_room(room: NDArray[Any], size: int) -> NDArray[Any]:
    """The array itself, or a larger one, a half more than is needed: memory that is touched already is faster."""
    return room if len(room) >= size else np.empty(size * 3 // 2, room.dtype)

"""Who holds which block of the KV cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class BlockPool:
    """Block ids 0 to num_blocks - 1, counted references, and the free ones in the order in which they became free."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._num_references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """So many free blocks, each with one reference; the caller has made sure that there are enough."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            assert self._num_references[block] == 0, f"free block {block} is referenced"
            self._num_references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of the blocks."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is free and cannot be shared"
            self._num_references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less; a block without any is free."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is freed twice"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._free.append(block)

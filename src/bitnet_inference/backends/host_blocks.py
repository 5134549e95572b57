"""Cache blocks in the host's memory, for runtimes that know no blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.amounts import told_bytes
from bitnet_inference.config import available_bytes
from bitnet_inference.errors import OutOfMemory


class HostBlocks:
    """`blocks`: as many of this shape as are reserved, in one array."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.blocks: NDArray[Any] = np.empty((0, *shape), dtype)
        self.block_bytes: int = math.prod(shape) * self.blocks.itemsize

    @property
    def num_bytes(self) -> int:
        """Memory of the reserved blocks."""
        return self.blocks.nbytes

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many blocks; what was kept before is gone. Raises OutOfMemory."""
        wanted = num_blocks * self.block_bytes
        too_much = f"a cache of {num_blocks} blocks takes {told_bytes(wanted)}: lower the context or the load"
        if wanted > available_bytes():
            raise OutOfMemory(too_much)
        try:
            self.blocks = np.zeros((num_blocks, *self.blocks.shape[1:]), self.blocks.dtype)
        except MemoryError as error:
            raise OutOfMemory(too_much) from error

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in order."""
        for source, target in pairs:
            self.blocks[target] = self.blocks[source]

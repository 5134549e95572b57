"""A growing list of int32 that batches can copy without a loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Ints:
    """int32 values in one array with room to grow; there are `length` of them."""

    def __init__(self, values: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self._keep(np.array(values, dtype=np.int32))
        self.length = len(self._data)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        """One of the values, counted from the first."""
        return self._cells[index]

    @property
    def view(self) -> NDArray[np.int32]:
        """The values, [len]; stale after the next `extend`, `append` or `cut`."""
        return self._data[: self.length]

    def append(self, value: int) -> None:
        """Append one value, sooner than `extend` does."""
        if self.length == len(self._cells):
            self._grow(self.length + 1)
        self._cells[self.length] = value
        self.length += 1

    def extend(self, values: Sequence[int]) -> None:
        """Append the values."""
        length = self.length + len(values)
        if length > len(self._cells):
            self._grow(length)
        self._data[self.length : length] = values
        self.length = length

    def cut(self, length: int) -> None:
        """Keep the first so many values, of at least as many."""
        assert 0 <= length <= self.length, f"{length} of {self.length} values"
        self.length = length

    def _grow(self, length: int) -> None:
        grown = np.empty(max(2 * len(self._data), length, 16), dtype=np.int32)
        grown[: self.length] = self.view
        self._keep(grown)

    def _keep(self, data: NDArray[np.int32]) -> None:
        self._data, self._cells = data, data.data  # a memoryview, which gives and takes a single value sooner

"""A growing list of int32 that batches can copy without a loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Ints:
    """int32 values in one array with room to grow."""

    def __init__(self, values: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self._data = np.array(values, dtype=np.int32)
        self._length = len(self._data)

    def __len__(self) -> int:
        return self._length

    @property
    def view(self) -> NDArray[np.int32]:
        """The values, [len]; stale after the next `extend` or `clear`."""
        return self._data[: self._length]

    def extend(self, values: Sequence[int]) -> None:
        """Append the values."""
        length = self._length + len(values)
        if length > len(self._data):
            grown = np.empty(max(2 * len(self._data), length, 16), dtype=np.int32)
            grown[: self._length] = self.view
            self._data = grown
        if len(values) == 1:  # most often; a single value is set sooner than a slice
            self._data[self._length] = values[0]
        else:
            self._data[self._length : length] = values
        self._length = length

    def cut(self, length: int) -> None:
        """Keep the first so many values, of at least as many."""
        assert 0 <= length <= self._length, f"{length} of {self._length} values"
        self._length = length

    def clear(self) -> None:
        """Drop all values."""
        self.cut(0)

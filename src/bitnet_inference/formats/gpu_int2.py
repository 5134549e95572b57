"""The 2-bit packing of Microsoft's GPU kernels, as bytes of our own layout U2.

A matrix [out, in] is cut into tiles of 16 rows and 32 columns, one behind the other along the columns. A tile has 32
runs of 16 columns, of 4 bytes each: rows 0 to 7 of its left half, then of its right half, then rows 8 to 15 likewise.
Byte b of a run has its columns b, 4 + b, 8 + b and 12 + b from the low bits on, as in U2, but as value + 2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.ternary import GROUP_ROWS, STEP_BYTES

TILE_ROWS, TILE_COLUMNS = 16, 32
_RUN_COLUMNS = 16
_LOW_BITS = np.uint32(0x55555555)  # also a run of weights 0 in U2


def runs_of(packed: NDArray[np.int8]) -> NDArray[np.uint32]:
    """Packed weights int8 [out, in / 4] to their runs in U2's code: uint32 [out, in / 16].

    Raises ValueError, naming row and column, where a field is 0, which stands for no value, and for sizes that tiles
    don't divide.
    """
    rows, columns = packed.shape[0], 4 * packed.shape[1]
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        raise ValueError(f"{rows} by {columns} weights are no whole tiles of {TILE_ROWS} by {TILE_COLUMNS}")
    tiles = packed.view("<u4").reshape(rows // TILE_ROWS, columns // TILE_COLUMNS, 2, 2, 8)
    runs = tiles.transpose(0, 2, 4, 1, 3).reshape(rows, columns // _RUN_COLUMNS)
    is_nothing = ~(runs | runs >> np.uint32(1)) & _LOW_BITS  # the low bit of every field that is 0
    if is_nothing.any():
        row, run = np.argwhere(is_nothing)[0]
        field = int(is_nothing[row, run] & -is_nothing[row, run].astype(np.int64)).bit_length() // 2
        column = _RUN_COLUMNS * int(run) + 4 * (field % 4) + field // 4
        raise ValueError(f"row {row}, column {column} holds the 2-bit code 0: codes are 1, 2 and 3")
    result: NDArray[np.uint32] = runs - _LOW_BITS
    return result


def u2_of(runs: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Runs uint32 [out, in / 16] to U2 uint8 [ceil(out / 32), in / 16, 128]."""
    rows, steps = runs.shape
    padded = np.full((-(-rows // GROUP_ROWS) * GROUP_ROWS, steps), _LOW_BITS, "<u4")
    padded[:rows] = runs
    groups = padded.reshape(-1, GROUP_ROWS, steps).transpose(0, 2, 1)
    return np.ascontiguousarray(groups).view(np.uint8).reshape(-1, steps, STEP_BYTES)

"""Weights on a CUDA device, in the one layout that every product of theirs reads.

Integer matrices lie in tiles of 16 rows and 256 columns, row by row; the tiles of the same rows follow each other. A
row of an int8 tile has 256 bytes. One of a ternary tile has 64: the two highest bits of byte c are column c, a signed
number, the next two are column c + 64, and so on. So a byte that is shifted left by two bits a field and masked by
0xC0 is 64 times a weight, with its sign, and 64 bytes give 64 columns side by side. What only fills up tiles is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.checkpoint import Dense, Ternary

TILE_ROWS, TILE_COLUMNS = 16, 256
TERNARY_UNIT = 64  # what a weight of 1 is as an int8 operand
_STAGED_ROWS = 2048  # rows that are unpacked at a time
_ALIGNED_BYTES = 16  # of rows of dense matrices
_DENSE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TernaryWeight:
    """Ternary matrices of the same width, one below the other.

    `scales` is float32 [rows]; where `group_size` columns share a scale [groups of all tiles, rows], also of matrices
    that have one scale for all.
    """

    def __init__(self, matrices: Sequence[Ternary], device: torch.device) -> None:
        """Raises ValueError for bytes that are no weights, Unsupported for matrices too wide for exact sums."""
        self.rows, self.columns = _stacked_shape([matrix.shape for matrix in matrices], 127 * TERNARY_UNIT)
        self.group_size = max(matrix.group_size for matrix in matrices)
        self.is_hopper = _is_hopper(device)
        self.tiles = _tiles(self.rows, self.columns, TILE_COLUMNS // 4, device)
        begin = 0
        for matrix in matrices:
            codes = _codes(matrix)
            _fill(self.tiles, begin, codes, _packed)
            begin += matrix.shape[0]
        parts = [_scales(matrix, self.group_size) for matrix in matrices]
        self.scales = torch.from_numpy(np.concatenate(parts, axis=-1)).to(device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return int(self.tiles.nbytes + self.scales.nbytes)


class Int8Weight:
    """Dense matrices of the same width, one below the other, rounded to int8 with a scale a row: float32 [rows]."""

    def __init__(self, matrices: Sequence[Dense], device: torch.device) -> None:
        """Raises ValueError for weights that are not finite, Unsupported for matrices too wide for exact sums."""
        self.rows, self.columns = _stacked_shape([matrix.data.shape for matrix in matrices], 127 * 127)
        self.group_size = 0
        self.is_hopper = _is_hopper(device)
        self.tiles = _tiles(self.rows, self.columns, TILE_COLUMNS, device)
        self.scales = torch.empty(self.rows, dtype=torch.float32, device=device)
        begin = 0
        for matrix in matrices:
            for first in range(0, len(matrix.data), _STAGED_ROWS):
                codes, scales = ternary.quantize_weights(_floats(matrix, slice(first, first + _STAGED_ROWS)))
                _fill(self.tiles, begin, codes, _whole)
                self.scales[begin : begin + len(codes)] = torch.from_numpy(scales).to(device)
                begin += len(codes)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return int(self.tiles.nbytes + self.scales.nbytes)


class DenseWeight:
    """Dense matrices of the same width, one below the other, in the dtype that they have; float32 where dtypes differ.

    `data` is [rows, columns] with rows that begin on multiples of 16 bytes.
    """

    def __init__(self, matrices: Sequence[Dense], device: torch.device) -> None:
        self.rows, self.columns = _stacked_shape([matrix.data.shape for matrix in matrices], 1)
        dtypes = {matrix.dtype for matrix in matrices}
        dtype = _DENSE_DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32
        aligned = _ALIGNED_BYTES // dtype.itemsize
        stride = -(-self.columns // aligned) * aligned
        self._room = torch.zeros((self.rows, stride), dtype=dtype, device=device)
        self.data = self._room[:, : self.columns]
        begin = 0
        for matrix in matrices:
            for first in range(0, len(matrix.data), _STAGED_ROWS):
                part = _tensor(matrix, slice(first, first + _STAGED_ROWS))
                self.data[begin : begin + len(part)] = part.to(device)
                begin += len(part)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return int(self._room.nbytes)


def _stacked_shape(shapes: Sequence[tuple[int, ...]], largest_product: int) -> tuple[int, int]:
    columns = shapes[0][1]
    assert all(shape[1] == columns for shape in shapes), "stacked matrices have one width"
    if columns * largest_product >= 1 << 31:
        most = ((1 << 31) - 1) // largest_product
        raise Unsupported(f"a matrix has {columns} columns, at most {most} fit into sums of int32: choose the CPU")
    return sum(shape[0] for shape in shapes), columns


def _codes(matrix: Ternary) -> NDArray[np.int8]:
    codes = ternary.unpack(np.ascontiguousarray(matrix.data), matrix.layout, matrix.shape)
    if matrix.layout == "codes" and codes.size and (codes.min() < -1 or codes.max() > 1):  # others cannot hold more
        raise ValueError("a weight is none of -1, 0 and 1")
    return codes


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device)[0] == 9)


def _tiles(rows: int, columns: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [tiles of rows, tiles of columns, 16, row_bytes], all weights 0."""
    shape = (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_ROWS, row_bytes)
    return torch.zeros(shape, dtype=torch.uint8, device=device)


def _fill(tiles: torch.Tensor, begin: int, codes: NDArray[np.int8], pack: Any) -> None:
    """Write rows of codes, from row `begin` of the stack on, into their tiles."""
    first = 0
    while first < len(codes):
        row = begin + first
        count = min(len(codes) - first, _STAGED_ROWS - row % TILE_ROWS)
        part = torch.from_numpy(np.ascontiguousarray(codes[first : first + count])).to(tiles.device)
        _place(tiles, row, pack(_padded(part)))
        first += count


def _padded(codes: torch.Tensor) -> torch.Tensor:
    """int8 [rows, tiles of columns, 256]."""
    missing = -codes.shape[1] % TILE_COLUMNS
    return torch.nn.functional.pad(codes, (0, missing)).view(len(codes), -1, TILE_COLUMNS)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    fields = (codes.view(torch.uint8) & 3).view(*codes.shape[:2], 4, TILE_COLUMNS // 4)
    joined: torch.Tensor = fields[:, :, 0] << 6 | fields[:, :, 1] << 4 | fields[:, :, 2] << 2 | fields[:, :, 3]
    return joined


def _whole(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def _place(tiles: torch.Tensor, row: int, rows: torch.Tensor) -> None:
    """rows: uint8 [count, tiles of columns, bytes]; tiles of rows may be filled in parts."""
    index = torch.arange(row, row + len(rows), device=tiles.device)
    tiles[index // TILE_ROWS, :, index % TILE_ROWS] = rows


def _scales(matrix: Ternary, group_size: int) -> NDArray[np.float32]:
    """float32 [rows], or [groups, rows]."""
    rows, columns = matrix.shape
    if not group_size:
        return np.full(rows, matrix.scale, np.float32)
    assert matrix.group_size in (0, group_size), "groups of stacked matrices have one size"
    scales = np.zeros((-(-columns // TILE_COLUMNS) * TILE_COLUMNS // group_size, rows), np.float32)
    scales[: -(-columns // group_size)] = np.asarray(matrix.scale, np.float32).T
    return scales


def _tensor(matrix: Dense, rows: slice) -> torch.Tensor:
    """These rows, as they are, in memory of their own."""
    data = np.array(matrix.data[rows], order="C")  # of a file that is mapped: torch wants memory that can be written
    if matrix.dtype == "bfloat16":
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)


def _floats(matrix: Dense, rows: slice) -> NDArray[np.float32]:
    floats: NDArray[np.float32] = _tensor(matrix, rows).float().numpy()
    if not np.isfinite(floats).all():
        raise ValueError("a weight is NaN or infinite")
    return floats

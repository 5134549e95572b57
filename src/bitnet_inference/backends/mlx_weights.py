"""Weights as MLX arrays, read from a checkpoint one stack after the other, and what they make of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.backends.mlx_metal import MAX_DENSE_TOKENS, MAX_TERNARY_TOKENS, MetalProducts
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, is_projection
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.model.loader import sound_matrix

MAX_COLUMNS = ((1 << 24) - 1) // 127  # as many times 127 is a whole number that float32 holds
GROUP_COLUMNS = 128  # of weights without groups: MLX wants some
_CHUNK_WEIGHTS = 1 << 24  # of a dense matrix that become float32 at a time
_PACKED_ROWS = 64  # at a time, which stay in the processor's cache
_OFFSETS = {2: 1, 8: 128}  # added to codes of so many bits, so that none is negative
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


class Codes(NamedTuple):
    """Matrices of whole numbers in `bits` bits, one below the other, whose rows or groups of columns have scales.

    `packed`: uint32 [out, padded columns * bits / 32], code + offset, low bits first. `scales`, `biases`: float32
    [out, groups of group_size columns]: what MLX makes of the bits is bits * scale + bias. `row_scales`: float32 [out],
    by which sums are multiplied; None where groups have the scales. `rows`: of each matrix.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    row_scales: mx.array | None
    bits: int
    group_size: int
    columns: int
    rows: tuple[int, ...]

    def product(self, codes: mx.array, inverse: mx.array, metal: MetalProducts | None) -> mx.array:
        """The sums of `codes` times these, times all scales: float32 [tokens, out]. See quantized_rows."""
        missing = self.packed.shape[1] * 32 // self.bits - self.columns
        if missing:
            codes = mx.pad(codes, ((0, 0), (0, missing)))
        if metal and self.bits == 2 and self.row_scales is not None and len(codes) <= MAX_TERNARY_TOKENS:
            return metal.ternary(codes, self.packed, self.row_scales, inverse)
        sums = mx.quantized_matmul(
            codes, self.packed, self.scales, self.biases, group_size=self.group_size, bits=self.bits
        )
        return sums * (inverse if self.row_scales is None else self.row_scales * inverse)


class Floats(NamedTuple):
    """A matrix [out, in] of floats, as wide as in the file."""

    data: mx.array

    def product(self, x: mx.array, metal: MetalProducts | None) -> mx.array:
        """x @ W^T in float32: [tokens, out]."""
        if self.data.dtype == mx.float32:
            return x @ self.data.T
        if metal and len(x) <= MAX_DENSE_TOKENS:
            return metal.dense(x, self.data)
        step = max(1, _CHUNK_WEIGHTS // self.data.shape[1])
        starts = range(0, self.data.shape[0], step)
        return mx.concatenate([x @ self.data[at : at + step].astype(mx.float32).T for at in starts], axis=1)


Stack = tuple[Codes | Floats, ...]


def quantized_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """As ternary.quantize_rows: codes, in float32 [tokens, in], and the reciprocals of the scales [tokens, 1]."""
    largest = mx.maximum(mx.abs(x).max(axis=1, keepdims=True), 1e-5)
    scales = mx.reciprocal(largest) * 127
    return mx.round(x * scales), mx.reciprocal(scales)


def products(x: mx.array, stack: Stack, metal: MetalProducts | None) -> tuple[mx.array, ...]:
    """x @ W^T for every matrix of the stack; for those of codes, of x rounded to int8 by row.

    Sums of ternary codes are exact: MLX adds whole numbers in float32, and MAX_COLUMNS keeps them below 2^24. Those of
    8 bits are rounded from there on, and where groups have scales, what is added is rounded.
    """
    rounded = quantized_rows(x) if any(isinstance(part, Codes) for part in stack) else None
    results: list[mx.array] = []
    for part in stack:
        if isinstance(part, Floats):
            results.append(part.product(x, metal))
        else:
            assert rounded is not None
            results += mx.split(part.product(*rounded, metal), list(accumulate(part.rows))[:-1], axis=1)
    return tuple(results)


class _Packed(NamedTuple):
    """A matrix of codes before it is stacked; `scales` of rows or, where group_size is not 0, of groups."""

    words: NDArray[np.uint32]
    scales: NDArray[np.float32]
    bits: int
    group_size: int
    columns: int


class WeightReader:
    """Reads matrices into MLX arrays and lets go of what it read them from."""

    def __init__(self, checkpoint: Checkpoint, quantize: str) -> None:
        """`quantize`: "int8" rounds the dense matrices of layers, see EngineConfig."""
        self._checkpoint, self._quantize = checkpoint, quantize
        self._constants: dict[tuple[int, int, int], mx.array] = {}  # by rows, columns and value: stacks share them

    def read(self, names: Sequence[str]) -> Stack:
        """The matrices under these names. Raises FormatError, and Unsupported where sums would not be exact."""
        parts = [self._read(name) for name in names]
        runs = groupby(parts, key=lambda part: (part.bits, part.group_size) if isinstance(part, _Packed) else id(part))
        stack = tuple(self._stacked(list(run)) for _, run in runs)
        mx.eval(*(array for part in stack for array in part if isinstance(array, mx.array)))
        for name in names:
            self._checkpoint.release(name)
        return stack

    def _read(self, name: str) -> _Packed | Floats:
        matrix = sound_matrix(self._checkpoint, name)
        if isinstance(matrix, Ternary):
            return self._ternary(name, matrix)
        if self._quantize == "int8" and is_projection(name):
            return self._int8(name, matrix)
        bits = matrix.data if matrix.dtype == "float32" else matrix.data.view(np.uint16)
        return Floats(_array(bits).view(_DTYPES[matrix.dtype]))

    def _ternary(self, name: str, matrix: Ternary) -> _Packed:
        rows, columns = matrix.shape
        self._check_width(name, columns)
        try:
            codes = ternary.unpack(matrix.data, matrix.layout, matrix.shape)
            words = packed(codes, 2, matrix.group_size or GROUP_COLUMNS)
        except ValueError as error:
            raise FormatError(self._checkpoint.path, name, f"{error}: download the model again") from error
        scales = matrix.scale if isinstance(matrix.scale, np.ndarray) else np.full(rows, matrix.scale, np.float32)
        return _Packed(words, scales, 2, matrix.group_size, columns)

    def _int8(self, name: str, matrix: Dense) -> _Packed:
        columns = matrix.data.shape[1]
        self._check_width(name, columns)
        words, scales = zip(*(self._rounded(name, part) for part in _chunks(matrix)), strict=True)
        return _Packed(np.concatenate(words), np.concatenate(scales), 8, 0, columns)

    def _rounded(self, name: str, weights: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
        if not np.isfinite(weights).all():
            raise FormatError(self._checkpoint.path, name, "a weight is NaN or infinite: download the model again")
        codes, scales = ternary.quantize_weights(weights)
        return packed(codes, 8, GROUP_COLUMNS), scales

    def _check_width(self, name: str, columns: int) -> None:
        if columns > MAX_COLUMNS:
            what = f"{self._checkpoint.path}: {name} has {columns} columns, but sums are exact up to {MAX_COLUMNS} only"
            raise Unsupported(f'{what} on device "mlx": choose "cpu"')

    def _stacked(self, parts: Sequence[_Packed | Floats]) -> Codes | Floats:
        first = parts[0]
        if isinstance(first, Floats):
            return first
        matrices = [part for part in parts if isinstance(part, _Packed)]
        words = _array(np.concatenate([part.words for part in matrices]))
        scales = _array(np.concatenate([part.scales for part in matrices]))
        rows = tuple(len(part.words) for part in matrices)
        if first.group_size:
            return Codes(words, scales, -scales, None, first.bits, first.group_size, first.columns, rows)
        groups = words.shape[1] * 32 // first.bits // GROUP_COLUMNS
        ones, offsets = (self._constant(len(words), groups, value) for value in (1, -_OFFSETS[first.bits]))
        return Codes(words, ones, offsets, scales, first.bits, GROUP_COLUMNS, first.columns, rows)

    def _constant(self, rows: int, columns: int, value: int) -> mx.array:
        key = (rows, columns, value)
        if key not in self._constants:
            self._constants[key] = mx.full((rows, columns), value, mx.float32)
        return self._constants[key]


def packed(codes: NDArray[np.int8], bits: int, group_size: int) -> NDArray[np.uint32]:
    """Codes int8 [out, in] in 2 or 8 bits each, low bits first, with zeros up to whole groups: uint32 [out, words].

    Raises ValueError for codes of 2 bits that are not -1, 0 or 1.
    """
    rows, columns = codes.shape
    offset = np.uint8(_OFFSETS[bits])
    fields = np.full((rows, -(-columns // group_size) * group_size), offset, np.uint8)
    np.add(codes.view(np.uint8), offset, out=fields[:, :columns])
    if bits == 8:
        return fields.view("<u4")
    if fields.max(initial=0) > 2:
        raise ValueError("ternary codes are -1, 0 and 1 only")
    joined = np.empty((rows, fields.shape[1] // 4), np.uint8)
    for begin in range(0, rows, _PACKED_ROWS):
        four = fields[begin : begin + _PACKED_ROWS].view("<u4")
        joined[begin : begin + _PACKED_ROWS] = four | four >> 6 | four >> 12 | four >> 18
    return joined.view("<u4")


def _chunks(matrix: Dense) -> Iterator[NDArray[np.float32]]:
    step = max(1, _CHUNK_WEIGHTS // matrix.data.shape[1])
    for begin in range(0, len(matrix.data), step):
        yield to_float32(matrix.data[begin : begin + step], matrix.dtype)


def _array(data: NDArray[Any]) -> mx.array:
    return mx.array(np.require(data, requirements=["C", "A"]))

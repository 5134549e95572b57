"""What the weights of a checkpoint become in an ONNX graph, under their canonical names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.conversion import onnx_verbs as verbs
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.formats.onnx_writer import Dtype, Graph, Weight
from bitnet_inference.model.loader import sound_codes, sound_matrix

_BYTES_BLOCK = 32  # columns of a dense matrix that share a scale where it is rounded
_CHUNK_WEIGHTS = 1 << 22  # of a dense matrix, made at a time


class Weights:
    """Adds weights to a graph, and the products with them."""

    def __init__(self, checkpoint: Checkpoint, graph: Graph, is_small: bool) -> None:
        self._checkpoint, self._graph, self._is_small = checkpoint, graph, is_small
        self.shapes = dict(expected_shapes(checkpoint.config))
        self.is_ternary = checkpoint.is_ternary
        self._last: tuple[str, Ternary, NDArray[np.int8]] | None = None  # the matrix that was read last, and its codes

    def vector(self, name: str) -> str:
        """A vector in float32."""
        return self._add(name, "float32", self.shapes[name], lambda: self._checkpoint.vector(name))

    def rows(self, name: str, ids: str) -> str:
        """The rows of a dense matrix for token ids, as they are: what is off here flips codes in every layer."""
        if not self._is_small:
            return self._graph.add("Gather", self._table(name), ids)
        matrix = sound_matrix(self._checkpoint, name)
        assert isinstance(matrix, Dense)
        table = self._add(f"{name}.rows", matrix.dtype, self.shapes[name], lambda: matrix.data)
        return self._graph.cast(self._graph.add("Gather", table, ids), "float32")

    def product(self, name: str, x: str, quantised: Callable[[], verbs.Quantised]) -> str:
        """x times a matrix; `quantised` gives the same rows for ternary ones."""
        if not self.is_ternary(name):
            if self._is_small:
                return verbs.rounded(self._graph, x, *self._bytes(name), self.shapes[name][1])
            return verbs.dense(self._graph, x, self._table(name))
        if self._is_small:
            return verbs.small(self._graph, quantised(), *self._two_bits(name))
        return verbs.ternary(self._graph, quantised(), self._groups(name))

    def _table(self, name: str) -> str:
        """A dense matrix [out, in] in float32, once for embeddings and head where they are tied."""
        return self._graph.weight(Weight(name, "float32", self.shapes[name], lambda: self._floats(name)))

    def _bytes(self, name: str) -> tuple[str, str]:
        """A dense matrix in 8 bits around 128, [out, blocks, columns], and the scales of its blocks."""
        num_out, num_in = self.shapes[name]
        shape = (num_out, -(-num_in // _BYTES_BLOCK))
        codes = Weight(name, "uint8", (*shape, _BYTES_BLOCK), lambda: (_codes(*each) for each in self._blocks(name)))
        scales = Weight(f"{name}.scales", "float32", shape, lambda: (scales for _, scales in self._blocks(name)))
        return self._graph.weight(codes), self._graph.weight(scales)

    def _blocks(self, name: str) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The rows of a dense matrix in blocks [rows, blocks, columns], and what a code of 1 is worth in each."""
        for rows in self._floats(name):
            padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % _BYTES_BLOCK)))
            blocks = padded.reshape(len(rows), -1, _BYTES_BLOCK)
            largest = np.abs(blocks).max(axis=2)
            yield blocks, np.where(largest > 0, largest / np.float32(127), np.float32(1))

    def _groups(self, name: str) -> list[tuple[str, str]]:
        """The int8 weights [in, out] of a ternary matrix, and their scale; a pair for each group of columns."""
        (num_out, num_in), size = self.shapes[name], self._checkpoint.group_size(name)
        if not size:
            weight = Weight(name, "int8", (num_in, num_out), lambda: self._columns(name, slice(None)))
            return [(self._graph.weight(weight), self._scale(name))]
        return [self._group(name, slice(begin, min(begin + size, num_in))) for begin in range(0, num_in, size)]

    def _group(self, name: str, columns: slice) -> tuple[str, str]:
        num_out, group = self.shapes[name][0], columns.start // self._checkpoint.group_size(name)
        weight = Weight(
            f"{name}.{group}", "int8", (columns.stop - columns.start, num_out), lambda: self._columns(name, columns)
        )
        scale = self._add(f"{name}.scale.{group}", "float32", (num_out,), lambda: self._scales(name)[:, group])
        return self._graph.weight(weight), scale

    def _two_bits(self, name: str) -> tuple[str, str, str]:
        """A ternary matrix in 2 bits, its scales by blocks, and a common one; "" where groups of columns have theirs.

        With a common scale each block of columns has one of weight 0 at its end, for verbs.anchored.
        """
        (num_out, num_in), size = self.shapes[name], self._checkpoint.group_size(name)
        used = size or verbs.BLOCK - 1
        shape = (num_out, -(-num_in // used))
        packed = (*shape, (size or verbs.BLOCK) // 4)
        return (
            self._add(name, "uint8", packed, lambda: self._packed(name, used)),
            self._add(f"{name}.scales", "float32", shape, lambda: np.broadcast_to(self._scales(name), shape)),
            "" if size else self._scale(name),
        )

    def _scale(self, name: str) -> str:
        return self._add(f"{name}.scale", "float32", (), lambda: np.asarray(self._ternary(name)[0].scale, np.float32))

    def _add(self, name: str, dtype: Dtype, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]) -> str:
        """A weight that is made in one piece."""
        return self._graph.weight(Weight(name, dtype, shape, lambda: iter((make(),))))

    def _floats(self, name: str) -> Iterator[NDArray[np.float32]]:
        matrix = sound_matrix(self._checkpoint, name)
        assert isinstance(matrix, Dense)
        step = max(1, _CHUNK_WEIGHTS // self.shapes[name][1])
        for begin in range(0, self.shapes[name][0], step):
            yield to_float32(matrix.data[begin : begin + step], matrix.dtype)
        self._checkpoint.release(name)

    def _columns(self, name: str, columns: slice) -> Iterator[NDArray[np.int8]]:
        yield np.ascontiguousarray(self._ternary(name)[1][:, columns].T)

    def _packed(self, name: str, used: int) -> NDArray[np.uint8]:
        """Values + 2 in 2 bits, low bits first: blocks of `used` columns, filled up to whole bytes with values 0."""
        codes = self._ternary(name)[1]
        blocks = np.pad(codes, ((0, 0), (0, -codes.shape[1] % used))).reshape(len(codes), -1, used)
        fields = (np.pad(blocks, ((0, 0), (0, 0), (0, -used % 4))) + np.int8(2)).view(np.uint8)
        a, b, c, d = np.moveaxis(fields.reshape(*blocks.shape[:2], -1, 4), -1, 0)
        packed: NDArray[np.uint8] = a | b << np.uint8(2) | c << np.uint8(4) | d << np.uint8(6)
        return packed

    def _scales(self, name: str) -> NDArray[np.float32]:
        """Those of groups of columns; 1 where one scale is for all, which then stands beside them."""
        scale = self._ternary(name)[0].scale
        return scale if isinstance(scale, np.ndarray) else np.ones((1, 1), np.float32)

    def _ternary(self, name: str) -> tuple[Ternary, NDArray[np.int8]]:
        """A matrix and its codes; they are kept until another is asked for."""
        if self._last is None or self._last[0] != name:
            if self._last is not None:
                self._checkpoint.release(self._last[0])
            self._last = None
            matrix = sound_matrix(self._checkpoint, name)
            assert isinstance(matrix, Ternary)
            self._last = name, matrix, sound_codes(self._checkpoint, name, matrix)
        return self._last[1:]


def _codes(blocks: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = (np.rint(blocks / scales[..., None]) + 128).astype(np.uint8)
    return codes

"""What the weights of a checkpoint become in a Core ML program, under their canonical names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.conversion.coreml_verbs import Codes, Var, Verbs
from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.model.loader import Progress, sound_codes, sound_matrix

Made = TypeVar("Made")
Compute = Literal["float16", "float32"]
TABLE = (-1, 0, 1, 0)  # what the four numbers of 2 bits stand for


class Arrays:
    """The weights as arrays, each made once for all functions of a program."""

    def __init__(self, checkpoint: Checkpoint, compute: Compute, small: bool, progress: Progress) -> None:
        """`small`: dense matrices in 8 bits with a scale a row."""
        self.checkpoint, self.compute, self.is_small = checkpoint, compute, small
        self.shapes = dict(expected_shapes(checkpoint.config))
        self._made: dict[str, Any] = {}
        self._done, self._total, self._progress = 0, sum(map(math.prod, self.shapes.values())), progress

    def vector(self, name: str) -> NDArray[Any]:
        """A vector."""
        return self._once(name, lambda: self._fitted(name, self.checkpoint.vector(name)))

    def dense(self, name: str) -> NDArray[Any]:
        """A dense matrix."""
        return self._once(name, lambda: self._fitted(name, self._floats(name)))

    def rounded(self, name: str) -> tuple[NDArray[np.int8], NDArray[Any]]:
        """A dense matrix in 8 bits, and what a 1 is worth in each row: [out, 1]."""

        def make() -> tuple[NDArray[np.int8], NDArray[Any]]:
            codes, scales = ternary.quantize_weights(self._floats(name))
            return codes, self._fitted(name, scales)[:, None]

        return self._once(name, make)

    def ternary(self, name: str) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """A ternary matrix as numbers in TABLE, and its scale [] or its scales [out, groups]."""

        def make() -> tuple[NDArray[np.uint8], NDArray[Any]]:
            matrix = sound_matrix(self.checkpoint, name)
            assert isinstance(matrix, Ternary)
            codes = sound_codes(self.checkpoint, name, matrix)
            scale = self._fitted(name, np.array(matrix.scale, np.float32))
            self.checkpoint.release(name)
            codes += 1
            return codes.view(np.uint8), scale

        return self._once(name, make)

    def _once(self, name: str, make: Callable[[], Made]) -> Made:
        if name not in self._made:
            self._made[name] = make()
            self._done += math.prod(self.shapes[name])
            self._progress(self._done, self._total)
        found: Made = self._made[name]
        return found

    def _floats(self, name: str) -> NDArray[np.float32]:
        matrix = sound_matrix(self.checkpoint, name)
        assert isinstance(matrix, Dense)
        values = to_float32(matrix.data, matrix.dtype)
        self.checkpoint.release(name)
        return values

    def _fitted(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        """Values in the type of the computation; raises Unsupported where they don't fit into it."""
        with np.errstate(over="ignore"):
            found = values.astype(self.compute)
        if not np.isfinite(found).all():
            what = f"{self.checkpoint.path}: {name} has values beyond {self.compute}"
            raise Unsupported(f"{what}: convert it with --compute float32, or to another format")
        return found


class Weights:
    """Adds weights to the function that is being built, and the products with them."""

    def __init__(self, arrays: Arrays, verbs: Verbs, types: Any) -> None:
        """`types`: those of MIL."""
        self._arrays, self._verbs = arrays, verbs
        self._two_bits = types.type_mapping.nptype_from_builtin(types.uint2)
        self._added: dict[str, Var] = {}
        self.shapes, self.is_ternary = arrays.shapes, arrays.checkpoint.is_ternary

    def constant(self, name: str, make: Callable[[], NDArray[Any]]) -> Var:
        """A constant, once in the file for all functions."""
        return self._once(name, lambda: self._constant(name, make()))

    def vector(self, name: str) -> Var:
        """A vector."""
        return self.constant(name, lambda: self._arrays.vector(name))

    def rows(self, name: str, ids: Var) -> Var:
        """The rows of a dense matrix for token ids."""
        return self._verbs.mb.gather(x=self._dense(name), indices=ids, axis=0)

    def product(self, name: str, rows: Callable[[], Var], quantised: Callable[[], Codes]) -> Var:
        """Rows times a matrix; ternary ones take those that are quantised."""
        if not self.is_ternary(name):
            return self._verbs.product(rows(), self._dense(name))
        codes = quantised()
        sums = self._verbs.product(codes.rows, self._once(f"{name}.ternary", lambda: self._ternary(name)))
        if self._arrays.checkpoint.group_size(name):
            return self._verbs.mul(sums, codes.inverse)
        scale = self._verbs.dtype(self._arrays.ternary(name)[1])  # not in TABLE, where it would round every product
        return self._verbs.mul(sums, self._verbs.mul(codes.inverse, scale))

    def _dense(self, name: str) -> Var:
        if not self._arrays.is_small:
            return self.constant(name, lambda: self._arrays.dense(name))
        return self._once(f"{name}.dense", lambda: self._scaled(name, *self._arrays.rounded(name)))

    def _ternary(self, name: str) -> Var:
        """The matrix, to be unpacked where it is used; with the scales of groups of columns, not with a common one."""
        (indices, scales), group_size = self._arrays.ternary(name), self._arrays.checkpoint.group_size(name)
        if not group_size:
            return self._unpacked(name, indices, np.array(TABLE, self._verbs.dtype))
        if indices.shape[1] % group_size:
            what = f"{name} has {indices.shape[1]} columns, in groups of {group_size} with a scale each"
            raise Unsupported(f"{self._arrays.checkpoint.path}: {what}: Core ML takes whole groups only: write X.onnx")
        return self._scaled(name, self._unpacked(name, indices, np.array(TABLE, np.int8)), scales)

    def _unpacked(self, name: str, indices: NDArray[np.uint8], table: NDArray[Any]) -> Var:
        packed = self._constant(name, indices.view(self._two_bits))
        return self._verbs.mb.constexpr_lut_to_dense(
            indices=packed, lut=table.reshape(1, 1, 4, 1), name=f"{name}.codes"
        )

    def _scaled(self, name: str, codes: Var | NDArray[np.int8], scales: NDArray[Any]) -> Var:
        """Codes times the scale of their row, or of their columns in it."""
        data = self._constant(name, codes) if isinstance(codes, np.ndarray) else codes
        scale = self._constant(f"{name}.scales", scales)
        return self._verbs.mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name=f"{name}.matrix")

    def _constant(self, name: str, values: NDArray[Any]) -> Var:
        found = self._verbs.mb.const(val=values, name=name)
        found.op.weight_id = name
        return found

    def _once(self, name: str, make: Callable[[], Var]) -> Var:
        if name not in self._added:
            self._added[name] = make()
        return self._added[name]

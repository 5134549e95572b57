"""What the tensors of a checkpoint become in a GGUF file, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import InvalidParams, Unsupported
from bitnet_inference.formats import ggml_blocks as ggml
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes, is_projection
from bitnet_inference.formats.floats import FloatName, to_float32
from bitnet_inference.formats.gguf import tensor_name
from bitnet_inference.formats.gguf_metadata import ROPE_FACTORS, rope_factors
from bitnet_inference.formats.gguf_writer import Put
from bitnet_inference.model.loader import Progress, sound_codes, sound_matrix

Kind = Literal["i2_s", "tq2_0", "f16"]
_TERNARY = {"i2_s": ggml.I2_S, "tq2_0": ggml.TQ2_0}
_FLOATS: dict[FloatName, int] = {"float32": ggml.F32, "float16": ggml.F16, "bfloat16": ggml.BF16}
_CHUNK_WEIGHTS = 1 << 22  # of a matrix, made at a time
_MAX_SHOWN = 3


@dataclass(frozen=True)
class Written:
    """One tensor of the new file. `error` is how far its worst value is off, relative to its largest; 0 is exact."""

    name: str
    type: str
    shape: tuple[int, ...]
    num_bytes: int
    error: float


class GgufTensors:
    """The tensors of a GGUF file: `shapes` by name, in their order, and `written` so far."""

    def __init__(self, checkpoint: Checkpoint, kind: Kind, permuted: bool, progress: Progress) -> None:
        """`permuted`: the file has the rows of q and k in adjacent pairs.

        Raises InvalidParams where ternary matrices are wanted and there are none.
        """
        config, names = checkpoint.config, dict(expected_shapes(checkpoint.config))
        self._checkpoint, self._permuted, self._progress = checkpoint, permuted, progress
        self._type = _TERNARY.get(kind)  # None where everything becomes F16
        self._names = {tensor_name(name): name for name in names}
        self.shapes = {tensor_name(name): shape for name, shape in names.items()}
        factors = rope_factors(config)
        self._factors = np.zeros(0, np.float32) if factors is None else factors
        if factors is not None:
            self.shapes[ROPE_FACTORS] = factors.shape
        self.written: list[Written] = []
        self._refused: dict[str, list[str]] = {}
        self._total = sum(map(math.prod, self.shapes.values()))
        self._has_ternary = bool(ternary := [name for name in names if checkpoint.is_ternary(name)])
        if self._type is not None and not ternary:
            raise InvalidParams(f"{checkpoint.path} has no ternary matrix: convert it to the type f16")
        # What falls back takes the dtype of the dense projections: matrices of several run in float32, twice as large.
        dense = [name for name in names if is_projection(name) and name not in ternary]
        matrix = checkpoint.matrix(dense[0]) if dense and self._type is not None else None
        self._fallback = _FLOATS[matrix.dtype] if isinstance(matrix, Dense) else ggml.F16

    def encode(self, own_name: str, put: Put) -> int:
        """Put the bytes of a tensor, by its name in the file; returns their type.

        Raises FormatError where it is broken, Unsupported for values that float16 does not reach.
        """
        shape, error, type_id = self.shapes[own_name], 0.0, ggml.F32
        if own_name == ROPE_FACTORS:
            put(ggml.encode_floats(type_id, self._factors))
        elif len(shape) == 1:
            put(ggml.encode_floats(type_id, self._checkpoint.vector(self._names[own_name])))
        else:
            name = self._names[own_name]
            try:
                type_id, error = self._matrix(name, put)
            except OverflowError as found:
                why = f"{own_name}: {found}: convert it to another type"
                raise Unsupported(f"{self._checkpoint.path}: {why}") from None
            self._checkpoint.release(name)
        num_bytes = ggml.num_bytes(type_id, shape)
        self.written.append(Written(own_name, ggml.BLOCKS[type_id].name, shape, num_bytes, error))
        self._progress(sum(math.prod(each.shape) for each in self.written), self._total)
        return type_id

    def notes(self) -> Iterator[str]:
        """What did not become what was wanted, and why: a line each."""
        for why, names in self._refused.items():
            shown = ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" * (len(names) > _MAX_SHOWN))
            yield f"{why}, so {len(names)} became {ggml.BLOCKS[self._fallback].name}: {shown}"
        if len(self._factors) and not self._permuted:
            yield f"{ROPE_FACTORS} scales rotations, and llama.cpp opens files with it of llama and granite alone"
        config = self._checkpoint.config
        are_dense = not (config.sub_norms or config.linear_norm)  # to whoever reads them from a file
        if are_dense and (self._refused or (self._has_ternary and self._type is None)):
            yield "ternary matrices in floats are dense ones to whoever reads them: activations stay unrounded"

    def _matrix(self, name: str, put: Put) -> tuple[int, float]:
        """Put a matrix; returns its type and its error."""
        matrix = sound_matrix(self._checkpoint, name)
        if isinstance(matrix, Dense):
            type_id = ggml.F16 if self._type is None else _FLOATS[matrix.dtype]
            if type_id == _FLOATS[matrix.dtype]:
                put(self._in_pairs(name, matrix.data).reshape(-1).view(np.uint8))
                return type_id, 0.0
            return type_id, self._floats(name, put, type_id, lambda rows: to_float32(matrix.data[rows], matrix.dtype))
        if not matrix.group_size and not matrix.scale > 0:
            why = f"{name}: its scale is {matrix.scale:g}, and those of GGUF files are above 0"
            raise Unsupported(f"{self._checkpoint.path}: {why}: write X.safetensors or X.onnx")
        codes = np.ascontiguousarray(sound_codes(self._checkpoint, name, matrix))
        if self._type is None or (why := _problem(self._type, matrix)):
            if self._type is not None:
                self._refused.setdefault(why, []).append(tensor_name(name))
            return self._fallback, self._floats(name, put, self._fallback, lambda rows: _values(matrix, codes, rows))
        scale = float(matrix.scale)
        put(ggml.encode_ternary(self._type, self._in_pairs(name, codes), scale))
        return self._type, abs(float(np.float16(scale)) - scale) / scale if self._type == ggml.TQ2_0 else 0.0

    def _floats(self, name: str, put: Put, type_id: int, values: Callable[[slice], NDArray[np.float32]]) -> float:
        """Put a matrix of floats in pieces; returns its error."""
        num_rows, num_columns = self.shapes[tensor_name(name)]
        # Whole heads at a time, for their rows change places.
        step = max(1, _CHUNK_WEIGHTS // (num_columns * self._checkpoint.config.head_dim))
        step *= self._checkpoint.config.head_dim
        largest = worst = 0.0
        for begin in range(0, num_rows, step):
            piece = self._in_pairs(name, values(slice(begin, begin + step)))
            encoded = ggml.encode_floats(type_id, piece)
            put(encoded)
            largest = max(largest, float(np.abs(piece).max()))
            worst = max(worst, float(np.abs(ggml.decode(type_id, encoded, piece.shape) - piece).max()))
        if worst > largest / 2:
            raise OverflowError(f"{largest:g}, its largest value, is too small for float16")
        return worst / largest if worst else 0.0

    def _in_pairs(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """The rows of q and k as the file has them: features j and j + D/2 of a head are its rows 2j and 2j + 1."""
        if not self._permuted or name.rpartition(".")[2] not in ("q", "k"):
            return rows
        heads = rows.reshape(-1, 2, self._checkpoint.config.head_dim // 2, rows.shape[1])
        return np.ascontiguousarray(heads.transpose(0, 2, 1, 3).reshape(rows.shape))


def _problem(type_id: int, matrix: Ternary) -> str:
    """Why a ternary type cannot hold a matrix; empty where it can."""
    block = ggml.BLOCKS[type_id]
    if matrix.group_size:
        return f"{block.name} has one scale for a matrix, and theirs differ by groups of {matrix.group_size} columns"
    if type_id == ggml.I2_S and math.prod(matrix.shape) % block.num_values:
        return f"I2_S holds multiples of {block.num_values} weights"
    if type_id == ggml.TQ2_0 and matrix.shape[1] % block.num_values:
        return f"TQ2_0 holds multiples of {block.num_values} columns"
    if type_id == ggml.TQ2_0 and not 0 < np.float16(matrix.scale) < np.inf:
        return "TQ2_0 has float16 scales, and theirs do not fit"
    return ""


def _values(matrix: Ternary, codes: NDArray[np.int8], rows: slice) -> NDArray[np.float32]:
    scales = matrix.scale
    if isinstance(scales, np.ndarray):
        scales = np.repeat(scales[rows], matrix.group_size, axis=1)[:, : matrix.shape[1]]
    return codes[rows].astype(np.float32) * np.asarray(scales, np.float32)

"""A Core ML program computed in NumPy: what Core ML would do with the operations that we write, from the files.

Every operation is computed in float32 and rounded once to the type of its result; states change as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.coreml_library import coremltools

Array = NDArray[Any]


def _wide(x: Any) -> Array:
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _lut(indices: Array, lut: Array) -> Array:
    return lut.reshape(-1)[np.asarray(indices, np.intp)]


def _blocks(data: Array, scale: Array) -> Array:
    rows, columns = (size // blocks for size, blocks in zip(data.shape, scale.shape, strict=True))
    return data * np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)


def _softmax(x: Array, axis: int) -> Array:
    found = np.exp(x - x.max(axis=axis, keepdims=True))
    return found / found.sum(axis=axis, keepdims=True)


def _matmul(x: Array, y: Array, transpose_x: bool, transpose_y: bool) -> Array:
    assert not transpose_x
    return x @ (y.swapaxes(-1, -2) if transpose_y else y)


def _slice(x: Array, begin: Array, end: Array) -> tuple[slice, ...]:
    assert (begin >= 0).all() and (begin < end).all() and (end <= x.shape).all(), "Core ML would read elsewhere"
    return tuple(slice(a, b) for a, b in zip(begin, end, strict=True))


def _updated(x: Array, update: Array, begin: Array, end: Array) -> Array:
    x = x.copy()
    x[_slice(x, begin, end)] = update
    return x


def _split(x: Array, split_sizes: Array, axis: int) -> list[Array]:
    return np.split(x, np.cumsum(split_sizes)[:-1], axis=axis)


def _gather(x: Array, indices: Array, axis: int, **more: Any) -> Array:
    assert indices.min() >= 0 and indices.max() < x.shape[axis]
    return np.take(x, indices, axis=axis)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "cast": lambda x, dtype: x,  # as every result is rounded to its type
    "concat": lambda values, axis, interleave: np.concatenate(values, axis=axis),
    "constexpr_blockwise_shift_scale": lambda data, scale: _blocks(data, scale),
    "constexpr_lut_to_dense": lambda indices, lut: _lut(indices, lut),
    "gather": _gather,
    "identity": lambda x: x,
    "linear": lambda x, weight, bias: x @ weight.T + bias,
    "matmul": _matmul,
    "maximum": lambda x, y: np.maximum(x, y),
    "mul": lambda x, y: x * y,
    "real_div": lambda x, y: x / y,
    "reduce_max": lambda x, axes, keep_dims: x.max(axis=tuple(map(int, np.ravel(axes))), keepdims=bool(keep_dims)),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(axis=tuple(map(int, np.ravel(axes))), keepdims=bool(keep_dims)),
    "relu": lambda x: np.maximum(x, 0),
    "reshape": lambda x, shape: x.reshape(shape),
    "round": lambda x: np.rint(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "slice_by_index": lambda x, begin, end: x[_slice(x, begin, end)],
    "slice_by_size": lambda x, begin, size: x[_slice(x, begin, begin + size)],
    "slice_update": _updated,
    "softmax": _softmax,
    "split": _split,
    "sqrt": lambda x: np.sqrt(x),
    "sub": lambda x, y: x - y,
    "transpose": lambda x, perm: x.transpose(perm),
}


class Package:
    """A written package. `instead` maps types of numbers to those that stand for them here."""

    def __init__(self, path: Path, instead: dict[type, type] | None = None) -> None:
        library = coremltools()
        from coremltools.converters.mil.frontend.milproto.load import load

        self.spec = library.utils.load_spec(str(path))
        weights = path / "Data/com.apple.CoreML/weights"
        self.program = load(self.spec, self.spec.specificationVersion, str(weights))
        self._instead = instead or {}
        self.peak = 0.0  # the largest magnitude that any float16 had

    def states(self, function: str = "main") -> dict[str, Array]:
        """New ones, of zeros."""
        types = coremltools().converters.mil.mil.types
        inputs = self.program.functions[function].inputs
        shapes = {
            name: var.sym_type.wrapped_type().get_shape()
            for name, var in inputs.items()
            if types.is_state(var.sym_type)
        }
        return {name: np.zeros(shape, self._as(np.float16)) for name, shape in shapes.items()}

    def run(self, function: str, inputs: dict[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        """What a function gives; the states are changed."""
        block = self.program.functions[function]
        found: dict[str, Any] = dict(inputs)
        for op in block.operations:
            for output, value in zip(op.outputs, self._compute(op, found, states), strict=True):
                found[output.name] = value
        return {output.name: found[output.name] for output in block.outputs}

    def _compute(self, op: Any, found: dict[str, Any], states: dict[str, Array]) -> list[Any]:
        if op.op_type == "const":
            return [self._rounded(op.outputs[0].val, op.outputs[0])]
        if op.op_type == "read_state":
            return [states[op.inputs["input"].name]]
        if op.op_type == "coreml_update_state":
            states[op.inputs["state"].name] = found[op.inputs["value"].name]
            return [found[op.inputs["value"].name]]
        given = {name: self._argument(each, found) for name, each in op.inputs.items() if each is not None}
        with np.errstate(over="ignore"):
            made = OPERATIONS[op.op_type](**given)
        return [
            self._rounded(each, out)
            for each, out in zip(made if len(op.outputs) > 1 else [made], op.outputs, strict=True)
        ]

    def _argument(self, given: Any, found: dict[str, Any]) -> Any:
        if isinstance(given, list | tuple):
            return [self._argument(each, found) for each in given]
        value = found[given.name]
        return _wide(value) if isinstance(value, np.ndarray | np.generic) else value

    def _rounded(self, value: Any, output: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic) or np.asarray(value).dtype.kind != "f":
            return value
        dtype = np.float16 if "fp16" in str(output.sym_type.__type_info__()) else np.float32
        with np.errstate(over="ignore"):
            value = np.asarray(value).astype(self._as(dtype))
        if dtype is np.float16 and value.size:
            self.peak = max(self.peak, float(np.abs(value).max()))
        return value

    def _as(self, dtype: type) -> type:
        return self._instead.get(dtype, dtype)

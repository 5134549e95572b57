"""A Core ML program computed in NumPy: what Core ML would do with the operations that we write, from the files.

Every operation is computed in float32 and rounded once to the type of its result; states change as they do there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.coreml_library import coremltools, quiet

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


class Function:
    """A function of MIL. `instead` maps types of numbers to what stands for them here."""

    def __init__(self, function: Any, instead: dict[type, type] | None = None) -> None:
        self._instead, self._function = instead or {}, function
        self._constants: dict[str, Any] = {}
        self._steps = []
        for op in function.operations:
            if op.op_type == "const":
                self._keep(op, [op.outputs[0].val], self._constants)
            elif op.op_type.startswith("constexpr_"):
                self._keep(op, _computed(op, self._constants, {}), self._constants)
            else:
                self._steps.append(op)

    def run(self, inputs: dict[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        """What it gives; the states are changed."""
        found = {**self._constants, **inputs}
        for op in self._steps:
            self._keep(op, _computed(op, found, states), found)
        return {output.name: found[output.name] for output in self._function.outputs}

    def _keep(self, op: Any, values: list[Any], found: dict[str, Any]) -> None:
        for output, value in zip(op.outputs, values, strict=True):
            found[output.name] = _rounded(value, output, self._instead)


def _computed(op: Any, found: dict[str, Any], states: dict[str, Array]) -> list[Any]:
    if op.op_type == "read_state":
        return [states[op.inputs["input"].name]]
    if op.op_type == "coreml_update_state":
        states[op.inputs["state"].name] = found[op.inputs["value"].name]
        return [found[op.inputs["value"].name]]
    given = {name: _argument(each, found) for name, each in op.inputs.items() if each is not None}
    with np.errstate(over="ignore"):
        made = OPERATIONS[op.op_type](**given)
    return made if len(op.outputs) > 1 else [made]


def _argument(given: Any, found: dict[str, Any]) -> Any:
    if isinstance(given, list | tuple):
        return [_argument(each, found) for each in given]
    value = found[given.name]
    return _wide(value) if isinstance(value, np.ndarray | np.generic) else value


def _rounded(value: Any, output: Any, instead: dict[type, type]) -> Any:
    if not isinstance(value, np.ndarray | np.generic) or np.asarray(value).dtype.kind != "f":
        return value
    dtype = np.float16 if output.dtype.__name__ == "fp16" else np.float32
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(instead.get(dtype, dtype))


class Package:
    """A written package; `instead` as above."""

    def __init__(self, path: Path, instead: dict[type, type] | None = None) -> None:
        with quiet():
            from coremltools.converters.mil.frontend.milproto.load import load

            spec = coremltools().utils.load_spec(str(path))
            self._program = load(spec, spec.specificationVersion, str(path / "Data/com.apple.CoreML/weights"))
        self._instead = instead or {}
        self._functions = {name: Function(each, instead) for name, each in self._program.functions.items()}

    def states(self) -> dict[str, Array]:
        """New ones, of zeros."""
        types, inputs = coremltools().converters.mil.mil.types, self._program.functions["main"].inputs
        kinds = {name: var.sym_type for name, var in inputs.items() if types.is_state(var.sym_type)}
        dtype = self._instead.get(np.float16, np.float16)
        return {name: np.zeros(kind.wrapped_type().get_shape(), dtype) for name, kind in kinds.items()}

    def run(self, function: str, inputs: dict[str, Array], states: dict[str, Array]) -> dict[str, Array]:
        """What a function gives; the states are changed."""
        return self._functions[function].run(inputs, states)

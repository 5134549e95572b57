"""A Core ML program: its functions, operations and weights, checked before Core ML sees them.

Read by our own reader of Protocol Buffers: no weight is read, and no memory follows from what a file claims.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.coreml_package import WEIGHTS_FILE, Package
from bitnet_inference.formats.json_files import file_size, shown
from bitnet_inference.formats.mapped import map_file
from bitnet_inference.formats.protobuf import Budget, Message

FLOAT16, FLOAT32, INT32 = 65552, 65568, 131104  # of inputs and outputs
NAMES = {FLOAT16: "float16", FLOAT32: "float32", INT32: "int32"}
# What `bitnet convert` writes: no operation among them calls another, or goes on for as long as it likes.
OPERATIONS = (
    "abs", "add", "cast", "concat", "const", "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense", "gather",
    "identity", "linear", "matmul", "maximum", "mul", "read_state", "real_div", "reduce_max", "reduce_mean", "relu",
    "reshape", "round", "sigmoid", "silu", "slice_by_index", "slice_by_size", "slice_update", "softmax", "split",
    "sqrt", "sub", "transpose", "write_state",
)  # fmt: skip
_VERSION = 9  # of programs with states: macOS 15
_BITS = {10: 16, 11: 32, 21: 8, 22: 16, 23: 32, 31: 8, 32: 16, 33: 32, 36: 2}  # by the type of a constant
_MAX_BYTES, _MAX_RANK, _MAX_FUNCTIONS = 1 << 28, 8, 8
_MAX_FIELDS = 600_000  # a ternary decoder of 45 layers has them
_PLACE = f"@model_path/weights/{WEIGHTS_FILE}"
_SENTINEL, _RECORD = 0xDEADBEEF, struct.Struct("<IIQQ")  # sentinel, type, bytes, and where they begin
_WEIGHT_KEYS = ("val", "data", "indices")  # scales and tables have others
_MODEL_WEIGHTS = ("embed", "head", "norm", "layers_")
_CURE = "convert the model again"


@dataclass(frozen=True)
class Port:
    """An input, an output or a state."""

    dtype: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """As in "float16 [1, 64]"."""
        return f"{NAMES.get(self.dtype, '?')} {list(self.shape)}"


@dataclass
class Function:
    """What a function takes, gives and keeps, by name; `operations` counts them."""

    inputs: dict[str, Port]
    outputs: dict[str, Port]
    states: dict[str, Port]
    operations: Counter[str] = field(default_factory=Counter)


@dataclass
class Program:
    """Functions by name. `weights` counts those of the model by their bits; scales and tables are not among them."""

    functions: dict[str, Function]
    weights: Counter[int] = field(default_factory=Counter)


def read_program(package: Package) -> Program:
    """Raises FormatError for a file that is broken, or lies about its weights, Unsupported for one of others."""
    path, size = package.program, file_size(package.program)
    if not 2 <= size < _MAX_BYTES:
        raise FormatError(path, "", f"{size} bytes: a program has at least 2, and less than {_MAX_BYTES}: {_CURE}")
    stored = map_file(package.weights) if file_size(package.weights) else b""
    model = Message(Budget(path, _MAX_FIELDS), memoryview(map_file(path)), "model")
    version, body, about = model.integer(1), model.message(502, "program"), model.message(2, "description")
    if body is None or about is None or version != _VERSION:
        raise Unsupported(f"{path}: is no Core ML program of version {_VERSION} (macOS 15): {_CURE}")
    described = list(_described(about))
    program = Program(dict(described))
    if len(program.functions) != len(described):
        raise about.wrong(f"describes a function twice: {_CURE}")
    _Walk(path, program, memoryview(stored)).run(body)
    return program


def _described(about: Message) -> Iterator[tuple[str, Function]]:
    for index, each in enumerate(about.messages(20, "function")):
        if index == _MAX_FUNCTIONS:
            raise about.wrong(f"more than {_MAX_FUNCTIONS} functions: {_CURE}")
        inputs, outputs, states = (_ports(each, number) for number in (2, 3, 6))
        yield each.text(1), Function(inputs, outputs, states)


def _ports(function: Message, number: int) -> dict[str, Port]:
    found: dict[str, Port] = {}
    for each in function.messages(number, f"{function.where}, port"):
        kind = each.message(3, f"{each.where} type")
        state = kind and kind.message(8, f"{each.where} state")
        array = (state.message(1, each.where) if state else kind.message(5, each.where)) if kind else None
        name = each.text(1)
        if array is None or name in found:
            raise each.wrong(f"{shown(name)} is no array, or stands there twice: {_CURE}")
        found[name] = Port(array.integer(2), tuple(array.integers(1, _MAX_RANK)))
    return found


class _Walk:
    """Goes through the functions, and notes what is there."""

    def __init__(self, path: Path, program: Program, stored: memoryview) -> None:
        self._path, self._program, self._stored = path, program, stored
        self._seen: set[int] = set()  # where the weights lie that were counted

    def run(self, body: Message) -> None:
        found = []
        for entry in body.messages(2, "function"):
            name, function = entry.text(1), entry.message(2, entry.where)
            if function is None or name not in self._program.functions or name in found:
                raise entry.wrong(f"{shown(name)} is not described, or stands there twice: {_CURE}")
            found.append(name)
            self._function(function, self._program.functions[name])
        if len(found) != len(self._program.functions):
            raise body.wrong(f"a function that is described is missing: {_CURE}")

    def _function(self, body: Message, function: Function) -> None:
        blocks = list(body.messages(3, f"{body.where} block"))
        block = blocks[0].message(2, body.where) if len(blocks) == 1 else None
        if block is None:
            raise body.wrong(f"has {len(blocks)} blocks, not one: {_CURE}")
        for operation in block.messages(3, f"{body.where} operation"):
            kind = operation.text(1)
            if kind not in OPERATIONS or 4 in operation:
                what = f"{operation.where}: {shown(kind)} is none of those that `bitnet convert` writes"
                raise Unsupported(f"{self._path}: {what}: {_CURE}")
            function.operations[kind] += 1
            name = next((each.text(1) for each in operation.messages(3, f"{operation.where} output")), "")
            for key, value in _values(operation):
                self._constant(value, name.startswith(_MODEL_WEIGHTS) and key in _WEIGHT_KEYS and "_scales" not in name)

    def _constant(self, value: Message, is_weight: bool) -> None:
        """Raises FormatError where the values of a constant don't lie where it says in the weights' file."""
        blob, kind = value.message(5, f"{value.where} blob"), value.message(2, f"{value.where} type")
        if blob is None:
            return
        tensor = kind and kind.message(1, f"{value.where} tensor")
        shape = tuple(_sizes(tensor)) if tensor else ()
        dtype = tensor.integer(1) if tensor else 0
        if dtype not in _BITS or not all(0 < size < 1 << 32 for size in shape):
            raise value.wrong(f"a constant of type {dtype} and shape {list(shape)} is not known: {_CURE}")
        if blob.text(1) != _PLACE:
            raise blob.wrong(f"its values lie in {shown(blob.text(1))}, not in {_PLACE}: {_CURE}")
        at, num_bytes, end = blob.integer(2), -(-math.prod(shape) * _BITS[dtype] // 8), len(self._stored)
        if not 0 <= at <= end - _RECORD.size:
            raise value.wrong(f"its values lie at {at}, of {end} bytes: download the weights again")
        sentinel, _, size, begin = _RECORD.unpack_from(self._stored, at)
        if (sentinel, size) != (_SENTINEL, num_bytes) or begin + size > end:
            raise value.wrong(f"needs {num_bytes} bytes, and {at} is not where as many begin: download it again")
        if is_weight and at not in self._seen:
            self._seen.add(at)
            self._program.weights[_BITS[dtype]] += math.prod(shape)


def _values(operation: Message) -> Iterator[tuple[str, Message]]:
    """What is given to an operation, not made by another, by the names of its arguments."""
    for entry in operation.messages(5, f"{operation.where} attribute"):
        value = entry.message(2, entry.where)
        if value:
            yield entry.text(1), value
    for entry in operation.messages(2, f"{operation.where} argument"):
        argument = entry.message(2, entry.where)
        for binding in argument.messages(1, f"{entry.where} value") if argument else ():
            value = binding.message(2, binding.where)
            if value:
                yield entry.text(1), value


def _sizes(tensor: Message) -> Iterator[int]:
    dimensions = list(tensor.messages(3, f"{tensor.where} size"))
    if len(dimensions) > _MAX_RANK:
        raise tensor.wrong(f"has {len(dimensions)} dimensions: {_CURE}")
    for each in dimensions:
        constant = each.message(1, each.where)
        yield constant.integer(1) if constant else 0

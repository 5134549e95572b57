"""Writes ONNX files: a graph, and its weights within it or in one file of data beside it, made one after the other.

The numbers of fields are those of onnx.proto.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

OPSET = 13
MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operators
ALIGNMENT, MIN_ALIGNMENT = 4096, 64  # of data beside the graph: from ALIGNMENT bytes on, and of less
MIN_OUTSIDE_BYTES = 1024  # what is smaller stands in the graph always: shapes are read there
MAX_INLINE_BYTES = 1 << 26  # of all weights; protobuf ends at 2 GB, and takes a multiple of its size in memory
_IR_VERSION = 7  # the first that knows OPSET
Dtype = Literal["float32", "float16", "bfloat16", "uint8", "int8", "int64", "bool"]
# Of TensorProto, and the bytes of a number.
_TYPES: dict[Dtype, tuple[int, int]] = {
    "float32": (1, 4), "uint8": (2, 1), "int8": (3, 1), "int64": (7, 8), "bool": (9, 1), "float16": (10, 2),
    "bfloat16": (16, 2),
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """An operator of the graph; `attributes` are whole numbers and lists of them."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, int | Sequence[int]]
    domain: str = ""


@dataclass(frozen=True)
class Weight:
    """A constant of the graph. `pieces` yields its values row by row, in pieces of any size, when it is written.

    bfloat16 is given as its bits.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[Any]]]

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * _TYPES[self.dtype][1]


@dataclass
class Graph:
    """A graph that is being made: its nodes in order, its weights, and what goes in and comes out, with its shape."""

    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Weight] = field(default_factory=dict)
    inputs: dict[str, tuple[Dtype, tuple[int | str, ...]]] = field(default_factory=dict)
    outputs: dict[str, tuple[Dtype, tuple[int | str, ...]]] = field(default_factory=dict)

    def add(self, op: str, *inputs: str, name: str = "", domain: str = "", **attributes: int | Sequence[int]) -> str:
        """A node with one output, called `name`, or by a name of its own; returns that name."""
        return self.split(op, *inputs, names=(name,), domain=domain, **attributes)[0]

    def cast(self, x: str, dtype: Dtype) -> str:
        """The values of x in another type; returns their name."""
        return self.add("Cast", x, to=_TYPES[dtype][0])

    def split(
        self, op: str, *inputs: str, names: tuple[str, ...], domain: str = "", **attributes: int | Sequence[int]
    ) -> tuple[str, ...]:
        """The same with several outputs."""
        outputs = tuple(name or f"{op}_{len(self.nodes)}.{at}" for at, name in enumerate(names))
        self.nodes.append(Node(op, inputs, outputs, attributes, domain))
        return outputs

    def constant(self, values: Any, dtype: Dtype, name: str = "") -> str:
        """A small constant; equal ones without a name are one. Returns its name."""
        array = np.asarray(values, dtype)
        name = name or f"{dtype}_{array.tolist()}".replace(" ", "")
        return self.weight(Weight(name, dtype, array.shape, lambda: iter((array,))))

    def weight(self, weight: Weight) -> str:
        """Add a weight, unless there is one of its name; returns the name."""
        self.weights.setdefault(weight.name, weight)
        return weight.name

    @property
    def num_bytes(self) -> int:
        """The size of all weights."""
        return sum(weight.num_bytes for weight in self.weights.values())


def data_file(path: Path) -> Path:
    """Where the weights of the file at `path` are, if they are not in it."""
    return path.with_name(f"{path.name}.data")


def write_onnx(
    graph: Graph,
    path: Path,
    about: Mapping[str, str],
    *,
    max_inline_bytes: int = MAX_INLINE_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a graph; more than `max_inline_bytes` of weights go to `data_file(path)`.

    `about` becomes the file's metadata. `progress` gets the bytes of weights written so far, and those in all. Raises
    OSError, and what making a weight raises.
    """
    total, done, tensors = graph.num_bytes, 0, []
    with data_file(path).open("wb") if total > max_inline_bytes else nullcontext() as outside:
        for weight in graph.weights.values():
            tensors.append(_tensor(weight, outside))
            done += weight.num_bytes
            if progress is not None:
                progress(done, total)
    path.write_bytes(_model(graph, tensors, about))


def _tensor(weight: Weight, outside: BinaryIO | None) -> bytes:
    head = b"".join(_field(1, size) for size in weight.shape)
    head += _field(2, _TYPES[weight.dtype][0]) + _field(8, weight.name)
    pieces = (np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in weight.pieces())
    if outside is None or weight.num_bytes < MIN_OUTSIDE_BYTES:
        data = b"".join(piece.tobytes() for piece in pieces)
        assert len(data) == weight.num_bytes, f"{weight.name} has another size than was said"
        return head + _field(9, data)
    outside.write(bytes(-outside.tell() % (ALIGNMENT if weight.num_bytes >= ALIGNMENT else MIN_ALIGNMENT)))
    begin = outside.tell()
    for piece in pieces:
        outside.write(piece.data)
    assert outside.tell() - begin == weight.num_bytes, f"{weight.name} has another size than was said"
    place = {"location": Path(outside.name).name, "offset": str(begin), "length": str(weight.num_bytes)}
    return head + _pairs(13, place) + _field(14, 1)


def _model(graph: Graph, tensors: list[bytes], about: Mapping[str, str]) -> bytes:
    parts = [_field(1, _node(node)) for node in graph.nodes]
    parts += [_field(2, "decoder"), *(_field(5, tensor) for tensor in tensors)]
    for number, ends in ((11, graph.inputs), (12, graph.outputs)):
        parts += [_field(number, _port(name, *kind)) for name, kind in ends.items()]
    domains = {"": OPSET} | {node.domain: 1 for node in graph.nodes if node.domain}
    opsets = b"".join(_field(8, _field(1, domain) + _field(2, version)) for domain, version in domains.items())
    head = _field(1, _IR_VERSION) + _field(2, "bitnet-inference")
    return head + opsets + _pairs(14, about) + _field(7, b"".join(parts))


def _node(node: Node) -> bytes:
    names = [_field(number, name) for number, each in ((1, node.inputs), (2, node.outputs)) for name in each]
    names += [_field(3, node.outputs[0]), _field(4, node.op), _field(7, node.domain)]
    return b"".join(names) + b"".join(_field(5, _attribute(*each)) for each in node.attributes.items())


def _attribute(name: str, value: int | Sequence[int]) -> bytes:
    if isinstance(value, int):
        return _field(1, name) + _field(3, value) + _field(20, 2)
    return _field(1, name) + b"".join(_field(8, each) for each in value) + _field(20, 7)


def _port(name: str, dtype: Dtype, shape: tuple[int | str, ...]) -> bytes:
    sizes = b"".join(_field(1, _field(1 if isinstance(size, int) else 2, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, _TYPES[dtype][0]) + _field(2, sizes)))


def _pairs(number: int, values: Mapping[str, str]) -> bytes:
    return b"".join(_field(number, _field(1, key) + _field(2, value)) for key, value in values.items())


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message: a whole number, a text, or bytes, those of a message too."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # as protobuf has negative numbers
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))

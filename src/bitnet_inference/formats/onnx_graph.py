"""An ONNX file: the inputs, outputs, operators and tensors of its graph, checked before a runtime sees it.

Read by our own reader of Protocol Buffers, from the mapped file: no tensor is read, and no memory follows from what a
file claims.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.json_files import file_size, shown
from bitnet_inference.formats.mapped import map_file
from bitnet_inference.formats.onnx_tensors import (
    FLOAT,
    FLOAT16,
    INT8,
    UINT8,
    DataFiles,
    Tensor,
    check_overlaps,
    read_tensor,
)
from bitnet_inference.formats.protobuf import Budget, Message

MAX_BYTES = 1 << 31  # of a message of Protocol Buffers
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")  # of operators that ONNX Runtime has
_MAX_SUBGRAPHS = 8  # within each other
_MAX_RANK = 8
_GRAPH, _OPSETS, _TRAINING, _FUNCTIONS = 7, 8, 20, 25
_NODES, _INITIALIZERS, _INPUTS, _OUTPUTS, _SPARSE = 1, 5, 11, 12, 15
_NODE_INPUTS, _OP_TYPE, _ATTRIBUTES, _DOMAIN = 1, 4, 5, 7
_TENSOR, _SUBGRAPH, _TENSORS, _SUBGRAPHS, _SPARSE_TENSOR, _SPARSE_TENSORS = 5, 6, 10, 11, 22, 23
_WEIGHTS = (FLOAT, FLOAT16, 16, UINT8, INT8, 21, 22, 25, 26)  # 16: bfloat16, and numbers of 4 and 2 bits


@dataclass(frozen=True)
class Port:
    """An input or output: its type, and its shape, where sizes that vary have a name or "?"; None: not said."""

    name: str
    dtype: int
    shape: tuple[int | str, ...] | None

    def __str__(self) -> str:
        """The shape, to read."""
        return "?" if self.shape is None else f"[{', '.join(map(plain, self.shape))}]"


@dataclass
class Graph:
    """What a file says. `operators` counts them by name, "domain.Name" outside of ONNX's own, subgraphs too.

    `num_weights` counts those in tensors, packed ones each. `bits` of MatMulNBits. Inputs have no default value.
    """

    path: Path
    producer: str = ""
    inputs: dict[str, Port] = field(default_factory=dict)
    outputs: dict[str, Port] = field(default_factory=dict)
    operators: Counter[str] = field(default_factory=Counter)
    opsets: dict[str, int] = field(default_factory=dict)
    bits: set[int] = field(default_factory=set)
    num_weights: int = 0
    num_bytes: int = 0


def plain(value: int | str) -> str:
    """A number, or a word of a file, for people: on one line, printable on any terminal, short."""
    return shown(value)[1:-1] if isinstance(value, str) else str(value)


def read_graph(path: Path) -> Graph:
    """Raises FormatError for a file that is broken, or lies about its tensors, and Unsupported for what is not run."""
    size = file_size(path)
    if not 2 <= size < MAX_BYTES:
        why = f"{size} bytes: a file has at least 2, and less than {MAX_BYTES}; weights can lie beside it"
        raise FormatError(path, "", f"{why}: export it again")
    model = Message(Budget(path), memoryview(map_file(path)), "model")
    for number, what in ((_TRAINING, "training_info"), (_FUNCTIONS, "functions: inline them (onnx.inliner),")):
        if number in model:
            raise Unsupported(f"{path}: {what} of a model are not supported: export it for inference")
    graph = Graph(path, f"{model.text(2)} {model.text(3)}".strip())
    graph.opsets = {each.text(1): each.integer(2) for each in model.messages(_OPSETS, "opset_import")}
    body = model.message(_GRAPH, "graph")
    if body is None:
        raise FormatError(path, "graph", "is missing: this is no ONNX file, or a broken one")
    _Walk(graph).run(body, size)
    return graph


class _Walk:
    """Goes through a graph and its subgraphs, and notes what is there."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._files = graph, DataFiles(graph.path.parent)
        self._tensors: list[Tensor] = []
        self._packed: dict[str, int] = {}  # the weights of a tensor that holds several in a number, 0: scales of it

    def run(self, body: Message, size: int) -> None:
        graph = self._graph
        constants = self._walk(body, 0)
        graph.inputs = {each.name: each for each in _ports(body, _INPUTS, "input") if each.name not in constants}
        graph.outputs = {each.name: each for each in _ports(body, _OUTPUTS, "output")}
        check_overlaps(graph.path, self._tensors)
        counted = (each for each in self._tensors if each.dtype in _WEIGHTS)
        graph.num_weights = sum(self._packed.get(each.name, math.prod(each.shape)) for each in counted)
        stored = [each.stored for each in self._tensors if each.stored]
        graph.num_bytes = size + sum(each.end - each.begin for each in stored)

    def _walk(self, body: Message, depth: int) -> set[str]:
        """The names of the tensors of this graph."""
        if depth > _MAX_SUBGRAPHS:
            raise body.wrong(f"more than {_MAX_SUBGRAPHS} graphs within each other: export it again")
        if _SPARSE in body:
            raise Unsupported(f"{self._graph.path}: {body.where}: sparse tensors are not supported: make them dense")
        for node in body.messages(_NODES, f"{body.where} node"):
            self._node(node, depth)
        names = set()
        for message in body.messages(_INITIALIZERS, f"{body.where} initializer"):
            tensor = self._tensor(message)
            if tensor.name in names:
                raise message.wrong("the name stands there twice: download the file again")
            names.add(tensor.name)
        return names

    def _tensor(self, message: Message) -> Tensor:
        tensor = read_tensor(message, self._files)
        self._tensors.append(tensor)
        return tensor

    def _node(self, node: Message, depth: int) -> None:
        domain, name = node.text(_DOMAIN), node.text(_OP_TYPE)
        if domain not in DOMAINS:
            what = f"the operator {shown(name)} of {shown(domain)}"
            raise Unsupported(f"{self._graph.path}: {node.where}: {what} is not known: export it with standard ones")
        self._graph.operators[f"{domain}.{name}" if domain not in DOMAINS[:2] else name] += 1
        numbers: dict[str, int] = {}
        for attribute in node.messages(_ATTRIBUTES, f"{node.where} ({shown(name)}) attribute"):
            self._attribute(attribute, depth)
            if isinstance(next(iter(attribute.values(3)), None), int):
                numbers[attribute.text(1)] = attribute.integer(3)
        if name == "MatMulNBits" and {"K", "N"} <= numbers.keys():
            self._graph.bits.add(numbers.get("bits", 4))
            weights, *others = node.texts(_NODE_INPUTS)[1:4] or [""]
            self._packed |= {weights: max(0, numbers["K"] * numbers["N"]), **dict.fromkeys(others, 0)}

    def _attribute(self, attribute: Message, depth: int) -> None:
        if _SPARSE_TENSOR in attribute or _SPARSE_TENSORS in attribute:
            raise Unsupported(
                f"{self._graph.path}: {attribute.where}: sparse tensors are not supported: make them dense"
            )
        for number in (_TENSOR, _TENSORS):
            for message in attribute.messages(number, f"{attribute.where}, tensor"):
                self._tensor(message)
        for number in (_SUBGRAPH, _SUBGRAPHS):
            for body in attribute.messages(number, f"{attribute.where}, graph"):
                self._walk(body, depth + 1)


def _ports(body: Message, number: int, where: str) -> Iterator[Port]:
    for each in body.messages(number, where):
        name, kind = each.text(1), each.message(2, f"{where} type")
        tensor = kind and kind.message(1, f"{where} {shown(name)}")
        if not tensor:
            raise each.wrong(f"{shown(name)} is no tensor: export the model again")
        shape = tensor.message(2, tensor.where)
        yield Port(name, tensor.integer(1), None if shape is None else tuple(_sizes(shape)))


def _sizes(shape: Message) -> Iterator[int | str]:
    sizes = list(shape.messages(1, f"{shape.where} size"))
    if len(sizes) > _MAX_RANK:
        raise shape.wrong(f"has {len(sizes)} dimensions: export it again")
    for size in sizes:
        yield size.integer(1) if 1 in size else size.text(2) or "?"

"""The verbs of the decoder as ONNX operators, in the order of rounding of the reference (backends/reference.py).

Tensors are float32 [batch, sequence, width] unless it is said otherwise. B, S and P count batch, sequence and all
positions, those in the cache too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bitnet_inference.formats.checkpoint import Activation
from bitnet_inference.formats.onnx_writer import MICROSOFT, Graph

BLOCK = 128  # columns of MatMulNBits that share a scale: the quickest size
_LOWEST = float(np.finfo(np.float32).min)  # what is added to a score that must not count: -inf would give NaN


@dataclass(frozen=True)
class Heads:
    """How the width of queries and of keys is divided."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def number(graph: Graph, value: float) -> str:
    """A float32 constant."""
    return graph.constant(value, "float32")


def whole(graph: Graph, *values: int) -> str:
    """An int64 [n] constant."""
    return graph.constant(values, "int64")


def reshaped(graph: Graph, x: str, *shape: int) -> str:
    """x in another shape; 0 keeps a dimension, -1 is what is left."""
    return graph.add("Reshape", x, whole(graph, *shape))


class Quantised:
    """Rows as codes -127 .. 127 by their largest magnitude, token by token, for the products that share them.

    `inverse` is 1 / s_x [B, S, 1]. The nodes for a form of the codes are added when it is first asked for.
    """

    def __init__(self, graph: Graph, x: str, width: int) -> None:
        self._graph, self.width = graph, width
        largest = graph.add("ReduceMax", graph.add("Abs", x), axes=[-1], keepdims=1)
        largest = graph.add("Max", largest, number(graph, 1e-5))
        scale = graph.add("Mul", graph.add("Reciprocal", largest), number(graph, 127.0))
        rounded = graph.add("Round", graph.add("Mul", x, scale))
        self.codes = graph.add("Clip", rounded, number(graph, -128.0), number(graph, 127.0))  # as floats
        self.inverse = graph.add("Reciprocal", scale)

    @cached_property
    def as_bytes(self) -> str:
        """Codes as uint8 around 128: ONNX Runtime multiplies int8 codes thirty times slower."""
        return self._graph.cast(self._graph.add("Add", self.codes, number(self._graph, 128.0)), "uint8")

    @cached_property
    def anchored(self) -> str:
        """Codes in blocks of 127 and a 127 behind each, which meets a weight of 0.

        MatMulNBits with accuracy_level 4 rounds what it multiplies, block by block, to int8 by the largest magnitude.
        Where that is 127 it rounds whole numbers to themselves, so the sums are exact.
        """
        graph, codes, num_blocks = self._graph, self.codes, -(-self.width // (BLOCK - 1))
        if missing := num_blocks * (BLOCK - 1) - self.width:
            codes = graph.add("Pad", codes, whole(graph, 0, 0, 0, 0, 0, missing), number(graph, 0.0))
        blocks = reshaped(graph, codes, 0, 0, num_blocks, BLOCK - 1)
        blocks = graph.add("Pad", blocks, whole(graph, 0, 0, 0, 0, 0, 0, 0, 1), number(graph, 127.0))
        return reshaped(graph, blocks, 0, 0, num_blocks * BLOCK)


def ternary(graph: Graph, x: Quantised, groups: list[tuple[str, str]]) -> str:
    """x times int8 weights [in, out]: sum * (m / s_x), exact sums.

    `groups` has weights and scale. Scales [out] are those of groups of columns in their order, all of one width but the
    last: (sum_0 * m_0 + sum_1 * m_1 + ...) / s_x.
    """
    weight, scale = groups[0]
    if not graph.weights[scale].shape:
        # The Reshape changes nothing: without it ONNX Runtime makes one operator of this, and rounds in another order.
        factors = reshaped(graph, graph.add("Mul", x.inverse, scale), 0, 0, 1)
        return graph.add("Mul", _sums(graph, x.as_bytes, weight), factors)
    widths = [graph.weights[weight].shape[0] for weight, _ in groups]
    parts = graph.split("Split", x.as_bytes, whole(graph, *widths), names=("",) * len(widths), axis=-1)
    total = ""
    for part, (weight, scale) in zip(parts, groups, strict=True):
        product = graph.add("Mul", _sums(graph, part, weight), scale)
        total = graph.add("Add", total, product) if total else product
    return graph.add("Mul", total, x.inverse)


def _sums(graph: Graph, codes: str, weight: str) -> str:
    return graph.cast(graph.add("MatMulInteger", codes, weight, graph.constant(128, "uint8")), "float32")


def small(graph: Graph, x: Quantised, packed: str, scales: str, scale: str) -> str:
    """x times weights of 2 bits [out, blocks, bytes], a scale each block.

    With a common scale that is not "", blocks end in a weight 0 and sums are exact; without, codes are rounded again.
    """
    (rows, num_blocks), size = graph.weights[scales].shape, 4 * graph.weights[packed].shape[2]
    inputs = (x.anchored if scale else x.codes, packed, scales)
    width = num_blocks * size if scale else x.width
    sums = graph.add(
        "MatMulNBits", *inputs, domain=MICROSOFT, N=rows, K=width, bits=2, block_size=size, accuracy_level=4
    )
    return graph.add("Mul", sums, graph.add("Mul", x.inverse, scale) if scale else x.inverse)


def dense(graph: Graph, x: str, weight: str) -> str:
    """x @ W^T for a weight float32 [out, in]."""
    num_out, num_in = graph.weights[weight].shape
    product = graph.add("Gemm", reshaped(graph, x, -1, num_in), weight, transB=1)
    shape = graph.add("Concat", graph.add("Shape", "input_ids"), whole(graph, num_out), axis=0)
    return graph.add("Reshape", product, shape)


def rounded(graph: Graph, x: str, codes: str, scales: str, width: int) -> str:
    """x @ W^T for a weight in 8 bits [out, blocks, columns]; x is rounded as well, block by block."""
    num_out, _, size = graph.weights[codes].shape
    inputs = (x, codes, scales)
    return graph.add(
        "MatMulNBits", *inputs, domain=MICROSOFT, N=num_out, K=width, bits=8, block_size=size, accuracy_level=4
    )


def norm(graph: Graph, x: str, weight: str, eps: float, parts: int = 1) -> str:
    """RMSNorm, of each of the parts of a row on its own."""
    x = x if parts == 1 else reshaped(graph, x, 0, 0, parts, -1)
    mean = graph.add("ReduceMean", graph.add("Mul", x, x), axes=[-1], keepdims=1)
    root = graph.add("Sqrt", graph.add("Add", mean, number(graph, eps)))
    inverse = graph.add("Reciprocal", root)
    normed = graph.add("Mul", graph.add("Mul", x, inverse), weight)
    return normed if parts == 1 else reshaped(graph, normed, 0, 0, -1)


def gate(graph: Graph, x: str, up: str, activation: Activation) -> str:
    """activation(x) * up. SiLU and GELU are x / (1 + exp(-y)), which keeps its bits far below 0."""
    if activation == "relu2":
        positive = graph.add("Relu", x)
        return graph.add("Mul", graph.add("Mul", positive, positive), up)
    y = x if activation == "silu" else _inner(graph, x)
    below = graph.add("Add", number(graph, 1.0), graph.add("Exp", graph.add("Neg", y)))
    return graph.add("Mul", graph.add("Div", x, below), up)


def _inner(graph: Graph, x: str) -> str:
    """2 * sqrt(2 / pi) * (x + 0.044715 * x^3), for (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 * y))."""
    cube = graph.add("Mul", graph.add("Mul", graph.add("Mul", x, x), x), number(graph, 0.044715))
    return graph.add("Mul", graph.add("Add", x, cube), number(graph, 2 * math.sqrt(2 / math.pi)))


def angles(graph: Graph, positions: str, frequencies: str) -> tuple[str, str]:
    """Cosines and sines [B, S, 1, D / 2] of positions int64 [B, S] for frequencies float32 [D / 2]."""
    places = graph.add("Unsqueeze", graph.cast(positions, "float32"), whole(graph, 2, 3))
    turned = graph.add("Mul", places, frequencies)
    return graph.add("Cos", turned), graph.add("Sin", turned)


def rope(graph: Graph, x: str, turned: tuple[str, str], head_dim: int) -> str:
    """The halves of each head turned by `angles`."""
    cosine, sine = turned
    a, b = graph.split("Split", reshaped(graph, x, 0, 0, -1, head_dim), names=("", ""), axis=-1)
    first = graph.add("Sub", graph.add("Mul", a, cosine), graph.add("Mul", b, sine))
    second = graph.add("Add", graph.add("Mul", b, cosine), graph.add("Mul", a, sine))
    return reshaped(graph, graph.add("Concat", first, second, axis=-1), 0, 0, -1)


def mask(graph: Graph, ids: str, attention_mask: str, share: int, window: int) -> str:
    """What is added to scores: 0 where a token sees a position, else so little that nothing is left of it.

    ids [B, S], attention_mask int64 [B, P]; the result is [B, 1, share * S, P]. A token sees what is not padding, up
    to itself, and with a window the last so many.
    """
    zero, one = graph.constant(0, "int64"), graph.constant(1, "int64")
    length, end = (graph.add("Gather", graph.add("Shape", x), one) for x in (ids, attention_mask))
    past = graph.add("Sub", end, length)
    rows, columns = graph.add("Range", past, end, one), graph.add("Range", zero, end, one)
    behind = graph.add("Sub", graph.add("Unsqueeze", rows, whole(graph, 1)), columns)
    seen = graph.add("GreaterOrEqual", behind, zero)
    if window:
        seen = graph.add("And", seen, graph.add("Less", behind, graph.constant(window, "int64")))
    real = graph.add("Unsqueeze", graph.cast(attention_mask, "bool"), whole(graph, 1, 2))
    seen = graph.add("And", seen, real)
    bias = graph.add("Where", seen, number(graph, 0.0), number(graph, _LOWEST))
    return bias if share == 1 else graph.add("Concat", *[bias] * share, axis=2)


def cached(graph: Graph, x: str, past: str, present: str, num_kv_heads: int) -> None:
    """Keys or values behind those of the past, float32 [B, heads, P, D], as the output `present`."""
    heads = graph.add("Transpose", reshaped(graph, x, 0, 0, num_kv_heads, -1), perm=[0, 2, 1, 3])
    graph.add("Concat", past, heads, axis=2, name=present)


def attend(graph: Graph, q: str, keys: str, values: str, bias: str, heads: Heads, scale: float) -> str:
    """Attention of q over the cache; the queries that share keys are rows of one product."""
    share = heads.num_heads // heads.num_kv_heads
    rows = reshaped(graph, q, 0, 0, heads.num_kv_heads, share, heads.head_dim)
    rows = reshaped(graph, graph.add("Transpose", rows, perm=[0, 2, 3, 1, 4]), 0, 0, -1, heads.head_dim)
    scores = graph.add("MatMul", rows, graph.add("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = graph.add("Add", graph.add("Mul", scores, number(graph, scale)), bias)
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), values)
    mixed = reshaped(graph, mixed, 0, 0, share, -1, heads.head_dim)
    return reshaped(graph, graph.add("Transpose", mixed, perm=[0, 3, 1, 2, 4]), 0, 0, -1)

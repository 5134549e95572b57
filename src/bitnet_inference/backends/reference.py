"""The specification: every verb in plain NumPy, in float32, one step at a time. Slow, and never wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.config import EngineConfig, available_bytes
from bitnet_inference.errors import FormatError, InvalidParams, OutOfMemory
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Experts, Ternary, expected_shapes, is_projection
from bitnet_inference.formats.ternarized import findings_of
from bitnet_inference.model.contract import Batch, Capabilities, Expert, WholeHead, best_of
from bitnet_inference.model.decoder import decoder, final_norm, head
from bitnet_inference.model.loader import Progress, sound_codes, sound_matrix
from bitnet_inference.model.rope import inverse_frequencies

Floats = NDArray[np.float32]
BLOCK_TOKENS = 16
SEGMENT_TOKENS = 256  # whose softmax starts afresh


class Int8(NamedTuple):
    """A matrix [out, in] rounded to int8, with a scale a row: float32 [out]."""

    codes: NDArray[np.int8]
    scales: Floats


Stack = tuple[Dense | Ternary | Int8, ...]


def dense_matrix(matrix: Dense) -> Floats:
    """The matrix in float32."""
    if matrix.dtype == "bfloat16":
        return (matrix.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return matrix.data.astype(np.float32)


def ternary_codes(matrix: Ternary) -> NDArray[np.int8]:
    """The codes -1, 0, 1: int8 [out, in]."""
    return ternary.unpack(matrix.data, matrix.layout, matrix.shape)


def bit_linear(x: Floats, codes: NDArray[np.int8], scale: float | Floats, group_size: int = 0) -> Floats:
    """int8 activations a token, exact integer sums, y = sum * (m / s_x), where rows may have an m each: float32 [out].

    With a group size, y = (sum_0 * m_0 + sum_1 * m_1 + ...) / s_x over groups of columns in ascending order.
    """
    quantised, scales = ternary.quantize_rows(x)
    if group_size:
        sums_by_group = ternary.group_sums(quantised, codes, group_size).astype(np.float32)
        totals = np.zeros((len(x), len(codes)), np.float32)
        for group_sums, group_scales in zip(sums_by_group, np.asarray(scale).T, strict=True):
            totals += group_sums * group_scales
        return totals * np.reciprocal(scales)[:, None]
    sums = quantised.astype(np.int64) @ codes.T.astype(np.int64)
    factors: Floats = np.asarray(scale, np.float32) * np.reciprocal(scales)[:, None]
    return np.multiply(sums.astype(np.float32), factors, dtype=np.float32)


def int8_linear(x: Floats, weight: Int8) -> Floats:
    """As bit_linear, but y = sum * (scale of the row / s_x)."""
    quantised, scales = ternary.quantize_rows(x)
    sums = quantised.astype(np.int64) @ weight.codes.T.astype(np.int64)
    return sums.astype(np.float32) * (weight.scales * np.reciprocal(scales)[:, None])


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x * rsqrt(mean(x^2) + eps) * weight, by row, or by parts of a row that are as long as the weight."""
    parts = x.reshape(-1, len(weight))
    squares = np.mean(np.square(parts), axis=-1, keepdims=True, dtype=np.float32)
    roots: Floats = np.reciprocal(np.sqrt(squares + np.float32(eps)))
    normed: Floats = parts * roots * weight
    return normed.reshape(x.shape)


def gated(gate: Floats, up: Floats, activation: str) -> Floats:
    """activation(gate) * up."""
    if activation == "relu2":
        return np.square(np.maximum(gate, 0)) * up
    if activation == "silu7":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    if activation == "gelu":
        wide = gate.astype(np.float64)  # 1 + tanh of what is far below 0 has no bits left in float32
        part = (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))) / 2
        narrow: Floats = (wide * part).astype(np.float32)
        return np.multiply(narrow, up, dtype=np.float32)
    return np.multiply(gate / (np.float32(1) + np.exp(-gate)), up, dtype=np.float32)


def rotated(x: Floats, cosine: Floats, sine: Floats) -> Floats:
    """x: [T, heads, D]; dimension j turns with j + H by the angle of j; cosine and sine: [T, 1, H], H at most D/2."""
    half = cosine.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], axis=-1)


def chosen_experts(scores: Floats, experts: Experts) -> tuple[NDArray[np.intp], Floats]:
    """The best experts of each token, best first, and their shares, both [T, used]."""
    best = np.argsort(-scores, axis=1, kind="stable")[:, : experts.used]
    tops = np.take_along_axis(scores, best, axis=1)
    among = tops if experts.renormalized else scores
    with np.errstate(invalid="ignore"):  # of infinities, which make what is no number
        total = np.exp(among - tops[:, :1]).sum(axis=1, keepdims=True, dtype=np.float32)
        shares: Floats = np.asarray(np.exp(tops - tops[:, :1]) / total, np.float32)
    return best, shares


def attention(
    q: Floats,
    k: Floats,
    v: Floats,
    positions: NDArray[np.int32],
    scale: float,
    window: int = 0,
    cache_dtype: str = "float32",
) -> Floats:
    """q: [T, H, D]; k, v: [P, KV, D] of positions 0..P-1, as the cache holds them; each query sees those up to its own.

    With a window it sees the last so many of these. Unless the cache is float32, what keys and values are multiplied
    by is rounded to bfloat16: queries, and weights against the best score of their segment.
    """
    share = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, share, axis=1), np.repeat(v, share, axis=1)
    factors = ROUNDINGS["float32" if cache_dtype == "float32" else "bfloat16"]
    scores = np.einsum("thd,phd->htp", factors(q), k) * np.float32(scale)
    behind = positions[:, None] - np.arange(len(k))[None, :]
    scores[:, (behind < 0) | (behind >= (window or len(k)))] = -np.inf
    tops = np.maximum.reduceat(scores, range(0, len(k), SEGMENT_TOKENS), axis=-1)
    tops = np.repeat(np.maximum(tops, np.finfo(np.float32).min), SEGMENT_TOKENS, axis=-1)[..., : len(k)]
    weights = np.asarray(np.exp(scores - tops), np.float32)
    shares = np.exp(tops - tops.max(axis=-1, keepdims=True))  # of segments
    if cache_dtype == "int8":
        units = (np.abs(v).max(axis=-1) / np.float32(127)).T[:, None]  # of the codes of each head and position
        factor = np.asarray(factors(weights * units) / np.where(units > 0, units, 1), np.float32)
    else:
        factor = weights = factors(weights)
    total = (weights * shares).sum(axis=-1).T[..., None]
    return np.asarray(np.einsum("htp,phd->thd", factor * shares, v) / total, np.float32)


def to_bfloat16(x: Floats) -> Floats:
    """Rounded to the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def to_int8(x: Floats) -> Floats:
    """Rounded to int8 codes with one scale for each row of the last axis, as float32."""
    scale: Floats = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    codes: Floats = np.rint(x / np.where(scale > 0, scale, np.float32(1)))
    return codes * scale


ROUNDINGS: dict[str, Callable[[Floats], Floats]] = {
    "float32": lambda x: x,
    "bfloat16": to_bfloat16,
    "int8": to_int8,
}


class ReferenceModel:
    """A `Model` that computes each verb at once."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> None:
        if config.head not in ("exact", "unscreened"):
            raise InvalidParams(f'head is "{config.head}", but the reference backend rounds nothing: choose "exact"')
        self.config = checkpoint.config
        self.checkpoint = checkpoint
        self._quantize, self.embedding = config.quantize, config.embedding
        self.round = ROUNDINGS[config.cache_dtype]
        self.attention_dtype = config.cache_dtype  # "float32" for backends that round only what the cache holds
        self.frequencies = [inverse_frequencies(self.config, local) for local in (False, True)]
        self._stacks: dict[tuple[str, ...], Stack] = {}
        width = self.config.num_layers * self.config.num_kv_heads * self.config.head_dim
        self.capabilities = Capabilities(
            BLOCK_TOKENS, 2 * 4 * BLOCK_TOKENS * width, 256, config.batch_tokens, available_bytes() // 2
        )
        self.cache = np.zeros(
            (self.config.num_layers, 2, 0, self.config.num_kv_heads, self.config.head_dim), np.float32
        )
        num_names = sum(1 for _ in expected_shapes(self.config))
        self.notes = findings_of(checkpoint, config)  # what its user should know
        progress(num_names, num_names)  # weights are read when they are used

    def stack(self, names: tuple[str, ...]) -> Stack:
        """The matrices under these names, read once."""
        if names not in self._stacks:
            self._stacks[names] = tuple(map(self._read, names))
        return self._stacks[names]

    def _read(self, name: str) -> Dense | Ternary | Int8:
        matrix = _readable(self.checkpoint, name)
        if isinstance(matrix, Ternary) or self._quantize != "int8" or not is_projection(name):
            return matrix
        return Int8(*ternary.quantize_weights(self.finite(name, dense_matrix(matrix))))

    def finite(self, name: str, weights: Floats) -> Floats:
        """These weights of the matrix under this name, which are to be rounded."""
        if not np.isfinite(weights).all():
            raise FormatError(self.checkpoint.path, name, "a weight is NaN or infinite: download the model again")
        return weights

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks."""
        if num_blocks * self.capabilities.block_bytes > available_bytes():
            raise OutOfMemory(f"a cache of {num_blocks} blocks does not fit: lower the context or the load")
        shape = list(self.cache.shape)
        shape[2] = num_blocks * BLOCK_TOKENS
        self.cache = np.zeros(shape, np.float32)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, when all have been used, and of the reserved cache."""
        return self.checkpoint.num_bytes + self.cache.nbytes

    def forward(self, batch: Batch) -> ReferenceOutput:
        """Advance every sequence of the batch by its tokens."""
        return ReferenceOutput(self, decoder(ReferenceOps(self, batch), self.config))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        for source, target in pairs:
            a, b = source * BLOCK_TOKENS, target * BLOCK_TOKENS
            self.cache[:, :, b : b + BLOCK_TOKENS] = self.cache[:, :, a : a + BLOCK_TOKENS]

    def close(self) -> None:
        """Forget the weights and the cache."""
        self._stacks.clear()
        self.cache = self.cache[:, :, :0]


def _readable(checkpoint: Checkpoint, name: str) -> Dense | Ternary:
    matrix = sound_matrix(checkpoint, name, takes_rows=True)
    if isinstance(matrix, Ternary):
        sound_codes(checkpoint, name, matrix)
    return matrix


def _product(x: Floats, matrix: Dense | Ternary | Int8) -> Floats:
    if isinstance(matrix, Dense):
        return x @ dense_matrix(matrix).T
    if isinstance(matrix, Int8):
        return int8_linear(x, matrix)
    return bit_linear(x, ternary_codes(matrix), matrix.scale, matrix.group_size)


class ReferenceOps:
    """The verbs, computed at once. `batch` is None where only rows are worked on."""

    def __init__(self, model: ReferenceModel, batch: Batch | None) -> None:
        self.model, self.batch = model, batch

    def weight(self, names: Sequence[str]) -> Stack:
        """See Ops."""
        return self.model.stack(tuple(names))

    def embed(self, table: Stack, scale: float) -> Floats:
        """See Ops."""
        assert self.batch is not None and isinstance(table[0], Dense)
        rows = dense_matrix(Dense(table[0].data[self.batch.token_ids], table[0].dtype))
        if self.model.embedding == "int8":
            codes, scales = ternary.quantize_table(self.model.finite("embed", rows))
            rows = codes * scales[:, None]
        return rows * np.float32(scale)

    def norm(self, x: Floats, name: str, eps: float) -> Floats:
        """See Ops."""
        return rms_norm(x, self.model.checkpoint.vector(name), eps)

    def linear(self, x: Floats, weight: Stack, biases: Sequence[str] = ()) -> tuple[Floats, ...]:
        """See Ops."""
        products = (_product(x, matrix) for matrix in weight)
        if not biases:
            return tuple(products)
        vector = self.model.checkpoint.vector
        return tuple(product + vector(name) for product, name in zip(products, biases, strict=True))

    def rope(self, x: Floats, local: bool) -> Floats:
        """See Ops."""
        assert self.batch is not None
        angles = self.batch.positions.astype(np.float32)[:, None] * self.model.frequencies[local]
        heads = x.reshape(len(x), -1, self.model.config.head_dim)
        return rotated(heads, np.cos(angles)[:, None], np.sin(angles)[:, None]).reshape(x.shape)

    def attend(self, q: Floats, k: Floats, v: Floats, layer: int) -> Floats:
        """See Ops."""
        assert self.batch is not None
        heads = (-1, self.model.config.num_kv_heads, self.model.config.head_dim)
        keys, values = self.model.cache[layer]
        keys[self.batch.slots] = self.model.round(k.reshape(heads))
        values[self.batch.slots] = self.model.round(v.reshape(heads))
        window = self.model.config.window_of(layer)
        return np.concatenate(
            [
                self._attend_sequence(q[begin:end], keys, values, self.batch.block_tables[s], slice(begin, end), window)
                for s, (begin, end) in enumerate(pairwise(self.batch.starts))
                if end > begin
            ]
        )

    def _attend_sequence(
        self, q: Floats, keys: Floats, values: Floats, table: NDArray[np.int32], tokens: slice, window: int
    ) -> Floats:
        assert self.batch is not None
        positions = self.batch.positions[tokens]
        seen = np.arange(positions.max() + 1)
        slots = table[seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS
        heads = q.reshape(len(q), -1, self.model.config.head_dim)
        scale = self.model.config.score_scale
        dtype = self.model.attention_dtype
        return attention(heads, keys[slots], values[slots], positions, scale, window, dtype).reshape(q.shape)

    def gate(self, gate: Floats, up: Floats, activation: str) -> Floats:
        """See Ops."""
        return gated(gate, up, activation)

    def mix(self, x: Floats, scores: Floats, experts: Experts, expert: Expert[Floats]) -> Floats:
        """See Ops."""
        best, shares = chosen_experts(scores, experts)
        outputs = np.zeros((*best.shape, x.shape[1]), np.float32)
        for number in np.unique(best):
            tokens, places = np.nonzero(best == number)
            outputs[tokens, places] = expert(self, int(number), x[tokens])
        total = np.zeros_like(outputs[:, 0])
        for place in range(experts.used):
            total += shares[:, place, None] * outputs[:, place]
        return total

    def add(self, x: Floats, y: Floats) -> Floats:
        """See Ops."""
        return x + y


class ReferenceOutput(WholeHead):
    """The final hidden rows of a forward, before the last norm: [T, hidden]."""

    def __init__(self, model: ReferenceModel, hidden: Floats) -> None:
        self._model, self._hidden = model, hidden

    def full(self, rows: Sequence[int]) -> Floats:
        """The logits of these tokens: [len(rows), vocab]."""
        ops = ReferenceOps(self._model, None)
        return np.ascontiguousarray(head(ops, self._model.config, self._hidden[list(rows)]))

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], Floats]:
        """See Output."""
        return best_of(self.full(rows), k)

    def hidden(self, rows: Sequence[int]) -> Floats:
        """The hidden states after the final norm: [len(rows), hidden]."""
        return final_norm(ReferenceOps(self._model, None), self._model.config, self._hidden[list(rows)])

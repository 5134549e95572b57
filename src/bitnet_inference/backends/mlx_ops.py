"""The verbs of the decoder in MLX, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx

from bitnet_inference.backends.mlx_batch import Group, Step
from bitnet_inference.backends.mlx_cache import MlxCache, Rows
from bitnet_inference.backends.mlx_metal import MetalProducts
from bitnet_inference.backends.mlx_weights import Floats, Stack, products
from bitnet_inference.formats.checkpoint import Experts, ModelConfig
from bitnet_inference.model.contract import Expert

_GELU = 2 * math.sqrt(2 / math.pi)


class Weights(NamedTuple):
    """What a model is made of, by canonical names; `frequencies`: of layers, and of local ones, [head_dim / 2]."""

    config: ModelConfig
    stacks: Mapping[tuple[str, ...], Stack]
    vectors: Mapping[str, mx.array]
    frequencies: tuple[mx.array, mx.array]
    metal: MetalProducts | None


class MlxOps:
    """The verbs on rows alone: those of the head."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self.config = weights, weights.config

    def weight(self, names: Sequence[str]) -> Stack:
        """See Ops."""
        return self._weights.stacks[tuple(names)]

    def norm(self, x: mx.array, name: str, eps: float) -> mx.array:
        """See Ops."""
        vector = self._weights.vectors[name]
        return mx.fast.rms_norm(x.reshape(-1, vector.size), vector, eps).reshape(x.shape)

    def linear(self, x: mx.array, weight: Stack, biases: Sequence[str] = ()) -> tuple[mx.array, ...]:
        """See Ops."""
        found = products(x, weight, self._weights.metal)
        vectors = self._weights.vectors
        return tuple(y + vectors[name] for y, name in zip(found, biases, strict=True)) if biases else found

    def gate(self, gate: mx.array, up: mx.array, activation: str) -> mx.array:
        """See Ops."""
        if activation == "relu2":
            return mx.square(mx.maximum(gate, 0)) * up
        if activation == "gelu":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u, which does not cancel
            return gate * mx.sigmoid(_GELU * (gate + 0.044715 * gate * gate * gate)) * up
        return gate * mx.sigmoid(gate) * up

    def add(self, x: mx.array, y: mx.array) -> mx.array:
        """See Ops."""
        return x + y


class StepOps(MlxOps):
    """All verbs, on the tokens of a step. The cache is read only: `rows` are what is to be written, layer by layer."""

    def __init__(self, weights: Weights, cache: MlxCache, step: Step, layers: Sequence[Rows]) -> None:
        """`layers`: those of the cache."""
        super().__init__(weights)
        self._cache, self._step, self._layers = cache, step, layers
        self._turns: dict[bool, tuple[mx.array, mx.array]] = {}
        self.rows: list[Rows] = []

    def embed(self, table: Stack, scale: float) -> mx.array:
        """See Ops."""
        (matrix,) = table
        assert isinstance(matrix, Floats), "embeddings are dense"
        x = matrix.data[self._step.token_ids].astype(mx.float32)
        return x if scale == 1 else x * scale

    def rope(self, x: mx.array, local: bool) -> mx.array:
        """See Ops."""
        if local not in self._turns:
            angles = self._step.positions.astype(mx.float32)[:, None, None] * self._weights.frequencies[local]
            self._turns[local] = mx.cos(angles), mx.sin(angles)
        cosine, sine = self._turns[local]
        a, b = mx.split(x.reshape(len(x), -1, self.config.head_dim), 2, axis=-1)
        return mx.concatenate([a * cosine - b * sine, b * cosine + a * sine], axis=-1).reshape(x.shape)

    def mix(self, x: mx.array, scores: mx.array, experts: Experts, expert: Expert[mx.array]) -> mx.array:
        """See Ops; automatic.py gives no such model: what is computed depends on scores, unknown to a compiled step."""
        raise AssertionError("models with experts run on other devices")

    def attend(self, q: mx.array, k: mx.array, v: mx.array, layer: int) -> mx.array:
        """See Ops. The rows are not yet in the cache: they are laid over what is gathered from it."""
        head_dim = self.config.head_dim
        rows = self._cache.encode(mx.stack([k, v], axis=1).reshape(len(k), 2, -1, head_dim))
        self.rows.append(rows)
        queries, fresh = q.reshape(len(q), -1, head_dim), self._cache.decode(rows)
        parts = [self._attend(group, queries, fresh, layer) for group in self._step.groups]
        found = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return (found if self._step.order is None else found[self._step.order]).reshape(q.shape)

    def _attend(self, group: Group, queries: mx.array, fresh: mx.array, layer: int) -> mx.array:
        """The sequences of a group, one after the other: [C * L, heads, head_dim]."""
        config = self.config
        rows = mx.arange(len(fresh))[:, None] if group.rows is None else group.rows
        seen = self._cache.decode(tuple(array[group.past] for array in self._layers[layer]))
        seen[mx.arange(len(rows))[:, None], group.positions] = fresh[rows]
        keys, values = (seen[:, :, each].swapaxes(1, 2) for each in (0, 1))
        behind = group.positions[:, None, :, None] - mx.arange(seen.shape[1])
        window = config.window_of(layer) or seen.shape[1]
        found = mx.fast.scaled_dot_product_attention(
            queries[rows].swapaxes(1, 2), keys, values, scale=config.score_scale, mask=(behind >= 0) & (behind < window)
        )
        return found.swapaxes(1, 2).reshape(-1, *queries.shape[1:])

"""Fused plans run in NumPy by a group of ranks in lockstep: what a device does with them, one step at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from bitnet_inference import ternary
from bitnet_inference.backends.reference import attention, dense_matrix, gated, rms_norm, rotated, ternary_codes
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, ModelConfig
from bitnet_inference.model.loader import Plans, fused, record
from bitnet_inference.model.plan import Plan, Step, Value
from bitnet_inference.model.rope import inverse_frequencies
from bitnet_inference.model.shard_plans import shard
from bitnet_inference.model.shard_weights import ShardCheckpoint
from bitnet_inference.model.shards import rank_config

Arrays = dict[int, Any]


class Rank:
    """One rank: its plans, its rows of the weights, its heads of one sequence from position 0 on."""

    def __init__(self, plans: Plans, config: ModelConfig, checkpoint: Checkpoint, token_ids: np.ndarray) -> None:
        self.plans, self.config, self.checkpoint, self.token_ids = plans, config, checkpoint, token_ids
        self.values: Arrays = {}
        self.past: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def begin(self, plan: Plan, x: np.ndarray | None) -> None:
        """Nothing is known but the plan's input."""
        self.values = {} if plan.input is None or x is None else {plan.input.id: x}

    def get(self, value: Value) -> Any:
        """The columns of a value."""
        whole = self.values[value.root.id]
        return whole if value.parent is None else whole[:, value.column : value.column + value.width]

    def put(self, value: Value, rows: Any) -> None:
        """Write the columns of a value; all others are not known yet."""
        if value.parent is None:
            self.values[value.id] = rows
            return
        missing = np.full((len(rows), value.root.width), np.nan, np.float32)
        self.values.setdefault(value.root.id, missing)[:, value.column : value.column + value.width] = rows

    def do(self, step: Step) -> None:
        """One step that needs nobody else."""
        inputs = [self.get(value) for value in step.inputs]
        if step.verb == "rope+write":
            self._rope_write(step)
            return
        makers = {"embed": self._embed, "rotations": self._rotations, "attend": self._attend, "bias": self._bias}
        rows = (makers | {"add": np.add}).get(
            step.verb, self._product if step.parts[0] in ("ternary", "dense") else self._rows
        )
        result = rows(*inputs) if step.verb == "add" else rows(step, *inputs)
        assert step.output is not None
        found = result[0] if isinstance(result, tuple) else result
        assert found.shape[1] == step.output.width, step
        self.put(step.output, result)

    def _embed(self, step: Step) -> np.ndarray:
        table = self.checkpoint.matrix(step.weights[0])
        assert isinstance(table, Dense)
        first = step.attributes.get("first", 0)
        mine = (self.token_ids >= first) & (self.token_ids < first + len(table.data))
        rows = dense_matrix(table)[np.where(mine, self.token_ids - first, 0)]
        return np.where(mine[:, None], rows * np.float32(step.attributes.get("scale", 1.0)), np.float32(0))

    def _rows(self, step: Step, x: np.ndarray, up: np.ndarray | None = None) -> Any:
        if "gate" in step.parts:
            x = gated(x, up, step.attributes["activation"])
        if "norm" in step.parts:
            x = rms_norm(x, self.checkpoint.vector(step.weights[0]), step.attributes["eps"])
        return ternary.quantize_rows(x) if "quantize" in step.parts else x

    def _bias(self, step: Step, x: np.ndarray) -> np.ndarray:
        return x + np.concatenate([self.checkpoint.vector(name) for name in step.weights])

    def _product(self, step: Step, x: Any, residual: np.ndarray | None = None) -> np.ndarray:
        results = [self._times(x, self.checkpoint.matrix(name)) for name in step.weights]
        y = np.concatenate(results, axis=1)
        return y if residual is None else residual + y

    def _times(self, x: Any, matrix: Any) -> np.ndarray:
        if isinstance(matrix, Dense):  # each sum over columns of its own, in an order that the number of rows is not in
            return np.stack([(x * row).sum(axis=1) for row in dense_matrix(matrix)], axis=1)
        codes, scales = x
        if isinstance(matrix.scale, np.ndarray):
            sums = ternary.group_sums(codes, ternary_codes(matrix), matrix.group_size).astype(np.float32)
            parts = [part * scale for part, scale in zip(sums, matrix.scale.T, strict=True)]
            return sum(parts[1:], parts[0]) * np.reciprocal(scales)[:, None]
        sums = codes.astype(np.int64) @ ternary_codes(matrix).T.astype(np.int64)
        return sums.astype(np.float32) * (np.float32(matrix.scale) * np.reciprocal(scales))[:, None]

    def _rotations(self, step: Step) -> np.ndarray:
        frequencies = inverse_frequencies(self.config, step.attributes.get("local", False))
        angles = np.arange(len(self.token_ids), dtype=np.float32)[:, None] * frequencies
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    def _heads(self, rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), -1, self.config.head_dim)

    def _rope_write(self, step: Step) -> None:
        q, k, v = (self._heads(self.get(value)) for value in step.inputs[:3])
        cosine, sine = np.split(self.get(step.inputs[3])[:, None], 2, axis=-1)
        self.put(step.inputs[0], rotated(q, cosine, sine).reshape(len(q), -1))
        assert k.shape[1] == v.shape[1] == self.config.num_kv_heads
        self.past[step.attributes["layer"]] = rotated(k, cosine, sine), v

    def _attend(self, step: Step, q: np.ndarray) -> np.ndarray:
        layer, heads, positions = step.attributes["layer"], self._heads(q), np.arange(len(q), dtype=np.int32)
        keys, values = self.past[layer]
        share, each = self.config.num_heads // self.config.num_kv_heads, []
        for head in range(self.config.num_heads):
            k, v = (np.ascontiguousarray(part[:, head // share : head // share + 1]) for part in (keys, values))
            one = np.ascontiguousarray(heads[:, head : head + 1])
            window = self.config.window_of(layer)
            each.append(attention(one, k, v, positions, self.config.score_scale, window)[:, 0])
        return np.concatenate(each, axis=1)


def one_rank(checkpoint: Checkpoint, token_ids: np.ndarray) -> list[Rank]:
    """The model as it is."""
    plans = fused(record(checkpoint.config), checkpoint)
    return [Rank(plans, checkpoint.config, checkpoint, token_ids)]


def ranks(checkpoint: Checkpoint, token_ids: np.ndarray, size: int) -> list[Rank]:
    """The model, split."""
    config, plans = checkpoint.config, fused(record(checkpoint.config), checkpoint)
    parts = ((shard(plans, config, rank, size), rank_config(config, rank, size)) for rank in range(size))
    return [Rank(*part, ShardCheckpoint(checkpoint, at, size), token_ids) for at, part in enumerate(parts)]


def run(group: list[Rank], part: str, x: np.ndarray | None = None) -> list[np.ndarray]:
    """What a plan ("body", "head" or "norm") yields on every rank."""
    plans: list[Plan] = [getattr(rank.plans, part) for rank in group]
    for rank, plan in zip(group, plans, strict=True):
        rank.begin(plan, x)
    for steps in zip(*(plan.steps for plan in plans), strict=True):
        (verb,) = {step.verb for step in steps}
        parts = [rank.get(step.inputs[0]) for rank, step in zip(group, steps, strict=True) if step.inputs]
        for at, (rank, step) in enumerate(zip(group, steps, strict=True)):
            if verb == "gather":
                assert step.attributes["widths"][at] == parts[at].shape[1]
                rank.put(step.output, np.concatenate(parts, axis=1))
            elif verb == "sum":
                assert (np.sum([part != 0 for part in parts], axis=0) <= 1).all(), "nothing but zeros is added"
                rank.values[step.inputs[0].id] = np.sum(parts, axis=0)
            else:
                rank.do(step)
    return [rank.get(plan.output) for rank, plan in zip(group, plans, strict=True)]

"""From a fused plan to launches: every step of the plan becomes one call here, over rows in one arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from bitnet_inference.backends.cuda_attention import attend
from bitnet_inference.backends.cuda_cache import Cache, DeviceBatch, rope_write
from bitnet_inference.backends.cuda_products import DenseWeight, Int8Weight, TernaryWeight, dense, embed, int8, ternary
from bitnet_inference.backends.cuda_rows import Codes, add, rotations, rows
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.model.buffers import num_floats, padded_codes, plan_buffers
from bitnet_inference.model.plan import Plan, Step, Value
from bitnet_inference.model.rope import inverse_frequencies

if TYPE_CHECKING:
    from bitnet_inference.backends.cuda_group import Group

Weight = TernaryWeight | DenseWeight | Int8Weight
WeightKey = tuple[str, tuple[str, ...]]  # "ternary", "int8" or "dense", and canonical names


class Parts(NamedTuple):
    """What plans compute with, on one device; `vectors` are the weights of norms, and biases.

    Plans of a rank of several need its `group`.
    """

    config: ModelConfig
    weights: Mapping[WeightKey, Weight]
    vectors: Mapping[str, Tensor]
    cache: Cache
    device: torch.device
    group: Group | None = None


class _Run(NamedTuple):
    """One run of a program; `input` and `output` are the plan's, [num_tokens, ...]."""

    num_tokens: int
    batch: DeviceBatch | None
    input: Tensor | None
    output: Tensor


_Launch = Callable[[_Run], None]
_Rows = Callable[[_Run], Tensor]


def weight_key(step: Step) -> WeightKey:
    """Which weight a step of a fused plan multiplies with, or looks up."""
    verb = step.parts[0]
    return ("dense" if verb == "embed" else verb), step.weights


class Program:
    """A plan for up to `max_tokens` rows. Its values lie in an `arena` of its own, each in one piece.

    Between two runs nothing in the arena is needed.
    """

    def __init__(self, plan: Plan, parts: Parts, max_tokens: int) -> None:
        self._plan, self._parts, self._max_tokens = plan, parts, max_tokens
        self._layout = plan_buffers(plan)
        self.arena = torch.zeros(self._layout.num_floats * max_tokens, dtype=torch.float32, device=parts.device)
        self._launches = [self._compiled(step) for step in plan.steps]

    def run(
        self, num_tokens: int, output: Tensor, *, batch: DeviceBatch | None = None, input: Tensor | None = None
    ) -> None:
        """Launch the steps for so many rows: from `batch` or `input` to `output`, both of at least as many."""
        assert num_tokens <= self._max_tokens, f"{num_tokens} rows, at most {self._max_tokens} have room"
        given = None if input is None else input.narrow(0, 0, num_tokens)
        run = _Run(num_tokens, batch, given, output.narrow(0, 0, num_tokens))
        for launch in self._launches:
            launch(run)

    def _compiled(self, step: Step) -> _Launch:
        if step.parts[0] in ("gate", "norm", "quantize"):
            return self._rows_step(step)
        return {
            "embed": self._embed,
            "ternary": self._product,
            "int8": self._product,
            "dense": self._product,
            "rotations": self._rotations,
            "rope": self._rope_write,
            "attend": self._attend,
            "add": self._add,
            "bias": self._bias,
            "gather": self._gather,
            "sum": self._sum,
        }[step.parts[0]](step)

    def _rows(self, value: Value | None) -> _Rows:
        assert value is not None and value.root.kind == "float32"
        root, columns = value.root, (1, value.column, value.width)
        if root == self._plan.output:
            return lambda run: run.output.narrow(*columns)
        if root == self._plan.input:
            return lambda run: _given(run).narrow(*columns)
        whole = self._region(root).narrow(0, 0, self._max_tokens * root.width)
        places = whole.view(self._max_tokens, root.width).narrow(*columns)
        return lambda run: places.narrow(0, 0, run.num_tokens)

    def _codes(self, value: Value | None) -> Callable[[_Run], Codes]:
        assert value is not None and value.kind == "int8"
        region, count, width = self._region(value), self._max_tokens, value.width
        codes = region.view(torch.int8).narrow(0, 0, count * width).view(count, width)
        scales = region.narrow(0, padded_codes(width) // 4 * count, count)
        return lambda run: Codes(codes.narrow(0, 0, run.num_tokens), scales.narrow(0, 0, run.num_tokens))

    def _region(self, root: Value) -> Tensor:
        offset = self._layout.offsets[root.id]
        return self.arena.narrow(0, offset * self._max_tokens, num_floats(root) * self._max_tokens)

    def _rows_step(self, step: Step) -> _Launch:
        x = self._rows(step.inputs[0])
        up = self._rows(step.inputs[1]) if "gate" in step.parts else None
        weight = self._parts.vectors[step.weights[0]] if "norm" in step.parts else None
        activation, eps = step.attributes.get("activation"), step.attributes.get("eps", 0.0)
        out = self._codes(step.output) if step.parts[-1] == "quantize" else self._rows(step.output)
        return lambda run: rows(x(run), up and up(run), activation, weight, eps, out(run))

    def _embed(self, step: Step) -> _Launch:
        weight, out = self._parts.weights[weight_key(step)], self._rows(step.output)
        assert isinstance(weight, DenseWeight), "embeddings are dense"
        scale = step.attributes.get("scale", 1.0)
        if "first" in step.attributes:
            return lambda run: _embed_part(step, weight, _batch(run).token_ids, out(run), scale)
        return lambda run: embed(weight, _batch(run).token_ids, out(run), scale)

    def _product(self, step: Step) -> _Launch:
        weight, out = self._parts.weights[weight_key(step)], self._rows(step.output)
        residual = self._rows(step.inputs[1]) if step.parts[-1] == "add" else None
        if isinstance(weight, DenseWeight):
            x = self._rows(step.inputs[0])
            return lambda run: dense(weight, x(run), out(run), residual and residual(run))
        codes = self._codes(step.inputs[0])
        if isinstance(weight, Int8Weight):
            return lambda run: int8(weight, *codes(run), out(run), residual and residual(run))
        return lambda run: ternary(weight, *codes(run), out(run), residual and residual(run))

    def _rotations(self, step: Step) -> _Launch:
        frequencies = inverse_frequencies(self._parts.config, step.attributes.get("local", False))
        placed, out = torch.from_numpy(frequencies).to(self._parts.device), self._rows(step.output)
        return lambda run: rotations(_batch(run).positions, placed, out(run))

    def _rope_write(self, step: Step) -> _Launch:
        q, k, v, angles = map(self._rows, step.inputs)
        cache, layer = self._parts.cache, step.attributes["layer"] - self._plan.layers.start
        return lambda run: rope_write(cache, layer, q(run), k(run), v(run), angles(run), _batch(run))

    def _attend(self, step: Step) -> _Launch:
        q, out, layer = self._rows(step.inputs[0]), self._rows(step.output), step.attributes["layer"]
        cache, scale, window = self._parts.cache, self._parts.config.score_scale, self._parts.config.window_of(layer)
        cached = layer - self._plan.layers.start
        return lambda run: attend(cache, cached, q(run), out(run), _batch(run), scale, window)

    def _add(self, step: Step) -> _Launch:
        x, y, out = *map(self._rows, step.inputs), self._rows(step.output)
        return lambda run: add(x(run), y(run), out(run))

    def _bias(self, step: Step) -> _Launch:
        """A sum of rows, of which those of the bias are all the same one."""
        x, out = self._rows(step.inputs[0]), self._rows(step.output)
        bias = torch.cat([self._parts.vectors[name] for name in step.weights])
        return lambda run: add(x(run), bias.expand(run.num_tokens, -1), out(run))

    def _gather(self, step: Step) -> _Launch:
        x, out, group = self._rows(step.inputs[0]), self._rows(step.output), self._group()
        return lambda run: group.gather(x(run), step.attributes["widths"], out(run))

    def _sum(self, step: Step) -> _Launch:
        x, group = self._rows(step.inputs[0]), self._group()
        return lambda run: group.sum(x(run))

    def _group(self) -> Group:
        assert self._parts.group is not None, "this plan is a rank's"
        return self._parts.group


def _embed_part(step: Step, weight: DenseWeight, token_ids: Tensor, out: Tensor, scale: float) -> None:
    """The rows of tokens that the rank has, and 0 for all others."""
    ids = token_ids - step.attributes["first"]
    others = (ids < 0) | (ids >= step.attributes["count"])
    embed(weight, ids.masked_fill_(others, 0), out, scale)
    out.masked_fill_(others[:, None], 0.0)


def _given(run: _Run) -> Tensor:
    assert run.input is not None, "this plan has an input"
    return run.input


def _batch(run: _Run) -> DeviceBatch:
    assert run.batch is not None, "this plan has a batch"
    return run.batch

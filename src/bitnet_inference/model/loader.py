"""From a checkpoint to what a backend needs: soundness, the recorded plans, and the order in which weights are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, ModelConfig, Ternary, expected_shapes, is_projection
from bitnet_inference.model import decoder
from bitnet_inference.model.fusion import PRODUCTS, fuse
from bitnet_inference.model.plan import Plan, Recorder, Value

Progress = Callable[[int, int], None]  # weights read so far, weights in all
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Plans:
    """The computations of a model: `body` from token ids to hidden states, `head` and `norm` from hidden states on.

    Those of a stage, which has some of the layers: its body begins with hidden states where layers come before it, and
    its head and norm have no steps where layers come after it.
    """

    body: Plan
    head: Plan
    norm: Plan


def sound_matrix(checkpoint: Checkpoint, name: str, *, takes_rows: bool = False) -> Dense | Ternary:
    """The matrix under a canonical name; raises FormatError where its scales do not fit it.

    Or where its rows have a scale each, unless the caller `takes_rows`.
    """
    matrix = checkpoint.matrix(name)
    if isinstance(matrix, Ternary) and (problem := matrix.problem(takes_rows=takes_rows)):
        raise FormatError(checkpoint.path, name, problem)
    return matrix


def sound_codes(checkpoint: Checkpoint, name: str, matrix: Ternary) -> NDArray[np.int8]:
    """The codes -1, 0 and 1 of the matrix under a name, int8 [out, in]; raises FormatError where one is none."""
    try:
        return ternary.unpack(matrix.data, matrix.layout, matrix.shape)
    except ValueError as error:
        raise FormatError(checkpoint.path, name, f"{error}: download the model again") from error


def record(config: ModelConfig, layers: range | None = None) -> Plans:
    """The plans as the decoder states them, before any pass; with `layers`, those of the stage with these layers."""
    shapes = dict(expected_shapes(config))
    if layers is None or layers.start == 0:
        ops = Recorder(shapes)
        body = ops.plan(decoder.decoder(ops, config, layers))
    else:
        body = _from_hidden(shapes, config, lambda ops, config, x: decoder.decoder(ops, config, layers, x))
    is_last = layers is None or layers.stop == config.num_layers
    parts = (decoder.head, decoder.final_norm) if is_last else (_nothing, _nothing)
    return Plans(body, *(_from_hidden(shapes, config, part) for part in parts))


def _from_hidden(shapes: Shapes, config: ModelConfig, part: Callable[[Recorder, ModelConfig, Value], Value]) -> Plan:
    ops = Recorder(shapes)
    x = ops.value(config.hidden_size)
    return ops.plan(part(ops, config, x), x)


def _nothing(ops: Recorder, config: ModelConfig, x: Value) -> Value:
    return x


def stage_shapes(config: ModelConfig, layers: range | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As expected_shapes, of the stage with these layers: what its plans name."""
    if layers is None:
        yield from expected_shapes(config)
        return
    is_last = layers.stop == config.num_layers
    for name, shape in expected_shapes(config):
        if name.startswith("layers."):
            is_here = int(name.split(".")[1]) in layers
        elif name == "embed":
            is_here = layers.start == 0 or (is_last and config.tie_embeddings)
        else:
            is_here = is_last
        if is_here:
            yield name, shape


def fused(plans: Plans, checkpoint: Checkpoint, rounded: bool = False) -> Plans:
    """The plans after all passes. `rounded`: dense matrices of layers take products of int8.

    Raises Unsupported where experts of a layer would take different steps.
    """
    config, shapes = checkpoint.config, dict(expected_shapes(checkpoint.config))

    def product_of(name: str) -> Literal["ternary", "int8", "dense"]:
        if checkpoint.is_ternary(name):
            return "ternary"
        return "int8" if rounded and is_projection(name) else "dense"

    run = (fuse(plan, product_of, shapes, config.num_rotated) for plan in (plans.body, plans.head, plans.norm))
    after = Plans(*run)
    for step in after.body.steps:
        if len({tuple(each.verb for each in plan.steps) for plan in step.plans}) > 1:  # which would run side by side
            why = "some experts of a layer have ternary matrices where others have none: use another model"
            raise Unsupported(f"{checkpoint.path}: {why}")
    return after


def describe(checkpoint: Checkpoint) -> str:
    """The recorded plan before and after fusion, for `bitnet inspect --plan`."""
    before = record(checkpoint.config)
    after = fused(before, checkpoint)
    parts = (("recorded", before), ("fused", after))
    return "\n\n".join(
        f"{title}: {len(plan.steps)} steps ({name})\n{plan}"
        for title, plans in parts
        for name, plan in (("body", plans.body), ("head", plans.head))
    )


def weight_groups(plans: Plans) -> Iterator[tuple[str, ...]]:
    """The stacks of matrices that the products of the fused plans need, each once, in the order of their use."""
    seen: set[tuple[str, ...]] = set()
    for step in (*plans.body.every_step(), *plans.head.steps):
        if step.parts[0] in ("embed", *PRODUCTS) and step.weights not in seen:
            seen.add(step.weights)
            yield step.weights


def num_weights(shapes: Shapes, names: tuple[str, ...]) -> int:
    """How many weights the matrices under these names have."""
    return sum(math.prod(shapes[name]) for name in names)

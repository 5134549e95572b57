"""From a checkpoint to what a backend needs: soundness, the recorded plans, and the order in which weights are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, ModelConfig, Ternary, expected_shapes, is_projection
from bitnet_inference.model import decoder
from bitnet_inference.model.fusion import PRODUCTS, fuse
from bitnet_inference.model.plan import Plan, Recorder

Progress = Callable[[int, int], None]  # weights read so far, weights in all
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Plans:
    """The computations of a model: `body` from token ids to hidden states, `head` and `norm` from hidden states on."""

    body: Plan
    head: Plan
    norm: Plan


def require_sound(checkpoint: Checkpoint) -> None:
    """Raises FormatError that names everything wrong with the checkpoint."""
    if problems := checkpoint.check():
        raise FormatError(checkpoint.path, "", "; ".join(problems))


def sound_matrix(checkpoint: Checkpoint, name: str) -> Dense | Ternary:
    """The matrix under a canonical name; raises FormatError where its scales do not fit it."""
    matrix = checkpoint.matrix(name)
    if isinstance(matrix, Ternary) and (problem := matrix.problem()):
        raise FormatError(checkpoint.path, name, problem)
    return matrix


def record(config: ModelConfig) -> Plans:
    """The plans as the decoder states them, before any pass."""
    shapes = dict(expected_shapes(config))
    ops = Recorder(shapes)
    body = ops.plan(decoder.decoder(ops, config))
    return Plans(body, _from_hidden(shapes, config, decoder.head), _from_hidden(shapes, config, decoder.final_norm))


def _from_hidden(shapes: Shapes, config: ModelConfig, part: Callable[..., object]) -> Plan:
    ops = Recorder(shapes)
    x = ops.value(config.hidden_size)
    output = part(ops, config, x)
    return ops.plan(output, x)  # type: ignore[arg-type]


def fused(plans: Plans, checkpoint: Checkpoint, rounded: bool = False) -> Plans:
    """The plans after all passes. `rounded`: dense matrices of layers take products of int8."""
    config, shapes = checkpoint.config, dict(expected_shapes(checkpoint.config))

    def product_of(name: str) -> Literal["ternary", "int8", "dense"]:
        if checkpoint.is_ternary(name):
            return "ternary"
        return "int8" if rounded and is_projection(name) else "dense"

    run = (fuse(plan, product_of, shapes, config.head_dim) for plan in (plans.body, plans.head, plans.norm))
    return Plans(*run)


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
    for step in (*plans.body.steps, *plans.head.steps):
        if step.parts[0] in ("embed", *PRODUCTS) and step.weights not in seen:
            seen.add(step.weights)
            yield step.weights


def num_weights(shapes: Shapes, names: tuple[str, ...]) -> int:
    """How many weights the matrices under these names have."""
    return sum(math.prod(shapes[name]) for name in names)

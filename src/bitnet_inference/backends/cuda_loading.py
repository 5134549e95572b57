"""A checkpoint's matrices on their way to the GPU, one stack after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from bitnet_inference.backends.cuda_products import DenseWeight, Int8Weight, TernaryWeight
from bitnet_inference.backends.cuda_program import Weight, WeightKey, weight_key
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes
from bitnet_inference.model.fusion import PRODUCTS, fuse
from bitnet_inference.model.loader import Plans, Progress, fused, num_weights, record, sound_matrix


def cuda_plans(checkpoint: Checkpoint, layers: range | None = None, *, round_layers: bool, round_head: bool) -> Plans:
    """The fused plans of a model or a stage of it, dense matrices rounded to int8 where that is wanted."""
    plans, config = record(checkpoint.config, layers), checkpoint.config
    chosen = fused(plans, checkpoint, round_layers)
    if not round_head:
        return chosen
    return replace(chosen, head=fuse(plans.head, lambda name: "int8", dict(expected_shapes(config)), config.head_dim))


def load_weights(
    checkpoint: Checkpoint, plans: Plans, device: torch.device, progress: Progress
) -> dict[WeightKey, Weight]:
    """Every stack that the plans multiply with, once. Raises FormatError for one that cannot be used."""
    keys, shapes = list(dict.fromkeys(_keys(plans))), dict(expected_shapes(checkpoint.config))
    total, done = sum(num_weights(shapes, names) for _, names in keys), 0
    weights: dict[WeightKey, Weight] = {}
    for kind, names in keys:
        weights[kind, names] = _load(checkpoint, kind, names, device)
        done += num_weights(shapes, names)
        progress(done, total)
    return weights


def load_vectors(checkpoint: Checkpoint, plans: Plans, device: torch.device) -> dict[str, torch.Tensor]:
    """The weights of all norms of the plans, and their biases, by canonical name."""
    steps = (*plans.body.steps, *plans.head.steps, *plans.norm.steps)
    names = dict.fromkeys(name for step in steps if {"norm", "bias"} & {*step.parts} for name in step.weights)
    return {name: torch.from_numpy(np.array(checkpoint.vector(name), np.float32)).to(device) for name in names}


def _keys(plans: Plans) -> Iterator[WeightKey]:
    for step in (*plans.body.steps, *plans.head.steps):
        if step.parts[0] in ("embed", *PRODUCTS):
            yield weight_key(step)


def _load(checkpoint: Checkpoint, kind: str, names: tuple[str, ...], device: torch.device) -> Weight:
    matrices = [sound_matrix(checkpoint, name) for name in names]
    try:
        weight = _weight(checkpoint, kind, names, matrices, device)
    except ValueError as error:
        raise FormatError(checkpoint.path, " ".join(names), f"{error}: download the model again") from error
    for name in names:
        checkpoint.release(name)
    return weight


def _weight(
    checkpoint: Checkpoint, kind: str, names: tuple[str, ...], matrices: list[Dense | Ternary], device: torch.device
) -> Weight:
    packed = [matrix for matrix in matrices if isinstance(matrix, Ternary)]
    dense = [matrix for matrix in matrices if isinstance(matrix, Dense)]
    if kind == "ternary":
        assert not dense, f"{names} are not what they were said to be"
        if len({matrix.group_size for matrix in packed} - {0}) > 1:
            why = "groups of columns that share a scale differ in size: convert the checkpoint to one size"
            raise FormatError(checkpoint.path, " ".join(names), why)
        return TernaryWeight(packed, device)
    assert not packed, f"{names} are not what they were said to be"
    return DenseWeight(dense, device) if kind == "dense" else Int8Weight(dense, device)

"""The weights of the native CPU backend: matrices that are side by side in a plan, read and packed as one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.backends.cpu_program import Weights
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import (
    Checkpoint,
    Dense,
    Ternary,
    expected_shapes,
    is_projection,
    without_expert,
)
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.formats.gguf import GgufCheckpoint
from bitnet_inference.in_threads import in_threads
from bitnet_inference.model.loader import Plans, Progress, num_weights, sound_matrix, weight_groups

_MAX_PACKERS = 4  # threads that read and pack matrices: each needs memory for one


def load_weights(
    checkpoint: Checkpoint, plans: Plans, ternary_format: str, executor: Any, progress: Progress
) -> dict[tuple[str, ...], Any]:
    """The weights of plans, by the names of what is in each. Raises FormatError where one cannot be packed."""
    shapes = dict(expected_shapes(checkpoint.config))
    groups = list(weight_groups(plans))
    sizes = _group_sizes(checkpoint, groups)
    total, done = sum(num_weights(shapes, names) for names in groups), 0
    arena = native.Arena()
    rounded = {step.weights for step in plans.body.every_step() if step.parts[0] == "int8"}

    def room(names: tuple[str, ...]) -> Any:
        if checkpoint.is_ternary(names[0]):
            rows, columns = [shapes[name][0] for name in names], shapes[names[0]][1]
            return native.TernaryWeight(columns, rows, ternary_format, sizes[_alike(names)], arena)
        if not is_projection(names[0]):
            return _table(checkpoint, names[0], executor)
        return _rounded(checkpoint, names, executor) if names in rounded else _dense(checkpoint, names)

    weights = {names: room(names) for names in groups}
    packed = in_threads(partial(_pack, checkpoint, weights), groups, min(executor.num_threads, _MAX_PACKERS))
    for names, _ in zip(groups, packed, strict=True):
        done += num_weights(shapes, names)
        progress(done, total)
    return weights


def _group_sizes(checkpoint: Checkpoint, groups: list[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """How many columns share a scale, by what is alike: experts take a step together, whatever their scales are."""
    sizes: dict[tuple[str, ...], int] = {}
    for names in groups:
        if not checkpoint.is_ternary(names[0]):
            continue
        size, *others = {*map(checkpoint.group_size, names), sizes.get(_alike(names), 0)} - {0} or {0}
        if others:
            why = "groups of columns that share a scale differ in size: convert the checkpoint to one size"
            raise FormatError(checkpoint.path, " ".join(names), why)
        sizes[_alike(names)] = size
    return sizes


def _alike(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names without the numbers of experts."""
    return tuple(map(without_expert, names))


def _pack(checkpoint: Checkpoint, weights: dict[tuple[str, ...], Any], names: tuple[str, ...]) -> None:
    """Read ternary matrices and pack them into the room for them; dense ones need nothing."""
    packed = weights[names]
    if not isinstance(packed, native.TernaryWeight):
        return
    group_size = packed.group_columns
    for part, name in enumerate(names):
        matrix = sound_matrix(checkpoint, name, takes_rows=True)
        assert not isinstance(matrix, Dense) and matrix.group_size in (0, group_size), (
            f"{name} is not what it was said to be"
        )
        scale = _group_scales(matrix, group_size) if group_size else _row_scales(matrix)
        try:
            data = np.ascontiguousarray(matrix.data).view(np.uint8)
            packed.pack(part, data.reshape(len(data), -1), matrix.layout, scale)
        except ValueError as error:
            raise FormatError(checkpoint.path, name, f"{error}: download the model again") from error
        checkpoint.release(name)


def _group_scales(matrix: Ternary, group_size: int) -> NDArray[np.float32]:
    """Scales for every group of columns, also where the matrix has one for all or one a row."""
    rows, columns = matrix.shape
    if matrix.group_size:
        return np.require(matrix.scale, requirements=["C", "A"])
    by_row = np.broadcast_to(np.asarray(matrix.scale, np.float32), rows)
    return np.repeat(by_row[:, None], -(-columns // group_size), axis=1)


def _row_scales(matrix: Ternary) -> float | NDArray[np.float32]:
    """The scale, or one for each row where the matrix has these."""
    return np.require(matrix.scale, requirements=["C", "A"]) if isinstance(matrix.scale, np.ndarray) else matrix.scale


def _table(checkpoint: Checkpoint, name: str, executor: Any) -> Any:
    """Embeddings or a head: made of codes where they are ternary with scales for groups of columns, which is the same.

    GGUF files tell; of others it is seen.
    """
    codes = checkpoint.table_codes(name) if isinstance(checkpoint, GgufCheckpoint) else None
    if codes is not None:
        data, scales = np.ascontiguousarray(codes.data).view(np.uint8), _group_scales(codes, codes.group_size)
        coded = native.DenseWeight.of_codes(data, codes.layout, scales, codes.shape[1], codes.group_size)
    else:
        weight = _dense(checkpoint, (name,))
        coded = weight.as_codes(executor)
        if coded is None:
            return weight
    checkpoint.release(name)
    return coded


def _dense(checkpoint: Checkpoint, names: tuple[str, ...]) -> Any:
    """One below the other, in the dtype that they have; in float32, which is exact, where dtypes differ."""
    matrices = [checkpoint.matrix(name) for name in names]
    dense = [matrix for matrix in matrices if isinstance(matrix, Dense)]
    assert len(dense) == len(names), f"{names} are not all dense"
    if len({matrix.dtype for matrix in dense}) > 1:
        dense = [Dense(to_float32(matrix.data, matrix.dtype), "float32") for matrix in dense]
    data = dense[0].data if len(dense) == 1 else np.concatenate([matrix.data for matrix in dense])
    return native.DenseWeight(_bits(data), dense[0].dtype)


def _rounded(checkpoint: Checkpoint, names: tuple[str, ...], executor: Any) -> Any:
    weight = quantised(checkpoint, names, _dense(checkpoint, names), 8, executor)
    for name in names:
        checkpoint.release(name)
    return weight


def quantised(checkpoint: Checkpoint, names: tuple[str, ...], weight: Any, bits: int, executor: Any) -> Any:
    """A dense weight in so many bits, a scale for each row. Raises FormatError where that is not possible."""
    rounded = native.QuantisedHead(weight, bits, executor)
    if not rounded.is_finite:
        why = "a weight is NaN, infinite, or too large to be rounded: download the model again"
        raise FormatError(checkpoint.path, " ".join(names), why)
    return rounded


def rounded_table(checkpoint: Checkpoint, weights: Weights, executor: Any) -> dict[tuple[str, ...], Any]:
    """What embeddings are looked up in, in the place of their weight, which a tied head reads."""
    try:
        return {("embed",): native.Int8Table(weights["embed",], executor)}
    except ValueError as error:
        raise FormatError(checkpoint.path, "embed", f"{error}: download the model again") from error


def _bits(data: NDArray[Any]) -> NDArray[Any]:
    """The array, 16-bit floats as uint16, on an address that its item size divides."""
    data = data if data.dtype == np.float32 else data.view(np.uint16)
    return np.require(data, requirements=["C", "A"])

"""Dense checkpoints that are read as ternary ones: master weights, and whatever somebody wants to be rounded so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native, ternary
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.formats.checkpoint import (
    GROUP_SIZES,
    ChangedCheckpoint,
    Checkpoint,
    Dense,
    Ternary,
    expected_shapes,
    is_projection,
)
from bitnet_inference.formats.floats import rounded, to_float32

_CHUNK_WEIGHTS = 1 << 22
_MEASURED_MATRICES, _MEASURED_ROWS = 16, 64  # at most, of what is rounded to int8
_TOLD = 0.01  # an error from which on it is told: more than the rounding of weights to 16 bits
Floats = NDArray[np.float32]


def quantized(checkpoint: Checkpoint, how: str) -> Checkpoint:
    """The checkpoint as `quantize` of EngineConfig wants it read; rounding to int8 is the backends' own.

    Raises InvalidParams where its layers have no dense matrix.
    """
    if how == "none":
        return checkpoint
    dense = _dense_projections(checkpoint)
    if not dense:
        why = f'quantize is "{how}", but the matrices of {checkpoint.path} are ternary already'
        raise InvalidParams(f"{why}: leave it out")
    return TernarizedCheckpoint(checkpoint, frozenset(dense)) if how == "ternary" else checkpoint


def _dense_projections(checkpoint: Checkpoint) -> list[str]:
    names = (name for name, _ in expected_shapes(checkpoint.config) if is_projection(name))
    return [name for name in names if not checkpoint.is_ternary(name)]


def ternarized(path: Path, name: str, matrix: Dense) -> Ternary:
    """Master weights as transformers' `WeightQuant` rounds them, m in their dtype, as it is stored there.

    Raises FormatError where a weight is not finite.
    """
    codes, scale = native.ternarize(matrix.data, matrix.dtype)
    if not math.isfinite(scale):
        raise FormatError(path, name, "a master weight is NaN or infinite: download the model again")
    rows, columns = codes.shape
    return Ternary(codes, "codes", (rows, columns), float(rounded(np.float32(scale), matrix.dtype)))


def by_rows(path: Path, name: str, matrix: Dense) -> Ternary:
    """A matrix of -m, 0 and m with an m for each row; raises FormatError where a row has other weights."""
    rows, columns = matrix.data.shape
    codes, scales = np.empty((rows, columns), np.int8), np.empty(rows, np.float32)
    step = max(1, _CHUNK_WEIGHTS // columns)
    for part in (slice(begin, begin + step) for begin in range(0, rows, step)):
        weights = to_float32(matrix.data[part], matrix.dtype)
        sizes = np.abs(weights)
        scales[part] = sizes.max(axis=1)
        codes[part] = np.sign(weights)
        if not np.isfinite(scales[part]).all() or not np.array_equal(np.abs(codes[part]) * scales[part, None], sizes):
            why = "a row has other weights than -m, 0 and m of its own: use the model as it was published"
            raise FormatError(path, name, why)
    return Ternary(codes, "codes", (rows, columns), scales)


def exact_ternary(matrix: Dense) -> Ternary | None:
    """A matrix of m, 0 and -m alone, whose m is its largest value and not its mean; None for all others."""
    sizes = np.abs(to_float32(matrix.data[:1], matrix.dtype))
    if len(np.unique(sizes[sizes > 0])) > 1:
        return None
    weights = to_float32(matrix.data, matrix.dtype)
    scale = np.abs(weights).max()
    codes = np.sign(weights)
    if not 0 < scale < np.inf or not np.array_equal(codes * scale, weights):
        return None
    rows, columns = weights.shape
    return Ternary(codes.astype(np.int8), "codes", (rows, columns), float(scale))


def exact_group_size(matrix: Dense) -> int:
    """How many columns of a row share a scale, 128 or 64, where all weights are m, 0 and -m; 0 where they are not.

    And 0 where all of the matrix has one scale.
    """
    for size in sorted(GROUP_SIZES, reverse=True):
        scales = _exact_scales(matrix, size)
        if scales is not None:
            return size if len(scales) > 1 else 0
    return 0


def _exact_scales(matrix: Dense, size: int) -> Floats | None:
    """The different scales above 0 of groups of so many columns; None where a group has other weights too."""
    rows, columns = matrix.data.shape
    if columns % size:
        return None
    step, found = max(1, _CHUNK_WEIGHTS // columns), np.zeros(0, np.float32)
    for part in chain([slice(0, 1)], (slice(begin, begin + step) for begin in range(0, rows, step))):  # one row first
        sizes = np.abs(to_float32(matrix.data[part], matrix.dtype)).reshape(-1, size)
        largest = sizes.max(axis=1, keepdims=True)
        if not np.isfinite(largest).all() or not ((sizes == largest) | (sizes == 0)).all():
            return None
        found = np.union1d(found, largest[largest > 0])
    return found


def exact_groups(matrix: Dense, size: int) -> Ternary:
    """A matrix for which exact_group_size says so."""
    weights = to_float32(matrix.data, matrix.dtype)
    rows, columns = weights.shape
    scales = np.abs(weights).reshape(rows, -1, size).max(axis=2)
    return Ternary(np.sign(weights).astype(np.int8), "codes", (rows, columns), scales, size)


class TernarizedCheckpoint(ChangedCheckpoint):
    """Another checkpoint, of which some dense matrices are ternarised when they are read."""

    def __init__(self, original: Checkpoint, names: frozenset[str]) -> None:
        """`names`: canonical names of dense matrices."""
        super().__init__(original)
        self._names = names
        self._errors: dict[str, float] = {}
        self._group_sizes: dict[str, int] = {}

    def is_ternary(self, name: str) -> bool:
        """Whether `matrix` gives a Ternary for this canonical name; nothing is read."""
        return name in self._names or self.original.is_ternary(name)

    def group_size(self, name: str) -> int:
        """How many columns share a scale in the Ternary of this name, 0 for one scale.

        Reads a row of a matrix that is to be rounded, and all of one that groups of columns hold exactly.
        """
        if name not in self._names:
            return self.original.group_size(name)
        if name not in self._group_sizes:
            self._group_sizes[name] = exact_group_size(self._dense(name))
            self.release(name)
        return self._group_sizes[name]

    def matrix(self, name: str) -> Dense | Ternary:
        """The matrix under a canonical name; raises FormatError where a weight that is to be rounded is not finite."""
        if name not in self._names:
            return self.original.matrix(name)
        size, matrix = self.group_size(name), self._dense(name)
        exact = exact_groups(matrix, size) if size else exact_ternary(matrix)
        found = exact or ternarized(self.path, name, matrix)
        self._errors[name] = 0.0 if exact else relative_error(matrix, found)
        return found

    def _dense(self, name: str) -> Dense:
        matrix = self.original.matrix(name)
        assert isinstance(matrix, Dense), f"{name} is ternary"
        return Dense(np.require(matrix.data, requirements=["C", "A"]), matrix.dtype)

    def errors(self) -> dict[str, float]:
        """|W - Q(W)| / |W| of each matrix that is rounded, by canonical name; those that nobody has read are read."""
        for name in sorted(self._names - self._errors.keys()):
            self.matrix(name)
            self.release(name)
        return {name: self._errors[name] for name in sorted(self._errors)}  # they may be read in any order

    def findings(self) -> tuple[str, ...]:
        """What rounding did to the weights, in a line; nothing where they were ternary but for their dtype."""
        errors = self.errors()
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] < _TOLD:
            return ()
        mean, most = math.fsum(errors.values()) / len(errors), errors[worst]
        lost = f"takes {100 * mean:.0f}% of them away (relative RMS; {100 * most:.0f}% of {worst})"
        why = "a model that was not trained for it answers nonsense"
        return (f"{len(errors)} matrices were rounded to ternary, which {lost}: {why}",)


def findings_of(checkpoint: Checkpoint, config: EngineConfig | None = None) -> tuple[str, ...]:
    """What a checkpoint has to tell when its weights have been read: see `findings`; and what rounding to int8 does.

    That, which `config` asks for, is the backends' own: it is measured on rows of some of the matrices.
    """
    found = checkpoint.findings() if isinstance(checkpoint, TernarizedCheckpoint) else ()
    return (*found, *_int8_findings(checkpoint, config)) if config else found


def _int8_findings(checkpoint: Checkpoint, config: EngineConfig) -> Iterator[str]:
    if config.quantize == "int8":
        names = _dense_projections(checkpoint)
        spread = {round(at) for at in np.linspace(0, len(names) - 1, _MEASURED_MATRICES)}
        errors = {names[at]: _int8_error(checkpoint, names[at], ternary.quantize_weights) for at in sorted(spread)}
        worst, mean = max(errors, key=errors.__getitem__), math.fsum(errors.values()) / len(errors)
        lost = f"takes {100 * mean:.1f}% of them away (relative RMS; {100 * errors[worst]:.1f}% of {worst})"
        yield f"{len(names)} matrices were rounded to int8, which {lost}"
    if config.embedding == "int8":
        error = _int8_error(checkpoint, "embed", ternary.quantize_table)
        yield f"embeddings were rounded to int8, which takes {100 * error:.1f}% of them away (relative RMS)"


def _int8_error(
    checkpoint: Checkpoint, name: str, quantize: Callable[[Floats], tuple[NDArray[np.int8], Floats]]
) -> float:
    """|W - Q(W)| / |W| over rows spread over a dense matrix."""
    matrix = checkpoint.matrix(name)
    assert isinstance(matrix, Dense), f"{name} is ternary"
    weights = to_float32(matrix.data[:: -(-len(matrix.data) // _MEASURED_ROWS)], matrix.dtype)
    with np.errstate(all="ignore"):  # weights that are not finite are refused where they are used
        codes, scales = quantize(weights)
        lost, whole = np.linalg.norm(weights - codes * scales[:, None]), np.linalg.norm(weights)
    checkpoint.release(name)
    return float(lost / whole) if whole else 0.0


def relative_error(matrix: Dense, found: Ternary) -> float:
    """|W - Q(W)| / |W|, both over the whole matrix; 0 where W is 0."""
    step = max(1, _CHUNK_WEIGHTS // matrix.data.shape[1])
    lost = whole = 0.0
    for begin in range(0, len(matrix.data), step):
        weights = to_float32(matrix.data[begin : begin + step], matrix.dtype).ravel()
        rest = weights - found.data[begin : begin + step].ravel() * np.float32(found.scale)
        lost, whole = lost + float(np.dot(rest, rest)), whole + float(np.dot(weights, weights))
    return math.sqrt(lost / whole) if whole else 0.0

"""The shards of a Meta checkpoint, merged: rank NN of a model-parallel run wrote consolidated.NN.pth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.float_tensors import FLOATS, float_values
from bitnet_inference.formats.json_files import file_size, shown, shown_some
from bitnet_inference.formats.safetensors_files import Tensor, inside
from bitnet_inference.formats.torch_files import read_torch_file

# The axes along which a matrix may be cut, the likelier first; vectors are whole in every shard.
_BY_ROWS, _BY_COLUMNS = (0,), (1,)
_AXES = {"tok_embeddings": (0, 1), "wo": _BY_COLUMNS, "w2": _BY_COLUMNS}  # Llama 2 cut the embeddings by columns
_AGAIN = "download the model again, all of its shards"


@dataclass(frozen=True)
class Shards:
    """The tensors of each shard by name, in the order of the ranks."""

    path: Path
    tensors: tuple[dict[str, Tensor], ...]
    num_bytes: int

    @property
    def count(self) -> int:
        """How many shards there are."""
        return len(self.tensors)

    def parts(self, name: str) -> list[Tensor]:
        """What the shards hold of a tensor, in order; those that lack it are left out."""
        return [tensors[name] for tensors in self.tensors if name in tensors]

    def num_rows(self, name: str, num_columns: int) -> int:
        """The rows of a whole table of so many columns, however it is cut. Raises FormatError where it is missing."""
        parts = self.parts(name)
        if not parts or any(len(part.shape) != 2 for part in parts):
            raise FormatError(self.path, name, f"the table of embeddings is missing: {_AGAIN}")
        rows, columns = parts[0].shape
        return rows if columns * self.count == num_columns else rows * self.count

    def sound_parts(self, name: str, shape: tuple[int, ...]) -> tuple[list[Tensor], int]:
        """The parts of a tensor and the axis along which they make up this shape; raises the first of its problems.

        A vector is whole: it is the only part.
        """
        for problem in self.problems_of(name, shape):
            raise problem
        parts = self.parts(name)
        if len(shape) == 1:
            return parts[:1], 0
        return parts, self._axis(name, parts, shape)

    def problems_of(self, name: str, shape: tuple[int, ...]) -> Iterator[FormatError]:
        """Everything wrong with one tensor, of which shards may disagree; reads vectors."""
        parts = self.parts(name)
        if len(parts) < self.count:
            where = ", ".join(_file(rank) for rank, tensors in enumerate(self.tensors) if name not in tensors)
            yield FormatError(self.path, name, f"the tensor is missing in {where}: {_AGAIN}")
        elif len({part.dtype for part in parts}) > 1:
            yield FormatError(self.path, name, f"has not the same dtype in all shards: {_AGAIN}")
        elif parts[0].dtype not in FLOATS:
            yield FormatError(parts[0].path, name, f"is {parts[0].dtype}, not BF16, F16 or F32: {_AGAIN}")
        elif len(shape) == 1:
            yield from self._problems_of_vector(name, parts, shape)
        elif self._axis(name, parts, shape) < 0:
            found = sorted({part.shape for part in parts})
            why = f"{shown(found)} in {self.count} shards do not make up the shape {list(shape)}"
            yield FormatError(self.path, name, f"{why}: {_AGAIN}")

    def strangers(self, known: set[str]) -> Iterator[FormatError]:
        """A problem where there are tensors of other names."""
        extra = sorted({name for tensors in self.tensors for name in tensors} - known)
        if extra:
            why = f"params.json has no place for {len(extra)} tensors: {shown_some(extra)}"
            yield FormatError(self.path, "", f"{why}: use the params.json that belongs to them")

    def _problems_of_vector(self, name: str, parts: list[Tensor], shape: tuple[int, ...]) -> Iterator[FormatError]:
        if wrong := [part for part in parts if part.shape != shape]:
            yield FormatError(
                wrong[0].path, name, f"has the shape {shown(wrong[0].shape)}, not {list(shape)}: {_AGAIN}"
            )
            return
        values = [float_values(part) for part in parts]
        if not np.isfinite(values[0]).all():
            yield FormatError(parts[0].path, name, f"a norm weight is NaN or infinite: {_AGAIN}")
        elif any(not np.array_equal(values[0], other) for other in values[1:]):
            yield FormatError(self.path, name, f"is not the same in all shards, as a norm should be: {_AGAIN}")

    def _axis(self, name: str, parts: list[Tensor], shape: tuple[int, ...]) -> int:
        """The axis along which equal parts make up the shape; -1 where they do not."""
        for axis in _AXES.get(name.split(".")[-2], _BY_ROWS):
            part = tuple(size // self.count if at == axis else size for at, size in enumerate(shape))
            if shape[axis] % self.count == 0 and all(each.shape == part for each in parts):
                return axis
        return -1


def open_shards(folder: Path) -> Shards:
    """Open consolidated.00.pth and all that follow it without a gap. Raises FormatError."""
    found = [path.name for path in folder.glob("consolidated.*.pth")]
    names = [_file(rank) for rank in range(len(found))] or [_file(0)]
    if {*names} != {*found}:
        missing = next(name for name in names if name not in found)
        raise FormatError(folder / missing, "", f"the shard is missing: {_AGAIN}")
    paths = [inside(folder, name) for name in names]
    return Shards(folder, tuple(map(read_torch_file, paths)), sum(map(file_size, paths)))


def _file(rank: int) -> str:
    return f"consolidated.{rank:02}.pth"

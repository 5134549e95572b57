"""The safetensors files of a folder: strict headers, tensors mapped from the file when asked for.

A file is a little-endian uint64 with the length of the header, the header as JSON {name: {dtype, shape, data_offsets:
[begin, end]}}, and the data, which the tensors tile without gap or overlap. Our own reader, not the
library: it also refuses doubled names and absurd ranks, and names what is wrong.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.json_files import MAX_JSON_BYTES, file_size, parse_object, read_json, shown
from bitnet_inference.formats.mapped import map_file, release_pages
from bitnet_inference.own_files import inside as inside  # readers of folders take it from here

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_RANK, _MAX_SHARDS = 8, 1024
_MAX_TENSORS = 1 << 15  # of a model; a decoder of 100 layers has 2,000 with every scale
# BF16 is kept as its bits. float8 and complex numbers have a size here only so that a file that holds them can be read.
_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2", "U32": "<u4",
    "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8", "F8_E4M3": "u1",
    "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file, not yet read: bytes `begin` to `end` of `data`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    data: mmap

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin

    def array(self) -> NDArray[Any]:
        """The tensor as a read-only array on the mapped file; a copy where the file does not align it."""
        dtype = np.dtype(_DTYPES[self.dtype])
        flat = np.frombuffer(self.data, np.uint8, self.num_bytes, self.begin)
        if self.begin % dtype.itemsize:
            flat = flat.copy()
        return flat.view(dtype).reshape(self.shape)

    def release(self) -> None:
        """Let the system take back the memory of the pages that were read; they can be read again."""
        release_pages(self.data, self.begin, self.end)

    def cut(self, count: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """So many equal parts of this shape, one behind the other."""
        size = self.num_bytes // count
        for number in range(count):
            begin = self.begin + number * size
            yield Tensor(self.path, self.dtype, shape, begin, begin + size, self.data)


@dataclass(frozen=True)
class Container:
    """One file: its tensors by name in the order of its header, what its __metadata__ says, and its size."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    num_bytes: int


@dataclass(frozen=True)
class TensorFiles:
    """Every tensor of a folder by name, and the files that hold them."""

    tensors: dict[str, Tensor]
    num_files: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """How a folder holds weights: in one file, or in those that an index lists; `read` gives a file's tensors."""

    single: str
    index: str
    read: Callable[[Path], Iterable[tuple[str, Tensor]]]

    def is_in(self, folder: Path) -> bool:
        """Whether a folder holds weights so."""
        return any(os.path.lexists(folder / name) for name in (self.single, self.index))


def open_tensors(folder: Path, layout: Layout | None = None) -> TensorFiles:
    """Open model.safetensors, or else the shards that model.safetensors.index.json lists, and check their headers.

    Or those of another layout. Raises FormatError for a file that is missing, lies outside the folder, or breaks the
    format, and Unsupported for a folder that has weights only as pickles.
    """
    layout = layout or SAFETENSORS
    paths = _paths(folder, layout)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in layout.read(path):
            if name in tensors:
                raise FormatError(path, shown(name), f"the tensor is in {tensors[name].path.name} too: keep one")
            tensors[name] = tensor
        _check_number(len(tensors), folder)
    _check_index(folder, layout, tensors)
    return TensorFiles(tensors, len(paths), sum(file_size(path) for path in paths))


def read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one file, by name; raises FormatError where the header or the tiling of the data is broken."""
    yield from read_container(path).tensors.items()


def read_container(path: Path) -> Container:
    """One file, of which the header is read only; raises FormatError where that or the tiling of the data is broken."""
    size = file_size(path)
    cut = FormatError(path, "header", f"the file ends within it ({size} bytes): download the file again")
    if size < 8:
        raise cut
    data = map_file(path)
    length = int.from_bytes(data[:8], "little")
    if length > size - 8:
        raise cut
    if length > MAX_JSON_BYTES:
        raise FormatError(path, "header", f"{length} bytes is more than {MAX_JSON_BYTES}: download the file again")
    header = parse_object(data[8 : 8 + length], path, "header")
    _check_number(len(header), path)
    metadata = header.pop("__metadata__", {})
    tensors = {name: _entry(path, name, value, 8 + length, data) for name, value in header.items()}
    _check_tiling(path, tensors, 8 + length, size)
    return Container(tensors, metadata if isinstance(metadata, dict) else {}, size)


def _check_number(count: int, path: Path) -> None:
    if count > _MAX_TENSORS:
        raise FormatError(path, "", f"has more than {_MAX_TENSORS} tensors: remove those that no layer needs")


SAFETENSORS = Layout(SINGLE, INDEX, read_header)


def _paths(folder: Path, layout: Layout) -> list[Path]:
    if os.path.lexists(folder / layout.single):
        return [inside(folder, layout.single)]
    if os.path.lexists(folder / layout.index):
        names = sorted(set(_weight_map(folder, layout).values()))
        if len(names) > _MAX_SHARDS:
            why = f"names {len(names)} files, at most {_MAX_SHARDS} are read: download the file again"
            raise FormatError(folder / layout.index, "weight_map", why)
        return [inside(folder, name) for name in names]
    if any(folder.glob("*.bin")):
        raise Unsupported(f"{folder}: the weights are pickles (*.bin), which can run code: save them as {SINGLE}")
    raise FormatError(folder, "", f"there is neither {SINGLE} nor {INDEX}: download the model again")


def _weight_map(folder: Path, layout: Layout) -> dict[str, str]:
    index = read_json(inside(folder, layout.index))
    section = index.section("weight_map")
    if section is None or not section.values:
        raise FormatError(index.path, "weight_map", "is missing or empty: download the file again")
    for name, file in section.values.items():
        if not isinstance(file, str):
            why = f"{shown(file)} is not the name of a file: correct it"
            raise FormatError(index.path, f"weight_map.{shown(name)}", why)
    return section.values


def _check_index(folder: Path, layout: Layout, tensors: dict[str, Tensor]) -> None:
    index = folder / layout.index
    if any(tensor.path.name == layout.single for tensor in tensors.values()) or not index.exists():
        return
    for name, file in _weight_map(folder, layout).items():
        if name not in tensors or tensors[name].path.name != file:
            raise FormatError(index, shown(name), f"{shown(file)} does not hold the tensor: download it again")


def _entry(path: Path, name: str, value: Any, start: int, data: mmap) -> Tensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(path, shown(name), "has not exactly dtype, shape and data_offsets: download the file again")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FormatError(path, shown(name), f"the dtype {shown(dtype)} is not known: save it as BF16, F16, F32 or U8")
    if not _are_counts(shape) or len(shape) > _MAX_RANK or not is_countable(shape):
        raise FormatError(path, shown(name), f"the shape {shown(shape)} is not one: download the file again")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise FormatError(path, shown(name), f"the offsets {shown(offsets)} are not two: download the file again")
    num_bytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if offsets[1] - offsets[0] != num_bytes:
        why = f"{dtype} {shown(shape)} does not take the bytes {offsets[0]} to {offsets[1]}: download the file again"
        raise FormatError(path, shown(name), why)
    return Tensor(path, dtype, tuple(shape), start + offsets[0], start + offsets[1], data)


def is_countable(shape: Iterable[int]) -> bool:
    """Whether an array may have this shape: one that holds nothing may not be of any width."""
    return math.prod(size or 1 for size in shape) < 1 << 59  # of 16 bytes each


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and {*map(type, values)} <= {int} and all(0 <= value < 1 << 63 for value in values)


def _check_tiling(path: Path, tensors: dict[str, Tensor], start: int, size: int) -> None:
    position = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != position:
            what = "a gap before it" if tensor.begin > position else "it overlaps another"
            raise FormatError(
                path, shown(name), f"{what} (byte {tensor.begin}, not {position}): download the file again"
            )
        position = tensor.end
    if position != size:
        raise FormatError(path, "", f"the tensors end at byte {position}, the file at {size}: download the file again")

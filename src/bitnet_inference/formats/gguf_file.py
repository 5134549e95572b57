"""GGUF containers, versions 2 and 3: metadata and tensors, mapped from the file when asked for.

Little-endian: "GGUF", u32 version, i64 number of tensors, i64 number of keys; each key a string (u64 length, bytes), a
u32 type and a value; each tensor its name, u32 number of dimensions, u64 sizes (the row's length first), u32 type and
u64 offset from the start of the data, which is aligned to `general.alignment`. Everything is checked against the size
of the file before anything is allocated.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.ggml_blocks import BLOCKS, I2_S, Q2_0, Q2_0_128, num_bytes
from bitnet_inference.formats.json_files import file_size, shown
from bitnet_inference.formats.mapped import map_file, release_pages

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMS = 1 << 16, 1 << 16, 4
_MAX_NAME, _MAX_TEXT = 1 << 16, 1 << 24  # bytes
_MAX_STRINGS, _MAX_STRING_BYTES = 1 << 21, 1 << 26  # of all arrays; the largest vocabulary known has a third
_MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_ARRAYS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
STRING, ARRAY = 8, 9
_AGAIN = "download the file again"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor, not yet read: bytes `begin` to `end` of `data`. `shape` is NumPy's: rows first."""

    path: Path
    type_id: int
    shape: tuple[int, ...]
    begin: int
    end: int
    data: mmap

    def raw(self) -> NDArray[np.uint8]:
        """The bytes of the tensor, read-only, on the mapped file."""
        return np.frombuffer(self.data, np.uint8, self.end - self.begin, self.begin)

    def release(self) -> None:
        """Let the system take back the memory of the pages that were read; they can be read again."""
        release_pages(self.data, self.begin, self.end)


@dataclass(frozen=True)
class GgufFile:
    """An opened file: the metadata by key (numbers, strings, lists of strings, arrays), the tensors by name.

    `records` has the metadata as bytes: key, type and value.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    records: dict[str, memoryview]
    tensors: dict[str, GgufTensor]
    num_bytes: int


def read_gguf(path: Path, alignment: int = DEFAULT_ALIGNMENT) -> GgufFile:
    """Open a file and check its header; tensors begin at multiples of `alignment` where it does not say at which.

    Raises FormatError where it is broken, Unsupported for other versions.
    """
    size = file_size(path)
    if size < 24:
        raise FormatError(path, "header", f"the file ends within it ({size} bytes): {_AGAIN}")
    data = map_file(path)
    cursor = _Cursor(path, data, size)
    version = _version(path, data)
    num_tensors = cursor.count("number of tensors", _MAX_TENSORS)
    num_keys = cursor.count("number of keys", _MAX_KEYS)
    metadata, records = _metadata(cursor, num_keys)
    alignment = alignment_of(path, metadata, alignment)
    infos = [_info(cursor, index) for index in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors = _tensors(path, infos, start, alignment, data)
    return GgufFile(path, version, metadata, records, tensors, size)


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class _Cursor:
    """Reads on, and never past the end."""

    def __init__(self, path: Path, data: mmap, size: int) -> None:
        self.path, self._data, self._size = path, data, size
        self.position = 8
        self._num_strings = self._num_string_bytes = 0

    def number(self, form: str, where: str) -> Any:
        at = self._take(struct.calcsize(form), where)
        return struct.unpack_from(form, self._data, at)[0]

    def count(self, what: str, at_most: int) -> int:
        value = int(self.number("<q", "header"))
        if not 0 <= value <= at_most:
            raise FormatError(self.path, "header", f"the {what} is {value}, at most {at_most} are read: {_AGAIN}")
        return value

    def text(self, where: str, at_most: int) -> str:
        length = int(self.number("<Q", where))
        if length > at_most:
            raise FormatError(self.path, where, f"a string of {length} bytes, at most {at_most} are read: {_AGAIN}")
        at = self._take(length, where)
        try:
            return self._data[at : at + length].decode()
        except UnicodeDecodeError:
            raise FormatError(self.path, where, f"a string is not UTF-8: {_AGAIN}") from None

    def since(self, start: int) -> memoryview:
        return memoryview(self._data)[start : self.position]

    def array(self, where: str) -> list[str] | NDArray[Any]:
        kind, length = int(self.number("<I", where)), int(self.number("<Q", where))
        if kind == STRING:
            return self._strings(where, length)
        if kind not in _SCALARS:
            raise FormatError(self.path, where, f"an array of type {kind} is not known: {_AGAIN}")
        dtype = np.dtype(_ARRAYS[kind])
        at = self._take(length * dtype.itemsize, where)
        return np.frombuffer(self._data, dtype, length, at) if length else np.zeros(0, dtype)

    def _strings(self, where: str, length: int) -> list[str]:
        self._num_strings += length
        if self._num_strings > _MAX_STRINGS or 8 * length > self._size - self.position:
            why = f"an array of {length} strings: no vocabulary is so large, or the file ends in it: {_AGAIN}"
            raise FormatError(self.path, where, why)
        start = self.position
        texts = [self.text(where, _MAX_NAME) for _ in range(length)]
        self._num_string_bytes += self.position - start
        if self._num_string_bytes > _MAX_STRING_BYTES:
            raise FormatError(self.path, where, f"more than {_MAX_STRING_BYTES} bytes of strings: {_AGAIN}")
        return texts

    def _take(self, length: int, where: str) -> int:
        at = self.position
        if length > self._size - at:
            raise FormatError(self.path, where, f"the file ends within it ({self._size} bytes): {_AGAIN}")
        self.position += length
        return at


def _version(path: Path, data: mmap) -> int:
    magic, version = struct.unpack_from("<4sI", data)
    if magic != MAGIC:
        raise FormatError(path, "header", f"begins with {shown(magic)}, not with {MAGIC!r}: this is no GGUF file")
    if version in _VERSIONS:
        return int(version)
    if version & 0xFFFF == 0:
        raise Unsupported(f"{path}: a big-endian GGUF file: convert the model again on a little-endian machine")
    raise Unsupported(f"{path}: GGUF version {version}: versions 2 and 3 are read: convert the model again")


def _metadata(cursor: _Cursor, num_keys: int) -> tuple[dict[str, Any], dict[str, memoryview]]:
    metadata: dict[str, Any] = {}
    records = {}
    for index in range(num_keys):
        start = cursor.position
        key = cursor.text(f"key {index}", _MAX_NAME)
        if key in metadata:
            raise FormatError(cursor.path, shown(key), f"the key stands there twice: {_AGAIN}")
        metadata[key] = _value(cursor, shown(key))
        records[key] = cursor.since(start)
    return metadata, records


def _value(cursor: _Cursor, where: str) -> Any:
    kind = int(cursor.number("<I", where))
    if kind == STRING:
        return cursor.text(where, _MAX_TEXT)
    if kind == ARRAY:
        return cursor.array(where)
    if kind not in _SCALARS:
        raise FormatError(cursor.path, where, f"a value of type {kind} is not known: {_AGAIN}")
    return cursor.number(_SCALARS[kind], where)


def alignment_of(path: Path, metadata: dict[str, Any], default: int = DEFAULT_ALIGNMENT) -> int:
    """The multiples in bytes at which a file says that its tensors begin. Raises FormatError for what is none."""
    value = metadata.get("general.alignment", default)
    if type(value) is not int or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise FormatError(path, "general.alignment", f"{shown(value)} is no power of two from 8: {_AGAIN}")
    return value


def _info(cursor: _Cursor, index: int) -> _Info:
    name = cursor.text(f"tensor {index}", _MAX_NAME)
    where = shown(name)
    num_dims = int(cursor.number("<I", where))
    if num_dims > _MAX_DIMS:
        raise FormatError(cursor.path, where, f"{num_dims} dimensions, at most {_MAX_DIMS} are read: {_AGAIN}")
    sizes = [int(cursor.number("<Q", where)) for _ in range(num_dims)] or [1]  # as early converters wrote scales
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    if not all(1 <= size < 1 << 40 for size in sizes) or math.prod(sizes) >= 1 << 48:
        raise FormatError(cursor.path, where, f"the shape {shown(sizes)} is not one: {_AGAIN}")
    return _Info(name, tuple(sizes[::-1]), int(cursor.number("<I", where)), int(cursor.number("<Q", where)))


def _tensors(path: Path, infos: list[_Info], start: int, alignment: int, data: mmap) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    position, size = start, len(data)
    infos = _with_layouts(infos, alignment, size - start)
    for info in sorted(infos, key=lambda info: info.offset):
        where, begin = shown(info.name), start + info.offset
        if info.name in tensors:
            raise FormatError(path, where, f"the tensor stands there twice: {_AGAIN}")
        _check_type(path, info)
        end = begin + num_bytes(info.type_id, info.shape)
        if info.offset % alignment or begin < position:
            what = "overlaps another tensor" if begin < position else f"is no multiple of {alignment}"
            raise FormatError(path, where, f"its offset {info.offset} {what}: {_AGAIN}")
        if end > size:
            raise FormatError(path, where, f"it ends at byte {end}, the file at {size}: {_AGAIN}")
        tensors[info.name] = GgufTensor(path, info.type_id, info.shape, begin, end, data)
        position = end
    return {info.name: tensors[info.name] for info in infos}


def _with_layouts(infos: list[_Info], alignment: int, length: int) -> list[_Info]:
    """Tensors of Q2_0 as Q2_0_128 where that is what the offsets leave room for, in each of them."""
    if not any(info.type_id == Q2_0 for info in infos):
        return infos

    def padded(num_bytes: int) -> int:
        return -(-num_bytes // alignment) * alignment

    ordered = sorted(infos, key=lambda info: info.offset)
    ends = [*(info.offset for info in ordered[1:]), length]
    rooms = [(info, end - info.offset) for info, end in zip(ordered, ends, strict=True) if info.type_id == Q2_0]
    has_too_little = any(num_bytes(Q2_0, info.shape) > room for info, room in rooms)
    per_block = BLOCKS[Q2_0_128].num_values
    fits = all(
        info.shape[-1] % per_block == 0 and padded(num_bytes(Q2_0_128, info.shape)) == padded(room)
        for info, room in rooms
    )
    if not (has_too_little and fits):
        return infos
    return [replace(info, type_id=Q2_0_128) if info.type_id == Q2_0 else info for info in infos]


def _check_type(path: Path, info: _Info) -> None:
    where = shown(info.name)
    block = BLOCKS.get(info.type_id)
    if block is None:
        known = ", ".join(block.name for block in BLOCKS.values())
        why = f"tensors of type {_type_name(info.type_id)} are not read, only {known}"
        raise Unsupported(f"{path}: {where}: {why}: use the model in Q8_0")
    if info.shape[-1] % block.num_values and info.type_id != I2_S:
        raise FormatError(path, where, f"rows of {info.shape[-1]} are no multiple of {block.num_values}: {_AGAIN}")
    if info.type_id == I2_S and math.prod(info.shape) % block.num_values:
        raise FormatError(
            path, where, f"{math.prod(info.shape)} values are no multiple of {block.num_values}: {_AGAIN}"
        )


# What is refused: names of ggml, and why; 38 and 39 are of Microsoft's forks (upstream gave 39 to MXFP4 later), those
# above 100 of others.
_REFUSED = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 40: "NVFP4",
    38: "38 (TL1: permuted for lookup tables by settings that the file does not hold: convert it to I2_S)",
    39: "39 (TL2: permuted for lookup tables by settings that the file does not hold: convert it to I2_S; or MXFP4)",
    134: "134 (IQ1_BN of ik_llama.cpp: take the I2_S file that it was made from)",
    135: "135 (IQ2_BN of ik_llama.cpp: take the I2_S file that it was made from)",
    142: "142 (PQ2_0 of PrismML: take the Q2_0 file of the same model)",
}  # fmt: skip


def _type_name(type_id: int) -> str:
    return _REFUSED.get(type_id, str(type_id))

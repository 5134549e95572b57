"""The tensors of an ONNX file: what they say of themselves against the bytes that are there. None is read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.json_files import file_size, shown
from bitnet_inference.formats.protobuf import Message
from bitnet_inference.own_files import inside

FLOAT, UINT8, INT8, INT32, INT64, BOOL, FLOAT16 = 1, 2, 3, 6, 7, 9, 10
DTYPE_NAMES = {
    FLOAT: "float32", UINT8: "uint8", INT8: "int8", 4: "uint16", 5: "int16", INT32: "int32", INT64: "int64",
    8: "string", BOOL: "bool", FLOAT16: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8e4m3fn", 18: "float8e4m3fnuz", 19: "float8e5m2",
    20: "float8e5m2fnuz", 21: "uint4", 22: "int4", 23: "float4e2m1", 24: "float8e8m0", 25: "uint2", 26: "int2",
}  # fmt: skip
_BITS = {
    FLOAT: 32, UINT8: 8, INT8: 8, 4: 16, 5: 16, INT32: 32, INT64: 64, BOOL: 8, FLOAT16: 16, 11: 64, 12: 32, 13: 64,
    14: 64, 15: 128, 16: 16, 17: 8, 18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2,
}  # fmt: skip
_DIMS, _DTYPE, _SEGMENT, _NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 3, 8, 9, 13, 14
_FLOATS, _INT32S, _INT64S, _DOUBLES, _UINT64S = 4, 5, 7, 10, 11
# Where numbers of a type stand that are not raw; all others are in int32_data.
_TYPED = {FLOAT: _FLOATS, 14: _FLOATS, INT64: _INT64S, 11: _DOUBLES, 15: _DOUBLES, 12: _UINT64S, 13: _UINT64S}
_ITEM_BYTES = {_FLOATS: 4, _DOUBLES: 8}
_MAX_RANK, _MAX_DIM = 8, 1 << 40
_MAX_TYPED_BYTES = 1 << 26  # numbers of varying length have to be counted
_STEP = 1 << 20
_AGAIN = "download the file again"


@dataclass(frozen=True)
class Stored:
    """A range of bytes of a file beside the model."""

    path: Path
    begin: int
    end: int


@dataclass(frozen=True)
class Tensor:
    """What a tensor says of itself; `stored` where its bytes lie in another file."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    stored: Stored | None = None


class DataFiles:
    """The files in a model's folder that hold its tensors, each looked for once: thousands of tensors share one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, tuple[Path, int]] = {}

    def find(self, message: Message, location: str) -> tuple[Path, int]:
        """A file and its size. Raises FormatError for one outside the folder, and one that cannot be read."""
        if location not in self._found:
            try:
                path = inside(self._folder, location)
            except FormatError as error:
                raise message.wrong(f"external_data: {shown(location)} {error.why}") from None
            self._found[location] = path, file_size(path)
        return self._found[location]


def read_tensor(message: Message, files: DataFiles) -> Tensor:
    """Raises FormatError where its shape and type do not fit its bytes, or these lie outside the model's folder."""
    name, dtype = message.text(_NAME), message.integer(_DTYPE)
    message.where += f" {shown(name)}"
    shape = tuple(message.integers(_DIMS, _MAX_RANK))
    if dtype not in _BITS:
        raise message.wrong(f"the type {DTYPE_NAMES.get(dtype, dtype)} is none of numbers: export the model again")
    if not all(0 <= size <= _MAX_DIM for size in shape) or _SEGMENT in message:
        raise message.wrong(f"the shape {shown(list(shape))} is none, or in segments: {_AGAIN}")
    count = math.prod(shape)
    num_bytes = -(-count * _BITS[dtype] // 8)
    location = message.integer(_LOCATION)
    if location not in (0, 1) or (location == 0 and _EXTERNAL in message):
        raise message.wrong(f"it lies both here and elsewhere, or nowhere: {_AGAIN}")
    if location == 1:
        return Tensor(name, dtype, shape, _stored(message, files, num_bytes))
    _check_inline(message, dtype, num_bytes)
    return Tensor(name, dtype, shape)


def check_overlaps(path: Path, tensors: Iterable[Tensor]) -> None:
    """Raises FormatError where two tensors share bytes of another file: together they could be of any size."""
    stored = [(each.stored, each.name) for each in tensors if each.stored and each.stored.begin < each.stored.end]
    files = {each.path: each.path.resolve() for each, _ in stored}  # two links may lead to one file
    ranges = sorted((files[each.path], each.begin, each.end, name) for each, name in stored)
    for (file, _, end, _), (other, begin, _, name) in pairwise(ranges):
        if file == other and begin < end:
            raise FormatError(path, shown(name), f"overlaps another tensor in {file.name}: {_AGAIN}")


def _stored(message: Message, files: DataFiles, num_bytes: int) -> Stored:
    if any(number in message for number in (_RAW, *_TYPED.values(), _INT32S)):
        raise message.wrong(f"it lies both here and elsewhere: {_AGAIN}")
    entries: dict[str, str] = {}
    for entry in message.messages(_EXTERNAL, f"{message.where} external_data"):
        if entry.text(1) in entries:
            raise entry.wrong(f"the key {shown(entry.text(1))} stands there twice: {_AGAIN}")
        entries[entry.text(1)] = entry.text(2)
    if more := entries.keys() - {"location", "offset", "length", "checksum"}:
        raise Unsupported(f"{message.budget.path}: external_data: {shown(min(more))} is not supported: export it again")
    file, size = files.find(message, entries.get("location", ""))
    begin = _number(message, "offset", entries.get("offset", "0"))
    length = _number(message, "length", entries.get("length", str(num_bytes)))
    if length != num_bytes:
        raise message.wrong(f"takes {num_bytes} bytes, external_data says {length}: {_AGAIN}")
    if begin + length > size:
        raise message.wrong(f"ends at byte {begin + length} of {file.name}, which has {size}: {_AGAIN}")
    return Stored(file, begin, begin + length)


def _number(message: Message, key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise message.wrong(f"external_data: {key} is {shown(text)}, not a number of bytes: {_AGAIN}")
    return int(text)


def _check_inline(message: Message, dtype: int, num_bytes: int) -> None:
    typed = _TYPED.get(dtype, _INT32S)
    others = {_RAW, _INT32S, *_TYPED.values()} - {_RAW, typed}
    if any(number in message for number in others) or (_RAW in message and typed in message):
        raise message.wrong(f"has bytes of another type, or twice: {_AGAIN}")
    if _RAW in message or typed not in message:
        found, expected, unit = sum(map(len, message.parts(_RAW))), num_bytes, "bytes"
    else:
        found, unit = _num_typed(message, typed), "numbers"
        # int32_data holds one number of 8, 16 or 32 bits, or a byte of smaller ones; complex ones are two floats.
        expected = num_bytes if _BITS[dtype] <= 8 else num_bytes // (_ITEM_BYTES.get(typed) or _BITS[dtype] // 8)
    if found != expected or len(message.values(_RAW)) > 1:
        raise message.wrong(f"its shape takes {expected} {unit}, there are {found}: {_AGAIN}")


def _num_typed(message: Message, number: int) -> int:
    """How many numbers stand in a field, packed or not."""
    values = message.values(number)
    parts = [value for value in values if isinstance(value, memoryview)]
    if sum(map(len, parts)) > _MAX_TYPED_BYTES:
        raise message.wrong("numbers of this size must stand in raw_data: export the model again")
    if number in _ITEM_BYTES:
        return sum(len(part) // _ITEM_BYTES[number] for part in parts)
    return len(values) - len(parts) + sum(map(_num_varints, parts))


def _num_varints(part: memoryview) -> int:
    steps = (np.frombuffer(part[at : at + _STEP], np.uint8) for at in range(0, len(part), _STEP))
    return sum(int(np.count_nonzero(step < 128)) for step in steps)

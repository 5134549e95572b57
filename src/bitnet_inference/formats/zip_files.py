"""Where the entries of a zip file lie, for files that torch.save writes: stored, never compressed, 64 bits wide.

Our own reader, not the library: what the directory says is checked before anything is read for it, nothing is ever
inflated, and an entry is a range of bytes that can be mapped. Check sums are not compared, as torch does not either.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.json_files import shown

_MAX_DIRECTORY_BYTES = 4 << 20  # the largest model has some 1,200 tensors in a file, 100 bytes each
_END = struct.Struct("<4s4H2LH")  # signature, disks, entries, size and offset of the directory, length of a comment
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ZIP64, _UNKNOWN = 1, 0xFFFFFFFF
_ENCRYPTED = 0x2041  # bits of the flags: this, strongly, the directory too
_AGAIN = "download the file again"


class Span(NamedTuple):
    """The bytes of an entry in its file."""

    begin: int
    end: int


class _Directory(NamedTuple):
    num_entries: int
    begin: int
    end: int


class _Entry(NamedTuple):
    """What the directory says of an entry: `start` is where its local header begins."""

    name: bytes
    method: int
    start: int
    size: int


def read_entries(path: Path, data: mmap) -> dict[str, Span]:
    """The entries of a zip file by name. Raises FormatError for anything but plain stored entries side by side."""
    directory = _find_directory(path, data)
    spans: dict[str, Span] = {}
    position = 0
    for entry in sorted(_read_directory(path, data, directory), key=lambda entry: entry.start):
        name = _checked_name(path, entry.name)
        if name in spans:
            raise FormatError(path, shown(name), f"the entry stands there twice: {_AGAIN}")
        if entry.method:
            raise FormatError(path, shown(name), "the entry is compressed: save the weights with torch.save")
        if entry.start < position:
            raise FormatError(path, shown(name), f"the entry overlaps another: {_AGAIN}")
        spans[name] = span = _span(path, data, entry, directory.begin)
        position = span.end
    return spans


def _find_directory(path: Path, data: mmap) -> _Directory:
    end = len(data) - _END.size
    if end < 0 or data[end : end + 4] != b"PK\5\6":
        raise FormatError(
            path, "", f"does not end as a zip file: it is cut short, or no file that torch.save writes today: {_AGAIN}"
        )
    _, *disks, first, count, size, offset, comment = _END.unpack_from(data, end)
    if any(disks) or first != count or comment:
        raise FormatError(path, "", f"is a zip file in parts, or with a comment: {_AGAIN}")
    if end >= _LOCATOR.size and data[end - _LOCATOR.size : end - _LOCATOR.size + 4] == b"PK\6\7":
        directory, end = _find_directory64(path, data, end - _LOCATOR.size)
        small = zip(
            (count, size, offset),
            (directory.num_entries, directory.end - directory.begin, directory.begin),
            strict=True,
        )
        lies = any(value not in (full, _UNKNOWN, 0xFFFF) for value, full in small)
    else:
        directory, lies = _Directory(count, offset, offset + size), False
    if lies or directory.end != end or directory.end - directory.begin > _MAX_DIRECTORY_BYTES:
        raise FormatError(path, "", f"the directory of the zip file is not where, or what, its end says: {_AGAIN}")
    return directory


def _find_directory64(path: Path, data: mmap, locator: int) -> tuple[_Directory, int]:
    """The directory as the 64-bit record says, and where that record begins, which must be right before `locator`."""
    _, disk, offset, num_disks = _LOCATOR.unpack_from(data, locator)
    if (disk, num_disks, offset) != (0, 1, locator - _END64.size) or data[offset : offset + 4] != b"PK\6\6":
        raise FormatError(path, "", f"the 64-bit end of the zip file is not where it should be: {_AGAIN}")
    _, length, _, _, *disks, first, count, size, begin = _END64.unpack_from(data, offset)
    if length != _END64.size - 12 or any(disks) or first != count:
        raise FormatError(path, "", f"the 64-bit end of the zip file is broken: {_AGAIN}")
    return _Directory(count, begin, begin + size), offset


def _read_directory(path: Path, data: mmap, directory: _Directory) -> Iterator[_Entry]:
    text, position, count = data[directory.begin : directory.end], 0, 0
    while position < len(text):
        if position + _ENTRY.size > len(text) or text[position : position + 4] != b"PK\1\2":
            raise FormatError(path, "", f"the directory of the zip file is broken: {_AGAIN}")
        fields = _ENTRY.unpack_from(text, position)
        flags, method = fields[3:5]
        packed, size, length, extra, comment = fields[8:13]
        disk, start = fields[13], fields[16]
        name_end = position + _ENTRY.size + length
        name = text[position + _ENTRY.size : name_end]
        size, packed, start = _wide(path, name, text[name_end : name_end + extra], (size, packed, start))
        if flags & _ENCRYPTED or disk or (packed != size and not method):
            raise FormatError(path, _place(name), f"the entry is encrypted, in parts, or lies about its size: {_AGAIN}")
        yield _Entry(name, method, start, size)
        position, count = name_end + extra + comment, count + 1
    if position != len(text) or count != directory.num_entries:
        raise FormatError(path, "", f"its directory has {count} entries, not the number it says: {_AGAIN}")


def _wide(path: Path, name: bytes, extra: bytes, values: tuple[int, int, int]) -> Iterator[int]:
    """Size, compressed size and start, each from the 64-bit field where it does not fit into 32 bits."""
    position, wide = 0, b""
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        wide = extra[position + 4 : position + 4 + length] if kind == _ZIP64 else wide
        position += 4 + length
    for value in values:
        if value != _UNKNOWN:
            yield value
            continue
        if len(wide) < 8:
            raise FormatError(path, _place(name), f"the entry has no 64-bit size or place: {_AGAIN}")
        yield int.from_bytes(wide[:8], "little")
        wide = wide[8:]


def _checked_name(path: Path, name: bytes) -> str:
    text = name.decode("ascii", "replace")
    parts = text.split("/")
    if not text.isprintable() or not text.isascii() or "\\" in text or len(parts) < 2 or {"", ".", ".."} & {*parts}:
        raise FormatError(path, _place(name), f"is no name that torch.save gives to an entry: {_AGAIN}")
    return text


def _span(path: Path, data: mmap, entry: _Entry, limit: int) -> Span:
    """The bytes of an entry behind its local header; the header must be that of the same entry."""
    begin = entry.start + _LOCAL.size
    if begin <= limit:
        signature, _, flags, method, *_, length, extra = _LOCAL.unpack_from(data, entry.start)
        own = data[begin : begin + length]
        begin += length + extra
        is_plain = signature == b"PK\3\4" and not method and not flags & _ENCRYPTED
        if is_plain and own == entry.name and begin + entry.size <= limit:
            return Span(begin, begin + entry.size)
    raise FormatError(path, _place(entry.name), f"the entry is not where the directory says, or is cut short: {_AGAIN}")


def _place(name: bytes) -> str:
    return shown(name.decode("ascii", "replace"))

"""Protocol Buffers' wire format, read from a mapped file without a schema: nothing is copied, little is believed.

A library would make objects of everything first, which can take a hundred times the bytes of a file made for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.json_files import shown

MAX_FIELDS = 1 << 18  # of a file; a decoder of 100 layers has half of it
MAX_TEXT_BYTES = 1 << 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
Value = int | memoryview


class Budget:
    """How many fields of a file may still be read."""

    def __init__(self, path: Path, max_fields: int | None = None) -> None:
        self.path, self._most = path, MAX_FIELDS if max_fields is None else max_fields
        self._left = self._most

    def take(self, where: str) -> None:
        """Count a field; raises FormatError where a file has too many."""
        self._left -= 1
        if self._left < 0:
            raise FormatError(self.path, where, f"more than {self._most} fields: export it again")


class Message:
    """The fields of one message by number. `where` is its place for errors, which are FormatErrors."""

    def __init__(self, budget: Budget, data: memoryview, where: str) -> None:
        self.budget, self.where = budget, where
        self._fields: dict[int, list[Value]] = {}
        for number, value in _fields(budget, data, where):
            self._fields.setdefault(number, []).append(value)

    def wrong(self, why: str) -> FormatError:
        """The error that says so of this message."""
        return FormatError(self.budget.path, self.where, why)

    def __contains__(self, number: int) -> bool:
        """Whether the field is there."""
        return number in self._fields

    def values(self, number: int) -> list[Value]:
        """All values of a field, in order."""
        return self._fields.get(number, [])

    def parts(self, number: int) -> list[memoryview]:
        """All values of a field that holds bytes."""
        values = self.values(number)
        if not all(isinstance(value, memoryview) for value in values):
            raise self.wrong(f"field {number} is a number, not bytes: download the file again")
        return values  # type: ignore[return-value]  # as checked

    def messages(self, number: int, where: str) -> Iterator[Message]:
        """All messages in a field; they stand at `where`, with their index."""
        for index, part in enumerate(self.parts(number)):
            yield Message(self.budget, part, f"{where} {index}")

    def message(self, number: int, where: str) -> Message | None:
        """The only message in a field, or None."""
        part = self._only(number)
        if isinstance(part, int):
            raise self.wrong(f"field {number} is a number, not bytes: download the file again")
        return None if part is None else Message(self.budget, part, where)

    def text(self, number: int) -> str:
        """A string; empty where absent."""
        value = self._only(number)
        return "" if value is None else self._decoded(value)

    def texts(self, number: int) -> list[str]:
        """All strings of a field."""
        return list(map(self._decoded, self.values(number)))

    def integer(self, number: int) -> int:
        """A signed number of 64 bits; 0 where there is none."""
        value = self._only(number)
        if isinstance(value, memoryview):
            raise self.wrong(f"field {number} is bytes, not a number: download the file again")
        return 0 if value is None else _signed(value)

    def integers(self, number: int, most: int) -> list[int]:
        """Signed numbers, packed or not; raises FormatError for more than `most`."""
        found: list[int] = []
        for value in self.values(number):
            numbers = [value] if isinstance(value, int) else _unpacked(self, value, most)
            found += map(_signed, numbers)
            if len(found) > most:
                raise self.wrong(f"field {number} has more than {most} numbers: export it again")
        return found

    def _only(self, number: int) -> Value | None:
        values = self.values(number)
        if len(values) > 1:  # parsers differ in what they make of it
            raise self.wrong(f"field {number} stands there {len(values)} times: download the file again")
        return values[0] if values else None

    def _decoded(self, value: Value) -> str:
        if isinstance(value, int) or len(value) > MAX_TEXT_BYTES:
            raise self.wrong("a text was expected, of at most 64 KiB: download the file again")
        try:
            return str(value, "utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"{shown(bytes(value))} is not UTF-8: download the file again") from None


def _fields(budget: Budget, data: memoryview, where: str) -> Iterator[tuple[int, Value]]:
    at, end = 0, len(data)
    while at < end:
        budget.take(where)
        key, at = _varint(budget, data, at, where)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(budget, data, at, where)
            yield number, value
            continue
        if kind == _BYTES:
            width, at = _varint(budget, data, at, where)
        elif kind in _WIDTHS:
            width = _WIDTHS[kind]
        else:
            raise FormatError(budget.path, where, f"the wire type {kind} is not known: this is no such file, or broken")
        if width > end - at:
            raise FormatError(budget.path, where, f"ends within field {number}: download the file again")
        yield number, data[at : at + width]
        at += width


def _varint(budget: Budget, data: memoryview, at: int, where: str) -> tuple[int, int]:
    """The number there, and where the next thing begins."""
    if at < len(data) and (byte := data[at]) < 128:  # most are that small
        return byte, at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at == len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & ((1 << 64) - 1), at
    raise FormatError(budget.path, where, "ends within a number, or this is none: download the file again")


def _unpacked(message: Message, data: memoryview, most: int) -> Iterator[int]:
    at = 0
    for _ in range(most + 1):
        if at == len(data):
            return
        value, at = _varint(message.budget, data, at, message.where)
        yield value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

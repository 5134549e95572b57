"""The pickles of torch.save, read by a machine of our own that can only build a dictionary of tensors.

A pickle is a program for a stack machine. Python's own machine imports and calls what the program names. This one knows
the few instructions that torch writes, imports nothing, and calls nothing but what its caller gives it for the few
names that torch writes. Every instruction takes a byte at least, and a pickle has at most MAX_PICKLE_BYTES; so time
and memory are bounded. No value is printed or compared whole: one of a few bytes can be endless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.json_files import shown

MAX_PICKLE_BYTES = 1 << 18  # the largest model has some 1,200 tensors in a file, 150 bytes each
_MAX_NAME_BYTES = 200
_AGAIN = "download the file again"
_SAVE = "save a dictionary of tensors in bfloat16, float16 or float32 with torch.save"

Function = Callable[..., Any]


class WrongArguments(Exception):
    """What a function that is given to the machine says of its arguments."""


@dataclass(frozen=True)
class Name:
    """Something that a pickle names, and may name: "torch.HalfStorage". Nothing is behind it."""

    text: str


def read_pickle(path: Path, data: bytes, names: Mapping[str, Function | None], persistent: Function) -> dict[str, Any]:
    """The dictionary that a pickle builds; its keys are strings.

    `names`: what the pickle may name, and what to call where it calls that; None where it may not be called.
    `persistent` is called for persistent ids. Both raise WrongArguments. Raises FormatError for the file at `path`.
    """
    return _Machine(path, data, names, persistent).run()


class _Machine:
    """A pickle that is being read: a stack with marks on it, and what was put aside."""

    def __init__(self, path: Path, data: bytes, names: Mapping[str, Function | None], persistent: Function) -> None:
        self._path, self._data, self._names, self._persistent = path, data, names, persistent
        self._at = self._start = 0  # of what is read next, and of the instruction that is carried out
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> dict[str, Any]:
        if len(self._data) > MAX_PICKLE_BYTES:
            self._refuse(f"{len(self._data)} bytes are more than {MAX_PICKLE_BYTES}: download the file again")
        if self._take(2) != b"\x80\2":
            self._refuse(f"the pickle is not of protocol 2: {_SAVE}")
        while (code := self._next()) != b".":
            if code not in _INSTRUCTIONS:
                self._refuse(f"the instruction {_OTHERS.get(code, shown(code))} is not allowed: {_SAVE}")
            _INSTRUCTIONS[code](self)
        result = self._pop()
        if not isinstance(result, dict) or self._stack or self._marks or self._at != len(self._data):
            self._refuse(f"the pickle does not end with one dictionary: {_SAVE}")
        return result

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_number(self, num_bytes: int, signed: bool = False) -> None:
        self.push(self._number(num_bytes, signed))

    def push_long(self) -> None:
        self.push_number(self._number(1), signed=True)

    def push_text(self) -> None:
        try:
            self.push(self._take(self._number(4)).decode())
        except UnicodeDecodeError:
            self._refuse(f"a string is not UTF-8: {_AGAIN}")

    def push_name(self) -> None:
        end = self._data.find(b"\n", self._data.find(b"\n", self._at) + 1, self._at + _MAX_NAME_BYTES)
        if end < self._at:
            self._refuse(f"a name is cut short, or too long: {_AGAIN}")
        text = self._take(end - self._at).decode("ascii", "replace").replace("\n", ".")
        self._take(1)
        if text not in self._names:
            self._refuse(f"asks for {shown(text)}, which is not allowed: {_SAVE}")
        self.push(Name(text))

    def push_persistent(self) -> None:
        self.push(self._called(self._persistent, self._pop()))

    def push_result(self) -> None:
        arguments, name = self._pop(), self._pop()
        function = self._names[name.text] if isinstance(name, Name) else None
        if function is None:
            self._refuse(f"calls what is not to be called: {_SAVE}")
        self.push(self._called(function, arguments))

    def push_mark(self) -> None:
        self._marks.append(len(self._stack))

    def push_tuple(self, length: int) -> None:
        self._check_stack(length)
        self.push(tuple(self._pop_from(len(self._stack) - length)))

    def push_tuple_to_mark(self) -> None:
        self.push(tuple(self._pop_to_mark()))

    def put_aside(self, num_bytes: int) -> None:
        self._memo[self._number(num_bytes)] = value = self._pop()
        self.push(value)

    def push_from_aside(self, num_bytes: int) -> None:
        index = self._number(num_bytes)
        if index not in self._memo:
            self._refuse(f"takes what was never put aside: {_AGAIN}")
        self.push(self._memo[index])

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._set_items([key, value])

    def set_items(self) -> None:
        self._set_items(self._pop_to_mark())

    def set_attributes(self) -> None:
        # A state_dict has _metadata, the versions of its modules, which are no part of the weights.
        state = self._pop()
        if not isinstance(state, dict) or state.keys() - {"_metadata"} or not isinstance(self._top(), dict):
            self._refuse(f"sets attributes: {_SAVE}")

    def _set_items(self, items: list[Any]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            self._refuse(f"sets items of what is no dictionary: {_SAVE}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                self._refuse(f"a key is not a string: {_SAVE}")
            if key in target:
                self._refuse(f"the key {shown(key)} stands there twice: {_AGAIN}")
            target[key] = value

    def _called(self, function: Function, arguments: Any) -> Any:
        if not isinstance(arguments, tuple):
            self._refuse(f"arguments are no tuple: {_AGAIN}")
        try:
            return function(arguments)
        except WrongArguments as error:
            self._refuse(str(error))

    def _top(self) -> Any:
        value = self._pop()
        self.push(value)
        return value

    def _check_stack(self, count: int) -> None:
        if len(self._stack) - count < (self._marks[-1] if self._marks else 0):
            self._refuse(f"takes more from the stack than there is: {_AGAIN}")

    def _pop(self) -> Any:
        self._check_stack(1)
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            self._refuse(f"there is no mark on the stack: {_AGAIN}")
        return self._pop_from(self._marks.pop())

    def _pop_from(self, begin: int) -> list[Any]:
        items = self._stack[begin:]
        del self._stack[begin:]
        return items

    def _next(self) -> bytes:
        self._start = self._at
        return self._take(1)

    def _take(self, count: int) -> bytes:
        taken = self._data[self._at : self._at + count]
        if len(taken) != count:
            self._refuse(f"the pickle is cut short: {_AGAIN}")
        self._at += count
        return taken

    def _number(self, num_bytes: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(num_bytes), "little", signed=signed)

    def _refuse(self, why: str) -> NoReturn:
        raise FormatError(self._path, f"data.pkl, byte {self._start}", why)


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], None]] = {
    b"N": lambda machine: machine.push(None),
    b"\x88": lambda machine: machine.push(True),
    b"\x89": lambda machine: machine.push(False),
    b"K": lambda machine: machine.push_number(1),
    b"M": lambda machine: machine.push_number(2),
    b"J": lambda machine: machine.push_number(4, signed=True),
    b"\x8a": _Machine.push_long,
    b"X": _Machine.push_text,
    b"c": _Machine.push_name,
    b"Q": _Machine.push_persistent,
    b"R": _Machine.push_result,
    b"(": _Machine.push_mark,
    b")": lambda machine: machine.push(()),
    b"\x85": lambda machine: machine.push_tuple(1),
    b"\x86": lambda machine: machine.push_tuple(2),
    b"\x87": lambda machine: machine.push_tuple(3),
    b"t": _Machine.push_tuple_to_mark,
    b"}": lambda machine: machine.push({}),
    b"s": _Machine.set_item,
    b"u": _Machine.set_items,
    b"b": _Machine.set_attributes,
    b"q": lambda machine: machine.put_aside(1),
    b"r": lambda machine: machine.put_aside(4),
    b"h": lambda machine: machine.push_from_aside(1),
    b"j": lambda machine: machine.push_from_aside(4),
}
# Some that others write, for the message.
_OTHERS = {
    b"i": "INST", b"o": "OBJ", b"\x81": "NEWOBJ", b"\x92": "NEWOBJ_EX", b"\x93": "STACK_GLOBAL", b"P": "PERSID",
    b"\x80": "PROTO", b"\x82": "EXT1", b"\x83": "EXT2", b"\x84": "EXT4", b"G": "BINFLOAT", b"]": "EMPTY_LIST",
    b"l": "LIST", b"d": "DICT", b"a": "APPEND", b"e": "APPENDS", b"0": "POP", b"2": "DUP", b"\x8b": "LONG4",
    b"\x8c": "SHORT_BINUNICODE", b"\x8d": "BINUNICODE8", b"\x94": "MEMOIZE", b"\x95": "FRAME",
}  # fmt: skip

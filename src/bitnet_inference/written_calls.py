"""Calls while they are written: where the form of an answer leaves nothing else, they need not wait for its end."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from bitnet_inference.tools import Style, ToolCall, new_call

# A call up to its arguments, behind what stands before it or between it and the one before.
_REST = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
_HEADS: Mapping[Style, re.Pattern[str]] = {
    "llama": re.compile(r"[\s;}]*" + _REST),
    "hermes": re.compile(r"\s*<tool_call>" + _REST),
}


@dataclass(frozen=True)
class CallPart:
    """More of a call: `piece` has the next of its arguments, and `whole`, at its end, all of them."""

    number: int
    piece: ToolCall
    is_first: bool
    whole: ToolCall | None


class WrittenCalls:
    """The calls of some functions in a text that grows, and that is one call after another or has none."""

    def __init__(self, style: Style, names: Collection[str]) -> None:
        self._head, self._names = _HEADS[style], names
        self._text, self._place = "", 0  # up to where it has been read
        self.cut: ToolCall | None = None  # the one that is being written, with the arguments so far
        self._depth, self._is_string, self._is_escaped = 0, False, False
        self.calls: list[ToolCall] = []  # those that are complete

    def push(self, text: str) -> Iterator[CallPart]:
        """What this adds to the calls."""
        self._text += text
        while (is_first := self.cut is None and self._begin()) or (self.cut and self._place < len(self._text)):
            yield self._next(is_first)

    def _begin(self) -> bool:
        head = self._head.match(self._text, self._place)
        if head is None or (name := _string(head[1])) not in self._names:
            return False
        self.cut, self._place = new_call(name, ""), head.end()
        return True

    def _next(self, is_first: bool) -> CallPart:
        assert self.cut is not None
        call, begin = self.cut, self._place
        self._place = self._end_of_arguments()
        piece = self._text[begin : self._place]
        so_far = _with_arguments(call, call["function"]["arguments"] + piece)
        self.cut, whole = (so_far, None) if self._depth else (None, so_far)
        part = CallPart(len(self.calls), _with_arguments(call, piece), is_first, whole)
        self.calls += [] if whole is None else [whole]
        return part

    def _end_of_arguments(self) -> int:
        """Behind the bracket that closes them, or the end of the text so far."""
        for place in range(self._place, len(self._text)):
            char = self._text[place]
            if self._is_string:
                self._is_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._text)


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:  # of a form that is no JSON
        return ""


def _with_arguments(call: ToolCall, arguments: str) -> ToolCall:
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}

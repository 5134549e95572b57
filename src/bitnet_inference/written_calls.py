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
        self._place = 0  # up to where the text has been read
        self.cut: ToolCall | None = None  # the one that is being written, with the arguments so far
        self._depth, self._is_string, self._is_escaped = 0, False, False
        self.calls: list[ToolCall] = []  # those that are complete

    def more(self, text: str) -> Iterator[CallPart]:
        """What the text so far, all of it, has of calls that it had not before."""
        while self._place < len(text) and (call := self.cut or self._begun(text)):
            begin, self._place = self._place, self._end_of_arguments(text)
            piece, before = text[begin : self._place], call["function"]["arguments"]
            so_far = _with_arguments(call, before + piece)
            self.cut, whole = (so_far, None) if self._depth else (None, so_far)
            part = CallPart(len(self.calls), _with_arguments(call, piece), not before, whole)
            self.calls += [] if whole is None else [whole]
            yield part

    def _begun(self, text: str) -> ToolCall | None:
        """A call that begins here, up to its arguments."""
        head = self._head.match(text, self._place)
        if head is None or (name := _string(head[1])) not in self._names:
            return None
        self._place = head.end()
        return new_call(name, "")

    def _end_of_arguments(self, text: str) -> int:
        """Behind the bracket that closes them, or the end of the text so far."""
        for place in range(self._place, len(text)):
            char = text[place]
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
        return len(text)


def _string(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:  # of a form that is no JSON
        return ""


def _with_arguments(call: ToolCall, arguments: str) -> ToolCall:
    return {**call, "function": {"name": call["function"]["name"], "arguments": arguments}}

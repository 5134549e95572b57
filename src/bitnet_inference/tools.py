"""Tools in OpenAI's shape: what may be called, the form of a forced call, and the calls in what a model wrote."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypedDict

from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.closing import closed_schema
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.grammar.loosening import loosened
from bitnet_inference.grammar.references import is_pointer, local
from bitnet_inference.grammar.schema import changed_schema

# How a model writes a call: {"name": ..., "parameters": ...} and nothing else, perhaps behind <|python_tag|>, several
# with a semicolon between them; or {"name": ..., "arguments": ...} in tags, with text around.
Style = Literal["llama", "hermes"]
PYTHON_TAG = "<|python_tag|>"
_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_HERMES_MARK = re.compile(r'</?tool_call>|"|\\["\\]')
_BETWEEN = re.compile(r"[\s;]*")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
# Forms of answers in Lark: one call; text, and calls where it turns into one; calls, or another form. No text begins
# with what _llama_calls skips.
_FORCED: Mapping[Style, str] = {"llama": "start: @call", "hermes": r'start: "<tool_call>\n" @call "\n</tool_call>"'}
_BESIDE_TEXT: Mapping[Style, str] = {
    "llama": 'start: TEXT | @call ("; " @call)*\n' r"TEXT: /\s*(([^\s{;<\x1c-\x1f]|<[^|])(.|\n)*)?/",
    "hermes": r'start: (before "\n" @call "\n</tool_call>")* TEXT'
    "\n"
    r"before[lazy]: /(.|\n)*<tool_call>/"
    "\n"
    r"TEXT: /(.|\n)*/",
}
_BESIDE_FORM: Mapping[Style, str] = {
    "llama": 'start: @form | @call ("; " @call)*',
    "hermes": r'start: @form | one ("\n" one)*' "\n" r'one: "<tool_call>\n" @call "\n</tool_call>"',
}


Shown = Sequence[Mapping[str, Any]] | None  # tools in OpenAI's shape
Functions = dict[str, Mapping[str, Any]]  # name -> JSON schema of the arguments


class FunctionCall(TypedDict):
    """Which function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call as OpenAI's API shows it."""

    id: str
    type: str
    function: FunctionCall


@dataclass(frozen=True)
class Tools:
    """The functions that a model may call: name -> JSON schema of the arguments. `forced`: it must call one of them.

    `strict`: those whose arguments keep to their schema also where no call is forced, and to all of it; of others it
    may ask for what cannot be kept, and a forced call keeps to the rest.
    """

    functions: Mapping[str, Mapping[str, Any]]
    forced: bool
    strict: frozenset[str] = frozenset()

    def grammar(self, style: Style, form: Grammar | None = None) -> Grammar | None:
        """The form of an answer, None for any text: one forced call, or calls beside text, which has this form.

        Raises InvalidParams.
        """
        if not (self.forced or self.strict or form):
            return None
        loose = loosened if self.forced else lambda schema: {"type": "object"}
        kept = {name: schema if name in self.strict else loose(schema) for name, schema in self.functions.items()}
        try:
            call = _call_grammar(kept, style)
        except InvalidParams:
            _check_each(kept, style)
            raise
        if self.forced:
            return Grammar.around(_FORCED[style], call=call)
        if form is None:
            return Grammar.around(_BESIDE_TEXT[style], call=call)
        return Grammar.around(_BESIDE_FORM[style], call=call, form=form)

    def told(self, shown: Shown, templates: Mapping[str, str]) -> Shown:
        """What of `shown` a model is told: nothing, where it must call one and its templates know none."""
        return None if self.forced and not any("tools" in each for each in templates.values()) else shown

    def are_certain(self, style: Style) -> bool:
        """Whether the form leaves nothing else for an answer that begins like a call, and no text beside calls."""
        return self.forced or (bool(self.strict) and style == "llama")

    def find_calls(self, text: str, style: Style) -> tuple[str, list[ToolCall]]:
        """The text without its calls, and the calls; a text with a call that makes no sense is a text.

        The form of a forced call allows nothing else: a text that has none is a piece of one, and not shown.
        """
        try:
            rest, found = _hermes_calls(text) if style == "hermes" else _llama_calls(text)
            calls = [self._call(value) for value in found]
        except (ValueError, RecursionError):
            rest, calls = "", []
        return (rest, calls) if calls else ("" if self.forced else text, [])

    def _call(self, value: Any) -> ToolCall:
        if isinstance(value, dict) and "name" not in value:  # in OpenAI's shape, as templates may show earlier calls
            value = value.get("function")
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("parameters", value.get("arguments")) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self.functions or not isinstance(arguments, dict):
            raise ValueError("no call of a function that is known")
        return new_call(name, _json(arguments))


def new_call(name: str, arguments: str) -> ToolCall:
    """A call with an id of its own."""
    function: FunctionCall = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class HeldText:
    """What of a text may be shown while it grows, because no call can begin there.

    White space waits for what follows it: in front of a call it is no text.
    """

    def __init__(self, style: Style) -> None:
        self._style, self._text, self._num_shown = style, "", 0

    def push(self, text: str) -> str:
        """The part of the text so far that may be shown now."""
        self._text += text
        clear = max(self._num_shown, self._num_clear())
        shown, self._num_shown = self._text[self._num_shown : clear], clear
        return shown

    @property
    def text(self) -> str:
        """All of it."""
        return self._text

    def _num_clear(self) -> int:
        if self._style == "llama":  # a call stands alone
            start = self._text.lstrip()
            behind = start[_after_gap(start, 0) :]
            may_be_call = not behind or behind[0] == "{" or start.startswith(PYTHON_TAG) or PYTHON_TAG.startswith(start)
            return 0 if may_be_call else len(self._text)
        found = self._text.find(_HERMES_OPEN)
        if found < 0:
            begun = (n for n in range(len(_HERMES_OPEN) - 1, 0, -1) if self._text.endswith(_HERMES_OPEN[:n]))
            found = len(self._text) - next(begun, 0)
        return len(self._text[:found].rstrip())


def call_style(templates: Mapping[str, str]) -> Style:
    """How a model with these chat templates writes its calls."""
    return "hermes" if any(_HERMES_OPEN in each for each in templates.values()) else "llama"


def read_tools(tools: object, choice: object) -> Tools | None:
    """OpenAI's `tools` and `tool_choice`; None where nothing may be called. Raises InvalidParams."""
    if not tools:
        if choice not in (None, "none") and (tools is None or choice != "auto"):  # who filters a list may leave none
            raise InvalidParams(f"tool_choice is {choice!r:.80}, and there are no tools: give some")
        return None
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise InvalidParams(
            'tools must be a list of {"type": "function", "function": {"name": ..., "parameters": ...}}'
        )
    functions = dict(_function(index, tool) for index, tool in enumerate(tools))
    if len(functions) < len(tools):
        raise InvalidParams("tools: two have one name: rename one")
    choice, functions = _allowed(choice, functions)
    strict = frozenset(each["function"]["name"] for each in tools if each["function"].get("strict"))
    if choice in (None, "auto", "none", "required"):
        return None if choice == "none" else Tools(functions, choice == "required", strict & functions.keys())
    name = _chosen(choice)
    if name is None or name not in functions:
        known = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise InvalidParams(f"tool_choice is {choice!r:.80}: give {known}, with one of {', '.join(functions)}")
    return Tools({name: functions[name]}, True, strict & {name})


def _allowed(choice: object, functions: Functions) -> tuple[object, Functions]:
    """Of a choice among some of the tools, OpenAI's "allowed_tools", its mode and these; else all as it is."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, functions
    allowed = choice.get("allowed_tools")
    mode, some = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    names = {_chosen(each) for each in some} if isinstance(some, list) else set()
    if mode not in ("auto", "required") or not names or not names <= functions.keys():
        form = '{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}'
        raise InvalidParams(f"tool_choice: allowed_tools must be {form}, with some of {', '.join(functions)}")
    return mode, {name: schema for name, schema in functions.items() if name in names}


def _chosen(choice: object) -> str | None:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _function(index: int, tool: object) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidParams(f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}')
    schema = function.get("parameters")
    if schema is None:
        return function["name"], {"type": "object", "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise InvalidParams(f"tools[{index}]: parameters is {schema!r:.80}: give a JSON schema")
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidParams(f"tools[{index}]: parameters: type is {kind!r:.80}: arguments are an object: give 'object'")
    return function["name"], {**schema, "type": "object"}


def _call_grammar(functions: Functions, style: Style) -> Grammar:
    """The form of one call, of any of them. Raises InvalidParams."""
    places = [f"/anyOf/{index}" for index in range(len(functions))] if len(functions) > 1 else [""]
    calls = [_call_schema(place, *each, style) for place, each in zip(places, functions.items(), strict=True)]
    return Grammar(json_schema={"anyOf": calls} if len(calls) > 1 else calls[0])


def _check_each(functions: Functions, style: Style) -> None:
    """Raises InvalidParams, by its name, for a function that alone cannot be called."""
    for name, arguments in functions.items():
        try:
            _call_grammar({name: arguments}, style)
        except InvalidParams as error:
            raise InvalidParams(f"function {name:.80}: {error}") from None


def _call_schema(place: str, name: str, arguments: Mapping[str, Any], style: Style) -> dict[str, Any]:
    key = "parameters" if style == "llama" else "arguments"
    place = f"{place}/properties/{key}"
    closed = closed_schema(arguments, place)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: changed_schema(closed, partial(_moved, place))},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _moved(place: str, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """With its reference to where the arguments' schema now is; below an $id references start at that, and stay."""
    target, names = schema.get("$ref"), schema.get("propertyNames")
    if "$id" in schema:
        return None
    if isinstance(names, Mapping):
        schema = {**schema, "propertyNames": _moved(place, names) or names}
    if isinstance(target, str) and is_pointer(target := local(target)):
        return {**schema, "$ref": f"#{place}{target[1:]}"}
    return schema


def _llama_calls(text: str) -> tuple[str, list[Any]]:
    """The values of a text that consists of nothing else; raises ValueError for any other."""
    text, values, place = text.strip().removeprefix(PYTHON_TAG), [], 0
    while (place := _after_gap(text, place)) < len(text):
        value, place = _strict_json().raw_decode(text, place)
        values.append(value)
    return "", values


def _after_gap(text: str, place: int) -> int:
    gap = _BETWEEN.match(text, place)
    return gap.end() if gap else place


def _hermes_calls(text: str) -> tuple[str, list[Any]]:
    kept, values, place = [], [], 0
    for start, end in _hermes_places(text):
        if start >= place:  # else it is a tag within a call
            kept.append(text[place:start])
            inner = text[start + len(_HERMES_OPEN) : end - len(_HERMES_CLOSE)]
            value = _strict_json().decode(inner)
            values += value if isinstance(value, list) else [value]  # Falcon3's template asks for a list
            place = end
    return "".join([*kept, text[place:]]).strip(), values


def _hermes_places(text: str) -> list[tuple[int, int]]:
    """Where a call may begin, and where it would end: strings may hold tags, so as many quotes as make pairs between.

    Goes backwards, and once: looking for the end from each beginning took minutes for a text of nothing else.
    """
    ends: list[int | None] = [None, None]  # the next end with an even number of quotes before it, and with an odd one
    places = []
    for mark in reversed(list(_HERMES_MARK.finditer(text))):
        if mark[0] == '"':
            ends.reverse()
        elif mark[0] == _HERMES_CLOSE:
            ends[0] = mark.end()
        elif mark[0] == _HERMES_OPEN and ends[0] is not None:
            places.append((mark.start(), ends[0]))
    return places[::-1]


def _strict_json() -> json.JSONDecoder:
    """JSON alone: without NaN and Infinity, and numbers that become one."""
    return json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number:.80} is no number that JSON can hold")
    return value


def _json(value: Any) -> str:
    """JSON as it is read best; half surrogate pairs, which no UTF-8 can hold, are escapes."""
    return _HALF_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", json.dumps(value, ensure_ascii=False))

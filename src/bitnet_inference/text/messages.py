"""The messages of a conversation: what they may look like, and how special tokens in them lose their power."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bitnet_inference.config import check_unicode
from bitnet_inference.errors import InvalidParams
from bitnet_inference.json_objects import without_nulls

Message = Mapping[str, Any]
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")
# What clients give back of an answer that they got, and what says nothing to the model.
_ANSWER_KEYS = ("annotations", "parsed", "provider_specific_fields", "reasoning", "reasoning_content")
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
_CALL = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
MAX_DEPTH = 200  # of objects and lists in each other: what prints them, or looks through them, calls itself
_NO_ID = re.compile("[^A-Za-z0-9]")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_PRIVATE = re.compile("[\U000f0000-\U000ffffd]" r"|\\U000f[0-9a-f]{4}|\\udb[0-9a-f]{2}\\ud[c-f][0-9a-f]{2}")


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates get them, keys without a value left out. Raises InvalidParams.

    The content is a string, or a list of {"type": "text", "text": ...}, whose texts are put together as they are; a
    "refusal" is such a text too; "cache_control" in it or beside it says nothing here. Beside `tool_calls` it may be
    missing. Their arguments are an object, or OpenAI's string of one; templates get the object. A string that is none,
    as a model may have written it, is one to templates too.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidParams('messages must be a list of {"role": ..., "content": ...}')
    if not messages:
        raise InvalidParams("messages are empty: give at least one")
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(place: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParams(f'{place} must be an object {{"role": ..., "content": ...}}')
    given = {key: value for key, value in message.items() if value is not None and key != "cache_control"}
    if given.get("type") == "text":  # as lm-evaluation-harness told of each message, up to 0.4.11
        del given["type"]
    if given.get("role") == "assistant":
        given = _without_extras(given)
    if unknown := [key for key in given if key not in MESSAGE_KEYS]:
        raise InvalidParams(f"{place} has the unknown key {unknown[0]!r}: known are {', '.join(MESSAGE_KEYS)}")
    calls = _calls(f"{place}.tool_calls", given.pop("tool_calls", []))
    if calls:
        given.setdefault("content", "")
        if given.get("role") != "assistant":
            raise InvalidParams(f"{place} has tool_calls: only the assistant's messages have them")
    for key in ("role", "content"):
        if key not in given:
            raise InvalidParams(f"{place} has no {key!r}")
    checked = given | {"content": _text(f"{place}.content", given["content"])}
    for key, value in checked.items():
        if not isinstance(value, str) or (key == "role" and not value):
            raise InvalidParams(f"{place}.{key} must be a string that is not empty")
        check_unicode(f"{place}.{key}", value)
    texts = {key: str(value) for key, value in checked.items()}
    return texts | {"tool_calls": calls} if calls else texts


def _without_extras(answer: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message as it was answered, without what is nothing to say again.

    @openai/agents writes that into the parts of its text, too, with the role and log-probabilities.
    """
    kept = {key: value for key, value in answer.items() if key not in _ANSWER_KEYS}
    if isinstance(parts := kept.get("content"), list):
        kept["content"] = [_without_answers(part) for part in parts]
    if "refusal" in kept and not kept.get("content"):
        kept["content"] = kept.pop("refusal")
    return kept


def _without_answers(part: Any) -> Any:
    is_object = isinstance(part, Mapping) and part.get("role", "assistant") == "assistant"
    return {key: part[key] for key in part if key not in (*_ANSWER_KEYS, "role", "logprobs")} if is_object else part


def _calls(place: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidParams(f"{place} must be a list of {_CALL}")
    return [_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    call = without_nulls(call)
    is_call = isinstance(call, Mapping) and call.get("type", "function") == "function"
    function = without_nulls(call.get("function")) if is_call else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidParams(f"{place} must be {_CALL}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _object(arguments or "{}")
    elif not isinstance(arguments, Mapping):
        raise InvalidParams(f"{place}.function.arguments must be a JSON object, or the text of one")
    # In OpenAI's order, in which templates print whole calls, as Falcon3's does.
    checked = {"id": call["id"]} if "id" in call else {}
    checked |= {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    plain: dict[str, Any] = check_plain(place, checked)
    return plain


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Checked messages whose calls have ids of nine letters and digits, as Mistral's templates demand."""

    def short(given: Mapping[str, Any], name: str) -> dict[str, Any]:
        is_long = isinstance(given.get(name), str)
        return {**given, name: _NO_ID.sub("", given[name])[-9:].rjust(9, "0")} if is_long else dict(given)

    changed = [short(message, "tool_call_id") for message in messages]
    for message in changed:
        if "tool_calls" in message:
            message["tool_calls"] = [short(call, "id") for call in message["tool_calls"]]
    return changed


def unread_arguments(messages: Sequence[Message]) -> str | None:
    """The place of the first arguments in checked messages that stayed a string; None where all are objects."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                return f"messages[{index}].tool_calls[{number}].function.arguments"
    return None


def _object(text: str) -> Any:
    """The JSON object that a text is, or the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _text(place: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParams(f"{place} must be a string or a list of text parts")
    return "".join(_text_of_part(f"{place}[{index}]", part) for index, part in enumerate(content))


def _text_of_part(place: str, part: Any) -> str:
    part = without_nulls(part)  # tables of conversations have a null for every other kind of part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "refusal") or set(part) - {"cache_control"} != {"type", kind}:
        raise InvalidParams(f'{place} must be {{"type": "text", "text": ...}}: only text is supported')
    if not isinstance(part[kind], str):
        raise InvalidParams(f"{place}.{kind} must be a string")
    return str(part[kind])


def check_plain(name: str, value: Any) -> Any:
    """A copy of a value that is nothing but JSON, so that a template reaches no methods. Raises InvalidParams."""
    try:
        plain = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParams(f"{name} must be plain JSON values: {error}") from None
    inner = [plain]
    for _ in range(MAX_DEPTH):
        inner = [item for each in inner if isinstance(each, (dict, list)) for item in _items(each)]
        if not inner:
            return plain
    raise InvalidParams(f"{name} is nested more than {MAX_DEPTH} deep: make it flatter")


def check_objects(name: str, value: Any) -> Any:
    """A copy of a list of JSON objects, None as it is. Raises InvalidParams."""
    if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(x, Mapping) for x in value)):
        raise InvalidParams(f"{name} must be a list of JSON objects")
    return check_plain(name, value)


def _items(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


class Marks:
    """Private characters around every special token that stands in a user's text.

    A rendered conversation is cut at them (`split`), and what stood between two is encoded as plain text. A template
    may print an object as Python or JSON write it: then they are there as escapes, which count as well.
    """

    def __init__(self, inputs: Any, special: Iterable[str]) -> None:
        words = sorted((token for token in special if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words)) or "(?!)")
        everything = "".join(strings_of(inputs))
        self.needed = self._special.search(everything) is not None
        written = set(_PRIVATE.findall(everything)) if self.needed else set()
        unused = (char for char in map(chr, _PRIVATE_USE) if written.isdisjoint(_spellings(char)))
        try:
            self._start, self._end = next(unused), next(unused)
        except StopIteration:
            raise InvalidParams("the messages hold all characters of private use plane 15: leave one out") from None
        # What was escaped twice has more backslashes; but those in front of a mark may be the user's own.
        start, end = ("|".join(map(_pattern, _spellings(char))) for char in (self._start, self._end))
        self._marks = re.compile(rf"(?:{start})({self._special.pattern})\\*(?:{end})|{start}|{end}")

    def mark(self, value: Any) -> Any:
        """A copy of a plain value with marks in all of its strings, and in names that no template looks up."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"{self._start}{found.group()}{self._end}", value)
        if isinstance(value, Mapping):
            # Templates look up identifiers, as message.role, and a user's own may stay too: no control token is one.
            return {key if key.isidentifier() else self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The pieces of a rendered text, without marks; True for those that are plain text."""
        pieces = self._marks.split(text)
        return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]


def _spellings(char: str) -> tuple[str, str, str]:
    """A character beyond the first plane as it is, as Python prints it within an object, and as JSON does in ASCII."""
    return char, f"\\U{ord(char):08x}", json.dumps(char)[1:-1]


def _pattern(spelling: str) -> str:
    """What finds a spelling, also where it was escaped once more within."""
    return re.escape(spelling[0]) + r"\\+".join(map(re.escape, spelling[1:].split("\\")))


def strings_of(value: Any) -> Iterable[str]:
    """All strings in a plain value, the names in objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)

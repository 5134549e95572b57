"""What of an answer is shown while it grows, and which calls it ends with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bitnet_inference.server.replies import Reply
from bitnet_inference.tools import Style, read_tools
from bitnet_inference.written_calls import CallPart

TOOLS = read_tools([{"type": "function", "function": {"name": "clock"}}], None)


def streamed(text: str, style: Style, one_call: bool = False) -> tuple[list[str], str, list[Any]]:
    """What is shown letter by letter, at the end, and the calls."""
    reply = Reply(style, TOOLS, one_call)
    shown = [each for each in map(reply.push, text) if each]
    rest = reply.end()
    return shown, rest, [json.loads(call["function"]["arguments"]) for call in reply.calls]


def hermes(number: int) -> str:
    return f'<tool_call>{{"name": "clock", "arguments": {{"n": {number}}}}}</tool_call>'


def test_text_in_front_of_a_call_is_shown_at_once() -> None:
    shown, rest, calls = streamed(f"Let me see. {hermes(1)} Wait. {hermes(2)}", "hermes")
    assert "".join(shown) == "Let me see." and calls == [{"n": 1}, {"n": 2}]
    assert rest.strip() == "Wait."
    assert streamed(f"Let me see. {hermes(1)} {hermes(2)}", "hermes", one_call=True)[2] == [{"n": 1}]


@pytest.mark.parametrize("text", ["It is <b>late</b>.", "a < b", "<tool_call>never ends"])
def test_what_becomes_no_call_is_shown_after_all(text: str) -> None:
    shown, rest, calls = streamed(text, "hermes")
    assert "".join(shown) + rest == text and not calls


@pytest.mark.parametrize("text", ["Once upon", '{"name": "stranger", "parameters": {}}', "{never ends"])
def test_only_what_may_be_a_call_waits(text: str) -> None:
    shown, rest, calls = streamed(text, "llama")
    assert "".join(shown) + rest == text and not calls
    assert bool(shown) == (text[0] != "{")


def test_a_whole_text_has_what_its_stream_has() -> None:
    for text in ("Once", f"Look: {hermes(1)}", f"\n{hermes(1)}\n", f"a {hermes(1)} b", "<tool_call>x", "Once "):
        shown, rest, calls = streamed(text, "hermes")
        reply = Reply("hermes", TOOLS)
        reply.read(text)
        assert reply.text == "".join(shown) + rest and len(reply.calls) == len(calls)


FORCED = read_tools([{"type": "function", "function": {"name": "clock"}}], "required")
STRICT = read_tools([{"type": "function", "function": {"name": "clock", "strict": True}}], None)
ARGUMENTS = '{"a": "}\\\\", "b": [{}, "\\"]"]}'
WRITTEN: dict[Style, str] = {
    "llama": f'{{"name": "clock", "parameters": {ARGUMENTS}}}',
    "hermes": f'<tool_call>\n{{"name": "clock", "arguments": {ARGUMENTS}}}\n</tool_call>',
}


def parts_of(reply: Reply, text: str) -> list[CallPart]:
    """What each letter of a text adds to the calls, and its end."""
    found: list[CallPart] = []
    for letter in text:
        assert reply.push(letter) == ""
        found += reply.parts()
    assert reply.end() == ""
    return found + reply.parts()


@pytest.mark.parametrize("style", ["llama", "hermes"])
def test_a_forced_call_is_told_while_it_is_written(style: Style) -> None:
    reply = Reply(style, FORCED)
    parts = parts_of(reply, WRITTEN[style])
    assert "".join(part.piece["function"]["arguments"] for part in parts) == ARGUMENTS and len(parts) > 20
    assert [part.is_first for part in parts] == [True] + [False] * (len(parts) - 1)
    assert {part.piece["id"] for part in parts} == {reply.calls[0]["id"]}
    assert [part.whole for part in parts if part.whole] == reply.calls and reply.is_called


def test_strict_calls_are_told_one_after_the_other() -> None:
    two = f"{WRITTEN['llama']}; {WRITTEN['llama']}"
    numbers = [part.number for part in parts_of(Reply("llama", STRICT), two)]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1}
    assert {part.number for part in parts_of(Reply("llama", STRICT, one_call=True), two)} == {0}


def test_what_only_looks_like_a_call_is_text() -> None:
    for text in (r'{"name": "\q", "parameters": {}}', '{"name": "stranger", "parameters": {}}'):
        reply = Reply("llama", STRICT)
        reply.read(text)
        assert reply.text == text and not reply.calls


def test_a_text_is_read_as_it_is_told() -> None:
    reply = Reply("llama", STRICT)
    reply.read(f"{WRITTEN['llama']}; {WRITTEN['llama'][:-9]}")
    assert [call["function"]["arguments"] for call in reply.calls] == [ARGUMENTS]
    assert not reply.is_called and reply.cut and reply.cut["function"]["arguments"] == ARGUMENTS[:-8]
    reply = Reply("llama", STRICT)
    reply.read(" Once upon a time")
    assert reply.text == " Once upon a time" and not reply.calls


@pytest.mark.parametrize(("text", "style"), [('{"name": "cl', "llama"), ('<tool_call>\n{"name"', "hermes")])
def test_a_forced_call_that_was_cut_is_no_text(text: str, style: Style) -> None:
    reply = Reply(style, FORCED)
    assert not parts_of(reply, text) and not reply.calls and reply.text == ""

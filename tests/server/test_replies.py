"""What of an answer is shown while it grows, and which calls it ends with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bitnet_inference.server.replies import Reply
from bitnet_inference.tools import Style, read_tools

TOOLS = read_tools([{"type": "function", "function": {"name": "clock"}}], None)


def streamed(text: str, style: Style, one_call: bool = False) -> tuple[list[str], str, list[Any]]:
    """What is shown letter by letter, at the end, and the calls."""
    reply = Reply(style, TOOLS, one_call)
    shown = [each for each in map(reply.push, text) if each]
    rest, calls = reply.end()
    return shown, rest, [json.loads(call["function"]["arguments"]) for call in calls]


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
        content, found = Reply("hermes", TOOLS).whole(text)
        assert content == "".join(shown) + rest and len(found) == len(calls)


@pytest.mark.parametrize(("text", "style"), [('{"name": "cl', "llama"), ('<tool_call>\n{"name"', "hermes")])
def test_a_forced_call_that_was_cut_is_no_text(text: str, style: Style) -> None:
    reply = Reply(style, read_tools([{"type": "function", "function": {"name": "clock"}}], "required"))
    assert "".join(map(reply.push, text)) == "" and reply.end() == ("", [])

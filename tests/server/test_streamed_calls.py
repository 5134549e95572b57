"""A forced call in each API's stream: its arguments come as they are written, and are those of the whole answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from conftest import Running

TALK: list[Any] = [{"role": "user", "content": "Remember this."}]
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 70}, "tags": {"enum": [["a", "}"]]}},
    "required": ["text", "tags"],
}
FUNCTION: Any = {"name": "note", "parameters": NOTE}
ASKED: Any = {"model": "story", "temperature": 0}


def comes_in_pieces(read: Callable[[], int]) -> bool:
    """`read` gives how many there were: few where it was held up, for what has come meanwhile is one piece."""
    return any(read() > 5 for _ in range(20))


@pytest.mark.parametrize("logprobs", [None, True])
def test_in_chats(client: openai.OpenAI, logprobs: Any) -> None:
    asked = ASKED | {
        "messages": TALK, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
    }  # fmt: skip
    whole = client.chat.completions.create(**asked, max_tokens=200).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    (expected,) = whole.message.tool_calls

    def read() -> int:
        with client.chat.completions.stream(**asked, max_tokens=200, logprobs=logprobs) as stream:
            num_pieces = sum(part.type == "tool_calls.function.arguments.delta" for part in stream)
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert call.function.name == "note" and expected.type == "function"
        assert call.function.arguments == expected.function.arguments
        return num_pieces

    assert comes_in_pieces(read)


def test_a_cut_call_ends_with_length(client: openai.OpenAI) -> None:
    asked = ASKED | {"messages": TALK, "tools": [{"type": "function", "function": FUNCTION}], "max_tokens": 45}
    chunks = list(client.chat.completions.create(**asked, tool_choice="required", stream=True))
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function and deltas[0].function.name == "note" and chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(("max_tokens", "status"), [(200, "completed"), (45, "incomplete")])
def test_in_responses(client: openai.OpenAI, max_tokens: int, status: Any) -> None:
    asked = ASKED | {"input": "Remember this.", "tools": [FUNCTION | {"type": "function"}], "tool_choice": "required"}
    whole = client.responses.create(**asked, max_output_tokens=max_tokens).output[0]
    assert whole.type == "function_call" and whole.status == status

    def read() -> int:
        events = list(client.responses.create(**asked, max_output_tokens=max_tokens, stream=True))
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete") and last.response.status == status
        (item,) = last.response.output
        (begun,) = [event.item for event in events if event.type == "response.output_item.added"]
        assert item.type == begun.type == "function_call" and item.id == begun.id
        assert "".join(pieces) == item.arguments == whole.arguments
        (done,) = [event.item for event in events if event.type == "response.output_item.done"]
        (written,) = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert done == item and written == item.arguments
        return len(pieces)

    assert comes_in_pieces(read)


def test_a_cut_call_of_a_response_is_nothing_in_the_next_turn(client: openai.OpenAI) -> None:
    asked: Any = ASKED | {"tools": [FUNCTION | {"type": "function"}], "tool_choice": "required"}
    first = client.responses.create(**asked, input="Remember this.", max_output_tokens=45)
    more: list[Any] = [{"role": "user", "content": "Go on."}]
    given: list[Any] = [{"role": "user", "content": "Remember this."}, *first.output, *more]
    again = client.responses.create(**ASKED, input=given, max_output_tokens=3)
    same = client.responses.create(**ASKED, input=more, previous_response_id=first.id, max_output_tokens=3)
    assert again.usage and same.usage and again.usage.input_tokens == same.usage.input_tokens


def test_in_messages(running: Running) -> None:
    asked: Any = {
        "model": "story", "messages": TALK, "max_tokens": 200, "tool_choice": {"type": "any"},
        "tools": [{"name": "note", "input_schema": NOTE}], "extra_body": {"temperature": 0},
    }  # fmt: skip
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as claude:
        (whole,) = claude.messages.create(**asked).content

        def read() -> int:
            with claude.messages.stream(**asked) as stream:
                pieces = [event.partial_json for event in stream if event.type == "input_json"]
                message = stream.get_final_message()
            (block,) = message.content
            assert message.stop_reason == "tool_use" and block.type == whole.type == "tool_use"
            assert block.input == whole.input
            return len(pieces)

        assert comes_in_pieces(read)


def test_a_cut_call_is_closed_in_messages(running: Running) -> None:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as claude:
        events = claude.messages.create(
            model="story", messages=TALK, max_tokens=45, tool_choice={"type": "any"}, stream=True,
            tools=[{"name": "note", "input_schema": NOTE}], extra_body={"temperature": 0},
        )  # fmt: skip
        kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]

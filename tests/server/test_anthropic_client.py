"""Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from conftest import Running

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.grammar.response_format import read_response_format
from bitnet_inference.server import Journal
from bitnet_inference.server.message_schema import CountRequest

TALK: Any = [{"role": "user", "content": "Tell me a story about a brave fox called Mia"}]
GREEDY: Any = {"temperature": 0}
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "The weather", "input_schema": CITY}


@pytest.fixture
def claude(running: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_is_the_chats_answer(claude: anthropic.Anthropic, running: Running) -> None:
    blocks: Any = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind"},
    ]
    asked: Any = {"model": "story", "messages": TALK, "system": blocks, "max_tokens": 12, "extra_body": GREEDY}
    answer = claude.messages.create(**asked)
    with running.served.models.use("default") as llm:
        talk = [{"role": "system", "content": "Be kind"}, *TALK]
        expected = llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=12)).text
        num_tokens = len(llm.encode_chat(talk))
    assert [block.text for block in answer.content if block.type == "text"] == [expected]
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 12
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == num_tokens
    assert claude.messages.count_tokens(model="story", messages=TALK, system=blocks).input_tokens == num_tokens
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


def test_events_come_in_order(claude: anthropic.Anthropic) -> None:
    told: Any = list(claude.messages.create(model="story", messages=TALK, max_tokens=3, stream=True))
    start, end = told[0].message.usage, told[-2].usage
    assert (start.input_tokens, start.cache_read_input_tokens) == (end.input_tokens, end.cache_read_input_tokens)
    events = [event.type for event in told]
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(events[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_is_told(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(
        model="story", messages=TALK, max_tokens=50, stop_sequences=["upon"], extra_body=GREEDY
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "upon")


def test_a_tool_is_used_and_its_result_goes_back(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "story", "max_tokens": 60, "tools": [WEATHER]}
    used = claude.messages.create(messages=TALK, tool_choice={"type": "any"}, **asked)
    (block,) = used.content
    assert used.stop_reason == "tool_use" and block.type == "tool_use"
    assert block.name == "weather" and block.input["city"] in ("Rome", "Oslo")
    with claude.messages.stream(messages=TALK, tool_choice={"type": "tool", "name": "weather"}, **asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use" and streamed.input["city"] in ("Rome", "Oslo")
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    talk: Any = [*TALK, {"role": "assistant", "content": used.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=talk, tool_choice={"type": "none"}, **asked).content


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"messages": [*TALK, {"role": "assistant", "content": "Once"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        ({"extra_body": {"colour": 1}}, "colour"),
    ],
)
def test_refusals_have_anthropics_shape(claude: anthropic.Anthropic, options: Any, word: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=word) as caught:
        claude.messages.create(**{"model": "story", "messages": TALK, "max_tokens": 3, **options})
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", messages=TALK, max_tokens=3)


def test_the_system_may_speak_between_others() -> None:
    said: Any = [*TALK, {"role": "system", "content": [{"type": "text", "text": "Be brief"}]}, *TALK]
    messages = CountRequest.model_validate({"messages": said, "system": "Be kind"}).talk.messages
    assert [each["role"] for each in messages] == ["system", "user", "system", "user"]
    assert messages[2]["content"] == "Be brief"


def test_what_another_model_has_thought_is_left_out(claude: anthropic.Anthropic) -> None:
    thought: Any = [{"type": "thinking", "thinking": "a", "signature": "b"}, {"type": "redacted_thinking", "data": "c"}]
    said: Any = {"type": "text", "text": "Hello"}
    counts = [
        claude.messages.count_tokens(
            model="story", messages=[*TALK, {"role": "assistant", "content": [*more, said]}, *TALK]
        ).input_tokens
        for more in (thought, [])
    ]
    assert counts[0] == counts[1]


def test_runners_of_tools_learn_that_there_are_no_threads(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="send the whole conversation") as caught:
        claude.messages.create(model="story", messages=TALK, max_tokens=3, extra_body={"thread": {"type": "create"}})
    error: Any = caught.value.body
    assert error["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_models_are_listed_in_anthropics_words(claude: anthropic.Anthropic, running: Running) -> None:
    (found,) = claude.models.list().data
    assert (found.type, found.id, found.display_name) == ("model", "story", "story")
    assert claude.models.retrieve("story").created_at == found.created_at
    required = {name for name, field in type(found).model_fields.items() if field.is_required()}
    assert required <= found.model_fields_set
    with running.served.models.use("default") as llm:
        assert claude.models.retrieve("story").max_input_tokens == llm.max_context


def test_a_form_is_that_of_a_response_format() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    now, before = {"output_config": {"format": form}}, {"output_format": form}  # its old name
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    for each in (now, before):
        asked = CountRequest.model_validate({"model": "story", "messages": TALK, **each})
        assert asked.talk.grammar == read_response_format(wanted) and asked.told_as("grammar") in each
    with pytest.raises(ValueError, match="output_format is the old name of output_config"):
        CountRequest.model_validate({"model": "story", "messages": TALK, **now, **before})


def test_an_answer_has_the_id_that_its_line_in_the_log_has(running: Running, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        Running(running.served, journal=Journal(log)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        answer = client.messages.create(model="story", messages=TALK, max_tokens=1)
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(model="story", messages=[], max_tokens=1)
    ids = [json.loads(line)["request_id"] for line in log.read_text().splitlines()]
    assert [answer._request_id, refused.value.request_id] == ids

"""OpenAI's own client on the Responses API."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from conftest import Running
from pydantic import BaseModel

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.server import ServerOptions, read_keys
from bitnet_inference.server.response_items import input_items
from bitnet_inference.server.response_schema import InputTokensRequest, ResponsesRequest

ASK = "Tell me a story about a cat called Tom"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


class Animal(BaseModel):
    kind: Literal["fox", "bear"]


def chatted(running: Running, *messages: tuple[str, str]) -> str:
    with running.served.models.use("default") as llm:
        talk = [{"role": role, "content": content} for role, content in messages]
        return llm.chat(talk, SamplingParams(temperature=0.0, max_tokens=12)).text


def test_a_response_is_the_chats_answer_and_can_be_gone_on_with(client: openai.OpenAI, running: Running) -> None:
    options: Any = {"model": "story", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input=ASK, instructions="Be kind", metadata={"a": "b"}, **options)
    assert first.output_text == chatted(running, ("system", "Be kind"), ("user", ASK))
    assert first.status == "incomplete" and first.incomplete_details and first.metadata == {"a": "b"}
    assert first.incomplete_details.reason == "max_output_tokens" and first.usage and first.usage.output_tokens == 12
    then = client.responses.create(input="And a dog?", previous_response_id=first.id, **options)
    talk = [("user", ASK), ("assistant", first.output_text), ("user", "And a dog?")]  # without the instructions
    assert then.output_text == chatted(running, *talk)
    items: Any = [{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "And a dog?"}]
    assert client.responses.create(input=items, store=False, **options).output_text == then.output_text
    items.insert(1, {"type": "reasoning", "id": "rs_1", "summary": []})  # of another model
    counted = client.responses.input_tokens.count(model="story", input=items)
    assert then.usage and counted.input_tokens == then.usage.input_tokens
    (asked,) = client.responses.input_items.list(first.id).data
    by_id: Any = [{"type": "item_reference", "id": each.id} for each in (asked, *first.output)]
    again = client.responses.create(input=[*by_id, items[-1]], **options)
    assert again.output_text == then.output_text
    assert client.responses.input_items.list(again.id, order="asc").data[0].id == asked.id
    with pytest.raises(openai.BadRequestError, match="is not stored here: send the item itself"):
        client.responses.create(input=[{"type": "item_reference", "id": "msg_1"}, items[-1]], **options)


def test_what_is_stored_can_be_fetched_and_forgotten(client: openai.OpenAI) -> None:
    made = client.responses.create(model="story", input=ASK, max_output_tokens=2)
    assert client.responses.retrieve(made.id) == made
    assert [each.content[0].text for each in client.responses.input_items.list(made.id)] == [ASK]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_items.list(made.id, after="zz")
    assert refused.value.param == "after"
    ignored: Any = ({"include": ["message.output_text.logprobs"]}, {"starting_after": 1}, {"stream": True})
    for each in ignored:
        with pytest.raises(openai.BadRequestError, match="is given in one piece, as it was made") as refused:
            client.responses.retrieve(made.id, **each)
        assert refused.value.param == next(iter(each))
    made_items: Any = [*made.output, {"role": "user", "content": ASK}]
    client.responses.delete(client.responses.create(model="story", input=made_items, max_output_tokens=1).id)
    by_id: Any = [{"type": "item_reference", "id": made.output[0].id}]
    client.responses.create(model="story", input=by_id, max_output_tokens=1)  # the first one still has it
    client.responses.delete(made.id)
    not_kept = client.responses.create(model="story", input=ASK, max_output_tokens=2, store=False)
    for identity in (made.id, not_kept.id):
        with pytest.raises(openai.NotFoundError, match="not stored"):
            client.responses.retrieve(identity)


def test_what_is_stored_is_its_callers_own(running: Running) -> None:
    keys = ["the key of Anna", "the key of Boris"]
    with Running(running.served, ServerOptions(keys=read_keys(keys))) as server:
        anna, boris = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in keys)
        with anna, boris:
            made = anna.responses.create(model="story", input=ASK, max_output_tokens=1)
            assert anna.responses.retrieve(made.id) == made
            for ask in (boris.responses.retrieve, boris.responses.delete, boris.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    ask(made.id)
            with pytest.raises(openai.BadRequestError, match="not stored") as refused:
                boris.responses.create(model="story", input=ASK, previous_response_id=made.id)
            assert refused.value.code == "previous_response_not_found"
            by_id: Any = [{"type": "item_reference", "id": made.output[0].id}]
            with pytest.raises(openai.BadRequestError, match="is not stored here"):
                boris.responses.create(model="story", input=by_id)
            sent: Any = made.output
            boris.responses.create(model="story", input=sent, max_output_tokens=1)
            for each in (anna, boris):
                each.responses.create(model="story", input=by_id, max_output_tokens=1)


def test_calls_that_are_sent_back_are_one_message_with_the_text_in_front_of_them() -> None:
    """As `previous_response_id` has it: many chat templates want the roles in turn."""
    direct = {"caller": {"type": "direct"}}  # of the model itself, as OpenAI's API tells of each
    call = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}", **direct}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
    given = {"type": "function_call_output", "call_id": "c1", "name": "clock", "output": "noon", **direct}
    ask = {"role": "user", "content": ASK}
    items = [ask, text, call, call, given, call]
    asked, said, told, more = InputTokensRequest.model_validate({"input": items}).messages
    assert asked["content"] == ASK and (told["role"], told["name"]) == ("tool", "clock")
    assert said["content"] == "I look." and [each["id"] for each in said["tool_calls"]] == ["c1", "c1"]
    assert more["content"] == "" and len(more["tool_calls"]) == 1


def test_what_a_client_made_of_an_answer_may_be_sent_back_with_it() -> None:
    """`responses.parse` has objects beside texts, and beside arguments in JavaScript, and writes them into requests."""
    part = {"type": "output_text", "text": '{"kind":"fox"}', "annotations": []}
    call = {"type": "function_call", "call_id": "c1", "name": "save", "arguments": '{"kind":"fox"}'}
    made = {"kind": "fox"}
    items = [[{"role": "assistant", "content": [part]}, call]]
    items.append([{"role": "assistant", "content": [part | {"parsed": made}]}, call | {"parsed_arguments": made}])
    plain, parsed = (ResponsesRequest.model_validate({"input": each}) for each in items)
    assert plain.messages == parsed.messages
    assert [each | {"id": ""} for each in input_items(plain)] == [each | {"id": ""} for each in input_items(parsed)]


def test_a_conversation_may_go_on_without_input(client: openai.OpenAI) -> None:
    made = client.responses.create(model="story", input=ASK, max_output_tokens=2)
    more = client.responses.create(model="story", previous_response_id=made.id, max_output_tokens=2)
    assert made.usage and more.usage and more.usage.input_tokens > made.usage.input_tokens
    assert client.responses.input_items.list(more.id).data == []
    with pytest.raises(openai.BadRequestError, match="input is missing: give it"):
        client.responses.create(model="story")


def test_a_stream_tells_of_every_step(client: openai.OpenAI) -> None:
    with client.responses.stream(model="story", input=ASK, max_output_tokens=5, temperature=0) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type == "response.incomplete"
    final = last.response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text == client.responses.retrieve(final.id).output_text != ""


def test_a_form_and_a_forced_call(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="story", input=ASK, text_format=Animal)
    assert isinstance(parsed.output_parsed, Animal)
    asked: Any = {"model": "story", "input": ASK, "tools": [WEATHER], "tool_choice": "required"}
    (call,) = client.responses.create(**asked).output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(client.responses.create(**asked, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(done) == 1 and json.loads(done[0].arguments)["city"] in ("Rome", "Oslo")
    last = events[-1]
    assert last.type == "response.completed" and last.response.output[0].type == "function_call"
    clock = WEATHER | {"name": "clock", "parameters": {"type": "object", "properties": {}}}
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    made = client.responses.create(**asked | {"tools": [WEATHER, clock], "tool_choice": some})
    assert [(each.type, each.name) for each in made.output] == [("function_call", "clock")]
    assert made.tool_choice.model_dump() == some
    scored: Any = {"include": ["message.output_text.logprobs"], "stream": True}
    added = [each for each in client.responses.create(**asked, **scored) if each.type == "response.output_item.added"]
    assert [each.item.type for each in added] == ["function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    conversation: Any = [{"role": "user", "content": ASK}, call, result]
    assert client.responses.create(model="story", input=conversation, max_output_tokens=3).output_text


def test_logprobs_are_included_where_they_are_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": "story", "input": ASK, "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    made = client.responses.create(**asked, top_logprobs=2)
    (part,) = made.output[0].content
    assert part.type == "output_text" and part.logprobs and len(part.logprobs) == 3
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for delta in deltas for each in delta.logprobs] == [each.token for each in done.logprobs]


def test_in_the_background(client: openai.OpenAI) -> None:
    endless = client.responses.create(model="story", input=ASK, background=True, truncation="auto")
    assert endless.status == "in_progress" and endless.background
    ended = client.responses.cancel(endless.id)
    assert ended.status in ("cancelled", "completed")  # a short story may have been told by now
    assert client.responses.retrieve(endless.id).status == ended.status
    options: Any = {"reasoning": {"effort": "none"}, "text": {"verbosity": "medium"}, "max_output_tokens": 1}
    brief = client.responses.create(model="story", input=ASK, background=True, **options)
    before = [each.id for each in client.responses.input_items.list(brief.id)]
    while (brief := client.responses.retrieve(brief.id)).status == "in_progress":
        pass
    assert brief.status == "incomplete" and brief.output_text
    assert [each.id for each in client.responses.input_items.list(brief.id)] == before
    assert brief.reasoning and brief.reasoning.effort == "none" and brief.text and brief.text.verbosity == "medium"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(model="story", input=ASK, max_output_tokens=1).id)

"""Tools that a model may call and need not, as frameworks for agents send them: strict, and beside a form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from conftest import Running, running_with_template

TALK: list[Any] = [{"role": "user", "content": "What time is it?"}]
ZONE = {"properties": {"zone": {"enum": ["here"]}}, "required": ["zone"], "additionalProperties": False}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "strict": True, "parameters": ZONE}}
SEVEN: Any = {"type": "json_schema", "json_schema": {"name": "seven", "schema": {"const": 7}}}
TEMPLATE = "{{ tools }}{% for each in messages %}{{ each.content }}{% endfor %}{# calls are written in <tool_call> #}"


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose model's chat template knows tools."""
    with running_with_template(tmp_path_factory.mktemp("calling"), "caller", TEMPLATE) as server:
        yield server


def test_strict_tools_that_need_not_be_called(calling: Running) -> None:
    function = CLOCK["function"] | {"type": "function"}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": TALK, "max_tokens": 4, "tools": [CLOCK]},
        "responses": {"input": "Hi", "max_output_tokens": 4, "tools": [function], "reasoning": {}},
        "messages": {
            "messages": TALK,
            "max_tokens": 4,
            "tools": [{"name": "clock", "strict": True, "input_schema": ZONE, "eager_input_streaming": True}],
        },
    }
    for path, body in bodies.items():
        assert httpx.post(f"{calling.url}/v1/{path}", json=body).raise_for_status().json()["usage"]


def test_a_form_leaves_room_for_calls_and_their_arguments_are_right(calling: Running) -> None:
    with calling.served.models.use(calling.served.path("")) as llm:
        vocabulary = llm.tokenizer.vocabulary()
    no_7, no_call = ({str(each): -100.0 for token, each in vocabulary.items() if char in token} for char in "7<")
    asked: Any = {"model": "caller", "messages": TALK, "tools": [CLOCK], "response_format": SEVEN, "temperature": 0}
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        for more in ({"logit_bias": no_7}, {"tool_choice": "required"}):
            # Without an end of its own a text may have another call, which max_tokens cuts.
            (choice,) = client.chat.completions.create(**asked, **more, max_tokens=60).choices
            assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
            assert json.loads(choice.message.tool_calls[0].function.arguments) == {"zone": "here"}
        assert client.chat.completions.create(**asked, logit_bias=no_call).choices[0].message.content == "7"


def test_log_probabilities_of_what_is_held_back_come_with_it(calling: Running) -> None:
    """What begins a call, and is cut, is shown at the end."""
    form = {"format": {"type": "json_schema", "name": "begun", "schema": {"const": "<tool_call"}}}
    function = CLOCK["function"] | {"type": "function"}
    asked: Any = {"model": "caller", "input": "Hi", "tools": [function], "text": form, "max_output_tokens": 4}
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        events = list(client.responses.create(**asked, include=["message.output_text.logprobs"], stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert "<t" in done.text and "".join(each.delta for each in deltas) == done.text
    assert [entry.token for each in deltas for entry in each.logprobs] == [entry.token for entry in done.logprobs]
    assert len(done.logprobs) == 4

"""`chat_template_kwargs`, by which clients of vLLM, SGLang and llama.cpp tell a chat template what it may know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from conftest import Running, running_with_template

TALK: list[Any] = [{"role": "user", "content": "Hi"}]
# As Qwen3's: without enable_thinking the model thinks first.
TEMPLATE = (
    "{% for each in messages %}{{ each.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose model's chat template knows `enable_thinking`."""
    with running_with_template(tmp_path_factory.mktemp("thinking"), "thinker", TEMPLATE) as server:
        yield server.url


def test_they_reach_the_template(thinking: str) -> None:
    for variables, has_thought in (({"enable_thinking": False}, True), ({"enable_thinking": None}, False), ({}, False)):
        talk = {"messages": TALK, "chat_template_kwargs": variables}
        tokens = httpx.post(f"{thinking}/tokenize", json=talk).raise_for_status().json()
        text = httpx.post(f"{thinking}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
        assert text.endswith("</think>") == has_thought
        answer = httpx.post(f"{thinking}/v1/chat/completions", json=talk | {"max_tokens": 1}).raise_for_status().json()
        assert answer["usage"]["prompt_tokens"] == tokens["count"]


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"thinking": False}, "this model's chat template knows no 'thinking': leave it out"),
        ({"messages": []}, "messages is no free variable of a chat template: leave it out"),
    ],
)
@pytest.mark.parametrize("path", ["v1/chat/completions", "tokenize"])
def test_those_that_do_nothing_are_refused(thinking: str, path: str, variables: dict[str, Any], why: str) -> None:
    reply = httpx.post(f"{thinking}/{path}", json={"messages": TALK, "chat_template_kwargs": variables})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "chat_template_kwargs"
    assert error["message"] == f"chat_template_kwargs: {why}"


def test_not_to_think_can_be_asked_of_every_model(running: Running) -> None:
    talk = {"messages": TALK, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=talk).status_code == 200
    talk |= {"chat_template_kwargs": {"enable_thinking": True}}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=talk).status_code == 400


def test_who_wants_no_thinking_in_the_words_of_an_api_gets_none(thinking: str) -> None:
    responses = {"input": "Hi", "reasoning": {"effort": "none"}}
    messages = {"messages": TALK, "thinking": {"type": "disabled"}}
    chat = {"messages": TALK, "reasoning_effort": "none"}
    on: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}

    def num_prompt_tokens(path: str, body: dict[str, Any]) -> int:
        told = httpx.post(f"{thinking}/v1/{path}", json=body).raise_for_status().json()
        used = told.get("usage", told)
        names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
        return sum(used.get(name, 0) for name in names)

    for path, body, word in (
        ("chat/completions", chat | {"max_tokens": 1}, "reasoning_effort"),
        ("responses", responses | {"max_output_tokens": 1}, "reasoning"),
        ("responses/input_tokens", responses, "reasoning"),
        ("messages", messages | {"max_tokens": 1}, "thinking"),
        ("messages/count_tokens", messages, "thinking"),
    ):
        without = num_prompt_tokens(path, {name: each for name, each in body.items() if name != word})
        assert num_prompt_tokens(path, body) > without, path
    without = num_prompt_tokens("chat/completions", {"messages": TALK, "max_tokens": 1})
    assert num_prompt_tokens("chat/completions", chat | on | {"max_tokens": 1}) == without, "what is more exact counts"

"""OpenAI's own client, chat and text."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from conftest import Running

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.llm import LLM

TALK: list[Any] = [{"role": "user", "content": "Tell me a story about a brave fox called Mia"}]


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM.load(threads=1) as llm:
        return llm.chat(TALK, SamplingParams(temperature=0.0, max_tokens=20)).text


def test_an_answer_is_the_librarys(client: openai.OpenAI, expected: str) -> None:
    answer = client.chat.completions.create(model="story", messages=TALK, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 20


def test_a_stream_gives_the_same_text_and_its_cost(client: openai.OpenAI, expected: str) -> None:
    events = client.chat.completions.create(
        model="story", messages=TALK, temperature=0, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(events)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected
    assert [each.choices[0].finish_reason for each in chunks if each.choices][-1] == "length"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 20


def test_each_chunk_says_what_its_choice_has_cost_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    limits: Any = {"max_tokens": 6, "n": 2, "seed": 3}
    chats = client.chat.completions.create(
        model="story", messages=TALK, max_completion_tokens=6, stream=True, stream_options=options, **limits
    )
    texts = client.completions.create(model="story", prompt="Once", stream=True, stream_options=options, **limits)
    for chunks in (list(chats), list(texts)):
        for index in range(2):
            costs = [each.usage for each in chunks if each.choices and each.choices[0].index == index]
            counts = [cost.completion_tokens for cost in costs if cost]
            assert len(counts) == len(costs) and counts == sorted(counts) and counts[-1] == 6
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 12
        assert chunks[0].usage and chunks[0].usage.completion_tokens < 12


def test_choices_are_seeded(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(model="story", messages=TALK, n=3, seed=5, temperature=1, max_tokens=12)
        for _ in range(2)
    ]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_an_echo_has_a_logprob_for_each_token_but_the_first(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="story", prompt="Once upon", echo=True, logprobs=1, max_tokens=0)
    found = answer.choices[0].logprobs
    assert found and found.token_logprobs and found.token_logprobs[0] is None
    assert len(found.token_logprobs) == len(found.tokens or []) == answer.usage.prompt_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"n": 0}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"temperature": -1}, ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, options: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="story", prompt="Once", **options)
    assert field in str(caught.value)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are story"):
        client.chat.completions.create(model="other", messages=TALK)
    assert [each.id for each in client.models.list()] == ["story"]


@pytest.mark.parametrize("path", ["", "/v1/v1", "//v1"])
def test_a_base_url_that_leads_nowhere_is_told_with_the_cure(running: Running, path: str) -> None:
    lost = openai.OpenAI(base_url=f"{running.url}{path}", api_key="none", max_retries=0)
    with lost, pytest.raises(openai.NotFoundError, match="base_url that ends with /v1"):
        lost.chat.completions.create(model="story", messages=TALK)

"""OpenAI's own client: forms, calls, log-probabilities, vectors, several texts at a time, without blocking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from conftest import Running
from pydantic import BaseModel

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.llm import LLM
from bitnet_inference.text.tokenizer import Tokenizer

TALK: list[Any] = [{"role": "user", "content": "Tell me a story about a brave fox called Mia"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class Animal(BaseModel):
    kind: Literal["fox", "bear"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def llm(running: Running) -> Iterator[LLM]:
    with running.served.models.use("default") as each:
        yield each


async def streamed(running: Running, **options: Any) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        async for chunk in await client.chat.completions.create(model="story", messages=TALK, stream=True, **options):
            yield chunk


def test_streams_without_blocking(running: Running, llm: LLM) -> None:
    async def text(seed: int) -> str:
        chunks = [chunk async for chunk in streamed(running, seed=seed, temperature=1, max_tokens=8, n=2)]
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices[0].index == 0)

    async def all_texts() -> list[str]:
        return await asyncio.gather(*map(text, range(4)))

    texts = [
        llm.chat(TALK, SamplingParams(temperature=1.0, top_p=0.9, seed=seed, max_tokens=8)).text for seed in range(4)
    ]
    assert asyncio.run(all_texts()) == texts


def test_a_stream_has_openais_order(running: Running) -> None:
    async def collected() -> list[Any]:
        return [each async for each in streamed(running, max_tokens=4, stream_options={"include_usage": True})]

    first, *middle, last, usage = asyncio.run(collected())
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(each.choices[0].finish_reason is None and each.usage is None for each in (first, *middle))
    assert last.choices[0].finish_reason == "length" and not last.choices[0].delta.content
    assert not usage.choices and usage.usage.completion_tokens == 4
    assert len({(each.id, each.created, each.system_fingerprint) for each in (first, *middle, last, usage)}) == 1


def test_a_schema_is_kept_to(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(model="story", messages=TALK, response_format=Animal)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    told = client.chat.completions.create(model="story", messages=TALK, response_format={"type": "json_object"}, seed=1)
    assert told.choices[0].finish_reason == "length" or isinstance(
        json.loads(told.choices[0].message.content or ""), dict
    )


ONE = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "[0-9]{3}x"}, None),
        ({"guided_json": {"const": 7}}, {"7"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"structured_outputs": {"choice": ["yes", "no"], "regex": None}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "[0-9]{3}x"}}, None),
        ({"structured_outputs": {"json": {"const": 7}}}, {"7"}),
        ({"structured_outputs": {"json": '{"const": 7}'}}, {"7"}),
        ({"guided_json": ONE}, {'{"a":1}', '{"a": 1}'}),  # and no other property
        ({"structured_outputs": {"json": json.dumps(ONE)}}, {'{"a":1}', '{"a": 1}'}),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, {"a", "b"}),
    ],
)
def test_forms_of_vllm(client: openai.OpenAI, form: Any, texts: set[str] | None) -> None:
    text = client.completions.create(model="story", prompt="Is it?", extra_body=form).choices[0].text
    assert text in texts if texts else (text[:3].isdigit() and text[3:] == "x")


def test_what_clients_of_vllm_always_send_is_taken(client: openai.OpenAI) -> None:
    always: Any = {"skip_special_tokens": True, "include_stop_str_in_output": False, "use_beam_search": False}
    text = client.completions.create(model="story", prompt="", max_tokens=3, seed=1, extra_body=always)
    assert text.usage and text.usage.prompt_tokens == 1, "the beginning of text"
    always |= {"bad_words": [], "detokenize": True, "length_penalty": 1}
    both: Any = {"max_tokens": 3, "max_completion_tokens": 3, "reasoning_effort": "none", "verbosity": "medium"}
    both["extra_body"] = always | {"add_generation_prompt": True, "chat_template_kwargs": {}}
    chat = client.chat.completions.create(model="story", messages=TALK, **both)
    assert chat.usage and chat.usage.completion_tokens == 3


def test_a_forced_call(client: openai.OpenAI) -> None:
    asked: Any = {"model": "story", "messages": TALK, "tools": [WEATHER], "tool_choice": "required"}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and final.message.tool_calls and not final.message.content
    assert final.message.tool_calls[0].function.name == "weather"


def test_tools_that_the_model_never_hears_of_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="knows none") as caught:
        client.chat.completions.create(model="story", messages=TALK, tools=[WEATHER])
    assert caught.value.param == "tools"
    none = client.chat.completions.create(
        model="story", messages=TALK, tools=[WEATHER], tool_choice="none", max_tokens=1
    )
    assert none.choices[0].message.content


def test_token_bytes_are_the_texts(client: openai.OpenAI) -> None:
    asked: Any = {"model": "story", "messages": TALK, "max_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert whole.logprobs and whole.logprobs.content and whole.message.content
    assert b"".join(bytes(each.bytes or []) for each in whole.logprobs.content).decode() == whole.message.content
    assert all(len(each.top_logprobs) == 3 for each in whole.logprobs.content)
    chunks = list(client.chat.completions.create(**asked, logprobs=True, stream=True))
    entries = [
        each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content or []
    ]
    assert [each.logprob for each in entries] == [each.logprob for each in whole.logprobs.content]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_where_tokens_begin(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    prompt = "Grüße, 狐 😀!"
    bias = {str(each): 100 for each in llm.tokenizer.encode("狐", add_special_tokens=False)}
    asked: Any = {"model": "story", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 7, "logit_bias": bias}
    chunks = client.completions.create(**asked, stream=True) if stream else [client.completions.create(**asked)]
    choices = [chunk.choices[0] for chunk in chunks]
    text = "".join(choice.text for choice in choices)
    tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.tokens or []]
    offsets = [each for choice in choices if choice.logprobs for each in choice.logprobs.text_offset or []]
    scores = [each for choice in choices if choice.logprobs for each in choice.logprobs.token_logprobs or []]
    assert text.startswith(prompt) and len(tokens) == len(offsets) == len(scores)
    assert any(token.startswith("bytes:\\x") for token in tokens) and offsets == sorted(offsets)
    for token, offset in list(zip(tokens, offsets, strict=True))[1:]:  # the first one, a BOS, is not shown
        assert token.startswith("bytes:") or text[offset : offset + len(token)] == token
    first = next(index for index, token in enumerate(tokens) if token.startswith("bytes:"))
    assert text[offsets[first]] in "üß狐😀"


def test_the_best_of_several(client: openai.OpenAI, llm: LLM) -> None:
    asked: Any = {
        "model": "story",
        "prompt": "Once",
        "n": 2,
        "best_of": 5,
        "seed": 3,
        "temperature": 1,
        "max_tokens": 9,
    }
    answer = client.completions.create(**asked)
    params = SamplingParams(seed=3, temperature=1.0, top_p=0.9, max_tokens=9)
    assert [each.text for each in answer.choices] == [each.text for each in llm.choices("Once", 2, params, best_of=5)]
    assert answer.usage and answer.usage.completion_tokens == 45


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, llm: LLM) -> None:
    prompts: Any = [llm.tokenizer.encode("Once upon"), llm.tokenizer.encode("The bear")]
    answer = client.completions.create(model="story", prompt=prompts, n=2, temperature=0, max_tokens=5)
    texts = [llm.generate(each, SamplingParams(temperature=0.0, max_tokens=5)).text for each in prompts]
    assert [(each.index, each.text) for each in answer.choices] == list(enumerate(np.repeat(texts, 2).tolist()))


def test_vectors_are_the_librarys(client: openai.OpenAI, llm: LLM) -> None:
    texts = ["a fox", "a bear"]
    expected = llm.embed(texts).tolist()
    for form in ("base64", "float"):
        found = client.embeddings.create(model="story", input=texts, encoding_format=form)  # type: ignore[arg-type]
        assert [each.embedding for each in found.data] == expected if form == "float" else found.data
    assert [each.embedding for each in client.embeddings.create(model="story", input=texts).data] == expected
    ids: Any = llm.tokenizer.encode("a fox")
    found = client.embeddings.create(model="story", input=ids, dimensions=llm.config.hidden_size)
    assert found.data[0].embedding == expected[0] and found.usage.prompt_tokens == len(ids)


def test_tokens_there_and_back(client: openai.OpenAI, llm: LLM) -> None:
    found: Any = client.post("../tokenize", body={"prompt": "Grüße 😀", "return_token_strs": True}, cast_to=object)
    tokenizer: Tokenizer = llm.tokenizer
    assert found["tokens"] == tokenizer.encode("Grüße 😀") and found["count"] == len(found["token_strs"])
    back: Any = client.post("../detokenize", body={"tokens": found["tokens"][1:]}, cast_to=object)
    assert back == {"prompt": "Grüße 😀"}
    talk: Any = client.post("../tokenize", body={"messages": TALK}, cast_to=object)
    assert talk["tokens"] == llm.encode_chat(TALK) and talk["max_model_len"] == llm.max_context


def test_a_request_has_a_time_limit_of_its_own(client: openai.OpenAI) -> None:
    asked: Any = {"model": "story", "prompt": "Once", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    asked["extra_body"] |= {"timeout_s": 1e-9}
    (choice,) = client.completions.create(**asked).choices
    assert choice.finish_reason == "length" and not choice.text
    asked["extra_body"]["timeout_s"] = 0
    with pytest.raises(openai.BadRequestError, match="timeout_s"):
        client.completions.create(**asked)


def test_usage_tells_what_of_a_prompt_was_dropped(client: openai.OpenAI) -> None:
    asked: Any = {"model": "story", "max_tokens": 2, "extra_body": {"overflow": "truncate_left"}}
    used = client.completions.create(prompt=["Once upon a time. " * 900, "Once"], **asked).usage
    assert used and used.prompt_tokens_details
    assert used.prompt_tokens_details.model_extra == {"dropped_tokens": pytest.approx(3000, rel=0.5)}
    used = client.completions.create(prompt="Once", **asked).usage
    assert used and used.prompt_tokens_details and not used.prompt_tokens_details.model_extra


def test_an_event_is_one_line_also_to_who_ends_lines_at_every_unicode_line_end(running: Running) -> None:
    word = "\x85\u2028\u2029"
    body = {"prompt": word, "echo": True, "max_tokens": 0, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
        first = next(answer.iter_lines())
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == word

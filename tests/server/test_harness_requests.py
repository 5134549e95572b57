"""The requests that lm-evaluation-harness' local-completions sends, and what it reads from the answers.

It sends token ids, context and continuation in one prompt, with echo, logprobs 1, one token to generate and seed 1234,
and sums token_logprobs[ctxlen:-1]; a continuation is greedy where each of its tokens has the highest of top_logprobs.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi import ask
from conftest import Running

from bitnet_inference.choices import Likelihood, log_likelihoods, split
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.server import make_app

PAIRS = [
    ("Once upon", " a time, there was a little fox."),
    ("Once upon", " a bear."),
    ("The sun was", " shining, and Mia was happy."),
    ("Grüße an", " die 狐 😀!"),
]


def request(ids: list[list[int]]) -> dict[str, Any]:
    return {
        "prompt": ids, "model": "story", "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip


def read(choice: dict[str, Any], start: int) -> tuple[float, bool]:
    """As the harness does."""
    found = choice["logprobs"]["token_logprobs"][start:-1]
    top = choice["logprobs"]["top_logprobs"][start:-1]
    return sum(found), all(each == max(best.values()) for each, best in zip(found, top, strict=True))


def test_likelihoods_are_the_librarys(running: Running) -> None:
    with running.served.models.use("default") as llm:
        expected: list[Likelihood] = log_likelihoods(llm, PAIRS)
        parts = [split(llm, llm.tokenizer.encode, *pair) for pair in PAIRS]
    got = asyncio.run(ask(make_app(running.served), "/v1/completions", request([part.ids for part in parts])))
    choices = sorted(got.json["choices"], key=lambda choice: choice["index"])
    for choice, part, likelihood in zip(choices, parts, expected, strict=True):
        logprob, is_greedy = read(choice, part.start)
        assert logprob == pytest.approx(likelihood.logprob, abs=1e-9) and is_greedy == likelihood.is_greedy
        assert len(choice["logprobs"]["tokens"]) == len(part.ids) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_ends_at_once_has_an_entry_for_its_end(running: Running, stream: bool) -> None:
    """Otherwise the last token of the continuation would be taken for the generated one, and not be counted."""
    with running.served.models.use("default") as llm:
        (pair,) = [split(llm, llm.tokenizer.encode, *PAIRS[0])]
        (likelihood,) = log_likelihoods(llm, PAIRS[:1])
        bias = {str(each): 100 for each in llm.eos_ids}
    body = request([pair.ids]) | {"logit_bias": bias, "stream": stream}
    got = asyncio.run(ask(make_app(running.served), "/v1/completions", body))
    bodies = (
        [json.loads(line[6:]) for line in got.body.decode().splitlines() if line.startswith("data: {")]
        if stream
        else [got.json]
    )
    found = [each["choices"][0]["logprobs"] for each in bodies if each["choices"][0]["logprobs"]]
    whole = {"logprobs": {name: [one for part in found for one in part[name]] for name in found[0]}}
    assert bodies[-1]["choices"][0]["finish_reason"] == "stop"
    assert read(whole, pair.start)[0] == pytest.approx(likelihood.logprob, abs=1e-9)
    assert len(whole["logprobs"]["tokens"]) == len(pair.ids) + 1


def test_what_it_generates_stops_where_it_says(running: Running) -> None:
    asked = {"prompt": ["Once upon"], "model": "story", "max_tokens": 40}
    body = asked | {"temperature": 0, "stop": ["fox", "."], "seed": 1234}
    got = asyncio.run(ask(make_app(running.served), "/v1/completions", body))
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=("fox", "."))
    with running.served.models.use("default") as llm:
        assert got.json["choices"][0]["text"] == llm.generate("Once upon", params).text


@pytest.mark.parametrize("bos", ["<|begin_of_text|>", ""])
def test_a_conversation_that_the_client_has_rendered_is_the_chats(running: Running, bos: str) -> None:
    """As those do that work with raw prompts: special tokens in a prompt count."""

    def post(path: str, **body: Any) -> Any:
        return asyncio.run(ask(make_app(running.served), path, body)).json

    talk = [{"role": "user", "content": "Tell me a story about a fox called Mia"}]
    ids = post("/tokenize", messages=talk)["tokens"]
    text = bos + post("/detokenize", tokens=ids)["prompt"].removeprefix("<|begin_of_text|>")
    assert "<|eot_id|>" in text and post("/tokenize", prompt=text)["tokens"] == ids
    (told,) = post("/v1/chat/completions", messages=talk, temperature=0, max_tokens=5)["choices"]
    (echoed,) = post("/v1/completions", prompt=text, temperature=0, max_tokens=5, echo=True, logprobs=0)["choices"]
    assert echoed["text"] == text + told["message"]["content"]
    assert echoed["logprobs"]["text_offset"][len(ids)] == len(text)


def test_a_token_behind_half_a_character_begins_behind_it(running: Running) -> None:
    with running.served.models.use("default") as llm:
        first, *others = llm.tokenizer.encode("日", add_special_tokens=False)
        letters = llm.tokenizer.encode("xy", add_special_tokens=False)
    body = {"prompt": [first, *letters, first, *others, *letters], "echo": True, "max_tokens": 0, "logprobs": 0}
    choice = asyncio.run(ask(make_app(running.served), "/v1/completions", body)).json["choices"][0]
    assert choice["text"] == "\ufffdxy日xy" and len(others) == 2
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 3, 3, 4, 5]

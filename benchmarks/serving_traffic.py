"""Requests, what the library answers to them, and what is wrong with what a server answered."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from serving_client import Answer, post

from bitnet_inference.grammar.response_format import read_response_format
from bitnet_inference.llm import LLM
from bitnet_inference.stream import Stream

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "fox owl bear mouse rabbit squirrel hedgehog frog duck goose pony lamb".split()
CHOICE = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "strict": True, "schema": {"enum": WORDS}},
}
NO_TIME = (0.0, 0.0)


@dataclass(frozen=True)
class Question:
    """A request that has one right answer: it has a seed."""

    path: str
    body: Mapping[str, Any]

    def request(self, headers: Mapping[str, str] | None = None) -> bytes:
        """Its bytes."""
        return post(self.path, self.body, headers)

    def truth(self, llm: LLM) -> list[str]:
        """The texts of its choices, by the library."""
        return [stream.read().text for stream in self.streams(llm)]

    def streams(self, llm: LLM) -> list[Stream]:
        """Its choices, by the library."""
        body, number = self.body, self.body.get("n", 1)
        params = replace(
            llm.default_params,
            seed=body.get("seed"),
            temperature=body["temperature"],
            max_tokens=body["max_tokens"],
            ignore_eos=body.get("ignore_eos", False),
            grammar=read_response_format(body.get("response_format")),
        )
        if self.path == TEXT:
            return llm.stream_choices(body["prompt"], number, params)
        return llm.stream_chat_choices(body["messages"], number, params)


def stories(count: int, num_tokens: int, *, stream: bool = True, first_seed: int = 0) -> list[Question]:
    """Texts to go on with, each unlike all others, of exactly so many tokens."""
    return [
        Question(
            TEXT,
            {
                "prompt": f"Once upon a time a {WORDS[seed % len(WORDS)]} had {seed} friends",
                "seed": seed,
                "temperature": 1.0,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": stream,
            },
        )
        for seed in range(first_seed, first_seed + count)
    ]


def talk(seed: int, num_tokens: int, **more: Any) -> Question:
    """A chat."""
    messages = [{"role": "user", "content": f"Tell me about a {WORDS[seed % len(WORDS)]}, number {seed}"}]
    return Question(CHAT, {"messages": messages, "seed": seed, "temperature": 1.0, "max_tokens": num_tokens, **more})


def random_tokens(random: np.random.Generator, vocab_size: int, num_prompt: int, num_answer: int) -> Question:
    """A prompt of random tokens."""
    prompt = random.integers(0, vocab_size, num_prompt).tolist()
    body = {"prompt": prompt, "temperature": 0.0, "max_tokens": num_answer, "ignore_eos": True, "stream": True}
    return Question(TEXT, body)


def texts(answer: Answer) -> list[str]:
    """What was said, by choice."""
    found: dict[int, str] = defaultdict(str)
    for each in _objects(answer):
        for choice in each.get("choices", ()):
            said = choice.get("delta") or choice.get("message") or choice
            found[choice["index"]] += said.get("content") or said.get("text") or ""
    return [found[index] for index in sorted(found)]


def ids(answer: Answer) -> set[str]:
    """The ids that an answer bears: one."""
    return {each.get("id", "none") for each in _objects(answer)}


def faults(answer: Answer, truth: Sequence[str] | None = None) -> list[str]:
    """What is wrong with an answer that should be good; with a truth, also if it is another."""
    if answer.error or answer.status != 200:
        return [answer.error or f"status {answer.status}: {answer.body[:200]!r}"]
    found, objects = [], _objects(answer)
    if answer.events and answer.events[-1][1] != b"[DONE]":
        found.append("the last event is not [DONE]")
    if any("error" in each for each in objects):
        found.append(f"an error: {objects[-1]}")
    if len(ids(answer)) != 1:
        found.append("ids differ within an answer")
    ends = [choice["index"] for each in objects for choice in each.get("choices", ()) if choice["finish_reason"]]
    said = texts(answer)
    if sorted(ends) != list(range(len(said))):
        found.append(f"choices {ends} have ended, of {len(said)}")
    if truth is not None and said != list(truth):
        found.append(f"a wrong answer: {said!r:.200}, not {truth!r:.200}")
    return found


def _objects(answer: Answer) -> list[dict[str, Any]]:
    if answer.body:
        return [answer.json]
    return [json.loads(data) for _, data in answer.events if data != b"[DONE]"]


@dataclass(frozen=True)
class Times:
    """Median and 95th percentile in milliseconds: to the first event with text, and between such events."""

    first_ms: tuple[float, float]
    gap_ms: tuple[float, float]


def times(answers: Iterable[Answer]) -> Times:
    """Those of streams; the first event counts from when the request was due."""
    first, gaps = [], []
    for answer in answers:
        told = [now for now, data in answer.events if _has_text(data)]
        first += [told[0] - answer.due_s] if told else []
        gaps += [later - earlier for earlier, later in pairwise(told)]
    return Times(_spread_ms(first), _spread_ms(gaps))


def _has_text(data: bytes) -> bool:
    return b'"finish_reason":null' in data and b'"role"' not in data


def _spread_ms(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return NO_TIME
    median, high = np.percentile(values, (50, 95))
    return 1000 * float(median), 1000 * float(high)

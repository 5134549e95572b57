"""Which continuation a model finds likeliest: multiple choice without generating."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from bitnet_inference.config import check_progress
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams, PromptTooLong
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import Progress, encode_each

GROUP_SIZE = 256  # continuations that are handed to the engine at a time

Normalize = Literal["none", "tokens", "bytes"]


@dataclass(frozen=True)
class Likelihood:
    """How likely a continuation is: the natural logarithm of its probability, and whether it is the greedy one."""

    logprob: float
    num_tokens: int
    is_greedy: bool


@dataclass(frozen=True)
class Chosen:
    """The choice of the highest score, the first among equals; all scores; and what they were made from."""

    index: int
    scores: list[float]
    likelihoods: list[Likelihood]


class Continued(NamedTuple):
    """Token ids, of which those from `start` on are the continuation."""

    ids: list[int]
    start: int


def choose(llm: LLM, prompt: str, choices: Sequence[str], *, normalize: Normalize = "none") -> Chosen:
    """Which of several continuations of a prompt is the likeliest.

    `normalize` divides a logarithm by the number of the choice's "tokens", or of its UTF-8 "bytes" without spaces in
    front (acc_norm of lm-evaluation-harness). Choices begin with a space where the prompt does not end with one.
    Raises InvalidParams, and what LLM.generate raises.
    """
    if normalize not in get_args(Normalize):
        raise InvalidParams(f'normalize is {normalize!r}: choose "none", "tokens" or "bytes"')
    texts = _checked(choices)
    likelihoods = log_likelihoods(llm, [(prompt, text) for text in texts])
    scores = [_score(each, text, normalize) for each, text in zip(likelihoods, texts, strict=True)]
    return Chosen(scores.index(max(scores)), scores, likelihoods)


def log_likelihoods(
    llm: LLM, pairs: Sequence[tuple[str, str]], *, progress: Progress | None = None
) -> list[Likelihood]:
    """How likely each continuation is after its context: pairs of strings.

    Tokens are those of the whole text; the context's are those that both texts begin with. What contexts have in
    common is computed once, where the cache has room. `progress(done, total)` counts pairs. Raises as `choose`.
    """
    check_progress(progress)
    if not isinstance(pairs, Iterable):
        raise InvalidParams(f"pairs is {pairs!r:.60}: give a list of contexts and their continuations")
    return score_continued(llm, list(encode_each(pairs, partial(_fitting, llm), "pairs")), progress)


def split(llm: LLM, encode: Callable[[str], list[int]], context: str, continuation: str) -> Continued:
    """The tokens of a context and its continuation. Raises InvalidParams where there is nothing to score."""
    _checked([context, continuation])
    ids, known = encode(context + continuation), encode(context)
    start = next((at for at, (one, other) in enumerate(zip(ids, known, strict=False)) if one != other), len(known))
    if start >= len(ids):
        raise InvalidParams(f"{continuation!r:.60} adds no token to its context: give another continuation")
    if start == 0:  # something must come before what is scored
        if not llm.eos_ids:
            raise InvalidParams("the context is empty, and the model has neither BOS nor EOS: give a context")
        return Continued([llm.eos_ids[0], *ids], 1)
    return Continued(ids, start)


def score_continued(llm: LLM, parts: Sequence[Continued], progress: Progress | None = None) -> list[Likelihood]:
    """How likely these continuations are. The first one of each context goes ahead, and the others find it computed."""
    found: dict[int, Likelihood] = {}
    for start in range(0, len(parts), GROUP_SIZE):
        leaders: dict[tuple[int, ...], int] = {}
        group = range(start, min(start + GROUP_SIZE, len(parts)))
        for index in group:
            leaders.setdefault(tuple(parts[index].ids[: parts[index].start]), index)
        first = set(leaders.values())
        for wave in ([index for index in group if index in first], [index for index in group if index not in first]):
            if wave:
                found.update(zip(wave, _likelihoods(llm, [parts[index] for index in wave]), strict=True))
        if progress is not None:
            progress(len(found), len(parts))
    return [found[index] for index in range(len(parts))]


def _likelihoods(llm: LLM, parts: Sequence[Continued]) -> list[Likelihood]:
    params = [SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprobs_from=part.start) for part in parts]
    outputs = llm.generate([part.ids for part in parts], params)
    likelihoods = []
    for part, output in zip(parts, outputs, strict=True):
        entries = [entry for entry in output.prompt_logprobs or () if entry is not None]
        greedy = [entry.top[0][0] for entry in entries]
        logprob = math.fsum(entry.logprob for entry in entries)
        likelihoods.append(Likelihood(logprob, len(entries), greedy == part.ids[part.start :]))
    return likelihoods


def _fitting(llm: LLM, pair: Any) -> Continued:
    part = split(llm, llm.tokenizer.encode, *_pair(pair))
    most = llm.config.max_positions  # a cache that is too small is told as that
    if len(part.ids) > most:
        raise PromptTooLong(len(part.ids), most, "context and continuation have", "shorten them")
    return part


def _pair(pair: Any) -> tuple[str, str]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidParams("a pair must be a context and its continuation, two strings")
    return pair[0], pair[1]


def _checked(texts: Any) -> Sequence[str]:
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str | bytes) and len(texts) > 0
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise InvalidParams("prompts and choices must be strings, and one choice at least")
    strings: Sequence[str] = texts
    return strings


def _score(likelihood: Likelihood, choice: str, normalize: Normalize) -> float:
    sizes = {"none": 1, "tokens": likelihood.num_tokens, "bytes": max(1, len(choice.lstrip().encode()))}
    return likelihood.logprob / sizes[normalize]

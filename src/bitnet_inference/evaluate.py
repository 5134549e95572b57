"""How well a model predicts a text.

Log-probabilities are float64, and their sum is rounded once (math.fsum), so it has no order. The last exp is the
machine's own, and may differ in the last bit from one machine to another.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from time import monotonic
from typing import NamedTuple

from bitnet_inference.config import check_progress
from bitnet_inference.errors import InvalidParams
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import Progress, is_one_prompt

USUAL_WINDOW = 2048
GROUP_TOKENS = 1 << 16  # of windows that are handed to the engine at a time


@dataclass(frozen=True)
class Perplexity:
    """How well a text was predicted.

    `mean_logprob` is the mean of the natural log-probabilities of its `num_tokens` scored tokens, `perplexity`
    exp(-mean_logprob). `num_bytes` is what these tokens stand for in UTF-8, and `bits_per_byte` what a byte costs,
    which compares models whose tokens differ; both are None where token ids were given. `window` and `stride` are
    those that were used, `seconds` is how long it took.
    """

    perplexity: float
    mean_logprob: float
    num_tokens: int
    num_bytes: int | None
    bits_per_byte: float | None
    window: int
    stride: int
    seconds: float = field(compare=False)


class Window(NamedTuple):
    """Tokens begin to end - 1 of a text, of which those from `first` on are scored."""

    begin: int
    end: int
    first: int


def perplexity(
    llm: LLM,
    text: str | Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Score a text of any length, a string or token ids, in windows of so many tokens.

    Each window begins `stride` tokens after the one before it, and scores the tokens that that did not have: so in all
    but the first, a token has at least window - stride tokens before it. As in Transformers' guide to perplexity, no
    BOS is put in front of further windows, and where stride equals window, their first tokens are not scored. By
    default, the window is the model's context, at most 2048, and the stride half of it. `progress(done, total)` counts
    windows. Raises InvalidParams, and what LLM.score raises.
    """
    if not is_one_prompt(text):
        raise InvalidParams("perplexity is of one text: call it for each, or join them")
    window = _checked("window", window, min(llm.max_context, USUAL_WINDOW), 2, llm.max_context)
    stride = _checked("stride", stride, window // 2, 1, window)
    ids = llm.tokenizer.encode(text) if isinstance(text, str) else text
    check_progress(progress)
    if len(ids) < 2:
        raise InvalidParams(f"the text has {len(ids)} tokens, and a first one has no score: give a longer text")
    start = monotonic()
    scores = _scores(llm, ids, list(windows(len(ids), window, stride)), progress)
    unscored = [ids[at] for at in range(0, len(ids), stride if stride == window else len(ids))]
    num_bytes = _num_bytes(llm, text, unscored) if isinstance(text, str) else None
    return _summary(scores, num_bytes, window, stride, monotonic() - start)


def windows(num_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """How `perplexity` cuts a text."""
    end = 0
    for begin in range(0, num_tokens, stride):
        first, end = max(begin + 1, end), min(begin + window, num_tokens)
        if first < end:
            yield Window(begin, end, first)
        if end == num_tokens:
            return


def _scores(llm: LLM, ids: Sequence[int], parts: Sequence[Window], progress: Progress | None) -> array[float]:
    scores = array("d")
    size = max(1, GROUP_TOKENS // (parts[0].end - parts[0].begin))
    for done in range(0, len(parts), size):
        group = parts[done : done + size]
        starts = [each.first - each.begin for each in group]
        for found in llm.score([ids[each.begin : each.end] for each in group], start=starts):
            scores.extend(found)
        if progress is not None:
            progress(done + len(group), len(parts))
    return scores


def _summary(scores: array[float], num_bytes: int | None, window: int, stride: int, seconds: float) -> Perplexity:
    total = math.fsum(scores)
    mean = total / len(scores)
    return Perplexity(
        perplexity=math.exp(-mean) if mean > -700 else math.inf,
        mean_logprob=mean,
        num_tokens=len(scores),
        num_bytes=num_bytes,
        bits_per_byte=-total / (num_bytes * math.log(2)) if num_bytes else None,
        window=window,
        stride=stride,
        seconds=seconds,
    )


def _num_bytes(llm: LLM, text: str, unscored: Sequence[int]) -> int:
    """Of the text without these tokens of it, the first of which may be a BOS and no part of it."""
    pieces = [llm.tokenizer.piece(token_id, opening=not at) or "" for at, token_id in enumerate(unscored)]
    return len(text.encode()) - sum(len(each.encode() if isinstance(each, str) else each) for each in pieces)


def _checked(name: str, value: object, default: int, low: int, high: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidParams(f"{name} is {value!r}: give a whole number of tokens, {low} to {high}")
    return int(value)

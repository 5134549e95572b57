"""What an LLM may be asked, and on which terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypedDict

import numpy as np

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
Progress = Callable[[int, int], None]  # what is done, of how much


class TermOptions(TypedDict, total=False):
    """On which terms requests are served; see Terms."""

    priority: int
    timeout_s: float | None
    cache_salt: str


class ChatOptions(TypedDict, total=False):
    """What a chat template may be given besides the messages; see Chat.render."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    template: str | None
    variables: Mapping[str, Any] | None


class TalkOptions(ChatOptions, TermOptions, total=False):
    """What a conversation may be answered with: ChatOptions and TermOptions."""


class ScoreOptions(TermOptions, total=False):
    """What scoring prompts may be given; see LLM.score."""

    start: int | Sequence[int]
    progress: Progress | None


def is_one_prompt(prompts: object) -> bool:
    """A string or a list of token ids is one prompt, a list of these is many. Raises InvalidParams for all else."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray) and prompts.ndim:
        return prompts.ndim == 1
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        _refuse_prompts(f"a prompt must be a string or a list of token ids, not {type(prompts).__name__}")
    if not prompts:
        _refuse_prompts("there is no prompt: the list is empty")
    kinds = {_prompt_kind(kind) for kind in set(map(type, prompts))}
    if len(kinds) > 1 or "nothing" in kinds:
        _refuse_prompts("a list must hold token ids only, or prompts only")
    return kinds == {"id"}


def scoring_params(start: int | Sequence[int], count: int) -> list[SamplingParams]:
    """To score so many prompts, from one position on or each from its own. Raises InvalidParams."""
    starts = start if isinstance(start, Sequence) else [start] * count
    if len(starts) != count:
        raise InvalidParams(f"{len(starts)} starts for {count} prompts: give one for each, or one for all")
    return [SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=each) for each in starts]


def _prompt_kind(kind: type) -> str:
    if issubclass(kind, int | np.integer) and kind is not bool:
        return "id"
    return "prompt" if issubclass(kind, str | np.ndarray | list | tuple) else "nothing"


def _refuse_prompts(why: str) -> NoReturn:
    raise InvalidParams(f'{why}: give "text", [token ids], or a list of either')

"""What gives way of a prompt that is too long; see SamplingParams.overflow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import checked_prompt
from bitnet_inference.engine.window import fit_prompt, room_for_answer
from bitnet_inference.errors import InvalidParams, PromptTooLong
from bitnet_inference.text.messages import Message

_SYSTEM_ROLES = ("system", "developer")


class Talk(NamedTuple):
    """A conversation, its token ids, and what gives those of a shorter one."""

    messages: Sequence[Message]
    token_ids: list[int]
    encode: Callable[[Sequence[Message]], list[int]]


class Fitted(NamedTuple):
    """The token ids of a prompt, and how many were taken out of it."""

    token_ids: NDArray[np.int32]
    num_dropped: int


def fit(
    prompt: Sequence[int] | Talk | Fitted, params: SamplingParams, max_context: int, bos_ids: frozenset[int]
) -> Fitted:
    """The prompt as `params.overflow` says. What it leaves too long is for the engine to refuse.

    One that is fitted already stays as it is.
    Raises InvalidParams for what is no list of token ids, and for "keep_system" where there are no messages,
    PromptTooLong where the messages that are kept are too long.
    """
    if isinstance(prompt, Fitted):
        return prompt
    given = checked_prompt(prompt.token_ids if isinstance(prompt, Talk) else prompt)
    if params.overflow != "keep_system":
        kept = fit_prompt(given, params, max_context, bos_ids)
    elif isinstance(prompt, Talk):
        kept = checked_prompt(_without_oldest_turns(prompt, params, max_context))
    else:
        cure = 'use chat or stream_chat, or "truncate_left" for a plain prompt'
        raise InvalidParams(f'overflow is "keep_system", which keeps messages of a conversation: {cure}')
    return Fitted(kept, len(given) - len(kept))


def _without_oldest_turns(talk: Talk, params: SamplingParams, max_context: int) -> list[int]:
    """The token ids of as many turns as leave room for the answer, and the last one in any case."""
    limit = max_context - room_for_answer(params, max_context)
    if len(talk.token_ids) <= limit:
        return talk.token_ids
    system, turns = _turns(talk.messages)

    def encode(num_dropped: int) -> list[int]:
        return talk.encode([*system, *chain.from_iterable(turns[num_dropped:])])

    fewest = bisect_left(range(1, len(turns)), True, key=lambda count: len(encode(count)) <= limit) + 1
    token_ids = encode(max(0, min(fewest, len(turns) - 1)))
    most = max_context - min(1, room_for_answer(params, max_context))
    if len(token_ids) > most:
        raise PromptTooLong(len(token_ids), most, "system and last message have", "shorten one of them")
    return token_ids


def _turns(messages: Sequence[Message]) -> tuple[Sequence[Message], list[list[Message]]]:
    """What a conversation begins with, and its turns: a user's message and what follows up to the next one."""
    num_system = next((at for at, each in enumerate(messages) if each["role"] not in _SYSTEM_ROLES), len(messages))
    turns: list[list[Message]] = []
    for message in messages[num_system:]:
        if message["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return messages[:num_system], turns

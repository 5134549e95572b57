"""What is kept of a text that is longer than the context: the end, and the first few tokens.

Models give much of their attention to the first tokens of a text, whatever these say, and break down without them
(Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams

NUM_SINKS = 4  # first tokens that a sliding text keeps
MIN_CONTEXT = 4 * NUM_SINKS  # in which it can slide
MAX_ROOM = 4  # an answer gets at most one part in so many of the context before a prompt must give way


class Past(NamedTuple):
    """Tokens of a request that have left its window, and how often it has slid."""

    num_prompt: int = 0
    num_output: int = 0
    num_slides: int = 0

    def further(self, num_prompt: int, num_output: int) -> Past:
        """After one more slide, with which so many have left."""
        return Past(self.num_prompt + num_prompt, self.num_output + num_output, self.num_slides + 1)


def room_for_answer(params: SamplingParams, max_context: int) -> int:
    """How many tokens a prompt leaves free before something of it is dropped: max_tokens, at most a quarter."""
    quarter = max(1, max_context // MAX_ROOM)
    return quarter if params.max_tokens is None else min(params.max_tokens, quarter)


def fit_prompt(
    prompt: NDArray[np.int32], params: SamplingParams, max_context: int, bos_ids: frozenset[int]
) -> NDArray[np.int32]:
    """The prompt, without its oldest tokens where it leaves too little room and `params.overflow` says so.

    Kept in front are a BOS, or the sinks of a text that will slide.
    """
    limit = max(1, max_context - room_for_answer(params, max_context))
    if params.overflow not in ("truncate_left", "sliding") or len(prompt) <= limit:
        return prompt
    num_front = min(NUM_SINKS, limit) if params.overflow == "sliding" else int(prompt[0] in bos_ids)
    return np.concatenate([prompt[:num_front], prompt[len(prompt) - (limit - num_front) :]])


def check_window(params: SamplingParams, max_context: int) -> None:
    """Raises InvalidParams for a text that shall slide where there is no room for it."""
    if params.overflow == "sliding" and max_context < MIN_CONTEXT:
        cure = 'raise max_cache_tokens, or choose overflow="truncate_left"'
        raise InvalidParams(f"a sliding text needs a context of {MIN_CONTEXT} tokens, here are {max_context}: {cure}")

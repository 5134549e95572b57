"""Log-probabilities of tokens: what they look like, and those of a prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.prompt_reader import PromptReader, broken
from bitnet_inference.native import RowSampler


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities by the model itself, before bias, penalties and temperature.

    `logprob` is the chosen token's; `top` holds (token id, log-probability) of the best tokens, best first, lowest id
    first among equals. Tokens of logit -infinity are not among the best.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class PromptScores:
    """Scores the tokens of a prompt from position `start` on, each after all before it.

    `found` has one entry a token, as they are computed: None for the prompt's first one, which nothing comes before.
    """

    def __init__(self, prompt: NDArray[np.int32], num_top: int, start: int) -> None:
        self.found: list[TokenLogprobs | None] = [] if start else [None]
        self._prompt, self._num_top = prompt, num_top
        self._sampler: RowSampler | None = None  # made when it is needed: it has room for a whole vocabulary
        self.reader = PromptReader(self._read, range(max(start - 1, 0), len(prompt) - 1))

    def _read(self, first: int, logits: NDArray[np.float32]) -> None:
        self._sampler = self._sampler or RowSampler(logits.shape[1])
        for position, row in enumerate(logits, first + 1):
            logprob, top = self._sampler.score(row, int(self._prompt[position]), self._num_top)
            if math.isnan(logprob):
                raise broken(f"logits hold NaN or infinity at position {position}")
            self.found.append(TokenLogprobs(logprob, tuple(top)))

"""Beam search, apart from models and requests: which beginnings of a text go on, and which texts are the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property
from heapq import nsmallest
from numbers import Integral, Real
from typing import Literal, NamedTuple, Protocol

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams

MAX_BEAMS, MAX_LENGTH_PENALTY = 128, 10.0


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How to search for the likeliest texts, as Transformers' generate does. Raises InvalidParams for the impossible.

    `num_beams`: so many beginnings go on at a time, 2 to 128 (with one, `generate` at temperature 0 is the same).
    `num_choices`: so many texts are returned, the best first; at most `num_beams`.
    `length_penalty`: a text's score is the sum of its tokens' log-probabilities, its end token's too, divided by their
    number to this power: above 0 favours long texts, below 0 short ones; -10 to 10.
    `early_stopping`: True ends the search when `num_beams` texts are complete; False when the best beginning, scored at
    its present length, is no better than the worst of them; "never" when it could not become so at any length.
    `max_tokens`, `min_tokens`, `stop`, `stop_token_ids`, `ignore_eos`: see SamplingParams.
    `repetition_penalty`: the log-probabilities of tokens in prompt or output are multiplied by it (in a search, unlike
    in sampling, Transformers applies it to them, not to logits); 1 is off.
    """

    num_beams: int
    num_choices: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_beams", _whole("num_beams", self.num_beams, 2, MAX_BEAMS))
        object.__setattr__(self, "num_choices", _whole("num_choices", self.num_choices, 1, self.num_beams))
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, Real) or not abs(penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidParams(f"length_penalty is {penalty!r}: give a number from -10 to 10")
        object.__setattr__(self, "length_penalty", float(penalty))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidParams(f'early_stopping is {self.early_stopping!r}: give False, True or "never"')
        object.__setattr__(self, "stop", self.sampling.stop)
        if self.sampling.max_tokens == 0:
            raise InvalidParams("max_tokens is 0: a search needs 1 at least")

    @cached_property
    def sampling(self) -> SamplingParams:
        """What of it concerns a single beginning."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
        )


class Reading(Protocol):
    """Looks for stop strings in what a beginning says."""

    @property
    def stopped(self) -> str | None:
        """The stop string that is complete; None while none is."""
        ...

    def after(self, token_id: int) -> Reading:
        """That of the beginning with one more token; this one stays what it is."""
        ...


class Branch(NamedTuple):
    """A beginning that goes on: the number of the one that it extends, its new token, the sum of its logprobs."""

    parent: int
    token_id: int
    total: float


class Hypothesis(NamedTuple):
    """A complete text: its tokens without the end token, its score, and the end token, if one ended it.

    `has_ended` is False where room ended it, and no end token or stop string.
    """

    token_ids: list[int]
    score: float
    end_id: int | None
    has_ended: bool


class BeamSearch:
    """Takes the best next tokens of every beginning, and says which go on.

    It is Transformers' rule: of all continuations the best few are ranked, so many that beginnings are left where all
    others end. Those among the first `num_beams` that end are complete, and the best `num_beams` of all that are
    complete are kept. The best that do not end go on. Equal ones: the better beginning first, then the lowest id.
    """

    def __init__(
        self, params: BeamParams, end_ids: frozenset[int], max_length: int, reading: Reading | None = None
    ) -> None:
        """Texts have at most `max_length` tokens. `reading` is that of no token yet; None where nothing is looked for.

        A token that completes a stop string ends a text like an end token, and is part of it.
        """
        self.num_candidates = max(2, 1 + len(end_ids)) * params.num_beams
        self.complete: list[Hypothesis] = []  # the best first
        self._params, self._end_ids, self._max_length = params, end_ids, max_length
        self._totals, self._readings = [0.0], [reading]
        self._length = 0

    def advance(
        self, candidates: Sequence[Sequence[tuple[int, float]]], text_of: Callable[[int], list[int]]
    ) -> list[Branch]:
        """What goes on, the best first; nothing when the search is over.

        `candidates`: of each beginning, in their order, `num_candidates` next tokens and log-probabilities.
        `text_of` tells the tokens of a beginning.
        """
        self._length += 1
        every = (
            Branch(parent, token_id, total + logprob)
            for parent, (total, few) in enumerate(zip(self._totals, candidates, strict=True))
            for token_id, logprob in few
        )
        best = nsmallest(self.num_candidates, every, key=lambda branch: (-branch.total, branch.parent, branch.token_id))
        num_beams, is_last = self._params.num_beams, self._length >= self._max_length
        readings = [self._reading_of(branch) for branch in best]
        ending = [
            branch.token_id in self._end_ids or (reading is not None and reading.stopped is not None)
            for branch, reading in zip(best, readings, strict=True)
        ]
        for branch, has_ended in zip(best[:num_beams], ending, strict=False):
            if is_last or has_ended:
                self._keep(branch, text_of(branch.parent), has_ended)
        going_on = [at for at, has_ended in enumerate(ending) if not has_ended][:num_beams]
        self._totals, self._readings = [best[at].total for at in going_on], [readings[at] for at in going_on]
        return [] if is_last or not going_on or self._is_decided() else [best[at] for at in going_on]

    def _reading_of(self, branch: Branch) -> Reading | None:
        reading = self._readings[branch.parent]
        return None if reading is None or branch.token_id in self._end_ids else reading.after(branch.token_id)

    def _keep(self, branch: Branch, text: list[int], has_ended: bool) -> None:
        is_end = branch.token_id in self._end_ids
        tokens = text if is_end else [*text, branch.token_id]
        score = branch.total / self._weight(self._length)
        self.complete.append(Hypothesis(tokens, score, branch.token_id if is_end else None, has_ended))
        self.complete.sort(key=lambda hypothesis: -hypothesis.score)
        del self.complete[self._params.num_beams :]

    def _is_decided(self) -> bool:
        """Whether no beginning is expected to become better than what is complete."""
        params = self._params
        if len(self.complete) < params.num_beams:
            return False
        goes_far = params.early_stopping == "never" and params.length_penalty > 0
        hoped_for = self._totals[0] / self._weight(self._max_length if goes_far else self._length)
        return params.early_stopping is True or hoped_for <= self.complete[-1].score

    def _weight(self, length: int) -> float:
        """length ** length_penalty, in decimal arithmetic so that every machine gets the same bits."""
        with localcontext() as context:
            context.prec = 25
            return float(Decimal(length) ** Decimal(self._params.length_penalty))


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise InvalidParams(f"{name} is {value!r}: give a whole number from {low} to {high}")
    return int(value)  # NumPy's small ones overflow where candidates are counted

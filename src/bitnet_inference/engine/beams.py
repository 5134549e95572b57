"""The requests of a beam search: they run like all others, and branch when each has its candidates."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.beam import BeamParams, BeamSearch, Branch, Hypothesis, Reading
from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.request import Finish, Request, Sink, Usage
from bitnet_inference.engine.sampler import broken_row
from bitnet_inference.engine.scheduler import Scheduler
from bitnet_inference.engine.steering import no_token_left
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import EngineError, InvalidParams
from bitnet_inference.native import RowSampler


class Beams:
    """One search, which is submitted, cancelled and timed by its `head`.

    A beam is a Request. The head computes the prompt; the others join it with their first token, right behind it in
    rank. A beam that has its candidates is parked until all have theirs. Then one that is extended stays what it is
    with its best continuation; its others are given to requests whose texts ended, which wait to be admitted and take
    from it what it has computed. It is the sink of all its requests; its owners, one a text, hear of its end alone.
    """

    def __init__(
        self,
        prompt: Sequence[int] | NDArray[np.integer],
        params: BeamParams,
        owners: Sequence[Sink],
        *,
        eos_ids: Iterable[int] = (),
        terms: Terms | None = None,
        reading: Reading | None = None,
    ) -> None:
        """`owners[i]` gets the tokens of the i-th best text and its Finish. Raises InvalidParams for a bad prompt.

        `reading` looks for params.stop, in what is generated.
        """
        assert len(owners) == params.num_choices, "a text an owner"
        assert reading is not None or not params.stop, "stop strings that nobody looks for"
        self._params, self._owners, self._reading = params, owners, reading
        self.head = Request(prompt, params.sampling, self, eos_ids=eos_ids, terms=terms)
        self.head.search, self.head.is_searching = self.head, True
        self.requests = [self.head]
        self.best: list[Hypothesis] = []  # once it is over; the owners' texts
        self.is_over = False
        self._beams = [self.head]  # those that go on, the best first
        self._candidates: dict[Request, list[tuple[int, float]]] = {}

    def prepare(self, vocab_size: int, max_context: int) -> None:
        """Begin; texts end at `max_context`. Raises InvalidParams for more candidates than the vocabulary has."""
        room = max_context - self.head.num_prompt
        max_length = min(room, room if self._params.max_tokens is None else self._params.max_tokens)
        self._search = BeamSearch(self._params, self.head.end_ids, max_length, self._reading)
        if self._search.num_candidates > vocab_size:
            cure = "lower num_beams" + (" or give fewer stop_token_ids" if self._params.stop_token_ids else "")
            needed = f"{self._params.num_beams} beams need {self._search.num_candidates} candidates a step"
            raise InvalidParams(f"{needed}, the vocabulary has {vocab_size} tokens: {cure}")

    def take(self, request: Request, logits: NDArray[np.float32], rows: RowSampler) -> None:
        """Note the candidates of a beam, whose last token has this row. Raises EngineError for a broken row."""
        self._candidates[request] = _candidates(request, logits, rows, self._search.num_candidates)
        request.is_parked = True

    @property
    def is_complete(self) -> bool:
        """Whether all beams have their candidates."""
        return len(self._candidates) == len(self._beams)

    def branch(self, scheduler: Scheduler) -> Finish | None:
        """Let the best continuations go on; or the end of the head, where the search is over.

        Raises InvalidParams where no token is left.
        """
        beams, num_prompt = self._beams, self.head.num_prompt
        candidates = [self._candidates.pop(beam) for beam in beams]
        branches = self._search.advance(candidates, lambda at: beams[at].tokens.view[num_prompt:].tolist())
        if not branches:
            self.best = self._search.complete[: len(self._owners)]
            if not self.best:
                raise no_token_left(self.head)
            return _finish_of(self.best[0])
        if len(self.requests) == 1:
            self._join(scheduler)
        self._beams = self._extend(branches, scheduler)
        return None

    @property
    def is_full(self) -> bool:
        """See Sink; a search does not wait for readers, who get nothing before its end."""
        return False

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """See Sink; never called, because a beam delivers nothing."""
        raise AssertionError("a beam has no reader")

    def finish(self, finish: Finish, usage: Usage) -> None:
        """See Sink: a request of the search has ended. With the first, the search is over."""
        if self.is_over:
            return
        self.is_over, usage = True, self.head.usage()
        texts: list[Hypothesis | None] = [*self.best, *[None] * (len(self._owners) - len(self.best))]
        for owner, text in zip(self._owners, texts, strict=True):
            if text is not None:
                num_output = len(text.token_ids)
                num_context = self.head.num_prompt + num_output
                _deliver(owner, text, replace(usage, num_output_tokens=num_output, num_context_tokens=num_context))
            elif self.best:
                few = f"only {len(self.best)} texts were found"
                _end(owner, Finish("error", error=EngineError(f"{few}: lower num_choices")), usage)
            else:
                _end(owner, finish, usage)

    def _join(self, scheduler: Scheduler) -> None:
        head = self.head
        for number in range(1, self._params.num_beams):
            request = Request(head.prompt, head.params, self, terms=head.terms)
            request.end_ids, request.search, request.is_parked = head.end_ids, head, True
            request.rank = (*head.rank, number)
            scheduler.join(request)
            self.requests.append(request)

    def _extend(self, branches: Sequence[Branch], scheduler: Scheduler) -> list[Request]:
        parents = [self._beams[branch.parent] for branch in branches]
        num_shared = len(parents[0].tokens)
        spare = [request for request in self.requests if request not in parents]
        for request in spare:
            scheduler.send_back(request)
        going_on: list[Request] = []
        for parent, branch in zip(parents, branches, strict=True):
            request = parent if parent not in going_on else spare.pop(0)
            request.follow(parent, num_shared, branch.token_id)
            going_on.append(request)
        return going_on


def _candidates(request: Request, logits: NDArray[np.float32], rows: RowSampler, count: int) -> list[tuple[int, float]]:
    """The best next tokens and their log-probabilities after penalty and bans, which may write into the logits."""
    best: list[tuple[int, float]] = rows.score(logits, 0, count)[1]
    if not best:
        raise broken_row(request)
    penalty = request.params.repetition_penalty
    if penalty == 1.0 and not request.bans_ends:
        return best
    normalizer = np.float32(float(logits[best[0][0]]) - best[0][1])
    seen = np.unique(request.tokens.view)
    logits[seen] = normalizer + (logits[seen] - normalizer) * np.float32(penalty)
    if request.bans_ends:
        logits[sorted(request.end_ids)] = -np.inf
    _, ranked = rows.score(logits, 0, count)
    return [(token_id, float(logits[token_id] - normalizer)) for token_id, _ in ranked]


def _finish_of(text: Hypothesis) -> Finish:
    return Finish("stop" if text.has_ended else "length", token_id=text.end_id)


def _deliver(owner: Sink, text: Hypothesis, usage: Usage) -> None:
    try:
        for token_id in text.token_ids:
            owner.token(token_id, None)
    except Exception as error:
        _end(owner, Finish("error", error=error), usage)
    else:
        _end(owner, _finish_of(text), usage)


def _end(owner: Sink, finish: Finish, usage: Usage) -> None:
    try:
        owner.finish(finish, usage)
    except Exception:  # nobody is left to tell
        logging.getLogger(__name__).exception("the sink of a finished request raised")

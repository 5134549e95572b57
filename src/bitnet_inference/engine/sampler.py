"""Chooses the next token of each request from a step's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.prompt_reader import broken
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.steering import chosen, no_token_left, processed
from bitnet_inference.errors import EngineError
from bitnet_inference.model.contract import Capabilities, Output
from bitnet_inference.native import UNDECIDED, RowSampler, SamplingRule

MAX_LOGITS_BYTES = 32 << 20  # whole-vocabulary logits that are asked for at once
_NO_LOGITS = np.zeros((0, 0), np.float32)


class Pick(NamedTuple):
    """What was chosen for a request: a token, or the error that ends it."""

    request: Request
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: Exception | None = None


class Rows(NamedTuple):
    """A request's rows of an output: from that of its last known token on, one for each token of its draft behind."""

    request: Request
    first: int
    draft: Sequence[int] = ()


class Scores(NamedTuple):
    """What a request's next tokens are chosen from: rows from `row` on, with those of others before and behind them.

    A row is the whole vocabulary, or the best few tokens and their `ids`, or the one of `tokens` that the model told.
    The `first` token is chosen already, but not for a beam, whose search does that.
    """

    request: Request
    draft: Sequence[int]
    first: Pick | None
    row: int
    logits: NDArray[np.float32]
    ids: NDArray[np.int32] | None = None
    tokens: Sequence[int] = ()


class Sampler:
    """Requests that need the best few tokens alone ask the model for those, or for a draw; all others for all logits.

    A token depends on the logits, the request's own tokens and noise keyed by (seed, choice, position of the token),
    and on nothing else: not on neighbours, chunks or preemption.
    """

    def __init__(self, vocab_size: int, limits: Capabilities) -> None:
        """Obeys the `quick_top`, `samples` and `threads` of a model."""
        self.vocab_size, self._limits = vocab_size, limits
        self.rows = RowSampler(vocab_size)

    def prepare(self, request: Request) -> None:
        """Translate the request's parameters once; raises InvalidParams for what the vocabulary does not have."""
        params = request.params
        params.check(self.vocab_size)
        request.end_ids = frozenset(each for each in request.end_ids if 0 <= each < self.vocab_size)
        bias = params.logit_bias or {}
        request.rule = SamplingRule(
            self.vocab_size,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bias_ids=list(bias.keys()),
            bias_values=list(bias.values()),
            end_ids=sorted(request.end_ids),
        )
        if params.logprobs is not None or params.is_steered or request.search is not None:
            return
        request.model_samples = self._limits.samples
        if not params.edits_logits and request.constraint is None:
            is_quick = params.top_k <= min(self._limits.quick_top, self.vocab_size) and not request.model_samples
            request.num_best = 1 if params.is_greedy else params.top_k if is_quick else 0

    def scores(self, output: Output, wanted: Sequence[Rows]) -> Iterator[list[Scores]]:
        """What the next tokens of each request are chosen from: all that the output is asked for in a step.

        Comes in several parts where the whole vocabulary is asked for, for many.
        """
        quick = [rows for rows in wanted if _is_quick(*rows)]
        told: list[Scores] = []
        if quick:
            only_few = all(rows.request.num_best and not rows.request.bans_ends for rows in quick)
            told = self._few_scores(output, quick) if only_few else self._sampled_scores(output, quick)
        if told:
            yield told
        if len(told) == len(wanted):
            return
        have = {scores.request for scores in told}
        others = [rows for rows in wanted if rows.request not in have]
        step = max(1, MAX_LOGITS_BYTES // (4 * self.vocab_size))
        for group in _groups(others, step):
            yield self._whole_scores(output, group)

    def pick(self, scores: Scores, index: int) -> Pick:
        """The next token of the request, whose last known token has that of its rows."""
        row = scores.row + index
        if scores.tokens:
            return _picked(scores.request, scores.tokens[row])
        if scores.ids is None:
            return self._pick_and_score(scores.request, scores.logits, row)
        return self._pick_of_few(scores.request, scores.ids[row], scores.logits[row])

    def _few_scores(self, output: Output, wanted: Sequence[Rows]) -> list[Scores]:
        count = max([rows.request.num_best for rows in wanted])
        ids, logits = output.top(_all_rows(wanted), count)
        scores, row = [], 0
        for request, _, draft in wanted:
            if request.num_best == 1:
                pick = Pick(request, ids.item(row, 0)) if isfinite(logits.item(row, 0)) else _broken(request)
            else:
                pick = self._pick_of_few(request, ids[row], logits[row])
            scores.append(Scores(request, draft, pick, row, logits, ids))
            row += 1 + len(draft)
        return scores

    def _sampled_scores(self, output: Output, wanted: Sequence[Rows]) -> list[Scores]:
        """Of the requests whose tokens the model can tell in one pass over its head, which are most of these."""
        draws = []
        for request, _, draft in wanted:
            assert request.rule is not None, "a request that nobody has prepared"
            *told, position = _given(request)
            for index in range(1 + len(draft)):
                draws.append((request.rule, *told, position + index, request.mask))
        tokens = output.sample(_all_rows(wanted), draws)
        scores, row = [], 0
        for request, _, draft in wanted:
            if UNDECIDED not in tokens[row : row + 1 + len(draft)]:
                scores.append(Scores(request, draft, _picked(request, tokens[row]), row, _NO_LOGITS, tokens=tokens))
            row += 1 + len(draft)
        return scores

    def _pick_of_few(self, request: Request, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> Pick:
        few = slice(request.num_best)
        key = (request.seed, request.choice, request.position)
        token_id = self.rows.sample_few(ids[few], logits[few], request.rule, *key)
        return Pick(request, token_id) if token_id >= 0 else _broken(request)

    def _whole_scores(self, output: Output, wanted: Sequence[Rows]) -> list[Scores]:
        logits = output.full(_all_rows(wanted))
        rows = list(accumulate([1 + len(each.draft) for each in wanted], initial=0))
        drawn = self._sample_together(wanted, rows, logits)
        scores = []
        for (request, _, draft), row in zip(wanted, rows, strict=False):
            pick = None if request.search is not None else self._pick_and_score(request, logits, row, drawn.get(row))
            scores.append(Scores(request, draft, pick, row, logits))
        return scores

    def _sample_together(
        self, wanted: Sequence[Rows], rows: Sequence[int], logits: NDArray[np.float32]
    ) -> dict[int, int]:
        """The tokens of rows that nothing but their rule edits, chosen on all threads: what one alone would choose."""
        executor = None if self._limits.threads is None else self._limits.threads()
        draws = [
            (row, request.rule, *_given(request))
            for (request, _, _), row in zip(wanted, rows, strict=False)
            if request.search is None and request.constraint is None and not request.params.is_steered
        ]
        if executor is None or len(draws) < 2:
            return {}
        return dict(zip([row for row, *_ in draws], self.rows.sample_rows(executor, logits, draws), strict=True))

    def _pick_and_score(
        self, request: Request, logits: NDArray[np.float32], row: int, drawn: int | None = None
    ) -> Pick:
        """`drawn`: the token, where it is chosen already."""
        if drawn is not None:
            pick = _picked(request, drawn)
        else:
            pick = (self._pick_steered if request.params.is_steered else self._pick_sampled)(request, logits[row])
        num_shown = request.params.logprobs
        if pick.error is not None or num_shown is None:
            return pick
        logprob, best = self.rows.score(logits[row], pick.token_id, num_shown)
        return pick._replace(logprobs=TokenLogprobs(logprob, tuple(best)))

    def _pick_steered(self, request: Request, logits: NDArray[np.float32]) -> Pick:
        """What processors and a strategy make of the row, which stays as it is."""
        _, best = self.rows.score(logits, 0, 1)
        if not best:
            return _broken(request)
        try:
            row = processed(request, logits)
            if request.params.strategy is None:
                return self._pick_sampled(request, row)
            return Pick(request, chosen(request, row))
        except Exception as error:
            return Pick(request, -1, error=error)
        except BaseException as error:  # SystemExit, for instance, would end the engine for all
            why = f"a processor or the strategy raised {_shown(error)}"
            return Pick(request, -1, error=EngineError(f"{why}: have it raise an Exception"))

    def _pick_sampled(self, request: Request, logits: NDArray[np.float32]) -> Pick:
        assert request.constraint is None or request.mask is not None, "a constrained token without its mask"
        return _picked(request, self.rows.sample(logits, request.rule, *_given(request), request.mask))


def _shown(error: BaseException) -> str:
    try:
        return f"{error!r:.60}"
    except Exception:  # its own, too
        return type(error).__name__


def _is_quick(request: Request, _: int, draft: Sequence[int]) -> bool:
    """Whether its next tokens are told by a few logits: what edits them is known for the first alone."""
    if request.num_best and not request.bans_ends:
        return True
    return request.model_samples and (
        not draft or not (request.params.edits_logits or request.constraint or request.bans_ends)
    )


def _given(request: Request) -> tuple[NDArray[np.int32], int, bool, int, int, int]:
    """What a choice depends on beside the logits, the rule and the mask, as `RowSampler.sample` takes it."""
    tokens = request.tokens.view
    return tokens, request.num_prompt, request.bans_ends, request.seed, request.choice, request.position


def _picked(request: Request, token_id: int) -> Pick:
    """What the native sampler says."""
    if token_id >= 0:
        return Pick(request, token_id)
    return _broken(request) if token_id == -1 else Pick(request, -1, error=no_token_left(request))


def _all_rows(wanted: Sequence[Rows]) -> list[int]:
    return [row for _, first, draft in wanted for row in range(first, first + 1 + len(draft))]


def _groups(wanted: Sequence[Rows], max_rows: int) -> Iterator[list[Rows]]:
    """In order, as many at a time as have so many rows together, or a single one that has more."""
    group: list[Rows] = []
    num_rows = 0
    for rows in wanted:
        num_rows += 1 + len(rows.draft)
        if group and num_rows > max_rows:
            yield group
            group, num_rows = [], 1 + len(rows.draft)
        group.append(rows)
    if group:
        yield group


def broken_row(request: Request) -> EngineError:
    """What is said of a row of logits that no token can be chosen from."""
    return broken(f"logits hold NaN or infinity at position {request.position}")


def _broken(request: Request) -> Pick:
    return Pick(request, -1, error=broken_row(request))

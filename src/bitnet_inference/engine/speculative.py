"""Lossless speculation: guesses of a request's next tokens are checked in the same step, and kept if they are right.

The model computes the drafted tokens behind the known ones. Each token is chosen as ever, from the logits and noise
keyed by its position; as long as it equals the drafted one, the next is chosen from the next row (Engine._go_on). So a
draft changes when a token comes and never which. (After Leviathan et al. 2023, with the target's own sample in place of
their test.)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from time import perf_counter
from typing import NamedTuple, Protocol

from bitnet_inference.engine.request import Request
from bitnet_inference.engine.scheduler import Scheduler
from bitnet_inference.engine.share import Share

LENGTHS = (1, 2, 3, 5, 7, 11, 15)  # of drafts: with the known token up to whole tiles of the matrix kernels
PROBE_EVERY = 32  # steps without a draft, until a drafter that costs something may try again
MIN_GAIN = 1.03  # a draft must make a step this much more worth its time
MIN_RATE = 0.1  # below, times that were measured wrong could make any draft look good
MEASURE_EVERY = 64  # drafts in a row, until a step without one shows again what that takes
# A step that takes less is left alone, and where it has more requests, one that takes less for each: what is computed
# here would take a good part of it.
MIN_STEP_S, MIN_STEP_REQUESTS = 0.002, 4
_PRIOR, _WEIGHT, _MEMORY = 0.5, 2.0, 24.0


class Draft(NamedTuple):
    """A guess of a request's next tokens. Drafts of one kind are about equally often right."""

    token_ids: Sequence[int]
    kind: int = 0


_NO_DRAFT = Draft(())


class Drafter(Protocol):
    """Who guesses. Called in the engine's thread; no text depends on what it says."""

    costs_time: bool  # in proportion to the tokens; where not, it is asked in every step, for the sake of its rate

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> Sequence[Draft]:
        """For each request at most so many tokens that may follow those that it has; none where it knows nothing."""
        ...

    def forget(self, request: Request) -> None:
        """The request has ended, or has other tokens than before."""
        ...


@dataclass
class Rate:
    """How often a drafted token is right, if those before it are; old experience counts less and less."""

    num_right: float = _PRIOR * _WEIGHT
    num: float = _WEIGHT

    @property
    def value(self) -> float:
        """Between 0 and 1."""
        return self.num_right / self.num

    def note(self, is_right: bool) -> None:
        """Learn from a token."""
        faded = min(1.0, _MEMORY / self.num)
        self.num_right, self.num = self.num_right * faded + is_right, self.num * faded + 1

    def expected(self, length: int) -> float:
        """How many tokens a step with a draft of this length is likely to yield."""
        return 1 + sum(accumulate(repeat(self.value, length), lambda so_far, rate: so_far * rate))


@dataclass
class _Record:
    """What is known about the drafts for a request; it begins with what is `usual`."""

    usual: dict[int, Rate]
    rates: dict[int, Rate] = field(default_factory=dict)
    draft: Draft = _NO_DRAFT
    num_known: int = 0  # tokens when that was made

    def rate(self) -> Rate:
        """Of drafts like the last one."""
        kind = self.draft.kind
        if kind not in self.rates:
            self.rates[kind] = Rate(self.usual.setdefault(kind, Rate()).value * _WEIGHT)
        return self.rates[kind]

    def learn(self, request: Request) -> None:
        """Compare the last draft with what came; where the model never saw it, its first token still counts."""
        came = request.tokens.view[self.num_known :].tolist()
        for guess, token_id in zip(self.draft.token_ids, came, strict=False):
            self.rate().note(guess == token_id)
            self.usual[self.draft.kind].note(guess == token_id)
            if guess != token_id:
                break
        self.draft = self.draft._replace(token_ids=())


class Speculation:
    """Adds drafts to the steps in which they are likely to pay: measured time against measured rates of success.

    Steps with tokens of prompts get none, because those use the time better; nor do those for which prompts wait, as
    they show what decoding takes, and steps that are over soon.
    """

    def __init__(self, drafter: Drafter, scheduler: Scheduler) -> None:
        self._drafter, self._scheduler = drafter, scheduler
        self._records: dict[Request, _Record] = {}
        self._usual: dict[int, Rate] = {}
        self._draft_token_s = 0.0
        self._num_idle = 0  # steps without a draft, and with
        self._num_busy = 0
        self._is_off = False

    def add(self, shares: list[Share]) -> list[Share]:
        """The same shares, with drafts where they pay."""
        least_s = MIN_STEP_S * max(1.0, len(shares) / MIN_STEP_REQUESTS)
        if self._is_off or self._scheduler.is_measuring or self._scheduler.aside.share:
            return shares
        if self._scheduler.pace.step_s(len(shares)) < least_s:
            return shares
        requests = [share.request for share in shares if share.num_tokens == share.request.num_pending == 1]
        if len(requests) < len(shares):
            return shares
        for request in requests:
            self._records.setdefault(request, _Record(self._usual)).learn(request)
        drafts = self._ask(self._affordable(requests))
        parts = [(self._records[request].rate(), len(draft)) for request, draft in drafts.items()]
        length = self._best_length(parts, len(shares)) if self._num_busy < MEASURE_EVERY else 0
        self._num_busy = self._num_busy + 1 if length else 0
        return [self._with_draft(share, drafts.get(share.request, ())[:length]) for share in shares]

    def forget(self, request: Request) -> None:
        """The request has ended, or has other tokens than before."""
        if self._records.pop(request, None):
            self._drafter.forget(request)

    def _affordable(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """What to ask for: all that may come if that costs nothing, else what is likely to pay, or a little to see."""
        wanted = [(request, count) for request in requests if (count := self._most(request)) > 0]
        if not self._drafter.costs_time:
            return wanted
        self._num_idle += 1
        length = self._best_length([(self._records[request].rate(), count) for request, count in wanted], len(requests))
        if not length and self._num_idle > PROBE_EVERY:
            length = 1
        return [(request, min(count, length)) for request, count in wanted if length]

    def _ask(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, Sequence[int]]:
        if not wanted:
            return {}
        start = perf_counter()
        try:
            drafts = self._drafter.draft(wanted)
        except Exception:  # nobody needs a draft
            logging.getLogger(__name__).exception("the drafter failed: going on without drafts")
            self._is_off = True
            return {}
        if self._drafter.costs_time:
            token_s = (perf_counter() - start) / max(count for _, count in wanted)
            self._draft_token_s += 0.2 * (token_s - self._draft_token_s)
            self._num_idle = 0
        for (request, count), draft in zip(wanted, drafts, strict=True):
            record = self._records[request]
            record.draft, record.num_known = Draft(draft.token_ids[:count], draft.kind), len(request.tokens)
        return {request: token_ids for request, _ in wanted if (token_ids := self._records[request].draft.token_ids)}

    def _most(self, request: Request) -> int:
        """The longest draft that can be kept whole: behind it the request gets one token more."""
        if request.search is not None:
            return 0
        room = request.max_context - len(request.tokens)
        if request.params.max_tokens is not None:
            room = min(room, request.params.max_tokens - request.num_output)
        return min(LENGTHS[-1], room - 1)

    def _best_length(self, parts: Sequence[tuple[Rate, int]], num_shares: int) -> int:
        """To which drafts of these rates and lengths are cut for the most tokens a second; 0 for none."""
        pace = self._scheduler.pace
        plain_s = pace.step_s(num_shares)
        best, best_speed = 0, MIN_GAIN * num_shares / plain_s
        for length in LENGTHS if any(rate.value >= MIN_RATE for rate, _ in parts) else ():
            num_tokens = num_shares + sum(min(length, most) for _, most in parts)
            if num_tokens > self._scheduler.max_tokens:
                break
            num_likely = num_shares + sum(rate.expected(min(length, most)) - 1 for rate, most in parts)
            speed = num_likely / (max(plain_s, pace.step_s(num_tokens)) + length * self._draft_token_s)
            if speed > best_speed:
                best, best_speed = length, speed
        return best

    def _with_draft(self, share: Share, draft: Sequence[int]) -> Share:
        room = self._scheduler.room_behind(share.request, len(draft)) if draft else 0
        return share._replace(draft=draft[:room]) if room else share

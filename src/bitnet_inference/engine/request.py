"""One generation on its way through the engine, and what its owner hears of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.blocks import Parent
from bitnet_inference.engine.constraint import Constraint
from bitnet_inference.engine.ints import Ints
from bitnet_inference.engine.logprobs import PromptScores, TokenLogprobs
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.terms import Terms
from bitnet_inference.engine.window import NUM_SINKS, Past
from bitnet_inference.errors import InvalidParams, said
from bitnet_inference.native import SamplingRule

Stage = Literal["submitted", "scheduled", "sampled"]
Rank = tuple[int, ...]  # whose is lower comes first


@dataclass(frozen=True)
class Finish:
    """Why a request ended: every request gets exactly one.

    "stop": an end token (`token_id` tells which; it is not delivered as a token; `logprobs` are its, where they are
    wanted) or the sink's own wish (None).
    "length": max_tokens or the end of the context. "cancelled": by its owner. "filtered": by its reader's
    filters, if it had not ended before they looked. "timeout": its time was over, see Terms.
    "error": `error` tells.
    """

    reason: Literal["stop", "length", "cancelled", "filtered", "timeout", "error"]
    token_id: int | None = None
    error: Exception | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Usage:
    """What a request has cost. Output tokens are those that were delivered: an end token is not among them.

    `queued_s`: from submission until its first step; `prompt_s`: from there until its first token was sampled (or until
    its end); `output_s`: from there until its end. Seconds of a monotonic clock. `num_cached_tokens`: so many of the
    prompt's tokens were in the cache already, from requests with the same beginning and salt.

    `num_prompt_tokens` does not count the `num_dropped_tokens` that were taken out of the prompt before (see
    SamplingParams.overflow). At its end the text had `num_context_tokens` in a context of `max_context`, and that had
    slid `num_slides` times.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    queued_s: float
    prompt_s: float
    output_s: float
    num_cached_tokens: int = 0
    num_dropped_tokens: int = 0
    num_context_tokens: int = 0
    max_context: int = 0
    num_slides: int = 0

    @property
    def context_fraction(self) -> float:
        """How full the context was at the end: 0 to 1."""
        return self.num_context_tokens / self.max_context if self.max_context else 0.0


class Sink(Protocol):
    """Where a request's tokens go. All are called in the engine's thread and must return soon.

    If `token` or `finish` raises, this request ends with that error and its neighbours go on.
    """

    @property
    def is_full(self) -> bool:
        """Whether it wants no more tokens for now. Its request then waits, and others go on; `finish` may still come.

        Whoever makes room again has to wake the engine's thread, which may be asleep.
        """
        ...

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take the next token; True ends the request (a stop string was found). End tokens are not delivered."""
        ...

    def finish(self, finish: Finish, usage: Usage) -> None:
        """The request has ended: the last call, made exactly once."""
        ...


class Request:
    """A prompt, its parameters and how far it is.

    `tokens` holds the prompt and the output so far, of which the first `num_computed` are in the cache, in `blocks`.
    A step lets the second catch up with the first; there is no other state. Where the text slides, `tokens` are those
    of its window, the first `num_prompt` of which are left of the `prompt`; `past` counts those that have left.
    `number` tells it from all others of this process.
    """

    _numbers = count(1)
    search: Request | None = None  # the head of the beam search that it is a part of
    is_searching = False  # its tokens are those of a beam, and none is delivered
    is_parked = False  # it has no turn until its search gives it a token
    is_filtered = False  # its reader's filters have cancelled it
    deadline: float | None = None
    rule: SamplingRule | None = None
    num_best = 0  # the choice of a token depends on so many best ones; 0: on all, or too many
    model_samples = False  # it may: nobody wants to see or change all logits

    def __init__(
        self,
        prompt: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        sink: Sink,
        *,
        eos_ids: Iterable[int] = (),
        choice: int = 0,
        constraint: Constraint | None = None,
        reader: PromptReader | None = None,
        terms: Terms | None = None,
        leader: Request | None = None,
        num_dropped: int = 0,
    ) -> None:
        """Raises InvalidParams for a prompt that is empty or no list of token ids.

        `constraint` says which tokens may come, and is this request's alone; it stands for params.grammar.
        `eos_ids` end the text unless params.ignore_eos. `choice` tells alternatives of one seed apart.
        `reader` gets rows of the prompt; with params.prompt_logprobs it is our own, which fills `prompt_logprobs`.
        `terms` tell when it has its turn. `leader` is a request that was submitted before, with the same prompt and
        terms: this one waits until that has computed the prompt, and shares it, and the seed where params have none.
        `num_dropped` tokens were taken out of the prompt before; usage tells.
        """
        self.number = next(self._numbers)
        self.params, self.sink, self.choice = params, sink, choice
        self.constraint = constraint
        self.mask: NDArray[np.uint32] | None = None  # of the token that is chosen next
        self.terms, self.leader = terms or Terms(), leader
        self.prompt = checked_prompt(prompt)
        self.tokens = Ints(self.prompt)
        self.num_prompt, self.num_dropped = len(self.prompt), num_dropped
        self.past, self.max_context = Past(), 0  # the engine knows the context
        self.num_shared = self.num_prompt  # so many first tokens are the leader's too
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        assert reader is None or params.prompt_logprobs is None, "a prompt has one reader"
        self._reader = reader if params.prompt_logprobs is None else self._scorer(params.prompt_logprobs)
        self.unread = range(0) if self._reader is None else self._reader.positions  # of the prompt, by its reader
        self._check_leader()
        self.end_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        drawn = secrets.randbits(64) if leader is None else leader.seed
        self.seed: int = (drawn if params.seed is None else params.seed) % (1 << 64)
        self.blocks = Ints()  # which only grow, until others take their place
        self.num_computed = 0
        self.num_cached: int | None = None  # tokens that others had computed when it was first scheduled
        self.contents: list[Parent] = [self.terms.cache_salt]  # and the numbers of its published blocks
        self.rank: Rank = (-self.terms.priority, 0)  # the scheduler counts arrivals, and a search its beams
        self.finish: Finish | None = None
        self._times: dict[str, float] = {}

    def _check_leader(self) -> None:
        leader = self.leader
        if leader is not None and (self.terms, self.prompt.tolist()) != (leader.terms, leader.prompt.tolist()):
            raise InvalidParams("choices of one prompt differ in prompt or terms: give them the same")

    def _scorer(self, num_top: int) -> PromptReader:
        start = self.params.prompt_logprobs_from
        if start >= self.num_prompt:
            has = f"the prompt has {self.num_prompt} tokens"
            raise InvalidParams(f"scores are wanted from token {start} on, {has}: give the position of one of them")
        scores = PromptScores(self.prompt, num_top, start)
        self.prompt_logprobs = scores.found
        return scores.reader

    @property
    def num_pending(self) -> int:
        """How many known tokens are not in the cache yet."""
        return self.tokens.length - self.num_computed

    @property
    def num_reusable(self) -> int:
        """How many of its first tokens need not be computed where the cache has them.

        The last known one must be, because somebody must tell what follows it, and all that its reader waits for.
        """
        num_before = self.tokens.length - 1
        return min(num_before, self.unread.start) if self.unread else num_before

    @property
    def reads(self) -> Literal["logits", "hidden"] | None:
        """What rows of its prompt its reader gets."""
        return None if self._reader is None else self._reader.kind

    @property
    def was_submitted(self) -> bool:
        """Whether an engine has taken it."""
        return "submitted" in self._times

    @property
    def waits_for_leader(self) -> bool:
        """Whether its prompt is soon computed by another choice."""
        leader = self.leader
        if leader is None or leader.finish is not None or leader.sink.is_full or leader.past.num_slides or self.search:
            return False
        return leader.num_computed < self.num_prompt

    @property
    def can_run(self) -> bool:
        """Whether it waits for nothing but its turn."""
        return not self.sink.is_full and not self.waits_for_leader and not self.is_parked

    @property
    def is_counted(self) -> bool:
        """Whether an owner has submitted it: of the beams of a search, the head."""
        return self.search is None or self.search is self

    @property
    def num_output(self) -> int:
        """How many tokens were generated and delivered."""
        return self.past.num_output + self.tokens.length - self.num_prompt

    @property
    def position(self) -> int:
        """Of the next token in the whole text, slid or not."""
        return self.past.num_prompt + self.past.num_output + self.tokens.length

    @property
    def bans_ends(self) -> bool:
        """Whether the next token must not be an end token."""
        least = self.params.min_tokens
        return least > 0 and self.num_output < least and bool(self.end_ids)

    @property
    def has_enough(self) -> bool:
        """Whether max_tokens is reached."""
        most = self.params.max_tokens
        return most is not None and self.num_output >= most

    @property
    def least_room(self) -> int:
        """Tokens behind the prompt that there must be room for: the first of the answer, if there is to be one."""
        return 0 if self.params.max_tokens == 0 else 1

    @property
    def readable(self) -> range:
        """The positions of the prompt that are computed, and that its reader has not got yet."""
        return range(self.unread.start, min(self.num_computed, self.unread.stop))

    def read_rows(self, first: int, rows: NDArray[np.float32]) -> None:
        """Let its reader read the next ones."""
        assert self._reader is not None and first == self.unread.start, "rows for nobody"
        self.unread = range(first + len(rows), self.unread.stop)
        self._reader.read(first, rows)

    def share_scores(self) -> None:
        """Take the scores of the prompt that its leader has, where these are all that are wanted."""
        leader, wanted = self.leader, (self.params.prompt_logprobs, self.params.prompt_logprobs_from)
        if not self.unread or leader is None or leader.prompt_logprobs is None:
            return
        is_same = wanted == (leader.params.prompt_logprobs, leader.params.prompt_logprobs_from)
        if is_same and len(leader.prompt_logprobs) == len(self.prompt) - wanted[1]:
            self.prompt_logprobs, self.unread = list(leader.prompt_logprobs), range(0)

    def follow(self, leader: Request, num_shared: int, token_id: int) -> None:
        """Go on as a beam with so many first tokens of another one, or of its own, and a new one."""
        self.is_parked = False
        self.leader = None
        if leader is not self:
            self.leader, self.num_shared = leader, num_shared
            self.tokens = Ints(leader.tokens.view[:num_shared])
        self.tokens.append(token_id)

    def slide(self, max_context: int) -> None:
        """Keep the first tokens and the recent half of the window, at new positions; nothing of it is in the cache.

        From here on it is a request whose prompt is what was kept, but that its noise goes on with the whole text.
        """
        assert self.num_computed == 0, "a window slides when its blocks are given back"
        recent = self.tokens.view[-(max_context // 2) :].tolist()
        num_gone = len(self.tokens) - NUM_SINKS - len(recent)
        num_gone_prompt = min(max(self.num_prompt - NUM_SINKS, 0), num_gone)
        self.past = self.past.further(num_gone_prompt, num_gone - num_gone_prompt)
        self.num_prompt -= num_gone_prompt
        self.leader = None  # the prompt that they share is not at the beginning any more
        self.tokens.cut(NUM_SINKS)
        self.tokens.extend(recent)

    def forget(self) -> None:
        """Start over: nothing of this request is in the cache any more."""
        self.blocks = Ints()
        self.num_computed = 0
        self.contents = [self.terms.cache_salt]

    def mark(self, stage: Stage) -> None:
        """Note when a stage was first reached."""
        if stage not in self._times:
            self._times[stage] = monotonic()

    def time_of(self, stage: Stage) -> float:
        """When a stage was first reached, which it was; by time.monotonic()."""
        return self._times[stage]

    def usage(self) -> Usage:
        """What the request has cost until now."""
        end = monotonic()
        submitted, scheduled, sampled = (self._times.get(name, end) for name in ("submitted", "scheduled", "sampled"))
        times = (scheduled - submitted, sampled - scheduled, end - sampled)
        return Usage(
            len(self.prompt),
            0 if self.is_searching else self.num_output,
            *times,
            num_cached_tokens=self.num_cached or 0,
            num_dropped_tokens=self.num_dropped,
            num_context_tokens=self.tokens.length,
            max_context=self.max_context,
            num_slides=self.past.num_slides,
        )


def checked_prompt(prompt: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """The token ids as an array of their own; raises InvalidParams for what is empty or no list of token ids."""
    try:
        ids = np.asarray(prompt)
    except ValueError:
        raise InvalidParams("the prompt is no list of token ids: its items differ in length") from None
    except (TypeError, RuntimeError) as error:  # a tensor of another device, say
        raise InvalidParams(f"the prompt cannot be read ({said(error)}): give a list of token ids") from None
    if ids.size == 0:
        raise InvalidParams("the prompt is empty: give at least one token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidParams("the prompt is no list of token ids: give whole numbers")
    if ids.min() < 0 or ids.max() >= 1 << 31:
        raise InvalidParams(f"the prompt holds a token id of {ids.min()} to {ids.max()}: no vocabulary has it")
    return ids.astype(np.int32)

"""What happens in an engine, told to one listener: how requests go on, and what each step took."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

from bitnet_inference.engine.blocks import BlockPool
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.engine.share import Share
from bitnet_inference.errors import InvalidParams
from bitnet_inference.model.plan import StepTime

Phase = Literal["schedule", "draft", "forward", "sample", "deliver"]
PHASES: tuple[Phase, ...] = ("schedule", "draft", "forward", "sample", "deliver")


@dataclass(frozen=True, slots=True)
class Queued:
    """A request was submitted at `time`; told when the engine first sees it."""

    request: int
    time: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A waiting request got its cache blocks, `num_cached_tokens` of its tokens in them; again after a preemption."""

    request: int
    time: float
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Token:
    """A request got token `index` of its answer; the first one is 0. A beam search gets its best text at its end."""

    request: int
    time: float
    index: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request gave its blocks back, to others, unread, or because it slid: it waits, and computes anew."""

    request: int
    time: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended: told once for every request that was queued."""

    request: int
    time: float
    finish: Finish
    usage: Usage


@dataclass(frozen=True, slots=True)
class Replaced:
    """The model failed with `error`, and another one goes on in its place. Who was running has been preempted."""

    time: float
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step is over; or, with no sequence in it, the last requests were dropped before it.

    `time`: when it began. `num_decoding` sequences lacked one token, `num_prompts` more, of which `num_prompt_tokens`
    were computed; or begun, where they go on beside others for some steps. `num_draft_tokens` were computed on trial,
    `num_right_draft_tokens` of them were right.
    `num_new_tokens` went to sinks, these among them. How many requests wait and run, and how many of `num_blocks` cache
    blocks are free, is told as the step has left it. `seconds` has each phase: "schedule"; "draft", guessing tokens;
    "forward", with what prepares it; "sample", logits and choice; "deliver", constraints and sinks.
    `plan_times`, where they are measured: the steps of the plans that ran, the body in "forward", the others in
    "sample".
    """

    time: float
    num_decoding: int
    num_prompts: int
    num_prompt_tokens: int
    num_draft_tokens: int
    num_right_draft_tokens: int
    num_new_tokens: int
    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    seconds: dict[Phase, float]
    plan_times: tuple[StepTime, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens were computed."""
        return self.num_decoding + self.num_prompt_tokens + self.num_draft_tokens


Event = Queued | Scheduled | Token | Preempted | Finished | Replaced | Stepped
# Called in the engine's thread, and must return soon. Times are seconds of time.monotonic(); requests are told by
# Request.number. If it raises, that is logged, and it hears no more.
EngineListener = Callable[[Event], None]
PlanTimes = Callable[[], tuple[StepTime, ...]]  # how long the steps of plans took since it was called last


def check_listener(listener: EngineListener | None, profile: bool) -> None:
    """Refuse what cannot listen, and a profile for nobody. Raises InvalidParams."""
    if listener is not None and not callable(listener):
        raise InvalidParams(f"listener is {listener!r:.60}: give a function of one event, as Counts()")
    if profile and listener is None:
        raise InvalidParams("profile is for a listener, and there is none: give one, as a Trace, or leave profile out")


class Events:
    """What the engine calls; nothing happens without a listener. All calls come from the engine's thread."""

    def __init__(self, listener: EngineListener | None = None, plan_times: PlanTimes | None = None) -> None:
        """Without `plan_times` those of Stepped are empty."""
        self._listener, self._plan_times = listener, plan_times
        self._begin = self._since = 0.0
        self._phase: Phase = "schedule"
        self._seconds: dict[Phase, float] = {}
        self._counts: dict[str, int] = {}  # the fields of Stepped that tell of the batch
        self._new_tokens: list[tuple[int, int]] = []  # whose they are; equal where a draft gave several

    def queued(self, request: Request) -> None:
        """See Queued."""
        if self._listener is not None:
            self._tell(Queued(request.number, request.time_of("submitted"), request.num_prompt))

    def scheduled(self, request: Request) -> None:
        """See Scheduled."""
        if self._listener is not None and request.is_counted:
            self._tell(Scheduled(request.number, monotonic(), request.num_computed))

    def token(self, request: Request) -> None:
        """See Token; the token is the last that the request knows."""
        if self._listener is not None:
            self._new_tokens.append((request.number, request.num_output if request.search else 0))
            self._tell(Token(request.number, monotonic(), request.num_output - 1))

    def preempted(self, request: Request) -> None:
        """See Preempted."""
        if self._listener is not None and request.is_counted:
            self._tell(Preempted(request.number, monotonic()))

    def finished(self, request: Request, finish: Finish, usage: Usage) -> None:
        """See Finished."""
        if self._listener is not None and request.is_counted:
            self._tell(Finished(request.number, monotonic(), finish, usage))

    def replaced(self, error: Exception) -> None:
        """See Replaced; the steps of the other model's plans are not measured."""
        self._plan_times = None
        self._tell(Replaced(monotonic(), error))

    def begin_step(self) -> None:
        """A step begins, with the phase "schedule"."""
        if self._listener is not None:
            self._begin = self._since = monotonic()
            self._phase, self._seconds, self._new_tokens = "schedule", dict.fromkeys(PHASES, 0.0), []

    def enter(self, phase: Phase) -> None:
        """From now on it is this phase, which may come several times in a step."""
        if self._listener is not None:
            now = monotonic()
            self._seconds[self._phase] += now - self._since
            self._phase, self._since = phase, now

    def forward(self, shares: Sequence[Share]) -> None:
        """These shares are computed next, in the phase "forward"."""
        if self._listener is not None:
            self.enter("forward")
            prompts = [share for share in shares if share.request.num_pending > 1]
            self._counts = {
                "num_decoding": len(shares) - len(prompts),
                "num_prompts": len(prompts),
                "num_prompt_tokens": sum(share.num_tokens for share in prompts),
                "num_draft_tokens": sum(len(share.draft) for share in shares),
            }

    def end_step(self, num_waiting: int, num_running: int, pool: BlockPool) -> None:
        """See Stepped."""
        if self._listener is None:
            return
        self.enter("schedule")  # only to end the last phase
        stepped = Stepped(
            **self._counts,
            time=self._begin,
            num_right_draft_tokens=len(self._new_tokens) - len(set(self._new_tokens)),
            num_new_tokens=len(self._new_tokens),
            num_waiting=num_waiting,
            num_running=num_running,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            seconds=self._seconds,
            plan_times=() if self._plan_times is None else self._plan_times(),
        )
        self._tell(stepped)

    def _tell(self, event: Event) -> None:
        if self._listener is None:
            return
        try:
            self._listener(event)
        except BaseException:  # SystemExit, for instance, would end the engine, and nobody would hear of it
            self._listener = None
            logging.getLogger(__name__).exception("the listener of the engine raised, and is told no more")

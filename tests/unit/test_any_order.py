"""Whatever happens in whatever order: no block is lost, shared while it is written, or freed twice; every request ends
once, with the text that it has alone, and a listener hears of it in order. A state machine over the engine, its
scheduler and its blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scripted import Listener, ScriptedModel, check_events, generate, run

from bitnet_inference.engine.beam import BeamParams
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.draft_model import ModelDrafter
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import Event, Preempted
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.speculative import Drafter
from bitnet_inference.engine.terms import Terms
from bitnet_inference.engine.window import MIN_CONTEXT, NUM_SINKS
from bitnet_inference.errors import InvalidParams, KernelError, OutOfMemory
from bitnet_inference.model.contract import Batch

VOCAB, LONGEST = 6, 32  # few tokens and short texts, so that beginnings are often equal


class Tally(Counter[str]):
    """Counts what was done, and says so at the end of the run."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line("any order: " + ", ".join(f"{count} {name}" for name, count in self.items()))


TALLY = Tally()

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
seeds = st.sampled_from([None, 0, 1])  # None is greedy
terms = st.builds(
    Terms,
    priority=st.sampled_from([0, 0, 0, 1, -1]),
    timeout_s=st.sampled_from([None, None, None, 3, 20]),
    cache_salt=st.sampled_from(["", "", "", "mine"]),
)


class AnyOrder(RuleBasedStateMachine):
    """An engine with little room, and what its users do."""

    @initialize(
        num_blocks=st.integers(5, 24),
        block_size=st.sampled_from([1, 2, 4]),
        max_sequences=st.integers(1, 5),
        max_tokens=st.sampled_from([1, 3, 8, 40]),
        drafts=st.sampled_from(["none", "lookup", "model"]),
        background_tokens=st.sampled_from([0, 4, 20]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        max_tokens: int,
        drafts: str,
        background_tokens: int,
    ) -> None:
        self.limits = {"vocab_size": VOCAB, "max_positions": LONGEST, "block_size": block_size}
        self.limits["num_blocks"] = num_blocks if block_size > 1 else 2 * num_blocks
        looks_ahead = num_blocks % 2 == 0
        self.model = ScriptedModel(
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            looks_ahead=looks_ahead,
            background_tokens=background_tokens,
            **self.limits,
        )
        self.now = 0.0
        self.model.before_forward = self._work
        self.heard: list[Event] = []
        drafter = self._drafter(drafts)
        self.engine = Engine(self.model, clock=lambda: self.now, drafter=drafter, listener=self.heard.append)
        self.scheduler = self.engine._scheduler
        self.requests: list[Request] = []
        self.searches: list[Beams] = []
        self.cancelled: set[Request] = set()
        self.alone: dict[tuple[object, ...], Any] = {}
        TALLY["machines"] += 1

    @rule(
        prompt=prompts,
        seed=seeds,
        length=st.sampled_from([0, 1, 5, 20, None]),
        terms=terms,
        shows=st.floats(0, 1) | st.none(),
    )
    def arrive(
        self, prompt: list[int], seed: int | None, length: int | None, terms: Terms, shows: float | None
    ) -> None:
        positions = range(int((shows or 0) * len(prompt)), len(prompt))
        reader = None if shows is None else PromptReader(lambda first, logits: None, positions)
        self._submit(Request(prompt, params(seed, length), Listener(), terms=terms, reader=reader))

    @rule(prompt=prompts, seed=seeds, count=st.integers(1, 3), length=st.sampled_from([40, 90]), terms=terms)
    def slide(self, prompt: list[int], seed: int | None, count: int, length: int, terms: Terms) -> None:
        """One or more choices of a text that is longer than the context."""
        self._submit_choices(prompt, params(seed, length, overflow="sliding", stop_token_ids=()), count, terms)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), longer=st.lists(st.integers(0, 1), max_size=3), seed=seeds)
    def go_on(self, which: int, longer: list[int], seed: int | None) -> None:
        """The next turn: an earlier request's whole text, and something new."""
        earlier = self.requests[which % len(self.requests)]
        prompt = [*earlier.tokens.view.tolist(), *longer][: LONGEST - 8]
        self._submit(Request(prompt, params(seed, 6), Listener(), terms=earlier.terms))

    @rule(
        prompt=prompts,
        count=st.integers(2, 4),
        length=st.sampled_from([0, 1, 9]),
        terms=terms,
        scored=st.sampled_from([None, None, 0]),
    )
    def choose(self, prompt: list[int], count: int, length: int, terms: Terms, scored: int | None) -> None:
        """Several choices of one prompt, which is scored perhaps."""
        self._submit_choices(prompt, params(0, length, prompt_logprobs=scored), count, terms)

    @rule(prompt=prompts, num_beams=st.integers(2, 3), length=st.sampled_from([1, 4, 9, None]), terms=terms)
    def look_for_the_best(self, prompt: list[int], num_beams: int, length: int | None, terms: Terms) -> None:
        """A beam search."""
        params = BeamParams(num_beams=num_beams, num_choices=2, max_tokens=length, stop_token_ids=(VOCAB - 1,))
        beams = Beams(prompt, params, [Listener(), Listener()], terms=terms)
        try:
            self.engine.submit(beams.head)
        except OutOfMemory:
            return
        self.searches.append(beams)

    @precondition(lambda self: self.searches)
    @rule(which=st.integers(0, 1000))
    def cancel_a_search(self, which: int) -> None:
        beams = self.searches[which % len(self.searches)]
        self.engine.cancel(beams.head)
        self.cancelled.add(beams.head)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        self.engine.cancel(request)
        self.cancelled.add(request)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def stop_reading(self, which: int) -> None:
        self.requests[which % len(self.requests)].sink.is_full = True

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000), count=st.integers(1, 10))
    def read(self, which: int, count: int) -> None:
        full = [request for request in self.requests if request.sink.is_full]
        for request in (full[which % len(full) :] if full else [])[:count]:
            request.sink.is_full = False

    @rule(seconds=st.sampled_from([0.5, 3]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def fail(self) -> None:
        """The model fails in the next step."""
        self.model.before_forward = fall_over
        self._step()
        self.model.before_forward = self._work

    @rule(
        num_logits=st.none() | st.integers(0, 8),
        block_size=st.sampled_from([1, 2, 4]),
        max_sequences=st.integers(1, 5),
        max_tokens=st.sampled_from([1, 3, 8, 40]),
        background_tokens=st.sampled_from([0, 4]),
    )
    def be_replaced(
        self,
        num_logits: int | None,
        block_size: int,
        max_sequences: int,
        max_tokens: int,
        background_tokens: int,
    ) -> None:
        """The device fails in the next step, at once or after so many rows of logits, and another model goes on."""
        num_tokens = self.limits["num_blocks"] * self.limits["block_size"]
        if num_tokens % block_size:
            block_size = self.limits["block_size"]
        failing, limits = self.model, {"max_sequences": max_sequences, "max_tokens": max_tokens}
        limits |= {**self.limits, "block_size": block_size, "num_blocks": num_tokens // block_size}
        limits["background_tokens"] = background_tokens

        def fail(*_: object) -> None:
            nonlocal num_logits
            num_logits = (num_logits or 0) - 1
            if num_logits < 0:
                raise KernelError("the device is lost")

        def replace(error: Exception) -> ScriptedModel:
            self.model = ScriptedModel(**limits)
            self.model.before_forward = self._work
            TALLY["devices lost"] += 1
            return self.model

        self.engine._fallback = replace
        if num_logits is None:
            failing.before_forward = fail
        else:
            failing.change_logits = fail
        self.engine.step()
        failing.before_forward, failing.change_logits, self.engine._fallback = self._work, keep, None

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "engine"):
            return
        pool, active = self.scheduler.pool, [*self.scheduler.running, *self.scheduler.waiting]
        held = Counter(block for request in active for block in request.blocks.view.tolist())
        assert pool._num_references == [held[block] for block in range(pool.num_blocks)]
        free = [*pool._blank, *pool._idle]
        assert sorted([*free, *held]) == list(range(pool.num_blocks)), "a block is lost, or free twice"
        assert set(pool._idle) == set(pool._keys) - set(held) and not set(pool._blank) & set(pool._keys)
        assert {content.block: key for key, content in pool._contents.items()} == pool._keys
        assert not any(request.blocks for request in self.scheduler.waiting)
        for queue in (self.scheduler.running, self.scheduler.waiting):
            assert queue == sorted(queue, key=lambda request: request.rank)
        assert self.scheduler._timed == {request for request in active if request.deadline is not None}

    @invariant()
    def who_has_ended_has_ended_right(self) -> None:
        for request in getattr(self, "requests", []):
            assert len(request.sink.finishes) == (request.finish is not None)

    def teardown(self) -> None:
        """Everybody who is read comes to an end, soon, and nothing is left."""
        if not hasattr(self, "engine"):
            return
        for request in self.requests:
            request.sink.is_full = False
        for _ in range(2 * LONGEST * LONGEST * (len(self.requests) + 3 * len(self.searches))):
            if not self.engine.has_work:
                break
            self._step()
            self.the_books_are_right()
        assert not self.engine.has_work, "somebody starves"
        assert self.engine.num_free_blocks == self.scheduler.pool.num_blocks
        check_events(self.heard, [*self.requests, *(beams.head for beams in self.searches)])
        for request in self.requests:
            self._check(request)
        for beams in self.searches:
            self._check_search(beams)
        TALLY["searches"] += len(self.searches)
        TALLY["preemptions"] += sum(isinstance(event, Preempted) for event in self.heard)
        TALLY["requests"] += len(self.requests)

    def _work(self, batch: Batch) -> None:
        """A step takes its time, most of it whatever it computes: so that drafts look worth it."""
        self.now += 0.01

    def _drafter(self, drafts: str) -> Drafter | None:
        if drafts == "model":
            return ModelDrafter(ScriptedModel(vocab_size=VOCAB, max_positions=LONGEST, block_size=3), VOCAB, 25)
        return LookupDrafter() if drafts == "lookup" else None

    def _submit_choices(self, prompt: list[int], wanted: SamplingParams, count: int, terms: Terms) -> None:
        leader = None
        for choice in range(count):
            request = Request(prompt, wanted, Listener(), choice=choice, terms=terms, leader=leader)
            if not self._submit(request):
                break
            leader = leader or request

    def _submit(self, request: Request) -> bool:
        try:
            self.engine.submit(request)
        except OutOfMemory:
            return False
        except InvalidParams:
            assert request.params.overflow == "sliding" and self.engine.max_context < MIN_CONTEXT
            return False
        self.requests.append(request)
        return True

    def _step(self) -> None:
        expected = self._front()
        before = None if expected is None else (expected.num_output, expected.num_computed)
        lengths = [(request, request.num_output) for request in self.scheduler.running]
        unread = [(request, request.num_output) for request in self.requests if request.sink.is_full]
        self.engine.step()
        assert unread == [(request, request.num_output) for request, _ in unread], "a token for a full sink"
        assert not any(request in self.scheduler.running for request, _ in unread)
        can_run = any(not request.sink.is_full for request in self.scheduler.all_requests())
        assert self.engine.has_turn == can_run, "the engine sleeps or wakes for nothing"
        TALLY["steps without a reader"] += sum(request.finish is None for request, _ in unread)
        TALLY["tokens by drafts"] += sum(max(0, request.num_output - length - 1) for request, length in lengths)
        self.now += 0.25
        TALLY["steps"] += 1
        TALLY["steps beside prompts"] += self.scheduler.aside.share is not None
        waits = self.scheduler.is_measuring or expected is self.scheduler.aside.request
        if expected is not None and expected.finish is None and not waits:
            assert (expected.num_output, expected.num_computed) > before, "the first in rank gets on in every step"

    def _front(self) -> Request | None:
        """The first of those that run, unless more come before it or decode than a step has room for."""
        running = [request for request in self.scheduler.running if not request.sink.is_full]
        num_decoding = sum(request.num_pending == 1 for request in running)
        if not running or running[0].search or num_decoding >= self.model.capabilities.max_tokens:
            return None  # beams wait for each other
        if any(request.rank < running[0].rank for request in self.scheduler.all_requests() if request.can_run):
            return None
        return running[0]

    def _check(self, request: Request) -> None:
        """The text is the one that the request has alone, as far as it came."""
        token_ids, reason = self._alone(request)
        TALLY[f"ended as {request.sink.reason}"] += 1
        TALLY["tokens from the cache"] += request.num_cached or 0
        TALLY["slides"] += request.past.num_slides
        whole, window = [*request.prompt.tolist(), *request.sink.token_ids], request.tokens.view.tolist()
        assert len(window) <= self.engine.max_context and request.position == len(whole)
        assert window == (whole[:NUM_SINKS] + whole[NUM_SINKS - len(window) :] if request.past.num_slides else whole)
        if request.sink.reason in ("stop", "length"):
            assert (request.sink.token_ids, request.sink.reason) == (token_ids, reason)
            assert request.prompt_logprobs == self._scores(request)
            return
        assert request.sink.token_ids == token_ids[: request.num_output]
        if request.sink.reason == "timeout":
            assert request.deadline <= self.now
        elif request.sink.reason == "error":  # the model's checks of its caller's books end requests too
            assert isinstance(request.sink.finishes[0].error, MemoryError), request.sink.finishes[0].error
        else:
            assert request in self.cancelled

    def _check_search(self, beams: Beams) -> None:
        """Both owners have heard of the end once, and of the texts that the search finds alone, or of none."""
        owners, head = beams._owners, beams.head
        assert all(request.finish is not None and not request.blocks for request in beams.requests)
        found = [(owner.token_ids, owner.reason) for owner in owners]
        TALLY[f"searches ended as {found[0][1]}"] += 1
        if found[0][1] not in ("stop", "length"):
            assert [token_ids for token_ids, _ in found] == [[], []]
            assert all(isinstance(owner.finishes[0].error, MemoryError | None) for owner in owners)
            assert found[0][1] != "cancelled" or head in self.cancelled
            return
        key = ("search", tuple(head.prompt.tolist()), beams._params)
        if key not in self.alone:
            alone = Beams(head.prompt, beams._params, [Listener(), Listener()])
            engine = Engine(ScriptedModel(**self.limits))
            engine.submit(alone.head)
            run(engine)
            self.alone[key] = [(owner.token_ids, owner.reason) for owner in alone._owners]
        assert found == self.alone[key]

    def _scores(self, request: Request) -> Any:
        """The scores of its prompt, if it wants any."""
        if request.params.prompt_logprobs is None:
            return None
        key = ("scores", tuple(request.prompt.tolist()))
        if key not in self.alone:
            alone, engine = Request(request.prompt, request.params, Listener()), Engine(ScriptedModel(**self.limits))
            engine.submit(alone)
            run(engine)
            self.alone[key] = alone.prompt_logprobs
        TALLY["scored prompts"] += 1
        return self.alone[key]

    def _alone(self, request: Request) -> tuple[list[int], str]:
        params = request.params
        key = (tuple(request.prompt.tolist()), params.temperature, params.max_tokens, params.overflow, request.seed)
        key += (request.choice,)
        if key not in self.alone:
            prompt, choice = request.prompt.tolist(), request.choice
            listener = generate(ScriptedModel(**self.limits), prompt, request.params, choice=choice)
            self.alone[key] = (listener.token_ids, listener.reason)
        return self.alone[key]


def params(seed: int | None, length: int | None, **options: Any) -> SamplingParams:
    usual = {"temperature": 0.0 if seed is None else 1.0, "seed": seed or 0, "stop_token_ids": [VOCAB - 1]}
    return SamplingParams(max_tokens=length, **{**usual, **options})


def keep(history: list[int], logits: object) -> None:
    """Logits stay what they are."""


def fall_over(batch: object) -> None:
    raise MemoryError("no more")


@pytest.fixture(scope="session", autouse=True)
def tally(pytestconfig: pytest.Config) -> None:
    pytestconfig.pluginmanager.register(TALLY)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

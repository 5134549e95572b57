"""Drafts change when tokens come, and never which: whoever guesses, whatever the guesses are worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Listener, ScriptedModel, check_events, generate, run

from bitnet_inference.drafts import make_drafter
from bitnet_inference.engine import speculative
from bitnet_inference.engine.draft_model import ModelDrafter
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import Stepped
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.pace import Pace
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.speculative import PROBE_EVERY, Draft
from bitnet_inference.errors import InvalidParams

VOCAB = 5


class Knowing:
    """Knows the text of each request, and is right with a given probability."""

    def __init__(self, rate: float, costs_time: bool = False) -> None:
        self.rate, self.costs_time = rate, costs_time
        self.texts: dict[tuple[int, ...], list[int]] = {}
        self.num_asked = 0
        self.forgotten: list[Request] = []
        self._random = random.Random(0)

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        self.num_asked += 1
        return [Draft([self._guess(token) for token in self._true(request)[:count]]) for request, count in wanted]

    def forget(self, request: Request) -> None:
        self.forgotten.append(request)

    def _true(self, request: Request) -> list[int]:
        return self.texts[tuple(request.prompt.tolist())][request.num_output :]

    def _guess(self, token: int) -> int:
        return token if self._random.random() < self.rate else (token + 1) % VOCAB


class Clock:
    """A step takes a second, and more for each pair of its tokens."""

    def __init__(self, model: ScriptedModel, token_s: float) -> None:
        self.now, self.steps = 0.0, []
        self._token_s = token_s
        model.before_forward = self._tick

    def __call__(self) -> float:
        return self.now

    def _tick(self, batch) -> None:
        self.steps.append(len(batch.token_ids))
        self.now += 1 + self._token_s * len(batch.token_ids) ** 2


def speculate(drafter, prompts, params, token_s=0.01, listener=None, **limits):
    model = ScriptedModel(vocab_size=VOCAB, **limits)
    clock, listeners = Clock(model, token_s), [Listener() for _ in prompts]
    engine = Engine(model, drafter=drafter, clock=clock, listener=listener)
    num_free = engine.num_free_blocks
    requests = [Request(prompt, params, listener) for prompt, listener in zip(prompts, listeners, strict=True)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert engine.num_free_blocks == num_free
    return clock, listeners, requests


def alone(prompt, params, **limits):
    return generate(ScriptedModel(vocab_size=VOCAB, **limits), prompt, params)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4),
    who=st.sampled_from(["lookup", "model", "knows"]),
    rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.0, 1.0]),
    options=st.sampled_from(
        [
            {},
            {"logprobs": 2},
            {"repetition_penalty": 1.3},
            {"min_tokens": 9},
            {"stop_token_ids": [VOCAB - 1]},
            {"overflow": "sliding", "max_tokens": 150},
        ]
    ),
    num_blocks=st.integers(9, 40),
    max_tokens=st.integers(1, 40),
    block_size=st.sampled_from([4, 7]),
)
def test_the_same_text_as_alone(prompts, who, rate, temperature, options, num_blocks, max_tokens, block_size):
    params = SamplingParams(temperature=temperature, seed=7, **{"max_tokens": 25, **options})
    limits = {"num_blocks": num_blocks, "block_size": block_size}
    expected = [alone(prompt, params, **limits) for prompt in prompts]
    drafter = Knowing(rate)
    drafter.texts = {tuple(prompt): [*each.token_ids, 0] for prompt, each in zip(prompts, expected, strict=True)}
    if who == "lookup":
        drafter = LookupDrafter()
    if who == "model":
        drafter = ModelDrafter(ScriptedModel(vocab_size=VOCAB, block_size=3, max_tokens=20), VOCAB, 30)
    _, listeners, _ = speculate(drafter, prompts, params, max_tokens=max_tokens, **limits)
    for listener, each in zip(listeners, expected, strict=True):
        assert (listener.token_ids, listener.reason) == (each.token_ids, each.reason)
        assert listener.logprobs == each.logprobs


@pytest.mark.parametrize(
    ("rate", "token_s", "num_steps", "most_s"),
    [
        pytest.param(1.0, 0.0001, range(5, 10), 15, id="right drafts save steps"),
        pytest.param(0.0, 0.01, range(60, 61), 64, id="wrong ones are soon given up"),
        pytest.param(1.0, 1.0, range(45, 61), 150, id="right ones too where a step takes as long as its tokens"),
    ],
)
def test_drafts_come_where_they_pay(rate, token_s, num_steps, most_s):
    drafter, params = Knowing(rate), SamplingParams(temperature=0.0, max_tokens=60)
    drafter.texts[0, 1] = alone([0, 1], params, max_positions=100).token_ids
    clock, listeners, requests = speculate(drafter, [[0, 1]], params, token_s, max_positions=100)
    assert listeners[0].token_ids == drafter.texts[0, 1]
    assert len(clock.steps) in num_steps and clock.now <= most_s
    assert drafter.forgotten == requests


@pytest.mark.parametrize(("num_requests", "asks"), [(1, True), (4, True), (5, False)])
def test_steps_that_take_little_for_each_request_get_no_drafts(monkeypatch, num_requests, asks):
    monkeypatch.setattr(speculative, "MIN_STEP_S", 0.9)  # a step takes a second
    drafter, params = Knowing(1.0), SamplingParams(temperature=0.0, max_tokens=20)
    prompts = [[0] * length for length in range(1, num_requests + 1)]
    drafter.texts = {tuple(prompt): alone(prompt, params).token_ids for prompt in prompts}
    speculate(drafter, prompts, params, 0.0)
    assert (drafter.num_asked > 0) is asks


def test_no_drafts_where_a_step_is_to_show_what_decoding_takes():
    drafter, model = Knowing(1.0), ScriptedModel(vocab_size=VOCAB, max_positions=100)
    drafter.texts[0, 1] = alone([0, 1], SamplingParams(temperature=0.0, max_tokens=60), max_positions=100).token_ids
    engine = Engine(model, drafter=drafter, clock=Clock(model, 0.0001))
    engine.submit(Request([0, 1], SamplingParams(temperature=0.0, max_tokens=60), Listener()))
    for _ in range(3):
        engine.step()
    scheduler, speculation = engine._scheduler, engine._speculation
    shares = scheduler.schedule()
    assert speculation.add(shares)[0].draft
    scheduler.is_measuring = True
    assert not speculation.add(shares)[0].draft


def test_a_listener_hears_how_many_drafted_tokens_were_right():
    drafter, params, heard = Knowing(0.9), SamplingParams(temperature=0.0, max_tokens=60), []
    drafter.texts[0, 1] = alone([0, 1], params, max_positions=100).token_ids
    clock, _, requests = speculate(drafter, [[0, 1]], params, 0.0001, listener=heard.append, max_positions=100)
    check_events(heard, requests)
    steps = [event for event in heard if isinstance(event, Stepped)]
    assert [step.num_tokens for step in steps] == clock.steps
    assert sum(step.num_right_draft_tokens for step in steps) == 60 - len(steps) > 0
    assert sum(step.num_right_draft_tokens for step in steps) < sum(step.num_draft_tokens for step in steps)
    assert sum(step.num_new_tokens for step in steps) == 60
    assert all(step.seconds["draft"] > 0 for step in steps)


def test_a_drafter_that_costs_time_is_asked_now_and_then_only():
    drafter, params = Knowing(0.0, costs_time=True), SamplingParams(temperature=0.0, max_tokens=200)
    drafter.texts[0, 1] = alone([0, 1], params, max_positions=300).token_ids
    speculate(drafter, [[0, 1]], params, max_positions=300)
    assert 200 / PROBE_EVERY <= drafter.num_asked <= 200 / PROBE_EVERY + 10


class Turns:
    """A constraint: tokens below 3 and above 2 in turn, so many of them."""

    def __init__(self, length: int) -> None:
        self.length, self.num_taken = length, 0

    @property
    def is_done(self) -> bool:
        return self.num_taken == self.length

    def mask(self):
        return np.array([0b11000 if self.num_taken % 2 else 0b00111], np.uint32)

    def accept(self, token_id: int) -> None:
        assert (token_id > 2) == self.num_taken % 2
        self.num_taken += 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_sees_accepted_tokens_alone(temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60)
    model, clock_model = (ScriptedModel(vocab_size=VOCAB, max_positions=99) for _ in range(2))
    expected = generate(model, [0, 1], params, constraint=Turns(41))
    drafter, listener = Knowing(0.8), Listener()
    drafter.texts[0, 1] = expected.token_ids
    engine = Engine(clock_model, drafter=drafter, clock=(clock := Clock(clock_model, 0.0001)))
    engine.submit(Request([0, 1], params, listener, constraint=Turns(41)))
    run(engine)
    assert (listener.token_ids, listener.reason) == (expected.token_ids, "stop")
    assert len(listener.token_ids) == 41 and len(clock.steps) < 30


def test_a_drafter_that_fails_is_left_alone(caplog):
    class Failing(LookupDrafter):
        def draft(self, wanted):
            raise RuntimeError("no idea")

    params = SamplingParams(temperature=0.0, max_tokens=20)
    _, listeners, _ = speculate(Failing(), [[0, 1]], params)
    assert listeners[0].token_ids == alone([0, 1], params).token_ids
    assert caplog.text.count("the drafter failed") == 1


def test_lookup_finds_what_followed():
    drafter = LookupDrafter()
    request = Request([1, 2, 3, 4, 9, 8, 1, 2, 3, 4], SamplingParams(), Listener())
    assert drafter.draft([(request, 3)]) == [Draft([9, 8, 1], 4)]
    assert drafter.draft([(request, 9)]) == [Draft([9, 8, 1, 2, 3, 4, 9, 8, 1], 4)], "round in the period"
    request.tokens.extend([7, 9, 8])
    assert drafter.draft([(request, 2)]) == [Draft([1, 2], 2)]
    request.tokens.extend([5])
    assert drafter.draft([(request, 2)]) == [Draft(())]


def test_a_follower_takes_back_what_was_wrong():
    model = ScriptedModel(vocab_size=VOCAB, block_size=4)
    drafter = ModelDrafter(model, VOCAB, 20)
    request = Request([0, 1, 2], SamplingParams(temperature=0.0), Listener())
    for _ in range(4):
        draft = drafter.draft([(request, 3)])[0].token_ids
        assert draft == [
            int(np.argmax(model.logits_after([*request.tokens.view.tolist(), *draft[:i]]))) for i in range(3)
        ]
        request.tokens.extend([draft[0], (draft[1] + 1) % VOCAB])
    drafter.forget(request)
    assert drafter._pool.num_free == 20


def test_a_model_with_another_vocabulary_cannot_draft():
    with pytest.raises(InvalidParams, match="23 tokens in place of 5"):
        ModelDrafter(ScriptedModel(), VOCAB, 1)


def test_the_cache_of_a_draft_model_fits_beside_that_of_the_large_one():
    """Which has been told of nine tenths of the memory before."""
    memory, draft = 1000, ScriptedModel(num_blocks=900, max_positions=100_000)
    make_drafter(ScriptedModel(num_blocks=900), draft, None)
    assert 0 < draft.num_bytes // draft.capabilities.block_size <= memory - 900


def test_times_between_those_that_were_measured():
    pace = Pace(16)
    assert pace.step_s(3) == 0
    for count, seconds in ((2, 1.0), (6, 3.0)):
        pace.note(count, 0, seconds)
    assert [pace.step_s(count) for count in (1, 2, 4, 6)] == [0.5, 1.0, 2.0, 3.0]
    assert pace.step_s(12) == 6.0 and pace.step_s(100) == float("inf")


def test_a_step_that_was_held_up_once_is_tried_again():
    pace = Pace(16)
    for count, seconds in ((1, 1.0), (2, 1.2), (3, 9.0)):
        pace.note(count, 0, seconds)
    assert pace.step_s(3) == 9.0
    for _ in range(17):
        pace.note(1, 0, 1.0)
    assert pace.step_s(3) == pytest.approx(1.4)
    for _ in range(2):
        pace.note(3, 0, 9.0)
    for _ in range(256):
        pace.note(1, 0, 1.0)
    assert pace.step_s(3) == 9.0
    pace.note(1, 0, 1.0)
    assert pace.step_s(3) == pytest.approx(1.4)

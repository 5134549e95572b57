"""Requests whose tokens are constrained, on a scripted model and a constraint that is plain Python."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Listener, ScriptedModel, generate, greedy_text, run

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.worker import Worker
from bitnet_inference.errors import EngineError, InvalidParams

END = 22


class Steps:
    """Token i of the output is one of steps[i]; then comes the end."""

    def __init__(self, steps, end_ids=(), *, late=False, fail_at=None):
        self.steps, self.end_ids, self.late, self.fail_at = steps, end_ids, late, fail_at
        self.taken: list[int] = []
        self.is_done = False

    def mask(self):
        if len(self.taken) == self.fail_at:
            raise EngineError("the constraint fell over: mend it")
        assert not self.is_done, "asked after the end"
        self.is_done = len(self.taken) == len(self.steps)
        allowed = self.end_ids if self.is_done else self.steps[len(self.taken)]
        bits = np.zeros(1, dtype=np.uint32)
        for token_id in allowed:
            bits |= np.uint32(1 << token_id)
        return bits

    def accept(self, token_id):
        assert token_id in self.steps[len(self.taken)]
        self.taken.append(token_id)
        self.is_done = not self.late and len(self.taken) == len(self.steps)


STEPS = [{3, 4, 5}, {9}, {1, 2, 20}, set(range(10)), {7, 8}]


def masked_text(model, prompt, steps):
    """The most likely continuation under the steps, computed without an engine."""
    tokens = list(prompt)
    for allowed in steps:
        logits = model.logits_after(tokens)
        tokens.append(max(sorted(allowed), key=lambda token_id: logits[token_id]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("eos_ids", [(), (END,)])
def test_greedy_takes_the_best_of_what_is_allowed_and_stops_when_nothing_is_left(late, eos_ids):
    model = ScriptedModel()
    params = SamplingParams(temperature=0.0, max_tokens=20)
    listener = generate(model, [6, 6], params, constraint=Steps(STEPS, eos_ids, late=late), eos_ids=eos_ids)
    assert listener.token_ids == masked_text(model, [6, 6], STEPS)
    assert listener.reason == "stop" and listener.finishes[0].token_id is None


def test_max_tokens_cuts_it_off_and_min_tokens_does_not_prolong_it():
    model = ScriptedModel()
    short = generate(model, [1], SamplingParams(max_tokens=3), constraint=Steps(STEPS))
    assert (len(short.token_ids), short.reason) == (3, "length")
    exact = generate(model, [1], SamplingParams(max_tokens=5), constraint=Steps(STEPS))
    assert (len(exact.token_ids), exact.reason) == (5, "stop")
    params = SamplingParams(min_tokens=9, max_tokens=20)
    long = generate(model, [1], params, constraint=Steps(STEPS, [END], late=True), eos_ids=[END])
    assert (len(long.token_ids), long.reason) == (5, "stop")


def test_nothing_but_the_end_at_once_is_an_empty_text():
    listener = generate(ScriptedModel(), [1], SamplingParams(), constraint=Steps([]))
    assert (listener.token_ids, listener.reason) == ([], "stop")


def test_bias_cannot_bring_a_banned_token_back():
    params = SamplingParams(temperature=1.0, seed=1, logit_bias={0: 100, 21: 100})
    listener = generate(ScriptedModel(), [1], params, constraint=Steps([{3, 4}] * 10))
    assert set(listener.token_ids) <= {3, 4} and listener.reason == "stop"


def test_log_probabilities_are_the_models_own():
    model = ScriptedModel()
    params = SamplingParams(temperature=0.0, logprobs=1)
    listener = generate(model, [1], params, constraint=Steps([{3}]))
    logits = model.logits_after([1])
    assert listener.logprobs[0].top[0][0] == int(np.argmax(logits))
    assert listener.logprobs[0].logprob == pytest.approx(logits[3] - np.log(np.exp(logits).sum()), abs=1e-5)


@pytest.mark.parametrize(
    ("broken", "kind"), [(Steps(STEPS, fail_at=2), EngineError), (Steps([{3}, set(), {4}]), InvalidParams)]
)
def test_a_constraint_that_fails_ends_its_request_alone(broken, kind):
    model, neighbour, listener = ScriptedModel(), Listener(), Listener()
    engine = Engine(model)
    engine.submit(Request([1, 2], SamplingParams(temperature=0.0, max_tokens=10), neighbour))
    engine.submit(Request([5], SamplingParams(temperature=0.0), listener, constraint=broken))
    run(engine)
    assert neighbour.token_ids == greedy_text(model, [1, 2], 10)
    assert listener.reason == "error" and isinstance(listener.finishes[0].error, kind)
    assert engine.num_free_blocks == Engine(ScriptedModel()).num_free_blocks


def test_a_broken_constraint_may_fail_in_accept_too():
    constraint = Steps(STEPS)
    constraint.accept = lambda token_id: 1 / 0
    listener = generate(ScriptedModel(), [1], SamplingParams(), constraint=constraint)
    assert listener.reason == "error" and isinstance(listener.finishes[0].error, ZeroDivisionError)


def test_the_thread_for_masks_ends_with_the_engine():
    before, listener = set(threading.enumerate()), Listener()
    worker = Worker(Engine(ScriptedModel()))
    worker.submit(Request([1, 2], SamplingParams(temperature=0.0), listener, constraint=Steps(STEPS)))
    worker.stop(drain=True)
    assert listener.reason == "stop" and set(threading.enumerate()) <= before


def test_masks_are_computed_while_the_model_computes():
    model, constraint = ScriptedModel(), Steps(STEPS)
    asked, plain_mask = threading.Event(), constraint.mask

    def mask():
        asked.set()
        return plain_mask()

    constraint.mask = mask
    model.before_forward = lambda batch: asked.wait(60) or pytest.fail("the mask waits for the model")
    assert generate(model, [1], SamplingParams(max_tokens=1), constraint=constraint).reason == "length"


@settings(max_examples=50)
@given(
    prompts=st.lists(st.lists(st.integers(0, 21), min_size=1, max_size=12), min_size=2, max_size=6),
    num_blocks=st.integers(6, 30),
    lengths=st.lists(st.integers(1, 8), min_size=6, max_size=6),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_the_text_is_the_same_alone_among_others_and_after_preemption(prompts, num_blocks, lengths, temperature):
    def request(index):
        params = SamplingParams(temperature=temperature, seed=index, max_tokens=9)
        constraint = Steps((STEPS * 2)[: lengths[index]]) if index % 3 else None
        return Request(prompts[index], params, Listener(), constraint=constraint)

    alone = []
    for index in range(len(prompts)):
        engine, lonely = Engine(ScriptedModel()), request(index)
        engine.submit(lonely)
        run(engine)
        alone.append((lonely.sink.token_ids, lonely.sink.reason))
    engine, together = (
        Engine(ScriptedModel(num_blocks=num_blocks, max_tokens=16)),
        list(map(request, range(len(alone)))),
    )
    for each in together:
        engine.submit(each)
    run(engine)
    assert [(each.sink.token_ids, each.sink.reason) for each in together] == alone

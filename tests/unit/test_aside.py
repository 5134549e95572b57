"""Prompts that the model computes in its background, beside running streams."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import Listener, ScriptedModel, greedy_text, run

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.errors import OutOfMemory

STREAM, PROMPT = [1, 2, 3], [number % 23 for number in range(30)]


def greedy(num_tokens):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


def begun(num_stream=60, num_tokens=5):
    """A model, an engine, a stream on it and a prompt of which the first 20 tokens are under way beside it."""
    model = ScriptedModel(max_positions=100, background_tokens=20)
    engine, stream, prompt = Engine(model), Listener(), Request(PROMPT, greedy(num_tokens), Listener())
    engine.submit(Request(STREAM, greedy(num_stream), stream))
    while len(stream.token_ids) < 8:
        engine.step()
    engine.submit(prompt)
    while engine._scheduler.aside.share is None:
        engine.step()
    assert (prompt.num_computed, prompt.sink.token_ids) == (0, [])
    return model, engine, stream, prompt


def test_each_has_the_text_that_it_has_alone():
    model, engine, stream, prompt = begun()
    run(engine)
    assert stream.token_ids == greedy_text(model, STREAM, 60)
    assert prompt.sink.token_ids == greedy_text(model, PROMPT, 5)
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


def test_streams_get_a_token_in_every_step_and_the_prompt_gets_on():
    _, engine, stream, prompt = begun()
    seen = []
    while not prompt.sink.token_ids:
        before = len(stream.token_ids)
        engine.step()
        assert len(stream.token_ids) == before + 1
        seen.append(prompt.num_computed)
    assert sorted(seen) == seen and set(seen) == {0, 20, 30}, "first 20, then the rest"


def test_who_is_cancelled_gives_its_blocks_back_and_its_neighbours_go_on():
    model, engine, stream, prompt = begun()
    background = engine._scheduler.aside._background
    engine.cancel(prompt)
    engine.step()
    assert (prompt.sink.reason, prompt.blocks.length, engine._scheduler.aside.share) == ("cancelled", 0, None)
    with pytest.raises(AssertionError):
        background.go_on(1.0)  # it was closed
    run(engine)
    assert stream.token_ids == greedy_text(model, STREAM, 60)


def test_what_is_left_is_computed_at_once_when_the_streams_have_ended():
    model, engine, stream, prompt = begun(num_stream=10)
    while not stream.finishes:
        engine.step()
    num_forwards = model.num_forwards
    engine.step()
    engine.step()
    assert model.num_forwards - num_forwards <= 2 and prompt.num_computed == len(PROMPT)
    run(engine)
    assert prompt.sink.token_ids == greedy_text(model, PROMPT, 5)


def test_who_finds_no_memory_ends_alone():
    model = ScriptedModel(max_positions=100, background_tokens=20)

    def begin(batch):
        raise OutOfMemory("no room beside others")

    object.__setattr__(model.capabilities, "begin", begin)
    engine, stream, prompt = Engine(model), Listener(), Listener()
    engine.submit(Request(STREAM, greedy(20), stream))
    while len(stream.token_ids) < 8:
        engine.step()
    engine.submit(Request(PROMPT, greedy(5), prompt))
    run(engine)
    assert prompt.reason == "error" and isinstance(prompt.finishes[0].error, OutOfMemory)
    assert stream.token_ids == greedy_text(model, STREAM, 20)


class Odd:
    """A constraint: odd tokens only."""

    is_done = False

    def mask(self):
        return np.array([0xAAAAAAAA], np.uint32)

    def accept(self, token_id):
        assert token_id % 2


def test_a_constraint_holds_from_the_first_token_on():
    _, engine, _, prompt = begun()
    engine.cancel(prompt)
    held = Request(PROMPT, greedy(5), Listener(), constraint=Odd())
    engine.submit(held)
    run(engine)
    assert [token % 2 for token in held.sink.token_ids] == [1] * 5

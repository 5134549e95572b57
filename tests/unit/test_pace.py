"""Prompts do not hold up running streams: on a clock that the model's own steps move."""

from __future__ import annotations

import pytest
from scripted import Listener, ScriptedModel, greedy_text, run

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.pace import MAX_SLOWER, Pace
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request

DECODE_S, TOKEN_S = 0.031, 0.002  # a 2B model on two threads
TILE = 16


class Clock:
    """Seconds that pass in forwards alone: a step's own cost, and a cost for each token of a prompt."""

    def __init__(self, model, decode_s=DECODE_S, token_s=TOKEN_S):
        self.now = 0.0
        self._decode_s, self._token_s = decode_s, token_s
        model.before_forward = self._pass

    def __call__(self):
        return self.now

    def _pass(self, batch):
        counts = batch.starts[1:] - batch.starts[:-1]
        prompts = int(counts[counts > 1].sum())
        self.now += (self._decode_s if (counts == 1).any() else 0) + prompts * self._token_s


class Watch(Listener):
    """Notes when each token comes."""

    def __init__(self, clock):
        super().__init__()
        self.times, self._clock = [], clock

    def token(self, token_id, logprobs):
        self.times.append(self._clock.now)
        return super().token(token_id, logprobs)


def endless(num_tokens):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


def test_the_gap_between_tokens_is_bounded_while_a_long_prompt_enters():
    model = ScriptedModel(max_positions=4096, max_tokens=512)
    clock = Clock(model)
    engine, stream, newcomer = Engine(model, clock=clock), Watch(clock), Watch(clock)
    engine.submit(Request([1] * 700, endless(150), stream))
    while len(stream.times) < 4:
        engine.step()
    start = clock.now
    prompt = [number % 23 for number in range(3000)]
    engine.submit(Request(prompt, endless(1), newcomer))
    run(engine)
    gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
    assert 1.5 * DECODE_S < max(gaps) < 4 * DECODE_S
    # Of the 40 tokens that fit, 31 make whole tiles with the one that is decoded; real kernels do whole tiles for less.
    assert 0.65 * (newcomer.times[0] - start) < 3000 * TOKEN_S
    assert newcomer.token_ids == greedy_text(model, prompt, 1)


class Reader(Listener):
    """Is woken when the engine lets it, and notes how long its tokens had lain there."""

    def __init__(self, engine, clock):
        super().__init__()
        self.waits, self._engine, self._clock = [], engine, clock

    def token(self, token_id, logprobs):
        came = self._clock.now
        self._engine.wakeups.add(lambda: self.waits.append(self._clock.now - came))
        return super().token(token_id, logprobs)


@pytest.mark.parametrize("drafter", [None, LookupDrafter()])
@pytest.mark.parametrize(("decode_s", "most_s", "num_late"), [(0.031, 0.0, 0), (0.0004, 0.0004, 11)])
def test_readers_of_a_small_model_wait_a_millisecond_at_most_and_others_not_at_all(decode_s, most_s, num_late, drafter):
    model = ScriptedModel()
    clock = Clock(model, decode_s)
    engine = Engine(model, clock=clock, drafter=drafter)
    reader = Reader(engine, clock)
    engine.submit(Request([1, 2], endless(23), reader))
    run(engine)
    engine.wakeups.make()
    assert len(reader.waits) == 23 and max(reader.waits) == pytest.approx(most_s)
    assert sum(wait > 0 for wait in reader.waits) == num_late


@pytest.mark.parametrize(("decode_s", "token_s"), [(0.0004, 0.00002), (0.031, 0.002), (1.0, 0.5), (0.001, 1.0)])
def test_estimates_find_the_costs(decode_s, token_s):
    pace = Pace(16)
    assert pace.max_prompt_tokens(1) == TILE - 1
    for _ in range(40):
        pace.note(1, 0, decode_s)
        pace.note(0, 512, 512 * token_s)
    count = pace.max_prompt_tokens(1)
    assert (count + 1) % TILE == 0 and (count == TILE - 1 or decode_s + count * token_s < 4 * decode_s)
    assert decode_s + (count + TILE) * token_s > 0.99 * MAX_SLOWER * decode_s


@pytest.mark.parametrize("tile", [8, TILE])
@pytest.mark.parametrize("num_decoding", range(1, 40))
def test_steps_are_whole_tiles(num_decoding, tile):
    count = Pace(tile).max_prompt_tokens(num_decoding)
    assert (count + num_decoding) % tile == 0 and tile // 2 <= count < tile // 2 + tile


def test_a_step_that_was_held_up_changes_little():
    pace = Pace(16)
    pace.note(1, 0, DECODE_S)
    pace.note(0, 512, 512 * TOKEN_S)
    usual = pace.max_prompt_tokens(1)
    pace.note(1, 0, 60.0)
    assert pace.max_prompt_tokens(1) <= 2 * usual
    pace.note(0, 512, 60.0)
    assert pace.max_prompt_tokens(1) >= TILE // 2


def test_prompts_that_never_pause_are_measured_beside_the_decoding():
    pace = Pace(16)
    for _ in range(40):
        pace.note(1, TILE - 1, DECODE_S + (TILE - 1) * TOKEN_S)
    assert TILE // 2 <= pace.max_prompt_tokens(1) <= 4 * TILE


def test_few_streams_are_taken_to_be_quicker_than_many():
    pace = Pace(16)
    pace.note(8, 0, 8 * DECODE_S)
    pace.note(0, 512, 512 * TOKEN_S)
    assert pace.max_prompt_tokens(1) < pace.max_prompt_tokens(4) < pace.max_prompt_tokens(8)
    assert abs(pace.max_prompt_tokens(16) - pace.max_prompt_tokens(8)) < TILE

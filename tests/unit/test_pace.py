"""Prompts do not hold up running streams: on a clock that the model's own steps move."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Listener, ScriptedModel, greedy_text, run

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.pace import MAX_SLOWER, Pace
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.room import Chunk, Costs, TimedRoom
from bitnet_inference.engine.terms import Terms

DECODE_S, TOKEN_S, POSITION_S = 0.031, 0.002, 2e-6  # a 2B model on two threads
TILE = 16


class Clock:
    """Seconds that pass in forwards alone: a step's own, and for each token of a prompt its own and its attention's."""

    def __init__(self, model, decode_s=DECODE_S):
        self.now = 0.0
        self._decode_s = decode_s
        model.before_forward = self._pass

    def __call__(self):
        return self.now

    def _pass(self, batch):
        counts = batch.starts[1:] - batch.starts[:-1]
        positions = batch.positions[counts.repeat(counts) > 1]
        self.now += (
            (self._decode_s if (counts == 1).any() else 0) + len(positions) * TOKEN_S + positions.sum() * POSITION_S
        )


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


PROMPT = [number % 23 for number in range(3000)]


def entering(model, clock):
    """A stream that has begun, and a long prompt that has just come; and when it came."""
    engine, stream, newcomer = Engine(model, clock=clock), Watch(clock), Watch(clock)
    engine.submit(Request([1] * 700, endless(150), stream))
    while len(stream.times) < 4:
        engine.step()
    engine.submit(Request(PROMPT, endless(1), newcomer))
    return engine, stream, newcomer, clock.now


def test_the_gap_between_tokens_is_bounded_while_a_long_prompt_enters():
    model = ScriptedModel(max_positions=4096, max_tokens=512)
    engine, stream, newcomer, start = entering(model, Clock(model))
    run(engine)
    gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
    assert 1.5 * DECODE_S < max(gaps) < 4 * DECODE_S
    # Of 40 tokens that fit, 31 make whole tiles with the one that is decoded; real kernels do whole tiles for less.
    assert 0.65 * (newcomer.times[0] - start) < 3000 * (TOKEN_S + 1500 * POSITION_S)
    assert newcomer.token_ids == greedy_text(model, PROMPT, 1)


def test_prompts_beside_streams_take_the_time_that_these_leave():
    model = ScriptedModel(max_positions=4096, max_tokens=512, background_tokens=256)
    clock = Clock(model)
    left_s = 0.0

    def go_on(batch, seconds):
        """Computes for so long: a chunk takes its time alone, and none beside others."""
        nonlocal left_s
        left_s = left_s or len(batch.token_ids) * TOKEN_S + batch.positions.sum() * POSITION_S
        spent_s = min(left_s, seconds)
        clock.now, left_s = clock.now + spent_s, left_s - spent_s
        return not left_s

    model.go_on = go_on
    engine, stream, newcomer, start = entering(model, clock)
    urgent = Watch(clock)
    while len(stream.times) < 12:
        engine.step()
    engine.submit(Request([2] * 20, endless(1), urgent, terms=Terms(priority=1)))
    asked = clock.now
    run(engine)
    gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
    assert MAX_SLOWER * DECODE_S < max(gaps) < 4 * DECODE_S
    assert 0.65 * (newcomer.times[0] - start) < 3000 * (TOKEN_S + 1500 * POSITION_S)
    assert urgent.times[0] - asked < 4 * MAX_SLOWER * DECODE_S, "it waits for no chunk of a lower rank"
    assert newcomer.token_ids == greedy_text(model, PROMPT, 1)


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
@pytest.mark.parametrize("attention", [0.0002, 0.0005, 0.002])  # of a token's cost, for each position
def test_estimates_find_the_costs(decode_s, token_s, attention):
    pace, costs = Pace(TILE), Costs(token_s, token_s * attention)
    assert pace.room(512, 1).take(0, 512) == TILE - 1
    for _ in range(40):
        pace.note(1, [], decode_s)
        for position in range(0, 2048, 512):
            chunk = Chunk(position, 512)
            pace.note(0, [chunk], costs.of(512, chunk.num_attended))
    for position in (0, 1000, 3000):
        count = pace.room(512, 1).take(position, 512)
        enough_s = costs.of(count + 1 + TILE, Chunk(position, count + TILE).num_attended)
        fitting_s = costs.of(count, Chunk(position, count).num_attended)
        assert decode_s + enough_s > 0.95 * MAX_SLOWER * decode_s
        assert count == TILE // 2 or decode_s + fitting_s < 1.05 * MAX_SLOWER * decode_s


@pytest.mark.parametrize("tile", [8, TILE])
@pytest.mark.parametrize("num_decoding", range(1, 40))
def test_steps_are_whole_tiles_while_nothing_is_known(num_decoding, tile):
    count = Pace(tile).room(512, num_decoding).take(0, 512)
    assert (count + num_decoding) % tile == 0 and tile // 2 <= count < tile // 2 + tile


def test_a_step_that_was_held_up_changes_little():
    pace = Pace(TILE)
    pace.note(1, [], DECODE_S)
    pace.note(0, [Chunk(0, 512)], 512 * TOKEN_S)
    usual = pace.room(512, 1).take(0, 512)
    pace.note(1, [], 60.0)
    assert pace.room(512, 1).take(0, 512) <= 2 * usual
    pace.note(0, [Chunk(0, 512)], 60.0)
    assert pace.room(512, 1).take(0, 512) >= TILE // 2


@pytest.mark.parametrize("num_decoding", [1, 16, 200])
@pytest.mark.parametrize("known", [{}, {1: DECODE_S / 10}, {1: 20 * DECODE_S}, {16: DECODE_S / 20}])
def test_decoding_is_measured_alone_though_prompts_never_pause(num_decoding, known):
    pace = Pace(TILE)
    for number, seconds in known.items():
        for _ in range(3):
            pace.note(number, [], seconds)
    times_s = []
    for _ in range(200):
        room = pace.room(512, num_decoding)
        chunks = [Chunk(0, room.take(0, 512))] if room.is_left else []
        times_s.append(DECODE_S + sum(chunk.num_tokens for chunk in chunks) * TOKEN_S)
        pace.note(num_decoding, chunks, times_s[-1])
    assert times_s[-64:].count(DECODE_S) <= 2
    assert 2.5 * DECODE_S < max(times_s[-64:]) < 4 * DECODE_S


def test_prompts_wait_for_a_second_step_at_most():
    pace = Pace(TILE)
    counts = []
    for number, seconds in enumerate([0.1, 3.0] * 100, 1):  # as unlike as can be
        room = pace.room(512, number)
        counts.append(room.take(0, 512) if room.is_left else 0)
        pace.note(number, [Chunk(0, counts[-1])] if counts[-1] else [], seconds)
    assert all(one or other for one, other in pairwise(counts))


def test_few_streams_are_taken_to_be_quicker_than_many():
    pace = Pace(TILE)
    pace.note(8, [], 8 * DECODE_S)
    pace.note(0, [Chunk(0, 512)], 512 * TOKEN_S)
    one, four, eight, more = (pace.room(512, number).take(0, 512) for number in (1, 4, 8, 16))
    assert one < four < eight and abs(more - eight) < TILE


@dataclass
class SlowRoom:
    """What TimedRoom says, by trying all numbers of tokens."""

    num_decoding: int
    tile: int
    costs: Costs
    decode_s: float
    chunks: list[Chunk]

    def take(self, position, num_wanted, prompts_s):
        """How many tokens there are, where those of prompts may take so long."""
        fitting = [count for count in range(1, 513) if self.prompts_s(Chunk(position, count)) <= prompts_s]
        in_tiles = max((count for count in fitting if self.num_tokens(count) % self.tile == 0), default=0)
        in_part = max(fitting, default=0)
        is_better = self.speed(position, in_part) > self.speed(position, in_tiles)
        least = 1 if self.chunks else max(1, self.tile // 2)
        return min(num_wanted, max(least, in_part if is_better else in_tiles))

    def num_tokens(self, count):
        return self.num_decoding + sum(chunk.num_tokens for chunk in self.chunks) + count

    def prompts_s(self, chunk):
        chunks = [each for each in [*self.chunks, chunk] if each.num_tokens]
        whole = -(-self.num_tokens(chunk.num_tokens) // self.tile) * self.tile if chunks else self.num_decoding
        return self.costs.of(whole - self.num_decoding, sum(each.num_attended for each in chunks))

    def speed(self, position, count):
        num_prompt_tokens = self.num_tokens(count) - self.num_decoding
        return num_prompt_tokens / (self.decode_s + self.prompts_s(Chunk(position, count)))


@given(
    st.integers(1, 40),
    st.sampled_from([1, 4, 16]),
    st.floats(0.1, 2.0),
    st.floats(1e-5, 1e-2),
    st.floats(1.0, 300.0),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 200)), min_size=1, max_size=5),
)
def test_prompts_fill_tiles_or_a_part_of_one_where_that_makes_a_faster_step(
    num_decoding, tile, token_s, position_s, prompts_s, prompts
):
    costs, decode_s = Costs(token_s, position_s), 30.0
    room = TimedRoom(10_000, num_decoding, tile, costs, decode_s, decode_s + prompts_s)
    slow = SlowRoom(num_decoding, tile, costs, decode_s, [])
    for position, num_wanted in prompts:
        if not room.is_left:
            break
        count = room.take(position, num_wanted)
        assert count in [slow.take(position, num_wanted, prompts_s * factor) for factor in (1 - 1e-9, 1 + 1e-9)]
        assert count == num_wanted or not room.is_left
        slow.chunks.append(Chunk(position, count))

"""Texts longer than the context: what is kept, and that nothing but this decides the text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Listener, ScriptedModel, generate, run
from test_speculation import Clock

from bitnet_inference.engine.draft_model import ModelDrafter
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.speculative import Draft
from bitnet_inference.engine.window import NUM_SINKS, fit_prompt, room_for_answer
from bitnet_inference.errors import InvalidParams, OutOfMemory, PromptTooLong
from bitnet_inference.native import RowSampler, SamplingRule

VOCAB = 5
NO_BOS: frozenset[int] = frozenset()


def sliding(max_tokens, **options):
    return SamplingParams(**{"temperature": 0.0, "seed": 3, "max_tokens": max_tokens, "overflow": "sliding"} | options)


def truth(model, prompt, params, max_context, choice=0):
    """The text, token by token, without an engine: a full window becomes its first tokens and its recent half."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    options = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "bias_ids": [], "bias_values": [], "end_ids": []}
    rule = SamplingRule(VOCAB, temperature=params.temperature, **dict(zip(names, penalties, strict=True)), **options)
    window, text = [(token, True) for token in prompt], []  # tokens, and whether they are the prompt's
    while len(text) < params.max_tokens:
        if len(window) == max_context:
            window = window[:NUM_SINKS] + window[-(max_context // 2) :]
        tokens, num_prompt = np.array([token for token, _ in window], np.int32), sum(given for _, given in window)
        logits = model.logits_after(tokens.tolist())
        at = len(prompt) + len(text)
        text.append(RowSampler(VOCAB).sample(logits, rule, tokens, num_prompt, False, params.seed, choice, at, None))
        window.append((text[-1], False))
    return text


class Job(NamedTuple):
    """A prompt, how many choices of it, and when it comes."""

    prompt: list[int]
    params: SamplingParams
    num_choices: int
    start: int


@st.composite
def jobs(draw):
    options = draw(
        st.sampled_from(
            [{}, {"logprobs": 1}, {"repetition_penalty": 1.5}, {"frequency_penalty": 0.5, "presence_penalty": -0.5}]
        )
    )
    params = sliding(draw(st.integers(1, 90)), temperature=draw(st.sampled_from([0.0, 1.0])), **options)
    prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=15))
    return Job(prompt, params, draw(st.integers(1, 3)), draw(st.integers(0, 30)))


@settings(max_examples=60, deadline=None)
@given(
    all_jobs=st.lists(jobs(), min_size=1, max_size=4),
    who=st.sampled_from([None, "lookup", "model"]),
    max_context=st.integers(16, 27),
    num_spare=st.integers(0, 20),
    block_size=st.sampled_from([1, 4, 7]),
    max_tokens=st.integers(1, 30),
)
def test_the_text_depends_on_the_window_alone(all_jobs, who, max_context, num_spare, block_size, max_tokens):
    num_blocks = -(-max_context // block_size) + num_spare
    model = ScriptedModel(
        vocab_size=VOCAB, max_positions=max_context, num_blocks=num_blocks, block_size=block_size, max_tokens=max_tokens
    )
    small = ScriptedModel(vocab_size=VOCAB, max_positions=max_context, block_size=3)
    drafter = {None: None, "lookup": LookupDrafter(), "model": ModelDrafter(small, VOCAB, 20)}[who]
    engine, step, sinks = Engine(model, drafter=drafter, clock=Clock(model, 0.01)), 0, []
    while step <= 30 or engine.has_work:
        for job in (job for job in all_jobs if job.start == step):
            leader = None
            for choice in range(job.num_choices):
                sinks.append((job, choice, Listener()))
                request = Request(job.prompt, job.params, sinks[-1][2], choice=choice, leader=leader)
                engine.submit(request)
                leader = leader or request
        engine.step()
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert engine.num_free_blocks == num_blocks
    for job, choice, sink in sinks:
        assert sink.reason == "length", sink.finishes
        assert sink.token_ids == truth(model, job.prompt, job.params, max_context, choice)


def test_each_piece_is_that_of_a_fresh_request():
    def model():
        return ScriptedModel(vocab_size=VOCAB, max_positions=16)

    whole = generate(model(), [0, 1, 2], sliding(30))
    pieces, prompt = [], [0, 1, 2]
    while len(pieces) < 30:
        pieces += generate(model(), prompt, SamplingParams(temperature=0.0, max_tokens=16 - len(prompt))).token_ids
        text = [*prompt, *pieces][-8:]
        prompt = [*[0, 1, 2, *pieces][:NUM_SINKS], *text]
    assert whole.token_ids == pieces[:30]
    assert whole.usage.num_slides == 1 + (30 - 13 - 1) // 4


def test_a_text_that_slides_for_ever_lets_those_behind_it_have_their_turn():
    """Each window of it takes the room that they need; it goes to the end of its priority for the next one."""
    engine = Engine(ScriptedModel(vocab_size=VOCAB, max_positions=32, num_blocks=8))
    endless, others = Listener(), [Listener(), Listener()]
    engine.submit(Request([0, 1, 2], sliding(None), endless))
    for _ in range(25):  # until it has more than half
        engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for prompt, listener in zip(([1] * 20, [2]), others, strict=True):
        engine.submit(Request(prompt, params, listener))
    for _ in range(60):
        engine.step()
    assert [listener.reason for listener in others] == ["length"] * 2
    begun = len(endless.token_ids)
    for _ in range(60):
        engine.step()
    assert len(endless.token_ids) >= begun + 50 and not endless.finishes


def test_what_it_tells_of_its_use():
    sink = generate(ScriptedModel(max_positions=20), [1] * 9, sliding(100), num_dropped=7)
    usage = sink.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_dropped_tokens) == (9, 100, 7)
    assert (usage.num_slides, usage.num_context_tokens, usage.max_context) == (15, 19, 20)
    assert usage.context_fraction == 0.95
    short = generate(ScriptedModel(max_positions=20), [1] * 9, SamplingParams(max_tokens=3)).usage
    assert (short.num_slides, short.num_context_tokens, short.num_dropped_tokens) == (0, 12, 0)


class Everything:
    """A constraint that allows all tokens, and remembers those that it saw."""

    is_done = False

    def __init__(self):
        self.seen = []

    def mask(self):
        return np.full(1, (1 << VOCAB) - 1, np.uint32)

    def accept(self, token_id):
        self.seen.append(token_id)


def test_constraints_and_logprobs_go_on():
    constraint, model = Everything(), ScriptedModel(vocab_size=VOCAB, max_positions=16)
    sink = generate(model, [0], sliding(60, logprobs=0), constraint=constraint)
    assert constraint.seen == sink.token_ids == truth(model, [0], sliding(60), 16)
    assert len([entry.logprob for entry in sink.logprobs]) == 60


@pytest.mark.parametrize("stop_at", [15, 16, 17])
def test_a_text_may_end_where_it_would_slide(stop_at):
    model = ScriptedModel(max_positions=18)
    assert generate(model, [1, 2], sliding(None), listener=Listener(stop_at=stop_at)).reason == "stop"
    sink = generate(model, [1, 2], sliding(stop_at))
    assert sink.reason == "length" and sink.usage.num_slides == (stop_at > 16)


def test_minimum_lengths_count_the_whole_text():
    model = ScriptedModel(max_positions=16)
    model.change_logits = lambda history, logits: logits.__setitem__(9, 50)
    sink = generate(model, [1], sliding(None, min_tokens=77), eos_ids=[9])
    assert (sink.reason, len(sink.token_ids)) == ("stop", 77)


def test_a_text_without_end_stays_small():
    drafter, listener = LookupDrafter(), Listener(stop_at=3000)
    model = ScriptedModel(vocab_size=VOCAB, max_positions=16, num_blocks=6)
    engine = Engine(model, drafter=drafter, clock=Clock(model, 0.01))
    request = Request([0, 1, 2], sliding(None), listener)
    engine.submit(request)
    while engine.has_work:
        engine.step()
        index = drafter._indices.get(request)
        assert len(request.tokens._data) <= 32 and len(request.contents) <= 5
        assert len(request.blocks) <= 4 and (index is None or len(index._places) <= 32)
    assert len(listener.token_ids) == 3000 and request.position == 3003
    assert engine.num_free_blocks == 6 and len(engine._scheduler.pool._contents) <= 6


def test_what_was_computed_before_a_slide_is_not_taken_for_what_comes_after():
    """Others with the same beginning find the blocks of both windows, and get the text that they have alone."""
    model = ScriptedModel(vocab_size=VOCAB, max_positions=16)
    engine, first = Engine(model), Request([0, 1, 2], sliding(40), Listener())
    engine.submit(first)
    run(engine)
    for prompt in ([0, 1, 2, *first.sink.token_ids[:9]], first.tokens.view.tolist()[:14]):
        params, sink = SamplingParams(temperature=0.0, max_tokens=1), Listener()
        engine.submit(Request(prompt, params, sink))
        run(engine)
        assert sink.usage.num_cached_tokens >= 8
        assert sink.token_ids == generate(ScriptedModel(vocab_size=VOCAB), prompt, params).token_ids


class KnowsOne:
    """Knows the text of one choice."""

    costs_time = False

    def __init__(self, choice, text):
        self._choice, self._text = choice, text

    def draft(self, wanted):
        known = [self._text[each.num_output :] if each.choice == self._choice else [] for each, _ in wanted]
        return [Draft(text[:count]) for text, (_, count) in zip(known, wanted, strict=True)]

    def forget(self, request):
        pass


@pytest.mark.parametrize("ahead", [0, 1])
def test_choices_slide_one_before_the_other(ahead):
    model, params = ScriptedModel(vocab_size=VOCAB, max_positions=24, block_size=2), sliding(30, temperature=1.0)
    prompt = [0, 1, 2, 0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 1]  # a part of it is left in the window behind the first tokens
    texts = [truth(model, prompt, params, 24, choice) for choice in range(2)]
    engine = Engine(model, drafter=KnowsOne(ahead, texts[ahead]), clock=Clock(model, 0.0001))
    leader = Request(prompt, params, Listener())
    other = Request(prompt, params, Listener(), choice=1, leader=leader)
    requests, firsts = [leader, other], []
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        firsts += [each.choice for each in requests if each.past.num_slides and each.choice not in firsts]
        assert not other.waits_for_leader or not leader.past.num_slides
    assert firsts == [ahead, 1 - ahead]
    assert [request.sink.token_ids for request in requests] == texts


@pytest.mark.parametrize(
    ("overflow", "max_tokens", "kept"),
    [
        ("truncate_left", 5, [0, *range(26, 40)]),
        ("truncate_left", 99, [0, *range(26, 40)]),
        ("truncate_left", None, [0, *range(26, 40)]),
        ("truncate_left", 2, [0, *range(23, 40)]),
        ("truncate_left", 0, [0, *range(21, 40)]),
        ("sliding", 5, [0, 1, 2, 3, *range(29, 40)]),
        ("error", 5, range(40)),
        ("keep_system", 5, range(40)),
    ],
)
def test_a_prompt_gives_way(overflow, max_tokens, kept):
    params = SamplingParams(max_tokens=max_tokens, overflow=overflow)
    given = np.arange(40, dtype=np.int32)
    assert fit_prompt(given, params, 20, frozenset([0])).tolist() == list(kept)
    limit = 20 - room_for_answer(params, 20)
    assert fit_prompt(given[:limit], params, 20, frozenset([0])) is not None
    assert fit_prompt(given[:limit], params, 20, frozenset([0])).tolist() == list(range(limit))
    if overflow == "truncate_left":
        assert fit_prompt(given, params, 20, NO_BOS).tolist() == list(range(40 - limit, 40))


def test_contexts_of_any_size_have_room():
    for max_context in range(2, 40):
        for overflow in ("truncate_left", "sliding"):
            params = SamplingParams(max_tokens=None, overflow=overflow)
            kept = fit_prompt(np.zeros(50, np.int32), params, max_context, frozenset([0]))
            assert 1 <= len(kept) < max_context


def test_what_cannot_be():
    with pytest.raises(InvalidParams, match="overflow is 'slide': give one of error, truncate_left, keep_system"):
        SamplingParams(overflow="slide")
    with pytest.raises(InvalidParams, match="a context of 16 tokens, here are 15"):
        generate(ScriptedModel(max_positions=15), [1], sliding(3))
    with pytest.raises(PromptTooLong):
        generate(ScriptedModel(max_positions=16), [1] * 16, sliding(3))
    with pytest.raises(OutOfMemory):
        generate(ScriptedModel(num_blocks=4), [1] * 16, sliding(3))

"""Beam search in the engine, against a plain one that sees the whole vocabulary and shares nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from scripted import Listener, ScriptedModel, greedy_text, run

from bitnet_inference.engine.beam import BeamParams, BeamSearch
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Request
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import InvalidParams, PromptTooLong

PROMPT = [number % 23 for number in range(1, 11)]
Text = tuple[list[int], float, int | None]  # tokens, score, end token


class Sum:
    """Finds a stop string in every text whose tokens make up a multiple of `divisor`."""

    def __init__(self, divisor: int, total: int = 0) -> None:
        self.divisor, self.total = divisor, total
        self.stopped = None if total % divisor or not total else "found"

    def after(self, token_id: int) -> Sum:
        return Sum(self.divisor, self.total + token_id)


def truth(
    model: ScriptedModel,
    prompt: list[int],
    params: BeamParams,
    ends: Sequence[int] = (),
    stops: Callable[[list[int]], bool] = lambda text: False,
) -> list[Text]:
    """A beam search in the plainest words, over all tokens of all beams. Stopped texts have an end token of -1."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
    room = model.config.max_positions - len(prompt)
    max_length = min(room, params.max_tokens or room)
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[Text] = []
    for length in range(1, max_length + 1):
        every = []
        for (total, text), token in product(live, range(model.config.vocab_size)):
            if not (token in ends and length <= params.min_tokens):
                logprob = log_softmax(model.logits_after([*prompt, *text]))[token]
                logprob *= params.repetition_penalty if token in {*prompt, *text} else 1.0
                every.append((total + logprob, [*text, token]))
        every.sort(key=lambda item: -item[0])
        every = every[: max(2, len(ends) + 1) * params.num_beams]
        for total, text in every[: params.num_beams]:
            score = total / length**params.length_penalty
            if text[-1] in ends:
                done.append((text[:-1], score, text[-1]))
            elif stops(text):
                done.append((text, score, -1))
            elif length == max_length:
                done.append((text, score, None))
        done = sorted(done, key=lambda item: -item[1])[: params.num_beams]
        live = [(total, text) for total, text in every if text[-1] not in ends and not stops(text)]
        live = live[: params.num_beams]
        if not live:
            break
        if len(done) == params.num_beams:
            far = params.early_stopping == "never" and params.length_penalty > 0
            hope = live[0][0] / (max_length if far else length) ** params.length_penalty
            if params.early_stopping is True or hope <= done[-1][1]:
                break
    return done[: params.num_choices]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def search(engine: Engine, params: BeamParams, prompt: Sequence[int] = PROMPT, **options) -> Beams:
    """A submitted search, with a Listener a text."""
    beams = Beams(prompt, params, [Listener() for _ in range(params.num_choices)], **options)
    engine.submit(beams.head)
    return beams


def check(beams: Beams, expected: list[Text]) -> None:
    """Every owner has heard of its text, and of its end once."""
    assert len(beams._owners) == len(expected)
    for owner, found, (tokens, score, end_id) in zip(beams._owners, beams.best, expected, strict=True):
        assert owner.token_ids == tokens == found.token_ids
        told_id = None if end_id == -1 else end_id
        assert owner.reason == ("length" if end_id is None else "stop") and owner.finishes[0].token_id == told_id
        assert found.score == pytest.approx(score, rel=1e-6)
        assert owner.usage.num_output_tokens == len(tokens)
        assert owner.usage.num_context_tokens == owner.usage.num_prompt_tokens + len(tokens)


def texts(beams: Beams) -> list[list[int]]:
    return [text.token_ids for text in beams.best]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -1.5, 2.5])
@pytest.mark.parametrize("ends", [(), (3,), (3, 4, 5)])
def test_it_finds_what_a_plain_search_finds(early_stopping, length_penalty, ends):
    model = ScriptedModel(max_positions=20, eos_ids=ends)
    for num_beams, max_tokens in ((2, 7), (4, None), (5, 1)):
        options = {"early_stopping": early_stopping, "length_penalty": length_penalty, "max_tokens": max_tokens}
        params = BeamParams(num_beams=num_beams, num_choices=num_beams - 1, **options)
        engine = Engine(model)
        beams = search(engine, params, eos_ids=ends)
        run(engine)
        check(beams, truth(model, PROMPT, params, ends))
        assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 7},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.8, "min_tokens": 3},
        {"stop_token_ids": [7, 8], "ignore_eos": True},
    ],
)
def test_bans_and_penalties(options):
    model, params = ScriptedModel(), BeamParams(num_beams=4, num_choices=3, max_tokens=9, **options)
    engine = Engine(model)
    beams = search(engine, params, eos_ids=(10, 5, 99))  # the last is the tokenizer's, and no token of the model
    run(engine)
    check(beams, truth(model, PROMPT, params, (10, 5)))
    plain = BeamParams(num_beams=4, num_choices=3, max_tokens=9)
    assert texts(beams) != [text for text, *_ in truth(model, PROMPT, plain, (10, 5))], "the options matter here"


@pytest.mark.parametrize("divisor", [1, 2, 3, 5])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_stop_strings_end_texts_as_end_tokens_do(divisor, early_stopping):
    model, ends = ScriptedModel(max_positions=20), (3,)
    params = BeamParams(num_beams=4, num_choices=3, stop=["any"], early_stopping=early_stopping, max_tokens=8)
    engine = Engine(model)
    beams = search(engine, params, eos_ids=ends, reading=Sum(divisor))
    run(engine)
    stopped = truth(model, PROMPT, params, ends, lambda text: sum(text) > 0 and sum(text) % divisor == 0)
    check(beams, stopped)
    assert any(end_id == -1 for *_, end_id in stopped), "some are stopped"
    assert beams.head.finish.reason == ("length" if stopped[0][2] is None else "stop")
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


@pytest.mark.parametrize("max_sequences", [1, 2, 3, 8])
@pytest.mark.parametrize("num_blocks", [6, 8, 11, 1000])
@pytest.mark.parametrize("block_size", [1, 4])
def test_little_room_changes_nothing(max_sequences, num_blocks, block_size):
    """Fewer places than beams, and blocks for one or two of them."""
    num_blocks *= 4 // block_size
    model = ScriptedModel(num_blocks=num_blocks, block_size=block_size, max_sequences=max_sequences, max_positions=24)
    engine, params = Engine(model), BeamParams(num_beams=4, num_choices=4, max_tokens=14)
    found = [search(engine, params, prompt, eos_ids=(3,)) for prompt in (PROMPT, PROMPT[:6])]
    run(engine)
    for beams in found:
        check(beams, truth(model, beams.head.prompt.tolist(), params, (3,)))
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


def test_neighbours_do_not_notice():
    model = ScriptedModel(num_blocks=14, max_tokens=16)
    engine, params = Engine(model), BeamParams(num_beams=3, max_tokens=12)
    listeners = []
    found = []
    for number in range(4):
        listeners.append(Listener())
        greedy = SamplingParams(temperature=0.0, max_tokens=15)
        engine.submit(Request([number] * 9, greedy, listeners[-1], terms=Terms(priority=number % 2)))
        found.append(search(engine, params, [number] * 5, terms=Terms(priority=number // 2)))
        engine.step()
    run(engine)
    for number, (listener, beams) in enumerate(zip(listeners, found, strict=True)):
        assert listener.token_ids == greedy_text(model, [number] * 9, 15)
        check(beams, truth(model, [number] * 5, params))


@pytest.mark.parametrize("num_prompt", [1, 4, 7, 8, 9])
def test_what_beams_share_is_computed_once(num_prompt):
    model, params = ScriptedModel(), BeamParams(num_beams=4, max_tokens=12)
    engine = Engine(model)
    beams = search(engine, params, PROMPT[:num_prompt])
    most_held = 0
    while engine.has_work:
        engine.step()
        most_held = max(most_held, engine._scheduler.pool.num_blocks - engine.num_free_blocks)
    check(beams, truth(model, PROMPT[:num_prompt], params))
    assert model.num_tokens == num_prompt + 4 * 11, "the prompt, and a token a beam and step"
    assert most_held < 4 * -(-(num_prompt + 11) // 4), "the full blocks of the prompt are held once"


def test_the_end_of_one_is_the_end_of_all():
    model, now = ScriptedModel(), [0.0]
    engine, params = Engine(model, clock=lambda: now[0]), BeamParams(num_beams=4, num_choices=2, max_tokens=30)
    neighbour = Listener()
    engine.submit(Request([5] * 9, SamplingParams(temperature=0.0, max_tokens=25), neighbour))
    cancelled, late = search(engine, params), search(engine, params, [1, 2], terms=Terms(timeout_s=5.0))
    for _ in range(6):
        engine.step()
    engine.cancel(cancelled.head)
    now[0] = 6.0
    engine.step()
    engine.step()
    assert [owner.reason for owner in (*cancelled._owners, *late._owners)] == ["cancelled"] * 2 + ["timeout"] * 2
    assert engine._scheduler.all_requests() == [neighbour_request(engine)]
    run(engine)
    assert neighbour.token_ids == greedy_text(model, [5] * 9, 25)
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


def neighbour_request(engine: Engine) -> Request:
    (request,) = (each for each in engine._scheduler.all_requests() if each.search is None)
    return request


def test_an_error_of_one_beam_ends_the_search_alone():
    model = ScriptedModel()

    def spoil(history, logits):
        if len(history) == 15 and history[0] == PROMPT[0] and logits[0] > 0:
            logits[:] = np.nan

    model.change_logits = spoil
    engine, params = Engine(model), BeamParams(num_beams=6, num_choices=2, max_tokens=20)
    broken, fine = search(engine, params), search(engine, params, [4, 4])
    run(engine)
    assert [str(owner.finishes[0].error)[:40] for owner in broken._owners] == [
        "the model's logits hold NaN or infinity "
    ] * 2
    check(fine, truth(model, [4, 4], params))
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


def test_an_owner_that_falls_over_ends_alone():
    engine, params = Engine(ScriptedModel()), BeamParams(num_beams=3, num_choices=3, max_tokens=6)
    owners = [Listener(), Listener(fail_at=2), Listener()]
    engine.submit(Beams(PROMPT, params, owners).head)
    run(engine)
    assert [owner.reason for owner in owners] == ["length", "error", "length"]


def test_all_are_told_when_the_engine_stops():
    engine = Engine(ScriptedModel())
    beams = search(engine, BeamParams(num_beams=3, num_choices=2))
    engine.step()
    engine.step()
    engine.end_all(Finish("error", error=MemoryError()))
    assert [owner.reason for owner in beams._owners] == ["error", "error"]
    assert not engine.has_work and engine.num_free_blocks == engine._scheduler.pool.num_blocks


def test_where_tokens_lack_there_are_fewer_texts():
    """All but three tokens have no probability at all."""
    model = ScriptedModel()
    model.change_logits = lambda history, logits: logits[3:].fill(-np.inf)
    engine, params = Engine(model), BeamParams(num_beams=8, num_choices=8, max_tokens=1)
    beams = search(engine, params)
    run(engine)
    assert len(beams.best) == 3
    assert [owner.reason for owner in beams._owners] == ["length"] * 3 + ["error"] * 5
    params = BeamParams(num_beams=8, num_choices=8, max_tokens=5)
    engine = Engine(model)
    beams = search(engine, params)
    run(engine)
    check(beams, truth(model, PROMPT, params))


@pytest.mark.parametrize("num_beams", [2, 3])
def test_beams_are_left_where_nearly_all_likely_tokens_end(num_beams):
    model, ends = ScriptedModel(vocab_size=120), tuple(range(30))
    model.change_logits = lambda history, logits: np.add(logits[:30], 5, out=logits[:30])
    engine, options = Engine(model), {"length_penalty": 3.0, "early_stopping": "never", "max_tokens": 6}
    params = BeamParams(num_beams=num_beams, num_choices=2, **options)
    beams = search(engine, params, eos_ids=ends)
    run(engine)
    check(beams, truth(model, PROMPT, params, ends))
    assert max(map(len, texts(beams))) > 1


def test_a_beam_that_goes_on_forgets_whom_it_has_followed():
    first, second = (Request(PROMPT, SamplingParams(), Listener()) for _ in range(2))
    second.follow(first, len(PROMPT), 5)
    assert second.leader is first and second.tokens.view.tolist() == [*PROMPT, 5]
    second.follow(second, len(PROMPT) + 1, 6)
    assert second.leader is None and second.tokens.view.tolist() == [*PROMPT, 5, 6], "who may be another text by now"


def test_where_nothing_is_left_it_says_so():
    model = ScriptedModel()
    model.change_logits = lambda history, logits: logits[3:].fill(-np.inf)
    engine = Engine(model)
    beams = search(engine, BeamParams(num_beams=4, min_tokens=2, stop_token_ids=[0, 1, 2]))
    run(engine)
    assert "leave no token to choose from at position 10" in str(beams._owners[0].finishes[0].error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 1}, "num_beams is 1: give a whole number from 2 to 128"),
        ({"num_beams": 2.0}, "num_beams is 2.0"),
        ({"num_beams": 3, "num_choices": 4}, "num_choices is 4: give a whole number from 1 to 3"),
        ({"num_beams": 3, "length_penalty": float("nan")}, "length_penalty is nan"),
        ({"num_beams": 3, "early_stopping": "always"}, 'give False, True or "never"'),
        ({"num_beams": 3, "max_tokens": 0}, "max_tokens is 0"),
        ({"num_beams": 3, "min_tokens": -1}, "min_tokens is -1"),
    ],
)
def test_what_is_impossible_is_refused(options, message):
    with pytest.raises(InvalidParams, match=message.replace("(", r"\(")):
        BeamParams(**options)


def test_numbers_of_numpy_do_not_overflow():
    params = BeamParams(num_beams=np.int8(100), num_choices=np.int8(2))
    assert BeamSearch(params, frozenset([1]), 5).num_candidates == 200


def test_what_does_not_fit_is_refused():
    engine = Engine(ScriptedModel(vocab_size=7))
    with pytest.raises(InvalidParams, match="4 beams need 8 candidates a step, the vocabulary has 7"):
        search(engine, BeamParams(num_beams=4), [1])
    with pytest.raises(InvalidParams, match=r"2 beams need 10 candidates .* or give fewer stop_token_ids$"):
        search(engine, BeamParams(num_beams=2, stop_token_ids=[1, 2, 3, 4]), [1])
    with pytest.raises(InvalidParams, match="stop_token_ids: token 7"):
        search(engine, BeamParams(num_beams=2, stop_token_ids=[7]), [1])
    with pytest.raises(PromptTooLong):
        search(engine, BeamParams(num_beams=2), [1] * 64)
    assert not engine.has_work

"""Who reads a prompt gets the rows that it wants, each once, in order, and what comes before may be cached."""

from __future__ import annotations

import numpy as np
import pytest
from scripted import Listener, ScriptedModel, generate, greedy_text, run

from bitnet_inference.engine import prompt_rows
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import Request
from bitnet_inference.errors import EngineError, InvalidParams

PROMPT = [number % 23 for number in range(18)]  # four blocks of four, and two tokens
ALONE = SamplingParams(max_tokens=0)


class Notes:
    """What a reader hears."""

    def __init__(self, positions, kind="logits"):
        self.sizes, self.positions, self.rows = [], [], []
        self.reader = PromptReader(self._read, positions, kind)

    def _read(self, first, rows):
        self.sizes.append(len(rows))
        self.positions += range(first, first + len(rows))
        self.rows += rows.tolist()


def ask(engine, prompt, notes, params=ALONE):
    listener = Listener()
    engine.submit(Request(prompt, params, listener, reader=notes.reader))
    run(engine)
    assert notes.positions == list(notes.reader.positions)
    width = None if notes.reader.kind == "logits" else engine._model.config.hidden_size
    assert notes.rows == [engine._model.logits_after(prompt[: at + 1])[:width].tolist() for at in notes.positions]
    return listener.usage.num_cached_tokens


@pytest.mark.parametrize("max_tokens", [1, 3, 64])
@pytest.mark.parametrize("kind", ["logits", "hidden"])
@pytest.mark.parametrize("positions", [range(18), range(5, 11), range(17, 18), range(18, 18), range(0)])
def test_any_positions(max_tokens, kind, positions):
    engine = Engine(ScriptedModel(max_tokens=max_tokens))
    assert ask(engine, PROMPT, Notes(positions, kind)) == 0
    if positions and max_tokens == 64:
        assert engine._model.num_full == (kind == "logits")


def test_what_comes_before_is_taken_from_the_cache():
    engine = Engine(ScriptedModel())
    for start, cached in ((0, 0), (3, 3), (4, 4), (11, 11), (17, 17), (18, 17)):
        assert ask(engine, PROMPT, Notes(range(start, 18))) == cached
    assert ask(engine, PROMPT, Notes(range(6, 7))) == 6
    assert ask(engine, PROMPT, Notes(range(0))) == 17


def test_choices_of_one_prompt_share_what_nobody_reads():
    model = ScriptedModel()
    engine, notes, leader = Engine(model), [Notes(range(10, 18)) for _ in range(3)], None
    listeners = [Listener() for _ in notes]
    for choice, (each, listener) in enumerate(zip(notes, listeners, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=9)
        request = Request(PROMPT, params, listener, choice=choice, reader=each.reader, leader=leader)
        engine.submit(request)
        leader = leader or request
    run(engine)
    assert [listener.usage.num_cached_tokens for listener in listeners] == [0, 10, 10]
    assert all(listener.token_ids == greedy_text(model, PROMPT, 9) for listener in listeners)
    assert notes[0].rows == notes[1].rows == notes[2].rows and len(notes[0].rows) == 8


def test_after_preemption_only_what_is_missing_is_computed_and_read():
    model = ScriptedModel(num_blocks=6, block_size=4)
    engine, notes = Engine(model), [Notes(range(9)) for _ in range(2)]
    for first, each in enumerate(notes):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        engine.submit(Request([first] * 9, params, Listener(), reader=each.reader))
    run(engine)
    assert [each.positions for each in notes] == [list(range(9))] * 2
    assert 2 * 16 < model.num_tokens < 2 * 16 + 12, "its own blocks were found again"


def test_the_head_is_read_once_for_all_requests_of_a_step():
    engine, notes = Engine(ScriptedModel()), [Notes(range(first, 6)) for first in range(5)]
    for each in notes:
        engine.submit(Request(PROMPT[:6], ALONE, Listener(), reader=each.reader))
    engine.step()
    assert engine._model.num_full == 1 and [each.sizes for each in notes] == [[6], [5], [4], [3], [2]]


def test_memory_for_logits_is_bounded(monkeypatch):
    monkeypatch.setattr(prompt_rows, "MAX_LOGITS_BYTES", 4 * 23 * 4)
    engine, notes = Engine(ScriptedModel()), [Notes(range(6)), Notes(range(3, 8))]
    for each in notes:
        engine.submit(Request(PROMPT[:8], ALONE, Listener(), reader=each.reader))
    run(engine)
    assert [each.sizes for each in notes] == [[4, 2], [2, 3]]


def test_a_reader_that_fails_is_not_called_again_and_alone(monkeypatch):
    monkeypatch.setattr(prompt_rows, "MAX_LOGITS_BYTES", 4 * 23 * 4)
    calls, notes, listeners = [], Notes(range(8)), [Listener(), Listener()]

    def fall_over(first, rows):
        calls.append(first)
        raise RuntimeError("no")

    engine = Engine(ScriptedModel())
    engine.submit(Request(PROMPT[:8], ALONE, listeners[0], reader=PromptReader(fall_over, range(8))))
    engine.submit(Request(PROMPT[:8], ALONE, listeners[1], reader=notes.reader))
    run(engine)
    assert calls == [0] and notes.positions == list(range(8))
    assert [listener.reason for listener in listeners] == ["error", "length"]


class TestPromptLogprobs:
    def exact(self, model, prompt):
        logits = np.stack([model.logits_after(prompt[: at + 1]) for at in range(len(prompt))]).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    @pytest.mark.parametrize("start", [0, 1, 2, 17])
    def test_of_every_token_from_a_position_on(self, start):
        model = ScriptedModel(max_tokens=5)
        params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, prompt_logprobs_from=start)
        request = Request(PROMPT, params, listener := Listener())
        engine = Engine(model)
        engine.submit(request)
        run(engine)
        assert listener.token_ids == greedy_text(model, PROMPT, 3)
        found, exact = request.prompt_logprobs, self.exact(model, PROMPT)
        assert len(found) == len(PROMPT) - start
        if start == 0:
            assert found.pop(0) is None
        for position, entry in enumerate(found, max(start, 1)):
            row = exact[position - 1]
            assert entry.logprob == pytest.approx(row[PROMPT[position]], abs=1e-6)
            assert [i for i, _ in entry.top] == np.argsort(-row, kind="stable")[:2].tolist()
            assert [x for _, x in entry.top] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-6)

    @pytest.mark.parametrize("start", [0, 3, 17])
    def test_choices_have_them_from_the_first(self, start):
        model = ScriptedModel(max_tokens=5)
        engine, requests = Engine(model), []
        options = {"temperature": 0.0, "max_tokens": 3, "prompt_logprobs_from": start}
        for choice, num_top in enumerate((2, 2, 2, 1)):  # the last wants others
            leader = requests[0] if requests else None
            params = SamplingParams(prompt_logprobs=num_top, **options)
            requests.append(Request(PROMPT, params, Listener(), choice=choice, leader=leader))
            engine.submit(requests[-1])
        run(engine)
        first, second, third, other = (request.prompt_logprobs for request in requests)
        assert first == second == third and first is not second and len(other) == len(first) == len(PROMPT) - start
        assert [request.usage().num_cached_tokens for request in requests] == [0, 17, 17, max(start - 1, 0)]
        assert all(request.sink.token_ids == greedy_text(model, PROMPT, 3) for request in requests)

    def test_choices_whose_first_has_gone_compute_their_own(self):
        model = ScriptedModel(max_tokens=5)
        engine, params = Engine(model), SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0)
        gone = Request(PROMPT, params, Listener())
        left = Request(PROMPT, params, Listener(), choice=1, leader=gone)
        engine.submit(gone)
        engine.submit(left)
        engine.step()
        engine.cancel(gone)
        run(engine)
        assert len(gone.prompt_logprobs) < len(left.prompt_logprobs) == len(PROMPT)
        assert [entry.logprob for entry in left.prompt_logprobs[1:]] == pytest.approx(
            [row[token] for row, token in zip(self.exact(model, PROMPT), PROMPT[1:], strict=False)], abs=1e-6
        )

    def test_the_last_row_is_not_needed(self):
        model = ScriptedModel()
        generate(model, PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_from=16))
        assert model.full_rows == [15, 16]

    def test_a_position_behind_the_prompt_is_refused(self):
        with pytest.raises(InvalidParams, match="scores are wanted from token 18 on, the prompt has 18 tokens"):
            Request(PROMPT, SamplingParams(prompt_logprobs=0, prompt_logprobs_from=18), Listener())

    def test_broken_logits_end_the_request_alone(self):
        model, listeners = ScriptedModel(), [Listener(), Listener()]

        def fail(history, logits):
            if history == [1, 2]:
                logits[:] = np.nan

        model.change_logits = fail
        engine = Engine(model)
        for prompt, listener in zip(([1, 2, 3], [1, 3, 2]), listeners, strict=True):
            engine.submit(Request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0), listener))
        run(engine)
        assert [listener.reason for listener in listeners] == ["error", "length"]
        assert isinstance(error := listeners[0].finishes[0].error, EngineError) and "at position 2" in str(error)

"""A device that fails while it computes: requests end with its error, or another model goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted import Listener, ScriptedModel, check_events, generate, greedy_text, run

from bitnet_inference import LLM, Counts, SamplingParams, generate_file
from bitnet_inference.backends import load_fallback, load_model
from bitnet_inference.backends.cpu import CpuModel
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import Event, Replaced
from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import Request
from bitnet_inference.errors import BackendError, InvalidParams, KernelError, OutOfMemory
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model
from bitnet_inference.model_folder import find_model, load_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
SEEDED = SamplingParams(temperature=1.0, seed=4, max_tokens=10, logprobs=2)
LOST = KernelError("the device is lost")


def lose(model: ScriptedModel, num_forwards: int) -> ScriptedModel:
    """The model, whose device fails after so many steps, for good."""

    def fail(batch: Batch) -> None:
        if model.num_forwards >= num_forwards:
            raise LOST

    model.before_forward = fail
    return model


def test_readers_are_woken_before_another_model_is_fetched() -> None:
    ticks, woken, asleep = count(), [], []

    class Reader(Listener):
        def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
            engine.wakeups.add(lambda: woken.append(token_id))
            return super().token(token_id, logprobs)

    def replace(error: BackendError) -> Model:
        asleep.extend(reader.token_ids[len(woken) :])
        return ScriptedModel()

    engine = Engine(lose(ScriptedModel(), 4), fallback=replace, clock=lambda: 1e-5 * next(ticks))
    reader = Reader()
    engine.submit(Request([1], GREEDY, reader))
    run(engine)
    assert woken and asleep == []


def run_all(engine: Engine, wanted: Sequence[tuple[list[int], SamplingParams]]) -> tuple[list[Request], list[Listener]]:
    listeners = [Listener() for _ in wanted]
    requests = [Request(*each, listener) for each, listener in zip(wanted, listeners, strict=True)]
    for request in requests:
        engine.submit(request)
    run(engine)
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks
    return requests, listeners


def test_a_request_that_comes_while_a_smaller_model_takes_over_ends_or_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lose(ScriptedModel(), 1), fallback=lambda error: ScriptedModel(max_positions=8))
    queue, late = engine._scheduler.submit, [Request(list(range(1, 1 + n)), GREEDY, Listener()) for n in (20, 2)]

    def wait(request: Request) -> None:  # between the check and the queue
        monkeypatch.setattr(engine._scheduler, "submit", queue)
        run(engine)
        queue(request)

    engine.submit(Request([1], GREEDY, Listener()))
    monkeypatch.setattr(engine._scheduler, "submit", wait)
    for request in late:
        engine.submit(request)
    run(engine)
    assert [request.sink.reason for request in late] == ["error", "length"]
    assert late[0].finish is not None and late[0].finish.error is LOST


def test_without_another_model_every_request_ends_once_with_the_error() -> None:
    model = lose(ScriptedModel(max_sequences=2), 3)
    _, listeners = run_all(Engine(model), [([1], GREEDY), ([2], SEEDED), ([3], GREEDY)])
    assert [listener.reason for listener in listeners] == ["error"] * 3
    assert all(listener.finishes[0].error is LOST for listener in listeners)
    assert [len(listener.token_ids) for listener in listeners] == [3, 3, 0]


@pytest.mark.parametrize("fallback", [None, lambda error: lose(ScriptedModel(), 0)])
def test_a_lost_model_takes_no_more_requests(fallback: Callable[[BackendError], Model] | None) -> None:
    model = lose(ScriptedModel(), 1)
    engine, listener = Engine(model, fallback=fallback), Listener()
    run_all(engine, [([1], GREEDY)])
    num_forwards = model.num_forwards
    with pytest.raises(BackendError, match="the model has failed: the device is lost"):
        engine.submit(Request([2], GREEDY, listener))
    assert engine.is_lost and not engine.has_work and not listener.finishes
    assert model.num_forwards == num_forwards, "it is asked no more"


def test_an_llm_that_shall_not_fall_back_is_not_open_once_its_device_is_lost() -> None:
    checkpoint = open_checkpoint(PATH)
    model = Failing(load_model(checkpoint, EngineConfig(device="cpu", threads=1)), 1)
    with LLM(cast(Model, model), load_tokenizer(checkpoint)) as llm:
        with pytest.raises(KernelError, match="the device is lost"):
            llm.generate("The fox", STORY)
        assert not llm.is_open
        with pytest.raises(BackendError, match="the model has failed: the device is lost"):
            llm.stream("The fox", STORY)


@pytest.mark.parametrize("num_forwards", [0, 1, 4])
@pytest.mark.parametrize("block_size", [3, 8])
def test_another_model_goes_on_with_the_same_text(num_forwards: int, block_size: int) -> None:
    wanted = [([1, 2, 3, 4, 5, 6], GREEDY), ([2], SEEDED), ([3], SEEDED), ([1, 2, 3, 4, 5, 6], SEEDED)]
    alone = [generate(ScriptedModel(), *each) for each in wanted]
    heard: list[Event] = []
    counts, other, errors = Counts(), ScriptedModel(block_size=block_size, max_sequences=2, max_tokens=5), []

    def listen(event: Event) -> None:
        heard.append(event)
        counts(event)

    def replace(error: BackendError) -> Model:
        errors.append(error)
        return other

    engine = Engine(lose(ScriptedModel(max_sequences=3), num_forwards), fallback=replace, listener=listen)
    requests, listeners = run_all(engine, wanted)
    for listener, expected in zip(listeners, alone, strict=True):
        assert (listener.token_ids, listener.reason) == (expected.token_ids, "length")
        assert listener.logprobs == expected.logprobs
    assert errors == [LOST]
    assert [event.error for event in heard if isinstance(event, Replaced)] == [LOST]
    check_events(heard, requests)
    assert counts.as_json()["total"]["device_failures"] == 1
    assert counts.as_json()["finished"] == {"length": 4}


def test_it_happens_once() -> None:
    engine = Engine(lose(ScriptedModel(), 1), fallback=lambda error: lose(ScriptedModel(), 2))
    _, (listener,) = run_all(engine, [([1], GREEDY)])
    assert listener.reason == "error" and listener.finishes[0].error is LOST
    assert listener.token_ids == greedy_text(ScriptedModel(), [1], 3)


def test_other_errors_are_no_reason() -> None:
    model = ScriptedModel()

    def fail(batch: Batch) -> None:
        raise OutOfMemory("a step finds no memory")

    model.before_forward = fail
    _, (listener,) = run_all(Engine(model, fallback=lambda error: ScriptedModel()), [([1], GREEDY)])
    assert isinstance(listener.finishes[0].error, OutOfMemory)


def test_where_there_is_no_other_after_all_the_first_error_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def replace(error: BackendError) -> Model:
        raise OutOfMemory("no memory for it")

    engine = Engine(lose(ScriptedModel(), 1), fallback=replace)
    _, listeners = run_all(engine, [([1], GREEDY), ([2], GREEDY)])
    assert [listener.finishes[0].error for listener in listeners] == [LOST, LOST]
    assert "no memory for it" in caplog.text and engine.is_lost


def test_an_other_without_room_for_a_cache_is_not_taken() -> None:
    engine = Engine(lose(ScriptedModel(), 1), fallback=lambda error: ScriptedModel(num_blocks=0, block_size=2))
    _, (listener,) = run_all(engine, [([1], GREEDY)])
    assert listener.finishes[0].error is LOST
    assert engine.max_context == 64 and engine._scheduler.block_size == engine._limits.block_size == 4


def test_readers_of_a_prompt_get_each_row_once() -> None:
    """The head fails in the middle of a prompt, behind the body, so that the rows of that step are lost."""
    prompt = list(range(1, 20))
    for num_rows in (0, 3, 6, 7, 12):
        got: list[int] = []

        def read(first: int, rows: Sequence[object], got: list[int] = got) -> None:
            got.extend(range(first, first + len(rows)))

        model, left = ScriptedModel(max_tokens=6), [num_rows]

        def fail(*_: object, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise LOST

        model.change_logits = fail
        engine = Engine(model, fallback=lambda error: ScriptedModel(max_tokens=4, block_size=2))
        listener = Listener()
        engine.submit(Request(prompt, GREEDY, listener, reader=PromptReader(read, range(2, len(prompt)))))
        run(engine)
        assert got == list(range(2, len(prompt)))
        assert listener.token_ids == greedy_text(ScriptedModel(), prompt, 10)


def test_what_does_not_fit_into_a_smaller_cache_ends_with_the_error() -> None:
    model = lose(ScriptedModel(), 2)
    engine = Engine(model, fallback=lambda error: ScriptedModel(num_blocks=4))
    assert engine.max_context == 64
    slides = SamplingParams(temperature=0.0, max_tokens=90, overflow="sliding")
    requests, listeners = run_all(engine, [([1] * 14, GREEDY), ([2] * 12, GREEDY), ([3], SEEDED), ([4], slides)])
    assert engine.max_context == 16
    assert [listener.reason for listener in listeners] == ["error", "length", "length", "error"]
    assert listeners[0].finishes[0].error is LOST
    assert len(listeners[1].token_ids) == 4 and len(listeners[2].token_ids) == 10
    assert {request.usage().max_context for request in requests} == {16}


def test_drafts_end_where_a_smaller_cache_does() -> None:
    def alternate(history: list[int], logits: NDArray[np.float32]) -> None:
        full = len(history) == 16  # and slides, before it is asked what comes next
        logits[7 if full else 2 if history[-1] == 4 else 4] = 9.0

    def scripted() -> ScriptedModel:
        model = ScriptedModel(num_blocks=4)
        model.change_logits = alternate
        return model

    slides, prompt = SamplingParams(temperature=0.0, max_tokens=90, overflow="sliding"), [2, 4, 2, 4, 2]
    lost, other = lose(ScriptedModel(), 2), scripted()
    drafter, clock = LookupDrafter(), lambda: 0.01 * (lost.num_forwards + other.num_forwards)
    engine = Engine(lost, fallback=lambda error: other, drafter=drafter, clock=clock)
    run_all(engine, [([1], GREEDY)])
    num_before = other.num_forwards
    _, (listener,) = run_all(engine, [(prompt, slides)])
    assert other.num_forwards < num_before + 60, "several tokens a step"
    assert listener.token_ids == generate(scripted(), prompt, slides).token_ids


PATH = find_model("default")
STORY = SamplingParams(temperature=0.9, seed=2, max_tokens=24, logprobs=1)


class Failing:
    """A model of a device that is lost after some steps."""

    def __init__(self, model: Model, num_steps: int) -> None:
        self._model, self._left = model, num_steps
        self.config, self.capabilities, self.is_closed = model.config, model.capabilities, False

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, batch: Batch) -> object:
        self._left -= 1
        if self._left < 0:
            raise LOST
        return self._model.forward(batch)

    def close(self) -> None:
        self.is_closed = True
        raise RuntimeError("nothing can be done with a lost device")


def test_an_llm_goes_on_and_says_so() -> None:
    checkpoint = open_checkpoint(PATH)
    config = EngineConfig(device="cpu", threads=1)
    with LLM.load(PATH, device="cpu", threads=1, max_cache_tokens=4096) as llm:
        expected = [llm.generate(prompt, STORY) for prompt in ("The fox", "The owl")]
        assert (llm.device, llm.failure) == ("cpu", "") and llm.why_there.startswith("asked for")
    failing = Failing(load_model(checkpoint, config), 7)
    tokenizer = load_tokenizer(checkpoint)
    fallback = lambda: load_model(checkpoint, config)  # noqa: E731
    with LLM(cast(Model, failing), tokenizer, max_cache_tokens=4096, fallback=fallback) as llm:
        num_bytes = llm.num_bytes
        for _ in range(2):  # it fails in the first round
            found = llm.generate(["The fox", "The owl"], STORY)
            assert [(each.token_ids, each.logprobs) for each in found] == [(e.token_ids, e.logprobs) for e in expected]
        assert llm.failure == "the device failed, so the model was loaded for the CPU: the device is lost"
        assert llm.notes == (llm.failure,) and llm.device == "cpu" and failing.is_closed
        assert llm.num_bytes == num_bytes


def test_an_llm_whose_device_is_lost_is_not_open_so_that_it_is_loaded_anew() -> None:
    def fail() -> Model:
        raise OutOfMemory("no memory for it")

    checkpoint = open_checkpoint(PATH)
    model = Failing(load_model(checkpoint, EngineConfig(device="cpu", threads=1)), 1)
    with LLM(cast(Model, model), load_tokenizer(checkpoint), fallback=fail) as llm:
        with pytest.raises(KernelError, match="the device is lost"):
            llm.generate("The fox", STORY)
        assert not llm.is_open


def test_a_file_of_prompts_ends_where_the_device_is_lost(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "The fox"}\n' * 3)
    checkpoint = open_checkpoint(PATH)
    model = Failing(load_model(checkpoint, EngineConfig(device="cpu", threads=1)), 1)
    with LLM(cast(Model, model), load_tokenizer(checkpoint)) as llm, pytest.raises(BackendError, match="is lost"):
        generate_file(llm, prompts, answers, STORY)
    assert not answers.exists(), "no line has an error that is of all of them"


def test_of_a_model_whose_cache_finds_no_room_it_is_not_said_that_it_goes_on() -> None:
    checkpoint = open_checkpoint(PATH)
    model = Failing(load_model(checkpoint, EngineConfig(device="cpu", threads=1)), 1)
    other = ScriptedModel(num_blocks=0)
    with LLM(cast(Model, model), load_tokenizer(checkpoint), max_cache_tokens=256, fallback=lambda: other) as llm:
        with pytest.raises(KernelError, match="the device is lost"):
            llm.generate("The fox", STORY)
        assert not llm.is_open
        assert llm.failure == "the device failed, so the model was loaded for the CPU: the device is lost"


def test_who_shall_fall_back_on_what() -> None:
    checkpoint = open_checkpoint(PATH)
    assert load_fallback(checkpoint, EngineConfig(fallback="cpu", isa="generic").resolve()) is None, "it is the CPU"
    assert load_fallback(checkpoint, EngineConfig(device="mlx")) is None
    load = load_fallback(checkpoint, EngineConfig(device="cuda", gpu_layers=2, fallback="cpu", threads=1))
    assert load is not None
    other = load()
    assert isinstance(other, CpuModel)
    other.close()
    for device in ("cpu", "reference", "onnx", "coreml"):
        with pytest.raises(InvalidParams, match=f'nothing stands in for "{device}"'):
            EngineConfig(device=device, fallback="cpu")
    with pytest.raises(InvalidParams, match="fallback is 'gpu'"):
        EngineConfig(fallback="gpu")
    with LLM.load(PATH, fallback="cpu", threads=1, max_cache_tokens=256) as llm:
        assert not llm.failure

"""What a listener of the engine hears."""

from __future__ import annotations

import logging

import pytest
from scripted import Listener, ScriptedModel, check_events, generate, run

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine import events
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import PHASES, Finished, Preempted, Queued, Scheduled, Stepped, Token
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Request
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.llm import LLM
from bitnet_inference.model.loader import fused, record
from bitnet_inference.model_folder import find_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


def kinds(heard):
    return [type(event).__name__ for event in heard]


def test_a_request_is_told_of_from_its_queue_to_its_end():
    heard, sink = [], Listener()
    engine = Engine(ScriptedModel(max_tokens=2), listener=heard.append)
    request = Request([1, 2, 3], GREEDY, sink)
    engine.submit(request)
    run(engine)
    assert kinds(heard) == [
        "Queued", "Scheduled", "Stepped", "Token", "Stepped", "Token", "Stepped", "Token", "Finished", "Stepped",
    ]  # fmt: skip
    check_events(heard, [request])
    queued, scheduled = heard[:2]
    assert (queued.num_prompt_tokens, scheduled.num_cached_tokens) == (3, 0)
    assert heard[-2].finish is sink.finishes[0] and heard[-2].usage is sink.usage


def test_a_step_tells_what_it_computed_and_left():
    heard = []
    engine = Engine(ScriptedModel(max_tokens=8, block_size=4, num_blocks=10), listener=heard.append)
    engine.submit(Request([1], GREEDY, Listener()))
    engine.step()
    engine.submit(Request([1, 2, 3, 4, 5, 6], GREEDY, Listener()))
    engine.step()
    first, second = (event for event in heard if isinstance(event, Stepped))
    assert (first.num_decoding, first.num_prompts, first.num_prompt_tokens, first.num_new_tokens) == (1, 0, 0, 1)
    assert (second.num_decoding, second.num_prompts, second.num_prompt_tokens, second.num_new_tokens) == (1, 1, 6, 2)
    assert (second.num_tokens, second.num_draft_tokens) == (7, 0)
    assert (second.num_waiting, second.num_running) == (0, 2)
    assert (second.num_blocks, second.num_free_blocks) == (10, engine.num_free_blocks) == (10, 7)
    assert tuple(second.seconds) == PHASES and all(seconds > 0 for seconds in second.seconds.values())
    assert second.plan_times == ()
    assert first.time + sum(first.seconds.values()) <= second.time


def test_who_waits_is_counted():
    heard = []
    engine = Engine(ScriptedModel(max_sequences=1), listener=heard.append)
    for _ in range(3):
        engine.submit(Request([1], GREEDY, Listener()))
    engine.step()
    assert (heard[-1].num_waiting, heard[-1].num_running) == (2, 1)


def test_a_preempted_request_is_told_of_and_scheduled_again():
    heard = []
    engine = Engine(ScriptedModel(num_blocks=4, block_size=4), listener=heard.append)
    requests = [Request([n, n, n], SamplingParams(temperature=0.0, max_tokens=8), Listener()) for n in (1, 2)]
    for request in requests:
        engine.submit(request)
    run(engine)
    check_events(heard, requests)
    later = [
        event for event in heard if event.__class__ in (Scheduled, Preempted) and event.request == requests[1].number
    ]
    assert kinds(later) == ["Scheduled", "Preempted", "Scheduled"]


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_who_is_dropped_is_told_of_once_and_counts_no_more(reason):
    heard, now = [], [0.0]
    engine = Engine(ScriptedModel(), clock=lambda: now[0], listener=heard.append)
    request = Request([1], SamplingParams(max_tokens=None), Listener(), terms=Terms(timeout_s=5.0))
    engine.submit(request)
    engine.step()
    if reason == "cancelled":
        engine.cancel(request)
    now[0] = 6.0
    engine.step()
    check_events(heard, [request])
    assert heard[-2].finish.reason == request.sink.reason == reason
    assert (heard[-1].num_running, heard[-1].num_tokens) == (0, 0)
    assert heard[-1].num_free_blocks == heard[-1].num_blocks


def test_requests_of_a_failed_step_and_of_a_stopped_engine_are_told_of():
    heard, model = [], ScriptedModel()
    engine = Engine(model, listener=heard.append)
    failing, waiting = Request([1], GREEDY, Listener()), Request([2], GREEDY, Listener())
    engine.submit(failing)
    model.before_forward = lambda batch: 1 / 0
    engine.step()
    assert kinds(heard) == ["Queued", "Scheduled", "Finished", "Stepped"]
    assert (heard[-1].num_running, heard[-1].seconds["sample"]) == (0, 0.0)
    engine.submit(waiting)
    engine.end_all(Finish("cancelled"))
    check_events(heard, [failing, waiting])


def test_the_listener_hears_of_the_end_before_the_sink():
    heard = []

    class Asking(Listener):
        def finish(self, finish, usage):
            super().finish(finish, usage)
            assert isinstance(heard[-1], Finished)

    engine = Engine(ScriptedModel(), listener=heard.append)
    engine.submit(Request([1], GREEDY, Asking()))
    run(engine)
    assert isinstance(heard[-2], Finished)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
@pytest.mark.parametrize("kind", [Queued, Scheduled, Token, Finished, Stepped])
def test_a_listener_that_raises_is_dropped_and_harms_nobody(kind, error, caplog):
    calls = []

    def fall_over(event):
        calls.append(event)
        if isinstance(event, kind):
            raise error("the listener fell over")

    model = ScriptedModel()
    engine = Engine(model, listener=fall_over)
    sinks = [Listener(), Listener()]
    for number, sink in enumerate(sinks):
        engine.submit(Request([number], GREEDY, sink))
    with caplog.at_level(logging.ERROR):
        run(engine)
    assert [sink.token_ids for sink in sinks] == [generate(model, [number], GREEDY).token_ids for number in range(2)]
    assert [sink.reason for sink in sinks] == ["length", "length"]
    assert [isinstance(event, kind) for event in calls].count(True) == 1, "it is called after it raised"
    assert len(caplog.records) == 1 and "listener of the engine" in caplog.text


def test_without_a_listener_nothing_is_made_or_timed(monkeypatch):
    for name in ("monotonic", "Queued", "Scheduled", "Token", "Preempted", "Finished", "Stepped"):
        monkeypatch.setattr(events, name, lambda *_, **__: pytest.fail("somebody listens"))
    assert generate(ScriptedModel(num_blocks=6), [1, 2, 3], GREEDY).reason == "length"


def test_every_request_has_a_number_of_its_own():
    numbers = [Request([1], GREEDY, Listener()).number for _ in range(3)]
    assert numbers == sorted(set(numbers))


def test_the_steps_of_the_plans_are_timed():
    path, heard = find_model("default"), []
    with LLM.load(threads=1) as llm:
        text = llm.generate("Once upon a time", GREEDY).text
    with LLM.load(threads=1, head="unscreened", drafts="none", listener=heard.append, profile=True) as llm:
        assert llm.generate("Once upon a time", GREEDY).text == text
    checkpoint = open_checkpoint(path)
    plans = fused(record(checkpoint.config), checkpoint)
    body = [step.verb for step in plans.body.steps]
    body.insert(len(body) - body[::-1].index("attend") - 1, "select")  # of the tokens that leave the last layer
    steps = [event for event in heard if isinstance(event, Stepped)]
    assert len(steps) == 3
    for step in steps:
        by_plan = {name: [time for time in step.plan_times if time.plan == name] for name in ("body", "head")}
        assert [time.verb for time in by_plan["body"]] == body
        assert [time.verb for time in by_plan["head"]] == [step.verb for step in plans.head.steps]
        assert len(step.plan_times) == len(body) + len(plans.head.steps)
        assert all(time.seconds >= 0 for time in step.plan_times)
        assert 0 < sum(time.seconds for time in by_plan["body"]) <= step.seconds["forward"]
        assert 0 < sum(time.seconds for time in by_plan["head"]) <= step.seconds["sample"]


@pytest.mark.parametrize("head, verb", [("exact", "screen"), ("int8", "rounded")])
def test_heads_that_are_no_plan_are_timed_too(head, verb):
    heard = []
    with LLM.load(head=head, threads=1, listener=heard.append, profile=True) as llm:
        llm.generate("Once", GREEDY)
    for step in (event for event in heard if isinstance(event, Stepped)):
        (time,) = (time for time in step.plan_times if time.plan == "head")
        assert time.verb == verb and 0 < time.seconds < step.seconds["sample"]


def test_nothing_is_timed_before_somebody_asks():
    model = load_model(open_checkpoint(find_model("default")), EngineConfig(threads=1))
    assert model._take_times() == ()
    model.close()


def test_a_profile_that_nobody_hears_or_that_cannot_be_made_is_refused():
    with pytest.raises(InvalidParams, match="there is none"):
        LLM.load(profile=True, progress=lambda *_: pytest.fail("it loads"))
    with pytest.raises(InvalidParams, match='choose "cpu"'):
        LLM.load(device="reference", profile=True, listener=print)

"""The engine's thread: nobody waits for ever, whatever happens. Events order everything; nothing sleeps."""

from __future__ import annotations

import os
import threading

import pytest
from scripted import Listener, ScriptedModel

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.worker import Worker
from bitnet_inference.errors import EngineError, InvalidParams, QueueFull, Stopped

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None)
LONG = 30  # seconds; a test that needs them has failed


class Waiter(Listener):
    """A Listener that another thread can wait for."""

    def __init__(self, **options):
        super().__init__(**options)
        self.began, self.ended = threading.Event(), threading.Event()

    def token(self, token_id, logprobs):
        self.began.set()
        return super().token(token_id, logprobs)

    def finish(self, finish, usage):
        super().finish(finish, usage)
        self.ended.set()


class Gate:
    """Holds the model before every forward until it is opened."""

    def __init__(self, model):
        self.reached, self._open = threading.Event(), threading.Event()
        model.before_forward = self._hold

    def open(self):
        self._open.set()

    def _hold(self, batch):
        self.reached.set()
        assert self._open.wait(LONG)


def alone(prompt):
    engine, listener = Engine(ScriptedModel()), Listener()
    engine.submit(Request(prompt, GREEDY, listener))
    while engine.has_work:
        engine.step()
    return listener.token_ids


def test_no_thread_is_left_where_its_start_is_interrupted(monkeypatch):
    started, start = [], threading.Thread.start

    def interrupted(thread):
        started.append(thread)
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(Engine(ScriptedModel()))
    (thread,) = started
    thread.join(LONG)
    assert not thread.is_alive()


def test_requests_from_many_threads():
    worker, waiters = Worker(Engine(ScriptedModel())), [Waiter() for _ in range(20)]

    def submit(first):
        for number in range(first, first + 5):
            worker.submit(Request([number], GREEDY, waiters[number]))

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 20, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worker.stop(drain=True)
    for number, waiter in enumerate(waiters):
        assert (waiter.reason, waiter.token_ids) == ("length", alone([number]))


def test_it_wakes_up_again():
    worker = Worker(Engine(ScriptedModel()))
    for number in range(3):
        waiter = Waiter()
        worker.submit(Request([number], GREEDY, waiter))
        assert waiter.ended.wait(LONG)
    worker.stop(drain=False)


def test_cancelling_a_running_request():
    model = ScriptedModel(max_positions=1 << 20, num_blocks=1 << 18)
    worker, waiter = Worker(Engine(model)), Waiter()
    request = Request([1], SamplingParams(max_tokens=None), waiter)
    worker.submit(request)
    assert waiter.began.wait(LONG)
    worker.cancel(request)
    assert waiter.ended.wait(LONG)
    assert waiter.reason == "cancelled"
    worker.cancel(request)
    worker.stop(drain=True)


def test_stopping_at_once_ends_everybody():
    model = ScriptedModel(max_sequences=1)
    gate, waiters = Gate(model), [Waiter() for _ in range(3)]
    worker = Worker(Engine(model))
    for waiter in waiters:
        worker.submit(Request([1], ENDLESS, waiter))
    assert gate.reached.wait(LONG)
    stopper = threading.Thread(target=worker.stop, kwargs={"drain": False})
    stopper.start()
    with worker._wake:
        assert worker._wake.wait_for(lambda: not worker.is_open, LONG)
    gate.open()
    stopper.join(LONG)
    assert [waiter.reason for waiter in waiters] == ["error"] * 3
    assert all(isinstance(waiter.finishes[0].error, Stopped) for waiter in waiters)


def test_draining_finishes_everybody_and_takes_nobody():
    model = ScriptedModel(max_sequences=1)
    gate, waiters = Gate(model), [Waiter() for _ in range(3)]
    worker = Worker(Engine(model))
    for waiter in waiters:
        worker.submit(Request([1], GREEDY, waiter))
    stopper = threading.Thread(target=worker.stop, kwargs={"drain": True})
    stopper.start()
    assert gate.reached.wait(LONG)
    gate.open()
    stopper.join(LONG)
    assert [waiter.reason for waiter in waiters] == ["length"] * 3
    assert not worker.is_open
    with pytest.raises(Stopped, match="load the model again"):
        worker.submit(Request([1], GREEDY, Waiter()))
    worker.stop(drain=False)


def test_draining_with_a_limit_tells_whether_all_have_ended():
    model = ScriptedModel()
    gate, waiter = Gate(model), Waiter()
    worker = Worker(Engine(model))
    worker.submit(Request([1], GREEDY, waiter))
    assert gate.reached.wait(LONG)
    assert not worker.drain(0)
    with pytest.raises(Stopped):
        worker.submit(Request([1], GREEDY, Waiter()))
    gate.open()
    assert worker.drain(LONG) and worker.drain()
    assert waiter.reason == "length"
    worker.stop(drain=False)


def test_stopping_from_a_sink_does_not_lock_up():
    class Stopper(Waiter):
        def token(self, token_id, logprobs):
            worker.stop(drain=False)
            return super().token(token_id, logprobs)

    worker, waiter = Worker(Engine(ScriptedModel())), Stopper()
    worker.submit(Request([1], GREEDY, waiter))
    assert waiter.ended.wait(LONG)
    assert (waiter.reason, len(waiter.token_ids)) == ("error", 1)
    worker.stop(drain=False)


@pytest.mark.parametrize("end", ["stop", "drain"])
def test_stopping_in_the_middle_of_submit_does_not_lock_up(end):
    """As a signal's handler does."""

    class Interrupted(Engine):
        def submit(self, request):
            worker.stop(drain=False) if end == "stop" else worker.drain()
            super().submit(request)

    worker, waiter = Worker(Interrupted(ScriptedModel())), Waiter()
    worker.submit(Request([1], GREEDY, waiter))
    assert waiter.ended.wait(LONG)
    assert waiter.reason == "error" and isinstance(waiter.finishes[0].error, Stopped)
    worker.stop(drain=False)


def test_refusals_reach_the_caller():
    model = ScriptedModel()
    gate = Gate(model)
    worker = Worker(Engine(model, max_waiting=1))
    with pytest.raises(InvalidParams):
        worker.submit(Request([99], GREEDY, Waiter()))
    first, second = Waiter(), Waiter()
    worker.submit(Request([1], GREEDY, first))
    assert gate.reached.wait(LONG)
    worker.submit(Request([1], GREEDY, second))
    with pytest.raises(QueueFull):
        worker.submit(Request([1], GREEDY, Waiter()))
    gate.open()
    worker.stop(drain=True)
    assert (first.reason, second.reason) == ("length", "length")


def test_a_failing_model_does_not_stop_the_worker():
    model = ScriptedModel()
    worker, broken, sound = Worker(Engine(model)), Waiter(), Waiter()

    def fail(batch):
        raise RuntimeError("bad weather")

    model.before_forward = fail
    worker.submit(Request([1], GREEDY, broken))
    assert broken.ended.wait(LONG)
    model.before_forward = lambda batch: None
    worker.submit(Request([1], GREEDY, sound))
    worker.stop(drain=True)
    assert (broken.reason, str(broken.finishes[0].error)) == ("error", "bad weather")
    assert sound.reason == "length"


def test_who_asks_from_the_engine_s_thread_is_refused():
    model = ScriptedModel()
    worker, asking = Worker(Engine(model)), Waiter()
    model.before_forward = lambda batch: worker.submit(Request([2], GREEDY, Waiter()))
    worker.submit(Request([1], GREEDY, asking))
    assert asking.ended.wait(LONG)
    worker.stop(drain=True)
    with pytest.raises(EngineError, match="would wait for itself: ask another LLM"):
        raise asking.finishes[0].error


def test_who_drains_in_the_engine_s_thread_is_refused_and_closes_nothing():
    model = ScriptedModel()
    worker, asking, next_one = Worker(Engine(model)), Waiter(), Waiter()
    model.before_forward = lambda batch: worker.drain(LONG)
    worker.submit(Request([1], GREEDY, asking))
    assert asking.ended.wait(LONG)
    model.before_forward = lambda batch: None
    worker.submit(Request([1], GREEDY, next_one))
    worker.stop(drain=True)
    assert "would wait for itself" in str(asking.finishes[0].error) and next_one.reason == "length"


def test_a_defect_of_ours_leaves_nobody_waiting(caplog):
    model = ScriptedModel(max_sequences=1)
    engine, gate, waiters = Engine(model), Gate(model), [Waiter() for _ in range(3)]
    worker = Worker(engine)
    for waiter in waiters:
        worker.submit(Request([1], GREEDY, waiter))
    assert gate.reached.wait(LONG)

    def break_down():
        raise AssertionError("the books are wrong")

    engine._scheduler.schedule = break_down
    gate.open()
    for waiter in waiters:
        assert waiter.ended.wait(LONG)
        assert waiter.reason == "error" and "the books are wrong" in str(waiter.finishes[0].error)
    worker.stop(drain=True)
    with pytest.raises(Stopped):
        worker.submit(Request([1], GREEDY, Waiter()))
    assert "the books are wrong" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_told_that_it_has_no_thread():
    worker = Worker(Engine(ScriptedModel()))
    child = os.fork()
    if child == 0:
        told = False
        try:
            worker.submit(Request([1], GREEDY, Waiter()))
        except Stopped:
            worker.stop(drain=False)
            told = True
        finally:
            os._exit(0 if told else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    worker.stop(drain=True)

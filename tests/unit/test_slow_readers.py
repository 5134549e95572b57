"""Whoever does not read waits, and holds up nobody else."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import pytest
from scripted import Listener, ScriptedModel, generate, greedy_text, run
from test_llm import HI, scripted_llm, wait_until_idle
from test_worker import LONG, Waiter
from text_samples import byte_level_json, write_folder

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.engine.terms import Terms
from bitnet_inference.engine.wakeups import Wakeups
from bitnet_inference.engine.worker import Worker
from bitnet_inference.errors import EngineError, InvalidParams, Stopped
from bitnet_inference.mailbox import MAX_UNREAD, Letter, Mailbox
from bitnet_inference.text.detokenize import Detokenizer
from bitnet_inference.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class TestEngine:
    def test_a_full_sink_gets_no_more_and_others_get_a_token_a_step(self):
        model = ScriptedModel(max_sequences=2)
        engine, slow, quick = Engine(model), Listener(full_at=3), Listener()
        for prompt, listener in (([1, 2], slow), ([3, 4], quick)):
            engine.submit(Request(prompt, GREEDY, listener))
        for _ in range(10):
            assert engine.has_turn
            engine.step()
        assert (len(slow.token_ids), len(quick.token_ids), quick.reason) == (3, 10, "length")
        engine.step()
        assert engine.has_work and not engine.has_turn and model.num_forwards == 10
        slow.is_full = False
        assert engine.has_turn
        run(engine)
        assert slow.token_ids == greedy_text(model, [1, 2], 10)

    def test_it_gives_its_place_and_its_blocks_back_and_its_turn_comes_by_rank(self):
        model = ScriptedModel(max_sequences=1, num_blocks=5)
        engine, listeners = Engine(model), [Listener(full_at=5), Listener(), Listener()]
        for number, listener in enumerate(listeners):
            engine.submit(Request([number] * 4, GREEDY, listener))
        for _ in range(10):
            engine.step()
        assert [len(listener.token_ids) for listener in listeners] == [5, 5, 0]
        listeners[0].is_full = False
        run(engine)
        assert [listener.reason for listener in listeners] == ["length"] * 3
        for number, listener in enumerate(listeners):
            assert listener.token_ids == greedy_text(model, [number] * 4, 10)

    def test_what_it_had_computed_is_found_again(self):
        model = ScriptedModel(block_size=4)
        engine, listener = Engine(model), Listener(full_at=6)
        engine.submit(Request([1] * 11, GREEDY, listener))
        for _ in range(7):
            engine.step()
        num_tokens, listener.is_full = model.num_tokens, False
        engine.step()
        assert len(listener.token_ids) == 7 and model.num_tokens - num_tokens <= 4

    def test_choices_do_not_wait_for_a_leader_that_nobody_reads(self):
        model = ScriptedModel(max_sequences=1)
        engine, slow, other = Engine(model), Listener(full_at=1), Listener()
        leader = Request([1] * 9, GREEDY, slow)
        engine.submit(leader)
        engine.submit(Request([1] * 9, GREEDY, other, choice=1, leader=leader))
        for _ in range(12):
            engine.step()
        assert other.reason == "length" and len(slow.token_ids) == 1

    def test_it_can_be_cancelled_and_its_time_passes(self):
        now = [0.0]
        engine = Engine(ScriptedModel(), clock=lambda: now[0])
        listeners = [Listener(full_at=1) for _ in range(4)]
        for listener, timeout_s in zip(listeners, (None, 5, 9, None), strict=True):
            engine.submit(Request([1], ENDLESS, listener, terms=Terms(timeout_s=timeout_s)))
        assert engine.seconds_to_deadline() is None and engine.has_turn
        for now[0] in (1.0, 2.0):
            engine.step()
        assert engine.seconds_to_deadline() == 3 and not engine.has_turn
        engine.cancel(engine._scheduler.waiting[0])
        assert engine.has_turn
        engine.step()
        now[0] = 6.0
        assert engine.seconds_to_deadline() == 0
        engine.step()
        assert engine.seconds_to_deadline() == 3
        assert [listener.finishes[0].reason for listener in listeners[:2]] == ["cancelled", "timeout"]
        engine.end_all(Finish("error", error=Stopped("enough")))
        assert [listener.reason for listener in listeners[2:]] == ["error"] * 2 and not engine.has_work


class Counted(Engine):
    """Counts its steps."""

    num_steps = 0

    def step(self):
        self.num_steps += 1
        super().step()


class Slow(Waiter):
    """A Waiter that is full after a few tokens."""

    def __init__(self, full_at):
        super().__init__(full_at=full_at)
        self.filled = threading.Event()

    def token(self, token_id, logprobs):
        wants_end = super().token(token_id, logprobs)
        if self.is_full:
            self.filled.set()
        return wants_end


class TestWorker:
    @pytest.fixture
    def worker(self):
        worker = Worker(Counted(ScriptedModel()))
        yield worker
        worker.stop(drain=False)

    def fill(self, worker, **terms):
        """A request that waits for its reader."""
        slow = Slow(full_at=3)
        request = Request([1], GREEDY, slow, terms=Terms(**terms))
        worker.submit(request)
        assert slow.filled.wait(LONG)
        return request

    def test_it_sleeps_until_there_is_room(self, worker):
        request, other = self.fill(worker), Waiter()
        worker.submit(Request([2], GREEDY, other))
        assert other.ended.wait(LONG) and other.reason == "length"
        worker.wake()  # for nothing
        assert len(request.sink.token_ids) == 3
        request.sink.is_full = False
        worker.wake()
        assert request.sink.ended.wait(LONG)
        assert request.sink.token_ids == generate(ScriptedModel(), [1], GREEDY).token_ids
        assert worker._engine.num_steps <= 3 + 1 + 10 + 1 + 8, "a step for nothing"

    def test_it_wakes_for_a_cancellation(self, worker):
        request = self.fill(worker)
        worker.cancel(request)
        assert request.sink.ended.wait(LONG) and request.sink.reason == "cancelled"

    def test_it_wakes_when_a_time_is_over(self, worker):
        request = self.fill(worker, timeout_s=0.2)
        assert request.sink.ended.wait(LONG) and request.sink.reason == "timeout"
        assert worker._engine.num_steps < 20

    def test_it_ends_those_that_wait_for_their_readers(self, worker):
        request = self.fill(worker)
        worker.stop(drain=False)
        assert isinstance(request.sink.finishes[0].error, Stopped)

    def test_draining_waits_for_readers(self, worker):
        request = self.fill(worker)
        assert not worker.drain(0)
        request.sink.is_full = False
        worker.wake()
        assert worker.drain(LONG) and request.sink.reason == "length"


def take(mailbox):
    mailbox.wait()
    letter = mailbox.first(list)
    if isinstance(letter, Letter):
        mailbox.drop()
    return letter


async def take_async(mailbox):
    await mailbox.wait_async()
    return take(mailbox)


class TestMailbox:
    @pytest.fixture
    def detokenizer(self, tmp_path):
        return Detokenizer(Tokenizer.from_folder(write_folder(tmp_path, byte_level_json())))

    def test_it_is_full_until_half_of_it_is_read(self, detokenizer):
        calls = []
        mailbox = Mailbox(detokenizer, max_unread=4, on_room=lambda: calls.append(mailbox.is_full))
        for number in range(4):
            assert not mailbox.is_full
            mailbox.token(40 + number, None)
        assert mailbox.is_full
        take(mailbox)
        assert mailbox.is_full and not calls
        take(mailbox)
        assert calls == [False] and not mailbox.is_full
        mailbox.token(40, None)
        assert not mailbox.is_full
        mailbox.token(40, None)
        assert mailbox.is_full
        mailbox.finish(Finish("cancelled"), Usage(1, 6, 0, 0, 0))
        asyncio.run(self.read(mailbox))
        assert calls == [False, False]

    def test_a_waiting_reader_is_woken_once_and_later(self, detokenizer):
        wakeups: list[Callable[[], None]] = []
        mailbox = Mailbox(detokenizer, later=wakeups.append)
        mailbox.token(40, None)
        assert not wakeups, "nobody waits"

        async def read() -> None:
            assert (await take_async(mailbox)).token_id == 40
            reader = asyncio.create_task(take_async(mailbox))
            await asyncio.sleep(0)
            mailbox.token(41, None)
            mailbox.token(42, None)
            await asyncio.sleep(0)
            assert len(wakeups) == 1 and not reader.done()
            wakeups.pop()()
            assert (await reader).token_id == 41 and (await take_async(mailbox)).token_id == 42

        asyncio.run(read())

    def test_a_reader_who_waits_for_many_letters_is_woken_for_these_and_for_the_end(self, detokenizer):
        wakeups: list[Callable[[], None]] = []
        mailbox = Mailbox(detokenizer, later=wakeups.append)

        async def read() -> None:
            for num_letters, has_end in ((3, False), (2, True)):
                reader = asyncio.create_task(mailbox.wait_async(3))
                for number in range(num_letters):
                    await asyncio.sleep(0)
                    assert not wakeups
                    mailbox.token(40 + number, None)
                if has_end:
                    assert not wakeups
                    mailbox.finish(Finish("cancelled"), Usage(1, 5, 0, 0, 0))
                wakeups.pop()()
                await reader
                for _ in range(num_letters):
                    await take_async(mailbox)
            await mailbox.wait_async(3)  # the end stays

        asyncio.run(read())

    def test_whoever_raises_when_a_stream_ends_keeps_nobody_from_being_woken(self, detokenizer, caplog):
        wakeups, woken = Wakeups(monotonic), []
        mailbox = Mailbox(detokenizer, later=wakeups.add)
        mailbox.call_at_end(lambda: next(iter(())))
        mailbox.call_at_end(sys.exit)
        mailbox.call_at_end(lambda: woken.append(True))
        mailbox.finish(Finish("cancelled"), Usage(1, 0, 0, 0, 0))
        assert not woken
        wakeups.make()
        assert woken == [True] and caplog.text.count("at the end of a stream raised") == 2

    def test_text_is_made_when_it_is_read_and_at_once_where_it_may_stop(self, detokenizer):
        made = []
        push, detokenizer.push = detokenizer.push, lambda token_id: (made.append(token_id), push(token_id))[1]
        mailbox = Mailbox(detokenizer)
        assert not mailbox.token(40, None) and not made
        assert take(mailbox).token_id == 40 and made == [40]

    async def read(self, mailbox):
        for _ in range(5):
            await take_async(mailbox)

    def test_a_second_one_who_waits_is_refused_and_the_first_is_woken(self, detokenizer):
        mailbox = Mailbox(detokenizer)

        async def read() -> None:
            first = asyncio.create_task(take_async(mailbox))
            await asyncio.sleep(0)
            with pytest.raises(InvalidParams, match="two readers wait for one stream"):
                await asyncio.wait_for(take_async(mailbox), LONG)
            with pytest.raises(InvalidParams, match="two readers wait for one stream"):
                take(mailbox)
            mailbox.token(40, None)
            assert (await first).token_id == 40
            left = asyncio.create_task(take_async(mailbox))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.wait([left])
            mailbox.token(41, None)
            assert take(mailbox).token_id == 41

        asyncio.run(read())

    def test_nobody_waits_where_nothing_would_come(self, detokenizer):
        def refuse() -> None:
            raise Stopped("nothing comes")

        mailbox = Mailbox(detokenizer, check_wait=refuse)
        mailbox.token(40, None)
        assert take(mailbox).token_id == 40, "what is there is given"
        with pytest.raises(Stopped, match="nothing comes"):
            take(mailbox)
        with pytest.raises(Stopped, match="nothing comes"):
            asyncio.run(take_async(mailbox))
        assert not mailbox.is_awaited

    def test_without_a_limit_it_is_never_full(self, detokenizer):
        mailbox = Mailbox(detokenizer)
        for _ in range(2 * MAX_UNREAD):
            mailbox.token(40, None)
        assert not mailbox.is_full


class TestStreams:
    @pytest.fixture
    def llm(self, tmp_path):
        with scripted_llm(write_folder(tmp_path), max_positions=1100, max_sequences=1)[0] as llm:
            yield llm

    def test_an_unread_one_waits_and_the_next_has_its_turn(self, llm):
        first, second = llm.stream("The fox", ENDLESS), llm.stream_chat(HI, ENDLESS)
        assert second.read().finish_reason == "length"  # there is one place, which the first had
        assert is_full(first)
        assert not llm.drain(0)
        assert first.read().finish_reason == "length" and len(first.output.token_ids) > MAX_UNREAD + 20
        assert llm.drain(LONG)

    @pytest.mark.parametrize(
        "wait",
        [lambda llm, stream: stream.read(), lambda llm, stream: next(iter(stream)), lambda llm, stream: llm.drain()],
    )
    def test_who_waits_in_the_engine_s_thread_is_refused_and_the_llm_goes_on(self, llm, wait):
        opened = threading.Event()

        def waits(tokens, logits):
            assert opened.wait(LONG)
            wait(llm, other)

        asking = llm.stream("The fox", replace(GREEDY, processors=[waits]))
        other = llm.stream("The owl", GREEDY)  # has no turn before that
        opened.set()
        with pytest.raises(EngineError, match="would wait for itself: ask another LLM"):
            asking.read()
        assert llm.generate("The hen", GREEDY).finish_reason == "length"

    def test_generate_takes_all_at_once_and_choices_may_be_read_in_any_order(self, llm):
        outputs = llm.generate(["The fox", "The owl"], ENDLESS)
        choices = llm.stream_choices("The fox", 2, ENDLESS)
        assert [choice.read().text for choice in reversed(choices)] == [outputs[0].text] * 2
        assert [choice.request.num_output > MAX_UNREAD + 20 for choice in choices] == [True, True]

    def test_one_whose_end_is_waited_for_comes_to_it_unread(self, llm):
        ended, full = threading.Event(), llm.stream("The owl", ENDLESS)
        assert llm.generate("The fox", ENDLESS).text and is_full(full)
        for stream in (llm.stream("The fox", ENDLESS), full):
            ended.clear()
            stream.call_at_end(ended.set)
            assert ended.wait(LONG)
            assert len(stream.read().token_ids) > MAX_UNREAD + 20

    def test_choices_that_nobody_reads_before_the_end_go_on_side_by_side(self, tmp_path, monkeypatch):
        llm, model = scripted_llm(write_folder(tmp_path), max_positions=1100, max_sequences=2)
        submit, both = llm._worker.submit, threading.Event()

        def submit_both(request):
            submit(request)
            if request.choice:
                both.set()

        monkeypatch.setattr(llm._worker, "submit", submit_both)
        model.before_forward = lambda batch: both.wait(LONG)
        with llm:
            texts = llm.choices("The fox", 2, ENDLESS)
        assert min(len(text.token_ids) for text in texts) > MAX_UNREAD + 20
        assert model.num_forwards < 1100 + 20

    def test_a_second_reader_is_refused_and_the_first_goes_on(self, tmp_path):
        llm, model = scripted_llm(write_folder(tmp_path), max_positions=64)
        refused = threading.Event()
        model.before_forward = lambda batch: refused.wait(LONG)

        async def read(stream):
            return [piece async for piece in stream]

        async def both():
            stream = llm.stream("The fox", ENDLESS)
            first = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            with pytest.raises(InvalidParams, match="two readers wait for one stream"):
                await read(stream)
            refused.set()
            return await first, stream.finish_reason

        with llm:
            pieces, reason = asyncio.run(both())
        assert pieces and reason == "length"

    @pytest.mark.parametrize("way", ["text", "talk", "choice"])
    def test_a_lost_one_goes(self, llm, way):
        open_stream = {
            "text": lambda: llm.stream("The fox", ENDLESS),
            "talk": lambda: llm.stream_chat(HI, ENDLESS),
            "choice": lambda: llm.stream_choices("The fox", 1, ENDLESS)[0],
        }[way]
        stream = open_stream()
        assert llm.generate("The owl", GREEDY).finish_reason == "length"
        assert is_full(stream)
        del stream
        wait_until_idle(llm)


def is_full(stream):
    return MAX_UNREAD <= stream.request.num_output < MAX_UNREAD + 20 and stream.request.finish is None

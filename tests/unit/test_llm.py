import asyncio
import copy
import gc
import json
import os
import pickle
import shutil
import signal
import threading
import time
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedModel
from text_samples import BOS, TURN, sentencepiece_json, write_folder

from bitnet_inference.choices import log_likelihoods
from bitnet_inference.config import EngineConfig
from bitnet_inference.conversion.convert import convert
from bitnet_inference.engine.beam import BeamParams
from bitnet_inference.engine.events import Stepped
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import (
    EngineError,
    FormatError,
    InvalidParams,
    NotFound,
    OutOfMemory,
    PromptTooLong,
    QueueFull,
    RequestError,
    Stopped,
    Unsupported,
)
from bitnet_inference.evaluate import perplexity
from bitnet_inference.hub.pull import pull
from bitnet_inference.in_flight import MAX_IN_FLIGHT, InFlight
from bitnet_inference.llm import LLM
from bitnet_inference.mailbox import Mailbox
from bitnet_inference.model_folder import default_params, find_model
from bitnet_inference.models import Models
from bitnet_inference.stream import Stream
from bitnet_inference.summary import summarize
from bitnet_inference.text.detokenize import Detokenizer
from bitnet_inference.text.filter import Verdict
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.word_filter import WordFilter

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = 30  # seconds; a test that needs them has failed
HI = [{"role": "user", "content": "Hi"}]


def scripted_llm(folder, drafts="auto", **limits):
    tokenizer = Tokenizer.from_folder(folder)
    limits = {"vocab_size": tokenizer.vocab_size, "max_positions": 256, "num_blocks": 500} | limits
    model = ScriptedModel(**limits)
    return LLM(model, tokenizer, drafts=drafts), model


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path)


@pytest.fixture
def llm(folder):
    loaded, loaded.model = scripted_llm(folder)
    with loaded:
        yield loaded


def says(llm, text, end=TURN):
    """From now on the model answers every prompt with this text, again and again."""
    script = [*llm.tokenizer.encode(text, add_special_tokens=False), llm.tokenizer.special[end]]

    def change(history, logits):
        done = max(count for count in range(len(script)) if history[len(history) - count :] == script[:count])
        logits[:] = 0
        logits[script[done]] = 50

    llm.model.change_logits = change


class Tensor:
    """An array of another library than NumPy, such as a tensor of PyTorch."""

    def __init__(self, values, is_far=False):
        self.values, self.is_far = np.array(values), is_far
        self.ndim = self.values.ndim

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return map(Tensor, self.values)

    def __array__(self, *args, **kwargs):
        if self.is_far:
            raise TypeError("can't convert a tensor of this device")
        return self.values

    def __dlpack__(self, **kwargs):
        return self.values.__dlpack__(**kwargs)


class TestGenerate:
    def test_one_for_one_and_a_list_for_a_list(self, llm):
        one = llm.generate("The fox", GREEDY)
        ids = llm.tokenizer.encode("The fox")
        assert llm.generate(ids, GREEDY).token_ids == one.token_ids
        assert llm.generate(np.array(ids), GREEDY).token_ids == one.token_ids
        for many in (["The fox"], [ids], (ids,), [tuple(ids)], ["The fox", ids]):
            assert [output.token_ids for output in llm.generate(many, GREEDY)] == [one.token_ids] * len(many)

    def test_what_comes_back(self, llm):
        says(llm, "Grüße 🦊!")
        output = llm.generate("The fox", GREEDY)
        assert (output.text, output.finish_reason, output.stopped_by) == ("Grüße 🦊!", "stop", 2)
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.logprobs is None
        assert output.usage.num_prompt_tokens == len(llm.tokenizer.encode("The fox"))
        assert output.usage.num_output_tokens == len(output.token_ids)

    def test_logprobs_have_one_entry_a_token(self, llm):
        output = llm.generate("The fox", SamplingParams(temperature=0.0, max_tokens=5, logprobs=2))
        assert len(output.logprobs) == len(output.token_ids) == 5
        assert [entry.top[0] for entry in output.logprobs] == [
            (token, entry.logprob) for entry, token in zip(output.logprobs, output.token_ids, strict=True)
        ]

    def test_stop_strings_end_the_text(self, llm):
        says(llm, "one two three")
        output = llm.generate("The fox", SamplingParams(temperature=0.0, stop=["o t", "three"]))
        assert (output.text, output.finish_reason, output.stopped_by) == ("one tw", "stop", "o t")

    def test_a_half_stop_string_is_text(self, llm):
        says(llm, "one two")
        output = llm.generate("The fox", SamplingParams(temperature=0.0, stop="two!"))
        assert output.text == "one two" and output.finish_reason == "stop"

    def test_a_stop_string_may_come_true_at_the_end(self, llm):
        ids = llm.tokenizer.encode("😀", add_special_tokens=False)
        half = SamplingParams(temperature=0.0, max_tokens=1, stop="\ufffd", logit_bias={ids[0]: 100})
        output = llm.generate("The fox", half)
        assert (output.text, output.finish_reason, output.stopped_by) == ("", "stop", "\ufffd")

    def test_every_end_token_ends(self, llm, folder):
        assert llm.eos_ids == (1, 2)
        for name in ("<|end_of_text|>", TURN):
            says(llm, "x", end=name)
            assert llm.generate("The fox", GREEDY).text == "x"
        ignoring = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)
        assert len(llm.generate("The fox", ignoring).token_ids) == 4

    def test_params_one_for_all_or_one_for_each(self, llm):
        counts = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 3)]
        assert [len(output.token_ids) for output in llm.generate(["a", "b"], counts)] == [1, 3]
        for wrong in (counts[:1], [*counts, GREEDY], "xx", [1, 2], {"temperature": 0}):
            with pytest.raises(InvalidParams, match="params"):
                llm.generate(["a", "b"], wrong)

    def test_more_prompts_than_the_engine_queues(self, llm):
        outputs = llm.generate(["The fox"] * 1200, SamplingParams(temperature=0.0, max_tokens=1))
        assert len(outputs) == 1200 and len({output.text for output in outputs}) == 1

    def test_prompts_of_a_generator_are_taken_as_they_are_needed(self, llm):
        taken, seen = [], []

        def prompts():
            for index in range(1200):
                taken.append(index)
                yield [index % 300 + 1, 5]

        def progress(done, total):
            assert total is None and len(taken) - done <= MAX_IN_FLIGHT + 1
            seen.append(done)

        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate(prompts(), params, progress=progress)
        assert seen == list(range(1, 1201))
        assert [output.token_ids for output in outputs[:400]] == [
            llm.generate([index % 300 + 1, 5], params).token_ids for index in range(400)
        ]

    def test_results_stand_in_the_order_of_the_prompts_whoever_ends_first(self, llm):
        counts, seen = [30, 1, 12, 2, 7], []
        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
        prompts = [[index + 5] for index in range(5)]
        outputs = llm.generate(prompts, params, progress=lambda *state: seen.append(state))
        assert [len(output.token_ids) for output in outputs] == counts
        assert seen == [(done, 5) for done in range(1, 6)]

    def test_a_generator_may_be_empty_and_conversations_may_come_from_one(self, llm):
        assert llm.generate(iter([]), GREEDY) == []
        assert [output.text for output in llm.generate(iter(["a", "b"]), GREEDY)] == [
            llm.generate(prompt, GREEDY).text for prompt in ("a", "b")
        ]
        assert [output.text for output in llm.chat(iter([HI, HI]), GREEDY)] == [llm.chat(HI, GREEDY).text] * 2

    def test_a_bad_prompt_of_a_generator_ends_its_neighbours(self, llm):
        for bad in ("", 5, None, ["a"], {"a": 1}, [5] * 300):
            with pytest.raises((InvalidParams, PromptTooLong)):
                llm.generate(iter(["The fox", bad]), SamplingParams(max_tokens=None, ignore_eos=True))
            wait_until_idle(llm)
        with pytest.raises(InvalidParams, match="one for all"):
            llm.generate(iter(["The fox"]), [GREEDY])

    def test_what_a_list_shows_is_refused_before_any_work(self, llm):
        for call, prompts in ((llm.generate, ["a", "", "b"]), (llm.generate, ["a", 1]), (llm.chat, [HI, []])):
            with pytest.raises(InvalidParams):
                call(prompts, GREEDY)
        assert llm.model.num_forwards == 0

    @pytest.mark.parametrize(
        "call, prompts",
        [
            ("generate", ["a", ""]),
            ("generate", ["a", [376]]),
            ("generate", ["a", "a " * 300]),
            ("generate", ["a", "\ud800"]),
            ("chat", [HI, [{"role": "user"}]]),
            ("score", ["a", [5] * 300]),
            ("embed", ["a", ""]),
            ("beam_search", ["a", ""]),
        ],
    )
    def test_an_error_says_which_prompt_it_is_about(self, llm, call, prompts):
        params = [BeamParams(num_beams=2)] if call == "beam_search" else []
        for given in (prompts, iter(prompts)) if call in ("generate", "chat") else (prompts,):
            with pytest.raises(RequestError, match=r"^prompts\[1\]") as raised:
                getattr(llm, call)(given, *params)
            assert type(pickle.loads(pickle.dumps(raised.value))) is raised.type
        with pytest.raises(RequestError, match=r"^(?!prompts)"):
            getattr(llm, call)(prompts[1], *params)

    def test_so_does_one_of_a_cache_that_is_too_small(self):
        with (
            LLM.load("default", max_cache_tokens=64) as llm,
            pytest.raises(OutOfMemory, match=r"^prompts\[1\]: the cac"),
        ):
            llm.generate(["a", "b " * 100])

    def test_an_error_that_is_raised_again_names_one_prompt(self, llm):
        error = InvalidParams("mine")

        def refuse(tokens, logits):
            raise error

        for _ in range(2):
            with pytest.raises(InvalidParams, match=r"^prompts\[0\]: mine$"):
                llm.generate(["a", "b"], replace(GREEDY, processors=[refuse]))

    def test_an_option_that_is_unknown_here_says_where_it_belongs(self, llm):
        for call, given in (
            (llm.generate, "a"),
            (llm.stream, "a"),
            (llm.chat, HI),
            (llm.stream_chat, HI),
            (llm.score, "a"),
        ):
            with pytest.raises(TypeError, match=r"SamplingParams\(max_tokens=...\)"):
                call(given, max_tokens=3)
            with pytest.raises(TypeError, match=r"timeout is not known here: there are .*timeout_s"):
                call(given, timeout=3)

    def test_numpy_has_whole_numbers_too(self, llm):
        assert len(llm.choices("a", np.int64(2), GREEDY, best_of=np.int32(3))) == 2
        assert EngineConfig(threads=np.int64(2)).threads == 2

    @pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
    def test_options_of_the_engine_reach_it(self, name):
        for load in (LLM.load, Models):
            with pytest.raises(InvalidParams, match=f"^{name} is 0"):
                load(**{name: 0})
            with pytest.raises(TypeError, match=f"option {name}s is not known here: .*{name}"):
                load(**{f"{name}s": 0})

    def test_a_step_has_as_many_tokens_as_is_asked_for(self):
        counts = []
        with LLM.load("default", max_batch_tokens=7, isa="generic", listener=counts.append) as llm:
            llm.generate(list(range(3, 23)), SamplingParams(max_tokens=1))
        assert [event.num_tokens for event in counts if isinstance(event, Stepped)] == [7, 7, 6]

    @pytest.mark.parametrize(
        ("name", "call"),
        [
            ("progress", lambda llm: llm.generate("a", progress=1)),
            ("progress", lambda llm: llm.chat(HI, progress="bar")),
            ("progress", lambda llm: llm.embed("a", progress=[1])),
            ("progress", lambda llm: llm.score("a", progress={})),
            ("progress", lambda llm: perplexity(llm, "The brave fox", progress=1)),
            ("progress", lambda llm: log_likelihoods(llm, [("The brave", " fox")], progress=1)),
            ("progress", lambda _: LLM.load(progress=1)),
            ("progress", lambda _: Models(progress=1)),
            ("progress", lambda _: convert("default", "x.gguf", progress=1)),
            ("progress", lambda _: pull("nothing", progress=1)),
            ("pairs", lambda llm: log_likelihoods(llm, 1)),
            ("params", lambda llm: llm.resolved({"temperature": 0})),
            ("params", lambda llm: llm.generate(iter("ab"), 1)),
            ("template", lambda llm: llm.encode_chat(HI, template={})),
            ("gpus", lambda _: EngineConfig(gpus=None)),
        ],
    )
    def test_an_argument_of_a_wrong_type_is_named(self, llm, name, call):
        llm.model.num_tokens = 0
        with pytest.raises(InvalidParams, match=name):
            call(llm)
        assert llm.model.num_tokens == 0, "it is refused before there is work"

    def test_a_cache_of_more_tokens_than_a_float_can_count(self, folder):
        llm, _ = scripted_llm(folder)
        llm.close()
        with LLM(ScriptedModel(vocab_size=llm.tokenizer.vocab_size), llm.tokenizer, max_cache_tokens=10**400) as large:
            assert large.max_context == ScriptedModel().config.max_positions

    def test_progress_that_raises_cancels(self, llm):
        def progress(done, total):
            raise RuntimeError("enough")

        slowly(llm)
        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, None)]
        with pytest.raises(RuntimeError, match="enough") as raised:
            llm.generate([[5], [6]], params, progress=progress)
        requests = [each for each in llm._requests if each.params.max_tokens is None]
        wait_until_idle(llm)
        assert [each.finish.reason for each in requests] == ["cancelled"] and raised.tb  # which holds the streams

    def test_a_full_queue_is_waited_for_as_long_as_something_moves(self, llm):
        tries = []

        def start(item):
            tries.append(item)
            if tries == [0, 1]:
                raise QueueFull("others have filled it")
            return llm.stream([5], GREEDY)

        with InFlight([0, 1, 2], start) as in_flight:
            assert sorted(ended.item for ended in in_flight) == [0, 1, 2]
        assert tries == [0, 1, 1, 2]
        tries[:] = [0]
        with pytest.raises(QueueFull), InFlight([1], start) as in_flight:
            list(in_flight)

    @pytest.mark.parametrize(
        "prompts",
        [
            *([], (), None, 3, b"x", [None], ["a", 1], [1, "a"], [True], {"a": 1}, [b"x"], np.array(1)),
            *(bytearray(b"x"), memoryview(b"x"), np.zeros((0, 3), int)),
        ],
    )
    def test_what_is_no_prompt_is_refused(self, llm, prompts):
        for ask in (partial(llm.generate, params=GREEDY), llm.embed):
            with pytest.raises(InvalidParams, match=r"prompt"):
                ask(prompts)

    @pytest.mark.parametrize(
        "prompts", ["", ["a", ""], [[]], [[1], []], [-1], [1 << 40], [376], [[1, "a"]], [[1.5]], [np.array(1)]]
    )
    def test_empty_and_impossible_prompts_are_refused(self, llm, prompts):
        with pytest.raises(InvalidParams):
            llm.generate(prompts, GREEDY)

    def test_arrays_of_others_are_as_good_as_lists(self, llm):
        ids = llm.tokenizer.encode("The fox")
        for ask in (llm.score, llm.embed):
            one, both = ask(ids), ask([ids, ids])
            for given, expected in ((Tensor(ids), one), (Tensor([ids, ids]), both), ([Tensor(ids)] * 2, both)):
                assert np.array_equal(ask(given), expected)
        assert np.array_equal(llm.logits(Tensor(ids)), llm.logits(ids))
        text = llm.generate(ids, GREEDY).text
        assert llm.generate(Tensor(ids), GREEDY).text == text
        assert [each.text for each in llm.generate(Tensor([ids, ids]), GREEDY)] == [text, text]
        for wrong in (Tensor(3), Tensor([]), Tensor([0.5]), Tensor([[ids]]), Tensor(ids, is_far=True)):
            with pytest.raises(InvalidParams, match="prompt"):
                llm.generate(wrong, GREEDY)

    def test_a_prompt_longer_than_the_context(self, llm):
        with pytest.raises(PromptTooLong, match="300 tokens, at most 255 fit"):
            llm.generate([5] * 300, GREEDY)

    def test_a_prompt_longer_than_the_cache(self, folder):
        with scripted_llm(folder, num_blocks=2)[0] as llm, pytest.raises(OutOfMemory, match="raise max_cache_tokens"):
            llm.generate([5] * 8, GREEDY)

    def test_an_error_ends_its_neighbours(self, llm):
        def fail(history, logits):
            if history[-1] == 7:
                logits[:] = np.nan

        llm.model.change_logits = fail
        with pytest.raises(EngineError):
            llm.generate([[5], [7], [6]], SamplingParams(max_tokens=None, ignore_eos=True))
        wait_until_idle(llm)

    def test_ctrl_c_cancels(self, llm, monkeypatch):
        says(llm, "a b c " * 20)
        monkeypatch.setattr("bitnet_inference.stream.Stream.read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["The", "fox"], SamplingParams(max_tokens=None, ignore_eos=True))
        monkeypatch.undo()
        wait_until_idle(llm)

    def test_spaces_of_a_continuation_stay(self, tmp_path):
        config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages[0].content }}"}
        loaded, model = scripted_llm(write_folder(tmp_path, sentencepiece_json(), **config))
        loaded.model = model
        with loaded:
            says(loaded, "the fox", end="</s>")
            assert loaded.generate("so", GREEDY).text == " the fox"
            assert loaded.chat(HI, GREEDY).text == "the fox"


def interrupted(stream):
    raise KeyboardInterrupt


def wait_until_idle(llm):
    deadline = time.monotonic() + 10
    while llm._worker._engine.has_work and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not llm._worker._engine.has_work


class TestChat:
    def test_the_template_is_applied(self, llm):
        says(llm, "Hello.")
        output = llm.chat(HI, GREEDY)
        assert output.text == "Hello."
        ids = llm.tokenizer.encode(BOS + f"User: Hi{TURN}Assistant: ", parse_special=True)
        assert output.usage.num_prompt_tokens == len(ids)
        assert llm.generate(ids, GREEDY).token_ids == output.token_ids

    def test_many(self, llm):
        says(llm, "Hello.")
        assert [output.text for output in llm.chat([HI, HI], GREEDY)] == ["Hello.", "Hello."]
        assert "".join(piece.text for piece in llm.stream_chat(HI, GREEDY)) == "Hello."

    def test_bad_messages(self, llm):
        for messages in ([], "Hi", [[]], [{"role": "user"}], [HI, []]):
            with pytest.raises(InvalidParams):
                llm.chat(messages, GREEDY)
        with pytest.raises(TypeError):
            llm.chat(HI, GREEDY, temperature=1)

    def test_no_template(self, tmp_path):
        loaded, _ = scripted_llm(write_folder(tmp_path, chat_template=None))
        with loaded, pytest.raises(Unsupported, match="no chat template"):
            loaded.chat(HI)


class TestStream:
    def test_pieces_join_to_the_text(self, llm):
        says(llm, "Grüße 🦊 zwei")
        stream = llm.stream("The fox", SamplingParams(temperature=0.0, max_tokens=40, logprobs=0, stop="zwei!"))
        assert stream.output is None and stream.finish_reason is None and stream.usage is None
        pieces = list(stream)
        assert all(piece.text and "\ufffd" not in piece.text for piece in pieces)
        assert "".join(piece.text for piece in pieces) == stream.output.text == "Grüße 🦊 zwei"
        assert [token for piece in pieces for token in piece.token_ids] == stream.output.token_ids
        assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
        assert stream.finish_reason == "stop" and stream.usage.num_output_tokens == len(stream.output.token_ids)
        assert list(stream) == [] and stream.read() is stream.output

    def test_async(self, llm):
        says(llm, "Grüße 🦊")

        async def read():
            streams = [llm.stream("The fox", GREEDY) for _ in range(3)]
            return await asyncio.gather(*(join(stream) for stream in streams))

        async def join(stream):
            return "".join([piece.text async for piece in stream])

        assert asyncio.run(read()) == ["Grüße 🦊"] * 3

    def test_async_as_a_whole(self, llm):
        says(llm, "Grüße 🦊")
        stream = llm.stream("The fox", GREEDY)
        assert asyncio.run(stream.read_async()).text == "Grüße 🦊"
        assert asyncio.run(stream.read_async()) is stream.output, "also behind its end"

    def test_in_bulk_what_waits_is_one_piece(self, llm):
        says(llm, "Grüße 🦊 zwei")
        stream, ended = llm.stream("The fox", replace(GREEDY, logprobs=1)), threading.Event()
        stream.call_at_end(ended.set)
        ended.wait()

        async def read():
            return [piece async for piece in stream.in_bulk()]

        (piece,) = asyncio.run(read())
        assert piece.text == stream.output.text == "Grüße 🦊 zwei"
        assert piece.token_ids == stream.output.token_ids and piece.logprobs == stream.output.logprobs
        assert stream.output.stopped_by in llm.eos_ids and stream.output.end_logprobs.logprob <= 0

    def test_cancelled_output_can_be_read(self, llm):
        stream = llm.stream("The fox", SamplingParams(max_tokens=None, ignore_eos=True))
        next(iter(stream))
        stream.cancel()
        assert stream.read().finish_reason in ("cancelled", "length")

    @pytest.mark.parametrize("leave", ["break", "with", "drop", "async", "task"])
    def test_who_leaves_cancels(self, llm, leave):
        slowly(llm)
        stream = llm.stream("The fox", SamplingParams(max_tokens=None, ignore_eos=True))
        request = stream.request
        if leave == "break":
            for _ in stream:
                break
        elif leave == "with":
            with stream:
                pass
        elif leave == "drop":
            del stream
            gc.collect()
        else:
            asyncio.run(abandon(stream, cancels=leave == "task"))
        wait_until_idle(llm)
        assert request.finish.reason == "cancelled"

    def test_errors_are_raised_in_the_reader(self, llm):
        def fail(history, logits):
            logits[:] = np.nan

        llm.model.change_logits = fail
        stream = llm.stream("The fox", GREEDY)
        for _ in range(2):
            with pytest.raises(EngineError, match="its weights are broken"):
                stream.read()
        assert stream.output is None

    def test_one_prompt_only(self, llm):
        with pytest.raises(InvalidParams, match="one prompt"):
            llm.stream(["a", "b"])

    def test_readers_in_threads(self, llm):
        says(llm, "abc")
        texts = []
        threads = [threading.Thread(target=lambda: texts.append(llm.stream("x", GREEDY).read().text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == ["abc"] * 8

    def test_a_closed_loop_does_not_disturb_the_engine(self, llm):
        slowly(llm)
        stream = llm.stream("The fox", SamplingParams(max_tokens=20, ignore_eos=True))

        async def first():
            await stream._mailbox.wait_async()

        asyncio.run(first())
        assert stream.read().finish_reason == "length"

    def test_what_a_cancelled_task_has_left_to_a_filter_can_be_read(self, folder):
        """The filter works on in its thread; what it has not begun with is not lost either."""
        holds, goes_on = threading.Event(), threading.Event()

        class Held:
            def check_prompt(self, text):
                pass

            def start(self):
                return self

            def push(self, text, is_last):
                holds.set()
                assert goes_on.wait(LONG)
                self.num_chars = getattr(self, "num_chars", 0) + len(text)
                return Verdict(self.num_chars)

        plain, model = scripted_llm(folder)
        with plain, LLM(ScriptedModel(vocab_size=model.config.vocab_size), plain.tokenizer, filters=[Held()]) as llm:
            whole, stream = plain.generate("x", GREEDY), llm.stream("x", GREEDY)

            async def read():
                async for _ in stream:
                    pass

            async def leave():
                task = asyncio.ensure_future(read())
                await asyncio.to_thread(holds.wait, LONG)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                goes_on.set()
                return await asyncio.to_thread(stream.read)

            left = asyncio.run(leave())
            assert left.token_ids == whole.token_ids[: left.usage.num_output_tokens] != []

    @pytest.mark.parametrize("in_bulk", [False, True])
    def test_a_piece_that_was_made_when_its_reader_left_is_that_of_the_next(self, folder, in_bulk):
        holds, goes_on = threading.Event(), threading.Event()

        class Held:
            def check_prompt(self, text):
                pass

            def start(self):
                self.num_chars = 0
                return self

            def push(self, text, is_last):
                self.num_chars += len(text)
                if self.num_chars > len(text) > 0:  # behind the first part
                    holds.set()
                    assert goes_on.wait(LONG)
                return Verdict(self.num_chars)

        async def read(stream, pieces):
            async for piece in stream.in_bulk() if in_bulk else stream:
                pieces.append(piece)

        async def leave(stream, pieces):
            task = asyncio.ensure_future(read(stream, pieces))
            await asyncio.to_thread(holds.wait, LONG)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            goes_on.set()
            await read(stream, pieces)

        plain, model = scripted_llm(folder)
        with plain, LLM(ScriptedModel(vocab_size=model.config.vocab_size), plain.tokenizer, filters=[Held()]) as llm:
            stream, pieces = llm.stream("x", GREEDY), []
            asyncio.run(leave(stream, pieces))
            assert "".join(piece.text for piece in pieces) == stream.output.text != ""
            assert [each for piece in pieces for each in piece.token_ids] == stream.output.token_ids

    def test_an_interrupt_at_any_place_loses_and_doubles_nothing(self, llm, monkeypatch):
        """Ctrl-C while a letter becomes text, is noted or dropped, and at the end: who reads on gets all of it."""
        whole = llm.generate("x", GREEDY)
        places = [(Detokenizer, "push"), (Detokenizer, "finish"), (Mailbox, "drop"), (Stream, "_piece")]
        places += [(Stream, "_note"), (Stream, "_conclude"), (Stream, "_why")]
        for owner, name in places:
            for when in ("before", "after"):
                stream = llm.stream("x", GREEDY)
                wait_until_idle(llm)
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, interrupting(getattr(owner, name), when))
                    with pytest.raises(KeyboardInterrupt):
                        list(stream)
                read = stream.read()
                assert (read.text, read.token_ids) == (whole.text, whole.token_ids), (name, when)


def in_fork(work):
    """What some work gives in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(LONG)  # who hangs is ended
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        found = file.read().decode()
    os.waitpid(child, 0)
    return found


def interrupting(function, when):
    def call(*arguments):
        if when == "after":
            function(*arguments)
        raise KeyboardInterrupt

    return call


def slowly(llm):
    llm.model.before_forward = lambda batch: time.sleep(0.002)


async def abandon(stream, cancels):
    async def read():
        async for _ in stream:
            if not cancels:
                break

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0.02)
    if cancels:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class TestNumbers:
    def test_logits_of_every_position(self, llm):
        ids = llm.tokenizer.encode("The brave fox met a small owl near the river, and the owl said hello")
        logits = llm.logits(ids)
        assert logits.shape == (len(ids), 376) and logits.dtype == np.float32
        for position in range(len(ids)):
            assert (logits[position] == llm.model.logits_after(ids[: position + 1])).all()

    def test_scores_are_log_probabilities(self, llm):
        ids = llm.tokenizer.encode("The brave fox")
        logits = llm.logits(ids).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = [0.0, *(logprobs[i, token] for i, token in enumerate(ids[1:]))]
        assert np.allclose(llm.score(ids), expected, atol=1e-5)
        assert llm.score(ids[:1]) == [0.0]
        assert llm.score("The brave fox") == llm.score(np.array(ids)) == llm.score(ids), "with the BOS in front"
        for wrong in ([], "", [1.5], [True], None, 3, [-1], np.array([1.5]), [376], [[1], []], [[1], "abc", 3]):
            for ask in (llm.score, llm.embed, llm.logits):
                with pytest.raises(InvalidParams):
                    ask(wrong)

    def test_an_array_of_texts_is_as_good_as_a_list(self, llm):
        prompts = ["The brave fox", "Hello world"]
        for array in (np.array(prompts), np.array(prompts, object)):
            assert [each.text for each in llm.generate(array, GREEDY)] == [
                each.text for each in llm.generate(prompts, GREEDY)
            ]
            assert llm.score(array) == llm.score(prompts)
        ids = [llm.tokenizer.encode(each) for each in prompts]
        assert llm.score(np.array(ids, object)) == llm.score(prompts)
        with pytest.raises(InvalidParams, match="a list must hold token ids only, or prompts only"):
            llm.score(np.array(["The brave fox", None]))

    def test_many_scores_and_those_from_a_position_on(self, llm):
        prompts = ["The brave fox", "Hello world", llm.tokenizer.encode("The brave owl")]
        alone = [llm.score(prompt) for prompt in prompts]
        seen = []
        assert llm.score(prompts, progress=lambda *done: seen.append(done)) == alone
        assert seen == [(1, 3), (2, 3), (3, 3)]
        assert llm.score(prompts, start=1) == [each[1:] for each in alone]
        assert llm.score(prompts, start=[0, 2, 1]) == [alone[0], alone[1][2:], alone[2][1:]]
        assert llm.score(prompts[0], start=2) == alone[0][2:] and llm.score(prompts[:1]) == alone[:1]
        with pytest.raises(InvalidParams, match="logits are of one prompt"):
            llm.logits(prompts)
        for wrong, why in (
            ([1, 2], "2 starts for 3 prompts"),
            (-1, "^start is -1: give the position"),
            ([0, 1.5, 1], "^start is 1.5: "),
            (99, "the prompt has"),
            (True, "^start is True: "),
        ):
            with pytest.raises(InvalidParams, match=why):
                llm.score(prompts, start=wrong)

    def test_what_is_computed_once_for_many_scores(self, llm):
        for ask in (lambda: llm.score(list(range(5, 45)), start=30), lambda: llm.embed(list(range(6, 46)))):
            llm.model.num_tokens = 0
            first, before = ask(), llm.model.num_tokens
            assert np.array_equal(ask(), first)
            assert llm.model.num_tokens - before < 14 < before
        llm.model.num_tokens = 0
        llm.embed(list(range(5, 45)), pooling="mean")
        assert llm.model.num_tokens == 40, "all states are needed"

    def test_embeddings(self, llm):
        ids = llm.tokenizer.encode("The brave fox")
        states = np.stack([llm.model.logits_after(ids[: at + 1])[:3] for at in range(len(ids))]).astype(np.float64)
        last, mean = states[-1], states.mean(axis=0)
        for pooling, expected in (("last", last), ("mean", mean)):
            found = llm.embed("The brave fox", pooling=pooling, normalize=False)
            assert found.dtype == np.float32 and found.shape == (3,)
            assert np.allclose(found, expected, rtol=1e-6)
            assert np.allclose(llm.embed(ids, pooling=pooling), expected / np.linalg.norm(expected), rtol=1e-6)
            many = llm.embed(["Hello", "The brave fox", ids], pooling=pooling, normalize=False)
            assert many.shape == (3, 3) and (many[1] == found).all() and (many[2] == found).all()
        for options in ({"pooling": "max"}, {"pooling": 1}, {"normalize": 1}):
            with pytest.raises(InvalidParams, match=next(iter(options))):
                llm.embed("The", **options)

    def test_broken_states_and_states_of_nothing(self, llm):
        llm.model.change_logits = lambda history, logits: logits.fill(0)
        assert llm.embed("The").tolist() == [0, 0, 0], "which has no direction"
        llm.model.change_logits = lambda history, logits: logits.fill(np.inf)
        with pytest.raises(EngineError, match="hold NaN or infinity"):
            llm.embed("The")
        with pytest.raises(EngineError, match="hold NaN or infinity"):
            llm.score("The fox")

    @pytest.mark.parametrize("ask", ["score", "embed"])
    def test_too_many_too_long_and_too_late(self, llm, ask, monkeypatch):
        ask = getattr(llm, ask)
        assert len(ask([[5, 6]] * 1500)) == 1500, "more than the engine queues"
        with pytest.raises(PromptTooLong, match="300 tokens, at most 256 fit"):
            ask([[5] * 256, [5] * 300])
        wait_until_idle(llm)
        for prompts, place in (([[5, 6], [7]], r"prompts\[0\]: "), ([5, 6], "")):
            with pytest.raises(EngineError, match=f"^{place}the prompt was not computed within its timeout_s"):
                ask(prompts, timeout_s=1e-9)
        monkeypatch.setattr("bitnet_inference.stream.Stream.read", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            ask([[number] * 200 for number in range(300)])
        monkeypatch.undo()
        wait_until_idle(llm)
        assert llm.model.num_tokens < 300 * 200, "the others were cancelled"
        assert caught.traceback, "which still holds the streams"

    def test_progress_may_give_up(self, llm):
        def stop(done, total):
            raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough") as caught:
            llm.embed([[number] * 200 for number in range(300)], progress=stop)
        wait_until_idle(llm)
        assert llm.model.num_tokens < 300 * 200, "the others were cancelled"
        assert caught.traceback, "which still holds the streams"


class TestLife:
    def test_a_drained_llm_takes_nobody_and_finishes_the_rest(self, folder):
        llm = scripted_llm(folder)[0]
        stream = llm.stream("The fox", GREEDY)
        assert llm.drain()
        with pytest.raises(Stopped):
            llm.generate("The fox", GREEDY)
        assert stream.read().usage.num_output_tokens > 0
        llm.close()

    def test_who_does_not_wait_hears_that_nothing_is_left(self, folder):
        """The engine's thread sleeps, and has not ended yet."""
        llm = scripted_llm(folder)[0]
        llm.generate("The fox", GREEDY)
        assert llm.drain(0)
        llm.close()

    def test_who_drafts(self, folder, tmp_path):
        """A word or a model; the text is the same, and a model is closed with the LLM."""
        with scripted_llm(folder)[0] as plain:
            expected = plain.generate("a b a b", GREEDY).text
        model = ScriptedModel(vocab_size=plain.config.vocab_size, max_positions=256)
        for drafts in ("lookup", "none", model):
            with scripted_llm(folder, drafts=drafts)[0] as llm:
                assert llm.generate("a b a b", GREEDY).text == expected
        assert not len(model._cache)
        with pytest.raises(InvalidParams, match="9 tokens in place of"):
            scripted_llm(folder, drafts=ScriptedModel(vocab_size=9))
        other = tmp_path / "other"
        shutil.copytree(find_model("default"), other)
        shutil.copy(folder / "tokenizer.json", other)
        with pytest.raises(InvalidParams, match="other tokens than the model"):
            LLM.load("default", drafts=other)
        with pytest.raises(NotFound, match="nobody"):
            LLM.load("default", drafts="nobody")
        for drafts, kind in (("off", NotFound), (None, InvalidParams), (False, InvalidParams)):
            with pytest.raises(kind, match=r"^drafts.*give \"auto\", \"lookup\", \"none\""):
                LLM.load("default", drafts=drafts)

    def test_terms_reach_the_engine(self, llm):
        streams = [llm.stream("a", GREEDY, priority=2), llm.stream_chat(HI, GREEDY, priority=3, timeout_s=60)]
        assert [stream.request.terms.priority for stream in streams] == [2, 3]
        assert llm.chat([HI, HI], GREEDY, priority=-1, timeout_s=60.0)[1].finish_reason in ("stop", "length")
        for call, prompt in ((llm.generate, "a"), (llm.stream, "a"), (llm.chat, HI), (llm.stream_chat, HI)):
            with pytest.raises(InvalidParams, match="priority"):
                call(prompt, GREEDY, priority="high")
            with pytest.raises(TypeError, match="hurry"):
                call(prompt, GREEDY, hurry=True)

    def test_choices_of_one_prompt_share_it_and_differ_by_seed(self, llm):
        prompt, params = (
            "The fox and the hen " * 3,
            SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True),
        )
        streams = llm.stream_choices(prompt, 4, params)
        outputs = [stream.read() for stream in streams]
        assert len({tuple(output.token_ids) for output in outputs}) == 4
        assert outputs[0].token_ids == llm.generate(prompt, params).token_ids
        num_prompt = outputs[0].usage.num_prompt_tokens
        assert [output.usage.num_cached_tokens for output in outputs] == [0, *[num_prompt - 1] * 3]
        assert len([stream.read() for stream in llm.stream_chat_choices(HI, 2, params, priority=1)]) == 2

    def test_choices_without_a_seed_share_the_one_that_is_drawn(self, llm):
        params = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
        streams = llm.stream_choices("The fox", 3, params)
        found = [stream.read().token_ids for stream in streams]
        again = llm.choices("The fox", 3, replace(params, seed=streams[0].request.seed))
        assert found == [output.token_ids for output in again]
        assert llm.stream("The fox", params).request.seed != streams[0].request.seed

    def test_impossible_choices_are_refused(self, llm):
        for number in (0, -1, 1.5, True, None, "2"):
            with pytest.raises(InvalidParams, match="num_choices"):
                llm.stream_choices("a", number)
        with pytest.raises(InvalidParams, match="one prompt"):
            llm.stream_choices(["a", "b"], 2)

    def test_choices_are_all_taken_or_none_and_who_is_cancelled_does_not_wait(self, llm):
        reached, goes_on = threading.Event(), threading.Event()
        llm.model.before_forward = lambda batch: (reached.set(), goes_on.wait(LONG))
        first = llm.stream("a", GREEDY)
        assert reached.wait(LONG)
        waiting, most = [llm.stream("a", GREEDY) for _ in range(3)], llm._engine.max_waiting
        with pytest.raises(QueueFull, match=f"{most} requests are waiting"):
            llm.stream_choices("a", most, GREEDY)
        next_ones = llm.stream_choices("a", most - len(waiting), replace(GREEDY, max_tokens=1))
        goes_on.set()
        assert all(stream.read().finish_reason == "length" for stream in (first, *waiting, *next_ones))

    def test_more_choices_than_may_wait_are_refused_for_good(self, llm):
        for ask in (llm.stream_choices, llm.choices, partial(llm.choices, best_of=1025)):
            with pytest.raises(InvalidParams, match="1025 choices are more than may wait at a time: ask for 1024 at"):
                ask("a", 1 if isinstance(ask, partial) else 1025)

    def test_a_timeout_ends_the_text_and_says_so(self, llm):
        output = llm.generate("The fox", GREEDY, timeout_s=1e-9)
        assert (output.finish_reason, output.text) == ("timeout", "")

    @pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), 10**400, "5", True])
    def test_an_impossible_time_drains_nothing(self, llm, timeout_s):
        with pytest.raises(InvalidParams, match="timeout_s is"):
            llm.drain(timeout_s)
        assert llm.generate("a", GREEDY).text
        assert llm.drain(np.float32(60)) and llm.drain(1e300)

    def test_nobody_copies_what_runs(self, llm):
        with llm.stream("a", replace(GREEDY, max_tokens=2)) as stream:
            for each in (llm, stream):
                for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match="cannot be copied or sent to another process"):
                        copied(each)
            assert stream.read().finish_reason == "length"

    def test_what_cannot_listen_or_filter_is_refused_at_once(self):
        with pytest.raises(InvalidParams, match="listener is 1: give a function"):
            LLM.load("nowhere", listener=1)
        with pytest.raises(InvalidParams, match="give a list of filters"):
            LLM.load("nowhere", filters=[WordFilter])

    def test_a_closed_llm_says_so(self, folder):
        llm, _ = scripted_llm(folder)
        stream = llm.stream("The fox", SamplingParams(max_tokens=None, ignore_eos=True))
        llm.close()
        llm.close()
        with pytest.raises(Stopped):
            llm.generate("x")
        try:
            assert stream.read().finish_reason == "length"  # it may have been quick enough
        except Stopped:
            pass

    def test_a_lost_llm_gives_its_thread_back(self, folder):
        llm, model = scripted_llm(folder)
        thread = llm._worker._thread
        assert llm.generate("x", GREEDY).token_ids
        del llm
        gc.collect()
        assert not thread.is_alive() and len(model._cache) == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_fork_leaves_the_model_to_its_parent(self, llm):
        child = os.fork()
        if child == 0:
            try:
                llm.close()
            finally:
                os._exit(0 if len(llm.model._cache) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_who_reads_in_a_fork_is_told_that_nothing_runs_there(self, llm):
        reached, goes_on = threading.Event(), threading.Event()
        llm.model.before_forward = lambda batch: (reached.set(), goes_on.wait(LONG))
        stream = llm.stream("The fox", GREEDY)
        assert reached.wait(LONG) and llm.is_busy
        child = os.fork()
        if child == 0:
            told = False
            try:
                signal.alarm(LONG)  # who hangs is ended
                stream.read()
            except Stopped:
                told = not llm.is_busy
            finally:
                os._exit(0 if told else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        goes_on.set()
        assert stream.read().usage.num_output_tokens > 0

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_fork_can_load_a_model_of_its_own_while_its_parents_computes(self):
        def load():
            with LLM.load("default", threads=1, max_cache_tokens=64) as own:
                return own.generate("x", GREEDY).text

        def refused():
            with pytest.raises(Stopped):
                llm.generate("x")
            return load()

        with LLM.load("default", threads=1) as llm:
            whole = llm.generate("x", GREEDY).text
            params = SamplingParams(max_tokens=900, ignore_eos=True)
            streams = [llm.stream("x", params) for _ in range(8)]  # nobody reads them yet, but they are computed
            with llm._noting:  # as by another thread
                assert [in_fork(work) == whole for work in (load, load, refused)] == [True] * 3
            assert all(each.read().usage.num_output_tokens == 900 for each in streams)

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_models_load_anew_in_a_fork_what_their_parent_has_loaded(self):
        with Models(10**9, max_cache_tokens=64, threads=1) as models:

            def work():
                assert not llm.is_open
                with models.use("default") as own:
                    return own.generate("x", GREEDY).text

            with models.use("default") as llm:
                assert in_fork(work) == llm.generate("x", GREEDY).text
                assert llm.is_open

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_models_load_in_a_fork_what_another_thread_was_loading(self):
        begun, goes_on = threading.Event(), threading.Event()

        def progress(done, total):
            begun.set()
            assert goes_on.wait(LONG)

        def work():
            goes_on.set()
            with models.use("default") as own:
                return own.generate("x", GREEDY).text

        with Models(10**9, max_cache_tokens=64, threads=1, progress=progress) as models:
            loader = threading.Thread(target=models.preload)
            loader.start()
            assert begun.wait(LONG)
            with models._held:  # as by another thread
                told = in_fork(work)
            assert told == work()
            loader.join()

    def test_a_stream_keeps_its_llm(self, folder):
        stream = scripted_llm(folder)[0].stream("The fox", GREEDY)
        gc.collect()
        assert stream.read().finish_reason in ("length", "stop")

    def test_unknown_models(self, tmp_path, monkeypatch):
        with pytest.raises(NotFound, match="nobody/nothing has not been pulled: bitnet pull nobody/nothing"):
            LLM.load("nobody/nothing")
        with pytest.raises(NotFound, match="no such file"):
            LLM.load("a" * 5000)
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        for path in ("~/model", Path("~/model")):
            with pytest.raises(NotFound, match=f"the ~ is not expanded here: give {tmp_path}/model"):
                LLM.load(path)
        with pytest.raises(InvalidParams, match="a model must be"):
            LLM.load(None)
        assert (find_model("default") / "tokenizer.json").exists()
        with pytest.raises(InvalidParams, match="max_cache_tokens"):
            LLM.load(max_cache_tokens=0)
        with pytest.raises(InvalidParams, match="device"):
            LLM.load(device="tpu")

    def test_bad_recommendations_name_their_file(self, tmp_path):
        folder = write_folder(tmp_path, generation={"do_sample": True, "temperature": -1})
        with pytest.raises(FormatError, match=r"generation_config\.json: temperature is -1"):
            scripted_llm(folder)
        model = shutil.copytree(find_model("default"), tmp_path / "model")
        shutil.copy(folder / "generation_config.json", model)
        (problem,) = summarize(model).problems
        assert problem.startswith(f"{model / 'generation_config.json'}: temperature is -1")


@pytest.mark.parametrize(
    "generation, expected",
    [
        ({}, SamplingParams(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingParams(temperature=0.0)),
        ({"temperature": None, "top_p": None}, SamplingParams(temperature=0.0)),
        ({"temperature": 0.6}, SamplingParams(temperature=0.6)),
        ({"do_sample": True, "top_p": 0.9, "top_k": None}, SamplingParams(top_p=0.9)),
        ({"max_new_tokens": 7, "eos_token_id": 3}, SamplingParams(temperature=0.0, max_tokens=7)),
    ],
)
def test_recommended_params(generation, expected):
    assert default_params(json.loads(json.dumps(generation))) == expected

"""Files of prompts: every prompt is answered exactly once, whatever happens in between."""

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from scripted import ScriptedModel
from text_samples import write_folder
from typer.testing import CliRunner
from waiting import WAITS_AFTER_EIGHT_ANSWERS

from bitnet_inference import cli
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import FormatError, InvalidParams, Stopped
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.llm import LLM
from bitnet_inference.offline import BatchRun, generate_file
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.word_filter import WordFilter

PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
HI = [{"role": "user", "content": "Hi"}]
PROMPTS = [{"prompt": f"The fox {number}", "id": f"№{number}"} for number in range(40)]


@pytest.fixture
def llm(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "model"))
    model = ScriptedModel(vocab_size=tokenizer.vocab_size, max_positions=64, num_blocks=500)
    with LLM(model, tokenizer) as loaded:
        loaded.model = model
        yield loaded


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, prompts):
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def read(path):
    """The answers by line of the input; each is there once."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["line"] for answer in answers}) == len(answers)
    return {answer["line"]: answer for answer in answers}


class TestAnswers:
    def test_a_filter_that_raises_ends_its_own_prompt(self, llm, files):
        class Classifier(WordFilter):
            def check_prompt(self, text):
                if text.endswith("3"):
                    raise TimeoutError("the classifier did not answer")

        filtered = LLM(llm.model, llm.tokenizer, filters=[Classifier(words=["zzz"])])
        with filtered:
            result = generate_file(filtered, write(files[0], PROMPTS[:5]), files[1], PARAMS)
        assert (result.num_prompts, result.num_errors) == (5, 1)
        assert "did not answer" in read(files[1])[4]["error"]

    def test_they_are_those_of_generate_and_chat(self, llm, files):
        own = {"max_tokens": 3, "logprobs": 1, "logit_bias": {"5": 2}, "prompt_logprobs": 0}
        seeded = {"seed": 1, "grammar": {"regex": "[a-f]{4}"}}
        prompts = [{"prompt": "The fox"}, {"prompt": [5, 6], "id": 3}, {"messages": HI, "params": own}]
        write(files[0], [*prompts, {"prompt": "x", "params": seeded, "id": "ü\ud800"}])
        seen = []
        result = generate_file(llm, *files, PARAMS, progress=lambda *state: seen.append(state), priority=-1)
        answers = read(files[1])
        like = {"temperature": 1.0, "max_tokens": 12}
        expected = [
            llm.generate("The fox", SamplingParams(seed=7, **like)),
            llm.generate([5, 6], SamplingParams(seed=8, **like)),
            llm.chat(HI, SamplingParams(seed=9, max_tokens=3, logprobs=1, logit_bias={5: 2}, prompt_logprobs=0)),
            llm.generate("x", SamplingParams(seed=1, grammar=Grammar(regex="[a-f]{4}"), **like)),
        ]
        for line, output in enumerate(expected, 1):
            assert answers[line]["text"] == output.text
            assert answers[line]["finish_reason"] == output.finish_reason
            assert answers[line]["num_output_tokens"] == len(output.token_ids)
        assert answers[3]["token_ids"] == expected[2].token_ids and len(answers[3]["logprobs"]) == 3
        first, *others = expected[2].prompt_logprobs
        told = [{"logprob": each.logprob, "top": []} for each in others]
        assert first is None and answers[3]["prompt_logprobs"] == [None, *told]
        assert [answers[line].get("id") for line in range(1, 5)] == [None, 3, None, "ü\ud800"]
        assert seen == [(done, 4) for done in range(1, 5)]
        assert (result.num_prompts, result.num_before, result.num_errors) == (4, 0, 0)
        assert result.num_output_tokens == sum(len(output.token_ids) for output in expected)
        assert result.num_prompt_tokens == sum(output.usage.num_prompt_tokens for output in expected)

    def test_what_is_null_counts_as_left_out(self, llm, files):
        nulls = {field.name: None for field in fields(SamplingParams)} | {"n": None, "best_of": None, "nothing": None}
        beside = dict.fromkeys(("id", "n", "best_of", "nothing"))
        prompts = [
            {"prompt": "The fox", "messages": None, "params": nulls, **beside},
            {"prompt": None, "messages": HI, "params": None, **beside},
            {"prompt": "x", "params": nulls | {"temperature": 0, "grammar": {"regex": "[a-f]{4}", "gbnf": None}}},
        ]
        generate_file(llm, write(files[0], prompts), files[1], PARAMS)
        params = [replace(PARAMS, seed=7 + line) for line in range(3)]
        formed = replace(params[2], temperature=0, grammar=Grammar(regex="[a-f]{4}"))
        expected = [llm.generate("The fox", params[0]), llm.chat(HI, params[1]), llm.generate("x", formed)]
        answers = read(files[1])
        assert [answers[line]["text"] for line in (1, 2, 3)] == [output.text for output in expected]

    def test_an_answer_is_one_line_also_to_who_ends_lines_at_every_unicode_line_end(self, llm, files):
        ends = "\x85\u2028\u2029"
        generate_file(llm, write(files[0], [{"prompt": "x", "id": ends}]), files[1], PARAMS)
        (line,) = files[1].read_text().splitlines()
        assert json.loads(line)["id"] == ends

    def test_lines_with_several_choices_have_those_of_choices(self, llm, files):
        prompts = [{"prompt": "The fox", "n": 3}, {"messages": HI, "n": 2, "best_of": 5}, {"prompt": [5], "best_of": 2}]
        write(files[0], [*prompts, {"prompt": "x", "n": 1, "id": "one"}, {"prompt": [999], "n": 2, "id": "bad"}])
        seen = []
        result = generate_file(llm, *files, PARAMS, progress=lambda *state: seen.append(state))
        answers, params = read(files[1]), [replace(PARAMS, seed=7 + line) for line in range(4)]
        expected = [
            llm.choices("The fox", 3, params[0]),
            llm.chat_choices(HI, 2, params[1], best_of=5),
            llm.choices([5], 1, params[2], best_of=2),
            llm.choices("x", 1, params[3]),
        ]
        for line, texts in enumerate(expected, 1):
            assert [choice["text"] for choice in answers[line]["choices"]] == [text.text for text in texts]
            assert [choice["num_output_tokens"] for choice in answers[line]["choices"]] == [
                len(text.token_ids) for text in texts
            ]
            assert answers[line]["num_prompt_tokens"] == texts[0].usage.num_prompt_tokens
            assert not any("logprobs" in choice or "text" in answers[line] for choice in answers[line]["choices"])
        every = llm.chat_choices(HI, 5, params[1])
        assert answers[2]["num_output_tokens"] == sum(text.usage.num_output_tokens for text in every)
        assert answers[4]["id"] == "one" and "error" in answers[5] and "choices" not in answers[5]
        assert seen == [(done, 5) for done in range(1, 6)]
        done = [answers[line] for line in range(1, 5)]
        assert result.num_output_tokens == sum(answer["num_output_tokens"] for answer in done)

    def test_many_choices_leave_others_room(self, llm, files):
        write(files[0], [{"prompt": [number + 1], "n": 100, "params": {"max_tokens": 2}} for number in range(20)])
        others = []
        generate_file(llm, *files, PARAMS, progress=lambda done, total: others.append(llm.generate([5], PARAMS)))
        assert [len(answer["choices"]) for answer in read(files[1]).values()] == [100] * 20 and len(others) == 20

    def test_without_params_the_models_own_are_used(self, llm, files):
        generate_file(llm, write(files[0], PROMPTS[:1]), files[1])
        assert read(files[1])[1]["text"] == llm.generate(PROMPTS[0]["prompt"]).text

    def test_they_stand_in_the_order_in_which_they_end(self, llm, files):
        counts = [30, 1, 10]
        write(files[0], [{"prompt": [5], "params": {"max_tokens": count, "ignore_eos": True}} for count in counts])
        open_stream, opened = llm.stream, threading.Semaphore(0)

        def stream(*args, **options):
            begun = open_stream(*args, **options)
            opened.release()
            return begun

        llm.stream = stream
        # The first step waits until all have come: this model could answer the first before the second is read.
        llm.model.before_forward = lambda batch: llm.model.num_forwards or [opened.acquire(timeout=10) for _ in counts]
        generate_file(llm, *files, PARAMS)
        assert list(read(files[1])) == [2, 3, 1]

    def test_more_prompts_than_are_under_way(self, llm, files):
        generate_file(llm, write(files[0], [{"prompt": [number % 99 + 1]} for number in range(1500)]), files[1], PARAMS)
        assert len(read(files[1])) == 1500

    def test_empty_lines_count_and_have_no_answer(self, llm, files):
        files[0].write_text('\n{"prompt": "a"}\r\n  \n{"prompt": "b"}')
        assert generate_file(llm, *files, PARAMS).num_prompts == 2
        assert sorted(read(files[1])) == [2, 4]


class TestErrors:
    def test_a_prompt_that_fails_is_a_line_and_the_others_go_on(self, llm, files):
        write(files[0], [{"prompt": [5]}, {"prompt": [5] * 90, "id": "long"}, {"prompt": [376]}, {"prompt": [6]}])
        result = generate_file(llm, *files, PARAMS)
        answers = read(files[1])
        assert "text" in answers[1] and "text" in answers[4]
        assert answers[2]["error"] == "PromptTooLong: the prompt has 90 tokens, at most 63 fit: shorten the prompt"
        assert answers[2]["id"] == "long" and answers[3]["error"].startswith("InvalidParams: ")
        assert result.num_errors == 2

    @pytest.mark.parametrize("retry", [True, False])
    def test_they_are_tried_again_or_kept(self, llm, files, retry):
        def fail(history, logits):
            if history[0] == 7:
                logits[:] = np.nan

        write(files[0], [{"prompt": [token]} for token in (5, 7, 6)])
        llm.model.change_logits = fail
        assert generate_file(llm, *files, PARAMS).num_errors == 1
        os.chmod(files[1], 0o640)
        llm.model.change_logits = lambda history, logits: None
        result = generate_file(llm, *files, PARAMS, retry_errors=retry)
        assert (result.num_before, result.num_errors) == ((2, 0) if retry else (3, 1))
        assert ("error" in read(files[1])[2]) != retry and len(read(files[1])) == 3
        assert sorted(path.name for path in files[0].parent.iterdir()) == ["in.jsonl", "model", "out.jsonl"]
        assert files[1].stat().st_mode & 0o777 == 0o640

    def test_what_concerns_all_prompts_is_raised_and_no_line(self, llm, files, tmp_path):
        write(files[0], PROMPTS)
        for wrong in ({"params": SamplingParams(stop_token_ids=[999])}, {"params": {"seed": 1}}, {"priority": "high"}):
            with pytest.raises(InvalidParams):
                generate_file(llm, *files, **wrong)
        llm.close()
        with pytest.raises(Stopped):
            generate_file(llm, *files)
        assert not files[1].exists()

    def test_messages_without_a_chat_template_are_named_before_the_start(self, files, tmp_path):
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "model", chat_template=None))
        with LLM(ScriptedModel(vocab_size=tokenizer.vocab_size), tokenizer) as llm:
            why = "in.jsonl: line 4: has messages, and the model has no chat template: give a prompt"
            with pytest.raises(FormatError, match=why):
                generate_file(llm, write(files[0], [*PROMPTS[:3], {"messages": HI}, {"messages": HI}]), files[1])
            assert not files[1].exists()
            assert generate_file(llm, write(files[0], PROMPTS[:3]), files[1]).num_errors == 0

    def test_messages_over_which_a_chat_template_stumbles(self, files, tmp_path):
        template = "{{ messages[0].content }}{% if messages[0].content == 'x' %}{{ 1 / 0 }}{% endif %}"
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "model", chat_template=template))
        with LLM(ScriptedModel(vocab_size=tokenizer.vocab_size), tokenizer) as llm:
            write(files[0], [{"messages": HI}, {"messages": [{"role": "user", "content": "x"}]}, {"messages": HI}])
            assert generate_file(llm, *files, PARAMS).num_errors == 1
        assert "chat template 'default': fails with ZeroDivisionError" in read(files[1])[2]["error"]

    @pytest.mark.parametrize("step", [(tempfile, "mkstemp"), (os, "fsync"), (os, "replace")])
    def test_a_folder_that_takes_no_new_file(self, llm, files, monkeypatch, step):
        def refuse(*_, **__):
            raise PermissionError(errno.EACCES, "Permission denied")

        write(files[0], [{"prompt": [5]}, {"prompt": [376]}, {"prompt": [6]}])
        generate_file(llm, *files, PARAMS)
        before = files[1].read_bytes()
        with BatchRun(*files) as run:
            with monkeypatch.context() as patch:
                patch.setattr(*step, refuse)
                why = r"out.jsonl cannot be written anew, without its errors \(Permission denied\): give a folder"
                with pytest.raises(InvalidParams, match=why):
                    run.run(llm, PARAMS)
            assert files[1].read_bytes() == before
            assert run.run(llm, PARAMS).num_before == 2
        assert sorted(path.name for path in files[0].parent.iterdir()) == ["in.jsonl", "model", "out.jsonl"]
        assert len(read(files[1])) == 3


class TestGoingOn:
    def test_from_wherever_the_file_was_cut(self, llm, files):
        write(files[0], [*PROMPTS[:30], *({**prompt, "n": 2, "best_of": 3} for prompt in PROMPTS[30:])])
        generate_file(llm, *files, PARAMS)
        whole = files[1].read_bytes()
        for num_bytes in {0, 1, 8, len(whole) - 1, len(whole), *range(2, len(whole), len(whole) // 40)}:
            files[1].write_bytes(whole[:num_bytes])
            result = generate_file(llm, *files, PARAMS)
            assert result.num_before == whole[:num_bytes].count(b"\n")
            assert sorted(files[1].read_bytes().splitlines()) == sorted(whole.splitlines())

    def test_from_where_the_disk_was_full(self, llm, files):
        generate_file(llm, write(files[0], PROMPTS), files[1], PARAMS)
        whole = files[1].read_bytes()
        files[1].unlink()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))
        try:
            with pytest.raises(InvalidParams, match=r"out\.jsonl cannot be written: File too large: free space, then"):
                generate_file(llm, *files, PARAMS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        num_whole = files[1].read_bytes().count(b"\n")
        assert generate_file(llm, *files, PARAMS).num_before == num_whole > 0
        assert sorted(files[1].read_bytes().splitlines()) == sorted(whole.splitlines())

    def test_what_is_done_is_not_done_again(self, llm, files):
        generate_file(llm, write(files[0], PROMPTS), files[1], PARAMS)
        done, num_forwards = files[1].read_bytes(), llm.model.num_forwards
        result = generate_file(llm, *files, PARAMS)
        assert (result.num_before, result.num_output_tokens) == (len(PROMPTS), 0)
        assert files[1].read_bytes() == done and llm.model.num_forwards == num_forwards

    def test_after_an_exception_with_the_same_files(self, llm, files):
        def stop(done, total):
            if done == 5:
                raise KeyboardInterrupt

        with BatchRun(write(files[0], PROMPTS), files[1]) as run:
            with pytest.raises(KeyboardInterrupt):
                run.run(llm, PARAMS, progress=stop)
            assert run.num_done == len(read(files[1])) == 5
            assert run.run(llm, PARAMS).num_before == 5
        assert len(read(files[1])) == len(PROMPTS)

    def test_unseeded_texts_are_drawn_anew_and_not_repeated(self, llm, files):
        write(files[0], [{"prompt": "x"}] * 30)
        free = SamplingParams(temperature=1.0, max_tokens=12)
        with pytest.raises(ZeroDivisionError):
            generate_file(llm, *files, free, progress=lambda done, total: done < 10 or 1 / 0)
        generate_file(llm, *files, free)
        assert max(Counter(answer["text"] for answer in read(files[1]).values()).values()) < 3

    def test_with_callables_of_the_same_names(self, llm, files):
        def made():
            def not_five(tokens, logits):
                logits[5] = -np.inf

            return not_five

        write(files[0], PROMPTS[:3])
        for num_before in (0, 3):
            params = replace(PARAMS, processors=[made()])
            assert generate_file(llm, *files, params).num_before == num_before
        with pytest.raises(FormatError, match="other sampling options"):
            generate_file(llm, *files, replace(PARAMS, processors=[print]))

    def test_with_registered_names(self, llm, files):
        named = SamplingParams(max_tokens=3, strategy="lowest")
        with pytest.raises(InvalidParams, match="unknown strategy 'lowest'"):
            generate_file(llm, write(files[0], PROMPTS[:3]), files[1], named)
        llm.register_strategy("lowest", lambda tokens, logits: 5)
        assert generate_file(llm, *files, named).num_errors == 0
        assert generate_file(llm, *files, named).num_before == 3


class TestFilesThatDoNotFit:
    def test_an_output_of_another_input_or_of_other_settings_is_left_alone(self, llm, files):
        generate_file(llm, write(files[0], PROMPTS[:3]), files[1], PARAMS)
        before = files[1].read_bytes()
        with pytest.raises(FormatError, match="other sampling options or another model"):
            generate_file(llm, *files, SamplingParams(seed=8))
        write(files[0], [*PROMPTS[:2], {"prompt": "changed"}])
        with pytest.raises(FormatError, match="answers a line 3 that the input does not have"):
            generate_file(llm, *files, PARAMS)
        write(files[0], PROMPTS[:2])
        with pytest.raises(FormatError, match="answers a line 3"):
            generate_file(llm, *files, PARAMS)
        assert files[1].read_bytes() == before
        write(files[0], PROMPTS[:5])  # a longer one is welcome
        assert generate_file(llm, *files, PARAMS).num_before == 3

    @pytest.mark.parametrize(
        "text, message",
        [
            ("notes of mine", "the last line: is no answer"),
            ('{"line": 1}\n', "line 1: is no answer"),
            ("\n", "line 1: is no answer"),
            ('{"line": 1, "ke', ""),
            ('{"line": 99, "key": "{key}", "text": ""}\n', "a line 99"),
            ('{"line": 0, "key": "{key}", "text": ""}\n', "a line 0"),
            ("{first}\n{first}\n", "line 2: answers line 1 once more"),
            ("{first}\n\0\0\0\0", ""),
            ('{first}\n{"line": 1, "ke\0\0\0\0', ""),
            ("{first}\n\0\0x", "the last line: is no answer"),
            ("\0\0\0\0", "the last line: is no answer"),
        ],
    )
    def test_hostile_outputs(self, llm, files, text, message):
        generate_file(llm, write(files[0], PROMPTS[:1]), files[1], PARAMS)
        first = files[1].read_text().rstrip()
        text = text.replace("{first}", first).replace("{key}", json.loads(first)["key"])
        files[1].write_text(text)
        with pytest.raises(FormatError, match=message) if message else contextlib.nullcontext():
            generate_file(llm, *files, PARAMS)
        assert (files[1].read_text() == text) == bool(message)

    @pytest.mark.parametrize(
        "line, message",
        [
            ("x", "this is not JSON"),
            ("[]", "a JSON object was expected"),
            ('{"prompt": "a", "prompt": "b"}', "stands there twice"),
            ("{}", 'either "prompt" or "messages"'),
            ('{"prompt": "a", "messages": []}', 'either "prompt" or "messages"'),
            ('{"prompt": "a", "temprature": 1}', "'temprature' is not known"),
            ('{"prompt": ""}', "not empty"),
            ('{"prompt": "\\ud800"}', "prompt"),
            ('{"prompt": []}', "empty"),
            ('{"prompt": null}', "prompt must be"),
            ('{"prompt": ["a"]}', "prompt must be"),
            ('{"prompt": [1, true]}', "token ids only"),
            ('{"messages": null}', "give a list"),
            ('{"messages": "Hi"}', "messages must be a list"),
            ('{"messages": [{"role": "user"}]}', "has no 'content'"),
            ('{"prompt": "a", "id": [1]}', "id is"),
            ('{"prompt": "a", "id": true}', "id is"),
            ('{"prompt": "a", "n": 0}', "n must be|n is 0"),
            ('{"prompt": "a", "n": 513}', "n is 513: give at most 512"),
            ('{"prompt": "a", "n": 2, "best_of": "3"}', "best_of"),
            ('{"prompt": "a", "n": 3, "best_of": 2}', "best_of is 2, n is 3: give best_of at least n"),
            ('{"prompt": "a", "params": {"n": 2}}', "n is no sampling option: write it beside params"),
            ('{"prompt": "a", "params": 3}', "params is 3"),
            ('{"prompt": "a", "params": {"temprature": 1}}', "did you mean temperature"),
            ('{"prompt": "a", "params": {"temperature": NaN}}', "temperature is nan"),
            ('{"prompt": "a", "params": {"logit_bias": {"x": 1}}}', "logit_bias"),
            ('{"prompt": "a", "params": {"logit_bias": {"' + "1" * 5000 + '": 1}}}', "logit_bias"),
            ('{"prompt": "a", "params": {"grammar": {"regexp": "a"}}}', "grammar is"),
            ('{"prompt": "a", "params": {"grammar": {"regex": "(a"}}}', "grammar: regex"),
            ("[" * 9000, "nested too deeply|not JSON"),
            ('{"prompt": ' + "9" * 5000 + "}", "not JSON"),
            ("\ufeff{", "not JSON"),
        ],
    )
    def test_wrong_lines_are_named_before_there_is_a_model(self, files, line, message):
        files[0].write_text('{"prompt": "a"}\n' + line + "\n")
        with pytest.raises(FormatError, match=f"in.jsonl: line 2: .*({message})"):
            BatchRun(*files)
        assert not files[1].exists()

    def test_files_that_cannot_be_used(self, files, tmp_path):
        with pytest.raises(InvalidParams, match=r"in.jsonl cannot be read: No such file"):
            BatchRun(*files)
        files[0].write_text("\n\n")
        with pytest.raises(InvalidParams, match="has no prompts"):
            BatchRun(*files)
        write(files[0], PROMPTS)
        (tmp_path / "link").symlink_to(files[0])
        for output, message in (
            (files[0], "is the input"),
            (tmp_path / "link", "is the input"),
            (tmp_path, "it is no file"),
            (tmp_path / "absent" / "out", "make the folder"),
            (files[0] / "out", "cannot be written"),
        ):
            with pytest.raises(InvalidParams, match=message):
                BatchRun(files[0], output)
        with pytest.raises(InvalidParams, match="is no file"):
            BatchRun(tmp_path, files[1])
        with open(files[0], "ab") as file:
            file.write(b'{"prompt": "' + b"a" * (8 << 20) + b'"}\n')
        with pytest.raises(FormatError, match="line 41: has more than 8388608 bytes"):
            BatchRun(*files)

    def test_an_input_that_changes_meanwhile(self, llm, files):
        with BatchRun(write(files[0], PROMPTS), files[1]) as run:
            for changed, message in (([*PROMPTS[:5], {"prompt": "x"}], "6: has changed"), (PROMPTS[:9], "10: has")):
                write(files[0], changed)
                with pytest.raises(FormatError, match=f"line {message}"):
                    run.run(llm, PARAMS)
            write(files[0], [*PROMPTS, {"prompt": "one more"}])
            assert run.run(llm, PARAMS).num_prompts == len(read(files[1])) == len(PROMPTS)
        assert generate_file(llm, *files, PARAMS).num_before == len(PROMPTS)

    def test_one_writer_at_a_time(self, llm, files):
        write(files[0], PROMPTS)
        with BatchRun(*files) as run:
            for _ in range(2):
                with pytest.raises(InvalidParams, match="written by another process"):
                    BatchRun(*files)
                run.run(llm, PARAMS)
        BatchRun(*files).close()


class TestCommand:
    def test_a_batch(self, files):
        write(files[0], [{"prompt": "Once upon a time"}, {"messages": HI}, {"prompt": [99999]}])
        args = ["batch", *map(str, files), "-n", "6", "--choice", "fox", "--choice", "owl"]
        result = CliRunner().invoke(cli.app, args)
        assert result.exit_code == 1 and result.stdout == "", result.output
        summary, where = result.stderr.splitlines()
        assert summary.startswith("[3 prompts; 1 failed; ") and summary.endswith(" tokens/s]")
        assert where == f'[what failed says why under "error" in {files[1]}]'
        assert {read(files[1])[line]["text"] for line in (1, 2)} <= {"fox", "owl"}
        again = CliRunner().invoke(cli.app, [*args, "--keep-errors"])
        assert again.exit_code == 1 and "3 of them done before; 1 failed; 0 tokens in" in again.stderr

    def test_answers_may_be_filtered_and_prompts_slide(self, files, tmp_path):
        (tmp_path / "words").write_text("fox\n")
        write(files[0], [{"prompt": "Once", "params": {"grammar": {"regex": "a fox"}}}, {"prompt": "owl " * 9000}])
        args = ["batch", *map(str, files), "-n", "4", "--filter", str(tmp_path / "words"), "--drafts", "none"]
        result = CliRunner().invoke(cli.app, [*args, "--overflow", "truncate_left"])
        assert result.exit_code == 0, result.output
        filtered, dropped = (read(files[1])[line] for line in (1, 2))
        assert (filtered["text"], filtered["finish_reason"]) == ("a ", "filtered")
        assert dropped["num_dropped_tokens"] > 1000 and "num_dropped_tokens" not in filtered

    @pytest.mark.parametrize(
        "prompt, args, message",
        [
            ("", [], "in.jsonl: line 1: prompt must be"),
            ("x", ["-m", "nowhere"], "nowhere: there is no such file"),
            ("x", ["--logit-bias", "99999=1"], "token 99999 does not exist"),
            ("x", ["--regex", "(a"], "grammar: regex"),
        ],
    )
    def test_mistakes(self, files, prompt, args, message):
        write(files[0], [{"prompt": prompt}])
        result = CliRunner().invoke(cli.app, ["batch", *map(str, files), *args])
        assert result.exit_code == 2 and result.stderr.startswith("bitnet: ") and message in result.stderr
        assert result.stderr.count("\n") == 1 and not files[1].exists()

    @pytest.mark.parametrize(
        "kill, code",
        [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)],
    )
    def test_killed_and_started_again_it_writes_what_an_uninterrupted_run_writes(self, files, tmp_path, kill, code):
        write(files[0], [{"prompt": f"The fox {n}", "params": {"max_tokens": n % 50 + 2}} for n in range(60)])
        args = ["batch", *map(str, files), "--seed", "5", "-t", "0.8"]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen([sys.executable, "-c", WAITS_AFTER_EIGHT_ANSWERS, *args], text=True, **pipes) as process:
            process.stdout.readline()
            process.send_signal(kill)
            stderr = process.communicate()[1]
        assert process.returncode == code and files[1].read_bytes().count(b"\n") == 8
        if code > 0:
            done = f"8 of 60 prompts are answered in {files[1]}"
            assert stderr == f"bitnet: stopped: {done}: the same command goes on from there\n"
        again = CliRunner().invoke(cli.app, args)
        assert again.exit_code == 0 and "[60 prompts, 8 of them done before; 0 failed" in again.stderr
        with LLM.load() as llm:
            params = SamplingParams.from_mapping({**vars(llm.default_params), "seed": 5, "temperature": 0.8})
            generate_file(llm, files[0], tmp_path / "at once", params)
        assert sorted(files[1].read_bytes().splitlines()) == sorted((tmp_path / "at once").read_bytes().splitlines())

"""The command, on the model that comes with the package."""

import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bitnet_inference import bench, bench_engine, cli
from bitnet_inference.cli import conversation
from bitnet_inference.config import num_processors
from bitnet_inference.formats.safetensors_files import read_header

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device")

GOLDEN = Path(__file__).parents[1] / "golden"
LLAMA = str(GOLDEN / "llama3-bf16")
STORY = "Tell me a story about a brave fox called Mia"


ENDLESS = ("--ignore-eos", "--overflow", "sliding", "-n", "100000000")
QUICK = functools.partial(bench.Workload, prompts=(8,), batches=(2,), num_decoded=2, num_samples=1, min_sample_s=0)


def bitnet(*args, stdin=None):
    return CliRunner().invoke(cli.app, args, input=stdin, prog_name="bitnet")


def command(*args):
    return [sys.executable, "-m", "bitnet_inference", *args]


def test_run_prints_text_and_then_a_line():
    result = bitnet("run", STORY, "-n", "20", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip()) > 20 and result.stdout.endswith("\n")
    line = r"\[prompt: \d+ tokens, [\d.]+ tokens/s; answer: 20 tokens, [\d.]+ tokens/s; length\]\n"
    assert re.fullmatch(line, result.stderr)
    assert bitnet("run", STORY, "-n", "20", "--seed", "1").stdout == result.stdout


def test_filters_are_word_lists_and_say_when_they_end_an_answer(tmp_path):
    words, owls = tmp_path / "words.txt", tmp_path / "owls.txt"
    words.write_text("# what was\n/wa[a-z]+/\n")
    owls.write_text("owl\n")
    result = bitnet("run", STORY, "-n", "60", "-t", "0", "--filter", str(words), "--filter", str(owls))
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() and "wa" not in result.stdout
    assert "[ended by the filter 'words.txt']\n" in result.stderr and "; filtered]\n" in result.stderr
    refused = bitnet("run", "An owl", "--filter", str(owls))
    assert (refused.exit_code, refused.stdout) == (2, "")
    why = "messages[0].content is refused by the filter 'owls.txt': leave out what it forbids"
    assert refused.stderr == f"bitnet: {why}\n"
    talk = bitnet("chat", "-n", "4", "--filter", str(owls), stdin="An owl\nHello\n")
    assert f"{why} (/reset begins anew)" in talk.stderr
    assert talk.exit_code == 0 and talk.stdout.strip()


def test_run_searches():
    result = bitnet("run", STORY, "--beams", "3", "-n", "8", "--ignore-eos", "--length-penalty", "0")
    assert result.exit_code == 0, result.output
    found = json.loads(bitnet("run", STORY, "--beams", "3", "-n", "8", "--ignore-eos", "--json").stdout)
    assert result.stdout.strip() == found["text"].strip() and len(found["token_ids"]) == 8 and found["score"] < 0
    summed = bitnet("run", STORY, "--beams", "3", "-n", "8", "--ignore-eos", "--json", "--length-penalty", "0").stdout
    assert json.loads(summed)["score"] == pytest.approx(8 * found["score"])
    assert "answer: 8 tokens" in result.stderr
    stopped = json.loads(bitnet("run", STORY, "--beams", "3", "-n", "30", "--stop", ".", "--json").stdout)
    assert "." not in stopped["text"] and (stopped["finish_reason"], stopped["stopped_by"]) == ("stop", ".")


def test_run_writes_several_answers(tmp_path):
    common = ["run", STORY, "--seed", "7", "-t", "1", "-n", "8"]
    first = bitnet(*common).stdout
    two = bitnet(*common, "--num-choices", "2")
    assert two.exit_code == 0 and two.stdout.startswith(first) and len(two.stdout) > len(first), two.output
    assert two.stderr.count("answer: 8 tokens") == 2
    every = [json.loads(line) for line in bitnet(*common, "--num-choices", "4", "--json").stdout.splitlines()]
    assert [answer["text"] + "\n" for answer in every[:2]] == two.stdout.splitlines(keepends=True)
    ranked = bitnet(*common, "--num-choices", "2", "--best-of", "4", "--json").stdout.splitlines()
    scored = bitnet(*common, "--num-choices", "4", "--json", "--logprobs", "0").stdout.splitlines()
    scored = sorted(map(json.loads, scored), key=lambda one: -sum(each["logprob"] for each in one["logprobs"]))
    assert [json.loads(line)["text"] for line in ranked] == [one["text"] for one in scored[:2]]
    (tmp_path / "words").write_text("she\nhe\n")
    told = bitnet("run", STORY, "-n", "30", "--beams", "2", "--filter", str(tmp_path / "words"))
    assert "[ended by the filter 'words']" in told.stderr


def test_run_as_json():
    result = bitnet("run", STORY, "-n", "5", "--json", "--logprobs", "2", "-t", "0")
    answer = json.loads(result.stdout)
    assert len(answer["token_ids"]) == 5 and answer["finish_reason"] == "length" and answer["text"]
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [2] * 5
    assert answer["usage"]["num_output_tokens"] == 5


def test_run_writes_a_profile_and_says_where_the_time_went(tmp_path):
    file = tmp_path / "trace.json"
    plain = bitnet("run", STORY, "-n", "5", "--seed", "1")
    result = bitnet("run", STORY, "-n", "5", "--seed", "1", "--drafts", "none", "--profile", str(file))
    assert result.exit_code == 0 and result.stdout == plain.stdout, result.output
    lines = result.stderr.splitlines()
    assert "answer: 5 tokens" in lines[0] and lines[1].split() == ["ms", "share", "phase", "of", "a", "step"]
    assert lines[-1] == f"[trace: {file}; open it at https://ui.perfetto.dev]"
    rows = [line.split() for line in lines[2:-1]]
    assert {("ternary", "forward"), ("screen", "sample")} <= {(row[0], row[3]) for row in rows}
    assert 90 < sum(float(row[2].rstrip("%")) for row in rows) < 101, "all but what is too little to show"
    names = [record["name"] for record in json.loads(file.read_text())["traceEvents"]]
    assert names.count("step") == 5 and {"prompt", "output", "ternary", "cache blocks"} <= set(names)


def test_a_profile_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("bitnet_inference.llm.LLM.load", lambda *_, **__: pytest.fail("it loads"))
    result = bitnet("run", STORY, "--profile", str(tmp_path / "absent" / "trace.json"))
    assert result.exit_code == 2 and "cannot be written" in result.stderr, result.output


def test_prompts_come_from_stdin_and_may_be_raw():
    given = json.loads(bitnet("run", STORY, "--json", "-t", "0", "-n", "5").stdout)
    piped = json.loads(bitnet("run", "--json", "-t", "0", "-n", "5", stdin=STORY + "\n").stdout)
    dashed = json.loads(bitnet("run", "-", "--json", "-t", "0", "-n", "5", stdin=STORY).stdout)
    raw = json.loads(bitnet("run", STORY, "--raw", "--json", "-t", "0", "-n", "5").stdout)
    assert given["token_ids"] == piped["token_ids"] == dashed["token_ids"]
    assert raw["usage"]["num_prompt_tokens"] < given["usage"]["num_prompt_tokens"]


def test_drafts_change_no_text():
    plain, drafted = (bitnet("run", STORY, "-n", "20", "--seed", "1", "--drafts", who) for who in ("none", "default"))
    assert plain.exit_code == drafted.exit_code == 0 and plain.stdout == drafted.stdout
    assert "nobody: there is no such file" in bitnet("run", STORY, "--drafts", "nobody").stderr


def test_every_sampling_option_arrives(monkeypatch):
    seen = []
    monkeypatch.setattr("bitnet_inference.llm.LLM.stream_chat", lambda llm, talk, params: seen.append((talk, params)))
    options = {
        "temperature": 0.5, "top-k": 3, "top-p": 0.25, "min-p": 0.125, "repetition-penalty": 1.5,
        "presence-penalty": 0.5, "frequency-penalty": -0.5, "seed": 9, "max-tokens": 7, "min-tokens": 2,
        "overflow": "sliding",
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in options.items()]
    flags += ["--stop", "a", "--stop", "b", "--stop-token=4", "--logit-bias", "5=-1.5", "--logit-bias=6=2"]
    bitnet("run", "x", *flags, "--ignore-eos", "--system", "s")
    ((talk, params),) = seen
    assert {name: getattr(params, name.replace("-", "_")) for name in options} == options
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("a", "b"), (4,), True)
    assert params.logit_bias == {5: -1.5, 6: 2.0}
    assert talk == [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}]


def test_options_not_given_are_the_models_own(monkeypatch):
    seen = []
    monkeypatch.setattr("bitnet_inference.llm.LLM.stream_chat", lambda llm, talk, params: seen.append((llm, params)))
    bitnet("run", "x", "--top-k", "0")
    ((llm, params),) = seen
    assert params == llm.default_params and not params.is_greedy


def test_chat_reads_lines_and_remembers(monkeypatch):
    talks = []
    original = conversation._answer

    def remember(llm, talk, line, params):
        original(llm, talk, line, params)
        talks.append([message["role"] for message in talk])

    monkeypatch.setattr(conversation, "_answer", remember)
    lines = f"{STORY}\n\nAnother one\n/reset\n/what\n/help\nHello\n/exit\nnever\n"
    result = bitnet("chat", "-n", "8", "--system", "x", stdin=lines)
    assert result.exit_code == 0, result.output
    assert talks == [
        ["system", "user", "assistant"],
        ["system", "user", "assistant", "user", "assistant"],
        ["system", "user", "assistant"],
    ]
    assert len(result.stdout.splitlines()) >= 3
    assert "/what is no command" in result.stderr and "Alt+Enter" in result.stderr


def test_a_chat_goes_on_when_the_context_is_full():
    lines = "".join(f"Tell me of animal {number}{' and its day' * 90}\n" for number in range(5))
    result = bitnet("chat", "-n", "4", "-t", "0", stdin=lines)
    assert result.exit_code == 0, result.output
    note = r"\[context: \d+ of 1024 tokens, (\d+) of the prompt left out; (stop|length)\]"
    dropped = [int(found[1]) for found in map(re.compile(note).fullmatch, result.stderr.splitlines()) if found]
    assert 1 <= len(dropped) <= 4 and dropped == sorted(dropped)
    refused = bitnet("chat", "-n", "4", "-t", "0", "--overflow", "error", stdin=lines)
    assert refused.exit_code == 0 and "/reset" in refused.stderr and "left out" not in refused.stderr


def test_run_goes_on_behind_the_context():
    options = ("--raw", "--ignore-eos", "-t", "0", "-n", "700", "--overflow", "sliding")
    result = bitnet("run", "word " * 1500, *options)
    assert result.exit_code == 0, result.output
    note = r"context: \d+ of 1024 tokens, \d+ of the prompt left out, slid once; length\]\n"
    assert re.search(note, result.stderr), result.stderr
    refused = bitnet("run", "word", "--raw", "--overflow", "keep_system")
    assert refused.exit_code == 2 and 'or "truncate_left" for a plain prompt' in refused.stderr


def test_chat_survives_a_message_that_is_too_long():
    result = bitnet("chat", "-n", "4", stdin="word " * 3000 + "\nHello\n")
    assert result.exit_code == 0
    assert "tokens, at most" in result.stderr and "/reset" in result.stderr
    assert result.stdout.strip()


def test_inspect_tells_what_a_model_is():
    result = bitnet("inspect", str(GOLDEN / "bitnet-packed"), "--plan")
    assert result.exit_code == 0, result.output
    for word in ("ternary", "multiplies", "sub-norms", "for 1000 tokens", "<|begin_of_text|>", "recorded:", "fused:"):
        assert word in result.stdout
    assert bitnet("inspect").exit_code == 0


def test_inspect_tells_everything_that_is_wrong(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "bitnet-packed", folder)
    (folder / "tokenizer.json").unlink()
    result = bitnet("inspect", str(folder))
    assert result.exit_code == 2
    assert "memory" in result.stdout and "tokenizer.json: the file is missing" in result.stderr
    shutil.copy(GOLDEN / "bitnet-packed" / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("{% if")
    result = bitnet("inspect", str(folder))
    assert result.exit_code == 2 and "chat template 'default': line 1: broken template" in result.stderr


def test_doctor_finds_nothing_wrong():
    result = bitnet("doctor")
    assert result.exit_code == 0 and result.stderr == "", result.output
    for word in ("chosen", "golden logits", "the same bits on", "GB/s read", "free for this process"):
        assert word in result.stdout


def test_eval_measures_a_text(tmp_path):
    text, file = tmp_path / "story.txt", tmp_path / "numbers.json"
    text.write_text("Once upon a time there was a fox who lived under an old oak near the river. " * 9)
    given = ("--text", str(text), "--window", "64", "--json", str(file), "--threads", "1")
    result = bitnet("eval", *given)
    assert result.exit_code == 0, result.output
    numbers = json.loads(file.read_text())
    assert numbers["num_bytes"] == 9 * 76 and (numbers["window"], numbers["stride"]) == (64, 32)
    assert f"perplexity       {numbers['perplexity']:.4f}\n" in result.stdout
    assert f"bits a byte      {numbers['bits_per_byte']:.4f}\n" in result.stdout
    assert f"scored           {numbers['num_tokens']} tokens, 684 bytes" in result.stdout
    other = bitnet("eval", LLAMA, *given)
    assert other.exit_code == 0 and json.loads(file.read_text())["perplexity"] != numbers["perplexity"]


def test_eval_scores_the_ends_of_lines_as_they_are(tmp_path):
    text = tmp_path / "dos.txt"
    text.write_bytes(b"Once upon a time\r\nthere was a fox\r\n")
    assert ", 35 bytes" in bitnet("eval", "--text", str(text), "--threads", "1").stdout


def test_numbers_go_to_stdout_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bitnet_inference.bench.Workload", QUICK)
    Path("story.txt").write_text("Once upon a time there was a fox.")
    for command in (["eval", "--text", "story.txt"], ["bench", "-m", LLAMA]):
        result = bitnet(*command, "--json", "-", "--threads", "1")
        assert result.exit_code == 0 and isinstance(json.loads(result.stdout), dict), result.output
    assert os.listdir() == ["story.txt"]


def test_a_perplexity_that_no_float_holds_is_null_in_json(tmp_path):
    model = Path(shutil.copytree(LLAMA, tmp_path / "model"))
    norm = dict(read_header(model / "model.safetensors"))["model.norm.weight"]
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(norm.begin)
        file.write(b"\x74\x49" * (norm.num_bytes // 2))  # a million, in bfloat16
    (tmp_path / "text").write_text("The fox ran.")
    result = bitnet("eval", str(model), "--text", str(tmp_path / "text"), "--json", "-", "--threads", "1")
    assert result.exit_code == 0, result.output
    numbers = json.loads(result.stdout, parse_constant=pytest.fail)
    assert numbers["perplexity"] is None and numbers["mean_logprob"] < -1000


@needs_full
def test_numbers_are_shown_where_their_file_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bitnet_inference.bench.Workload", QUICK)
    Path("story.txt").write_text("Once upon a time there was a fox.")
    for command, shown in (["eval", "--text", "story.txt"], "perplexity"), (["bench", "-m", LLAMA], "prompt of 8"):
        result = bitnet(*command, "--json", "/dev/full", "--threads", "1")
        assert result.exit_code == 2 and "/dev/full cannot be written: No space left" in result.stderr
        assert shown in result.stdout


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "cannot be read: No such file"),
        (b"abc\xff", [], "is not UTF-8 at byte 3"),
        (b"", [], "give a longer text"),
        (b"The fox ran", ["--window", "1"], "window is 1: give a whole number of tokens, 2 to 1024"),
        (b"The fox ran", ["--json", "nowhere/x.json"], "cannot be written: there is no folder"),
    ],
)
def test_eval_refuses(tmp_path, content, options, message):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    result = bitnet("eval", "--text", str(file), *options)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_bench_measures(tmp_path, monkeypatch):
    file = tmp_path / "numbers.json"
    monkeypatch.setattr("bitnet_inference.bench.Workload", QUICK)
    result = bitnet("bench", "-m", LLAMA, "--threads", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "limited by" in result.stdout and "discarded" in result.stdout
    numbers = json.loads(file.read_text())
    assert numbers["threads"] == 1 and numbers["decode"]["0"] > 0 and numbers["limits"]["bandwidth_gb_s"] > 0


def test_bench_leaves_limits_out_where_threads_share_processors(monkeypatch):
    monkeypatch.setattr("bitnet_inference.bench.Workload", QUICK)
    threads = str(num_processors() + 1)
    result = bitnet("bench", "-m", LLAMA, "--threads", threads)
    assert result.exit_code == 0 and "not probed: there are more threads" in result.stdout, result.output
    assert "%" not in result.stdout


def test_bench_measures_the_engine_under_load(tmp_path, monkeypatch):
    file = tmp_path / "numbers.json"
    quick = functools.partial(bench_engine.Load, shortest=3, longest=5, num_samples=1, min_sample_s=0)
    monkeypatch.setattr("bitnet_inference.bench_engine.Load", quick)
    result = bitnet("bench", "--threads", "1", "--concurrency", "1,2", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "2 at a time" in result.stdout and "overhead" in result.stdout and "discarded" in result.stdout
    assert set(json.loads(file.read_text())["concurrency"]) == {"1", "2"}


@pytest.mark.parametrize("text, cure", [("", "as in"), ("1,x", "as in"), ("0", "at least 1"), ("2,2", "given once")])
def test_bench_refuses_numbers_of_streams_before_it_measures(monkeypatch, text, cure):
    monkeypatch.setattr("bitnet_inference.bench_engine.measure_engine", lambda *_, **__: pytest.fail("it measures"))
    result = bitnet("bench", "-m", "nowhere", "--concurrency", text)
    assert result.exit_code == 2 and cure in result.stderr, result.output


@pytest.mark.parametrize("name, cure", [("", "may write"), ("absent/numbers.json", "make it"), ("text/x", "make it")])
def test_bench_refuses_a_file_before_it_measures(tmp_path, monkeypatch, name, cure):
    (tmp_path / "text").touch()
    monkeypatch.setattr("bitnet_inference.bench.measure", lambda *_, **__: pytest.fail("it measures"))
    result = bitnet("bench", "-m", LLAMA, "--json", str(tmp_path / name))
    assert result.exit_code == 2 and "cannot be written" in result.stderr and cure in result.stderr, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(
    "args, message",
    [
        (["run", "x", "-m", "nowhere"], "nowhere: there is no such file or folder"),
        (["run", ""], "the prompt is empty"),
        (["run", "falcon3-1b"], 'falcon3-1b is a model, and no prompt: bitnet run --model falcon3-1b "your prompt"'),
        (["run", "Tell", "me"], "(me): put the prompt in quotes; the model is an option"),
        (["bench", "default"], "(default): the model is an option: bitnet bench --model NAME"),
        (["serve", "-m", "default"], "no such option: -m: the model is no option here: bitnet serve NAME"),
        (["run", "x", "-m", "models/x.gguf"], "models/x.gguf: there is no such file or folder: check the path"),
        (["run", "x", "--top-p", "3"], "top_p is 3"),
        (["run", "x", "--logit-bias", "a=b"], "--logit-bias is 'a=b'"),
        (["run", "x", "--logit-bias", "99999=1"], "token 99999 does not exist"),
        (["run", "x", "--logprobs", "1"], "--json"),
        (["run", "x", "--raw", "--system", "s"], "--system needs a chat template"),
        (["run", "x " * 3000], "at most"),
        (["run", "x", "--device", "tpu"], "device is 'tpu'"),
        (["run", "x", "--device", "reference", "--profile", os.devnull], 'choose "cpu"'),
        (["run", "x", "--threads", "0"], "threads is 0"),
        (["run", "x", "--cache-dtype", "int3"], "cache_dtype is 'int3'"),
        (["run", "x", "--device", "cpu", "--gpus", "2"], 'gpus is 2, but device is "cpu"'),
        (["run", "x", "--beams", "1"], "num_beams is 1"),
        (["run", "x", "--beams", "2", "--best-of", "3"], "--best-of has no meaning with --beams"),
        (["run", "x", "--num-choices", "0"], "--num-choices is 0"),
        (["run", "x", "--num-choices", "3", "--best-of", "2"], "--best-of is 2, --num-choices 3"),
        (["run", "x", "--beams", "2", "--top-k", "0"], "--top-k has no meaning with --beams"),
        (["run", "x", "--beams", "2", "--choice", "a"], "--choice has no meaning with --beams"),
        (["run", "x", "--beams", "2", "--drafts", "none"], "--drafts has no meaning with --beams"),
        (["run", "x", "--beams", "2", "--early-stopping", "yes"], "--early-stopping is 'yes'"),
        (["run", "x", "--length-penalty", "2"], "--length-penalty is for --beams only"),
        (["run", "x", "--beams", "2", "--raw", "--system", "s"], "--system needs a chat template"),
        (["run", "x", "--raw", "--chat-template-kwargs", '{"a": 1}'], "--chat-template-kwargs needs a chat template"),
        (
            ["chat", "--chat-template-kwargs", '{"a": 1}'],
            "--chat-template-kwargs: this model's chat template knows no 'a'",
        ),
        (["run", "x", "--regex", "(a"], "grammar: regex: "),
        (["run", "x", "--regex", "a", "--choice", "b"], "--regex and --choice exclude each other"),
        (["run", "x", "--json-schema", "nowhere"], "nowhere cannot be read"),
        (["run", "x", "--json-schema", '{"not": {}}'], "not cannot be kept"),
        (["run", "x", "--grammar", "nowhere.lark"], "nowhere.lark cannot be read"),
        (["chat", "-m", str(GOLDEN / "llama-f16")], "no chat template"),
        (["chat", "--stop-token", "99999"], "stop_token_ids: token 99999 does not exist"),
        (["inspect", "nowhere"], "nowhere: there is no such file or folder"),
        (["bench", "-m", "nowhere"], "nowhere: there is no such file or folder"),
        # What no model takes is refused before one is looked for.
        (["run", "x", "-m", "nowhere", "-t", "500"], "temperature is 500"),
        (["run", "x", "-m", "nowhere", "--json", "--logprobs", "21"], "logprobs is 21"),
        (["chat", "-m", "nowhere", "-n", "-1"], "max_tokens is -1"),
        (["run", "x", "-m", "nowhere", "--chat-template-kwargs", "[]"], "is '[]': give a JSON object, as {"),
        (["batch", os.devnull, "answers.jsonl", "--logit-bias", "a"], "--logit-bias is 'a'"),
        (["batch", "prompts.jsonl", "-"], "give their names instead of -"),
        (["run", "x", "-m", ""], "the model is an empty text"),
        (["show", ""], "the name of a model is empty"),
        (["pull", "default"], "comes with the package"),
        (["convert", "default", "x.gguf", "--no-check"], "leave --no-check out"),
        (["convert", "default", "x.gguf", "--quantize", ""], "quantize is ''"),
        (["frob"], "no such command 'frob'"),
        (["run", "x", "-t", "hot"], "--temperature / -t is 'hot': give a number\n"),
        (["serve", "--port", "1e3"], "--port (env var: BITNET_PORT) is '1e3': give a whole number\n"),
        (["run", "x", "--raw=yes"], "option '--raw' does not take a value: bitnet run --help lists what there is\n"),
        (["run", "x", "--system"], "option '--system' requires an argument: bitnet run --help lists what there is\n"),
        (["--version=x"], "option '--version' does not take a value: bitnet --help lists what there is\n"),
        (["run", "x", "--ctx-size", "9"], "no such option: --ctx-size: did you mean --max-cache-tokens?"),
        (["run", "x", "--top_p", "1"], "no such option: --top_p: did you mean --top-p?"),
        (["run", "x", "--max-cache-tokens", "0"], "max_cache_tokens is 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(args, message):
    result = bitnet(*args, stdin="")
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.startswith("bitnet: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name, cure",
    [
        ("BITNET_PORT", "give a whole number"),
        ("BITNET_THREADS", "give a whole number"),
        ("BITNET_DRAIN_TIMEOUT", "give a number"),
        ("BITNET_NO_LOG", "give true or false"),
    ],
)
def test_a_mistake_in_the_environment_is_told_with_the_name_of_the_variable(monkeypatch, name, cure):
    monkeypatch.setenv(name, "frob")
    assert bitnet("serve", "--api-key-file", "nowhere").stderr == f"bitnet: {name} is 'frob': {cure}\n"


@pytest.mark.parametrize(
    "name, text, form",
    [
        ("x.lark", 'start: "fox" | "owl"  // ::=', "fox|owl"),
        ("x.gbnf", 'root ::= "fox" | "owl"', "fox|owl"),
        ("x.txt", 'root ::= "fox" | "owl"', "fox|owl"),
        ("x.txt", 'start: "fox" | "owl"', "fox|owl"),
        ("x.lark", '\ufeffstart: "fox" | "owl"', "fox|owl"),
    ],
)
def test_grammars_come_from_files(tmp_path, name, text, form):
    (tmp_path / name).write_text(text, "utf-8")
    result = bitnet("run", "x", "--grammar", str(tmp_path / name))
    assert result.exit_code == 0 and re.fullmatch(form, result.stdout.strip())


def test_the_form_of_an_answer(tmp_path):
    assert bitnet("run", "x", "--choice", "fox", "--choice", "owl").stdout.strip() in ("fox", "owl")
    assert re.fullmatch("[0-9]{4}\n", bitnet("run", "x", "--regex", "[0-9]{4}").stdout)
    schema = '{"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}'
    (tmp_path / "schema").write_text(schema)
    for given in (schema, str(tmp_path / "schema")):
        assert set(json.loads(bitnet("run", "x", "--json-schema", given).stdout)) <= {True, False}
    silent = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'  # as Pydantic writes it
    assert json.loads(bitnet("run", "hi", "-t", "0", "--json-schema", silent).stdout).keys() == {"a"}, "and no others"
    (tmp_path / "bad").write_bytes(b"\xff")
    assert "is not UTF-8 at byte 0" in bitnet("run", "x", "--grammar", str(tmp_path / "bad")).stderr


def test_variables_reach_the_chat_template(tmp_path):
    model = Path(shutil.copytree(Path(cli.__file__).parents[1] / "default_model", tmp_path / "model"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = "{{ messages[-1].content }}{% if enable_thinking is false %} a b c d{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    given = ["--chat-template-kwargs", '{"enable_thinking": false}']
    for more in ([], ["--num-choices", "1"], ["--beams", "2"]):
        line = ["run", "x", "-m", str(model), "-n", "1", "--json", *more]
        before, after = (json.loads(bitnet(*line, *each).stdout)["usage"] for each in ([], given))
        assert after["num_prompt_tokens"] == before["num_prompt_tokens"] + 4
    texts = [bitnet("chat", "-m", str(model), "-n", "9", "-t", "0", *each, stdin=b"x\n").stdout for each in ([], given)]
    assert texts[0] != texts[1]


def test_prompts_that_are_no_text():
    result = bitnet("run", "-", stdin=b"\xff\xfe")
    assert result.exit_code == 2 and "not UTF-8 at byte 0" in result.stderr
    result = bitnet("chat", "-n", "2", stdin=b"Hello\n\xff\n")
    assert result.exit_code == 2 and result.stdout.strip() and "the message is not UTF-8 at byte 0" in result.stderr
    result = bitnet("run", "a" + os.fsdecode(b"\xff"))
    assert result.exit_code == 2 and "not UTF-8 at byte 1" in result.stderr


def test_characters_that_the_output_has_not_are_shown_as_json_writes_them():
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(command("run", "x", "--json", "--choice", "☃ä🦊"), env=environment, capture_output=True)
    assert result.returncode == 0 and json.loads(result.stdout.decode("latin-1"))["text"] == "☃ä🦊", result.stderr


def test_texts_on_the_command_line_are_utf_8_whatever_the_locale_says():
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for option in (("--choice", "ä☃"), ("--regex", "ä☃"), ("--json-schema", '{"const": "ä☃"}')):
        line = command("run", "x", "--json", "--system", "é", "--stop", "☃", *option)
        result = subprocess.run(line, env=environment, capture_output=True)
        assert result.returncode == 0 and json.loads(result.stdout)["text"].lstrip('"') == "ä", result.stderr
    result = bitnet("run", "x", "--system", os.fsdecode(b"a\xff"))
    assert result.exit_code == 2 and "--system is not UTF-8 at byte 1" in result.stderr


def test_unknown_options_are_refused():
    result = bitnet("run", "x", "--temprature", "1")
    assert result.exit_code == 2 and "--temperature" in result.output


def test_convert_writes_a_file_that_runs_and_says_how_exact_it_is(tmp_path):
    file = tmp_path / "story.gguf"
    result = bitnet("convert", "default", str(file), "--type", "tq2_0")
    assert result.exit_code == 0, result.output
    assert re.search(r"TQ2_0 +42 +4718592 +1.2 MB +exact\n", result.stdout) and str(file) in result.stdout
    assert result.stderr.startswith("note: generation_config.json has no place in the file: max_new_tokens\n")
    ours, theirs = (bitnet("run", "-m", model, STORY, "-n", "20", "-t", "0") for model in ("default", str(file)))
    assert ours.stdout == theirs.stdout and theirs.exit_code == 0
    rounded = bitnet("convert", str(file), str(tmp_path / "half.gguf"), "--type", "f16")
    assert re.search(r"F16 .* off by up to 4e-06% of the largest\n", rounded.stdout) and not rounded.stderr
    refused = bitnet("convert", "default", str(tmp_path / "story.bin"))
    assert (refused.exit_code, refused.stdout) == (2, "") and "end it in .gguf" in refused.stderr


def test_a_file_that_does_not_open_here_was_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("BITNET_ISA", "vax")
    result = bitnet("convert", "default", str(tmp_path / "story.safetensors"))
    assert result.exit_code == 0 and "story.safetensors: " in result.stdout
    assert "MB, does not open here: " in result.stdout and "vax" in result.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom bitnet_inference import cli\n"
        "print([m for m in ('numpy', 'tokenizers', 'jinja2', 'rich', 'prompt_toolkit') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_real_command():
    result = subprocess.run(command("run", STORY, "-n", "30"), capture_output=True, text=True)
    assert result.returncode == 0 and len(result.stdout) > 30 and "tokens/s" in result.stderr
    result = subprocess.run(command("run", "x", "-m", "nowhere"), capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.startswith("bitnet: nowhere")
    assert subprocess.run(command("--version"), capture_output=True, text=True).stdout.startswith("bitnet ")


def test_ctrl_c_ends_with_130_and_no_traceback():
    endless = command("run", STORY, *ENDLESS)
    with subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in stderr


def test_ctrl_c_in_a_chat_stops_the_answer_only():
    with subprocess.Popen(
        command("chat", *ENDLESS),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdin.write(STORY + "\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate("/what\n/exit\n", timeout=60)
    assert process.returncode == 0 and "Traceback" not in stderr and "/what is no command" in stderr


def test_a_closed_pipe_is_no_traceback():
    with subprocess.Popen(
        command("run", STORY, "-n", "200"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        process.stdout.close()
        stderr = process.stderr.read()
    assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    "line, code, message",
    [
        ("run <&-", 2, "the prompt is empty"),
        ("run x -m nowhere 2>&-", 2, ""),
        *(
            pytest.param(
                f"{what} >/dev/full",
                2,
                "No space left",
                marks=needs_full,
            )
            for what in ("inspect", "--help")
        ),
    ],
)
def test_streams_that_are_closed_or_full(line, code, message):
    result = subprocess.run(["sh", "-c", f'"$@" {line}', "sh", *command()], capture_output=True, text=True)
    assert result.returncode == code and message in result.stderr and len(result.stderr.splitlines()) <= 1


def read_until(terminal, wanted, seconds=30):
    """What a program shows on its terminal, up to the wanted text."""
    shown, deadline = b"", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the program has ended
                break
    assert wanted in shown, shown.decode(errors="replace")
    return shown


@contextmanager
def on_a_terminal(*arguments):
    """A command that runs on a terminal, and our end of it."""
    import pty

    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(command(*arguments), env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_chat_on_a_terminal():
    ready = b"\x1b[?2004h"  # the line editor waits for keys
    with on_a_terminal("chat", "-n", "6") as (process, ours):
        assert b"/help tells" in read_until(ours, ready)
        os.write(ours, b"/help\r")
        assert b"forget the conversation" in read_until(ours, ready)
        os.write(ours, b"Hello\x1b\rthere\r")  # Alt+Enter between the lines
        assert b"there" in read_until(ours, ready)
        os.write(ours, b"\x03")  # Ctrl-C clears the line
        read_until(ours, ready)
        os.write(ours, b"/exit\r")
        read_until(ours, b"\x1b[?2004l")
        assert process.wait(timeout=30) == 0


def test_ctrl_c_at_a_question_ends_with_130():
    with on_a_terminal("run", "x", "-m", "bitnet-2b") as (process, ours):
        read_until(ours, b"[y/N]")
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # it has ended; a signal between question and reading is seen when a line has come
            os.write(ours, b"\n")
        assert process.wait(timeout=30) == 130


@pytest.mark.skipif(not os.path.exists("/proc/self/limits"), reason="the limit is read on Linux")
def test_the_cache_stays_within_the_limit_of_the_process():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, resource.RLIM_INFINITY))\n"
        "from bitnet_inference.config import available_bytes\nprint(available_bytes())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(result.stdout) < 1 << 29


def test_the_help_says_of_every_command_what_it_does():
    _, commands = bitnet("--help").stdout.split("Commands:")
    assert "..." not in commands, "a first sentence is too long for its line"


def test_a_key_that_no_header_can_hold():
    result = bitnet("top", "--once", "--api-key", "☃")
    assert result.exit_code == 2 and "the API key has letters" in result.stderr, result.output


def test_a_name_that_is_too_long():
    result = subprocess.run(command("run", STORY, "--profile", "x" * 5000), capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.endswith(": choose another name\n"), result.stderr


def test_ctrl_c_while_modules_are_imported_ends_with_130_and_no_traceback():
    start = (
        "import importlib.abc, signal, sys\n"
        "class Interrupting(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'typer':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from bitnet_inference.__main__ import main\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", start, "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_without_the_compiled_kernels_the_cure_is_a_line():
    start = "import sys; sys.modules['bitnet_inference._native'] = None; from bitnet_inference.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", start, "run", STORY], capture_output=True, text=True)
    assert result.returncode == 2 and "pip install ." in result.stderr and result.stderr.count("\n") == 1

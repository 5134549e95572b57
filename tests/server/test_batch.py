"""Files of OpenAI's Batch API: bodies as the server's, each once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from asgi import ask
from typer.testing import CliRunner
from waiting import WAITS_AFTER_EIGHT_ANSWERS

from bitnet_inference import cli
from bitnet_inference.errors import FormatError, InvalidParams, NotFound, Stopped
from bitnet_inference.in_flight import MAX_IN_FLIGHT
from bitnet_inference.line_file import LineFile
from bitnet_inference.llm import LLM
from bitnet_inference.models import OneModel
from bitnet_inference.offline import BatchRun
from bitnet_inference.server import ServedModels, make_app
from bitnet_inference.server.batch import RequestRun, responses
from bitnet_inference.server.batch_lines import RequestLine, check_ids, read_request
from bitnet_inference.telemetry import Counts

HI = [{"role": "user", "content": "Tell me a story about a mole"}]
CHAT = {"messages": HI, "max_tokens": 8, "temperature": 0.8, "seed": 5}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
CHANGING = ("id", "created", "created_at", "completed_at", "call_id", "cached_tokens", "prompt_tokens_details")
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("chat/completions", CHAT | {"model": "story", "n": 3, "logprobs": True, "top_logprobs": 2}),
    ("chat/completions", CHAT | {"tools": [CLOCK], "tool_choice": "required", "max_tokens": 40, "temperature": 0}),
    ("chat/completions", CHAT | {"guided_choice": ["a fox", "an owl"], "stop": "w", "user": "Anna"}),
    ("completions", {"prompt": "The fox", "temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 1}),
    ("completions", {"prompt": ["The owl", "The bear"], "n": 2, "best_of": 3, "seed": 1, "model": "story"}),
    ("completions", {"prompt": [[5, 6], [7]], "seed": 1, "stream": False, "top_p": None}),
    ("embeddings", {"input": "The owl", "model": "story"}),
    ("embeddings", {"input": ["The owl", "The fox"], "encoding_format": "base64"}),
    ("responses", {"input": "Hi", "max_output_tokens": 8, "temperature": 0}),
    ("responses", {"input": "Hi", "max_output_tokens": 8, "temperature": 0, "store": False, "background": False}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT | {"model": "gpt-4o"}),
    ("chat/completions", CHAT | {"temprature": 1}),
    ("chat/completions", {"messages": "Hi"}),
    ("completions", {"prompt": "owl " * 9000}),
    ("completions", {"prompt": "x", "n": "3", "best_of": True}),
    ("embeddings", {"input": []}),
    ("embeddings", {"input": "", "stream": "yes"}),
    ("responses", {"input": "Hi", "previous_response_id": "resp_none"}),
    ("chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("chat/completions", CHAT | {"temperature": float("nan")}),
    ("completions", {}),
]


def request(custom_id: Any, url: str, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def write(path: Path, requests: list[Any]) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in requests))
    return path


def read(path: Path) -> dict[str, Any]:
    """The responses by custom_id; each is there once, and is what a line of OpenAI's output files is."""
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({answer["custom_id"] for answer in answers} | {answer["id"] for answer in answers}) == 2 * len(answers)
    for answer in answers:
        assert list(answer) == ["id", "custom_id", "response", "error"] and answer["error"] is None
        assert answer["id"].startswith("batch_req_")
        assert list(answer["response"]) == ["status_code", "request_id", "body"]
        assert answer["response"]["request_id"].startswith("req-")
    return {answer["custom_id"]: answer["response"] for answer in answers}


def same(value: Any) -> Any:
    """A body without what differs each time: ids, times, and what was in the cache."""
    if isinstance(value, dict):
        return {name: same(each) for name, each in value.items() if name not in CHANGING}
    return [same(each) for each in value] if isinstance(value, list) else value


def asked(app: Any, url: str, body: Any) -> tuple[int, Any]:
    got = asyncio.run(ask(app, f"/v1/{url}", body))
    return got.status, same(got.json)


def run(*args: Any) -> Any:
    return CliRunner().invoke(cli.app, ["batch", *map(str, args)])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture(scope="module")
def counts() -> Counts:
    return Counts()


@pytest.fixture(scope="module")
def llm(counts: Counts) -> Iterator[LLM]:
    with LLM.load(max_cache_tokens=4096, threads=1, listener=counts) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def one(llm: LLM) -> Iterator[ServedModels]:
    held = OneModel("default", llm, max_cache_tokens=4096, threads=1)
    with closing(ServedModels(held, {"story": "default"})) as models:
        yield models


def answer(one: ServedModels, llm: LLM, files: tuple[Path, Path], **options: Any) -> Any:
    with RequestRun(*files, **options) as batch:
        return batch.run(one, llm)


class TestAnswers:
    def test_bodies_are_those_of_the_server(self, served: ServedModels, files: tuple[Path, Path]) -> None:
        app = make_app(served)
        write(files[0], [request(f'№ {at} \\"', *each) for at, each in enumerate(BODIES)])
        result = run(*files, "-m", "story=default", "--max-cache-tokens", 4096, "--threads", 1)
        assert result.exit_code == 0 and result.stderr.startswith(f"[{len(BODIES)} prompts; 0 failed; "), result.output
        found = read(files[1])
        for at, (url, body) in enumerate(BODIES):
            response = found[f'№ {at} \\"']
            assert (response["status_code"], same(response["body"])) == asked(app, url, body)

    def test_a_refused_request_has_what_the_server_says_and_the_others_go_on(
        self, served: ServedModels, files: tuple[Path, Path]
    ) -> None:
        app, good = make_app(served), ("chat/completions", CHAT)
        bodies = [good, *REFUSED, good]
        write(files[0], [request(f"{at}", *each) for at, each in enumerate(bodies)])
        result = run(*files, "-m", "story=default", "--max-cache-tokens", 4096)
        assert result.exit_code == 1 and f"{len(REFUSED)} failed" in result.stderr, result.output
        assert f'why under "response.body.error" in {files[1]}]' in result.stderr
        found = read(files[1])
        for at, (url, body) in enumerate(bodies):
            response, is_good = found[f"{at}"], at in (0, len(bodies) - 1)
            assert (response["status_code"], same(response["body"])) == asked(app, url, body)
            assert (response["status_code"] == 200) == is_good and ("error" in response["body"]) != is_good
        assert [found[f"{at}"]["status_code"] for at in range(12)] == [200, 404, *[400] * 10]
        again = run(*files, "-m", "story=default", "--max-cache-tokens", 4096, "--keep-errors")
        assert again.exit_code == 1 and "13 of them done before" in again.stderr and read(files[1]) == found

    def test_a_defect_ends_its_own_request(
        self, one: ServedModels, llm: LLM, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: Any
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a secret")

        monkeypatch.setattr(llm, "embed", fail)
        write(files[0], [request(f"{at}", *each) for at, each in enumerate([BODIES[0], BODIES[7], BODIES[0]])])
        assert answer(one, llm, files).num_errors == 1
        found = read(files[1])
        assert [found[f"{at}"]["status_code"] for at in range(3)] == [200, 500, 200]
        assert found["1"]["body"]["error"]["code"] == "internal_error" and "secret" not in json.dumps(found["1"])
        assert "ZeroDivisionError: a secret" in caplog.text

    def test_what_it_counts(self, one: ServedModels, llm: LLM, files: tuple[Path, Path]) -> None:
        write(files[0], [request(f"{at}", *each) for at, each in enumerate(BODIES)])
        seen: list[tuple[int, int | None]] = []
        with RequestRun(*files) as batch:
            result = batch.run(one, llm, progress=lambda *state: seen.append(state))
        usage = [each["body"]["usage"] for each in read(files[1]).values()]
        num_in = sum(each.get("prompt_tokens", each.get("input_tokens")) for each in usage)
        num_out = sum(each.get("completion_tokens", each.get("output_tokens", 0)) for each in usage)
        assert (result.num_prompt_tokens, result.num_output_tokens) == (num_in, num_out)
        assert (result.num_prompts, result.num_before, result.num_errors) == (len(BODIES), 0, 0)
        assert seen == [(done, len(BODIES)) for done in range(1, len(BODIES) + 1)]

    def test_requests_are_computed_together(
        self, one: ServedModels, llm: LLM, counts: Counts, files: tuple[Path, Path]
    ) -> None:
        more = {"ignore_eos": True, "max_tokens": 40}  # so long that it does not matter how they come together
        write(files[0], [request(f"{at}", "chat/completions", CHAT | more) for at in range(64)])
        before = counts.as_json()["total"]["steps"]
        answer(one, llm, files)
        assert counts.as_json()["total"]["steps"] - before < 64 * 40 // 4
        assert len({json.dumps(same(each["body"])) for each in read(files[1]).values()}) == 1


class TestGoingOn:
    def test_from_wherever_the_file_was_cut(self, one: ServedModels, llm: LLM, files: tuple[Path, Path]) -> None:
        write(files[0], [request(f'"{at}\\', *BODIES[at % len(BODIES)]) for at in range(22)])
        answer(one, llm, files)
        whole, expected = files[1].read_bytes(), {name: same(each) for name, each in read(files[1]).items()}
        for num_bytes in {0, 1, 8, 30, len(whole) - 1, len(whole), *range(2, len(whole), len(whole) // 12)}:
            files[1].write_bytes(whole[:num_bytes])
            result, num_before = answer(one, llm, files), whole[:num_bytes].count(b"\n")
            assert (result.num_before, result.num_prompts) == (num_before, 22)
            assert files[1].read_bytes().splitlines()[:num_before] == whole.splitlines()[:num_before]
            found = {name: same(each) for name, each in read(files[1]).items()}
            drop = ("request_id",)
            assert [
                {key: value for key, value in found[name].items() if key not in drop} for name in sorted(found)
            ] == [{key: value for key, value in expected[name].items() if key not in drop} for name in sorted(expected)]

    def test_what_failed_is_tried_again_or_kept(self, one: ServedModels, llm: LLM, files: tuple[Path, Path]) -> None:
        write(files[0], [request("good", *BODIES[0]), request("bad", *REFUSED[0])])
        assert answer(one, llm, files).num_errors == 1
        before = read(files[1])
        assert answer(one, llm, files, retry_errors=False).num_before == 2 and read(files[1]) == before
        result, after = answer(one, llm, files), read(files[1])
        assert (result.num_before, result.num_errors) == (1, 1) and after["good"] == before["good"]
        assert after["bad"]["request_id"] != before["bad"]["request_id"]

    def test_lines_may_be_added_and_none_changed(self, one: ServedModels, llm: LLM, files: tuple[Path, Path]) -> None:
        requests = [request(f"{at}", *BODIES[0]) for at in range(4)]
        write(files[0], requests[:3])
        answer(one, llm, files)
        assert answer(one, llm, (write(files[0], requests), files[1])).num_before == 3
        before = files[1].read_bytes()
        write(files[0], [request("other", *BODIES[0]), *requests[1:]])
        with pytest.raises(FormatError, match="answers a line 1 that the input does not have"):
            RequestRun(*files)
        write(files[0], [{"prompt": "x"}])
        with pytest.raises(FormatError, match="line 1: is no answer"):
            BatchRun(*files)
        assert files[1].read_bytes() == before

    def test_a_model_that_has_ended_ends_it(self, files: tuple[Path, Path]) -> None:
        bodies = ({"prompt": "x", "max_tokens": 1 if at < 3 else 400, "ignore_eos": True} for at in range(20))
        write(files[0], [request(f"{at}", "completions", body) for at, body in enumerate(bodies)])
        with (
            LLM.load(max_cache_tokens=512, threads=1) as llm,
            closing(ServedModels(OneModel("default", llm), {"story": "default"})) as one,
            RequestRun(*files) as batch,
            pytest.raises(Stopped),
        ):
            batch.run(one, llm, progress=lambda done, total: llm.close() if done == 3 else None)
        assert all(each["status_code"] == 200 for each in read(files[1]).values())
        assert 3 <= batch.num_done < 20

    @pytest.mark.parametrize(
        "kill, code", [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
    )
    def test_killed_it_goes_on(self, files: tuple[Path, Path], kill: signal.Signals, code: int) -> None:
        body = CHAT | {"ignore_eos": True}
        write(files[0], [request(f"{n}", "chat/completions", body | {"max_tokens": 10 * n + 1}) for n in range(40)])
        args, pipes = [*map(str, files), "--max-cache-tokens", "1024"], dict.fromkeys(("stdin", "stdout", "stderr"), -1)
        command = [sys.executable, "-c", WAITS_AFTER_EIGHT_ANSWERS, "batch", *args]
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(kill)
            stderr = process.communicate()[1]
        before = files[1].read_bytes()
        num_done = before.count(b"\n")  # with SIGINT those too that had ended by then
        assert process.returncode == code and (num_done == 8 or kill == signal.SIGINT) and 8 <= num_done < 40
        if code > 0:
            done = f"{num_done} of 40 prompts are answered in {files[1]}"
            assert stderr == f"bitnet: stopped: {done}: the same command goes on from there\n"
        result = run(*args)
        assert result.exit_code == 0 and f"[40 prompts, {num_done} of them done before; 0 failed" in result.stderr
        assert files[1].read_bytes().startswith(before) and len(read(files[1])) == 40


def with_body(body: str) -> str:
    return f'{{"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {body}}}'


class TestFilesThatAreRefused:
    @pytest.mark.parametrize(
        "line, message",
        [
            (request("first", *BODIES[0]), "has the custom_id of line 1: give each line its own"),
            (request("", *BODIES[0]), "custom_id is ''"),
            (request(7, *BODIES[0]), "custom_id is 7: give a text"),
            (request(None, *BODIES[0]), "has no custom_id"),
            (request(["b"], *BODIES[0]), "custom_id is"),
            (request("b", *BODIES[0]) | {"method": "GET"}, "method is 'GET': give \"POST\""),
            (request("b", *BODIES[0]) | {"method": ["POST"]}, "method is"),
            (request("b", "images/generations", {}), "url is '/v1/images/generations': there are /v1/chat/completions"),
            (request("b", "chat/completions/", {}), "url is"),
            (request("b", *BODIES[0]) | {"url": {}}, "url is"),
            (request("b", "completions", []), "body is"),
            (request("b", "completions", None), "has no body"),
            (request("b", "completions", {"prompt": "x", "stream": True}), "body.stream is true"),
            (request("b", "responses", {"input": "x", "background": True}), "body.background is true"),
            (request("b", *BODIES[0]) | {"metadata": {}}, "the key 'metadata' is not known"),
            ({"prompt": "x"}, "the key 'prompt' is not known: lines of OpenAI's Batch API have custom_id"),
            ("[1]", "a JSON object was expected"),
            ("{", "not JSON"),
            ("[" * 9000, "nested too deeply|not JSON"),
            (with_body('{"a": ' * 101 + "1" + "}" * 101), "nested more than 100 deep"),
            (with_body('{"a": ' * 9000 + "1" + "}" * 9000), "nested too deeply"),
            (with_body('{"max_tokens": ' + "9" * 5000 + "}"), "not JSON"),
            (with_body('{"prompt": "a", "prompt": "b"}'), "the key 'prompt' stands there twice"),
            (with_body(json.dumps({"prompt": "a" * (8 << 20)})), "has more than 8388608 bytes"),
        ],
    )
    def test_wrong_lines_are_named_before_there_is_a_model(
        self, files: tuple[Path, Path], line: Any, message: str
    ) -> None:
        write(files[0], [request("first", *BODIES[0]), "", line, request("last", *BODIES[0])])
        with pytest.raises(FormatError, match=f"in.jsonl: line 3: .*({message})"):
            RequestRun(*files)
        result = run(*files, "-m", os.devnull)  # which is no model
        assert result.exit_code == 2 and "line 3: " in result.stderr and result.stderr.count("\n") == 1
        assert not files[1].exists()

    def test_equal_ids_are_found_wherever_they_stand(self, files: tuple[Path, Path]) -> None:
        names = [*map(str, range(3000)), "17", "5", "5"]
        write(files[0], [request(name, "completions", {"prompt": "x"}) for name in names])
        with pytest.raises(FormatError, match="line 3001: has the custom_id of line 18"):
            RequestRun(*files)

    def test_lines_of_both_kinds(self, files: tuple[Path, Path]) -> None:
        write(files[0], [{"prompt": "x"}, request("b", *BODIES[0])])
        result = run(*files)
        assert result.exit_code == 2 and "line 2: the key 'custom_id' is of OpenAI's Batch API" in result.stderr
        assert not files[1].exists()

    @pytest.mark.parametrize(
        "args, message",
        [
            (["--seed", "1"], "--seed is for other lines"),
            (["--stop-token", "1"], "--stop-token is for other lines"),
            (["--ignore-eos"], "--ignore-eos is for other lines"),
            (["--choice", "fox"], "--choice is for other lines"),
            (["-m", "nowhere"], "nowhere: there is no such file"),
            (["-m", "story=nowhere"], "nowhere: there is no such file"),
            (["--max-cache-tokens", "0"], "max_cache_tokens"),
        ],
    )
    def test_options_that_do_not_fit(self, files: tuple[Path, Path], args: list[str], message: str) -> None:
        write(files[0], [request("a", *BODIES[0])])
        result = run(*files, *args)
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
        assert not files[1].exists()

    def test_an_output_of_another_model(self, one: ServedModels, llm: LLM, files: tuple[Path, Path]) -> None:
        write(files[0], [request("a", *BODIES[0]), request("b", *BODIES[0])])
        answer(one, llm, files)
        first = files[1].read_bytes().splitlines(keepends=True)[0]
        at = len(b'{"id": "batch_req_') + 10 + 16
        files[1].write_bytes(first[:at] + b"0" * 16 + first[at + 16 :])
        before = files[1].read_bytes()
        with pytest.raises(FormatError, match="another model"):
            answer(one, llm, files)
        assert files[1].read_bytes() == before

    @pytest.mark.parametrize(
        "text", ["notes of mine", "{}\n", '{"id": "batch_req_1"}\n', '{"line": 1, "key": "', "\n", '{"id": "batch_reqx']
    )
    def test_hostile_outputs(self, files: tuple[Path, Path], text: str) -> None:
        write(files[0], [request("a", *BODIES[0])])
        files[1].write_text(text)
        with pytest.raises(FormatError, match="is no answer"):
            RequestRun(*files)
        assert files[1].read_text() == text

    def test_the_input_is_no_output(self, files: tuple[Path, Path]) -> None:
        write(files[0], [request("a", *BODIES[0])])
        with pytest.raises(InvalidParams, match="is the input"):
            RequestRun(files[0], files[0])


class TestOneModel:
    def test_it_is_never_loaded_anew(self) -> None:
        with LLM.load(max_cache_tokens=64, threads=1) as llm:
            one = OneModel("default", llm, max_cache_tokens=64, threads=1)
            with one.use("default") as used, pytest.raises(NotFound, match=r"only .*default_model is loaded"):
                assert used is llm and [state.num_bytes for state in one.loaded()] == [llm.num_bytes]
                with one.use(os.devnull):
                    pass
            one.close()
            assert llm.is_open
        with pytest.raises(Stopped, match="has ended"), one.use():
            pass


class Slow:
    """An application that answers nobody before all that may come have come."""

    def __init__(self) -> None:
        self.num_open = self.most_open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        count = json.loads((await receive())["body"])["count"]
        self.num_open += count
        self.most_open = max(self.most_open, self.num_open)
        await asyncio.sleep(0.01)
        self.num_open -= count
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"req-1")]})
        await send({"type": "http.response.body", "body": b"{}"})


class TestRoom:
    @pytest.mark.parametrize(
        "url, body, number",
        [
            ("chat/completions", CHAT, 1),
            ("chat/completions", CHAT | {"n": 3}, 3),
            ("chat/completions", CHAT | {"n": "3", "best_of": None}, 1),
            ("chat/completions", CHAT | {"n": -5}, 1),
            ("completions", {"prompt": "x", "n": 2, "best_of": 5}, 5),
            ("completions", {"prompt": ["x", "y", "z"], "n": 2}, 6),
            ("completions", {"prompt": [1, 2, 3], "n": 2}, 2),
            ("completions", {"prompt": [[1, 2, 3], [4]]}, 2),
            ("completions", {"prompt": []}, 1),
            ("completions", {"prompt": ["x"] * 1000}, MAX_IN_FLIGHT),
            ("embeddings", {"input": ["x"] * 4}, 4),
            ("embeddings", {"input": [5] * 4}, 1),
            ("responses", {"input": HI * 4}, 1),
        ],
    )
    def test_how_many_requests_a_line_is(self, url: str, body: Any, number: int) -> None:
        line = read_request(Path("in.jsonl"), 3, json.dumps(request("a", url, body)).encode())
        assert (line.num_requests, line.number, json.loads(line.body)) == (number, 3, body)

    def test_the_largest_go_one_by_one(self, one: ServedModels, llm: LLM, files: tuple[Path, Path]) -> None:
        body = {"prompt": ["x", "y"] * 512, "max_tokens": 1}
        write(files[0], [request("first", *BODIES[0]), *(request(f"{at}", "completions", body) for at in range(3))])
        assert answer(one, llm, files).num_errors == 0
        assert [len(each["body"]["choices"]) for each in read(files[1]).values()] == [1, 1024, 1024, 1024]

    @pytest.mark.parametrize("count", [1, 100, MAX_IN_FLIGHT])
    def test_so_many_requests_are_under_way_and_no_line_is_read_too_early(self, count: int) -> None:
        app, num_read, num_done = Slow(), 0, 0
        body = json.dumps({"count": count}).encode()

        def lines() -> Iterator[RequestLine]:
            nonlocal num_read
            for number in range(1, 1 + max(3000 // count, 20)):
                num_read += 1
                assert num_read - num_done <= MAX_IN_FLIGHT // count + 1
                yield RequestLine(number, f"{number}", "/v1/completions", body, count)

        async def count_all() -> None:
            nonlocal num_done
            async for _ in responses(lines(), app):
                num_done += 1

        asyncio.run(count_all())
        assert num_done == num_read == max(3000 // count, 20)
        assert app.most_open == MAX_IN_FLIGHT // count * count

    def test_one_that_takes_long_holds_up_nobody_and_is_ended_with_the_others(self) -> None:
        num_begun, was_ended = 0, False
        lines = (RequestLine(number, f"{number}", "/v1/completions", b"", 1) for number in range(2000))

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal num_begun, was_ended
            num_begun += 1
            if num_begun == 1:
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    was_ended = True
                    raise
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"req-1")]})

        async def leave() -> list[int]:
            found: list[int] = []
            async with asyncio.timeout(20), aclosing(responses(lines, app)) as answered:
                async for line, _ in answered:
                    found.append(line.number)
                    if len(found) == 1999:
                        break
            return found

        assert asyncio.run(leave()) == list(range(1, 2000)) and was_ended

    def test_memory_does_not_grow_with_the_file(self, files: tuple[Path, Path]) -> None:
        with files[0].open("w") as file:
            for number in range(10_000):
                file.write(json.dumps(request(f"{number}", "completions", {"prompt": f"{number}" * 200})) + "\n")
        tracemalloc.start()
        try:
            checked = LineFile(files[0], read_request, check_ids)
            assert checked.num_prompts == sum(1 for _ in checked.lines(lambda number: True)) == 10_000
            assert tracemalloc.get_traced_memory()[1] < 2_000_000 < files[0].stat().st_size
        finally:
            tracemalloc.stop()

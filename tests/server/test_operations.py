"""Who may come in, with how much, and how the day ends."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import os
import shutil
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import Running
from typer.testing import CliRunner

from bitnet_inference.cli import app as command
from bitnet_inference.cli.serve import named
from bitnet_inference.errors import InvalidParams
from bitnet_inference.model_folder import find_model
from bitnet_inference.models import Models
from bitnet_inference.server import Journal, Listening, ServedModels, ServerOptions, bind, listen, read_keys
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.gate import Gate
from bitnet_inference.server.hosts import MAX_THREADS
from bitnet_inference.server.journal import Journaled
from bitnet_inference.server.stored import MAX_RESPONSES, MAX_RUNNING, StoredResponse, StoredResponses

HERE = Path(__file__).parent
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
LONGER = LONG | {"n": 16, "overflow": "sliding"}  # than the server's loop takes to hear of a signal


async def empty(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads its body and answers nothing."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def call(
    app: Any, path: str = "/v1/models", *, headers: dict[str, str] | None = None, body: Iterable[bytes] = (b"",)
) -> Any:
    """(status, headers) of one request that comes from one address."""
    sent: list[Any] = []
    parts = iter(body)

    async def receive() -> Any:
        part = next(parts, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def send(message: Any) -> None:
        sent.append(message)

    given = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": given, "client": ("10.0.0.1", 1)}
    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def post(url: str, body: dict[str, Any], **options: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, **options)


def get(url: str, headers: dict[str, str] | None = None, **options: Any) -> tuple[int, Any]:
    """(status, headers) of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), **options) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers


def test_keys_are_known_by_their_hashes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"\ufeff# people\nanna sha256:{hashlib.sha256(b'annas-secret').hexdigest()}\n\nbert berts-secret\n", "utf-8"
    )
    gate = Gate(empty, ServerOptions(keys=read_keys(["first-secret"], file)))
    assert call(gate)[0] == 401 and call(gate)[1]["www-authenticate"] == "Bearer"
    for secret in ("annas-secret", "berts-secret", "first-secret"):
        assert call(gate, headers={"Authorization": f"Bearer {secret}"})[0] == 200
        assert call(gate, headers={"x-api-key": secret})[0] == 200
    assert call(gate, headers={"Authorization": "Bearer anna"})[0] == 401
    assert call(gate, "/health")[0] == 200


def test_one_good_key_lets_in_whatever_stands_beside_it() -> None:
    gate = Gate(empty, ServerOptions(keys=read_keys(["first-secret", "schlüssel-東"])))
    for good in ("first-secret", "schlüssel-東"):
        for other in ("Basic YTpi", "Bearer wrong", "Bearer "):
            assert call(gate, headers={"Authorization": other, "x-api-key": good})[0] == 200
            assert call(gate, headers={"x-api-key": good, "Authorization": other})[0] == 200
        assert call(gate, headers={"Authorization": f"Bearer {good}", "x-api-key": "none"})[0] == 200
        assert call(gate, headers={"x-api-key": "none", "Authorization": f"Bearer {good}"})[0] == 200
    assert call(gate, headers={"x-api-key": "wrong", "Authorization": "Bearer wrong"})[0] == 401


@pytest.mark.parametrize("line", ["only-a-name", "name short", "name sha256:12", "na/me long-enough-key"])
def test_a_line_that_is_no_key_is_refused_without_being_shown(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(f"{line}\n")
    with pytest.raises(InvalidParams, match="line 1") as caught:
        read_keys([], tmp_path / "keys")
    assert line.split()[-1] not in str(caught.value).replace("keys", "")


@pytest.mark.parametrize("text", ["", "\n# anna sesame-open\n"])
def test_a_file_without_a_key_lets_nobody_in(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidParams, match="keys holds no key: write lines of NAME KEY"):
        read_keys([], tmp_path / "keys")


def test_who_asks_too_often_waits() -> None:
    now = [0.0]
    gate = Gate(empty, ServerOptions(requests_per_minute=2), clock=lambda: now[0])
    assert [call(gate)[0] for _ in range(3)] == [200, 200, 429]
    assert 1 <= int(call(gate)[1]["retry-after"]) <= 31
    now[0] = 31.0
    assert [call(gate)[0] for _ in range(2)] == [200, 429]


def test_who_only_watches_uses_up_nothing() -> None:
    gate = Gate(empty, ServerOptions(requests_per_minute=1, keys=read_keys(["first-secret"], None)))
    key = {"x-api-key": "first-secret"}
    assert [call(gate, path, headers=key)[0] for path in ("/stats", "/metrics", "/stats", "/v1/models")] == [200] * 4
    assert call(gate, "/stats")[0] == 401


def test_who_guesses_keys_may_do_so_a_few_times_a_minute() -> None:
    now = [0.0]
    keys = read_keys(["first-secret", "second-secret"], None)
    gate = Gate(empty, ServerOptions(requests_per_minute=2, keys=keys), clock=lambda: now[0])

    def statuses(*sent: str) -> list[int]:
        return [call(gate, headers={"x-api-key": each} if each else {})[0] for each in sent]

    assert statuses("first-secret", "", "", "") == [200, 401, 401, 401]  # no key is no guess
    assert statuses("guess-1", "guess-2", "guess-3", "second-secret") == [401, 401, 429, 429]
    assert statuses("first-secret") == [200]  # it is known there
    now[0] = 31.0
    assert statuses("second-secret", "guess-4", "guess-5") == [200, 401, 429]


def test_a_body_has_an_end() -> None:
    gate = Gate(empty, ServerOptions(max_body_bytes=10))
    assert call(gate, body=[b"12345", b"12345"])[0] == 200
    assert call(gate, headers={"content-length": "11"})[0] == 413
    assert call(gate, body=[b"12345", b"123456"])[0] == 413


def test_a_body_that_trickles_has_an_end() -> None:
    now = [0.0]

    def trickle() -> Iterator[bytes]:
        for _ in range(12):
            now[0] += 29
            yield b"1"

    gate = Gate(empty, ServerOptions(), clock=lambda: now[0])
    assert call(gate, body=trickle())[0] == 408


@pytest.fixture
def strict(served: ServedModels) -> Iterator[Running]:
    with Running(served, ServerOptions(header_timeout_s=0.2, body_timeout_s=0.2, max_running=1)) as server:
        yield server


def raw(server: Running, text: bytes) -> bytes:
    """What a connection that sends just this gets until it is closed."""
    with socket.create_connection(server.address[:2], timeout=20) as connection:
        received = b""
        with suppress(ConnectionError):  # closed while we were still sending
            connection.sendall(text)
            while part := connection.recv(1 << 16):
                received += part
    return received


def test_half_a_head_half_a_body_and_a_flood_of_headers_end(strict: Running) -> None:
    assert raw(strict, b"GET /health HTTP/1.1\r\nHost") == b""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    assert b" 408 " in raw(strict, head + b'Content-Length: 100\r\n\r\n{"prompt"')
    flood = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100))
    assert not raw(strict, b"GET /health HTTP/1.1\r\n" + flood + b"\r\n").startswith(b"HTTP/1.1 200")


def test_an_empty_line_behind_an_answer_keeps_no_connection_open(strict: Running) -> None:
    with socket.create_connection(strict.address[:2], timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1 << 16)
        connection.sendall(b"\r\n")
        assert connection.recv(1 << 16) == b""


def test_what_is_refused_is_not_read_for_ever(strict: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(strict.address[:2], timeout=20) as connection, pytest.raises(OSError):
        connection.sendall(head + b"Content-Length: 1000000000\r\n\r\n")
        assert b" 413 " in connection.recv(1 << 16)
        while True:
            connection.sendall(b" " * 1000)


def test_who_reads_nothing_is_dropped(served: ServedModels) -> None:
    with (
        Running(served, ServerOptions(reader_timeout_s=0.1)) as server,
        served.models.use("default") as llm,
        post(f"{server.url}/v1/completions", LONG | {"n": 16, "logprobs": 5, "overflow": "sliding"}) as stream,
    ):
        assert stream.readline().startswith(b"data: ")
        while llm.is_busy:
            pass


def test_who_waits_for_a_model_is_in_the_way_of_nobody(tmp_path: Path) -> None:
    shutil.copytree(find_model("default"), tmp_path / "slow")
    is_slow, may_go_on = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        if is_slow.is_set():
            may_go_on.wait()

    async def use(name: str) -> None:
        async with asyncio.timeout(60), served.use(name):
            pass

    async def all_of_them() -> None:
        await use("story")
        is_slow.set()
        waiting = [asyncio.create_task(use("slow")) for _ in range(2 * MAX_THREADS)]
        try:
            await asyncio.sleep(0)
            await use("story")
            assert not any(each.done() for each in waiting)
        finally:
            may_go_on.set()
        await asyncio.gather(*waiting)

    models = Models(max_cache_tokens=1024, threads=1, progress=progress)
    with closing(ServedModels(models, {"story": "default", "slow": tmp_path / "slow"})) as served:
        asyncio.run(all_of_them())


def test_one_caller_has_so_many_requests_at_a_time(strict: Running) -> None:
    with post(f"{strict.url}/v1/completions", LONG) as stream:
        assert stream.readline().startswith(b"data: ")
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(f"{strict.url}/v1/completions", LONG)
        with caught.value as refused:
            assert refused.code == 429


def test_a_response_in_the_background_counts_until_it_ends(strict: Running) -> None:
    options: Any = {"model": "story", "input": "Tell me a story"}
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0) as client:
        endless = client.responses.create(background=True, truncation="auto", **options)
        for background in (True, False):
            with pytest.raises(openai.RateLimitError, match="1 requests of yours are under way"):
                client.responses.create(background=background, **options)
        assert client.responses.retrieve(endless.id).status == "in_progress"
        assert client.responses.cancel(endless.id).status == "cancelled"
        assert client.responses.create(max_output_tokens=1, **options).status == "incomplete"


def test_places_in_the_background_are_taken_before_anything_is_awaited() -> None:
    kept = StoredResponses()
    with ExitStack() as held:
        for _ in range(MAX_RUNNING):
            held.enter_context(kept.place(""))
        with pytest.raises(Failure, match=f"^{MAX_RUNNING} responses run in the background") as refused, kept.place(""):
            pass
    assert refused.value.headers == {"Retry-After": "1"}
    with kept.place(""):
        pass


def test_who_has_much_made_in_the_background_leaves_places_to_others() -> None:
    kept = StoredResponses()
    with ExitStack() as held:
        for owner, most in (("many", MAX_RUNNING // 2), ("other", MAX_RUNNING // 4)):
            for _ in range(most):
                held.enter_context(kept.place(owner))
            with pytest.raises(Failure, match=f"{most} responses of yours run in the background"), kept.place(owner):
                pass
        with kept.place("few"):
            pass


def test_who_stores_much_does_not_push_out_the_responses_of_others() -> None:
    kept = StoredResponses()
    for number, owner in enumerate(["few", *["many"] * (MAX_RESPONSES + 1), "few"]):
        kept.keep(StoredResponse({"id": str(number), "output": []}, [], [], owner))
    assert [kept.find("few", each).owner for each in ("0", str(MAX_RESPONSES + 2))] == ["few", "few"]
    with pytest.raises(Failure, match="not found"):
        kept.find("many", "2")
    assert kept.find("many", "4")


def own(**options: Any) -> Running:
    return Running(
        ServedModels(Models(max_cache_tokens=4096, threads=1), {"story": "default"}), ServerOptions(**options)
    )


def test_who_closes_is_not_ready_first_and_lets_streams_end() -> None:
    with own(shutdown_delay_s=0.3) as server:
        with post(f"{server.url}/v1/completions", LONG | {"max_tokens": 300}) as stream:
            stream.readline()
            server.server.handle_exit(15, None)
            while get(f"{server.url}/ready")[0] != 503:  # the loop hears of it a moment later
                pass
            assert get(f"{server.url}/health")[0] == 200
            assert stream.read().endswith(b"data: [DONE]\n\n")
        server.thread.join()


def test_health_names_the_models_whose_device_failed() -> None:
    with own() as server:
        with server.served.models.use() as llm:
            assert health(server) == {"status": "ok"}
            llm._held.failure = "cuda failed, so the model was loaded for the CPU: the device is lost"
        assert health(server) == {"status": "degraded", "on_the_cpu": ["story"]}


def health(server: Running) -> dict[str, object]:
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        return json.load(answer)


def test_what_does_not_end_in_time_is_told_so() -> None:
    with own(drain_timeout_s=0.0) as server, post(f"{server.url}/v1/completions", LONGER) as stream:
        stream.readline()
        server.server.handle_exit(15, None)
        last = stream.read().strip().splitlines()[-1]
        assert b"error" in last and b"[DONE]" not in last


def test_a_second_signal_ends_all_at_once_without_tracebacks(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("uvicorn.error")
    with own() as server, post(f"{server.url}/v1/completions", LONGER) as stream:
        log.addHandler(caplog.handler)
        level = log.level
        try:
            stream.readline()
            server.server.handle_exit(15, None)
            server.server.handle_exit(15, None)
            with pytest.raises(http.client.IncompleteRead):
                stream.read()
            server.thread.join()
        finally:
            log.removeHandler(caplog.handler)
            log.setLevel(level)
    assert not caplog.records


def test_the_journal_has_a_line_for_each_request_and_no_text(served: ServedModels, tmp_path: Path) -> None:
    with (
        closing(Journal(tmp_path / "log")) as journal,
        Running(served, ServerOptions(keys=read_keys(["sesame-open"])), journal) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame-open", max_retries=0) as client,
    ):
        answer = client.completions.with_raw_response.create(
            model="story", prompt="Xylophone", max_tokens=3, temperature=0
        )
        assert answer.headers["x-request-id"].startswith("req-")
    text = (tmp_path / "log").read_text()
    line = json.loads(text)
    assert line["request_id"] == answer.headers["x-request-id"] and line["caller"] == "key1"
    assert (line["status"], line["model"], line["output_tokens"], line["finish"]) == (200, "story", 3, "length")
    assert set(line) == {
        "time", "request_id", "model", "method", "path", "status", "caller", "address", "first_byte_s", "seconds",
        "prompt_tokens", "output_tokens", "finish",
    }  # fmt: skip
    assert "Xylophone" not in text and "sesame" not in text


def test_requests_have_ids_where_no_line_is_written(running: Running) -> None:
    answer = httpx.get(f"{running.url}/health", headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"


def test_what_a_request_rules_out_itself_is_its_own_mistake(served: ServedModels, tmp_path: Path) -> None:
    with served.models.use(served.path("")) as llm:
        ends = [each for token, each in llm.tokenizer.vocabulary().items() if token.startswith("y")]
    asked = {"prompt": "Once", "guided_choice": ["yes"], "stop_token_ids": ends}
    with closing(Journal(tmp_path / "log")) as journal, Running(served, ServerOptions(), journal) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=asked)
    assert answer.status_code == 400 and "stop_token_ids" in answer.json()["error"]["message"]
    line = json.loads((tmp_path / "log").read_text())
    assert (line["status"], line["finish"]) == (400, "error")


def test_the_journal_counts_all_prompts_once_and_how_their_choices_ended(served: ServedModels, tmp_path: Path) -> None:
    body = {"prompt": ["Once upon", "Once upon a"], "n": 2, "max_tokens": 2, "temperature": 0, "stop": " a"}
    with (
        closing(Journal(tmp_path / "log")) as journal,
        Running(served, ServerOptions(), journal) as server,
        post(f"{server.url}/v1/completions", body) as answer,
    ):
        used = json.load(answer)["usage"]
    line = json.loads((tmp_path / "log").read_text())
    assert line["prompt_tokens"] == used["prompt_tokens"] and line["output_tokens"] == used["completion_tokens"]
    assert line["finish"] == {"stop": 2, "length": 2}


def test_the_journal_counts_what_clients_cost_that_have_left(served: ServedModels, tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "log")) as journal:
        with Running(served, ServerOptions(), journal) as server, post(f"{server.url}/v1/completions", LONG) as answer:
            answer.readline()
        line = json.loads((tmp_path / "log").read_text())
    assert (line["finish"], line["prompt_tokens"]) == ("cancelled", 5) and line["output_tokens"] >= 1


def test_a_full_disk_for_lines_stops_nobody() -> None:
    with closing(Journal(Path("/dev/full"))) as journal:
        assert call(Journaled(empty, journal))[0] == 200
        assert journal.num_lost == 1


def test_a_pipe_for_lines_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    reader = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    with closing(Journal(tmp_path / "log")) as journal:

        def fill() -> None:
            while not journal.num_lost:
                call(Journaled(empty, journal), "/" + "é" * 60_000)

        writer = threading.Thread(target=fill)
        writer.start()
        writer.join(60)
        num_lost = journal.num_lost
        first = os.read(reader, 1 << 12)
        os.close(reader)  # who waits there gets an error
        writer.join()
    assert num_lost == 1 and json.loads(first.splitlines()[0])["path"] == "/" + "é" * 499


def test_https(served: ServedModels) -> None:
    listening = Listening(port=0, certificate=HERE / "localhost.pem", private_key=HERE / "localhost.key")
    context = ssl.create_default_context(cafile=str(HERE / "localhost.pem"))
    with Running(served, listening=listening) as server:
        assert server.url.startswith("https://")
        assert get(f"{server.url}/health", context=context)[0] == 200


PEM, KEY = str(HERE / "localhost.pem"), str(HERE / "localhost.key")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--api-key", "short"], "at least 8 characters"),
        (["--tls-key", "missing.pem"], "TLS takes a certificate and a private key"),
        (["--tls-certificate", PEM, "--tls-key", PEM, "--port", "0"], "are no pair for TLS ("),
        (["--tls-certificate", KEY, "--tls-key", KEY, "--port", "0"], "are no pair for TLS ("),
        (["a=default", "a=default"], "two models are called"),
        (["models/\udcff"], "'models/\\udcff' has no name that clients could give: give NAME=PATH"),
        (["--drain-timeout", "-1"], "drain_timeout_s is -1"),
        (["--log-file", "lines", "--no-log"], "give one of them"),
        (["--log-file", "-"], "leave it out"),
        (["--host", ""], "host is empty"),
        (["--max-priority", "-1"], "max_priority is -1"),
        (["--otlp-endpoint", "http://", "--port", "0"], "the OTLP endpoint is 'http://'"),
        (["--trusted-proxy", "nonsense"], "trusted_proxies: 'nonsense' is no address"),
        (["--trusted-proxy", "10.0.0.1/8"], "trusted_proxies: '10.0.0.1/8' is no address"),
        (["--cors-origin", "http://good.com/"], "cors_origins: 'http://good.com/' is nothing that"),
        (["--cors-origin", "not a url"], "cors_origins: 'not a url' is nothing that"),
        (["nowhere/nothing", "--port", "0"], "nowhere/nothing"),
        (["default", "second=nowhere/nothing", "--port", "0"], "nowhere/nothing: there is no such file or folder"),
        (["--host", "192.0.2.1"], "192.0.2.1:8000 cannot be listened at ("),
    ],
)
def test_impossible_options_are_refused_in_a_line(options: list[str], why: str) -> None:
    result = CliRunner().invoke(command, ["serve", *options])
    assert result.exit_code == 2 and why in result.output and len(result.output.splitlines()) == 1


def test_a_folder_may_be_called_as_a_name_and_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "lr=3e-4"
    folder.mkdir()
    assert named([str(folder), f"a={folder}"]) == {"lr=3e-4": str(folder), "a": str(folder)}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("", 403),
        ("localhost:8000", 200),
        ("LOCALHOST.", 200),
        ("chat.localhost", 200),
        ("host.docker.internal:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
    ],
)
def test_a_page_of_the_web_whose_name_leads_here_is_refused(running: Running, host: str, status: int) -> None:
    assert get(f"{running.url}/v1/models", {"Host": host})[0] == status


def test_any_name_is_good_for_who_has_a_key_and_for_the_health_check(served: ServedModels, running: Running) -> None:
    with Running(served, ServerOptions(keys=read_keys(["sesame-open"]))) as server:
        assert get(f"{server.url}/v1/models", {"Host": "a.example", "x-api-key": "sesame-open"})[0] == 200
    with Running(served, ServerOptions(cors_origins=["https://a.example"])) as server:
        assert get(f"{server.url}/v1/models", {"Host": "a.example"})[0] == 200
        assert get(f"{server.url}/v1/models", {"Host": "b.example"})[0] == 403
    assert get(f"{running.url}/health", {"Host": "a.example"})[0] == 200
    assert raw(running, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_origins_and_proxies_that_there_can_be() -> None:
    ServerOptions(cors_origins=("*", "null", "http://localhost:3000", "https://a.example", "http://[::1]:8000"))
    Listening(trusted_proxies=("*", "10.0.0.0/8", "::1", "127.0.0.1"))


def test_a_port_in_use_is_told_before_a_model_is_loaded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Models, "preload")
    result = CliRunner().invoke(command, ["serve", "--port", str(running.address[1])])
    assert result.exit_code == 2 and "(Address already in use): give another" in result.output
    assert len(result.output.splitlines()) == 1


def test_of_two_that_begin_at_the_same_time_one_says_that_the_port_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    other = bind(Listening(port=0))
    monkeypatch.setattr(Models, "preload", lambda *_: listen(other))  # while this one loads its model
    with closing(other[0]):
        result = CliRunner().invoke(command, ["serve", "--port", str(other[0].getsockname()[1])])
    assert result.exit_code == 2 and "(Address already in use): give another" in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_every_host_has_sockets_with_one_port(host: str) -> None:
    sockets = bind(Listening(host=host, port=0))
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models", "/v1/models/story", "/metrics", "/"])
def test_whoever_gets_may_ask_for_the_head_alone(running: Running, path: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(running.url + path, method="HEAD")) as answer:
        assert (answer.status, answer.read()) == (200, b"") and int(answer.headers["content-length"]) > 0


def test_a_slash_behind_a_path_says_nothing(served: ServedModels) -> None:
    """Nobody is sent to an address that a proxy may not have, and what is open to everybody stays so."""
    with Running(served, ServerOptions(keys=read_keys(["sesame-open"]))) as server:
        for path in ("/health", "/dashboard"):
            assert httpx.get(f"{server.url}{path}/").text == httpx.get(f"{server.url}{path}").text
        asked = {"model": "story", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        for path, headers in (("chat/completions", {}), ("messages", {"anthropic-version": "2023-06-01"})):
            address = f"{server.url}/v1/{path}/"
            assert httpx.post(address, json=asked, headers=headers).status_code == 401
            answer = httpx.post(address, json=asked, headers={"x-api-key": "sesame-open"} | headers)
            assert answer.json()["model"] == "story"
        found = httpx.get(f"{server.url}/v1/models/", headers={"x-api-key": "sesame-open"}).json()
    assert [each["id"] for each in found["data"]] == ["story"]


def test_pages_from_elsewhere_only_where_allowed(served: ServedModels) -> None:
    with Running(served, ServerOptions(cors_origins=("https://page.example",))) as server:
        allowed = [
            get(f"{server.url}/health", {"Origin": f"https://{who}.example"})[1]["access-control-allow-origin"]
            for who in ("page", "other")
        ]
        assert allowed == ["https://page.example", None]


@pytest.mark.parametrize(("who", "status"), [("page", 200), ("other", 400)])
def test_an_allowed_page_of_the_web_may_ask_ones_own_machine(served: ServedModels, who: str, status: int) -> None:
    """As Chrome asks before it lets such a page speak to 127.0.0.1."""
    asked = {
        "Origin": f"https://{who}.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    with Running(served, ServerOptions(cors_origins=("https://page.example",))) as server:
        answer = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
    assert answer.status_code == status
    assert status == 400 or answer.headers["access-control-allow-private-network"] == "true"


def test_many_idle_connections_are_in_nobodys_way(running: Running) -> None:
    idle = [socket.create_connection(running.address[:2]) for _ in range(300)]
    try:
        assert get(f"{running.url}/health")[0] == 200
    finally:
        for each in idle:
            each.close()
    assert threading.active_count() < 100

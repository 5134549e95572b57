"""`bitnet top` beside a running server."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx2
import pytest
from conftest import Running
from typer.testing import CliRunner

from bitnet_inference.cli import app
from bitnet_inference.errors import BitNetError
from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, ServerOptions, Watch, read_keys
from bitnet_inference.top import read_server

KEY = "a-key-of-the-server"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    watch = Watch()
    models = Models(max_cache_tokens=1024, threads=1, listener=watch.listener)
    served = ServedModels(models, {"story": "default"})
    with Running(served, ServerOptions(keys=read_keys([KEY], None)), watch=watch) as each:
        yield each
    served.close()


def top(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_one_table_of_what_has_happened(server: Running) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}
    assert httpx2.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    code, text = top(f"{server.url}/v1", "--api-key", KEY)
    assert code == 0, text
    row = next(line for line in text.splitlines() if line.startswith("story"))
    assert row.count("ms/") == 2, "two quantiles of the first token and of the gaps"
    assert "MB" in row and "0%" in row


def test_a_table_an_interval_where_no_terminal_is(server: Running) -> None:
    command = [sys.executable, "-m", "bitnet_inference", "top", server.url, "--api-key", KEY, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        heads = (line for line in process.stdout if line.startswith("bitnet "))
        assert next(heads) and next(heads)
        process.terminate()


def test_without_the_key_it_says_what_to_give(server: Running) -> None:
    for arguments in ([], ["--api-key", "another"]):
        code, text = top(server.url, *arguments)
        assert code == 2 and "--api-key" in text and "401" in text and text.count("\n") == 1


def test_refused_requests_are_counted_by_route(server: Running) -> None:
    httpx2.post(f"{server.url}/v1/completions", json={})
    _, text = top(server.url, "--api-key", KEY)
    assert "401 POST /v1/completions" in text


def test_the_key_goes_to_nobody_else() -> None:
    asked: list[str] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/other")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        thread = threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with pytest.raises(BitNetError, match="302"):
                read_server(f"http://127.0.0.1:{other.server_port}", KEY)
        finally:
            other.shutdown()
            thread.join()
    assert asked == ["/metrics"]

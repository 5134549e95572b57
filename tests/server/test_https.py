"""With TLS connections have the limits, and the end, that they have without."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from conftest import Running

from bitnet_inference.models import Models
from bitnet_inference.server import Listening, ServedModels, ServerOptions, run

HERE = Path(__file__).parent
PEM = HERE / "localhost.pem"
LISTENING = Listening(port=0, certificate=PEM, private_key=HERE / "localhost.key")


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LINGER_S", 0.1)


@pytest.fixture
def secure(served: ServedModels) -> Iterator[Running]:
    with Running(served, ServerOptions(header_timeout_s=0.2), listening=LISTENING) as server:
        yield server


def connected(server: Running, line: socket.socket | None = None) -> ssl.SSLSocket:
    """A client behind its handshake."""
    line = line or socket.create_connection(server.address[:2], timeout=20)
    return ssl.create_default_context(cafile=str(PEM)).wrap_socket(line, server_hostname="localhost")


def test_a_handshake_that_does_not_come_has_the_time_of_a_head(secure: Running) -> None:
    with socket.create_connection(secure.address[:2], timeout=20) as connection:
        assert connection.recv(1) == b""


def test_half_a_head_ends_though_its_client_says_no_goodbye(secure: Running) -> None:
    connections = secure.server.server_state.connections
    with connected(secure) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 10) and connections  # a client that does not read on does not see the goodbye
        connection.sendall(b"GET /health HTTP/1.1\r\nHost")
        until = time.monotonic() + 20
        while connections and time.monotonic() < until:
            pass
        assert not connections


def test_an_idle_client_does_not_hold_up_the_end() -> None:
    models = ServedModels(Models(max_cache_tokens=256, threads=1), {"story": "default"})
    with closing(models), Running(models, listening=LISTENING) as server:
        context = ssl.create_default_context(cafile=str(PEM))
        with closing(http.client.HTTPSConnection("localhost", server.address[1], context=context)) as client:
            client.request("GET", "/health")
            assert client.getresponse().read() == b'{"status":"ok"}'  # and it is kept for another request
            server.server.handle_exit(15, None)
            server.thread.join(20)
            assert not server.thread.is_alive()


def test_who_reads_slowly_gets_all_of_an_answer_behind_which_the_connection_closes(secure: Running) -> None:
    line = socket.socket()
    line.settimeout(20)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(secure.address[:2])
    body = json.dumps({"prompt": "a fox " * 50_000, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with connected(secure, line) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        protocol: Any = next(iter(secure.server.server_state.connections))
        looks = []
        until = time.monotonic() + 20
        while len(looks) < 3 and time.monotonic() < until:  # whether all is sent
            if protocol._end_timer not in looks:
                looks.append(protocol._end_timer)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["token_strs"]) > 50_000

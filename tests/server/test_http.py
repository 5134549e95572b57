"""HTTP/1.1 on the wire, for clients that would rather have another protocol or an older one, or that send ahead."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import Running

from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, ServerOptions

BODY = json.dumps({"prompt": "Once upon", "max_tokens": 2}).encode()
PLAIN = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
WEBSOCKET = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
LAST = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def post(headers: bytes, version: bytes = b"1.1") -> bytes:
    """The head of a request for a completion."""
    return b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\n%s\r\n" % (
        version,
        headers,
    )


def sent(server: Running, packets: Sequence[bytes]) -> bytes:
    """What a connection that sends this gets until it is closed."""
    with socket.create_connection(server.address[:2], timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        for packet in packets:
            connection.sendall(packet)
        while part := connection.recv(1 << 16):
            received += part
        return received


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET, b"Connection: keep-alive, upgrade\r\nUpgrade: TLS/1.3\r\n"])
@pytest.mark.parametrize(("framing", "body"), [(PLAIN, BODY), (CHUNKED, CHUNKS)])
@pytest.mark.parametrize("is_split", [False, True])
def test_who_would_upgrade_is_answered_with_his_body_and_may_go_on(
    running: Running, upgrade: bytes, framing: bytes, body: bytes, is_split: bool
) -> None:
    head = post(upgrade + framing)
    packets = [head[:30], head[30:-2], head[-2:-1], head[-1:], body[:5], body[5:], LAST] if is_split else [head + body]
    received = sent(running, packets if is_split else [*packets, LAST])
    assert received.count(b"HTTP/1.1 200 OK") == 2 and b'"completion_tokens":2' in received
    assert received.endswith(b"}") and b'"object":"list"' in received


def test_who_would_upgrade_may_send_ahead_and_may_close(running: Running) -> None:
    one = post(H2C + PLAIN) + BODY
    assert sent(running, [one * 3 + LAST]).count(b"HTTP/1.1 200 OK") == 4
    assert sent(running, [post(b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n" + PLAIN) + BODY]).count(b" 200 ") == 1


def test_who_would_upgrade_has_the_limits_of_all(running: Running) -> None:
    flood = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100))
    assert not sent(running, [post(H2C + flood)]).startswith(b"HTTP/1.1 200")
    assert b" 400 " in sent(running, [post(H2C + PLAIN + CHUNKED) + CHUNKS])


def test_no_library_takes_a_connection_over(running: Running) -> None:
    assert running.server.config.ws_protocol_class is None


def test_a_tunnel_is_refused(running: Running) -> None:
    assert b" 400 " in sent(running, [b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n" + LAST])


def test_who_asks_about_a_model_that_is_not_there_is_told_so_at_once(running: Running) -> None:
    answer = sent(running, [LAST.replace(b"/v1/models", b"/tokenizer_info?model=nobody")])
    assert answer.startswith(b"HTTP/1.1 404 ") and b"the model 'nobody' is not served here" in answer


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (post(b"Content-Length: %d\r\n" % len(BODY)) + BODY[:-1] + b" }  and more", "as its Content-Length says"),
        (b"GET / HTTP/1.1\r\nCookie: " + b"x" * (66 << 10) + b"\r\n\r\n", "have more than 65536 bytes: send less"),
    ],
)
def test_what_cannot_be_read_is_refused_in_openais_shape(running: Running, packet: bytes, why: str) -> None:
    head, _, body = sent(running, [packet]).rpartition(b"\r\n\r\n")
    assert b"HTTP/1.1 400 Bad Request\r\n" in head and b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and why in error["message"]


def test_http_1_0_has_no_chunks(running: Running) -> None:
    body = json.dumps({"prompt": "Once upon", "max_tokens": 3, "stream": True}).encode()
    for connection in (b"", b"Connection: keep-alive\r\n"):
        framing = connection + b"Content-Length: %d\r\n" % len(body)
        head, _, events = sent(running, [post(framing, b"1.0") + body]).partition(b"\r\n\r\n")
        assert b" 200 " in head and b"transfer-encoding" not in head and b"connection: close" in head
        assert events.startswith(b"data: {") and events.endswith(b"}\n\ndata: [DONE]\n\n")
    head, _, whole = sent(running, [post(PLAIN, b"1.0") + BODY]).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(whole) in head and json.loads(whole)["usage"]["completion_tokens"] == 2
    head, _, nothing = sent(running, [b"HEAD /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n"]).partition(b"\r\n\r\n")
    assert b" 200 " in head and not nothing


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("behind", [b"", LAST])
def test_who_is_refused_before_it_has_sent_its_body_and_would_close_can_read_why(
    running: Running, version: bytes, behind: bytes
) -> None:
    """As nginx asks by itself, and urllib: it told 502, or that the connection was reset."""
    num_bytes = ServerOptions().max_body_bytes + 1
    head = post(b"Connection: close\r\nContent-Length: %d\r\n" % num_bytes, version)
    with socket.create_connection(running.address[:2], timeout=20) as connection:
        connection.sendall(head)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
        connection.sendall(bytes(num_bytes) + behind)
        assert connection.recv(1) == b""
    assert b" 413 " in answer and b"connection: close" in answer and answer.endswith(b"}}")


@pytest.mark.parametrize("ahead", [LAST, post(PLAIN) + BODY, post(H2C + PLAIN) + BODY])
def test_who_leaves_is_noticed_though_more_requests_wait(
    running: Running, ahead: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": "Once", "stream": True, "ignore_eos": True, "overflow": "sliding"}).encode()
    endless = post(b"Content-Length: %d\r\n" % len(body)) + body
    with running.served.models.use("default") as llm:
        with socket.create_connection(running.address[:2], timeout=20) as connection:
            connection.sendall(endless + ahead)
            assert b" 200 " in connection.recv(1 << 16)
        while llm.is_busy:
            pass
    assert not caplog.records


@pytest.mark.parametrize(("unsent", "is_dropped"), [([900, 600, 300], False), ([900, 600, 600], True), ([9, 9], True)])
def test_who_reads_slowly_is_waited_for(running: Running, unsent: list[int], is_dropped: bool) -> None:
    line, timers = Mock(get_write_buffer_size=Mock(side_effect=unsent)), list[Callable[[], None]]()
    config: Any = running.server.config
    clock = SimpleNamespace(call_later=lambda _, work, *args: timers.append(partial(work, *args)))
    protocol = config.http(config, running.server.server_state, {}, clock)
    protocol.transport, protocol.flow = line, Mock()
    protocol.pause_writing()
    for _ in unsent[1:]:
        timers.pop()()
    assert line.abort.called == is_dropped and bool(timers) != is_dropped


def test_who_still_sends_a_body_at_the_end_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("uvicorn.error")
    with (
        closing(ServedModels(Models(max_cache_tokens=256, threads=1), {"story": "default"})) as own,
        Running(own, ServerOptions(drain_timeout_s=0.0)) as server,
        socket.create_connection(server.address[:2], timeout=20) as connection,
    ):
        server.server.config.timeout_graceful_shutdown = 1
        level = log.level
        log.addHandler(caplog.handler)
        try:
            connection.sendall(post(PLAIN + b"Expect: 100-continue\r\n"))
            assert connection.recv(1 << 10).startswith(b"HTTP/1.1 100 ")  # now it is waited for
            connection.sendall(BODY[:-1])
            server.server.handle_exit(15, None)
            answer = b"".join(iter(lambda: connection.recv(1 << 10), b""))
            server.thread.join()
        finally:
            log.removeHandler(caplog.handler)
            log.setLevel(level)
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
    assert not caplog.records

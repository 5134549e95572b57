"""A client that costs little: one HTTP request a connection, on asyncio's transports, and when its events came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
TIMEOUT_S = 300.0


@dataclass
class Answer:
    """What came back. `error` is "" for an answer that came whole; times are of time.perf_counter().

    `events` are the data of server-sent events, each with its time; `body` is that of other answers.
    """

    due_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytes = b""
    end_s: float = 0.0
    error: str = "no answer"

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class Exchange(asyncio.Protocol):
    """A request, and its answer as it comes. `leave_after` events the client leaves; 0: when its request is out."""

    def __init__(self, request: bytes, due_s: float, leave_after: int | None = None) -> None:
        self.answer = Answer(due_s)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._leave_after = request, leave_after
        self._received, self._text = bytearray(), bytearray()
        self._has_head = False
        self._num_missing: int | None = None  # bytes of a body of known length; None for chunks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The server is there."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)
        if self._leave_after == 0:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Some bytes of the answer."""
        self._received += data
        if not self._has_head and not self._read_head():
            return
        is_whole = self._read_chunks() if self._num_missing is None else self._read_known()
        if is_whole:
            self._end("")
        elif self._leave_after is not None and len(self.answer.events) >= self._leave_after:
            self._end("left")

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, if it has not come before."""
        self._end("left" if self._leave_after == 0 else f"connection lost: {exc or 'closed'}")

    def _end(self, error: str) -> None:
        if self.over.done():
            return
        self.answer.error, self.answer.end_s = error, time.perf_counter()
        self.over.set_result(None)
        self.transport.abort()

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        del self._received[: end + 4]
        self._has_head = True
        self.answer.status = int(first.split()[1])
        pairs = (line.partition(":") for line in lines)
        self.answer.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if "chunked" not in self.answer.headers.get("transfer-encoding", ""):
            self._num_missing = int(self.answer.headers.get("content-length", 0))
        return True

    def _read_known(self) -> bool:
        assert self._num_missing is not None
        if len(self._received) < self._num_missing:
            return False
        self.answer.body = bytes(self._received)
        return True

    def _read_chunks(self) -> bool:
        """Take whole chunks, and whole events from them; whether the last one has come."""
        now = time.perf_counter()
        while (line_end := self._received.find(b"\r\n")) >= 0:
            size = int(self._received[:line_end], 16)
            if len(self._received) < line_end + 4 + size:
                break
            self._text += self._received[line_end + 2 : line_end + 2 + size]
            del self._received[: line_end + 4 + size]
            if not size:
                return True
            *whole, rest = self._text.split(b"\n\n")
            events = [each for each in whole if not each.startswith(b":")]  # the others are comments
            self.answer.events += [(now, bytes(each.removeprefix(b"data: "))) for each in events]
            self._text = bytearray(rest)
        return False


def post(path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request; a body that is not bytes becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Host": HOST, "Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


def get(path: str, key: str = "") -> bytes:
    """The bytes of a request without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {key}\r\n\r\n".encode()


async def ask(
    port: int,
    request: bytes,
    *,
    due_s: float | None = None,
    leave_after: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Answer:
    """Send a request at `due_s`, from when on its times count, or now. Never raises: see Answer.error."""
    begin_s = time.perf_counter()
    if due_s is not None and due_s > begin_s:
        await asyncio.sleep(due_s - begin_s)
    due_s = begin_s if due_s is None else due_s
    exchange = Exchange(request, due_s, leave_after)
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().create_connection(lambda: exchange, HOST, port)
            await exchange.over
    except TimeoutError:
        exchange.answer.error = f"nothing more in {timeout_s:g} s"
        exchange.transport.abort()
    except OSError as error:
        exchange.answer.error = f"no connection: {error.strerror or error}"
    return exchange.answer

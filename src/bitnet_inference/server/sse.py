"""JSON and server-sent events: how answers look on the wire, and how they get there."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bitnet_inference.json_objects import LINE_ENDS
from bitnet_inference.server.connected import while_connected
from bitnet_inference.server.failures import Failure, failure_of

LOG = logging.getLogger("bitnet.server")
DONE = b"data: [DONE]\n\n"
QUIET_S = 15.0  # proxies take a connection for dead on which nothing comes for a minute, or for half of one
COMMENT = b": waiting\n\n"  # which clients pass over
# For clients that read with str.splitlines, as httpx does.
_LINE_ENDS = tuple((chr(code).encode(), escape.encode()) for code, escape in LINE_ENDS.items())
_UNREADABLE = "this is no HTTP/1.1 request: send one, behind a body of as many bytes as its Content-Length says"
HOLE = "\0text"  # stands in a template for what changes from event to event
# Proxies shall not collect it.
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def dumps(value: Any) -> bytes:
    """JSON in one line. Half surrogate pairs, which no UTF-8 can hold, are written as escapes."""
    try:
        written = orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    for end, escape in _LINE_ENDS:
        written = written.replace(end, escape)
    return written


def event(value: Any, name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(value) + b"\n\n"


def template(value: Any, name: str | None = None) -> tuple[bytes, bytes]:
    """An event's bytes before and behind the one string in it that is HOLE, which changes from event to event."""
    before, behind = event(value, name).split(dumps(HOLE))
    return before, behind


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in one piece; `value` may be its bytes already."""
    body = value if isinstance(value, bytes) else dumps(value)
    return Response(body, status, headers, media_type="application/json")


def unreadable(why: BaseException | None) -> bytes:
    """The last answer on a connection, head and all: what came makes no sense, or there is a Failure that says why."""
    body = dumps((why if isinstance(why, Failure) else Failure(400, _UNREADABLE)).body)
    fields = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d" % len(body)
    return b"HTTP/1.1 400 Bad Request\r\n%s\r\n\r\n%s" % (fields, body)


class EventResponse(Response):
    """An answer in events. What is `held` is let go at its end, or at once when the client leaves.

    `failed` makes an event of an error, for which it is too late to be a status. While no event comes, as in a queue or
    through a long prompt, a comment does now and then.
    """

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack, failed: Callable[[Failure], bytes]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._held, self._failed = events, held, failed
        self._num_sent, self._turn = 0, asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's."""
        async with self._held:
            try:
                await while_connected(receive, self._send(send))
            except (Failure, OSError):  # the client has left
                pass

    async def _send(self, send: Callable[[Any], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        comments = asyncio.create_task(self._comment(send))
        try:
            async for each in self._guarded():
                self._num_sent += 1
                await self._write(send, each)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Callable[[Any], Awaitable[None]], part: bytes) -> None:
        async with self._turn:  # both may wait for a reader, and what is sent to HTTP/1.0 must be one at a time
            await send({"type": "http.response.body", "body": part, "more_body": True})

    async def _comment(self, send: Callable[[Any], Awaitable[None]]) -> None:
        num_sent = -1
        while True:
            if num_sent == self._num_sent:
                await self._write(send, COMMENT)
            num_sent = self._num_sent
            await asyncio.sleep(QUIET_S)

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._events) as events:  # type: ignore[type-var]
                async for each in events:
                    yield each
        except Exception as error:  # the status is out already
            failure = failure_of(error)
            if failure.status == 500:
                LOG.error("a stream failed", exc_info=error)
            yield self._failed(failure)

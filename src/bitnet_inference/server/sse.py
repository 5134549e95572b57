"""Server-sent events: how a stream of answers looks on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse

from bitnet_inference.server.failures import failure_of

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies shall not collect it


def event(value: Any, name: str | None = None) -> bytes:
    """One event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in one piece."""
    return Response(orjson.dumps(value), status, headers, media_type="application/json")


def event_response(events: AsyncIterator[bytes], held: AsyncExitStack) -> Response:
    """An answer in events. What is `held` is let go at the end, or when the client leaves."""
    return StreamingResponse(_guarded(events, held), media_type="text/event-stream", headers=_HEADERS)


async def _guarded(events: AsyncIterator[bytes], held: AsyncExitStack) -> AsyncIterator[bytes]:
    async with held:
        try:
            async for each in events:
                yield each
        except Exception as error:  # the status is out already
            yield event(failure_of(error).body)

"""A line of JSON for every request: who, what, how it ended and how long it took. No text of prompts or answers."""

from __future__ import annotations

import re
import secrets
import select
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from os import fstat
from pathlib import Path
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitnet_inference.errors import InvalidParams
from bitnet_inference.server.gate import CALLER
from bitnet_inference.server.sse import COMMENT
from bitnet_inference.stream import Stream

NOTES = "bitnet.notes"  # in a scope: a dict in which the application notes what shall stand in the line
ID_HEADERS = (b"x-request-id", b"request-id")  # where OpenAI's clients look for a request's id, and Anthropic's
MAX_PATH = 500  # characters: a pipe that is not full has room for a line of 4096 bytes
_ID = re.compile(rb"[\w.:-]{1,64}")


class Journal:
    """Where the lines go: a file, or stderr. One that cannot be written is lost, and is counted; nobody waits."""

    def __init__(self, file: Path | None = None) -> None:
        """Raises InvalidParams for a file that cannot be written."""
        self.num_lost = 0
        self._lock = threading.Lock()
        try:
            self._file: Any = sys.stderr.buffer if file is None else file.open("ab", buffering=0)
        except OSError as error:
            raise InvalidParams(
                f"{file} cannot be written: {error.strerror}: give a file in a folder that is there"
            ) from None
        self._has_room = _room_in(self._file)

    def write(self, line: dict[str, Any]) -> None:
        """One line."""
        text = orjson.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **line})
        try:
            with self._lock:
                if not self._has_room():
                    raise BlockingIOError
                self._file.write(text + b"\n")
                self._file.flush()
        except (OSError, ValueError):  # a full disk, a closed stream, a pipe that nobody reads
            self.num_lost += 1

    def close(self) -> None:
        """No line goes to the file any more."""
        if self._file is not sys.stderr.buffer:
            self._file.close()


def _room_in(file: Any) -> Callable[[], bool]:
    """Whether a line can be written there without waiting for who reads it, as of a pipe or a terminal."""
    try:
        number = file.fileno()
    except (OSError, ValueError):  # it is no file of the system's
        return lambda: True
    if sys.platform == "win32" or stat.S_ISREG(fstat(number).st_mode):
        return lambda: True
    room = select.poll()
    room.register(number, select.POLLOUT)
    return lambda: bool(room.poll(0))


class Journaled:
    """An ASGI application around another one that gives each request an id, which it sends back, and a line.

    Without a journal there is no line.
    """

    def __init__(self, app: ASGIApp, journal: Journal | None) -> None:
        self._app, self._journal = app, journal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, start, status = _request_id(scope), time.monotonic(), 0
        notes: dict[str, Any] = {"request_id": request_id}
        scope[NOTES] = notes
        first_s: float | None = None

        async def sending(message: Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, request_id.encode()) for name in ID_HEADERS]
                message["headers"] = [*message.get("headers", []), *ids]
            elif first_s is None and message.get("body") != COMMENT:
                first_s = time.monotonic() - start
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if self._journal is not None:
                cost = _cost(notes.pop("streams", ()))
                self._journal.write(notes | _line(scope, status, start, first_s) | cost)


def _line(scope: Scope, status: int, start: float, first_s: float | None) -> dict[str, Any]:
    line = {
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH],
        "status": status or None,
        "caller": scope.get(CALLER) or None,
        "address": (scope.get("client") or ("",))[0] or None,
        "first_byte_s": None if first_s is None else round(first_s, 4),
        "seconds": round(time.monotonic() - start, 4),
    }
    return {key: value for key, value in line.items() if value is not None}


def _cost(streams: Sequence[Stream]) -> dict[str, Any]:
    """Tokens, a prompt's once for all its choices; and how these ended, which a client that has left may not see."""
    if not streams:
        return {}
    found = [(each.request.choice, each.usage or each.request.usage()) for each in streams]
    ends = Counter(map(_end, streams))
    return {
        "prompt_tokens": sum(usage.num_prompt_tokens for choice, usage in found if not choice),
        "output_tokens": sum(usage.num_output_tokens for _, usage in found),
        "finish": ends if len(ends) > 1 else next(iter(ends)),
    }


def _end(stream: Stream) -> str:
    finish = stream.request.finish
    return stream.finish_reason or ("error" if finish is not None and finish.reason == "error" else "cancelled")


def _request_id(scope: Scope) -> str:
    """The client's own, if it is harmless."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(value):
            return str(value.decode("ascii"))
    return f"req-{secrets.token_hex(8)}"

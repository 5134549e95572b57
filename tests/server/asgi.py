"""An application called in this process, as a server calls it, by a client that can leave at any moment."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answered:
    """What was sent back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any,
    path: str,
    body: Any,
    *,
    content_type: str = "application/json",
    leave_when: Callable[[Answered], bool] = lambda answered: False,
    leave: asyncio.Event | None = None,
) -> Answered:
    """POST; `body` are bytes, or what becomes JSON; None is a GET without one.

    The client leaves at `leave`, and when it has got enough.
    """
    answered, leave = Answered(), leave or asyncio.Event()
    waiting = [body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()]

    async def receive() -> dict[str, Any]:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["body"]:
            answered.chunks.append(message["body"])
        if leave_when(answered):
            leave.set()

    method = "POST" if body is not None else "GET"
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": method,
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"content-type", content_type.encode())], "client": ("test", 1), "server": ("test", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return answered


class HeldLoad:
    """The progress of a load that goes no further until it may."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.has_begun.set()
        self.may_go_on.wait()

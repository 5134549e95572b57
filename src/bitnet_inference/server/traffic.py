"""Counts HTTP requests by what they ask for, never by who asks."""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitnet_inference.server.failures import CLIENT_GONE
from bitnet_inference.telemetry import SECONDS, Histogram

METHODS = frozenset(("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"))
LARGE_BYTES = 1 << 20  # of bodies
OTHER = "other"  # methods and paths that nobody has here: strangers shall not make up labels


class Kind(NamedTuple):
    """What is counted together. `route` is a template, as "/v1/models/{name}"."""

    method: str
    route: str
    status: int


class Tally:
    """Of requests of one kind: how long they took, and the bytes of their bodies."""

    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS)
        self.num_bytes_in = self.num_bytes_out = 0

    def as_json(self) -> dict[str, Any]:
        """See Traffic.as_json."""
        return {"bytes_in": self.num_bytes_in, "bytes_out": self.num_bytes_out, "seconds": self.seconds.as_json()}


class Traffic:
    """The requests of a server. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.num_running = 0
        self._lock = threading.Lock()
        self._tallies: dict[Kind, Tally] = {}

    def begin(self) -> None:
        """A request has come."""
        with self._lock:
            self.num_running += 1

    def end(self, kind: Kind, seconds: float, num_bytes_in: int, num_bytes_out: int) -> None:
        """A request that had come is over."""
        with self._lock:
            self.num_running -= 1
            tally = self._tallies.setdefault(kind, Tally())
            tally.seconds.add(seconds)
            tally.num_bytes_in += num_bytes_in
            tally.num_bytes_out += num_bytes_out

    def as_json(self) -> list[tuple[Kind, dict[str, Any]]]:
        """Of each kind: "bytes_in", "bytes_out", and "seconds", a Histogram as_json."""
        with self._lock:
            return [(kind, tally.as_json()) for kind, tally in sorted(self._tallies.items())]


class Metered:
    """An ASGI application around another one, which counts its requests; those that are refused before `routes` too."""

    def __init__(self, app: ASGIApp, traffic: Traffic, routes: Sequence[BaseRoute]) -> None:
        self._app, self._traffic, self._routes = app, traffic, routes
        self._num_bytes = 0  # since memory was given back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, num_bytes_in, num_bytes_out, start = CLIENT_GONE, 0, 0, time.monotonic()

        async def receiving() -> Message:
            nonlocal num_bytes_in
            message = await receive()
            num_bytes_in += len(message.get("body", b""))
            return message

        async def sending(message: Message) -> None:
            nonlocal status, num_bytes_out
            status = message.get("status", status)
            num_bytes_out += len(message.get("body", b""))
            await send(message)

        self._traffic.begin()
        try:
            await self._app(scope, receiving, sending)
        finally:
            kind = Kind(method_of(scope), template_of(scope, self._routes), status)
            self._traffic.end(kind, time.monotonic() - start, num_bytes_in, num_bytes_out)
            self._num_bytes += num_bytes_in
            if self._num_bytes > LARGE_BYTES:
                self._num_bytes = 0
                asyncio.get_running_loop().run_in_executor(None, _give_memory_back)


def _give_memory_back() -> None:
    """To the system, what freed objects took in the heap of each thread: glibc keeps it else, hundreds of megabytes."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def method_of(scope: Scope) -> str:
    """The method, or "other"."""
    return scope["method"] if scope["method"] in METHODS else OTHER


def template_of(scope: Scope, routes: Sequence[BaseRoute]) -> str:
    """The template of the path that is asked for, or "other"."""
    route = scope.get("route")
    if route is None:  # it was refused on its way there, or has the wrong method
        route = next((each for each in routes if each.matches(scope)[0] != Match.NONE), None)
    return str(getattr(route, "path", OTHER))

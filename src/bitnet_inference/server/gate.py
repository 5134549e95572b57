"""What stands in front of the application: who may come in, how often, with how much, and how the day ends."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitnet_inference.server.failures import Failure
from bitnet_inference.server.keys import Key, find_key
from bitnet_inference.server.options import ServerOptions
from bitnet_inference.server.sse import json_response

CALLER = "bitnet.caller"  # in a scope: whose request it is, "" where there are no keys
OPTIONS = "bitnet.options"  # in a scope: the ServerOptions
PLACE = "bitnet.place"  # in a scope: an ExitStack, which ends what counts as under way; work that goes on may take it
MAX_CALLERS = 100_000  # that are remembered at a time
# Open to everybody: what watches over a server, and the page, which asks for the key.
OPEN = ("/health", "/ready", "/version", "/", "/dashboard")
OPEN_BELOW = "/web/"
_OWN_NAMES = (".localhost", ".local", ".internal")  # which nobody can have in the web; containers use the last
UNCOUNTED = ("/metrics", "/stats")  # asked every few seconds by who watches


@dataclass
class Account:
    """What a caller has used: requests under way, and how many it may still make (a bucket that fills itself).

    That of an address counts the keys that were wrong; `known` are the names of those that were right.
    """

    num_running: int = 0
    allowance: float = 0.0
    filled_at: float = 0.0
    known: set[str] = field(default_factory=set)

    @contextmanager
    def running(self, num_requests: int) -> Iterator[None]:
        """So many more are under way meanwhile."""
        self.num_running += num_requests
        try:
            yield
        finally:
            self.num_running -= num_requests


class Gate:
    """An ASGI application around another one. `is_closing` is set when no more requests shall come in.

    `is_private` is set where only this machine reaches it and there are no keys: then names of the web are refused.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._options, self._clock = app, options, clock
        self._accounts: dict[str, Account] = {}
        self.is_ready = True
        self.is_closing = self.is_private = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            with self._admitted(scope):
                await self._app(scope, self._bounded(scope, receive), send)
        except Failure as failure:
            body = failure.body_for(scope)
            await json_response(body, failure.status, failure.headers)(scope, receive, send)

    @contextmanager
    def _admitted(self, scope: Scope) -> Iterator[None]:
        path = scope["path"]
        if path == "/ready" and not self.is_ready:
            raise Failure(503, "the server is shutting down", code="shutting_down", retry_after_s=5)
        if path in OPEN or path.startswith(OPEN_BELOW) or scope["method"] == "OPTIONS":
            yield
            return
        if self.is_closing:
            raise _shutting_down()
        if self.is_private:
            _check_host(scope, self._options.cors_origins)
        scope[CALLER], scope[OPTIONS] = self._caller(scope), self._options
        if path in UNCOUNTED:
            yield
            return
        account = self._account(scope[CALLER] or _address(scope))
        # Who only asks how a response in the background goes on, or ends it, is not one more.
        is_work = scope["method"] == "POST" and not path.endswith("/cancel")
        self._charge(account, is_work)
        with ExitStack() as scope[PLACE]:
            scope[PLACE].enter_context(account.running(int(is_work)))
            yield

    def _caller(self, scope: Scope) -> str:
        if not self._options.keys:
            return ""
        sent = _sent_keys(scope)
        if not sent:
            raise Failure(401, "there is no API key: send Authorization: Bearer KEY", code="invalid_api_key")
        key = next(filter(None, (find_key(self._options.keys, each) for each in sent)), None)
        if self._options.requests_per_minute is not None:
            self._count_guess(self._account(f"at {_address(scope)}"), key)  # no key has a name with a space
        if key is None:
            raise Failure(401, "the API key is not known", code="invalid_api_key")
        return key.name

    def _count_guess(self, address: Account, key: Key | None) -> None:
        """Raises Failure where too many were wrong, of right keys too: else who guesses would know that they are."""
        if key is None or key.name not in address.known:
            self._check_allowance(address, "unknown API keys")
        if key is None:
            address.allowance -= 1
        else:
            address.known.add(key.name)

    def _account(self, name: str) -> Account:
        if len(self._accounts) >= MAX_CALLERS:
            self._accounts = {name: each for name, each in self._accounts.items() if each.num_running}
        full = Account(allowance=float(self._options.requests_per_minute or 0), filled_at=self._clock())
        return self._accounts.setdefault(name, full)

    def _charge(self, account: Account, is_work: bool) -> None:
        """Take one request from what the caller may make; raises Failure."""
        most = self._options.max_running
        if is_work and most is not None and account.num_running >= most:
            why = f"{account.num_running} requests of yours are under way, at most {most} may be: wait for one to end"
            raise Failure(429, why, code="concurrency_limit", retry_after_s=1)
        self._check_allowance(account, "requests")
        account.allowance -= 1

    def _check_allowance(self, account: Account, what: str) -> None:
        """Fill the bucket for the time that has gone by; raises Failure where it is empty."""
        per_minute = self._options.requests_per_minute
        if per_minute is None:
            return
        now = self._clock()
        account.allowance = min(per_minute, account.allowance + (now - account.filled_at) * per_minute / 60)
        account.filled_at = now
        if account.allowance < 1:
            wait_s = max(1, round((1 - account.allowance) * 60 / per_minute + 0.5))
            why = f"more than {per_minute} {what} a minute: try again in {wait_s} s"
            raise Failure(429, why, code="rate_limit_exceeded", retry_after_s=wait_s)

    def _bounded(self, scope: Scope, receive: Receive) -> Receive:
        """The request's body as far as it is not too long and does not take too long."""
        most = self._options.max_body_bytes
        if _content_length(scope) > most:
            raise _too_large(most)
        left, is_whole = most, False
        each_s = self._options.body_timeout_s
        end = self._clock() + 10 * each_s

        async def bounded() -> Message:
            nonlocal left, is_whole
            if is_whole:
                return await receive()
            try:
                if (left_s := end - self._clock()) <= 0:
                    raise TimeoutError
                async with asyncio.timeout(min(each_s, left_s)):  # wait_for may swallow a cancel
                    message = await receive()
            except TimeoutError:
                raise Failure(408, "the body did not come in time: send it faster", code="too_slow") from None
            except asyncio.CancelledError:
                if not self.is_closing:
                    raise
                raise _shutting_down() from None
            left -= len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if left < 0:
                raise _too_large(most)
            return message

        return bounded


def _shutting_down() -> Failure:
    return Failure(503, "the server is shutting down: try again soon", code="shutting_down", retry_after_s=5)


def _too_large(most: int) -> Failure:
    return Failure(413, f"the body has more than {most} bytes: send less", code="body_too_large")


def _address(scope: MutableMapping[str, Any]) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def _check_host(scope: MutableMapping[str, Any], origins: Sequence[str]) -> None:
    """Refuse a page of the web that lets its own name lead to this machine, and so may read what it says.

    Pages of the origins may do so anyway: that is how a proxy in front is told.
    """
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "localhost")
    if "*" in origins or given.lower() in (origin.partition("://")[2] for origin in origins):
        return
    name = re.sub(r":\d*$", "", given).strip("[]").rstrip(".").lower()
    if f".{name}".endswith(_OWN_NAMES):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        why = f"the Host is {given!r:.80}, and without API keys only localhost is answered"
        raise Failure(403, f"{why}: give --api-key or --cors-origin", code="unknown_host") from None


def _sent_keys(scope: MutableMapping[str, Any]) -> list[bytes]:
    """The keys of a request, as OpenAI's clients or Anthropic's send one: some send both, and mean only one of them."""
    sent: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            sent.setdefault(name, value[7:].strip())
        elif name == b"x-api-key":
            sent.setdefault(name, value)
    return list(sent.values())


def _content_length(scope: MutableMapping[str, Any]) -> int:
    given = [value for name, value in scope["headers"] if name == b"content-length"]
    return int(given[0]) if given and given[0].isdigit() else 0

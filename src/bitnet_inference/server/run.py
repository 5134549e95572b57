"""Runs an application until it is told to stop: the one door to uvicorn."""

from __future__ import annotations

import asyncio
import errno
import logging
import selectors
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bitnet_inference.errors import InvalidParams
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.front import Front
from bitnet_inference.server.gate import Gate
from bitnet_inference.server.options import Listening, ServerOptions
from bitnet_inference.server.sse import unreadable

LOG = logging.getLogger("bitnet.server")
MAX_HEADER_BYTES = 64 << 10
BACKLOG = 4096  # connections that wait to be accepted
MAX_UNSENT_BYTES = 128 << 10
MAX_AHEAD = 4  # requests behind the one that is answered; a client that sends more is read again once it has ended
LINGER_S = 2.0  # what is sent behind the end of an answer is thrown away so long, and a TLS client may say goodbye


class PatientProtocol(HttpToolsProtocol):
    """HTTP whose patience has an end: with heads that do not come, or do not end, and with ever more connections.

    And with bodies that go on after the answer, and with clients that do not read. It stays HTTP/1.1, whatever a client
    would like to upgrade to: such a request is answered as it stands, with its body.
    """

    options = ServerOptions()
    _timer: asyncio.TimerHandle | None = None  # for the client to send
    _reader_timer: asyncio.TimerHandle | None = None  # for it to read
    _end_timer: asyncio.TimerHandle | None = None  # for its goodbye
    _num_head_bytes = 0
    _is_last = False  # the answer that is out is the last one, and the rest of its request is thrown away
    _ends = False  # the server
    _running: RequestResponseCycle | None = None  # uvicorn keeps the last that has come, which may wait behind it

    def connection_made(self, transport: Any) -> None:
        """A client has come, and has shaken hands where there is TLS."""
        super().connection_made(transport)
        # Of an answer that nobody reads the system shall not keep the megabytes that it does by itself.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_UNSENT_BYTES)
        if len(self.connections) > self.options.max_connections:
            transport.abort()
        self._wait(self.options.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._stop_waiting()
        self._reader_is_back()
        if self._end_timer is not None:
            self._end_timer.cancel()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """What the client sends."""
        if self.timeout_keep_alive_task is not None and not self.cycle.more_body:
            self._wait(self.options.header_timeout_s)  # for a head, which an empty line does not begin
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:  # for the parser all behind the head is not HTTP
                    rest = rest[upgrade.args[0] :]
                    if self._is_to_stay():
                        self._read_head_again()
        except httptools.HttpParserError as error:
            self.transport.write(unreadable(error.__context__))
            self._hang_up()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._num_head_bytes = 0
        self._wait(self.options.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        """A part of its address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value) + 64)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._stop_waiting()
        if self._is_to_stay():
            return
        super().on_headers_complete()
        if not self.cycle.keep_alive:
            self._answer_and_close(self.cycle)
        if 0 < len(self.pipeline) <= MAX_AHEAD:
            self.flow.resume_reading()  # who is not read is not seen leaving

    def on_message_complete(self) -> None:
        """The request is there."""
        if self._is_last:
            self._hang_up()
        elif not self._is_to_stay():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is out. A client that goes on sending may do so until it has seen that."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._hang_up()
        if self.cycle.response_complete and self.cycle.more_body:
            self._wait(LINGER_S)
            if self._is_last and self.transport.can_write_eof():
                self.transport.write_eof()

    def shutdown(self) -> None:
        """The server ends, and this connection at once if nothing is under way."""
        self._ends = True
        super().shutdown()
        if self.transport.is_closing():
            self._hang_up()

    def timeout_keep_alive_handler(self) -> None:
        """The client has had time for another request."""
        self._hang_up()

    def pause_writing(self) -> None:
        """The client reads more slowly than its answer comes."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """It has read on."""
        self._reader_is_back()
        super().resume_writing()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_to_stay(self) -> bool:
        """Whether the head that is there asks for another protocol, and so has to be read again without that."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _read_head_again(self) -> None:
        """Without what it would like to upgrade to: the parser then reads on, as HTTP/1.1."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as uvicorn's own; httptools has it since 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _answer_and_close(self, cycle: RequestResponseCycle) -> None:
        """HTTP/1.0 has no chunks. And who still sends a body that is refused would get a reset, and no answer."""
        given, is_old = cycle.send, self.scope["http_version"] == "1.0"

        async def send(message: Any) -> None:
            if is_old:
                cycle.chunked_encoding = False
                cycle.expected_content_length = len(message.get("body", b""))  # which uvicorn checks, and takes for 0
            is_end = message["type"] == "http.response.body" and not message.get("more_body", False)
            if is_end and cycle.more_body and not self._ends:
                self._is_last = cycle.keep_alive = True  # else uvicorn closes at once
            await given(message)

        cycle.send = send  # type: ignore[method-assign]

    def _wait_for_reader(self, num_unsent: int | None = None) -> None:
        """As long as it takes something: of a long answer over a slow line much waits, and none of it in vain."""
        num_left = self.transport.get_write_buffer_size()
        if num_unsent is not None and num_left >= num_unsent:
            self.transport.abort()
            return
        self._reader_timer = self.loop.call_later(self.options.reader_timeout_s, self._wait_for_reader, num_left)

    def _reader_is_back(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEADER_BYTES:
            raise Failure(400, f"the address and headers have more than {MAX_HEADER_BYTES} bytes: send less")

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._hang_up)

    def _hang_up(self) -> None:
        """Close, once all is sent. With TLS that waits for the client's goodbye, which idle ones do not say."""
        self.transport.close()
        if self._end_timer is None and self.transport.get_extra_info("ssl_object") is not None:
            self._end_timer = self.loop.call_later(LINGER_S, self._cut)

    def _cut(self) -> None:
        if _is_sent(self.transport.get_extra_info("socket")):
            self.transport.abort()
        else:
            self._end_timer = self.loop.call_later(LINGER_S, self._cut)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _is_sent(connection: socket.socket | None) -> bool:
    """Whether the system has all of what was written: with TLS the transport that is ours does not know."""
    if connection is None or connection.fileno() < 0:
        return True
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_WRITE)
        return bool(selector.select(0))


class Server(uvicorn.Server):
    """Ends as ServerOptions say: not ready at once, closed after a delay; what is under way ends, or is cancelled."""

    def __init__(self, config: uvicorn.Config, gate: Gate, options: ServerOptions, end_all: Callable[[], None]) -> None:
        """`end_all` ends all requests that are under way; it is called in a thread, when their time is over."""
        super().__init__(config)
        self._gate, self._options, self._end_all = gate, options, end_all
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: Any = None) -> None:
        """Serve until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: Any = None) -> None:
        """As uvicorn's. With TLS a handshake has the time of a head; and who reads slowly that of all readers."""
        if not self.config.is_ssl:
            await super().startup(sockets)
            return
        await super().startup([])
        loop, config = asyncio.get_running_loop(), self.config
        protocol: Any = config.http_protocol_class
        connection = partial(protocol, config, self.server_state, self.lifespan.state, _loop=loop)
        self.servers = [
            await loop.create_server(
                connection,
                sock=each,
                ssl=config.ssl,
                backlog=BACKLOG,
                ssl_handshake_timeout=self._options.header_timeout_s,
                ssl_shutdown_timeout=self._options.reader_timeout_s,
            )
            for each in sockets
        ]

    def handle_exit(self, sig: int, frame: Any) -> None:
        """The first signal begins the end, a second one hurries it."""
        if self._gate.is_ready and self._loop is not None:
            self._gate.is_ready = False
            self._loop.call_soon_threadsafe(self._begin_end)
        else:
            _hush()
            self.should_exit = self.force_exit = True

    def _begin_end(self) -> None:
        def close() -> None:
            self._gate.is_closing = self.should_exit = True
            loop.call_later(self._options.drain_timeout_s, end)

        def end() -> None:
            _hush()
            loop.run_in_executor(None, self._end_all)

        loop = asyncio.get_running_loop()
        loop.call_later(self._options.shutdown_delay_s, close)


def _hush() -> None:
    """Else there is a traceback for each request that is cut off."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def bind(listening: Listening) -> list[socket.socket]:
    """Sockets at all addresses of a host, for `listen`: a port in use is known before a model is loaded.

    Raises InvalidParams where there is none to be had.
    """
    port, bound, why = listening.port, list[socket.socket](), ""
    try:
        found = socket.getaddrinfo(listening.host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, (host, _, *more) in found:
            try:
                bound.append(_bound(family, (host, port, *more)))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # as ::1 is where there is no IPv6
                    raise
                why = str(error.strerror)
            else:
                port = bound[-1].getsockname()[1]
    except OSError as error:
        why = str(error.strerror)
        while bound:
            bound.pop().close()
    if not bound:
        raise InvalidParams(
            f"{listening.host}:{listening.port} cannot be listened at ({why}): give another host or port"
        )
    return bound


def listen(sockets: Sequence[socket.socket]) -> None:
    """Let clients connect; they wait until `Server.run` serves them.

    Raises InvalidParams where another process, which has bound its socket at the same time, listens there already.
    """
    for each in sockets:
        try:
            each.listen(BACKLOG)
        except OSError as error:
            host, port, *_ = each.getsockname()
            why = f"{host}:{port} cannot be listened at ({error.strerror})"
            raise InvalidParams(f"{why}: give another host or port") from None


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(family)
    try:
        if sys.platform != "win32":
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def make_server(
    front: Front,
    listening: Listening,
    options: ServerOptions,
    end_all: Callable[[], None] = lambda: None,
) -> Server:
    """A server that does not run yet: `run()` serves until SIGINT or SIGTERM, then ends as the options say."""
    _allow_files(options.max_connections)
    front.gate.is_private = listening.is_private and not options.keys
    config = uvicorn.Config(
        front.app,
        host=listening.host,
        port=listening.port,
        http=type("Protocol", (PatientProtocol,), {"options": options}),
        ws="none",  # else a WebSocket library, where there is one, takes connections over, and they have no limits
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        # Beyond the time that requests have: after it they have been told that they are ended.
        timeout_graceful_shutdown=round(options.drain_timeout_s) + 5,
        proxy_headers=True,
        forwarded_allow_ips=list(listening.trusted_proxies),
        ssl_certfile=listening.certificate,
        ssl_keyfile=listening.private_key,
    )
    return Server(config, front.gate, options, end_all)


def _allow_files(max_connections: int) -> None:
    """Room for so many connections, as far as the system lets us."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < max_connections:
            LOG.warning("the system allows %d open files: raise that for %d connections", most, max_connections)

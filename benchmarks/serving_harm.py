"""What clients can do to a server, each in a process of its own: called with a port, a size and for how long.

All return how many of them there were, or where the server must end it, how many it has ended.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from serving_client import HOST, post
from serving_traffic import TEXT

Harm = Callable[[int, int, float], int]
ENDLESS = {"prompt": "Once", "max_tokens": 100_000, "overflow": "sliding", "ignore_eos": True, "stream": True}
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
PATIENCE_S = 60.0
FLOOD_S = 10.0


@contextmanager
def connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    """So many, or as many as the system allows."""
    with ExitStack() as stack:
        found: list[socket.socket] = []
        try:
            while len(found) < count:
                found.append(stack.enter_context(socket.create_connection((HOST, port), PATIENCE_S)))
        except OSError:
            pass
        yield found


def nothing(port: int, count: int, seconds: float) -> int:
    """What the others are to be compared with."""
    time.sleep(seconds)
    return 0


def idle(port: int, count: int, seconds: float) -> int:
    """Connections on which nothing is sent."""
    with connections(port, count) as found:
        time.sleep(seconds)
        return len(found)


def half_heads(port: int, count: int, seconds: float) -> int:
    """Heads that do not go on; how many the server has ended in four times that time."""
    with connections(port, count) as found:
        for each in found:
            each.sendall(HEAD[:20])
        time.sleep(4 * seconds)
        return sum(_is_closed(each) for each in found)


def long_heads(port: int, count: int, seconds: float) -> int:
    """Heads without an end; how many the server has ended."""
    return _floods(port, count, HEAD, b"x-more: %s\r\n" % (b"y" * 4000))


def long_bodies(port: int, count: int, seconds: float) -> int:
    """Bodies without an end; how many the server has ended."""
    return _floods(port, count, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n%s\r\n" % (b"y" * 4096))


def slow_bodies(port: int, count: int, seconds: float) -> int:
    """A byte now and then."""
    with connections(port, count) as found:
        for each in found:
            each.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for each in found:
                each.sendall(b" ")
            time.sleep(0.1)
        return len(found)


def slow_readers(port: int, count: int, seconds: float) -> int:
    """Endless streams that nobody reads."""
    with connections(port, count) as found:
        for each in found:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.sendall(post(TEXT, ENDLESS))
        time.sleep(seconds)
        return len(found)


def leavers(port: int, count: int, seconds: float) -> int:
    """Endless requests whose clients have left before the first token, half of them without a stream."""
    for number in range(count):
        with socket.create_connection((HOST, port), PATIENCE_S) as each:
            body = {name: value for name, value in ENDLESS.items() if name != "stream" or number % 2}
            each.sendall(post(TEXT, body))
    return count


def _floods(port: int, count: int, head: bytes, more: bytes) -> int:
    num_ended = 0
    with connections(port, count) as found:
        for each in found:
            try:
                each.sendall(head)
                end = time.monotonic() + FLOOD_S
                while time.monotonic() < end:
                    each.sendall(more)
            except OSError:
                num_ended += 1
    return num_ended


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


HARMS: Mapping[str, tuple[Harm, int]] = {  # and how many at most
    "nothing": (nothing, 0),
    "idle connections": (idle, 10_000),
    "half heads": (half_heads, 500),
    "long heads": (long_heads, 50),
    "long bodies": (long_bodies, 5),
    "slow bodies": (slow_bodies, 500),
    "slow readers": (slow_readers, 30),
    "leavers": (leavers, 300),
}

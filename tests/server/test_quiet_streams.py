"""A stream on which no event comes for long says that it is alive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asgi import Answered, ask

from bitnet_inference.server import journal, sse
from bitnet_inference.server.journal import Journal, Journaled
from bitnet_inference.server.sse import COMMENT, EventResponse, event

EVENTS = [event({"text": "He"}), event({"text": "y"})]


async def answered(waits: bool, file: Path, monkeypatch: pytest.MonkeyPatch) -> Answered:
    """Two events, behind two comments if it `waits`; the journal's clock counts what has been sent."""
    has_come, num_sent = asyncio.Event(), 0

    async def events() -> AsyncIterator[bytes]:
        if waits:
            await has_come.wait()
        for each in EVENTS:
            yield each

    def look(answered: Answered) -> bool:
        nonlocal num_sent
        num_sent = len(answered.chunks)
        if answered.chunks == [COMMENT] * 2:
            has_come.set()
        return False

    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: num_sent))
    response = EventResponse(events(), AsyncExitStack(), lambda failure: b"")
    with closing(Journal(file)) as lines:
        return await ask(Journaled(response, lines), "/", None, leave_when=look)


@pytest.mark.parametrize("waits", [False, True])
def test_comments_come_while_no_event_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waits: bool) -> None:
    monkeypatch.setattr(sse, "QUIET_S", 0.001 if waits else 1000.0)
    chunks = asyncio.run(answered(waits, tmp_path / "lines", monkeypatch)).chunks
    num_comments = chunks.count(COMMENT)
    assert num_comments >= 2 * waits and [each for each in chunks if each != COMMENT] == EVENTS
    line = json.loads((tmp_path / "lines").read_text())
    assert line["first_byte_s"] == chunks.index(EVENTS[0]), "a comment is no answer"


def test_a_comment_and_an_event_are_sent_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an answer to HTTP/1.0 whose reader is slow breaks off: the length of one was held against the other."""
    monkeypatch.setattr(sse, "QUIET_S", 0.0)
    bodies, num_sending = list[bytes](), 0

    async def events() -> AsyncIterator[bytes]:
        for each in EVENTS * 20:
            await asyncio.sleep(0)
            yield each

    async def send(message: Any) -> None:
        nonlocal num_sending
        num_sending += 1
        for _ in range(5):  # until the reader is back
            await asyncio.sleep(0)
        assert num_sending == 1
        num_sending -= 1
        bodies.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    asyncio.run(EventResponse(events(), AsyncExitStack(), lambda failure: b"")({"type": "http"}, receive, send))
    assert COMMENT in bodies and b"".join(bodies).replace(COMMENT, b"") == b"".join(EVENTS * 20)

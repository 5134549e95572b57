"""A stream on which no event comes for long says that it is alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from asgi import Answered, ask

from bitnet_inference.server import sse
from bitnet_inference.server.sse import EventResponse, event

ALONE, LAST = event({"text": "He"}), event({"text": "y"})


@pytest.mark.parametrize("quiet_s", [0.001, 1000.0])
def test_comments_come_while_no_event_does(monkeypatch: pytest.MonkeyPatch, quiet_s: float) -> None:
    monkeypatch.setattr(sse, "QUIET_S", quiet_s)

    async def answered() -> Answered:
        may_go_on = asyncio.Event()

        async def events() -> AsyncIterator[bytes]:
            yield ALONE
            if quiet_s < 1:
                await may_go_on.wait()
            yield LAST

        def look(answered: Answered) -> bool:
            if answered.chunks[-2:] == [b": waiting\n\n"] * 2:
                may_go_on.set()
            return False

        return await ask(EventResponse(events(), AsyncExitStack(), lambda failure: b""), "/", None, leave_when=look)

    first, *comments, last = asyncio.run(answered()).chunks
    assert (first, last) == (ALONE, LAST)
    assert set(comments) <= {b": waiting\n\n"} and bool(comments) is (quiet_s < 1)

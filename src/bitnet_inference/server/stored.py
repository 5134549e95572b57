"""Responses that are kept for a while: to be fetched, to be gone on with, or because they are still being made."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bitnet_inference.server.failures import Failure
from bitnet_inference.server.sse import dumps

MAX_RESPONSES, MAX_BYTES = 1024, 64 << 20
MAX_RUNNING = 128  # in the background


@dataclass
class StoredResponse:
    """A response as clients see it, its input items, and the conversation up to its end, without instructions.

    `owner` is the caller who alone may have it. `task` makes it, where that happens in the background; None once it has
    ended.
    """

    body: dict[str, Any]
    input_items: Sequence[Mapping[str, Any]]
    messages: Sequence[Mapping[str, Any]]
    owner: str = ""
    task: asyncio.Task[None] | None = None
    num_bytes: int = field(default=0, init=False)
    items: Mapping[str, Mapping[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        """Its items by their ids, and how much it takes."""
        self.items = {item["id"]: item for item in (*self.input_items, *self.body["output"])}
        self.num_bytes = len(dumps([self.body, self.input_items, self.messages]))

    @property
    def share(self) -> int:
        """How much it takes of all the room, by number and by bytes."""
        return MAX_BYTES // MAX_RESPONSES + self.num_bytes


class StoredResponses:
    """The last ones, in memory: a restart forgets them. To be used in the event loop's thread only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        # By the owner and the id of an item: those that have it, by their ids, the newest last.
        self._items: dict[tuple[str, str], dict[str, StoredResponse]] = {}
        self._shares = Counter[str]()  # of each owner, running ones among them
        self._num_bytes = 0
        self._running = Counter[str]()  # in the background, of each owner

    @contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """A place for one that is made in the background, for as long as that takes. Raises Failure: there is none.

        Where there are several owners, none may have more than it leaves to others.
        """
        num_own, num_left = self._running[owner], MAX_RUNNING - self._running.total()
        if num_left <= (num_own if owner else 0):
            whose = f"{num_own} responses of yours" if owner else f"{MAX_RUNNING} responses"
            raise Failure(429, f"{whose} run in the background: wait for one", code="queue_full", retry_after_s=1)
        self._running[owner] += 1
        try:
            yield
        finally:
            self._running[owner] -= 1

    def keep(self, response: StoredResponse) -> None:
        """Keep it, also in place of an earlier state; of those that have ended, the oldest of who has most give way."""
        identity = response.body["id"]
        self._forget(identity)
        self._kept[identity] = response
        for item in response.items:
            self._items.setdefault((response.owner, item), {})[identity] = response
        self._num_bytes += response.num_bytes
        self._shares[response.owner] += response.share
        while len(self._kept) > MAX_RESPONSES or self._num_bytes > MAX_BYTES:
            owners = (owner for owner, _ in self._shares.most_common())
            oldest = next(filter(None, map(self._oldest_ended, owners)), None)
            if oldest is None:
                break
            self._forget(oldest)

    def _oldest_ended(self, owner: str) -> str | None:
        return next((name for name, each in self._kept.items() if each.owner == owner and each.task is None), None)

    def replace(self, response: StoredResponse) -> None:
        """Keep it in place of an earlier state; nothing happens where that has been deleted."""
        if response.body["id"] in self._kept:
            self.keep(response)

    def find(self, owner: str, identity: str, param: str | None = None) -> StoredResponse:
        """The one with this id. Raises Failure, also where it is somebody else's."""
        found = self._kept.get(identity)
        if found is None or found.owner != owner:
            name = "response" if param is None else param.removesuffix("_id").replace("_", " ")
            why = f"the {name} {identity!r:.80} is not found: it was not stored here, or is too old"
            raise Failure(404 if param is None else 400, why, param=param, code=f"{name.replace(' ', '_')}_not_found")
        return found

    def find_item(self, owner: str, identity: str) -> Mapping[str, Any]:
        """An item that was asked or answered, by its id. Raises Failure."""
        holders = self._items.get((owner, identity))
        if not holders:
            why = f"input: the item {identity!r:.80} is not stored here: send the item itself"
            raise Failure(400, why, param="input", code="item_not_found")
        return next(reversed(holders.values())).items[identity]

    def delete(self, owner: str, identity: str) -> None:
        """Forget it, and end it where it is still being made. Raises Failure."""
        task = self.find(owner, identity).task
        if task is not None:
            task.cancel()
        self._forget(identity)

    def _forget(self, identity: str) -> None:
        if (old := self._kept.pop(identity, None)) is not None:
            self._num_bytes -= old.num_bytes
            self._shares[old.owner] -= old.share
            for item in old.items:
                holders = self._items[old.owner, item]
                del holders[identity]
                if not holders:
                    del self._items[old.owner, item]

"""Many streams at a time: opened as there is room for them, given back as they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from bitnet_inference.config import check_progress
from bitnet_inference.errors import QueueFull
from bitnet_inference.prompts import BatchProgress, placed
from bitnet_inference.stream import Generation, Stream

MAX_IN_FLIGHT = 512  # twice what a step computes at most: who ends has a successor at once

Item = TypeVar("Item")


@dataclass(frozen=True)
class Ended(Generic[Item]):
    """An item whose stream has ended, or that was refused."""

    item: Item
    outcome: Stream | Exception

    def read(self) -> Generation:
        """What was generated. Raises what the item was refused with, or the request's error."""
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome.read()


def read_all(
    items: Iterable[Item], start: Callable[[Item], Stream], total: int | None, progress: BatchProgress
) -> list[Generation]:
    """What was generated for all items, in their order; raises the first error."""
    check_progress(progress)
    outputs: dict[int, Generation] = {}
    with InFlight(enumerate(items), lambda numbered: start(numbered[1])) as in_flight:
        for ended in in_flight:
            index = ended.item[0]
            with placed(index, total):
                outputs[index] = ended.read()
            if progress is not None:
                progress(len(outputs), total)
    return [outputs[index] for index in range(len(outputs))]


class InFlight(Generic[Item]):
    """Opens a stream for each of `items`, as they come, and gives each item back once, when its stream has ended.

    At most `MAX_IN_FLIGHT` are under way, and fewer while others fill the engine's queue. Raises QueueFull where others
    fill it and none of these is under way. Leaving the `with` block cancels what is under way.
    """

    def __init__(self, items: Iterable[Item], start: Callable[[Item], Stream]) -> None:
        self._items, self._start = items, start
        self._under_way: dict[int, Ended[Item]] = {}
        self._arrived: SimpleQueue[int] = SimpleQueue()  # who has ended; filled in the engine's thread

    def __iter__(self) -> Iterator[Ended[Item]]:
        for number, item in enumerate(self._items):
            while len(self._under_way) >= MAX_IN_FLIGHT or not self._arrived.empty():
                yield self._next()
            while not self._open(number, item):
                yield self._next()
        while self._under_way:
            yield self._next()

    def __enter__(self) -> InFlight[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        for ended in self._under_way.values():
            if isinstance(ended.outcome, Stream):
                ended.outcome.cancel()

    def _open(self, number: int, item: Item) -> bool:
        """Begin with an item; False while the queue is full."""
        try:
            outcome: Stream | Exception = self._start(item)
        except QueueFull:
            if not self._under_way:
                raise
            return False
        except Exception as error:  # a filter may raise what it likes
            outcome = error
        self._under_way[number] = Ended(item, outcome)
        if isinstance(outcome, Stream):
            outcome.call_at_end(partial(self._arrived.put, number))
        else:
            self._arrived.put(number)
        return True

    def _next(self) -> Ended[Item]:
        """The next that ends; waits for it."""
        return self._under_way.pop(self._arrived.get())

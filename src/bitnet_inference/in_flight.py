"""Many generations at a time: opened as there is room for them, given back as they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from bitnet_inference.config import check_progress
from bitnet_inference.errors import QueueFull
from bitnet_inference.prompts import BatchProgress, placed
from bitnet_inference.stream import Generation, Stream

MAX_IN_FLIGHT = 512  # twice what a step computes at most: who ends has a successor at once

Item = TypeVar("Item")
Found = TypeVar("Found")
Read = TypeVar("Read", covariant=True)


class Running(Protocol[Read]):
    """What is under way for an item, as a Stream."""

    def call_at_end(self, call: Callable[[], None]) -> None:
        """See Stream."""
        ...

    def cancel(self) -> None:
        """See Stream."""
        ...

    def read(self) -> Read:
        """See Stream."""
        ...


@dataclass(frozen=True)
class Ended(Generic[Item, Found]):
    """An item whose generation has ended, or that was refused. It was `num_requests`."""

    item: Item
    outcome: Running[Found] | Exception
    num_requests: int

    def read(self) -> Found:
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


class InFlight(Generic[Item, Found]):
    """Starts a generation for each of `items`, as they come, and gives each item back once, when that has ended.

    At most `MAX_IN_FLIGHT` requests are under way, and fewer while others fill the engine's queue; an item is one, or
    what `count` says. Raises QueueFull where others fill it and none of these is under way. Leaving the `with` block
    cancels what is under way.
    """

    def __init__(
        self,
        items: Iterable[Item],
        start: Callable[[Item], Running[Found]],
        count: Callable[[Item], int] = lambda item: 1,
    ) -> None:
        self._items, self._start, self._count = items, start, count
        self._under_way: dict[int, Ended[Item, Found]] = {}
        self._num_requests = 0  # under way
        self._arrived: SimpleQueue[int] = SimpleQueue()  # who has ended; filled in the engine's thread

    def __iter__(self) -> Iterator[Ended[Item, Found]]:
        for number, item in enumerate(self._items):
            while self._is_full(item) or not self._arrived.empty():
                yield self._next()
            while not self._open(number, item):
                yield self._next()
        while self._under_way:
            yield self._next()

    def __enter__(self) -> InFlight[Item, Found]:
        return self

    def __exit__(self, *_: object) -> None:
        for ended in self._under_way.values():
            if not isinstance(ended.outcome, Exception):
                ended.outcome.cancel()

    def _is_full(self, item: Item) -> bool:
        return bool(self._under_way) and self._num_requests + self._count(item) > MAX_IN_FLIGHT

    def _open(self, number: int, item: Item) -> bool:
        """Begin with an item; False while the queue is full."""
        try:
            outcome: Running[Found] | Exception = self._start(item)
        except QueueFull:
            if not self._under_way:
                raise
            return False
        except Exception as error:  # a filter may raise what it likes
            outcome = error
        ended = self._under_way[number] = Ended(item, outcome, self._count(item))
        self._num_requests += ended.num_requests
        if isinstance(outcome, Exception):
            self._arrived.put(number)
        else:
            outcome.call_at_end(partial(self._arrived.put, number))
        return True

    def _next(self) -> Ended[Item, Found]:
        """The next that ends; waits for it."""
        ended = self._under_way.pop(self._arrived.get())
        self._num_requests -= ended.num_requests
        return ended

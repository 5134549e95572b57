"""Work in several threads, or in fewer where the system gives no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Sequence[Item], num_threads: int) -> Iterator[Result]:
    """What `work` makes of the items, in their order, so many at a time.

    In this thread alone where the system refuses one of the others; `work` may be called twice for some items then.
    """
    if num_threads < 2:
        yield from map(work, items)
        return
    pool = ThreadPoolExecutor(num_threads)
    try:
        try:
            results = pool.map(work, items)
        except RuntimeError:  # of the system: it allows no more threads (ulimit -u)
            pool.shutdown(cancel_futures=True)
            results = map(work, items)
        yield from results
    finally:
        pool.shutdown(cancel_futures=True)

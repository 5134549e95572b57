"""What is counted of the engines while they serve."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from bitnet_inference.engine.events import EngineListener, Event, Finished
from bitnet_inference.server.failures import failure_of
from bitnet_inference.telemetry import Counts

MAX_FAILURES = 50


class EngineFailure(NamedTuple):
    """A request that ended with an error, at this time since the epoch."""

    time: float
    path: Path
    message: str


class Watch:
    """Counts what the engines of several models do: `Models(listener=watch.listener)`.

    A model that is loaded again goes on with its counts. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self.started = time.time()
        self._lock = threading.Lock()
        self._failures: deque[EngineFailure] = deque(maxlen=MAX_FAILURES)
        self._counts: dict[Path, Counts] = {}

    def listener(self, path: Path) -> EngineListener:
        """What hears the engine of the model at this path."""
        with self._lock:
            counts = self._counts.setdefault(path, Counts())

        def listen(event: Event) -> None:
            counts(event)
            if isinstance(event, Finished) and event.finish.error is not None:
                self._note(path, event.finish.error)

        return listen

    def counts(self) -> dict[Path, Counts]:
        """By path, of every model that was loaded so far."""
        with self._lock:
            return dict(self._counts)

    def failures(self) -> list[EngineFailure]:
        """The last ones, the newest first. Their messages are those that clients got."""
        with self._lock:
            return list(reversed(self._failures))

    def _note(self, path: Path, error: Exception) -> None:
        with self._lock:
            self._failures.append(EngineFailure(time.time(), path, failure_of(error).message))

"""What is counted of the engines while they serve."""

from __future__ import annotations

import threading
from pathlib import Path

from bitnet_inference.engine.events import EngineListener
from bitnet_inference.telemetry import Counts


class Watch:
    """Counts what the engines of several models do: `Models(listener=watch.listener)`.

    A model that is loaded again goes on with its counts. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Path, Counts] = {}

    def listener(self, path: Path) -> EngineListener:
        """What hears the engine of the model at this path."""
        with self._lock:
            return self._counts.setdefault(path, Counts())

    def counts(self) -> dict[Path, Counts]:
        """By path, of every model that was loaded so far."""
        with self._lock:
            return dict(self._counts)

"""The models that a server offers, by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from bitnet_inference.errors import BitNetError, ModelError, NotFound
from bitnet_inference.llm import LLM
from bitnet_inference.models import Models, ModelState, OneModel, path_of
from bitnet_inference.server.failures import Failure, failure_of

MAX_THREADS = 64
MAX_WAIT_S = 300.0  # for the end of answers by the models that are in the way of another one

Result = TypeVar("Result")


class ServedModels:
    """Models by the name that clients know them by; the first one is meant where a request names none.

    `models` loads them when they are used. Close it.
    """

    def __init__(self, models: Models | OneModel, paths: Mapping[str, str | Path]) -> None:
        """`paths`: name -> what Models.use takes."""
        self.models, self._paths = models, dict(paths)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "bitnet-http")
        # One thread each: who waits for a model that is being loaded is in the way of nobody who wants another one.
        self._doors = {path: ThreadPoolExecutor(1, "bitnet-use") for path in self._paths.values()}

    @property
    def names(self) -> list[str]:
        """All names, the first one is the default."""
        return list(self._paths)

    def path(self, name: str) -> str | Path:
        """What a name stands for; "" for the first. Raises NotFound."""
        name = name or self.names[0]
        if name not in self._paths:
            raise NotFound(f"the model {name!r:.80} is not served here: there are {', '.join(self.names)}")
        return self._paths[name]

    def names_by_path(self) -> dict[Path, list[str]]:
        """The names that each path has, paths as `Models.loaded` tells them, but for what is not there now."""
        found: dict[Path, list[str]] = {}
        for name, model in self._paths.items():
            with suppress(ModelError):
                found.setdefault(path_of(model), []).append(name)
        return found

    def state(self, name: str) -> ModelState | None:
        """How a model stands; None where it is not loaded."""
        with suppress(ModelError):
            path = path_of(self.path(name))
            return next((state for state in self.models.loaded() if state.path == path), None)
        return None

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[LLM]:
        """A model, for as long as the `async with` block lasts; loaded if need be, or Failure is raised.

        May be cancelled while it waits for the load, which then goes on for others.
        """
        path, until = self.path(name), time.monotonic() + MAX_WAIT_S

        def enter() -> LLM:  # who stood in line at the door has waited there already
            return stack.enter_context(self.models.use(path, wait_s=max(0.0, until - time.monotonic())))

        with ExitStack() as stack:
            entering = self._doors[path].submit(enter)
            try:
                llm = await asyncio.wrap_future(entering)
            except BitNetError as error:
                raise self.told(failure_of(error), name) from error
            except asyncio.CancelledError:
                entering.add_done_callback(lambda _: stack.close())  # the thread comes in later, and leaves at once
                raise
            yield llm

    def told(self, failure: Failure, name: str) -> Failure:
        """The failure of a model in words for clients, who know it by its name and not where its files are."""
        path = self.path(name)
        places = [Path(path)]
        with suppress(ModelError):
            places.insert(0, path_of(path))
        for place in places:
            if place.is_absolute():
                failure.message = failure.message.replace(str(place), name or self.names[0])
        return failure

    async def in_thread(self, work: Callable[..., Result], *args: object) -> Result:
        """Do what takes its time where it holds up nobody."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args))

    def close(self) -> None:
        """Unload all models."""
        for each in (self._threads, *self._doors.values()):
            each.shutdown(wait=False, cancel_futures=True)
        self.models.close()

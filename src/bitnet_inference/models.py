"""Several models within a budget of memory: loaded when they are used, unloaded when others need the room."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Unpack

from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends import decided
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.config import EngineConfig, EngineOptions, available_bytes, check_progress, checked_count
from bitnet_inference.engine.events import EngineListener
from bitnet_inference.errors import InvalidParams, NotFound, OutOfMemory, Stopped
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.llm import LLM
from bitnet_inference.model_folder import find_model
from bitnet_inference.text.filter import Filter, Filters

_POLL_S = 0.05  # of streams that go on after their `use` nobody says that they have ended


@dataclass(frozen=True)
class ModelState:
    """A model of `Models`. `num_bytes` is what it takes, or is expected to take while it `is_loading`.

    `num_users` are inside of `use`; `idle_s` is how many seconds ago the last one left, 0.0 while there are users.
    `load_s` is how long the load took, 0.0 until it is over.
    `max_context`, and whether it has a chat template, are None until it is loaded. `device`, `why_there` and `failure`:
    see LLM.
    """

    path: Path
    num_bytes: int
    num_users: int
    idle_s: float
    is_loading: bool
    load_s: float
    max_context: int | None
    can_chat: bool | None
    device: str = ""
    why_there: str = ""
    failure: str = ""


@dataclass
class _Entry:
    path: Path
    llm: Future[LLM] = field(default_factory=Future)
    num_bytes: int = 0
    num_users: int = 0
    last_used: float = 0.0
    load_s: float = 0.0
    config: EngineConfig | None = None  # what was decided when it was loaded

    @property
    def is_idle(self) -> bool:
        return self.llm.done() and not self.num_users and not self.llm.result().is_busy

    @property
    def has_ended(self) -> bool:
        """Whether it is of no use any more: somebody has closed it, or its engine has failed."""
        return self.llm.done() and not self.llm.result().is_open

    def state(self, now: float) -> ModelState:
        llm = self.llm.result() if self.llm.done() else None  # one whose load has failed is no entry any more
        return ModelState(
            self.path,
            self.num_bytes,
            self.num_users,
            0.0 if self.num_users else now - self.last_used,
            llm is None,
            self.load_s,
            None if llm is None else llm.max_context,
            None if llm is None else bool(llm.tokenizer.templates),
            *(("", "", "") if llm is None else (llm.device, llm.why_there, llm.failure)),
        )


class Models:
    """Models by path or name, of which as many are loaded as fit. All methods may be called from several threads.

    with models.use("models/a") as llm: ...

    A model is loaded when it is first used, and anew where one of its users has closed it. Where it does not fit, those
    that have not been used for longest are unloaded, but never one that somebody uses, or that has requests which have
    not ended. `max_bytes` is for weights and KV caches together, None for three quarters of what is free now. Each
    model has its own threads, and a KV cache of `max_cache_tokens`, in whole blocks of 32: no context can be longer.
    `drafts`, `filters` and `progress` are as for LLM.load.
    """

    def __init__(
        self,
        max_bytes: int | None = None,
        *,
        max_cache_tokens: int = 8192,
        drafts: str | Path = "auto",
        filters: Sequence[Filter] = (),
        progress: Callable[[int, int], None] | None = None,
        listener: Callable[[Path], EngineListener] | None = None,
        **engine: Unpack[EngineOptions],
    ) -> None:
        """`listener` makes the listener of a model that is loaded from this path. `engine`: see EngineConfig.

        Raises InvalidParams, and TypeError for an option that is not known.
        """
        self.max_bytes = available_bytes() * 3 // 4 if max_bytes is None else checked_count("max_bytes", max_bytes)
        max_cache_tokens = checked_count("max_cache_tokens", max_cache_tokens)
        check_progress(progress)
        Filters(filters)  # wrong ones are refused before anything is loaded
        if listener is not None and not callable(listener):
            raise InvalidParams(f"listener is {listener!r:.60}: give a function of a path that returns its listener")
        self._config = EngineConfig.from_env(**engine)
        self._max_cache_tokens = max_cache_tokens
        self._load_llm: Callable[..., LLM] = partial(
            LLM.load, max_cache_tokens=max_cache_tokens, drafts=drafts, filters=filters, progress=progress, **engine
        )
        self._listener = listener
        self._is_open = True
        self._begin()
        if sys.platform != "win32":  # in a fork nothing of this runs, and another thread's locks are held for ever
            begin = weakref.WeakMethod(self._begin)
            os.register_at_fork(after_in_child=lambda: (again := begin()) and again())

    def _begin(self) -> None:
        self._entries: dict[Path, _Entry] = {}  # the one that was used last is the last
        self._held = threading.RLock()  # for moments, and by itself: a signal in a Condition's `with` leaves it locked
        self._books = threading.Condition(self._held)
        self._loading = threading.Lock()  # one at a time makes room and takes it
        self._waiting: set[Path] = set()  # whose load waits for room

    def numbers(self, path: Path) -> str:
        """How the model computes that is loaded from this path, as far as the bits of its answers depend on it."""
        with self._held:
            entry = self._entries.get(path)
            device = entry.llm.result().device if entry and entry.llm.done() else ""
        return _numbers(device, (entry and entry.config) or self._config.resolve(), self._max_cache_tokens)

    @contextmanager
    def use(self, model: str | Path = "default", *, wait_s: float = 0.0) -> Iterator[LLM]:
        """A model, for as long as the `with` block lasts; loaded if need be. Several may use one model.

        Where the model does not fit beside those that are in use, their end is waited for, for at most `wait_s`
        seconds. Who comes meanwhile with a `wait_s` of its own comes in afterwards, so that every model has its turn.

        Raises what LLM.load raises; OutOfMemory too where there is no room in time, and Stopped after `close`. Who
        waits for the same load gets the same error; the next call tries again.
        """
        _check_wait(wait_s)
        path, until = path_of(model), time.monotonic() + min(wait_s, threading.TIMEOUT_MAX)
        entry, is_new = self._enter(path, until)
        try:
            if is_new:
                self._load(entry, until)
            yield self._llm_of(entry, until)
        finally:
            self._leave(entry)

    def preload(self, model: str | Path = "default") -> None:
        """Load a model, so that its first user does not wait; as `use`."""
        with self.use(model):
            pass

    def loaded(self) -> list[ModelState]:
        """The models that are loaded or being loaded; the one that was used last comes last."""
        now = time.monotonic()
        with self._held:
            return [entry.state(now) for entry in self._entries.values()]

    def close(self) -> None:
        """Unload all models, those in use too: their requests end with Stopped."""
        with self._held:
            self._is_open = False
        with self._loading, self._held:  # a load that has begun comes to its end before; one that waits will fail
            loaded = [entry.llm.result() for entry in self._entries.values() if entry.llm.done()]
            self._entries.clear()
        for llm in loaded:
            llm.close()

    def __repr__(self) -> str:
        names = ", ".join(map(str, [*self._entries])) or "none"
        return f"<Models {names}, at most {told_bytes(self.max_bytes)}{'' if self._is_open else ', closed'}>"

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, path: Path, until: float) -> tuple[_Entry, bool]:
        """Count a user; whether the model is to be loaded by this one."""
        with self._held:
            while self._waiting and self._is_open and time.monotonic() < until:
                self._books.wait(_POLL_S)
            if not self._is_open:
                raise Stopped("the models are closed: make new Models")
            if path in self._entries and self._entries[path].has_ended:
                del self._entries[path]  # those who still use it leave it by themselves
            is_new = path not in self._entries
            entry = self._entries.setdefault(path, _Entry(path))
            entry.num_users += 1
        return entry, is_new

    def _llm_of(self, entry: _Entry, until: float) -> LLM:
        """What a load gives, whoever began it; where it waits for room, nobody waits longer than he said."""
        while not wait([entry.llm], _POLL_S).done:
            with self._held:
                if entry.path in self._waiting and time.monotonic() >= until:
                    raise OutOfMemory(f"{entry.path}: models in use leave no room in time: raise wait_s or max_bytes")
        return entry.llm.result()

    def _leave(self, entry: _Entry) -> None:
        with self._held:
            entry.num_users -= 1
            entry.last_used = time.monotonic()
            if self._entries.get(entry.path) is entry:
                self._entries[entry.path] = self._entries.pop(entry.path)
            self._books.notify_all()

    def _load(self, entry: _Entry, until: float) -> None:
        """Load a model into its entry, or tell all who wait for it why not."""
        try:
            with self._loading:
                entry.llm.set_result(self._loaded(entry, until))
        except BaseException as error:
            with self._held:
                if self._entries.get(entry.path) is entry:
                    del self._entries[entry.path]
            if isinstance(error, Exception):
                entry.llm.set_exception(error)  # the caller raises it
                return
            entry.llm.set_exception(Stopped(f"{entry.path}: loading was interrupted: use it again"))
            raise

    def _loaded(self, entry: _Entry, until: float) -> LLM:
        checkpoint = open_checkpoint(entry.path)
        entry.config = decided(checkpoint, self._config, self._max_cache_tokens).config
        needed = estimate_bytes(checkpoint, entry.config, self._max_cache_tokens)
        self._make_room(entry, needed, until)
        start = time.monotonic()
        llm = self._load_llm(entry.path, listener=self._listener and self._listener(entry.path))
        entry.load_s = time.monotonic() - start
        try:
            self._make_room(entry, llm.num_bytes, until=0)  # now it is known
        except BaseException:
            llm.close()
            raise
        return llm

    def _make_room(self, entry: _Entry, num_bytes: int, until: float) -> None:
        """Unload what is in the way of a model of this size, or nothing where that does not help in time."""
        try:
            while (unloaded := self._unloaded_for(entry, num_bytes, is_last_try=time.monotonic() >= until)) is None:
                self._wait_for_room()
        finally:
            with self._held:
                self._waiting.discard(entry.path)
                self._books.notify_all()
        for llm in unloaded:
            llm.close()

    def _wait_for_room(self) -> None:
        """Until somebody has left. Others may load meanwhile: who uses what is in the way may be among them."""
        self._loading.release()
        try:
            with self._held:
                self._books.wait(_POLL_S)
        finally:
            self._loading.acquire()

    def _unloaded_for(self, entry: _Entry, num_bytes: int, is_last_try: bool) -> list[LLM] | None:
        """What has lost its place to a model of this size; None where those in use leave no room, and it waits."""
        with self._held:
            unloaded = self._places_for(entry, num_bytes, is_last_try)
            if unloaded is None:
                self._waiting.add(entry.path)
            return unloaded

    def _places_for(self, entry: _Entry, num_bytes: int, is_last_try: bool) -> list[LLM] | None:
        if not self._is_open:
            raise Stopped("the models are closed: make new Models")
        others = [each for each in self._entries.values() if each is not entry]
        idle = [each for each in others if each.is_idle]
        free = self.max_bytes - sum(each.num_bytes for each in others)
        most = free + sum(each.num_bytes for each in idle)
        if num_bytes > most:
            if is_last_try or num_bytes > self.max_bytes:
                raise OutOfMemory(_refusal(entry.path, num_bytes, most, self.max_bytes))
            return None
        unloaded = []
        for each in idle:
            if num_bytes <= free:
                break
            unloaded.append(self._entries.pop(each.path).llm.result())
            free += each.num_bytes
        entry.num_bytes = num_bytes
        return unloaded


class OneModel:
    """One model that is loaded already, as who takes Models may take it. Who has loaded it closes it.

    It is never loaded anew: where it has ended, `use` raises Stopped.
    """

    def __init__(
        self, model: str | Path, llm: LLM, *, max_cache_tokens: int | None = None, **engine: Unpack[EngineOptions]
    ) -> None:
        """`model`, and how it was loaded: see LLM.load."""
        path = path_of(model)
        config = decided(open_checkpoint(path), EngineConfig.from_env(**engine), max_cache_tokens).config
        self._entry = _Entry(path, num_bytes=llm.num_bytes, last_used=time.monotonic(), config=config)
        self._entry.llm.set_result(llm)
        self._llm, self._config, self._max_cache_tokens = llm, config, max_cache_tokens or llm.max_context
        self.max_bytes = llm.num_bytes

    def numbers(self, path: Path) -> str:
        """See Models."""
        return _numbers(self._llm.device, self._config, self._max_cache_tokens)

    @contextmanager
    def use(self, model: str | Path = "default", *, wait_s: float = 0.0) -> Iterator[LLM]:
        """See Models; raises NotFound for another one."""
        if path_of(model) != self._entry.path:
            raise NotFound(f"{model}: only {self._entry.path} is loaded: use that")
        if not self._llm.is_open:
            raise Stopped(f"{self._entry.path}: the model has ended: load it again")
        yield self._llm

    def loaded(self) -> list[ModelState]:
        """See Models."""
        return [self._entry.state(time.monotonic())]

    def close(self) -> None:
        """Nothing: see above."""


def path_of(model: str | Path) -> Path:
    """The path under which Models holds a model. Raises NotFound."""
    path = find_model(model)  # the name of a file says what it is, that of the blob behind it in a cache does not
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def _numbers(device: str, config: EngineConfig, num_cache_tokens: int) -> str:
    rounded = f"quantize={config.quantize} head={config.head} embedding={config.embedding}"
    return f"device={device} cache_dtype={config.cache_dtype} {rounded} context={num_cache_tokens}"


def _check_wait(wait_s: object) -> None:
    if not isinstance(wait_s, int | float) or not wait_s >= 0:
        raise InvalidParams(f"wait_s is {wait_s!r:.60}: give seconds, 0 for none")


def _refusal(path: Path, num_bytes: int, most: int, max_bytes: int) -> str:
    what = f"{path} takes {told_bytes(num_bytes)}"
    if most == max_bytes:
        return f"{what}, max_bytes is {told_bytes(max_bytes)}: raise it, or lower max_cache_tokens"
    left = f"{told_bytes(max(0, most))} of {told_bytes(max_bytes)}"
    return f"{what}, models in use leave {left}: end their use, raise max_bytes, or lower max_cache_tokens"

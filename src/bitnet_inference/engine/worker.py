"""The thread that steps an engine while there is work, and sleeps otherwise."""

from __future__ import annotations

import logging
import os
import threading

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.request import Finish, Request
from bitnet_inference.errors import NO_THREADS, EngineError, Stopped

# While requests wait for their readers the thread looks up now and then: a stream that is lost in this very thread,
# between looking and falling asleep, calls nobody.
MAX_SLEEP_S = 60.0


class Worker:
    """Owns the engine's thread. Every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        """Starts the thread; EngineError where the system refuses that."""
        self._engine = engine
        self._lock = threading.RLock()  # by itself: a signal that raises in a Condition's `with` leaves it locked
        self._wake = threading.Condition(self._lock)
        self._end = threading.Condition(self._lock)
        self._is_open, self._has_ended = True, False
        self._pid = os.getpid()
        self._drains = True
        self._thread = threading.Thread(target=self._run, name="bitnet-engine", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # of the system
            raise EngineError(NO_THREADS) from error
        except BaseException:  # Ctrl-C while it waits for the thread, which would go on, and hold the model, for ever
            with self._lock:
                self._is_open = False
                self._wake.notify()
            raise

    @property
    def is_open(self) -> bool:
        """Whether requests are taken; not in a fork."""
        return self._is_open and not self.is_lost and not self.is_forked

    @property
    def is_lost(self) -> bool:
        """Whether the model has failed, and no other one takes its place."""
        return self._engine.is_lost

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one with the thread, so that nothing runs here."""
        return os.getpid() != self._pid

    def check_wait(self) -> None:
        """Raise where who waits for the engine waits for ever: EngineError in its own thread, Stopped in a fork."""
        if self.is_forked:
            raise Stopped('threads do not survive a fork: load the model in the child, or start it with "spawn"')
        if threading.current_thread() is self._thread:
            who = "a processor, strategy or listener asks the LLM that is calling it"
            raise EngineError(f"{who}, which would wait for itself: ask another LLM, or before the request")

    def submit(self, request: Request) -> None:
        """Queue a request; raises what `check_wait` and Engine.submit raise, and Stopped when the engine has ended."""
        self.check_wait()
        with self._lock:
            if not self._is_open:
                raise Stopped("the engine has stopped and takes no more requests: load the model again")
            self._engine.submit(request)
            self._wake.notify()
            if self._has_ended:  # in the middle of this: by a signal's handler
                self._engine.end_all(_stopped("the engine was stopped"))

    def cancel(self, request: Request) -> None:
        """End a request soon; nothing happens if it has ended."""
        self._engine.cancel(request)
        self.wake()

    def wake(self) -> None:
        """Look again who can run: a reader has made room."""
        if not self.is_forked:
            with self._lock:
                self._wake.notify()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until those that are there have ended, at most so long; whether they have.

        A request that waits for its reader does not end before that reads, or cancels, or its time is over. Raises
        EngineError in the engine's thread, as `submit`.
        """
        if self.is_forked:
            return True
        self.check_wait()
        with self._lock:
            self._is_open = False
            self._wake.notify()
            return self._wait_for_end(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def stop(self, *, drain: bool) -> None:
        """Take no more requests, finish those that are there (`drain`) or end them with Stopped, and end the thread.

        May be called again, also without `drain` while another call drains. Called from a sink, it does not wait.
        """
        if self.is_forked:
            return  # the thread is not here, and what it held when the process forked is held for ever
        with self._lock:
            self._is_open = False
            self._drains = self._drains and drain
            self._wake.notify()
            if threading.current_thread() is self._thread:
                return
            self._wait_for_end(None)
        self._thread.join()  # which takes no lock any more

    def _wait_for_end(self, timeout_s: float | None) -> bool:
        """Whether the thread has done its work, after that time at most.

        Lets go of the lock, which the caller holds, perhaps twice: in a signal's handler, in the middle of `submit`.
        """
        return self._end.wait_for(lambda: self._has_ended, timeout_s)

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._wait_for_work():
                self._engine.step()
        except BaseException as error:  # a defect of ours: nobody may wait for ever because of it
            logging.getLogger(__name__).exception("the engine's thread failed")
            reason = f"the engine failed: {error!r}"
        with self._lock:
            self._is_open = False
        try:
            self._engine.end_all(_stopped(reason))
        finally:
            with self._lock:
                self._has_ended = True
                self._end.notify_all()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when the thread shall end."""
        if self._is_open and self._engine.has_turn:
            return True
        self._engine.wakeups.make()
        with self._lock:
            if not self._is_called():
                self._wake.wait_for(self._is_called, self._max_sleep_s())
            return self._engine.has_work and (self._is_open or self._drains)

    def _is_called(self) -> bool:
        has_ended = not self._is_open and not (self._engine.has_work and self._drains)
        return has_ended or self._engine.has_turn

    def _max_sleep_s(self) -> float | None:
        """As long as nobody calls; with requests that wait for their readers until the time of one is over."""
        if not self._engine.has_work:
            return None
        seconds = self._engine.seconds_to_deadline()
        return MAX_SLEEP_S if seconds is None else min(seconds, MAX_SLEEP_S)


def _stopped(reason: str) -> Finish:
    return Finish("error", error=Stopped(reason))

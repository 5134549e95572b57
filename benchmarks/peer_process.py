"""An engine in a process of its own: it sleeps until it is asked to measure a row, and sleeps again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from turns import Engine, Row, Timing

from bitnet_inference.probe import MIN_SAMPLE_S

MAX_MESSAGE = 300


class EngineFailed(Exception):
    """An engine could not be loaded, or stopped."""


class EngineProcess:
    """Starts the process, which calls `make` there: a function of a module, or a partial of one."""

    def __init__(self, name: str, make: Callable[[], Engine]) -> None:
        """Wait until it has loaded; raises EngineFailed where it cannot."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(far_end, make), daemon=True)
        self._process.start()
        far_end.close()
        self.version = str(self._answer())
        assert self._process.pid is not None
        self.pid = self._process.pid

    def prepare(self, row: Row) -> None:
        """Make ready for measuring the row."""
        self._ask("prepare", row)

    def measure(self, row: Row) -> Timing:
        """Run it, several times if it is short."""
        timing = self._ask("measure", row)
        assert isinstance(timing, Timing)
        return timing

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def _ask(self, task: str, row: Row) -> object:
        try:
            self._pipe.send((task, row))
        except OSError:  # it has ended, and _answer tells how
            pass
        return self._answer()

    def _answer(self) -> object:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            why = ", as when memory runs out: measure fewer peers at a time" if code == -signal.SIGKILL else ""
            raise EngineFailed(f"{self.name} ended with exit code {code}{why}") from None
        if isinstance(answer, EngineFailed):
            raise EngineFailed(f"{self.name}: {answer}")
        return answer


def _serve(pipe: Connection, make: Callable[[], Engine]) -> None:
    _silence()
    try:
        engine = make()
        pipe.send(engine.version)
        while True:
            task, row = pipe.recv()
            pipe.send(row.prepare(engine) if task == "prepare" else _timed(lambda: row.run(engine)))  # noqa: B023
    except EOFError:  # nobody asks any more
        pass
    except Exception as error:
        pipe.send(EngineFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE]}"))


def _timed(run: Callable[[], None]) -> Timing:
    repeats, cpu, begin = 0, time.process_time(), time.perf_counter()
    while repeats == 0 or time.perf_counter() - begin < MIN_SAMPLE_S:
        run()
        repeats += 1
    return Timing((time.perf_counter() - begin) / repeats, time.process_time() - cpu)


def _silence() -> None:
    """The libraries tell every step of their loading, some of them from C."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nowhere, stream.fileno())

"""The processes of a model on several GPUs, one each: they are started, asked, and ended together."""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bitnet_inference.backends.cuda_wire import Arrays, Wire, Words, error_of
from bitnet_inference.errors import BackendError, BitNetError, Stopped, Unavailable

Reply = tuple[Words, list[NDArray[Any]]]
Progress = Callable[[list[int]], None]
_STRAGGLERS_S = 5.0  # what the others have when one has failed: they may wait for it for ever
_END_S = 5.0
_ENDING_S = 1.0
_MAX_SAID = 200
# The process finds our package where we have found it, whatever its environment and its folder.
_PATH = "import sys; at = sys.argv.index('--'); sys.path[:] = sys.argv[at + 1 :]; del sys.argv[at:]\n"
SERVE = "from bitnet_inference.backends.cuda_rank import main; main()"


class Ranks:
    """Processes that run the same program. Its arguments are a connection, its rank, their number and a folder.

    What is asked is asked of all. When one ends, does not answer for `patience_s` seconds or fails alone, all are
    ended, and every question from then on raises BackendError.
    """

    def __init__(self, size: int, patience_s: float, program: str = SERVE) -> None:
        """Starts them; raises Unavailable where the system starts no process."""
        self._patience_s = patience_s
        self._end_of_all: BitNetError | None = None  # why nobody is there any more
        self._folder = tempfile.TemporaryDirectory(prefix="bitnet-ranks-")  # nobody else may look into it
        self._selector = selectors.DefaultSelector()
        self._wires: list[Wire] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                self._start(rank, size, program)
        except OSError as error:
            self.close()
            raise Unavailable("cuda", f"no process could be started for a GPU: {error}") from error

    @property
    def process_ids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def ask(self, words: Words, arrays: Arrays = (), on_progress: Progress | None = None) -> list[Reply]:
        """What each answers, by rank. `on_progress` is called with what rank 0 says before.

        Raises what one of them raises, and BackendError where one is gone.
        """
        if self._end_of_all is not None:
            raise type(self._end_of_all)(str(self._end_of_all))
        try:
            self._send_all(words, arrays)
            replies = self._receive_all(on_progress)
        except BaseException:  # Ctrl-C too: answers that nobody took would be taken for those of the next question
            self._end(BackendError("a step was interrupted: load the model again"))
            raise
        raised = [error_of(words) for words, _ in replies.values()]
        errors = [error for error in raised if error is not None]
        if not errors:
            return [replies[rank] for rank in range(len(self._wires))]
        if len({type(error) for error in errors}) > 1 or len(errors) < len(self._wires):
            self._end(BackendError(str(errors[0])))  # the others wait for it, or are ahead of it
        raise errors[0]

    def close(self) -> None:
        """End them."""
        self._end(Stopped("the model is closed: load it again"))

    def _end(self, why: BitNetError) -> None:
        self._end_of_all = self._end_of_all or why
        for wire in self._wires:
            wire.close()  # which ends them
        self._selector.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a driver may hold it for longer
                    process.wait(_ENDING_S)
        self._wires, self._processes = [], []
        self._folder.cleanup()

    def _lost(self, rank: int, how: str) -> BackendError:
        """What is raised when a process is gone, with what it said last; all are ended."""
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):  # who has closed the connection is about to end
            how = f"ended ({process.wait(_ENDING_S)})"
        lines = self._said(rank).read_text("utf-8", "replace").strip().splitlines()
        said = f", saying {lines[-1].strip()[:_MAX_SAID]!r}" if lines else ""
        error = BackendError(f"the process of GPU {rank} {how}{said}: load the model again")
        self._end(error)
        return error

    def _start(self, rank: int, size: int, program: str) -> None:
        ours, theirs = socket.socketpair()
        self._wires.append(Wire(ours))
        ours.settimeout(self._patience_s)
        self._selector.register(ours, selectors.EVENT_READ, rank)
        arguments = [str(theirs.fileno()), str(rank), str(size), self._folder.name]
        with theirs, open(self._said(rank), "wb") as said:
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _PATH + program, *arguments, "--", *sys.path],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    start_new_session=True,  # Ctrl-C is for us, and we end them
                )
            )

    def _said(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank-{rank}.txt")

    def _send_all(self, words: Words, arrays: Arrays) -> None:
        for rank, wire in enumerate(self._wires):
            try:
                wire.send(words, arrays)
            except OSError as error:
                raise self._lost(rank, "takes no message") from error

    def _receive_all(self, on_progress: Progress | None) -> dict[int, Reply]:
        """A reply of each; where one is an error, of those that are quick enough."""
        replies: dict[int, Reply] = {}
        has_failed, deadline = False, time.monotonic() + self._patience_s
        while len(replies) < len(self._wires):
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and has_failed:
                break
            if not ready:
                missing = next(rank for rank in range(len(self._wires)) if rank not in replies)
                raise self._lost(missing, f"does not answer for {self._patience_s:g} s")
            for key, _ in ready:
                words, arrays = self._receive(key.data)
                if "progress" in words:
                    deadline = deadline if has_failed else time.monotonic() + self._patience_s
                    if on_progress and key.data == 0:
                        on_progress(words["progress"])
                    continue
                replies[key.data] = words, arrays
                if "error" in words and not has_failed:
                    has_failed, deadline = True, time.monotonic() + _STRAGGLERS_S
        return replies

    def _receive(self, rank: int) -> Reply:
        try:
            return self._wires[rank].receive()
        except (EOFError, OSError) as error:
            raise self._lost(rank, "fell silent") from error

"""Sends many prompts to an engine and reads what comes of them, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from bitnet_inference.errors import EngineError, QueueFull
from bitnet_inference.prompts import Progress
from bitnet_inference.stream import Generation, Stream


def read_prompts(open_stream: Callable[[int], Stream], count: int, progress: Progress | None) -> list[Generation]:
    """The outputs of `open_stream(0)` to `open_stream(count - 1)`, which compute prompts and nothing more.

    While the engine's queue is full, those under way are waited for. Raises EngineError for a prompt that is not done
    within its time. On errors, and on Ctrl-C, all are cancelled.
    """
    outputs: list[Generation] = []
    unread: deque[Stream] = deque()

    def read() -> None:
        outputs.append(_complete(unread[0].read(), len(outputs)))
        unread.popleft()
        if progress is not None:
            progress(len(outputs), count)

    try:
        for index in range(count):
            while (stream := _opened(open_stream, index, patient=bool(unread))) is None:
                read()
            unread.append(stream)
        while unread:
            read()
    except BaseException:  # Ctrl-C too
        for stream in unread:
            stream.cancel()
        raise
    return outputs


def _opened(open_stream: Callable[[int], Stream], index: int, patient: bool) -> Stream | None:
    try:
        return open_stream(index)
    except QueueFull:
        if not patient:
            raise
        return None


def _complete(output: Generation, index: int) -> Generation:
    if output.finish_reason != "length":
        cure = "allow it more, or lower the load"
        raise EngineError(f"prompt {index} was not computed within its timeout_s ({output.finish_reason}): {cure}")
    return output

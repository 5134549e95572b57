"""One generation on its way to its reader: a `Stream` for `for` and for `async for`, fed by the engine's thread."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.text.detokenize import Detokenizer

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


@dataclass(frozen=True)
class Piece:
    """The next part of a text and the tokens that made it certain; `logprobs` has one entry a token, if wanted."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    `token_ids` holds what was generated, without end tokens; with a stop string, its tokens too. `finish_reason`:
    "stop" (`stopped_by` tells the stop string or the id of the end token), "length", "cancelled" or "timeout".
    `logprobs` has one entry a token, None if not wanted; so has `prompt_logprobs`, but None for a prompt's first token,
    and where the request ended too early, fewer.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stopped_by: str | int | None
    logprobs: list[TokenLogprobs] | None
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None


@dataclass(frozen=True)
class _End:
    rest: str
    finish: Finish
    usage: Usage
    stop_string: str | None


class Mailbox:
    """The Sink that turns tokens into text, in the engine's thread, and leaves them for the reader."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._letters: queue.SimpleQueue[Piece | _End] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """See Sink; True after a stop string."""
        text = self._detokenizer.push(token_id)
        self._put(Piece(text, [token_id], None if logprobs is None else [logprobs]))
        return self._detokenizer.stopped is not None

    def finish(self, finish: Finish, usage: Usage) -> None:
        """See Sink."""
        rest = self._detokenizer.finish()
        self._put(_End(rest, finish, usage, self._detokenizer.stopped))

    def take(self) -> Piece | _End:
        """The next letter; waits for it."""
        return self._letters.get()

    async def take_async(self) -> Piece | _End:
        """The same without blocking the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            arrived = asyncio.Event()
            self._wake = partial(_call_in, loop, arrived.set)
            try:
                return self._letters.get_nowait()  # looked for after the wake-up call is set, so none is missed
            except queue.Empty:
                await arrived.wait()

    def _put(self, letter: Piece | _End) -> None:
        self._letters.put(letter)
        if self._wake is not None:
            self._wake()


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the reader's loop is closed: nobody waits
        pass


class Stream:
    """The pieces of one generation, as they come: iterate with `for` or with `async for`, once.

    An iteration that is abandoned (break, an exception, a cancelled task) cancels the request, and so does leaving the
    stream's `with` block and losing the stream. An error of the request is raised where the pieces are read.
    `output` is all of it, once the last piece has been read; None before, and after an error. `request` is what the
    engine has been given.
    """

    def __init__(self, mailbox: Mailbox, request: Request, cancel: Callable[[Request], None], wants_logprobs: bool):
        self._mailbox, self.request, self._cancel = mailbox, request, cancel
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = [] if wants_logprobs else None
        self._num_shown = 0
        self._end: _End | None = None
        self.output: Generation | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, once the last piece has been read."""
        return self.output.finish_reason if self.output else None

    @property
    def usage(self) -> Usage | None:
        """What it has cost, once the last piece has been read."""
        return self._end.usage if self._end else None

    def cancel(self) -> None:
        """End the generation soon; what has been generated can still be read. May be called from any thread."""
        self._cancel(self.request)

    def read(self) -> Generation:
        """Wait for the end, and return all of it. Raises the request's error."""
        for _ in self:
            pass
        assert self.output is not None, "a generation without an output has an error"
        return self.output

    def __iter__(self) -> Iterator[Piece]:
        try:
            while self._end is None:
                piece = self._open(self._mailbox.take())
                if piece is not None:
                    yield piece
            self._raise_error()
        finally:
            self._give_up()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            while self._end is None:
                piece = self._open(await self._mailbox.take_async())
                if piece is not None:
                    yield piece
            self._raise_error()
        finally:
            self._give_up()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()

    def __del__(self) -> None:
        self._give_up()

    def _open(self, letter: Piece | _End) -> Piece | None:
        """Take note of a letter; the piece that it completes. Tokens whose text is held back wait for a later one."""
        if isinstance(letter, _End):
            self._texts.append(letter.rest)
            self._conclude(letter)
        else:
            self._texts.append(letter.text)
            self._token_ids += letter.token_ids
            if self._logprobs is not None:
                self._logprobs += letter.logprobs or []
        text, token_ids = self._texts[-1], self._token_ids[self._num_shown :]
        if not text and not (self._end and token_ids):
            return None
        logprobs = None if self._logprobs is None else self._logprobs[self._num_shown :]
        self._num_shown = len(self._token_ids)
        return Piece(text, token_ids, logprobs)

    def _conclude(self, end: _End) -> None:
        self._end = end
        reason = end.finish.reason
        if reason != "error":
            # The engine does not know of a stop string that only the text held back has made complete.
            reason = reason if end.stop_string is None else "stop"
            stopped_by = end.finish.token_id if end.stop_string is None else end.stop_string
            text = "".join(self._texts)
            found = (self._logprobs, end.usage, self.request.prompt_logprobs)
            self.output = Generation(text, self._token_ids, reason, stopped_by, *found)

    def _raise_error(self) -> None:
        assert self._end is not None
        if self._end.finish.error is not None:
            raise self._end.finish.error

    def _give_up(self) -> None:
        if self._end is None:
            self.cancel()

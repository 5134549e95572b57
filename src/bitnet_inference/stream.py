"""One generation on its way to its reader: a `Stream` for `for` and for `async for`, fed by the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, NoReturn

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.request import Request, Usage
from bitnet_inference.mailbox import MANY_LETTERS, End, Letter, Mailbox
from bitnet_inference.text.filter import Screen

FinishReason = Literal["stop", "length", "cancelled", "timeout", "filtered"]


@dataclass(frozen=True)
class Piece:
    """The next part of a text and the tokens that made it certain; `logprobs` has one entry a token, if wanted.

    Behind a filter a token comes when all of its text is shown, and so with a later part than its first.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    `token_ids` holds what was generated, without end tokens; with a stop string, its tokens too. `finish_reason`:
    "stop" (`stopped_by` tells the stop string or the id of the end token), "length", "cancelled", "timeout" or
    "filtered" (`stopped_by` is the filter's label; text, tokens and logprobs end before what it found).
    `logprobs` has one entry a token, None if not wanted; so has `prompt_logprobs`, but None for a prompt's first token,
    and where the request ended too early, fewer. `end_logprobs` are those of the end token, where one ended it and
    they are wanted. `score` is that of a beam search, see BeamParams; None for others.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stopped_by: str | int | None
    logprobs: list[TokenLogprobs] | None
    usage: Usage
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    score: float | None = None
    end_logprobs: TokenLogprobs | None = None


class _Noted(NamedTuple):
    """A letter that was read, and what was known then: characters that have come and that may be shown, tokens."""

    letter: Letter | End | None
    text: str  # that it makes clear
    num_chars: int
    num_clear: int
    num_tokens: int  # that count: those behind the end of a filtered text do not

    @property
    def end(self) -> int:
        """Up to which character its token's text goes."""
        return self.num_chars + (self.letter.num_held if isinstance(self.letter, Letter) else 0)


_NOTHING = _Noted(None, "", 0, 0, 0)


class Stream:
    """The pieces of one generation, as they come: iterate with `for` or with `async for`, once.

    A request of which much lies unread (MAX_UNREAD) waits for its reader, and holds up nobody meanwhile.
    An iteration that is abandoned (break, an exception, a cancelled task) cancels the request, and so does leaving the
    stream's `with` block and losing the stream. An error of the request is raised where the pieces are read.
    `output` is all of it, once the last piece has been read; None before, and after an error. `request` is what the
    engine has been given.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        request: Request,
        cancel: Callable[[Request], None],
        wants_logprobs: bool,
        screen: Screen | None = None,
    ) -> None:
        self._mailbox, self.request, self._cancel, self._screen = mailbox, request, cancel, screen
        self._wants_logprobs = wants_logprobs
        self._taking = threading.Lock()  # the reader may have gone while a filter looks at a letter in a thread
        self._noted = [_NOTHING]
        self._num_opened, self._num_shown = 1, 0  # of what is noted, and tokens, that pieces have
        self._made: deque[Piece] = deque()  # pieces that nobody has yet: a reader may have gone while one was made
        self._end: End | None = None
        self._error: Exception | None = None
        self.output: Generation | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended, once the last piece has been read."""
        return self.output.finish_reason if self.output else None

    @property
    def usage(self) -> Usage | None:
        """What it has cost, once the last piece has been read."""
        return self._end.usage if self._end else None

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Call this once when the generation has ended, at once if it has: `read` then waits for nothing.

        The request does not wait for its reader any more, however much lies unread, since its end is waited for.

        It is called in the engine's thread, or in this one, must return soon and must not raise.
        """
        self._mailbox.call_at_end(call)

    def cancel(self) -> None:
        """End the generation soon; what has been generated can still be read. May be called from any thread."""
        self._cancel(self.request)

    def read(self) -> Generation:
        """Wait for the end, and return all of it. Raises the request's error."""
        try:
            while self._end is None:
                self._mailbox.wait(self._num_awaited(MANY_LETTERS))
                with self._taking:
                    self._take_all()
            self._made.clear()
            self._raise_error()
        finally:
            self._leave()
        assert self.output is not None, "a generation without an output has an error"
        return self.output

    async def read_async(self) -> Generation:
        """As `read`, and the event loop goes on meanwhile."""
        async for _ in self.in_bulk(MANY_LETTERS):
            pass
        assert self.output is not None, "a generation without an output has an error"
        return self.output

    def __iter__(self) -> Iterator[Piece]:
        try:
            while self._end is None or self._made:
                if not self._made:
                    self._mailbox.wait()
                    self._next()
                if self._made:
                    yield self._made.popleft()
            self._raise_error()
        finally:
            self._leave()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces(self._next)

    def in_bulk(self, num_letters: int = 1) -> AsyncIterator[Piece]:
        """The same as `async for`, but what has come since the last piece is one piece: less work for many readers.

        Where no filter reads along, it is the text of so many letters at least, MANY_LETTERS at most, or the last.
        """
        return self._pieces(self._all_next, num_letters)

    async def _pieces(self, make: Callable[[], None], num_letters: int = 1) -> AsyncIterator[Piece]:
        try:
            while self._end is None or self._made:
                if not self._made:
                    await self._mailbox.wait_async(self._num_awaited(num_letters))
                    # A filter may take its time, which the event loop has not.
                    await asyncio.to_thread(make) if self._screen else make()
                if self._made:
                    yield self._made.popleft()
            self._raise_error()
        finally:
            self._leave()

    def __repr__(self) -> str:
        how = self.finish_reason or ("under way" if self._end is None else "error")
        return f"<Stream {how}, {len(self._ids_read())} tokens read>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream cannot be copied or sent to another process: read it, and pass its output on")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()

    def __del__(self) -> None:
        if hasattr(self, "output"):  # not where an interrupt has kept it from being made
            self._give_up()

    def _num_awaited(self, num_letters: int) -> int:
        return 1 if self._screen else num_letters

    def _next(self) -> None:
        """Make the piece that the next letter completes. Tokens whose text is held back wait for a later one."""
        with self._taking:
            if self._take():
                self._make()

    def _all_next(self) -> None:
        """Make one piece of all letters that are there."""
        with self._taking:
            self._take_all()
            self._make()

    def _take_all(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        """Note the next letter; whether there was one.

        A reader may be interrupted anywhere, and another one go on: what is noted is so at once.
        """
        letter = self._mailbox.first(self._ids_read) if self._end is None else None
        if letter is None:
            return False
        if self._noted[-1].letter is not letter:
            self._noted.append(self._note(letter))
        if isinstance(letter, Letter):
            self._mailbox.drop()
        else:
            self._conclude(letter)
        return True

    def _make(self) -> None:
        if (piece := self._piece(self._end is not None)) is not None:
            self._made.append(piece)

    def _ids_read(self) -> list[int]:
        return [noted.letter.token_id for noted in self._noted if isinstance(noted.letter, Letter)]

    def _piece(self, is_last: bool) -> Piece | None:
        text = "".join(noted.text for noted in self._noted[self._num_opened :])
        num_clear = self._num_clear_tokens(is_last)
        shown = self._tokens(self._num_shown, num_clear)
        self._num_opened = len(self._noted)
        if not text and not (is_last and shown):
            return None
        self._num_shown = num_clear
        return Piece(text, [each.token_id for each in shown], self._logprobs(shown))

    def _note(self, letter: Letter | End) -> _Noted:
        last, is_open = self._noted[-1], self._screen is None or self._screen.is_open
        num_chars = last.num_chars + len(letter.text)
        text = self._cleared(letter.text, isinstance(letter, End))
        num_tokens = last.num_tokens + (isinstance(letter, Letter) and is_open)
        return _Noted(letter, text, num_chars, last.num_clear + len(text), num_tokens)

    def _tokens(self, begin: int, end: int) -> list[Letter]:
        """Some of the tokens that count: all, or those before the end of a filtered text."""
        return [noted.letter for noted in self._noted[1 + begin : 1 + end] if isinstance(noted.letter, Letter)]

    def _logprobs(self, tokens: Sequence[Letter]) -> list[TokenLogprobs] | None:
        return [each.logprobs for each in tokens if each.logprobs is not None] if self._wants_logprobs else None

    def _cleared(self, text: str, is_last: bool) -> str:
        """What the filters let through now. The request ends where one of them forbids the rest, or fails."""
        if self._screen is None or not self._screen.is_open:
            return text if self._screen is None else ""
        try:
            text = self._screen.push(text, is_last)
        except Exception as error:
            self._error, text = error, ""
        if not is_last and not self._screen.is_open:
            self.request.is_filtered = self._label is not None
            self.cancel()
        return text

    def _num_clear_tokens(self, is_last: bool) -> int:
        """How many tokens may be shown: those whose text, also what the detokenizer holds back of it, is clear."""
        last = self._noted[-1]
        is_through = is_last and last.num_clear == last.num_chars and self._label is None
        if self._screen is None or is_through:
            return last.num_tokens
        hidden = range(self._num_shown, last.num_tokens)
        return next((each for each in hidden if self._noted[1 + each].end > last.num_clear), last.num_tokens)

    def _conclude(self, end: End) -> None:
        if self._label is None:
            self._error = self._error or end.finish.error
        if self._error is None:
            tokens, text = self._tokens(0, self._num_clear_tokens(True)), "".join(noted.text for noted in self._noted)
            (reason, stopped_by), of_prompt = self._why(end), self.request.prompt_logprobs
            of_end = end.finish.logprobs if reason == "stop" and stopped_by == end.finish.token_id else None
            ids, logprobs = [each.token_id for each in tokens], self._logprobs(tokens)
            self.output = Generation(text, ids, reason, stopped_by, logprobs, end.usage, of_prompt, end_logprobs=of_end)
        self._end = end

    @property
    def _label(self) -> str | None:
        """What has filtered the text; None while nothing has."""
        return self._screen.label if self._screen else None

    def _why(self, end: End) -> tuple[FinishReason, str | int | None]:
        """Why it ended, and `stopped_by`."""
        if self._label is not None:
            return "filtered", self._label
        if self._noted[-1].num_clear < self._noted[-1].num_chars:  # Ctrl-C in a filter: all behind it stays hidden
            return "cancelled", None
        if end.stop_string is not None:
            # The engine does not know of a stop string that only the text held back has made complete.
            return "stop", end.stop_string
        assert end.finish.reason != "error", "errors are raised"
        return end.finish.reason, end.finish.token_id

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _leave(self) -> None:
        """A reader goes, and the request with it, unless it was a second one."""
        if not self._mailbox.is_awaited:
            self._give_up()

    def _give_up(self) -> None:
        if self._end is None:
            self.cancel()

"""Where the engine's thread leaves what a request generates, and its reader takes it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.request import Finish, Usage
from bitnet_inference.errors import InvalidParams
from bitnet_inference.text.detokenize import Detokenizer

# So many letters, as a rule a token each, may lie unread before a stream's request waits for its reader.
MAX_UNREAD = 1024
# Who wants all of a text, and no pieces, is woken for so many letters: that takes as long as a small model's token.
MANY_LETTERS = 64


class _Token(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None


class Letter(NamedTuple):
    """A token, and the text that it made certain; `num_held` characters at most are still to come."""

    text: str
    num_held: int
    token_id: int
    logprobs: TokenLogprobs | None


class _Last(NamedTuple):
    finish: Finish
    usage: Usage


@dataclass(frozen=True)
class End:
    """The end of a generation: the text that was held back till then, and the stop string, if one ended it."""

    text: str
    finish: Finish
    usage: Usage
    stop_string: str | None


class Mailbox:
    """The Sink that leaves tokens for the reader, in whose thread they become text.

    With stop strings they do so in the engine's thread, which must know when one is complete.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        max_unread: int | None = None,
        on_room: Callable[[], None] = lambda: None,
        later: Callable[[Callable[[], None]], None] = lambda wake: wake(),
        check_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """It is full with `max_unread` letters, until half of them are read; then `on_room` is called. With None, and
        once somebody waits for the end, it never is.

        `later` gets the calls that wake who waits for letters or the end, and makes them soon, in the engine's thread.
        `check_wait` is called before somebody waits for a letter, and raises where none would come.
        """
        self._detokenizer, self._max_unread, self._on_room, self._later = detokenizer, max_unread, on_room, later
        self._check_wait = check_wait
        self._may_stop = detokenizer.may_stop
        self._is_full = False  # as the engine has seen it
        self._letters: deque[Letter | _Token | _Last | End] = deque()
        self._is_torn = False  # an interrupt came while a letter was made
        self._wake = self._woken = _nobody  # what wakes the reader, another one each time it waits; what has last
        self.is_awaited = False  # whether a reader waits for letters
        self._num_awaited = 1
        self._ending = threading.Lock()
        self._has_ended = False
        self._at_end: list[Callable[[], None]] = []

    @property
    def is_full(self) -> bool:
        """See Sink."""
        most = self._max_unread
        self._is_full = most is not None and len(self._letters) > (most // 2 if self._is_full else most - 1)
        return self._is_full

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """See Sink; True after a stop string."""
        token = _Token(token_id, logprobs)
        if not self._may_stop:
            self._put(token)
            return False
        self._put(self._letter(token))
        return self._detokenizer.stopped is not None

    def finish(self, finish: Finish, usage: Usage) -> None:
        """See Sink."""
        self._put(_Last(finish, usage))
        with self._ending:
            self._has_ended = True
        for call in self._at_end:
            self._later(call)

    def call_at_end(self, call: Callable[[], None]) -> None:
        """See Stream."""
        with self._ending:
            has_ended = self._has_ended
            if not has_ended:
                self._at_end.append(call)
                self._max_unread = None  # who waits for the end does not read before it
        (call if has_ended else self._on_room)()

    def wait(self, num_letters: int = 1) -> None:
        """Wait until there are so many letters, which `max_unread` must allow, or the end is among them."""
        while not self._has(num_letters):
            asleep = threading.Lock()
            asleep.acquire()
            self._wait_for(asleep.release, num_letters)
            try:
                if not self._has(num_letters):  # looked for after the wake-up call is set, so none is missed
                    asleep.acquire()
            finally:
                self.is_awaited = False

    async def wait_async(self, num_letters: int = 1) -> None:
        """The same without blocking the event loop."""
        while not self._has(num_letters):
            arrived = asyncio.Event()
            self._wait_for(partial(_call_in, asyncio.get_running_loop(), arrived.set), num_letters)
            try:
                if not self._has(num_letters):
                    await arrived.wait()
            finally:
                self.is_awaited = False

    def first(self, before: Callable[[], Iterable[int]]) -> Letter | End | None:
        """The next letter, None where none has come. It stays until it is dropped.

        `before` gives the tokens of all letters before it: they become text once more where Ctrl-C interrupted that.
        """
        content = self._letters[0] if self._letters else None
        if not isinstance(content, (_Token, _Last)):
            return content
        if self._is_torn:
            self._detokenizer = self._detokenizer.anew(before())
        self._is_torn = True
        made = self._letter(content) if isinstance(content, _Token) else self._end(content)
        self._letters[0] = made
        self._is_torn = False
        return made

    def drop(self) -> None:
        """Take the first letter away, which is not the end: that stays."""
        self._letters.popleft()
        # The engine looks once more before it falls asleep, so it misses no room that is made while it finds us full.
        most = self._max_unread
        if self._is_full and most is not None and len(self._letters) <= most // 2:
            self._on_room()

    def _has(self, num_letters: int) -> bool:
        letters = self._letters
        return len(letters) >= num_letters or (bool(letters) and isinstance(letters[-1], (_Last, End)))

    def _wait_for(self, wake: Callable[[], None], num_letters: int) -> None:
        self._check_wait()
        if self.is_awaited:  # whoever waits would not be woken any more
            raise InvalidParams("two readers wait for one stream: read it in one place, and pass its pieces on")
        self.is_awaited, self._num_awaited, self._wake = True, num_letters, wake

    def _end(self, last: _Last) -> End:
        return End(self._detokenizer.finish(), last.finish, last.usage, self._detokenizer.stopped)

    def _letter(self, token: _Token) -> Letter:
        text = self._detokenizer.push(token.token_id)
        return Letter(text, self._detokenizer.num_held, token.token_id, token.logprobs)

    def _put(self, content: Letter | _Token | _Last) -> None:
        self._letters.append(content)
        wake = self._wake
        if wake is not self._woken and self._has(self._num_awaited):
            self._woken = wake
            self._later(wake)


def _nobody() -> None:
    """Wakes nobody, because nobody has waited yet."""


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the reader's loop is closed: nobody waits
        pass

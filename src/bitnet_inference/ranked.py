"""Several texts for one prompt that are ranked before anybody sees them: the best of many choices, beam searches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar, Unpack, overload

from bitnet_inference.config import checked_count
from bitnet_inference.engine.beam import BeamParams
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import InvalidParams, QueueFull
from bitnet_inference.in_flight import MAX_IN_FLIGHT
from bitnet_inference.prompts import (
    ChatOptions,
    Params,
    Prompt,
    TalkOptions,
    TermOptions,
    encode_each,
    is_one_prompt,
    is_one_talk,
    placed,
    read_terms,
    split_terms,
)
from bitnet_inference.stream import Generation, Stream
from bitnet_inference.text.messages import Message

Item = TypeVar("Item")


class Several(Protocol):
    """Texts of one prompt that are under way."""

    def read(self) -> list[Generation]:
        """Wait for the end; the texts, the best first where they are ranked. Raises the first error."""
        ...

    def cancel(self) -> None:
        """End them soon."""
        ...


class Search:
    """A beam search that is under way."""

    def __init__(self, beams: Beams, streams: Sequence[Stream]) -> None:
        """`streams` are those of its texts, the best first."""
        self._beams, self._streams = beams, streams

    def cancel(self) -> None:
        """See Several."""
        self._streams[0].cancel()

    def read(self) -> list[Generation]:
        """See Several; the texts have scores."""
        found = [stream.read() for stream in self._streams]
        scores = (text.score for text in self._beams.best)  # none, where the search was cut off
        return [replace(text, score=next(scores, None)) for text in found]


class Choices:
    """Choices of one prompt that are under way."""

    def __init__(self, streams: Sequence[Stream], num_texts: int | None, shows_logprobs: bool) -> None:
        """Of which `num_texts` are returned, those that are the likeliest; None returns all in their order."""
        self._streams, self._num_texts, self._shows_logprobs = streams, num_texts, shows_logprobs

    @classmethod
    def begin(
        cls,
        start: Callable[[int, SamplingParams], Sequence[Stream]],
        num_choices: int,
        best_of: int | None,
        params: SamplingParams,
    ) -> Choices:
        """Start so many; or `best_of`, with the log-probabilities by which they are ranked."""
        shows_logprobs = params.logprobs is not None
        if best_of is None:
            return cls(start(num_choices, params), None, shows_logprobs)
        scored = params if shows_logprobs else replace(params, logprobs=0)
        return cls(start(best_of, scored), num_choices, shows_logprobs)

    @property
    def num_output_tokens(self) -> int:
        """What all of them have cost, those that are not returned too, once they have been read."""
        return sum(stream.usage.num_output_tokens for stream in self._streams if stream.usage)

    def call_at_end(self, call: Callable[[], None]) -> None:
        """See Stream; when all have ended."""
        left = list(range(len(self._streams)))

        def note_end() -> None:
            if left.pop() == 0:  # one alone takes the last, in whatever thread
                call()

        for stream in self._streams:
            stream.call_at_end(note_end)

    def cancel(self) -> None:
        """See Several."""
        for stream in self._streams:
            stream.cancel()

    def read(self) -> list[Generation]:
        """See Several."""
        with cancelling(self._streams):
            texts = [stream.read() for stream in self._streams]
        if self._num_texts is None:
            return texts
        best = best_texts(texts, self._num_texts)
        return best if self._shows_logprobs else [replace(text, logprobs=None, end_logprobs=None) for text in best]


class RankedTexts(ABC):
    """What an LLM can do that ends with a ranking."""

    @overload
    def choices(  # type: ignore[overload-overlap]  # a string is a sequence of strings
        self,
        prompts: str | Sequence[int],
        num_choices: int,
        params: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        **terms: Unpack[TermOptions],
    ) -> list[Generation]: ...
    @overload
    def choices(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        num_choices: int,
        params: Params = None,
        *,
        best_of: int | None = None,
        **terms: Unpack[TermOptions],
    ) -> list[list[Generation]]: ...
    def choices(
        self,
        prompts: Any,
        num_choices: int,
        params: Params = None,
        *,
        best_of: int | None = None,
        **terms: Unpack[TermOptions],
    ) -> Any:
        """Continue a prompt in several ways, as stream_choices, and wait for all; of many prompts, a list for each.

        `best_of`: so many are generated, and those are returned whose tokens have the highest mean log-probability, the
        best first; earlier ones first among equals, an empty text last. A list of params has one entry a prompt.
        """
        one = is_one_prompt(prompts)
        encoded = encode_each([prompts] if one else prompts, self._encode)
        found = self._ranked(list(encoded), num_choices, best_of, params, read_terms(terms))
        return found[0] if one else found

    @overload
    def chat_choices(
        self,
        messages: Sequence[Message],
        num_choices: int,
        params: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        **options: Unpack[TalkOptions],
    ) -> list[Generation]: ...
    @overload
    def chat_choices(
        self,
        messages: Sequence[Sequence[Message]],
        num_choices: int,
        params: Params = None,
        *,
        best_of: int | None = None,
        **options: Unpack[TalkOptions],
    ) -> list[list[Generation]]: ...
    def chat_choices(
        self,
        messages: Any,
        num_choices: int,
        params: Params = None,
        *,
        best_of: int | None = None,
        **options: Unpack[TalkOptions],
    ) -> Any:
        """Answer a conversation in several ways, or each of many, as choices."""
        terms, others = split_terms(options)
        one = is_one_talk(messages)
        talks = encode_each([messages] if one else messages, lambda each: self._talk(each, others))
        found = self._ranked(list(talks), num_choices, best_of, params, terms, opening=True)
        return found[0] if one else found

    @overload
    def beam_search(  # type: ignore[overload-overlap]  # a string is a sequence of strings
        self, prompts: str | Sequence[int], params: BeamParams, **terms: Unpack[TermOptions]
    ) -> list[Generation]: ...
    @overload
    def beam_search(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], params: BeamParams, **terms: Unpack[TermOptions]
    ) -> list[list[Generation]]: ...
    def beam_search(self, prompts: Any, params: BeamParams, **terms: Unpack[TermOptions]) -> Any:
        """The likeliest continuations of a prompt that a beam search finds, the best first; of many, a list for each.

        A search that is cut off by `timeout_s` has no text.
        """
        one = is_one_prompt(prompts)
        encoded = list(encode_each([prompts] if one else prompts, self._encode))
        found = _read_each(encoded, lambda prompt: self._search(prompt, params, read_terms(terms), opening=False))
        return found[0] if one else found

    @overload
    def chat_beam_search(
        self, messages: Sequence[Message], params: BeamParams, **options: Unpack[TalkOptions]
    ) -> list[Generation]: ...
    @overload
    def chat_beam_search(
        self, messages: Sequence[Sequence[Message]], params: BeamParams, **options: Unpack[TalkOptions]
    ) -> list[list[Generation]]: ...
    def chat_beam_search(self, messages: Any, params: BeamParams, **options: Unpack[TalkOptions]) -> Any:
        """The likeliest answers to a conversation, or to each of many, as beam_search."""
        terms, others = split_terms(options)
        one = is_one_talk(messages)
        encoded = encode_each([messages] if one else messages, lambda each: self.encode_chat(each, **others))
        found = _read_each(list(encoded), lambda prompt: self._search(prompt, params, terms, opening=True))
        return found[0] if one else found

    def _ranked(
        self,
        prompts: Sequence[Any],
        num_choices: int,
        best_of: int | None,
        params: Params,
        terms: Terms,
        opening: bool = False,
    ) -> list[list[Generation]]:
        num_choices = checked_count("num_choices", num_choices)
        count = num_choices if best_of is None else checked_count("best_of", best_of)
        if count < num_choices:
            raise InvalidParams(f"best_of is {best_of!r}: give a whole number, num_choices ({num_choices}) or more")

        def start(item: tuple[Any, SamplingParams]) -> Choices:
            prompt, chosen = item

            def streams(number: int, params: SamplingParams) -> list[Stream]:
                # They are read one after the other.
                return self._choices(prompt, number, params, terms, opening, max_unread=None)

            return Choices.begin(streams, num_choices, best_of, chosen)

        return _read_each(list(zip(prompts, self._params(params, len(prompts)), strict=True)), start, count)

    @abstractmethod
    def encode_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids of a conversation."""

    @abstractmethod
    def _talk(self, messages: Sequence[Message], options: dict[str, Any]) -> Any: ...

    @abstractmethod
    def _encode(self, prompt: Prompt) -> Sequence[int]: ...

    @abstractmethod
    def _params(self, params: Any, count: int) -> list[SamplingParams]: ...

    @abstractmethod
    def _choices(
        self,
        prompt: Sequence[int],
        num_choices: int,
        params: SamplingParams,
        terms: Terms,
        opening: bool,
        max_unread: int | None,
    ) -> list[Stream]: ...

    @abstractmethod
    def _search(self, prompt: Sequence[int], params: BeamParams, terms: Terms, opening: bool) -> Search: ...


class _Cancellable(Protocol):
    def cancel(self) -> None: ...


@contextmanager
def cancelling(each: Sequence[_Cancellable]) -> Iterator[None]:
    """Cancel all of these if one fails, on Ctrl-C too."""
    try:
        yield
    except BaseException:
        for one in each:
            one.cancel()
        raise


def best_texts(texts: Sequence[Generation], num_texts: int) -> list[Generation]:
    """Those whose tokens are the likeliest on average, the best first; they need logprobs, an empty text is last."""
    return sorted(texts, key=lambda text: -_mean_logprob(text))[:num_texts]


def _read_each(
    items: Sequence[Item], start: Callable[[Item], Several], num_requests: int = 1
) -> list[list[Generation]]:
    """The texts of all items, in order; while the engine's queue is full, the next ones wait.

    Each makes `num_requests`, of which so many are under way that others find room.
    """
    unread: deque[Several] = deque()
    found: list[list[Generation]] = []

    def read_next() -> None:
        with placed(len(found), len(items)):
            found.append(unread.popleft().read())

    with cancelling(unread):
        for index, item in enumerate(items):
            while len(unread) * num_requests >= MAX_IN_FLIGHT:
                read_next()
            while (several := _start(start, item, index, len(items), may_wait=bool(unread))) is None:
                read_next()
            unread.append(several)
        while unread:
            read_next()
    return found


def _start(start: Callable[[Item], Several], item: Item, index: int, total: int, *, may_wait: bool) -> Several | None:
    try:
        with placed(index, total):
            return start(item)
    except QueueFull:
        if not may_wait:
            raise
        return None


def _mean_logprob(text: Generation) -> float:
    """A token's on average; an empty text comes last."""
    logprobs = [token.logprob for token in text.logprobs or ()]
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf

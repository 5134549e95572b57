"""Several texts for one prompt that are ranked before anybody sees them: the best of many choices, beam searches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, Unpack, overload

from bitnet_inference.config import checked_count
from bitnet_inference.engine.beam import BeamParams
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import InvalidParams, QueueFull
from bitnet_inference.prompts import (
    ChatOptions,
    Prompt,
    TalkOptions,
    TermOptions,
    encode_each,
    is_one_prompt,
    read_terms,
    split_terms,
)
from bitnet_inference.stream import Generation, Stream
from bitnet_inference.text.messages import Message


class Search:
    """A beam search that is under way."""

    def __init__(self, beams: Beams, streams: Sequence[Stream]) -> None:
        """`streams` are those of its texts, the best first."""
        self._beams, self._streams = beams, streams

    def cancel(self) -> None:
        """End it soon."""
        self._streams[0].cancel()

    def read(self) -> list[Generation]:
        """Wait for the end; the texts with their scores, the best first. Raises the search's error."""
        found = [stream.read() for stream in self._streams]
        scores = (text.score for text in self._beams.best)  # none, where the search was cut off
        return [replace(text, score=next(scores, None)) for text in found]


class RankedTexts(ABC):
    """What an LLM can do that ends with a ranking."""

    def choices(
        self,
        prompt: Prompt,
        num_choices: int,
        params: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        **terms: Unpack[TermOptions],
    ) -> list[Generation]:
        """Continue one prompt in several ways, as stream_choices, and wait for all.

        `best_of`: so many are generated, and those are returned whose tokens have the highest mean log-probability, the
        best first; earlier ones first among equals, an empty text last.
        """
        if not is_one_prompt(prompt):
            raise InvalidParams("choices are of one prompt: call choices for each")
        return self._ranked(self._encode(prompt), num_choices, best_of, params, read_terms(terms))

    def chat_choices(
        self,
        messages: Sequence[Message],
        num_choices: int,
        params: SamplingParams | None = None,
        *,
        best_of: int | None = None,
        **options: Unpack[TalkOptions],
    ) -> list[Generation]:
        """Answer one conversation in several ways, as choices."""
        terms, others = split_terms(options)
        return self._ranked(self._talk(messages, others), num_choices, best_of, params, terms, opening=True)

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
        found = _search_all(encoded, lambda prompt: self._search(prompt, params, read_terms(terms), opening=False))
        return found[0] if one else found

    def chat_beam_search(
        self, messages: Sequence[Message], params: BeamParams, **options: Unpack[TalkOptions]
    ) -> list[Generation]:
        """The likeliest answers to one conversation, as beam_search."""
        terms, others = split_terms(options)
        prompt = self.encode_chat(messages, **others)
        return _search_all([prompt], lambda prompt: self._search(prompt, params, terms, opening=True))[0]

    def _ranked(
        self,
        prompt: Any,
        num_choices: int,
        best_of: int | None,
        params: SamplingParams | None,
        terms: Terms,
        opening: bool = False,
    ) -> list[Generation]:
        num_choices = checked_count("num_choices", num_choices)
        chosen, count = self._params(params, 1)[0], num_choices
        if best_of is not None and (count := checked_count("best_of", best_of)) < num_choices:
            raise InvalidParams(f"best_of is {best_of!r}: give a whole number, num_choices ({num_choices}) or more")
        scored = chosen if best_of is None or chosen.logprobs is not None else replace(chosen, logprobs=0)
        streams = self._choices(prompt, count, scored, terms, opening, max_unread=None)  # read one after the other
        with cancelling(streams):
            texts = [stream.read() for stream in streams]
        if best_of is None:
            return texts
        best = best_texts(texts, num_choices)
        return (
            best if chosen.logprobs is not None else [replace(text, logprobs=None, end_logprobs=None) for text in best]
        )

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


def _search_all(prompts: Sequence[Sequence[int]], start: Callable[[Sequence[int]], Search]) -> list[list[Generation]]:
    """What the searches of all prompts find, in order; while the engine's queue is full, the next ones wait."""
    searches: list[Search] = []
    unread: deque[Search] = deque()
    found: list[list[Generation]] = []
    with cancelling(searches):
        for prompt in prompts:
            while (search := _start(start, prompt, may_wait=bool(unread))) is None:
                found.append(unread.popleft().read())
            searches.append(search)
            unread.append(search)
        return found + [search.read() for search in unread]


def _start(start: Callable[[Sequence[int]], Search], prompt: Sequence[int], may_wait: bool) -> Search | None:
    try:
        return start(prompt)
    except QueueFull:
        if not may_wait:
            raise
        return None


def _mean_logprob(text: Generation) -> float:
    """A token's on average; an empty text comes last."""
    logprobs = [token.logprob for token in text.logprobs or ()]
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf

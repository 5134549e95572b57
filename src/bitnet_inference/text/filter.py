"""Content filters: what may be asked, and what a reader may see of an answer.

A filter looks at prompts, and at the text of an answer on its way to the reader, after detokenising and stop strings.
What may still become a part of something forbidden is held back, so nothing of it is ever shown.

Filters run where a stream is read, not in the engine's thread: one that is slow, a classifier on another machine
perhaps, holds up nobody but its own reader. A match cancels the request, and the stream ends as "filtered". What this
costs: while nobody reads, the engine goes on with a text that will be filtered.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NamedTuple, Protocol, runtime_checkable

from bitnet_inference.errors import EngineError, Filtered, InvalidParams


class Verdict(NamedTuple):
    """The first `num_clear` characters of a text may be shown. With a `label` the text ends there, filtered.

    The label is shown to the reader, so it names a filter or a reason, and not what was found.
    """

    num_clear: int
    label: str | None = None


class OutputFilter(Protocol):
    """A filter's view of one answer. It is called by one thread at a time."""

    def push(self, text: str, is_last: bool) -> Verdict:
        """Look at the next part of the text, which ends with it if it `is_last`; what may be shown of all parts so far.

        Never fewer characters than before, and all of them with the last part, or a label. An exception ends the
        request with it.
        """
        ...


@runtime_checkable
class Filter(Protocol):
    """What an LLM takes as a filter. Both are called from any thread, in several at once."""

    def check_prompt(self, text: str) -> str | None:
        """The label of what a prompt is refused for; None if it may be asked."""
        ...

    def start(self) -> OutputFilter:
        """The view of one more answer."""
        ...


class Filters:
    """The filters of an LLM, in order."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        """Raises InvalidParams for what is no filter."""
        self._filters = _checked(filters)

    def check(self, text: str, place: str = "the prompt") -> None:
        """Raises Filtered for a text that must not be asked; `place` says where it stands. EngineError for no label."""
        for each in self._filters:
            label = each.check_prompt(text)
            if not isinstance(label, str | None):
                why = f"the filter {type(each).__name__} says {label!r:.60} of a prompt"
                raise EngineError(f"{why}: return a label, which is a string, or None for one that may be asked")
            if label is not None:
                raise Filtered(f"{place} is refused by the filter {label!r}: leave out what it forbids")

    def start(self) -> Screen | None:
        """The way of one more answer to its reader; None where nothing is filtered. EngineError for no OutputFilter."""
        return Screen([_started(each) for each in self._filters]) if self._filters else None

    def __bool__(self) -> bool:
        return bool(self._filters)


class Screen:
    """Filters in a row: each sees what those before it have cleared.

    `label` names what has ended the text, None while nothing has. `is_open` is False behind it, behind the last part
    and behind an exception: nothing more is shown.
    """

    def __init__(self, outputs: Sequence[OutputFilter]) -> None:
        self._links = [_Link(output) for output in outputs]
        self.is_open = True
        self.label: str | None = None

    def push(self, text: str, is_last: bool) -> str:
        """The text that may be shown now and might not before."""
        assert self.is_open, "nothing is shown behind the end"
        self.is_open = False  # also where Ctrl-C interrupts us
        for link in self._links:
            text, label = link.push(text, is_last)
            if label is not None:  # those behind have to look at the rest
                self.label, is_last = label, True
        self.is_open = not is_last
        return text


def _checked(filters: object) -> tuple[Filter, ...]:
    if not isinstance(filters, Sequence) or not all(map(_is_filter, filters)):
        raise InvalidParams(f"filters is {filters!r:.80}: give a list of filters, as in [WordFilter(words=[...])]")
    return tuple(filters)


def _is_filter(value: object) -> bool:
    return isinstance(value, Filter) and not isinstance(value, type)  # a class has the methods too


def _started(given: Filter) -> OutputFilter:
    output = given.start()
    if not callable(getattr(output, "push", None)):
        why = f"start() of the filter {type(given).__name__} returned {type(output).__name__}"
        raise EngineError(f"{why}: return an OutputFilter, which has a push()")
    return output


class _Link:
    """A filter and the text that it holds back."""

    def __init__(self, output: OutputFilter) -> None:
        self._output, self._held, self._num_clear = output, "", 0

    def push(self, text: str, is_last: bool) -> tuple[str, str | None]:
        verdict = self._output.push(text, is_last)
        name = type(self._output).__name__
        if not isinstance(verdict, Verdict):
            raise EngineError(
                f"the filter {name} returned {type(verdict).__name__}: return a Verdict, see OutputFilter"
            )
        if not isinstance(verdict.num_clear, Integral) or not isinstance(verdict.label, str | None):
            cure = "give a whole number, and a string or None"
            raise EngineError(f"the filter {name} returned {verdict!r:.80}: {cure}")
        num_clear = int(verdict.num_clear)  # NumPy's small ones overflow
        whole, count = self._held + text, num_clear - self._num_clear
        fewest = len(whole) if is_last and verdict.label is None else 0
        if not fewest <= count <= len(whole):
            why = f"clears {num_clear} of {self._num_clear + len(whole)} characters"
            raise EngineError(f"the filter {name} {why} after {self._num_clear}: mend it, see OutputFilter")
        self._held, self._num_clear = whole[count:], num_clear
        return whole[:count], verdict.label

"""A filter of words and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bitnet_inference.config import check_flag, read_text
from bitnet_inference.errors import InvalidParams
from bitnet_inference.text.filter import Verdict

WINDOW = 64  # characters


class WordFilter:
    """Forbids words, and what regular expressions match. See Filter.

    `words`: words or phrases, compared character by character; without case (`ignore_case`), and unless `whole_words`
    is False not inside of longer words. Text is held back only as long as it may become one of them.
    `patterns`: regular expressions of Python's `re`; give none that strangers wrote. `ignore_case` counts for them too,
    `whole_words` does not. A match is found if it has at most `window` characters, together with those that it looks at
    behind its end; so many, less one, are held back always.
    `label` is what readers are told.

    Raises InvalidParams where there are no words and no patterns, for empty words, and for patterns that match the
    empty text.
    """

    def __init__(
        self,
        words: Iterable[str] = (),
        patterns: Iterable[str] = (),
        *,
        ignore_case: bool = True,
        whole_words: bool = True,
        window: int = WINDOW,
        label: str = "words",
    ) -> None:
        _check_label(label)
        check_flag("ignore_case", ignore_case)
        check_flag("whole_words", whole_words)
        flags = re.IGNORECASE if ignore_case else re.NOFLAG
        self.label = label
        self._words = _Words(_strings("words", words), str.casefold if ignore_case else str, whole_words)
        self._patterns = [_compiled(pattern, flags) for pattern in _strings("patterns", patterns)]
        self._num_held = _window(window) - 1 if self._patterns else 0
        if not self._words and not self._patterns:
            raise InvalidParams("a word filter without words and patterns forbids nothing: give some, or leave it out")

    @classmethod
    def from_file(cls, path: str | Path, **options: Any) -> WordFilter:
        """The words in a text file, one a line; /.../ is a pattern, # begins a comment. The file's name is the label.

        `options` as above. Raises InvalidParams.
        """
        path = Path(path)
        lines = [line.strip() for line in read_text(path).splitlines()]
        entries = [line for line in lines if line and not line.startswith("#")]
        patterns = [line[1:-1] for line in entries if _is_pattern(line)]
        words = [line for line in entries if not _is_pattern(line)]
        try:
            return cls(words, patterns, **{"label": path.name} | options)
        except InvalidParams as error:
            raise InvalidParams(f"{path}: {error}") from None

    def check_prompt(self, text: str) -> str | None:
        """See Filter."""
        return self.start().push(text, is_last=True).label

    def start(self) -> WordSearch:
        """See Filter."""
        return WordSearch(self._words, self._patterns, self._num_held, self.label)


class WordSearch:
    """The search of a WordFilter in one text, see OutputFilter. The result does not depend on how the text was cut."""

    def __init__(self, words: _Words, patterns: list[re.Pattern[str]], num_held: int, label: str) -> None:
        self._words, self._patterns, self._num_held, self._label = words, patterns, num_held, label
        self._text, self._num_clear = "", 0

    def push(self, text: str, is_last: bool) -> Verdict:
        """See OutputFilter."""
        self._text += text
        limit, label = self._before_patterns(is_last)
        for start in range(self._num_clear, limit):
            begins = self._words.begins(self._text, start, is_last)
            if begins is not False:
                limit, label = start, self._label if begins else None
                break
        self._num_clear = limit
        return Verdict(limit, label)

    def _before_patterns(self, is_last: bool) -> tuple[int, str | None]:
        """Up to where no pattern begins to match, and the label if one does there."""
        known = len(self._text) - (0 if is_last else self._num_held)
        limit, label = max(known, self._num_clear), None
        for pattern in self._patterns:
            match = pattern.search(self._text, self._num_clear)
            if match is not None and match.start() < limit:
                limit, label = match.start(), self._label
        return limit, label


class _Words:
    """A list of words: all their beginnings, and whether each is a word."""

    def __init__(self, words: list[str], fold: Callable[[str], str], whole: bool) -> None:
        self._fold, self._whole = fold, whole
        self._beginnings: dict[str, bool] = {}
        for word in map(fold, words):
            for length in range(1, len(word)):
                self._beginnings.setdefault(word[:length], False)
            self._beginnings[word] = True

    def __bool__(self) -> bool:
        return bool(self._beginnings)

    def begins(self, text: str, start: int, is_last: bool) -> bool | None:
        """Whether a word begins here; None if that depends on what follows."""
        if self._whole and _is_inside(text, start):
            return False
        said = ""
        for end in range(start + 1, len(text) + 1):
            said += self._fold(text[end - 1])
            is_word = self._beginnings.get(said)
            if is_word is None:
                return False
            if is_word and not (self._whole and end == len(text) and not is_last) and not self._goes_on(text, end):
                return True
        return False if is_last else None

    def _goes_on(self, text: str, end: int) -> bool:
        return self._whole and _is_inside(text, end)


def _is_inside(text: str, place: int) -> bool:
    """Whether a place lies between two characters of one word."""
    return 0 < place < len(text) and _is_of_word(text[place - 1]) and _is_of_word(text[place])


def _is_of_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _is_pattern(line: str) -> bool:
    return len(line) > 2 and line.startswith("/") and line.endswith("/")


def _window(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidParams(f"window is {value!r}: give a number of characters, at least 1")
    return value


def _strings(name: str, values: object) -> list[str]:
    strings = [""] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    if not all(isinstance(each, str) and each for each in strings):
        raise InvalidParams(f"{name} is {values!r:.80}: give a list of strings that are not empty")
    return strings


def _check_label(label: object) -> None:
    if not isinstance(label, str) or not label:
        raise InvalidParams(f"label is {label!r:.40}: give some text, by which a refusal is told")


def _compiled(pattern: str, flags: re.RegexFlag) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidParams(f"the pattern {pattern!r:.80} is no regular expression: {error}") from None
    if compiled.search(""):
        raise InvalidParams(f"the pattern {pattern!r:.80} matches the empty text: have it match a character at least")
    return compiled

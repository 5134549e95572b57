"""Text from tokens, one at a time: never half a character, never the beginning of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Protocol

from bitnet_inference.errors import InvalidParams
from bitnet_inference.text.pieces import Decoding


class Pieces(Protocol):
    """What detokenising asks of a tokenizer."""

    decoding: Decoding

    def piece(self, token_id: int, skip_special_tokens: bool, opening: bool) -> bytes | str | None:
        """What a token adds to the text; None for nothing at all."""
        ...


class Detokenizer:
    """Puts text together token by token.

    The pieces and the end, joined, are exactly what decoding all tokens at once gives, up to the first stop string.
    `opening` is False where the tokens go on with a text, so that a space in front of them stays.
    """

    def __init__(
        self, pieces: Pieces, stop: Sequence[str] = (), skip_special_tokens: bool = True, opening: bool = True
    ) -> None:
        self._arguments = (pieces, stop, skip_special_tokens, opening)
        self._pieces = pieces
        self._skip_special_tokens = skip_special_tokens
        self._opening = opening
        decoding = pieces.decoding
        self._text = _ByteText() if decoding.byte_level else _MarkedText(decoding, opening)
        self._stops = StopStrings(stop)
        self.may_stop = bool(stop)

    def anew(self, token_ids: Iterable[int]) -> Detokenizer:
        """Another one that has got these tokens since its beginning."""
        other = Detokenizer(*self._arguments)
        for token_id in token_ids:
            other.push(token_id)
        return other

    def after(self, token_id: int) -> Detokenizer:
        """One that has got this token too; this one has not. Their states hold nothing that changes in place."""
        other = copy(self)
        other._text, other._stops = copy(self._text), copy(self._stops)
        other.push(token_id)
        return other

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text; None while there was none."""
        return self._stops.stopped

    @property
    def num_held(self) -> int:
        """At most so many characters of the tokens so far are still to come; one that is not whole counts as one."""
        return self._stops.num_held + self._text.num_held

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before."""
        piece = self._pieces.piece(token_id, self._skip_special_tokens, self._opening)
        if piece is None:
            return ""
        self._opening = False
        return self._stops.push(self._text.push(piece))

    def finish(self) -> str:
        """The text that was held back: half characters as U+FFFD, half stop strings as they are."""
        return self._stops.push(self._text.finish()) + self._stops.finish()


class StopStrings:
    """Passes text on up to the first stop string. The one that is complete first counts; of several, the longest.

    Keeps back exactly the longest end of the text that begins a stop string, found character by character as Knuth,
    Morris and Pratt do, so that the result does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidParams("a stop string is empty: leave it out")
        self._stops = list(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._by_first: dict[str, list[int]] = {}  # so that a character costs what the stops cost that it may concern
        for index, stop in enumerate(self._stops):
            self._by_first.setdefault(stop[0], []).append(index)
        self._matched: dict[int, int] = {}  # index of a stop: how much of it the text ends with, where that is any
        self._held = ""
        self.stopped: str | None = None

    @property
    def num_held(self) -> int:
        """How many characters are held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """The text that cannot be part of a stop string."""
        if not self._stops or self.stopped is not None:
            return text if self.stopped is None else ""
        whole = self._held + text
        for index, char in enumerate(text, start=len(self._held) + 1):
            found = self._advance(char)
            if found is not None:
                self.stopped, self._held = found, ""
                return whole[: index - len(found)]
        split = len(whole) - max(self._matched.values(), default=0)
        self._held = whole[split:]
        return whole[:split]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        rest, self._held = self._held, ""
        self._matched = {}
        return rest

    def _advance(self, char: str) -> str | None:
        found, matched = None, dict[int, int]()
        for index in {*self._matched, *self._by_first.get(char, ())}:
            stop, borders, length = self._stops[index], self._borders[index], self._matched.get(index, 0)
            while length and stop[length] != char:
                length = borders[length]
            length += stop[length] == char
            if length:
                matched[index] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        self._matched = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each length n, how much of the string's beginning also ends its first n characters (not all of them)."""
    borders = [0, 0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length]
        borders.append(length + (stop[length] == char))
    return borders


class _ByteText:
    """Bytes to text: what is no UTF-8 becomes U+FFFD, a character waits until it is whole."""

    def __init__(self) -> None:
        self._rest = b""  # of a character that is not whole

    @property
    def num_held(self) -> int:
        return 1 if self._rest else 0

    def push(self, piece: bytes | str) -> str:
        assert isinstance(piece, bytes)
        data = self._rest + piece
        text, num_used = codecs.utf_8_decode(data, "replace")
        self._rest = data[num_used:]
        return text

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class _MarkedText:
    """Pieces of text with runs of bytes between them; a run is text as a whole, or as many U+FFFD as it has bytes."""

    def __init__(self, decoding: Decoding, opening: bool) -> None:
        self._joiner = decoding.joiner
        self._joins = not opening
        self._strip = decoding.strip
        self._num_strips = decoding.num_strips if opening else 0
        self._run = b""

    @property
    def num_held(self) -> int:
        return len(self._run)

    def push(self, piece: bytes | str) -> str:
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        text = self._joiner + piece if self._joins else piece
        self._joins = True
        return self._stripped(self._take_run() + text)

    def finish(self) -> str:
        return self._stripped(self._take_run())

    def _take_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _stripped(self, text: str) -> str:
        while text and self._num_strips:
            if text[0] != self._strip:
                self._num_strips = 0
                break
            text = text[1:]
            self._num_strips -= 1
        return text

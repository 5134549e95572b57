"""Prompt lookup: what followed the last few tokens where they stood before is likely to follow them again."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet_inference.engine.request import Request
from bitnet_inference.engine.speculative import Draft

SIZES = (4, 2)  # tokens that must be equal; the longer is looked for first, and more often right


class _Index:
    """Where a request's tokens stand in its own text."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # of some tokens: the position behind their last occurrence
        self._num_read = 0

    def read(self, tokens: list[int], num_tokens: int) -> None:
        """Note what stands before each of the tokens that are new; `tokens` are the last ones of `num_tokens`."""
        offset = num_tokens - len(tokens)
        for position in range(max(self._num_read, min(SIZES)), num_tokens):
            for size in SIZES:
                if size <= position:
                    self._places[tuple(tokens[position - offset - size : position - offset])] = position
        self._num_read = num_tokens

    def num_needed(self, num_tokens: int) -> int:
        """How many of the last tokens `read` and `find` look at."""
        return min(num_tokens, num_tokens - self._num_read + max(SIZES))

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The position behind the last occurrence of the last tokens, and how many were equal; (0, 0) for none."""
        for size in SIZES:
            place = self._places.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if place is not None:
                return place, size
        return 0, 0


class LookupDrafter:
    """Guesses from each request's own prompt and output (after Saxena, Prompt Lookup Decoding, 2023)."""

    costs_time = False

    def __init__(self) -> None:
        self._indices: dict[Request, _Index] = {}

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See Drafter; the kind is how many tokens were equal."""
        return [self._draft(request, num_tokens) for request, num_tokens in wanted]

    def forget(self, request: Request) -> None:
        """See Drafter."""
        self._indices.pop(request, None)

    def _draft(self, request: Request, num_tokens: int) -> Draft:
        index = self._indices.setdefault(request, _Index())
        known = request.tokens.view
        newest = known[len(known) - index.num_needed(len(known)) :].tolist()
        index.read(newest, len(known))
        place, size = index.find(newest)
        if not place:
            return Draft(())
        # Where the text repeats itself with a short period, the guess goes round in it.
        found = known[place : place + num_tokens].tolist()
        return Draft([found[at % len(found)] for at in range(num_tokens)], size)

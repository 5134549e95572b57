"""A JSONL file, an object a line, that is read twice: once to check all lines and once to use them."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Generic, TypeVar

from bitnet_inference.errors import FormatError, InvalidParams

MAX_LINE_BYTES = 8 << 20
CURE = "correct the line"

Line = TypeVar("Line")


class LineFile(Generic[Line]):
    """A file all of whose lines are sound. `fingerprints` has a hash of each line, 0 for an empty one.

    Raises InvalidParams for a file that cannot be read twice, FormatError for a line that is wrong.
    """

    def __init__(
        self,
        path: Path,
        read: Callable[[Path, int, bytes], Line],
        check: Callable[[Path, Iterator[Line]], None] = lambda path, lines: None,
    ) -> None:
        """`read` makes a line of its number, counted from 1, and its bytes; `check` may see how lines go together."""
        self.path, self._read = path, read
        if path.exists() and not path.is_file():
            raise InvalidParams(f"{path} is no file: write the prompts into one, because it is read twice")
        self.fingerprints = array("Q")
        unseen = self._first_time()
        check(path, unseen)
        deque(unseen, maxlen=0)
        self.num_prompts = len(self.fingerprints) - self.fingerprints.count(0)
        if not self.num_prompts:
            raise InvalidParams(f'{path} has no prompts: write a line {{"prompt": "..."}} for each')

    def lines(self, is_wanted: Callable[[int], bool]) -> Iterator[Line]:
        """The lines whose numbers are wanted. Raises FormatError where the file has changed since it was checked."""
        number = 0
        for number, data in numbered_lines(self.path):
            if number > len(self.fingerprints):
                return  # for the next run
            if fingerprint(data) != self.fingerprints[number - 1]:
                raise FormatError(self.path, f"line {number}", "has changed while the file was used: start again")
            if self.fingerprints[number - 1] and is_wanted(number):
                yield self._read(self.path, number, data)
        if number < len(self.fingerprints):
            raise FormatError(self.path, f"line {number + 1}", "has gone while the file was used: start again")

    def _first_time(self) -> Iterator[Line]:
        for number, data in numbered_lines(self.path):
            self.fingerprints.append(fingerprint(data))
            if self.fingerprints[-1]:
                yield self._read(self.path, number, data)


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, the first is 1. Raises FormatError for one that is too long."""
    with _open(path) as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                why = f"has more than {MAX_LINE_BYTES} bytes: put every prompt on a line of its own"
                raise FormatError(path, f"line {number}", why)
            yield number, data.strip()


def fingerprint(data: bytes) -> int:
    """A hash in 64 bits, 0 for nothing alone."""
    return int.from_bytes(blake2b(data, digest_size=8).digest()) or 1 if data else 0


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror}") from None

"""JSON from a stranger: small, plain, and every value asked for by the kind that it must have."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError
from bitnet_inference.json_objects import parse_object as parse_object  # readers of formats take them from here
from bitnet_inference.json_objects import shown as shown

MAX_JSON_BYTES = 8 << 20  # a header of 60,000 tensors; what Python makes of it stays below 200 MB
MIN_FLOAT, MAX_FLOAT = 1e-37, 1e37
_MAX_NAMED = 5


def file_size(path: Path) -> int:
    """The bytes of a regular file, links followed; raises FormatError for what is missing or is no file."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise FormatError(path, "", f"cannot be read ({_reason(error)}): download the model again") from error
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(path, "", "is not a regular file: replace it by the file itself")
    return status.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole of a regular file; raises FormatError for one that cannot be read or is over `limit` bytes."""
    if file_size(path) > limit:
        raise FormatError(path, "", f"is larger than {limit} bytes: this is not the file that its name says")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(path, "", f"cannot be read ({_reason(error)}): check its permissions") from error


def read_json(path: Path) -> Fields:
    """The JSON object in a file; raises FormatError for anything else."""
    return Fields(path, parse_object(read_bytes(path, MAX_JSON_BYTES), path, ""))


def shown_some(names: Sequence[str]) -> str:
    """Names for an error message, the first five."""
    return ", ".join(map(shown, names[:_MAX_NAMED])) + (", ..." if len(names) > _MAX_NAMED else "")


class Fields:
    """A JSON object and where it stands. A null counts as absent; every mistake is a FormatError with key and cure."""

    def __init__(self, path: Path, values: dict[str, Any], where: str = "") -> None:
        """`where` goes before the key in errors: "rope_scaling." for an object within the file's own."""
        self.path, self.values, self._where = path, values, where

    def __contains__(self, key: str) -> bool:
        """Whether the key stands there with a value other than null."""
        return self.values.get(key) is not None

    def wrong(self, key: str, why: str) -> FormatError:
        """The error for a key: its value and what it should be."""
        return FormatError(self.path, self._where + key, f"{shown(self.values.get(key))} {why}")

    def without(self, key: str) -> Fields:
        """The same object without a key."""
        return Fields(self.path, {name: self.values[name] for name in self.values if name != key}, self._where)

    def size(self, key: str, at_most: int, default: int | None = None) -> int:
        """A whole number from 1 to `at_most`."""
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= at_most:
            raise self.wrong(key, f"is not a whole number from 1 to {at_most}: correct it")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, which is one in float32 too."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not MIN_FLOAT < value < MAX_FLOAT:
            raise self.wrong(key, "is not a finite number above 0: correct it")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "is neither true nor false: correct it")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "is not a string: correct it")
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None where absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "is not a list of strings: correct it")
        return tuple(value)

    def ids(self, key: str, default: int | None = None) -> tuple[int, ...]:
        """A token id or a list of them, as a tuple; without those below 0, which mean "none", as null does.

        The default stands for what the file leaves out.
        """
        value = self.values.get(key, default)
        value = [] if value is None else value
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int for item in items):
            raise self.wrong(key, "is neither a token id nor a list of them: correct it")
        return tuple(item for item in items if item >= 0)

    def section(self, key: str) -> Fields | None:
        """The object under a key; None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "is not an object: correct it")
        return Fields(self.path, value, f"{self._where}{key}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise FormatError(self.path, self._where + key, "is missing: add it")
        return default


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__

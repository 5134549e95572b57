"""Answers in a JSONL file: which there are already, and how further ones get there whole."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.json_objects import json_line

MAX_LINE_BYTES = 1 << 28  # 100,000 tokens with 20 log-probabilities each
_CURE = "give another output file"
_OWN_LINE = re.compile(
    rb'\{"line": ?(?P<line>\d{1,18}), ?"key": ?"(?P<fingerprint>[0-9a-f]{16})-(?P<settings>[0-9a-f]{16})", ?'
    rb'"(?:(?P<failed>error")|\w+")[^\n]*\}\n'
)


class Key(NamedTuple):
    """What an answer belongs to: the number of a line in the input, a hash of that line, and one of the settings."""

    line: int
    fingerprint: int
    settings: int


@dataclass(frozen=True)
class AnswerForm:
    """How an answer looks as a line.

    Each begins with `start` and matches `pattern`, whose groups are what a Key has, and `failed`, which is there where
    no answer was found. `keyed` puts a key into one, so that it does; `has_failed` says of one whether it will match.
    """

    start: bytes
    pattern: re.Pattern[bytes]
    keyed: Callable[[Key, Mapping[str, Any]], Mapping[str, Any]]
    has_failed: Callable[[Mapping[str, Any]], bool]


def _own_keyed(key: Key, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"line": key.line, "key": f"{key.fingerprint:016x}-{key.settings:016x}", **answer}


# {"line": number in the input, "key": "fingerprint of that line-settings", and one that failed goes on with "error".
OWN_ANSWERS = AnswerForm(b'{"line":', _OWN_LINE, _own_keyed, lambda answer: "error" in answer)


class AnswerFile:
    """Answers to the lines of an input, which this object alone writes, a whole line at a time.

    `num_done` and `num_errors` count the lines that are there and stay. Nothing is changed before `begin`. Raises
    InvalidParams where the file cannot be written or somebody else writes it, FormatError where a line is no answer to
    this input.
    """

    def __init__(self, path: Path, fingerprints: array[int], form: AnswerForm, *, retry_errors: bool) -> None:
        """`fingerprints`: of all lines of the input. `retry_errors`: lines with errors do not count, and go."""
        is_new, self._is_new = not path.exists(), False
        self._files = [_open(path)]  # the last is written; those that it replaces keep their locks
        self.path, self._form = path.resolve(), form
        self._fingerprints, self._retry_errors = fingerprints, retry_errors
        self._has_answer = bytearray(len(fingerprints))
        self._settings: set[int] = set()
        self._num_bytes = 0  # of whole lines
        self._num_stale = 0  # lines that will go
        self.num_done = self.num_errors = 0
        try:
            _lock(self._files[0], path)
            self._is_new = is_new  # not before: another process may have made it meanwhile
            for number, data in enumerate(self._whole_lines(), 1):
                self._note(number, data)
                self._num_bytes += len(data)
        except BaseException:
            self.close()
            raise

    def lacks(self, number: int) -> bool:
        """Whether a line of the input, counted from 1, has no answer that counts."""
        return not self._has_answer[number - 1]

    def begin(self, settings: int) -> None:
        """Make the file ready for further answers with these settings, a hash; raises FormatError for others in it.

        A last line that was not written to its end is cut off, and what a power cut leaves there: zeros.
        """
        if self._settings - {settings}:
            why = "was written with other sampling options or another model: give the same, or another output file"
            raise FormatError(self.path, "", why)
        if self._num_stale:
            try:
                self._drop_errors()
            except OSError as error:
                cure = "give a folder with room that you may write to, or --keep-errors (retry_errors=False)"
                why = f"cannot be written anew, without its errors ({error.strerror})"
                raise InvalidParams(f"{self.path} {why}: {cure}") from None
        os.ftruncate(self._files[-1], self._num_bytes)
        os.lseek(self._files[-1], 0, os.SEEK_END)
        self._settings = {settings}

    def write(self, number: int, answer: Mapping[str, Any]) -> None:
        """Add the answer to a line of the input."""
        (settings,) = self._settings
        key = Key(number, self._fingerprints[number - 1], settings)
        text = json_line(self._form.keyed(key, answer))
        self._append(text.encode("utf-8", "backslashreplace") + b"\n")  # half a surrogate pair becomes \\udxxx
        self._has_answer[number - 1] = True
        self.num_done += 1
        self.num_errors += self._form.has_failed(answer)

    def close(self) -> None:
        """Let others write the file. One in which nothing stands, and that was not there before, goes."""
        if self._files and self._is_new and not os.fstat(self._files[-1]).st_size:
            self.path.unlink(missing_ok=True)
        while self._files:
            os.close(self._files.pop())

    def _whole_lines(self) -> Iterator[bytes]:
        os.lseek(self._files[0], 0, os.SEEK_SET)
        with open(self._files[0], "rb", closefd=False) as file:
            while data := file.readline(MAX_LINE_BYTES + 1):
                if data.endswith(b"\n"):
                    yield data
                    continue
                begun = data if file.tell() == len(data) else data.rstrip(b"\0")
                if len(data) > MAX_LINE_BYTES or not begun.startswith(self._form.start[: len(begun)]):
                    raise FormatError(self.path, "the last line", f"is no answer: {_CURE}")

    def _note(self, number: int, data: bytes) -> None:
        where, match = f"line {number}", self._form.pattern.fullmatch(data)
        if match is None:
            raise FormatError(self.path, where, f"is no answer: {_CURE}")
        line, fingerprint = int(match["line"]), int(match["fingerprint"], 16)
        if not 1 <= line <= len(self._fingerprints) or self._fingerprints[line - 1] != fingerprint:
            raise FormatError(self.path, where, f"answers a line {line} that the input does not have: {_CURE}")
        if self._has_answer[line - 1]:
            raise FormatError(self.path, where, f"answers line {line} once more: remove it")
        self._settings.add(int(match["settings"], 16))
        is_error = match["failed"] is not None
        if is_error and self._retry_errors:
            self._num_stale += 1
            return
        self._has_answer[line - 1] = True
        self.num_done += 1
        self.num_errors += is_error

    def _drop_errors(self) -> None:
        """Put a file without them in the place of this one, so that at any time one of the two is there."""
        file, name = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)
        self._files.append(file)
        before = self._num_bytes, self._num_stale
        self._num_bytes = self._num_stale = 0
        try:
            _lock(file, Path(name))
            for data in self._whole_lines():
                match = self._form.pattern.fullmatch(data)
                if match and match["failed"] is None:
                    self._append(data)
            os.fsync(file)
            shutil.copymode(self.path, name)
            os.replace(name, self.path)
        except BaseException:
            os.close(self._files.pop())
            self._num_bytes, self._num_stale = before  # so that `begin` may try again
            os.unlink(name)
            raise

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._files[-1], left) :]
        except OSError as error:
            cure = "free space, then run the same again, which goes on behind the answers that are there"
            raise InvalidParams(f"{self.path} cannot be written: {error.strerror}: {cure}") from error
        self._num_bytes += len(data)


def _open(path: Path) -> int:
    try:
        if path.exists() and not path.is_file():
            raise InvalidParams(f"{path} cannot be written: it is no file: give another output file")
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        cure = f"make the folder {path.parent}" if not path.parent.is_dir() else "give a file that you may write"
        raise InvalidParams(f"{path} cannot be written ({error.strerror}): {cure}") from None


def _lock(file: int, path: Path) -> None:
    """Raises InvalidParams where another process has it, or has just put another file in its place."""
    with suppress(ImportError):  # there are no such locks on Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file), os.stat(path))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError:
            is_ours = True  # a file system without locks
        if not is_ours:
            raise InvalidParams(f"{path} is written by another process: wait for it, or {_CURE}")

"""API keys: kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.config import from_utf8
from bitnet_inference.errors import InvalidParams

MAX_KEY_FILE_BYTES = 1 << 20
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_NAME = re.compile(r"[\w.@-]{1,64}")


@dataclass(frozen=True)
class Key:
    """Whose it is, as logs show it, and the SHA-256 of what they send."""

    name: str
    digest: bytes


def read_keys(given: Iterable[str], file: Path | None = None) -> list[Key]:
    """Keys as they are given, plain or as "sha256:HEX", and those of a file.

    A file has a line a key, NAME KEY, the key plain or hashed; empty lines and those that begin with # are skipped.
    One without a key is refused: who names a file does not want everybody to come in.
    Raises InvalidParams, without showing a key.
    """
    keys = [Key(f"key{number}", _digest(text, f"key {number}")) for number, text in enumerate(given, 1)]
    keys += [] if file is None else _keys_of(file)
    for taken in ({each.name for each in keys}, {each.digest for each in keys}):
        if len(taken) < len(keys):
            raise InvalidParams("two API keys are the same, or have one name: leave one out")
    return keys


def find_key(keys: Sequence[Key], sent: bytes) -> Key | None:
    """The key that was sent, in UTF-8, if it is one of these. Takes as long for any that is wrong."""
    digest, found = hashlib.sha256(sent).digest(), None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def _keys_of(file: Path) -> list[Key]:
    found = [
        _key(line.split(), f"{file}: line {number}")
        for number, line in enumerate(_lines(file), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not found:
        raise InvalidParams(f"{file} holds no key: write lines of NAME KEY, or leave the file out")
    return found


def _lines(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidParams(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise InvalidParams(f"{file}: more than {MAX_KEY_FILE_BYTES} bytes: give a file of keys")
    return from_utf8(f"{file}", content).removeprefix("\ufeff").splitlines()  # Windows' editors put it there


def _key(words: Sequence[str], place: str) -> Key:
    if len(words) != 2 or not _NAME.fullmatch(words[0]):
        raise InvalidParams(f"{place} is no key: write NAME KEY, or NAME sha256:HEX")
    return Key(words[0], _digest(words[1], place))


def _digest(text: str, place: str) -> bytes:
    if found := _HASHED.fullmatch(text):
        return bytes.fromhex(found[1])
    if len(text) < 8 or text.startswith("sha256:"):
        raise InvalidParams(f"{place}: a key has at least 8 characters, a hash is sha256: and 64 hexadecimal digits")
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()

"""What the `tokenizers` library does not survive: looked for in a tokenizer.json before it reads that."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from bitnet_inference.errors import Unsupported

MAX_PATTERN = 4096  # characters; one that ignores case takes a minute and gigabytes at some times as many
MAX_TOKEN = 1 << 14  # characters of one of a Unigram model, whose tree of tokens is taken down by a recursion
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")  # which nobody writes who does not hide a name


def check_untaken(tokenizer_json: bytes) -> None:
    """Raises Unsupported for what is too long, and for a charsmap that claims more than it has."""
    if not (
        _longest_string(tokenizer_json) > MAX_PATTERN
        or b"precompiled_charsmap" in tokenizer_json
        or _ESCAPED_ASCII.search(tokenizer_json)
    ):
        return  # so it is with nearly all, and looking closer takes as long as reading them does
    try:
        content = json.loads(tokenizer_json)
    except (ValueError, RecursionError):  # which the library tells better
        return
    if isinstance(content, dict):
        for step in _objects([content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]):
            _check_step(step)
        _check_length("token", _tokens(content.get("model")), MAX_TOKEN)


def _longest_string(text: bytes) -> int:
    """No string is longer; a quotation mark behind a backslash counts as none."""
    chars = np.frombuffer(text, np.uint8)
    is_mark = chars == ord('"')
    is_mark[1:] &= chars[:-1] != ord("\\")
    return int(np.max(np.diff(np.flatnonzero(is_mark), prepend=0, append=len(text))))


def _objects(values: list[Any]) -> Iterator[dict[str, Any]]:
    while values:
        value = values.pop()
        if isinstance(value, dict):
            yield value
        if isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value


def _check_step(step: dict[str, Any]) -> None:
    _check_length("pattern", [step.get("Regex")], MAX_PATTERN)
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        try:
            data = base64.b64decode(charsmap)
        except ValueError:
            return
        if int.from_bytes(data[:4], "little") > len(data):
            raise Unsupported(f"a charsmap of {len(data)} bytes claims more: download the file again")


def _check_length(what: str, strings: list[Any], most: int) -> None:
    if (length := max((len(each) for each in strings if isinstance(each, str)), default=0)) > most:
        raise Unsupported(f"a {what} has {length} characters, at most {most} are read: use another model")


def _tokens(model: object) -> list[Any]:
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return [entry[0] for entry in vocab if isinstance(entry, list) and entry] if isinstance(vocab, list) else []

"""The text files of a model as two that stand within a file of weights, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.json_objects import parse_object
from bitnet_inference.text.folder import (
    MAX_CONFIG_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    WORDLESS,
    TextFiles,
)

_TOKENIZER, _REST = "tokenizer.json", "text.json"
_AGAIN = "convert the model again"
_KINDS = {"named": dict, "templates": dict, "generation": dict, "add_bos": bool | None, "add_eos": bool | None}


def to_embedded(files: TextFiles) -> dict[str, bytes]:
    """Two files by name: tokenizer.json byte for byte, where there is one, and everything else as one JSON object.

    Raises Unsupported for more than is read again.
    """
    values = {name: value for name, value in asdict(files).items() if name in _KINDS}
    rest = json.dumps(values, sort_keys=True).encode()
    if len(rest) > MAX_CONFIG_BYTES:
        raise Unsupported(f"{files.path}: chat templates and the like have {len(rest)} bytes: remove some")
    return ({_TOKENIZER: files.tokenizer_json} if files.has_words else {}) | {_REST: rest}


def from_embedded(path: Path, read: Callable[[str, int], memoryview | None]) -> TextFiles:
    """What stands in a file of weights at `path`; no words where there is no tokenizer.json.

    Raises FormatError for what is missing beside that, too large or wrong.

    `read(name, max_bytes)` gives a file, None where there is none, and raises FormatError for a larger one.
    """
    words, others = read(_TOKENIZER, MAX_TOKENIZER_BYTES), read(_REST, MAX_CONFIG_BYTES)
    if others is None:
        raise FormatError(path, _REST, f"is missing: {_AGAIN}")
    rest = parse_object(bytes(others), path, _REST, _AGAIN)
    if set(rest) != set(_KINDS) or not all(isinstance(rest[name], kind) for name, kind in _KINDS.items()):
        raise FormatError(path, _REST, f"has not exactly {', '.join(_KINDS)}, each of its kind: {_AGAIN}")
    texts = (*rest["named"].values(), *rest["templates"].values())
    if not all(isinstance(text, str) and len(text) <= MAX_TEMPLATE_BYTES for text in texts):
        raise FormatError(path, _REST, f"a token or a template is no string of at most 1 MiB: {_AGAIN}")
    return TextFiles(path=path, tokenizer_json=WORDLESS if words is None else bytes(words), **rest)

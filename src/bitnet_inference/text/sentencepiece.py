"""SentencePiece's tokenizer.model, as Llama 2 has it, turned into what the files of a folder would say.

The file is a protobuf message: pieces with a score and a type, how the model was trained, how texts are cleaned.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.text.folder import TextFiles, read_bytes, read_json, read_text_files
from bitnet_inference.text.llama_class import with_space
from bitnet_inference.text.untaken import MAX_PATTERN
from bitnet_inference.text.vocab import USER_DEFINED, text_files

_FILE = "tokenizer.model"
_MAX_BYTES, _MAX_PIECES = 8 << 20, 1 << 19  # Gemma's, with 262,144 pieces, has 4.7 MB
_MAX_OWN = 4096  # user-defined pieces that patterns tell
_BPE = 2  # of trainer_spec.model_type
_RANK = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")  # a line of tiktoken's file
_AGAIN = "download the file again"
_OTHERWISE = "put the tokenizer.json of the model beside it"
Message = dict[int, Any]  # the last value of each field: a number, or bytes


def is_sentencepiece_folder(path: str | Path) -> bool:
    """Whether a folder has SentencePiece's file in place of a tokenizer.json."""
    folder = Path(path)
    return not os.path.lexists(folder / "tokenizer.json") and (folder / _FILE).is_file()


def read_sentencepiece_files(path: str | Path) -> TextFiles:
    """What the text files of such a folder say. Raises FormatError, and Unsupported for models other than BPE."""
    file = Path(path) / _FILE
    data = read_bytes(file, _MAX_BYTES)
    if _RANK.match(data):
        raise Unsupported(f"{file}: a list of ranks, as tiktoken reads it, without the special tokens: {_OTHERWISE}")
    try:
        metadata = _metadata(file, data)
    except (ValueError, TypeError, struct.error) as error:  # a number where bytes should stand, and the other way
        raise FormatError(file, "", f"this is no SentencePiece model ({error}): {_AGAIN}") from None
    config = read_json(file.with_name("tokenizer_config.json"))
    if config.get("add_prefix_space") is False:
        metadata["tokenizer.ggml.add_space_prefix"] = False
    files = text_files(file, metadata)
    if metadata["tokenizer.ggml.add_space_prefix"]:
        files = _with_first_prefix(files) if config.get("legacy") is False else _with_whole_texts(files)
    return read_text_files(path, files)


def _with_first_prefix(files: TextFiles) -> TextFiles:
    """As a LlamaTokenizer that is not `legacy`: a space stands before a text, and not behind its special tokens."""
    spec = with_space(json.loads(files.tokenizer_json), "first")
    return replace(files, tokenizer_json=json.dumps(spec).encode())


def _with_whole_texts(files: TextFiles) -> TextFiles:
    """As the library: a space stands before a text, and not behind each user-defined piece in it.

    Such a piece is looked for once the space is there; the piece itself gets none, as the file's own words are changed
    like texts.
    """
    spec = json.loads(files.tokenizer_json)
    own = [each for each in spec["added_tokens"] if not each["special"]]
    if not 0 < len(own) <= _MAX_OWN:
        return files
    for each in own:
        each["normalized"] = True
    normalizers = spec["normalizer"]["normalizers"]
    normalizers[1:1] = [
        {"type": "Replace", "pattern": {"Regex": rf"\A▁(?=(?:{pieces})\z)"}, "content": ""}
        for pieces in _alternatives([re.escape(each["content"]) for each in own])
    ]
    return replace(files, tokenizer_json=json.dumps(spec).encode())


def _alternatives(patterns: list[str]) -> list[str]:
    """All of them, in as few patterns as have no more characters than a tokenizer.json may have in one."""
    found = [""]
    for pattern in patterns:
        if found[-1] and len(found[-1]) + len(pattern) > MAX_PATTERN - 32:
            found.append("")
        found[-1] += f"{'|' * bool(found[-1])}{pattern}"
    return found


def _metadata(file: Path, data: bytes) -> dict[str, Any]:
    """The tokenizer as a GGUF file would have it."""
    found = (_piece(_message(value)) for field, value in _fields(data) if field == 1)
    pieces = list(islice(found, _MAX_PIECES + 1))
    if not 0 < len(pieces) <= _MAX_PIECES:
        raise ValueError(f"there are no pieces, or more than {_MAX_PIECES}")
    scores = [score for _, score, _ in pieces]
    model = _message(data)
    trainer, cleaning = _message(model.get(2, b"")), _message(model.get(3, b""))
    if trainer.get(3, 1) != _BPE:
        raise Unsupported(f"{file}: a SentencePiece model of another kind than BPE: {_OTHERWISE}")
    if trainer.get(24):
        raise Unsupported(f"{file}: a SentencePiece model with spaces at the end of words: {_OTHERWISE}")
    if cleaning.get(2) or cleaning.get(6) or cleaning.get(4, 1) or not cleaning.get(5, 1):
        raise Unsupported(f"{file}: a SentencePiece model that changes texts before it cuts them: {_OTHERWISE}")
    if not all(map(math.isfinite, scores)):
        raise ValueError("a score is NaN or infinite")
    roles = (("unknown", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("padding", 43, -1))
    metadata = {
        "model": "llama",
        "tokens": [text for text, _, _ in pieces],
        "scores": np.array(scores),
        "token_type": np.array([kind for _, _, kind in pieces]),
        "add_space_prefix": bool(cleaning.get(3, 1)),
        **{f"{role}_token_id": int(trainer.get(field, default)) for role, field, default in roles},
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _piece(message: Message) -> tuple[str, float, int]:
    """Its text, score and type."""
    if not message.get(1):
        raise ValueError("a piece has no text")
    text, kind = str(message[1], "utf-8"), int(message.get(3, 1))
    if kind == USER_DEFINED:  # looked for in the text as it stands, before its spaces become marks
        text = text.replace("▁", " ")
    return text, struct.unpack("<f", message.get(2, bytes(4)))[0], kind


def _message(data: Any) -> Message:
    return dict(_fields(data))


def _fields(data: Any) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in order; raises ValueError where it breaks."""
    if not isinstance(data, bytes):
        raise TypeError("a number stands where a message should")
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind, value = key & 7, 0
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 2:
            size, at = _varint(data, at)
        elif not size:
            raise ValueError(f"a field of kind {kind} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"it ends within a field at byte {at}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the lowest first; two's complement of 64 bits."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            value &= (1 << 64) - 1
            return (value - (1 << 64) if value >> 63 else value), at
    raise ValueError(f"a number without an end at byte {at}")

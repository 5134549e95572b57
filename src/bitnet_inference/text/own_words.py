"""Tokenizers whose added tokens in <> are words of a text, as <tool_call> and <think> are for Qwen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bitnet_inference.text.pieces import spelled
from bitnet_inference.text.tokenizer import Tokenizer

_SPACE = "▁"  # of SentencePiece


def with_own_words(tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """A tokenizer.json of the same tokens, with these words among the model's own; and the words.

    llguidance takes all that are added in <> for special tokens, which no text spells, and others for their names.
    """
    tokenizer_json = tokenizer.to_json()
    spec: dict[str, Any] = json.loads(tokenizer_json)
    vocab, added = spec["model"].get("vocab"), spec.get("added_tokens") or []
    texts = {each["id"]: text for each in added if (text := _misread(tokenizer, each)) is not None}
    if not texts or not isinstance(vocab, dict):
        return tokenizer_json, []
    is_of_bytes = '"ByteLevel"' in json.dumps(spec.get("decoder"))
    for token_id, text in texts.items():
        vocab[spelled(text.encode()) if is_of_bytes else text.replace(" ", _SPACE)] = token_id
    spec["added_tokens"] = [each for each in added if each["id"] not in texts]
    return json.dumps(spec), list(texts.values())


def _misread(tokenizer: Tokenizer, token: Mapping[str, Any]) -> str | None:
    """What an added token adds to a text, where the library reads something else: some bring a space in front."""
    piece, name = tokenizer.piece(token["id"]), token["content"]
    text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
    is_misread = not token["special"] and (text != name or name[:1] + name[-1:] == "<>")
    return text if is_misread else None

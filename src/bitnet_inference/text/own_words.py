"""Tokenizers in words that llguidance reads rightly: decoders, and added tokens in <> that are words of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from bitnet_inference.text.pieces import Decoding, is_byte_token, spelled
from bitnet_inference.text.tokenizer import Tokenizer

_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_FALLBACK: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]


def readable_json(tokenizer: Tokenizer) -> str:
    """A tokenizer.json of the same tokens, whose decoder llguidance (1.9.1) reads as it is meant.

    It knows ByteLevel alone, and ByteFallback with perhaps a Replace, whatever else there may be: not Metaspace, with
    which it refused a tokenizer or took marks for no spaces.
    """
    return json.dumps(_readable(tokenizer))


def with_own_words(tokenizer: Tokenizer) -> tuple[str, list[str]]:
    """The same with added tokens that are words of a text, as <tool_call> and <think> are for Qwen, among the model's
    own; and these words.

    llguidance takes all that are added in <> for special tokens, which no text spells, and others for their names.
    """
    spec, decoding = _readable(tokenizer), tokenizer.decoding
    vocab, added = spec["model"].get("vocab"), spec["added_tokens"]
    texts = {each["id"]: text for each in added if (text := _misread(tokenizer, each)) is not None}
    if not texts or not isinstance(vocab, dict):
        return json.dumps(spec), []
    for token_id, text in texts.items():
        vocab[spelled(text.encode()) if decoding.byte_level else text.replace(" ", _mark(decoding))] = token_id
    spec["added_tokens"] = [each for each in added if each["id"] not in texts]
    return json.dumps(spec), list(texts.values())


def _readable(tokenizer: Tokenizer) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(tokenizer.to_json())
    decoding = tokenizer.decoding
    spec["decoder"] = _decoder(decoding)
    spec["added_tokens"] = [*(spec.get("added_tokens") or ()), *_no_bytes(tokenizer)]
    return spec


def _decoder(decoding: Decoding) -> dict[str, Any] | None:
    """None, with which the library refuses it, for what it would not read so."""
    if decoding.byte_level:
        return _BYTES
    replaced = [old for old, new in decoding.replacements if len(old) == 1 and new == " "]
    if decoding.joiner or len(replaced) != len(decoding.replacements) or len(replaced) > 1:
        return None
    space = [{"type": "Replace", "pattern": {"String": mark}, "content": " "} for mark in replaced]
    return {"type": "Sequence", "decoders": [*space, *_FALLBACK]}


def _mark(decoding: Decoding) -> str:
    """What stands for a space in a token."""
    return decoding.replacements[0][0] if decoding.replacements else " "


def _no_bytes(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Tokens like <0xE2> that are text to this decoder, and bytes to the library: as special ones, none writes them.

    And that of a space where the mark in front of a text is dropped, but not this.
    """
    decoding = tokenizer.decoding
    hidden = {"<0x20>"} if decoding.opening_drops else set[str]()
    if not decoding.byte_level and not decoding.byte_fallback:
        hidden = set(filter(is_byte_token, tokenizer.vocabulary()))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token in sorted(hidden.difference(tokenizer.special)):
        if (token_id := tokenizer.token_to_id(token)) is not None:
            yield {"id": token_id, "content": token, **flags, "special": True}


def _misread(tokenizer: Tokenizer, token: Mapping[str, Any]) -> str | None:
    """What an added token adds to a text, where the library reads something else: some bring a space in front."""
    piece, name = tokenizer.piece(token["id"]), token["content"]
    text = piece.decode(errors="replace") if isinstance(piece, bytes) else piece
    is_misread = not token["special"] and (text != name or name[:1] + name[-1:] == "<>")
    return text if is_misread else None

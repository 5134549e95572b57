"""How much longer the steps of a tokenizer.json may make a text, so that a few of them cannot fill memory."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from bitnet_inference.errors import Unsupported

MAX_GROWTH = 1024
_PREFIX = 64  # characters that are added once count as much as a text twice as long
_MAX_AROUND = 256  # tokens
# Characters that one becomes at most: bytes as letters, Unicode's own forms, signs with spaces around them.
_FACTORS = {"ByteLevel": 4.0, "NFKC": 18.0, "NFKD": 18.0, "NFC": 3.0, "NFD": 4.0, "BertNormalizer": 12.0}


def check_growth(part: str, *states: bytes | None) -> None:
    """Raises Unsupported where steps with this JSON, one behind another, could make a text MAX_GROWTH times as long."""
    factor = math.prod(_factor(json.loads(state)) for state in states if state is not None)
    if factor > MAX_GROWTH:
        raise Unsupported(f"the {part} of tokenizer.json can make a text {factor:.3g} times as long: use another model")


def check_template(state: bytes | None) -> None:
    """Raises Unsupported for a post-processor that does not put a few tokens around the text, which is there once."""
    if state is not None:
        _check_template(json.loads(state))


def _check_template(step: dict[str, Any]) -> None:
    for each in step.get("processors", ()):
        _check_template(each)
    if step["type"] == "TemplateProcessing":
        names = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
        if unknown := [name for name in names if name not in step["special_tokens"]]:
            why = f"has no special_tokens {unknown[0]!r:.60}: correct it"
            raise Unsupported(f"the post_processor of tokenizer.json {why}")
        num_ids = sum(len(step["special_tokens"][name]["ids"]) for name in names)
        if num_ids > _MAX_AROUND or len(step["single"]) - len(names) != 1:
            texts = f"{num_ids} tokens around {len(step['single']) - len(names)} texts"
            raise Unsupported(f"the post_processor of tokenizer.json puts {texts}: use another model")


def _factor(step: dict[str, Any]) -> float:
    match step:
        case {"type": "Sequence"}:
            (steps,) = (value for value in step.values() if isinstance(value, list))
            return math.prod(map(_factor, steps))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:  # a pattern may match nothing, beside every character
            return 1.0 + len(new)
        case {"type": "Prepend", "prepend": str(text)}:
            return 1.0 + len(text) / _PREFIX
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
            data = base64.b64decode(text)  # a tree, its size in front, and the texts that it leads to
            texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            return float(max(1, max(map(len, texts))))
    return _FACTORS.get(step["type"], 1.0)

"""How much longer the steps of a tokenizer.json may make a text, so that a few of them cannot fill memory."""

from __future__ import annotations

import json
import math
from typing import Any

from bitnet_inference.errors import Unsupported

MAX_GROWTH = 1024
_MAX_PREFIX = 64  # characters that are added once are none to speak of


def check_growth(part: str, state: bytes | None) -> None:
    """Raises Unsupported where the normalizer or decoder with this JSON could make a text MAX_GROWTH times as long."""
    factor = 1.0 if state is None else _factor(json.loads(state))
    if factor > MAX_GROWTH:
        raise Unsupported(f"the {part} of tokenizer.json can make a text {factor:.3g} times as long: use another model")


def _factor(step: dict[str, Any]) -> float:
    match step:
        case {"type": "Sequence", "normalizers": list(steps)} | {"type": "Sequence", "decoders": list(steps)}:
            return math.prod(map(_factor, steps))
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": str(new)}:  # a pattern may match nothing, beside every character
            return 1.0 + len(new)
        case {"type": "Prepend", "prepend": str(text)} if len(text) > _MAX_PREFIX:
            return float(len(text))
    return 1.0

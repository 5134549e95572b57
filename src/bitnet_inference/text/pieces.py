"""What a tokenizer's decoder does to one token, so that text can be put together token by token.

The decoders of language models are of two kinds. Byte-level ones spell bytes in a printable alphabet (GPT-2, Llama 3).
The others (SentencePiece) replace a mark by a space, spell what the vocabulary lacks as byte tokens "<0xE2>", and take
the space in front of the whole text away. Every other decoder is refused by name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from bitnet_inference.errors import Unsupported

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """The steps of a decoder, in the order of their use.

    `byte_level`: tokens spell bytes, and no other step applies. `replacements`: in each token. `opening_drops`: taken
    out of the first token, before the replacements. `byte_fallback`: tokens like <0xE2> are bytes. `strip` is taken
    from the start of the whole text, at most `num_strips` times. `joiner` stands between tokens.
    """

    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    opening_drops: str = ""
    byte_fallback: bool = False
    strip: str = ""
    num_strips: int = 0
    joiner: str = ""

    @property
    def drops_space(self) -> bool:
        """Whether a space in front of a whole text is no part of it."""
        return " " in dict(self.replacements).get(self.opening_drops, "") or (self.strip == " " and self.num_strips > 0)

    def piece(self, token: str, opening: bool = False) -> bytes | str:
        """What a token adds: bytes, or text. `opening` says that it is the first of its text."""
        if self.byte_level:
            return _spelled_bytes(token)
        if opening and self.opening_drops:
            token = token.replace(self.opening_drops, "")
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return token


def is_byte_token(token: str) -> bool:
    """Whether a token is spelt as those are that stand for a byte."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def read_decoding(state: bytes | None) -> Decoding:
    """The decoding that the JSON of a decoder describes (None: no decoder). Raises Unsupported."""
    if state is None:
        return Decoding(joiner=" ")
    decoder = json.loads(state)
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Decoding(byte_level=True)
    order = ["Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    if not set(kinds) <= set(order) or kinds != sorted(kinds, key=order.index):
        raise Unsupported(f"decoder {' + '.join(kinds)} of tokenizer.json is not supported: use another model")
    decoding = Decoding()
    for step in steps:
        decoding = _with_step(decoding, step, fused="Fuse" in kinds)
    return decoding


def _with_step(decoding: Decoding, step: dict[str, Any], fused: bool) -> Decoding:
    match step:
        case {"type": "Metaspace", "replacement": str(mark)}:
            drops = "" if step.get("prepend_scheme", "always") == "never" else mark
            pairs = (*decoding.replacements, (mark, " "))
            return replace(decoding, replacements=pairs, opening_drops=drops)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return replace(decoding, replacements=(*decoding.replacements, (old, new)))
        case {"type": "ByteFallback"}:
            return replace(decoding, byte_fallback=True)
        case {"type": "Fuse"}:
            return decoding
        case {"type": "Strip", "content": str(strip), "start": int(start), "stop": 0} if fused:
            return replace(decoding, strip=strip, num_strips=start)
    raise Unsupported(f"decoder {json.dumps(step)} of tokenizer.json is not supported: use another model")


def spelled(data: bytes) -> str:
    """Bytes in GPT-2's printable alphabet, as vocabularies of byte-level tokenizers spell them."""
    return data.decode("latin-1").translate(_char_of_byte())


@cache
def _char_of_byte() -> dict[int, str]:
    return {byte: char for char, byte in _byte_of_char().items()}


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _spelled_bytes(token: str) -> bytes:
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode()

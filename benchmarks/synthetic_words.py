"""A tokenizer.json for random models: a token a byte, and made-up words for every other id, which no text contains."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

NUM_BYTES = 256
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_tokenizer(folder: Path, vocab_size: int, bos_id: int, eos_id: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE without merges, so that a byte is a token."""
    specials = {bos_id: "<|begin_of_text|>", eos_id: "<|end_of_text|>"}
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab_size, specials), ensure_ascii=False), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[bos_id],
        "eos_token": specials[eos_id],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer(vocab_size: int, specials: dict[int, str]) -> dict[str, Any]:
    ids = (token for token in range(vocab_size) if token not in specials)
    letters = _alphabet()
    vocab = {letters[i] if i < NUM_BYTES else _word(i): token for i, token in enumerate(ids)}
    vocab |= {text: token for token, text in specials.items()}  # or the library gives them other ids
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = next(iter(specials.values()))
    template = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {bos: {"id": bos, "ids": [next(iter(specials))], "tokens": [bos]}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in sorted(specials.items())],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": special,
        },
        "decoder": _BYTE_LEVEL,
        "model": {"type": "BPE", "ignore_merges": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }


def _alphabet() -> list[str]:
    """GPT-2's 256 letters: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(NUM_BYTES) if byte not in printable)
    return [chr(byte) for byte in printable] + [chr(NUM_BYTES + i) for i, _ in enumerate(others)]


def _word(number: int) -> str:
    word = ""
    while number:
        number, digit = divmod(number, len(ascii_lowercase))
        word = ascii_lowercase[digit] + word
    return f"\u0120{word}"  # a space, as GPT-2 writes it

"""The class that Transformers has for the tokenizer of Llama 2: it decides by itself where a text gets its space."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

Scheme = Literal["always", "first", "never"]

_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_CODE_CLASSES = ("CodeLlamaTokenizer", "CodeLlamaTokenizerFast")  # which know nothing of `legacy`
_AS_IT_STANDS = ("mistral",)  # kinds of models with whose tokenizer.json no class has a say
_SPACE = "▁"
_BYTES: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
_NORMALIZERS = ["Prepend", "Replace"]  # of Llama 2's tokenizer.json


def with_space(spec: Mapping[str, Any], scheme: Scheme) -> dict[str, Any]:
    """A tokenizer.json with a space before each piece of a text between special tokens, the first alone, or none."""
    space = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    return {**spec, "normalizer": None, "pre_tokenizer": space}


def as_its_class_reads_it(tokenizer_json: bytes, config: Mapping[str, Any], model: Mapping[str, Any]) -> bytes:
    """Llama 2's tokenizer.json as Transformers 5 has it where tokenizer_config.json names that class.

    Transformers takes words and merges from the file, and the rest from `legacy` and `add_prefix_space`; but not where
    `model`, the config.json beside it, is of a kind whose tokenizer.json it takes as it stands, as Mistral's.
    """
    if model.get("model_type") in _AS_IT_STANDS:
        return tokenizer_json
    is_code = config.get("tokenizer_class") in _CODE_CLASSES
    if not is_code and config.get("tokenizer_class") not in _CLASSES:
        return tokenizer_json
    try:
        spec = json.loads(tokenizer_json)
        if not _is_llama_2(spec):
            return tokenizer_json
    except (ValueError, TypeError, KeyError, RecursionError):
        return tokenizer_json  # whoever reads it says what is wrong
    has_space = config.get("add_prefix_space") is not False
    decoders = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, *_BYTES]
    if has_space or is_code:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    spec["decoder"] = {"type": "Sequence", "decoders": decoders}
    scheme: Scheme = "never" if not has_space else "always" if config.get("legacy") is True and not is_code else "first"
    return json.dumps(with_space(spec, scheme)).encode()


def _is_llama_2(spec: Mapping[str, Any]) -> bool:
    normalizer, space = spec["normalizer"], spec["pre_tokenizer"]
    if spec["model"]["type"] != "BPE" or not spec["model"]["byte_fallback"]:
        return False
    if normalizer is None:
        return space is not None and space["type"] == "Metaspace"
    return space is None and [each["type"] for each in normalizer["normalizers"]] == _NORMALIZERS

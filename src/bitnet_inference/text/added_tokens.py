"""Tokens that stand beside a vocabulary: in tokenizer_config.json, or in added_tokens.json by older versions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_AGAIN = "download the tokenizer's files again"
Added = dict[str, Any]  # as an entry of tokenizer.json's added_tokens


def listed_tokens(path: Path, config: dict[str, Any]) -> list[Added]:
    """Those of tokenizer_config.json, by their ids."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        raise FormatError(path, "added_tokens_decoder", "must be an object of tokens by their ids: correct it")
    return _in_order(path, "added_tokens_decoder", entries.items())


def mapped_tokens(path: Path, ids: dict[str, Any], special: Collection[str]) -> list[Added]:
    """Those of added_tokens.json, which maps texts to ids."""
    entries = ((token_id, _entry(text, text in special)) for text, token_id in ids.items())
    return _in_order(path, "", entries)


def with_added(path: Path, tokenizer_json: bytes, added: list[Added]) -> bytes:
    """A tokenizer.json with those of the tokens that it does not list. Raises FormatError for ids that are not free."""
    if all(_is_listed(tokenizer_json, token["content"]) for token in added):  # without a parse, which takes its time
        return tokenizer_json
    try:
        spec = json.loads(tokenizer_json)
        listed = {token["content"]: token["id"] for token in spec["added_tokens"]}
        spec["added_tokens"] += _missing(path, added, {**spec["model"]["vocab"]}, listed)
    except (ValueError, TypeError, KeyError, RecursionError):
        return tokenizer_json  # whoever reads it says what is wrong
    return json.dumps(spec).encode()


def _in_order(path: Path, key: str, entries: Any) -> list[Added]:
    tokens = []
    for token_id, token in entries:
        is_token = isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]
        if not is_token or not all(isinstance(token.get(flag, False), bool) for flag in _FLAGS):
            raise FormatError(path, key, f"token {token_id!r:.40} must have a text, and flags: correct it")
        if isinstance(token_id, bool) or not str(token_id).isdecimal() or len(str(token_id)) > 9:
            raise FormatError(path, key, f"{token_id!r:.40} is no id of a token: correct it")
        flags = {flag: token.get(flag, False) for flag in _FLAGS}
        tokens.append({"id": int(token_id), "content": token["content"], **flags})
    return sorted(tokens, key=lambda token: int(token["id"]))


def _entry(text: str, is_special: bool) -> dict[str, Any]:
    return {"content": text, "special": is_special, "normalized": not is_special}


def _is_listed(tokenizer_json: bytes, text: str) -> bool:
    spelt = [json.dumps(text, ensure_ascii=is_ascii).encode(errors="surrogatepass") for is_ascii in (False, True)]
    return any(b'"content":' + blank + each in tokenizer_json for each in spelt for blank in (b" ", b""))


def _missing(path: Path, added: list[Added], ids: dict[str, int], listed: dict[str, int]) -> Iterator[Added]:
    """The tokens that are not listed, under the ids that the tokenizers library gives them."""
    texts = {token_id: text for text, token_id in (ids | listed).items()}
    free = max(len(ids), *(token_id + 1 for token_id in listed.values()), 0)
    for token in added:
        text, token_id = token["content"], token["id"]
        spaced = texts.get(token_id, "").replace("▁", " ") == text.replace("▁", " ")
        if text not in listed and (text in ids or not spaced):
            if text not in ids and token_id != free:
                why = f"the token {text!r:.40} has the id {token_id}, which is not the next free one, {free}"
                raise FormatError(path, "", f"{why}: {_AGAIN}")
            yield {**token, "id": ids.get(text, token_id)}
            free = max(free, token_id + 1) if text not in ids else free

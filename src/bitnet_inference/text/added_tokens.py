"""Tokens that stand beside a vocabulary: in tokenizer_config.json, or in added_tokens.json by older versions."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# An entry of tokenizer.json as the tokenizers library writes it: its text, as JSON, and its flags.
_WRITTEN = re.compile(
    rb'"content":\s*("(?:[^"\\]|\\.)*+")' + b"".join(rb',\s*"%s":\s*(true|false)' % flag.encode() for flag in FLAGS)
)
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


def with_added(path: Path, tokenizer_json: bytes, added: list[Added], *, have_flags: bool) -> bytes:
    """A tokenizer.json with those of the tokens that it does not list; of others the flags count if they `have_flags`.

    Raises FormatError for ids that are not free.
    """
    written = {} if not added else _written_flags(tokenizer_json)  # without a parse, which takes its time
    if all(_is_written(token, written.get(token["content"]), have_flags) for token in added):
        return tokenizer_json
    try:
        spec = json.loads(tokenizer_json)
        listed = {str(token["content"]): token["id"] for token in spec["added_tokens"]}
        flags = {token["content"]: {flag: token[flag] for flag in FLAGS} for token in added if have_flags}
        spec["added_tokens"] = [{**token, **flags.get(token["content"], {})} for token in spec["added_tokens"]]
        spec["added_tokens"] += _missing(path, added, _ids(spec), listed)
    except (ValueError, TypeError, KeyError, RecursionError):
        return tokenizer_json  # whoever reads it says what is wrong
    return json.dumps(spec).encode()


def with_special(tokenizer_json: bytes, special: list[Added]) -> bytes:
    """A tokenizer.json that lists those of these tokens, too, that are words of its vocabulary."""
    written = {} if not special else _written_flags(tokenizer_json)
    if all(token["content"] in written for token in special):
        return tokenizer_json
    try:
        spec = json.loads(tokenizer_json)
        ids, listed = _ids(spec), {token["content"] for token in spec["added_tokens"]}
        found = {token["content"]: {**token, "id": ids.get(token["content"])} for token in special}
        spec["added_tokens"] += [found[text] for text in found if text in ids and text not in listed]
    except (ValueError, TypeError, KeyError, RecursionError):
        return tokenizer_json  # whoever reads it says what is wrong
    return json.dumps(spec).encode()


def _in_order(path: Path, key: str, entries: Any) -> list[Added]:
    tokens = []
    for token_id, token in entries:
        is_token = isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]
        if not is_token or not all(isinstance(token.get(flag, False), bool) for flag in FLAGS):
            raise FormatError(path, key, f"token {token_id!r:.40} must have a text, and flags: correct it")
        if isinstance(token_id, bool) or not str(token_id).isdecimal() or len(str(token_id)) > 9:
            raise FormatError(path, key, f"{token_id!r:.40} is no id of a token: correct it")
        flags = {flag: token.get(flag, False) for flag in FLAGS}
        flags["normalized"] = token.get("normalized", not flags["special"])  # as in the library
        tokens.append({"id": int(token_id), "content": token["content"], **flags})
    return sorted(tokens, key=lambda token: int(token["id"]))


def _entry(text: str, is_special: bool) -> dict[str, Any]:
    return {"content": text, "special": is_special, "normalized": not is_special}


def _written_flags(tokenizer_json: bytes) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for text, *flags in _WRITTEN.findall(tokenizer_json):
        with suppress(ValueError):  # no string
            found[json.loads(text)] = [flag == b"true" for flag in flags]
    return found


def _is_written(token: Added, flags: list[bool] | None, have_flags: bool) -> bool:
    return flags is not None and (not have_flags or flags == [token[flag] for flag in FLAGS])


def _ids(spec: dict[str, Any]) -> dict[str, int]:
    """The words of a vocabulary; that of a Unigram model is a list of pairs."""
    vocab = spec["model"]["vocab"]
    return {word: token_id for token_id, (word, _) in enumerate(vocab)} if isinstance(vocab, list) else {**vocab}


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

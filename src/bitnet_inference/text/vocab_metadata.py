"""A tokenizer as the metadata of a GGUF file: the way back from vocab.py, and checked by going there again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from bitnet_inference.errors import BitNetError, InvalidParams, Unsupported
from bitnet_inference.text.folder import TextFiles
from bitnet_inference.text.patterns import COMPOSED, DIGIT, GPT2, PATTERNS, THREE_DIGITS, WHOLE_WORDS
from bitnet_inference.text.pieces import is_byte_token
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import (
    BYTE,
    CONTROL,
    NFC,
    NO_WORDS,
    NORMAL,
    PREFIX,
    ROLES,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    filler,
)

_LINES = 64  # of a probe
_OWN = "it has no place in a GGUF file that would say what it does"
# By patterns, whether a word that is a token is merged, and whether accents are composed.
_NAMES = {(patterns, name in WHOLE_WORDS, name in COMPOSED): name for name, patterns in PATTERNS.items()} | {
    (("Punctuation", GPT2, "Digits", THREE_DIGITS), False, False): "falcon"
}
# Texts on which both tokenizers must agree: what patterns cut differently, scripts, digits, spaces, and odd bytes.
_PROBES = (
    "Hello, world! don't WE'LL I'm 'Sam' it'\u017f snake_case CamelCase ALLCAPS http://a.b/c?d=e",
    "1 12 123 1234 12345678 3.14 1,000 \u0663\u0664 \u00bd",
    "  two   spaces  \n\n a\r\n\tb \n  \n",
    "x=y+1; f(a,b) -> {c: [d]} // $e #f @g `h` ~i ^j |k <l> ...!!! --- ___ \u2026 \u2014 \u201cq\u201d",
    "na\u00efve caf\u00e9 e\u0301 \u00df \u0130 \u0414\u0430 \u0645\u0631\u062d \u05e9\u05dc \u0939\u093f\u0928\u094d",
    "\u72d0\u72f8\u3068\ud55c\uad6d\uc5b4 \U0001f98a\U0001f468\u200d\U0001f469 \u2603\ufe0f",
    "a\u00a0b\u2003c\u3000d\u200be \x00\x01\x7f\ufeff\ufffd \u2581 \u2581a <0x41>",
    "", " ", "\n", "a", " a",
)  # fmt: skip


def metadata_of(tokenizer: Tokenizer, num_tokens: int) -> dict[str, Any]:
    """The metadata of a tokenizer, for a model of that many tokens; added tokens beyond those are left out.

    Raises Unsupported for tokenizers that a GGUF file cannot describe, naming what was found.
    """
    if not tokenizer.has_words:
        return {f"{PREFIX}model": NO_WORDS}
    tokenizer = _cut(tokenizer, num_tokens)
    spec = json.loads(tokenizer.to_json())
    model = spec["model"]
    if model["type"] != "BPE":
        raise _refusal(tokenizer, f"a tokenizer of the type {model['type']}")
    kind = _byte_level(tokenizer, spec) if tokenizer.decoding.byte_level else {"model": "llama"}
    ids = {token_id: token for token, token_id in tokenizer.vocabulary().items()}
    tokens = [ids.get(token_id, filler(token_id)) for token_id in range(num_tokens)]
    types = _types(tokenizer, spec, ids, num_tokens)
    merges = model["merges"]
    values: dict[str, Any] = kind | {"tokens": tokens, "token_type": np.array(types, "<i4")}
    if kind["model"] == "llama":
        values |= {"scores": _scores(tokens, merges), "add_space_prefix": _adds_space(tokenizer)}
        # Those that are looked for before anything is merged: their own merges come from nothing that a file says.
        whole = {token for token, each in zip(tokens, types, strict=True) if each == USER_DEFINED}
        merges = [pair for pair in merges if "".join(pair) not in whole]
        if not values["add_space_prefix"]:
            values["tokens"] = [token.replace("▁", " ") if token in whole else token for token in tokens]
    else:
        values["merges"] = list(map(" ".join, merges))
    if UNKNOWN in types:  # special only where it is named
        values["unknown_token_id"] = types.index(UNKNOWN)
    values |= dict(_roles(tokenizer)) | _affixes(tokenizer)
    metadata = {PREFIX + key: value for key, value in values.items()} | dict(_templates(tokenizer))
    _check(tokenizer, metadata, merges)
    return metadata


def _cut(tokenizer: Tokenizer, num_tokens: int) -> Tokenizer:
    """The tokenizer without those added tokens that the model has no rows for."""
    beyond = set(tokenizer.added_beyond(num_tokens))
    if not beyond:
        return tokenizer
    spec = json.loads(tokenizer.to_json())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] not in beyond]
    spec["model"]["vocab"] = {token: each for token, each in spec["model"]["vocab"].items() if token not in beyond}
    files = TextFiles(
        path=tokenizer.path,
        tokenizer_json=json.dumps(spec).encode(),
        named=dict(tokenizer.named),
        add_bos=None,
        add_eos=None,
        templates=dict(tokenizer.templates),
        generation=dict(tokenizer.generation),
    )
    return Tokenizer(files)


def end_ids(eos_ids: Iterable[int], found: Tokenizer) -> tuple[dict[str, Any], list[int]]:
    """Keys for those of the end tokens that the metadata's tokenizer does not know to end a text, and what is left."""
    left = [token_id for token_id in dict.fromkeys(eos_ids) if token_id not in found.eos_ids]
    keys = [key for key in ("eos", "eot", "eom") if key != "eos" or "eos_token" not in found.named]
    return {f"{PREFIX}{key}_token_id": each for key, each in zip(keys, left, strict=False)}, left[len(keys) :]


def _byte_level(tokenizer: Tokenizer, spec: dict[str, Any]) -> dict[str, Any]:
    cuts = tuple(_cuts(tokenizer, spec["pre_tokenizer"]))
    ignores_merges = bool(spec["model"]["ignore_merges"])
    # What a normalizer of another kind does shows when the metadata are read back.
    name = _NAMES.get((cuts, ignores_merges, spec["normalizer"] == NFC)) or _NAMES.get((cuts, ignores_merges, False))
    if name is None:
        how = f"{', '.join(cuts)}{', ignore_merges' * ignores_merges}"
        raise _refusal(tokenizer, f"a pre-tokenizer other than {', '.join(PATTERNS)} ({how:.300})")
    return {"model": "gpt2", "pre": name}


def _cuts(tokenizer: Tokenizer, step: dict[str, Any] | None) -> Iterator[str]:
    """What cuts a text into words: patterns, and the names of steps that have none."""
    kind = step["type"] if step else "none"
    if step and kind == "Sequence":
        for each in step["pretokenizers"]:
            yield from _cuts(tokenizer, each)
    elif step and kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        yield str(step["pattern"].get("Regex", step["pattern"]))
    elif step and kind == "ByteLevel" and not step["add_prefix_space"]:
        yield from [GPT2] if step.get("use_regex", True) else []
    elif step and kind == "Digits" and step["individual_digits"]:
        yield DIGIT
    elif step and (kind, step.get("behavior"), step.get("individual_digits")) in (
        ("Punctuation", "Contiguous", None),
        ("Digits", None, False),
    ):
        yield kind
    else:
        raise _refusal(tokenizer, f"the pre-tokenizer {json.dumps(step):.200}")


def _types(tokenizer: Tokenizer, spec: dict[str, Any], ids: dict[int, str], num_tokens: int) -> list[int]:
    added = {token["id"]: token for token in spec["added_tokens"]}
    for token in added.values():
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise _refusal(tokenizer, f"the token {token['content']!r}, which takes in spaces or stands alone only")
    unknown = None if tokenizer.decoding.byte_level else spec["model"]["unk_token"]

    def kind(token_id: int) -> int:
        token = ids.get(token_id)
        if token is None:
            return UNUSED
        if token_id in tokenizer.special_ids:
            return UNKNOWN if token == unknown else CONTROL
        if token_id in added:
            return USER_DEFINED
        return BYTE if tokenizer.decoding.byte_fallback and is_byte_token(token) else NORMAL

    return list(map(kind, range(num_tokens)))


def _scores(tokens: list[str], merges: list[list[str]]) -> np.ndarray[Any, Any]:
    """SentencePiece's scores: the earlier a token is merged the first time, the better."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    return np.array([-ranks.get(token, 0) for token in tokens], "<f4")


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Whether a space goes in front of a text: what the tokenizer does with an "a" shows it."""
    ids = tokenizer.encode("a", add_special_tokens=False)
    return bool(ids) and (tokenizer.id_to_token(ids[0]) or "").startswith("\u2581")


def _roles(tokenizer: Tokenizer) -> Iterator[tuple[str, int]]:
    for role, key in ROLES.items():
        token_id = tokenizer.token_to_id(tokenizer.named.get(f"{role}_token", ""))
        if token_id is not None:
            yield f"{key}_token_id", token_id


def _affixes(tokenizer: Tokenizer) -> dict[str, Any]:
    before, behind = tokenizer.affixes
    named = tokenizer.token_to_id(tokenizer.named.get("eos_token", ""))
    # Another token than the named one may end a text, as in embedding models of Qwen3, where no template writes it.
    is_free = not any("eos_token" in template for template in tokenizer.templates.values())
    is_eos = behind in ([], [named]) or (len(behind) == 1 and is_free)
    if len(before) > 1 or (before and tokenizer.bos_id not in (None, *before)) or not is_eos:
        raise _refusal(tokenizer, f"other tokens around a text than BOS and EOS ({before} and {behind})")
    ids = {"bos_token_id": before, "eos_token_id": behind}
    around = {key: value[0] for key, value in ids.items() if value}
    return {"add_bos_token": bool(before), "add_eos_token": bool(behind), **around}


def _templates(tokenizer: Tokenizer) -> Iterator[tuple[str, Any]]:
    if named := [name for name in tokenizer.templates if name != "default"]:
        yield f"{TEMPLATE}s", named
    for name, source in tokenizer.templates.items():
        yield TEMPLATE if name == "default" else f"{TEMPLATE}.{name}", source


def _check(tokenizer: Tokenizer, metadata: dict[str, Any], merges: list[list[str]]) -> None:
    """Raises Unsupported where the tokenizer that the metadata describe is not this one."""
    try:
        found = Tokenizer.from_metadata(tokenizer.path, metadata)
    except BitNetError as error:
        raise _refusal(tokenizer, f"what reads back as an error ({error})") from None
    if found.vocabulary() != tokenizer.vocabulary() or found.special != tokenizer.special:
        raise _refusal(tokenizer, "a vocabulary that reads back as another one")
    told = [name for name in tokenizer.named if any(name in each for each in tokenizer.templates.values())]
    if lost := [name for name in told if found.named.get(name) != tokenizer.named[name]]:
        raise _refusal(tokenizer, f"the {lost[0]}, which its chat template writes")
    read_back = json.loads(found.to_json())["model"]["merges"]
    if _by_token(read_back) != _by_token(merges):
        raise _refusal(tokenizer, "merges in an order that SentencePiece's scores do not give")
    moved = ["".join(pair) * 3 for pair, other in zip(merges, read_back, strict=True) if pair != other]
    words = (*_own_words(tokenizer), *_in_lines(moved))  # the order may matter where the same token overlaps itself
    for text in (*_PROBES, "".join(tokenizer.special), " ".join(tokenizer.special), *words):
        if any(_ids(found, text, special) != _ids(tokenizer, text, special) for special in (False, True)):
            raise _refusal(tokenizer, f"rules by which {text[:40]!r} has other tokens in a GGUF file")


def _own_words(tokenizer: Tokenizer) -> Iterator[str]:
    """What the tokens spell, in lines: texts of the kind that the vocabulary was made for."""
    return _in_lines([tokenizer.decode([token_id]) for token_id in sorted(tokenizer.vocabulary().values())])


def _in_lines(words: list[str]) -> Iterator[str]:
    return ("\n".join(words[start : start + _LINES]) for start in range(0, len(words), _LINES))


def _by_token(merges: list[list[str]]) -> list[tuple[str, list[list[str]]]]:
    """Merges in their order, those of one token sorted: writers differ in the order of the ways to the same token."""
    return [(token, sorted(pairs)) for token, pairs in groupby(merges, "".join)]


def _ids(tokenizer: Tokenizer, text: str, special: bool) -> tuple[list[int], str] | None:
    try:
        ids = tokenizer.encode(text, parse_special=special)
    except InvalidParams:
        return None
    return ids, tokenizer.decode(ids)


def _refusal(tokenizer: Tokenizer, what: str) -> Unsupported:
    return Unsupported(f"{tokenizer.path}: the tokenizer has {what}: {_OWN}")

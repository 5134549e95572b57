"""The tokenizer that stands in the metadata of a GGUF file, as the files of a folder would have it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.text.folder import MAX_TEMPLATE_BYTES, TextFiles, lack_of_words, without_words
from bitnet_inference.text.patterns import ALIASES, BEGUN, COMPOSED, PATTERNS, WHOLE_WORDS
from bitnet_inference.text.recommended import read_recommended

PREFIX = "tokenizer.ggml."
NO_WORDS = "none"  # the model of a file without a tokenizer
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # of token_type
# What ends an answer in the chat formats of the families that we run, where the vocabulary has it.
END_OF_TURN = (
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end_of_text|>", "<|endoftext|>", "<|im_end|>", "<|end|>",
    "<end_of_turn>", "<|end_of_turn|>", "</s>",
)  # fmt: skip
# Those that nobody writes otherwise: converters forget to mark them, and llama.cpp takes them for control tokens too.
_MARKS = frozenset(END_OF_TURN) - {"</s>"}
_NO_WORDS = (NO_WORDS, "no_vocab")  # both are llama.cpp's names
_LLAMA3_VOCAB = 128256
_MAX_PIECE = 512  # characters of a SentencePiece token whose merges are looked for
_MAX_MERGES = 1 << 24  # characters of all of them; Gemma's have 3.6 million
NFC = {"type": "NFC"}
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # of tokens, and what their keys call them
# Microsoft's converters wrote a template of another model, with the end token behind the generation prompt.
TEMPLATE = "tokenizer.chat_template"
_WRONG_TEMPLATE = "BITNETAssistant: "
BITNET_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)


def text_files(path: Path, metadata: Mapping[str, Any]) -> TextFiles:
    """What the text files of a folder would say. Raises FormatError where it breaks, Unsupported for other kinds."""
    model = metadata.get(f"{PREFIX}model", NO_WORDS)
    if isinstance(model, str) and model in _NO_WORDS and f"{PREFIX}tokens" not in metadata:
        return without_words(path, read_recommended(path, metadata))
    vocab = _Vocab(path, metadata)
    spelled = vocab.bpe() if vocab.model == "gpt2" else vocab.sentencepiece()
    named = {f"{name}_token": vocab.tokens[token_id] for name, token_id in vocab.named_ids()}
    return TextFiles(
        path=path,
        tokenizer_json=json.dumps({"version": "1.0", "added_tokens": vocab.added(), **spelled}).encode(),
        named=named,
        add_bos=vocab.flag("add_bos_token", vocab.model == "llama" or vocab.pre in BEGUN),
        add_eos=vocab.flag("add_eos_token", False),
        templates=_templates(path, metadata),
        generation=read_recommended(path, metadata),
    )


def byte_level_bpe(
    vocab: dict[str, int], merges: Sequence[Any], patterns: Iterable[str], ignore_merges: bool
) -> dict[str, Any]:
    """The parts of a tokenizer.json: one pattern after the other cuts a text into words, whose bytes are merged.

    With `ignore_merges` a word that is a token is not merged.
    """
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False, "ignore_merges": ignore_merges}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def notes(metadata: Mapping[str, Any]) -> list[str]:
    """What is understood otherwise than it stands there: a line each, for `bitnet inspect`."""
    lines = []
    if PREFIX + "pre" not in metadata and str(metadata.get(PREFIX + "model")) == "gpt2":
        count = len(_array(metadata, "tokens"))
        lines.append(f"the pre-tokenizer is not named: {_default_pre(count)} is used")
    kinds = zip(_array(metadata, "tokens"), _array(metadata, "token_type"), strict=False)
    if unmarked := dict.fromkeys(token for token, kind in kinds if token in _MARKS and kind != CONTROL):
        lines.append(f"not marked as control tokens, and taken for such: {', '.join(unmarked)}")
    if _WRONG_TEMPLATE in str(metadata.get(TEMPLATE, "")):
        lines.append("the chat template is of another model: that of BitNet b1.58 2B4T is used")
    return lines


def _array(metadata: Mapping[str, Any], key: str) -> Collection[Any]:
    """What stands under `key`, or nothing where that is no array: who reads the vocabulary refuses it."""
    found = metadata.get(PREFIX + key)
    return found if isinstance(found, Collection) else ()


def corrections(metadata: Mapping[str, Any]) -> dict[str, str]:
    """What other programs would not understand as it is understood here, put right: llama.cpp knows no falcon_e."""
    found = {}
    tokens, pre = metadata.get(PREFIX + "tokens"), metadata.get(PREFIX + "pre")
    if pre is None and str(metadata.get(PREFIX + "model")) == "gpt2" and isinstance(tokens, list):
        found[PREFIX + "pre"] = _default_pre(len(tokens))
    elif pre in ("falcon_e", "gpt2"):  # others are known, and mean more there than patterns
        found[PREFIX + "pre"] = ALIASES[pre]
    if _WRONG_TEMPLATE in str(metadata.get(TEMPLATE, "")):
        found[TEMPLATE] = BITNET_TEMPLATE
    return found


def filler(token_id: int) -> str:
    """What stands in the list of tokens for an id that no token has."""
    return f"[PAD{token_id}]"


def _default_pre(num_tokens: int) -> str:
    return "llama-bpe" if num_tokens == _LLAMA3_VOCAB else "default"


class _Vocab:
    """The tokens of the metadata, checked."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path, self._metadata = path, metadata
        self.model = self._text("model", "")
        if not self.model:
            raise lack_of_words(path)
        if self.model not in ("gpt2", "llama"):
            known = '"gpt2" (byte-level BPE) and "llama" (SentencePiece)'
            raise Unsupported(f'{path}: the tokenizer "{self.model:.40}" is not supported: only {known}')
        self.tokens = self._strings("tokens")
        self._types = self._numbers("token_type", [1] * len(self.tokens))
        if len(self._types) != len(self.tokens):
            raise self._wrong("token_type", f"has {len(self._types)} entries for {len(self.tokens)} tokens")
        kinds = zip(self.tokens, self._types, strict=True)
        self._types = [CONTROL if token in _MARKS else kind for token, kind in kinds]
        self.prefix = self.model == "llama" and self.flag("add_space_prefix", True)
        if self.model == "llama" and not self.prefix:  # their spaces are written as they are; see added
            spelt = zip(self.tokens, self._types, strict=True)
            self.tokens = [token.replace(" ", "▁") if kind == USER_DEFINED else token for token, kind in spelt]
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if self._types[token_id] != UNUSED or token != filler(token_id):
                self.ids.setdefault(token, token_id)
        pre = self._text("pre", _default_pre(len(self.tokens)))
        self.pre = ALIASES.get(pre, pre)

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "is neither true nor false")
        return value

    def _usual(self, key: str) -> int | None:
        """What a file of SentencePiece need not name, as in llama.cpp."""
        token_id = {"bos": 1, "eos": 2}.get(key) if self.model == "llama" else None
        return token_id if token_id and self._types[token_id : token_id + 1] == [CONTROL] else None

    def named_ids(self) -> Iterator[tuple[str, int]]:
        """The roles that tokens have: "bos" and its like."""
        for role, key in ROLES.items():
            token_id = self._metadata.get(f"{PREFIX}{key}_token_id", self._usual(key))
            if type(token_id) is int and 0 <= token_id < len(self.tokens):
                yield role, token_id

    def added(self) -> list[dict[str, Any]]:
        """The tokens that a text is searched for before it is cut into words; control ones and the unknown are special.

        Gemma's runs of spaces are searched for when spaces are marks, as SentencePiece does; with a space in front of
        every text that is not possible, and there they are spelt with spaces.
        """
        plain = {"single_word": False, "lstrip": False, "rstrip": False}
        unknown = dict(self.named_ids()).get("unk")
        has_marks = self.model == "llama" and not self.prefix

        def is_spaced(token: str, kind: int) -> bool:
            return has_marks and kind == USER_DEFINED and "▁" in token

        return [
            {"id": token_id, "content": token, "special": kind != USER_DEFINED, "normalized": is_spaced(token, kind)}
            | plain
            for token_id, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True))
            if (kind in (CONTROL, USER_DEFINED) or (kind == UNKNOWN and token_id == unknown))
            and self.ids[token] == token_id
            and token
        ]

    def bpe(self) -> dict[str, Any]:
        """Byte-level BPE: what differs from model to model is how a text is cut into words first."""
        if self.pre not in PATTERNS:
            known = f"only {', '.join(PATTERNS)} and the like"
            cure = "use the model's Hugging Face folder"
            raise Unsupported(f'{self._path}: the pre-tokenizer "{self.pre:.40}" is not supported, {known}: {cure}')
        merges = [merge.split(" ", 1) for merge in self._strings("merges", at_least=0)]
        if any(len(merge) != 2 for merge in merges):
            raise self._wrong("merges", "has an entry that is no pair")
        spec = byte_level_bpe(self._without_last_controls(), merges, PATTERNS[self.pre], self.pre in WHOLE_WORDS)
        return spec | ({"normalizer": NFC} if self.pre in COMPOSED else {})

    def sentencepiece(self) -> dict[str, Any]:
        """SentencePiece's BPE: a merge for every way to cut a token into two, the best score first."""
        scores = self._numbers("scores", None)
        if len(scores) != len(self.tokens):
            raise self._wrong("scores", f"has {len(scores)} entries for {len(self.tokens)} tokens")
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        text = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if self.prefix else []
        unknown = next((token_id for role, token_id in self.named_ids() if role == "unk"), 0)
        model = {"type": "BPE", "vocab": self.ids, "merges": self._merges(scores), "unk_token": self.tokens[unknown]}
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if self.prefix else []), space],
            },
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": [text, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
            "model": {**model, "fuse_unk": True, "byte_fallback": BYTE in self._types},
        }

    def _merges(self, scores: Sequence[float]) -> list[tuple[str, str]]:
        found: list[tuple[float, str, str]] = []
        size = 0
        for token, token_id in self.ids.items():
            if self._types[token_id] in (CONTROL, USER_DEFINED, BYTE) or len(token) > _MAX_PIECE:
                continue
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [pair for pair in pairs if pair[0] in self.ids and pair[1] in self.ids]
            known.sort(key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))
            found += [(scores[token_id], *pair) for pair in known]
            size += len(known) * (len(token) + 1)
            if size > _MAX_MERGES:
                raise self._wrong("tokens", f"have more than {_MAX_MERGES} characters of merges")
        found.sort(key=lambda merge: -merge[0])
        return [(left, right) for _, left, right in found]

    def _without_last_controls(self) -> dict[str, int]:
        """The vocabulary without the control tokens at its end: so no text that spells one becomes it."""
        end = len(self.tokens)
        while end and (self._types[end - 1] == CONTROL or self.tokens[end - 1] not in self.ids):
            end -= 1
        if any(self.ids.get(token, token_id) != token_id for token_id, token in enumerate(self.tokens[end:], end)):
            end = len(self.tokens)
        return {token: token_id for token, token_id in self.ids.items() if token_id < end}

    def _text(self, key: str, default: str) -> str:
        value = self._metadata.get(PREFIX + key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "is no string")
        return value

    def _strings(self, key: str, at_least: int = 1) -> list[str]:
        value = self._metadata.get(PREFIX + key)
        if not isinstance(value, list) or len(value) < at_least:
            raise self._wrong(key, "is missing, or no list of strings")
        return value

    def _numbers(self, key: str, default: list[int] | None) -> list[Any]:
        value = self._metadata.get(PREFIX + key)
        if value is None and default is not None:
            return default
        if value is None or not hasattr(value, "tolist"):
            raise self._wrong(key, "is missing, or no list of numbers")
        numbers: list[Any] = value.tolist()
        return numbers

    def _wrong(self, key: str, why: str) -> FormatError:
        return FormatError(self._path, PREFIX + key, f"{why}: download the file again")


def _templates(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {"default": metadata[TEMPLATE]} if TEMPLATE in metadata else {}
    names = metadata.get(f"{TEMPLATE}s", [])
    if not isinstance(names, list):
        raise FormatError(path, f"{TEMPLATE}s", "is no list of names: download the file again")
    for name in names:
        if f"{TEMPLATE}.{name}" in metadata:
            templates[name] = metadata[f"{TEMPLATE}.{name}"]
    for name, source in templates.items():
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
            raise FormatError(path, TEMPLATE, f"template {name!r:.60} must be a string of at most 1 MiB: correct it")
        if _WRONG_TEMPLATE in source:
            templates[name] = BITNET_TEMPLATE
    return templates

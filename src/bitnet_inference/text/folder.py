"""The text files beside a model: tokenizer.json, its configuration, chat templates, the generation configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitnet_inference.config import check_unicode
from bitnet_inference.errors import FormatError, InvalidParams, NotFound, Unsupported
from bitnet_inference.json_objects import parse_object, shown
from bitnet_inference.own_files import require_own
from bitnet_inference.text.added_tokens import FLAGS, Added, listed_tokens, mapped_tokens, with_added, with_special
from bitnet_inference.text.llama_class import as_its_class_reads_it

MAX_TOKENIZER_BYTES = 40 << 20  # parsing takes 25 times as much; the largest that we know has 33 MB
MAX_CONFIG_BYTES = 8 << 20
MAX_TEMPLATE_BYTES = 1 << 20
# What stands in the place of tokenizer.json where a model has none: its tokens are numbers alone.
WORDLESS = b'{"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}'
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    """What the text files of a model folder say.

    `named` maps "bos_token" and its like, and the model's own names, to the token's text. `add_bos` and `add_eos` are
    None where tokenizer.json says what goes around a text: beside it, the configuration's word does not count, as in
    Transformers 5.
    `templates` maps names to Jinja sources ("default" is the one for chats). `generation` is generation_config.json,
    empty where there is none.
    """

    path: Path
    tokenizer_json: bytes
    named: dict[str, str]
    add_bos: bool | None
    add_eos: bool | None
    templates: dict[str, str]
    generation: dict[str, Any]

    @property
    def has_words(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self.tokenizer_json != WORDLESS


def without_words(path: str | Path, generation: dict[str, Any]) -> TextFiles:
    """Those of a model without a tokenizer, in a folder or a file."""
    nothing: dict[str, Any] = {"named": {}, "add_bos": None, "add_eos": None, "templates": {}}
    return TextFiles(path=Path(path), tokenizer_json=WORDLESS, generation=generation, **nothing)


def lack_of_words(path: Path) -> FormatError | Unsupported:
    """What a model without a tokenizer is told by, where one is needed."""
    rest = "without it, token ids alone are taken, and no texts or stop strings"
    if path.is_dir():
        cure = "copy it, or tokenizer.model, from the model's repository, or write it with save_pretrained"
        return FormatError(path / "tokenizer.json", "", f"the file is missing: {cure}; {rest}")
    return Unsupported(f"{path}: has no tokenizer: convert the model again, with its tokenizer beside it; {rest}")


def read_text_files(path: str | Path, vocabulary: TextFiles | None = None) -> TextFiles:
    """Read the text files of a model folder. Raises NotFound and FormatError.

    `vocabulary`: what another file says in place of tokenizer.json, where these files say nothing else.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise NotFound(f"{folder}: no such folder")
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file)
    named, special = _named_tokens(config_file, config), [*_more_special(config)]
    if "added_tokens_decoder" in config:
        source, added = config_file, listed_tokens(config_file, config)
    else:  # older versions wrote two more files, and then these have the last word
        map_file, source = folder / "special_tokens_map.json", folder / "added_tokens.json"
        more = read_json(map_file)
        named |= _named_tokens(map_file, more)
        special += _more_special(more)
        texts = {*named.values(), *(token["content"] for token in special)}
        added = mapped_tokens(source, read_json(source), texts)
    add_bos, add_eos = (vocabulary.add_bos, vocabulary.add_eos) if vocabulary else (None, None)
    if vocabulary and ("add_bos_token" in config or "add_eos_token" in config):
        add_bos, add_eos = (_flag(config_file, config, name) for name in ("add_bos_token", "add_eos_token"))
    if vocabulary:
        tokenizer_json = vocabulary.tokenizer_json
    else:
        tokenizer_json, model = _read_tokenizer(folder / "tokenizer.json"), read_json(folder / "config.json")
        tokenizer_json = as_its_class_reads_it(tokenizer_json, config, model)
    tokenizer_json = with_added(source, tokenizer_json, added, have_flags=source == config_file)
    return TextFiles(
        path=folder,
        tokenizer_json=with_special(tokenizer_json, special),
        named={**(vocabulary.named if vocabulary else {}), **named},
        add_bos=add_bos,
        add_eos=add_eos,
        templates=_template_files(folder) or _config_templates(config_file, config),
        generation=read_json(folder / "generation_config.json"),
    )


def _is_there(path: Path) -> bool:
    """Whether a file exists; a folder, a pipe or a link that leads nowhere in its place is not as good as none."""
    if os.path.lexists(path) and not path.is_file():
        raise FormatError(path, "", "is no file, or a link that leads nowhere: download it again, or remove it")
    return path.is_file()


def read_bytes(path: Path, max_bytes: int, folder: Path | None = None) -> bytes:
    """The whole of a file of a folder (None: the one in which it lies), out of which no link may lead.

    Raises FormatError for one that cannot be read or is larger.
    """
    require_own(folder or path.parent, path)
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise FormatError(path, "", f"{size} bytes, at most {max_bytes} are read: this is no such file")
        return path.read_bytes()
    except OSError as error:
        raise FormatError(path, "", f"cannot be read ({error.strerror}): check its permissions") from None


def _read_tokenizer(path: Path) -> bytes:
    if not _is_there(path):
        cure = "copy it from the model's repository, or write it with Transformers' save_pretrained"
        raise FormatError(path, "", f"the file is missing: {cure}")
    return read_bytes(path, MAX_TOKENIZER_BYTES)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing, for all of these files are optional."""
    if not _is_there(path):
        return {}
    return parse_object(read_bytes(path, MAX_CONFIG_BYTES), path, "")


def _flag(path: Path, config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise FormatError(path, name, f"is {shown(value)}: give true or false")
    return bool(value)


def _named_tokens(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """A named token is written as its text, or as an object with its text under "content"."""
    named = {}
    for name in NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is None and token is None:
            continue
        if not isinstance(text, str):
            raise FormatError(path, name, 'must be a string, or an object with a string under "content": correct it')
        try:
            check_unicode("it", text)
        except InvalidParams as error:
            raise FormatError(path, name, str(error)) from None
        named[name] = text
    return {**_own_names(config), **named}


def _own_names(config: dict[str, Any]) -> dict[str, str]:
    """Tokens of this model alone, as "image_token", which Transformers gives to chat templates too."""
    entries = [(name, token) for name, token in config.items() if name.endswith("_token")]
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        more = config.get(key)
        entries += more.items() if isinstance(more, dict) else ()
    texts = ((name, token.get("content") if isinstance(token, dict) else token) for name, token in entries)
    return {name: text for name, text in texts if name not in NAMED_TOKENS and isinstance(text, str)}


def _more_special(config: dict[str, Any]) -> Iterator[Added]:
    """Special tokens that have no role, and no ids here."""
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = config.get(key)
        for token in tokens if isinstance(tokens, list) else ():
            flags = {flag: token.get(flag) is True for flag in FLAGS} if isinstance(token, dict) else {}
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str) and text:
                yield {**dict.fromkeys(FLAGS, False), **flags, "content": text, "special": True}


def _config_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """The template of tokenizer_config.json: one string, or named ones in a list or an object."""
    value = config.get("chat_template")
    if value is None:
        return {}
    try:
        if isinstance(value, list):
            value = {entry["name"]: entry["template"] for entry in value}
        templates: dict[Any, Any] = {"default": value} if isinstance(value, str) else {**value}
    except (TypeError, KeyError):
        raise FormatError(path, "chat_template", "must be a string or a list of {name, template}: correct it") from None
    for name, source in templates.items():
        if not isinstance(name, str) or not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
            raise FormatError(
                path, "chat_template", f"template {name!r:.60} must be a string of at most 1 MiB: correct it"
            )
    return templates


def _template_files(folder: Path) -> dict[str, str]:
    """The templates that Transformers 5 keeps in files of their own; beside one, the configuration's do not count."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {}
    for name, file in files.items():
        if _is_there(file):
            try:
                templates[name] = read_bytes(file, MAX_TEMPLATE_BYTES, folder).decode("utf-8")
            except UnicodeDecodeError as error:
                raise FormatError(file, f"byte {error.start}", "is not UTF-8: download the file again") from None
    return templates

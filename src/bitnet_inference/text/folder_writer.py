"""The text files of a model as files of a folder, whatever they came from: what folder.py reads, written."""

from __future__ import annotations

import json
from typing import Any

from bitnet_inference.text.folder import TextFiles
from bitnet_inference.text.tokenizer import Tokenizer


def folder_files(files: TextFiles) -> dict[str, bytes]:
    """Their contents by name; reading these gives the same again, with the tokens around a text in tokenizer.json."""
    generation = {"generation_config.json": to_json(files.generation)} if files.generation else {}
    if not files.has_words:
        return generation
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **files.named}
    if set(files.templates) == {"default"}:
        config["chat_template"] = files.templates["default"]
    elif files.templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in files.templates.items()]
    tokenizer = files.tokenizer_json if files.add_bos is None else Tokenizer(files).to_json().encode()
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": to_json(config)} | generation


def to_json(values: dict[str, Any]) -> bytes:
    """A JSON file for people too."""
    return (json.dumps(values, indent=2) + "\n").encode()

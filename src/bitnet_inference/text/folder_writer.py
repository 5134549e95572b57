"""The text files of a model as files of a folder, whatever they came from: what folder.py reads, written."""

from __future__ import annotations

import json
from typing import Any

from bitnet_inference.text.folder import TextFiles


def folder_files(files: TextFiles) -> dict[str, bytes]:
    """Their contents by name; reading these gives the same again."""
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **files.named}
    if files.add_bos is not None:
        config |= {"add_bos_token": files.add_bos, "add_eos_token": bool(files.add_eos)}
    if set(files.templates) == {"default"}:
        config["chat_template"] = files.templates["default"]
    elif files.templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in files.templates.items()]
    written = {"tokenizer.json": files.tokenizer_json, "tokenizer_config.json": to_json(config)}
    return written | ({"generation_config.json": to_json(files.generation)} if files.generation else {})


def to_json(values: dict[str, Any]) -> bytes:
    """A JSON file for people too."""
    return (json.dumps(values, indent=2) + "\n").encode()

"""Where a model lies, and what its folder recommends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitnet_inference.config import check_flag
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import FormatError, InvalidParams, NotFound
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.packed import PackedCheckpoint
from bitnet_inference.hub.local import locate
from bitnet_inference.hub.names import is_name
from bitnet_inference.text.embedded import from_embedded
from bitnet_inference.text.folder import TextFiles
from bitnet_inference.text.folders import read_folder
from bitnet_inference.text.recommended import samples
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import text_files


def find_model(model: str | Path) -> Path:
    """The path of a model: "default", a path that exists, or what was pulled under a name.

    Raises NotFound, and InvalidParams where a name stands for several models.
    """
    if model == "default":
        return Path(__file__).parent / "default_model"
    if not isinstance(model, str | Path):
        raise InvalidParams(f'a model must be "default", a path or a name, not {type(model).__name__}')
    if model == "":
        raise InvalidParams('the model is an empty text: give "default", a path or a name')
    if os.path.exists(model):  # Path.exists raises for names that are too long
        return Path(model)
    missing = f"{model}: there is no such file or folder"
    if str(model).startswith("~/") and os.path.exists(whole := os.path.expanduser(model)):
        raise NotFound(f"{missing}: the ~ is not expanded here: give {whole}")
    try:
        return locate(str(model))
    except NotFound as error:
        raise NotFound(f"{missing}, and {error}") from None
    except InvalidParams as error:
        raise (error if is_name(str(model)) else NotFound(f"{missing}: check the path")) from None


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model: in the file itself, or beside it; one that knows no words where there is none.

    Raises FormatError and Unsupported.
    """
    return Tokenizer(load_text_files(checkpoint), checkpoint.config.vocab_size)


def load_text_files(checkpoint: Checkpoint) -> TextFiles:
    """What a model says about its texts: in the file itself, or beside it. Raises FormatError and Unsupported."""
    if isinstance(checkpoint, PackedCheckpoint):
        return from_embedded(checkpoint.path, checkpoint.file)
    if isinstance(checkpoint, OnnxCheckpoint):
        files = read_folder(checkpoint.folder)
        return files if files.generation else replace(files, generation=checkpoint.generation)
    if isinstance(checkpoint, CoreMLCheckpoint):
        return read_folder(checkpoint.folder)
    if checkpoint.metadata:
        return text_files(checkpoint.path, checkpoint.metadata)
    return read_folder(checkpoint.path)


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """What a generation_config.json recommends; greedy unless it says do_sample, or a temperature and not do_sample.

    Raises InvalidParams for impossible values.
    """
    draws = samples(generation)
    check_flag("do_sample", draws)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if draws else ("repetition_penalty",)
    options = {name: generation[name] for name in names if generation.get(name) is not None}
    if not draws:
        options["temperature"] = 0.0
    if generation.get("max_new_tokens") is not None:
        options["max_tokens"] = generation["max_new_tokens"]
    return SamplingParams.from_mapping(options)


def defaults_of(tokenizer: Tokenizer) -> SamplingParams:
    """The same of a model's folder; raises FormatError."""
    try:
        return default_params(tokenizer.generation)
    except InvalidParams as error:
        file = tokenizer.path / "generation_config.json" if tokenizer.path.is_dir() else tokenizer.path
        raise FormatError(file, "", str(error)) from None

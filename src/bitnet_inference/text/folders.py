"""The text files of a model folder, whoever wrote it."""

from __future__ import annotations

import os
from pathlib import Path

from bitnet_inference.text.folder import TextFiles, read_json, read_text_files, without_words
from bitnet_inference.text.ranks import is_gpu_folder, is_meta_folder, read_gpu_files, read_meta_files
from bitnet_inference.text.sentencepiece import is_sentencepiece_folder, read_sentencepiece_files


def read_folder(path: str | Path) -> TextFiles:
    """Those of Hugging Face, Meta's, of Microsoft's GPU code, or a tokenizer.model of SentencePiece's; or no words.

    Raises NotFound, FormatError and Unsupported.
    """
    names = ("tokenizer.json", "tokenizer.model")
    if os.path.isdir(path) and not any(os.path.lexists(Path(path) / name) for name in names):
        return without_words(path, read_json(Path(path) / "generation_config.json"))
    if is_meta_folder(path):
        return read_meta_files(path)
    if is_gpu_folder(path):
        return read_gpu_files(path)
    return read_sentencepiece_files(path) if is_sentencepiece_folder(path) else read_text_files(path)

"""What a model is called, which goes with it from file to file."""

from __future__ import annotations

import os
from pathlib import Path

from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.packed import PackedCheckpoint

NAME = "general.name"  # of GGUF files
_GGUF = ".gguf"


def title_of(checkpoint: Checkpoint) -> str:
    """The name that its file says, else that of its repository, its folder or its file."""
    if isinstance(checkpoint, PackedCheckpoint):
        said = checkpoint.said
        return said.get("name") or said.get("source", "").removesuffix(_GGUF) or checkpoint.path.stem
    name = checkpoint.metadata.get(NAME)
    return name if isinstance(name, str) and name else source_of(checkpoint.path).removesuffix(_GGUF)


def source_of(path: Path) -> str:
    """The name of a file or folder; of a folder in the Hub's cache, which is called by a commit, its repository's."""
    path = Path(os.path.abspath(path))
    for folder in path.parents if path.is_dir() else ():
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder.parent.name.rpartition("--")[2]
    return path.name

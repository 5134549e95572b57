"""GGUF files that other tools keep: llama.cpp's cache, LM Studio's folder, Ollama's blobs, or any folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from bitnet_inference.errors import NotFound
from bitnet_inference.hub.files import without_later_parts

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_FILES = 10_000


def models_under(folder: Path) -> list[tuple[str, Path]]:
    """The names and paths of the models under a folder: its *.gguf files, and what Ollama's manifests name.

    Raises NotFound where there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound(f"{folder}: there is no such folder: check the path")
    return [*_ollama(folder), *((path.relative_to(folder).as_posix(), path) for path in _ggufs(folder))]


def _ggufs(folder: Path) -> Iterator[Path]:
    found = 0
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in without_later_parts(sorted(files)):
            if name.endswith(".gguf") and found < _MAX_FILES:
                found += 1
                yield Path(parent, name)


def _ollama(folder: Path) -> Iterator[tuple[str, Path]]:
    """manifests/HOST/OWNER/NAME/TAG says which of blobs/sha256-... is the model NAME:TAG."""
    root = folder if (folder / "manifests").is_dir() else folder / "models"
    for manifest in sorted((root / "manifests").glob("*/*/*/*"))[:_MAX_FILES]:
        owner, name, tag = manifest.parts[-3:]
        blob = root / "blobs" / f"sha256-{_digest(manifest)}"
        if blob.is_file():
            yield f"{name}:{tag}" if owner == "library" else f"{owner}/{name}:{tag}", blob


def _digest(manifest: Path) -> str:
    """The digest of the model in a manifest; empty for what is none."""
    try:
        with manifest.open("rb") as file:
            layers = json.loads(file.read(_MAX_MANIFEST_BYTES))["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _MODEL)
        return _DIGEST.fullmatch(digest)[1]  # type: ignore[index]  # what does not match is caught
    except (OSError, ValueError, TypeError, LookupError, StopIteration, RecursionError):
        return ""

"""Files that belong to a folder: no name and no link in a model's folder leads a reader out of it."""

from __future__ import annotations

import os
from pathlib import Path

from bitnet_inference.errors import FormatError

_MAX_NAME = 255  # as most file systems have it
_POINTER = b"version https://git-lfs"


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder; raises FormatError where a name or a link leads out of it, see require_own."""
    is_plain = Path(name).name == name and name not in ("", "..") and not {"\\", "\0"} & {*name}
    if not is_plain or len(name) > _MAX_NAME:
        raise FormatError(folder, f"{name!r:.60}", "is not the plain name of a file in this folder: correct it")
    require_own(folder, folder / name)
    return folder / name


def has_pieces(folder: Path) -> bool:
    """Whether SentencePiece wrote the tokenizer.model of a folder, as Llama 2's, and not who writes lists of ranks.

    Its first field begins with a line break. Raises FormatError as `inside`.
    """
    file = inside(folder, "tokenizer.model")
    if not file.is_file():
        return False
    try:
        with file.open("rb") as opened:
            return opened.read(1) == b"\n"
    except OSError:
        return False  # its reader says why


def require_own(folder: Path, path: Path) -> None:
    """Raises FormatError where a path in a folder, or in one within it, is a link that leads out of the folder.

    Links are followed within the folder, and from a snapshot of Hugging Face's cache, or a folder in it, into the blobs
    beside it, those that its repositories share too.
    """
    home = folder.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise FormatError(path, "", "is a link that leads nowhere, or no name: download the model again") from error
    snapshots = [each for each in (home.parent, home.parent.parent) if each.name == "snapshots"]
    blobs = [each / "blobs" for place in snapshots for each in (place.parent, place.parent.parent)]
    if not any(target.is_relative_to(each) for each in (home, *blobs)):
        raise FormatError(path, "", "is a link that leads out of the folder: put the file itself there")
    require_fetched(path)


def require_fetched(path: Path) -> None:
    """Raises FormatError for the few lines that a git clone without Git LFS has in place of a large file."""
    if not os.path.isfile(path):  # to open a pipe is to wait
        return
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError:
        return  # its reader says why
    if start == _POINTER:
        raise FormatError(path, "", "is a pointer of Git LFS, not the file itself: run git lfs pull, or bitnet pull")

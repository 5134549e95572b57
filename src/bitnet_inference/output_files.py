"""Files that are written at the end of some work: refused before it, and afterwards whole or not there."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from bitnet_inference.errors import InvalidParams


def refuse_unwritable(file: Path) -> None:
    """Raise InvalidParams where write_whole could not write the file: better before the work than after."""
    if str(file) == "-":
        raise InvalidParams("- cannot be written: this goes into a file: give its name")
    _require_name(file)
    folder = file.resolve().parent
    if not folder.is_dir():
        raise InvalidParams(f"{file} cannot be written: there is no folder {folder}: make it, or choose another")
    touched = [*([file] if file.exists() else []), *([folder] if _is_replaced(file) else [])]
    if file.is_dir() or not all(os.access(each, os.W_OK) for each in touched):
        raise InvalidParams(f"{file} cannot be written: give a file in a folder that you may write to")


def _require_name(file: Path) -> None:
    """Refuse what no file can be called, links in a circle, and what lies in folders that may not be looked into."""
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidParams(f"{str(file)!r:.300} cannot be written: {why}: choose another name") from None


def write_whole(file: Path, text: str) -> None:
    """Write a file that nobody sees half written; what was there before is replaced. Raises InvalidParams."""
    with whole_file(file) as out:
        out.write(text.encode())


@contextmanager
def whole_file(file: Path) -> Iterator[BinaryIO]:
    """The same in pieces: the file is there when the block ends, and as it was before where the block raises."""
    target = file.resolve() if _is_replaced(file) else file  # a pipe without a name is nowhere, as behind /dev/stdout
    # Of a long name a piece: with the ending it would be too long.
    partial = target.with_name(f"{target.name[:50]}.{secrets.token_hex(4)}.part") if _is_replaced(file) else target
    try:
        with partial.open("wb") as out:
            yield out
        if partial != target:
            partial.replace(target)
    except OSError as error:
        raise InvalidParams(f"{file} cannot be written: {error.strerror}: free space, or choose another") from None
    finally:
        if partial != target:
            partial.unlink(missing_ok=True)


@contextmanager
def whole_files(file: Path) -> Iterator[Path]:
    """The same for a file and others beside it: a new folder, whose files go into that of `file` when the block ends.

    They replace those of their names, `file` itself last.
    """
    folder = file.resolve().parent
    try:
        with TemporaryDirectory(prefix=".", suffix=".part", dir=folder) as name:
            yield Path(name)
            for made in sorted(Path(name).iterdir(), key=lambda each: each.name == file.name):
                made.replace(folder / made.name)
    except OSError as error:
        raise InvalidParams(f"{file} cannot be written: {error.strerror}: free space, or choose another") from None


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """The same for a folder: makes a new one, and the only thing in it becomes `target` when the block ends.

    A folder that was there before is replaced.
    """
    target = target.resolve()
    try:
        with TemporaryDirectory(prefix=".", suffix=".part", dir=target.parent) as name:
            yield Path(name)
            (made,) = Path(name).iterdir()
            _put_in_place(made, target, Path(name) / f"{secrets.token_hex(4)}.old")
    except OSError as error:
        raise InvalidParams(f"{target} cannot be written: {error.strerror}: free space, or choose another") from None


def _put_in_place(made: Path, target: Path, old: Path) -> None:
    """Move a folder to `target`; what is there goes to `old`, and comes back where that fails."""
    if target.exists():
        target.replace(old)
    try:
        made.replace(target)
    except OSError:
        if old.exists():
            old.replace(target)
        raise


def _is_replaced(file: Path) -> bool:
    """Devices and pipes are written to instead."""
    return file.is_file() or not file.exists()

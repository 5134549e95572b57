"""Hugging Face's cache on this machine: repositories as folders of commits, whose files are links to blobs.

    models--owner--name/refs/main          which commit a branch had when it was fetched
                        refs/bitnet-inference/main   the same, but for what `bitnet pull` has fetched
                        snapshots/COMMIT/...         links
                        blobs/HASH                   the files

Other tools write there too. So a model is opened at the commit that was pulled, even where another tool has moved the
branch.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.errors import DownloadError, InvalidParams, NotFound
from bitnet_inference.hub.names import is_repository

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BEGINNING = re.compile(r"[0-9a-f]{7,40}")
_OURS = "bitnet-inference"


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository in the cache; `refs` are the branches that point to it here."""

    repository: str
    commit: str
    folder: Path
    refs: tuple[str, ...]


def is_commit(text: str) -> bool:
    """Whether a text is the whole name of a commit."""
    return bool(_COMMIT.fullmatch(text))


def folder_of(cache: Path, repository: str) -> Path:
    """The folder of a repository, whether it is there or not."""
    return cache / f"models--{repository.replace('/', '--')}"


def repositories(cache: Path) -> list[str]:
    """The repositories of models that are in the cache. Raises NotFound where it may not be read."""
    with _accessible(cache):
        folders = sorted(each.name for each in _entries(cache) if each.name.startswith("models--"))
    names = (folder.removeprefix("models--").replace("--", "/", 1) for folder in folders)
    return [name for name in names if is_repository(name)]


def snapshots(cache: Path, repository: str) -> list[Snapshot]:
    """The commits of a repository that are in the cache. Raises NotFound where they may not be read."""
    folder = folder_of(cache, repository)
    with _accessible(folder):
        refs = list(_refs(folder))
        commits = sorted(each.name for each in _entries(folder / "snapshots") if is_commit(each.name) and each.is_dir())
    branches = {commit: tuple(sorted({name for name, pointed in refs if pointed == commit})) for commit in commits}
    return [Snapshot(repository, commit, folder / "snapshots" / commit, branches[commit]) for commit in commits]


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, if there is one. Path.glob would take one that may not be read for empty."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextmanager
def _accessible(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # it may be somebody else's
        raise NotFound(f"{folder} cannot be used ({error.strerror}): check its permissions") from None


def find(cache: Path, repository: str, revision: str) -> Snapshot | None:
    """The commit that a revision means here: the one that was pulled, or else the one that another tool has fetched."""
    folder, found = folder_of(cache, repository), snapshots(cache, repository)
    commit = _read_ref(folder / "refs" / _OURS / revision) or _read_ref(folder / "refs" / revision) or revision
    if not _BEGINNING.fullmatch(commit):
        return None
    alike = [each for each in found if each.commit.startswith(commit)]
    return alike[0] if len(alike) == 1 else None


def record(cache: Path, repository: str, revision: str, commit: str) -> None:
    """Note which commit a revision meant when it was pulled."""
    for ref in (f"{_OURS}/{revision}", revision):
        if revision != commit:
            path = folder_of(cache, repository) / "refs" / ref
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
            partial.write_text(commit)
            partial.replace(path)


def link(cache: Path, repository: str, commit: str, file: str, blob: str) -> None:
    """Let a file of a commit be a blob of the repository."""
    folder = folder_of(cache, repository)
    path = folder / "snapshots" / commit / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(f"{path.parent} is a link that leads out of the cache: remove it")
    partial = path.with_name(f".{secrets.token_hex(8)}.tmp")
    partial.symlink_to(os.path.relpath(folder / "blobs" / blob, path.parent))
    partial.replace(path)


def find_removable(cache: Path, repository: str, revision: str | None, name: str) -> Snapshot | None:
    """The commit of this revision, where one is given. Raises what `remove` would raise of what is not there."""
    folder = folder_of(cache, repository)
    snapshots(cache, repository)  # raises where we may not look
    if not os.path.lexists(folder):
        raise NotFound(f"{name} is not in {cache}: bitnet list shows what is there")
    if folder.is_symlink() or not folder.is_dir():
        raise InvalidParams(f"{folder} is no folder of the cache but a link or a file: remove it yourself")
    doomed = None if revision is None else find(cache, repository, revision)
    if revision is not None and doomed is None:
        raise NotFound(f"{name} is not in {cache}: bitnet list shows the revisions that are there")
    return doomed


def remove(cache: Path, repository: str, revision: str | None, name: str) -> int:
    """Remove a repository, or one commit of it and its blobs that no other has; how many bytes that frees.

    Of a repository of which nothing else is here, not even a half-fetched file, all goes with its last commit.
    Raises NotFound where it is not there or may not be touched, and InvalidParams where the cache leads elsewhere.
    """
    folder, doomed = folder_of(cache, repository), find_removable(cache, repository, revision, name)
    with _accessible(folder):
        before = size_of(folder)
        if doomed is not None:
            _remove_commit(folder, doomed.commit)
            if snapshots(cache, repository) or _entries(folder / "blobs"):
                return before - size_of(folder)
        shutil.rmtree(folder)
        shutil.rmtree(cache / ".locks" / folder.name, ignore_errors=True)
        return before


def _remove_commit(folder: Path, commit: str) -> None:
    for name, pointed in list(_refs(folder, ours=True)):
        if pointed == commit:
            (folder / "refs" / name).unlink()
    doomed = _linked(folder / "snapshots" / commit)
    shutil.rmtree(folder / "snapshots" / commit)
    (folder / "trees" / f"{commit}.json").unlink(missing_ok=True)
    doomed -= _linked(folder / "snapshots")
    for blob in (folder / "blobs").glob("*"):  # those that no commit links are on their way, or wait for the next pull
        if os.path.normpath(blob) in doomed:
            blob.unlink()


def _linked(folder: Path) -> set[str]:
    """The files that links in a folder lead to."""
    return {os.path.normpath(path.parent / path.readlink()) for path in folder.rglob("*") if path.is_symlink()}


def size_of(folder: Path) -> int:
    """The bytes of the files in a folder, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _refs(folder: Path, ours: bool = False) -> Iterator[tuple[str, str]]:
    """The branches and what they point to; those that `bitnet pull` has noted under their own names too."""
    for path in sorted((folder / "refs").rglob("*")):
        if commit := _read_ref(path):
            name = path.relative_to(folder / "refs").as_posix()
            yield (name if ours else name.removeprefix(f"{_OURS}/")), commit


def _read_ref(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(64).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if is_commit(text) else ""

"""One file from the hub into the cache: on from where it was cut, never larger than announced, of the right hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from bitnet_inference.config import HubConfig
from bitnet_inference.errors import DownloadError
from bitnet_inference.hub.cache import folder_of
from bitnet_inference.hub.client import Hub, Interrupted, RemoteFile, locked
from bitnet_inference.hub.tries import insist

_PIECE_BYTES = 1 << 20
_SHA256_LETTERS = 64

Moved = Callable[[int], None]  # called with bytes that have come, below zero for what is thrown away


def blob_of(cache: Path, repository: str, file: RemoteFile) -> Path:
    """Where the bytes of a file lie in the cache, once they are there."""
    return folder_of(cache, repository) / "blobs" / file.blob


def partial_of(blob: Path) -> Path:
    """Where they lie until they are whole."""
    return blob.with_name(f"{blob.name}.incomplete")


def is_there(blob: Path, file: RemoteFile) -> bool:
    """Whether a blob has the size that its file has."""
    return blob.is_file() and blob.stat().st_size == file.num_bytes


def download(hub: Hub, config: HubConfig, repository: str, commit: str, file: RemoteFile, moved: Moved) -> None:
    """Have a file in the cache. Raises NotFound and DownloadError; what has come then is kept for the next try.

    Bytes with the wrong hash are not kept.
    """
    blob, what = blob_of(config.cache, repository, file), f"{repository}: {file.path}"
    with locked(config.cache, repository, file.blob):
        if is_there(blob, file):
            with blob.open("rb") as there:
                if Partial(there, file, what, moved).digest() == file.blob:
                    return
            moved(-file.num_bytes)  # it was damaged since, and is replaced
        blob.parent.mkdir(parents=True, exist_ok=True)
        with partial_of(blob).open("ab+") as out:
            part = Partial(out, file, what, moved)
            insist(partial(_complete, hub, repository, commit, part), config, num_bytes=lambda: part.num_bytes)
        if part.digest() != file.blob:
            partial_of(blob).unlink(missing_ok=True)
            why = "what came is not what was announced (its hash differs), and is thrown away"
            raise DownloadError(f"{what}: {why}: pull again, or check HF_ENDPOINT")
        try:
            partial_of(blob).replace(blob)
        except FileNotFoundError:
            raise removed_meanwhile(what) from None


def removed_meanwhile(what: str) -> DownloadError:
    """What is said of a file that had come, and that somebody has removed before all had."""
    return DownloadError(f"{what} was removed meanwhile: pull again")


def _complete(hub: Hub, repository: str, commit: str, part: Partial) -> None:
    """Fetch what is not there. Raises Interrupted where less comes."""
    if part.num_bytes < part.file.num_bytes:
        hub.fetch(repository, commit, part.file, part)
    if part.num_bytes < part.file.num_bytes:
        raise Interrupted(f"{part.what}: the hub sends less than it announced: pull again")


class Partial:
    """A file that is on its way: what was there before counts, and no byte too many is written."""

    def __init__(self, out: IO[bytes], file: RemoteFile, what: str, moved: Moved) -> None:
        """`out` is open for reading and appending; `what` is the file's name in errors."""
        self.file, self.what, self.num_bytes = file, what, 0
        self._out, self._moved = out, moved
        self._hash = self._new_hash()
        out.seek(0)
        while piece := out.read(_PIECE_BYTES):
            self._count(piece)
        if self.num_bytes > file.num_bytes:
            self.restart()

    def restart(self) -> None:
        """Forget what is there."""
        self._out.truncate(0)
        self._moved(-self.num_bytes)
        self.num_bytes, self._hash = 0, self._new_hash()

    def write(self, data: bytes) -> None:
        """Take the next bytes. Raises DownloadError for one too many, and where the disk takes no more."""
        if self.num_bytes + len(data) > self.file.num_bytes:
            self.restart()
            why = f"the hub sends more than the {self.file.num_bytes} bytes that it announced"
            raise DownloadError(f"{self.what}: {why}: check HF_ENDPOINT")
        try:
            self._out.write(data)
            self._out.flush()
        except OSError as error:
            why = f"cannot be written to {self._out.name} ({error.strerror})"
            raise DownloadError(f"{self.what}: {why}: free space and pull again, which goes on from there") from None
        self._count(data)

    def digest(self) -> str:
        """The hash of all that is there, of the kind that the hub announced."""
        return str(self._hash.hexdigest())

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)
        self._moved(len(data))

    def _new_hash(self) -> Any:
        if len(self.file.blob) == _SHA256_LETTERS:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.file.num_bytes)  # as git names what it keeps

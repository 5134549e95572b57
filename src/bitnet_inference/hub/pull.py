"""Models from the Hugging Face Hub into the cache that its own tools share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bitnet_inference.amounts import told_bytes
from bitnet_inference.config import HubConfig, check_progress
from bitnet_inference.errors import DownloadError
from bitnet_inference.hub import cache as hub_cache
from bitnet_inference.hub.client import Busy, Hub, RemoteFile
from bitnet_inference.hub.download import blob_of, download, is_there, partial_of, removed_meanwhile
from bitnet_inference.hub.files import choose, is_weights, model_in
from bitnet_inference.hub.names import Wanted, is_inside, parse
from bitnet_inference.hub.tries import insist

_MAX_WEIGHTS_BYTES = 1 << 40
_MAX_TEXT_BYTES = 64 << 20  # of a file that holds no weights
_MAX_FILES = 1000
_SPARE_BYTES = 64 << 20  # a disk is not filled to its last byte

Progress = Callable[[int, int], None] | None


@dataclass(frozen=True)
class Pulled:
    """A model that has been pulled: where it lies, the commit that it is, and its size."""

    path: Path
    repository: str
    commit: str
    num_bytes: int


def pull(name: str, *, config: HubConfig | None = None, progress: Progress = None) -> Pulled:
    """Fetch a model: a name of models.toml, owner/repository, or owner/repository/FILE, each with @REVISION or without.

    What is there already is not fetched again, and what was cut goes on. `progress(done, total)` counts bytes.
    `config`: what the environment says where it is None. Raises NotFound, Unsupported, InvalidParams, DownloadError.
    """
    check_progress(progress)
    config = config or HubConfig.from_env()
    wanted = parse(name)
    hub = Hub(config)
    commit, listing = insist(partial(hub.listing, wanted), config, Busy)
    if hub_cache.is_commit(wanted.revision) and commit != wanted.revision:
        raise DownloadError(f"{name}: the hub answers with the commit {commit}: check HF_ENDPOINT")
    files = _chosen(wanted, listing)
    try:
        _check_space(config.cache, wanted.repository, files)
        _fetch(hub, config, wanted, commit, files, progress)
    except OSError as error:
        raise DownloadError(f"{name}: {config.cache} cannot be written to ({error}): set HF_HUB_CACHE") from None
    folder = hub_cache.folder_of(config.cache, wanted.repository) / "snapshots" / commit
    path = model_in(folder, wanted.files, wanted.repository)
    if path is None:
        raise DownloadError(f"{name}: the repository lacks files that its index names: tell its owners")
    return Pulled(path, wanted.repository, commit, sum(file.num_bytes for file in files))


def _chosen(wanted: Wanted, listing: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The announced files that are fetched, those that open a model last. Raises DownloadError for hostile ones."""
    by_path = {file.path: file for file in listing}
    names = choose(wanted.repository, list(by_path), wanted.files)
    if len(names) > _MAX_FILES:
        raise DownloadError(f"{wanted.repository} has {len(names)} files of a model: at most {_MAX_FILES} are fetched")
    for name in names:
        limit = _MAX_WEIGHTS_BYTES if is_weights(name) else _MAX_TEXT_BYTES
        if not is_inside(name):
            raise DownloadError(f"{wanted.repository} has a file {name!a}, which leads elsewhere: don't use it")
        if by_path[name].num_bytes > limit:
            size = by_path[name].num_bytes
            raise DownloadError(f"{wanted.repository}: {name} would have {size} bytes, at most {limit}: don't use it")
    return [by_path[name] for name in sorted(names, key=lambda name: (name in ("config.json", "params.json"), name))]


def _check_space(cache: Path, repository: str, files: Sequence[RemoteFile]) -> None:
    """Raise DownloadError where the disk has no room for what is to come."""
    needed = 0
    for file in files:
        blob = blob_of(cache, repository, file)
        if not is_there(blob, file):
            begun = partial_of(blob)
            needed += file.num_bytes - (min(begun.stat().st_size, file.num_bytes) if begun.is_file() else 0)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    if needed and needed + _SPARE_BYTES > free:
        room = f"{told_bytes(needed)} are to come, and {cache} has room for {told_bytes(free)}"
        raise DownloadError(f"{repository}: {room}: free space, or choose another folder with HF_HUB_CACHE")


def _fetch(
    hub: Hub, config: HubConfig, wanted: Wanted, commit: str, files: Sequence[RemoteFile], progress: Progress
) -> None:
    done, total = 0, sum(file.num_bytes for file in files)

    def moved(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress(done, total)

    for file in files:
        download(hub, config, wanted.repository, commit, file, moved)
    for file in files:  # only now, so that nothing is opened that is not whole
        if not is_there(blob_of(config.cache, wanted.repository, file), file):
            raise removed_meanwhile(f"{wanted.repository}: {file.path}")
        hub_cache.link(config.cache, wanted.repository, commit, file.path, file.blob)
    hub_cache.record(config.cache, wanted.repository, wanted.revision, commit)

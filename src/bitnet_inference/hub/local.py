"""Models by name, as they lie in the cache: found and removed. Nothing here asks the network; `pull` does."""

from __future__ import annotations

from pathlib import Path

from bitnet_inference.config import HubConfig
from bitnet_inference.errors import InvalidParams, NotFound
from bitnet_inference.hub import cache as hub_cache
from bitnet_inference.hub.files import model_in
from bitnet_inference.hub.names import parse


def locate(name: str, *, config: HubConfig | None = None) -> Path:
    """Where a model lies that was pulled, by us or by another tool: at the commit that was pulled.

    Raises NotFound, with the command that pulls it, and InvalidParams.
    """
    config = config or HubConfig.from_env()
    wanted = parse(name)
    snapshot = hub_cache.find(config.cache, wanted.repository, wanted.revision)
    path = model_in(snapshot.folder, wanted.files, wanted.repository) if snapshot else None
    if path is None:
        part = "is here in part only" if snapshot else "has not been pulled"
        raise NotFound(f"{name} {part}: bitnet pull {name}")
    return path


def is_here(name: str) -> bool:
    """Whether a model can be located. Raises InvalidParams."""
    try:
        locate(name)
    except NotFound:
        return False
    return True


def check_removable(name: str) -> None:
    """Raises what `remove` would raise."""
    hub_cache.find_removable(*_removable(name, HubConfig.from_env()))


def remove(name: str, *, config: HubConfig | None = None) -> int:
    """Remove all that was fetched of a repository, or with @REVISION one commit; how many bytes that frees.

    Raises NotFound and InvalidParams.
    """
    return hub_cache.remove(*_removable(name, config or HubConfig.from_env()))


def _removable(name: str, config: HubConfig) -> tuple[Path, str, str | None, str]:
    wanted = parse(name)
    base, at, revision = wanted.name.partition("@")  # without the host that it may have as an address
    if base.count("/") > 1:
        raise InvalidParams(f"{name} is one file of a repository: remove {wanted.repository}, with all of its files")
    return config.cache, wanted.repository, revision if at else None, name

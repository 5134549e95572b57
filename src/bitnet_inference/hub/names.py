"""Names of models: those of models.toml, and owner/repository of the Hugging Face Hub."""

from __future__ import annotations

import difflib
import glob
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitnet_inference.errors import InvalidParams, NotFound

_REPOSITORY = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?/[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*", re.ASCII)
# How a browser's address, and Ollama, begin a name; and what stands in the address of a revision or a file.
_HOST = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/", re.IGNORECASE)
_PAGE = re.compile(r"([^/]+/[^/]+)/(?:tree|blob|resolve)/([^/?]+)(/[^?]*)?(?:\?.*)?")
_FILE_ENDINGS = (".gguf", ".safetensors", ".onnx", ".bin", ".json")  # of files on this disk, and of no repository
_MAX_NAME = 96
_NUM_NEAR = 3


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of models.toml, which says what the fields are. `size_mb` and `license` are None where unknown."""

    name: str
    repository: str
    revision: str
    what: str
    aliases: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    size_mb: int | None = None
    license: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a name stands for: some files of a repository at a revision, and its entry where it has one.

    `name` is how the user wrote it. `files` are patterns of weights, empty for those that can be opened.
    """

    name: str
    repository: str
    revision: str
    files: tuple[str, ...]
    entry: Entry | None


@cache
def registry() -> Mapping[str, Entry]:
    """The entries of models.toml by name, in its order."""
    text = (Path(__file__).parent / "models.toml").read_text(encoding="utf-8")
    return {name: _entry(name, fields) for name, fields in tomllib.loads(text).items()}


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    aliases, files = tuple(fields.pop("aliases", ())), tuple(fields.pop("files", ()))
    return Entry(name=name, aliases=aliases, files=files, **fields)


def parse(text: str) -> Wanted:
    """What NAME, owner/repository or owner/repository/FILE stands for, each with @REVISION or without.

    The address of a repository or of its file on huggingface.co does so too. Raises NotFound for a name that
    models.toml doesn't have, and InvalidParams for what can be no name.
    """
    if not isinstance(text, str):
        raise InvalidParams(f"the name of a model must be a string, not {type(text).__name__}")
    if not text:
        raise InvalidParams("the name of a model is empty: give one that bitnet show lists, or owner/repository")
    text = _without_host(text)
    name, at, revision = text.partition("@")
    if name == "default":
        raise InvalidParams('"default" comes with the package, not from the hub: bitnet inspect tells what it is')
    if at and not _is_revision(revision):
        raise InvalidParams(f"{text[:200]!r} names no revision behind @: give a branch, a tag or a commit")
    entry = _by_name(name)
    if entry is not None:
        files, repository, usual = entry.files, entry.repository, entry.revision
    else:
        repository, files = _split(name)
        entry = _of_repository(repository)
        files, usual = files or (entry.files if entry else ()), "main"
    revision = revision or usual
    return Wanted(name=text, repository=repository, revision=revision, files=files, entry=entry)


def is_in_registry(text: str) -> bool:
    """Whether a text is a name in models.toml, or the repository of one."""
    return (_by_name(text) or _of_repository(text)) is not None


def is_name(text: str) -> bool:
    """Whether a text stands for a model on the hub, pulled or not."""
    try:
        parse(text)
    except (InvalidParams, NotFound):
        return False
    return True


def name_of(repository: str) -> str:
    """The name that a repository has in models.toml, or its own."""
    entry = _of_repository(repository)
    return repository if entry is None else entry.name


def _without_host(text: str) -> str:
    if (host := _HOST.match(text)) is None:
        return text
    name = text[host.end() :].rstrip("/")
    page = _PAGE.fullmatch(name)
    return name if page is None else f"{page[1]}{page[3] or ''}@{page[2]}"


def _by_name(name: str) -> Entry | None:
    wanted = name.lower()
    return next((each for each in registry().values() if wanted in (each.name, *each.aliases)), None)


def _of_repository(repository: str) -> Entry | None:
    return next((each for each in registry().values() if each.repository == repository), None)


def _split(name: str) -> tuple[str, tuple[str, ...]]:
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    if not repository:
        raise NotFound(_unknown(name))
    repository = f"{owner}/{repository}"
    is_path = not file and repository.lower().endswith(_FILE_ENDINGS)
    if is_path or not is_repository(repository) or (file and not is_inside(file)) or name.endswith("/"):
        raise InvalidParams(
            f"{name[:200]!r} is no name of a model: give NAME, owner/repository, or owner/repository/FILE"
        )
    return repository, (glob.escape(file),) if file else ()


def is_repository(text: str) -> bool:
    """Whether a text has the form owner/name, as the hub demands it."""
    plain = len(text) <= _MAX_NAME and _REPOSITORY.fullmatch(text)
    return bool(plain) and not any(each in text for each in ("--", "..")) and not text.endswith(".git")


def is_inside(file: str) -> bool:
    """Whether the path of a file in a repository stays in the folder that it is put into, on every system."""
    parts = file.split("/")
    plain = all(part.strip(" .") and len(part) < 200 for part in parts)
    return plain and len(parts) < 9 and file.isprintable() and not any(each in file for each in '\\:*?"<>|')


def _is_revision(text: str) -> bool:
    return (
        len(text) <= _MAX_NAME
        and bool(_REVISION.fullmatch(text))
        and not any(part.strip(".") == "" or part.endswith((".lock", ".")) for part in text.split("/"))
    )


def _unknown(name: str) -> str:
    names = [each for entry in registry().values() for each in (entry.name, *entry.aliases)]
    near = difflib.get_close_matches(name.lower(), names, _NUM_NEAR)
    shown = f"did you mean {' or '.join(near)}?" if near else "bitnet show lists the names;"
    return f"no model is called {name[:200]}: {shown} others are owner/repository, as on the Hugging Face Hub"

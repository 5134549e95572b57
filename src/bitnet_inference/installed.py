"""Which models are on this machine, and what is known of one: for `bitnet list` and `bitnet show`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.amounts import told_bytes
from bitnet_inference.config import HubConfig
from bitnet_inference.errors import BitNetError, InvalidParams, NotFound
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.gguf import GgufCheckpoint
from bitnet_inference.formats.gpu import GpuCheckpoint
from bitnet_inference.formats.hf import HuggingFaceCheckpoint
from bitnet_inference.formats.meta import MetaCheckpoint
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.packed import PackedCheckpoint
from bitnet_inference.hub.cache import Snapshot, find, folder_of, repositories, snapshots
from bitnet_inference.hub.files import model_in, without_later_parts
from bitnet_inference.hub.folders import models_under
from bitnet_inference.hub.local import is_here
from bitnet_inference.hub.names import Wanted, name_of, parse, registry
from bitnet_inference.model_folder import load_text_files
from bitnet_inference.text.folder import lack_of_words

_FORMATS: dict[type, str] = {
    HuggingFaceCheckpoint: "Hugging Face",
    GgufCheckpoint: "GGUF",
    MetaCheckpoint: "Meta",
    PackedCheckpoint: "packed",
    GpuCheckpoint: "Microsoft's GPU code",
    OnnxCheckpoint: "ONNX",
    CoreMLCheckpoint: "Core ML",
}
_SHOWN_COMMIT = 12
_MAX_CARD_BYTES = 1 << 16


@dataclass(frozen=True)
class Installed:
    """A model on this machine. `problem` says why it cannot be opened, and is empty where it can.

    `name` is what LLM.load takes, for those in the cache; `revision` has branches and the commit.
    """

    name: str
    format: str
    num_bytes: int
    revision: str
    path: Path
    problem: str = ""


def installed_models(gguf_folders: Iterable[str | Path] = (), *, config: HubConfig | None = None) -> list[Installed]:
    """The models in the cache of Hugging Face's tools, whoever has fetched them, and the GGUF files in other folders.

    No weights are read. Raises NotFound for a folder that is not there, and InvalidParams for what is no list.
    """
    if isinstance(gguf_folders, str | Path):
        raise InvalidParams(f"gguf_folders is {str(gguf_folders)!r:.80}: give a list of folders")
    cache = (config or HubConfig.from_env()).cache
    found = [_look(*each) for repository in repositories(cache) for each in _cached(cache, repository)]
    return found + [_look(name, "", path) for folder in gguf_folders for name, path in models_under(Path(folder))]


def show_model(name: str) -> list[tuple[str, str]]:
    """What is known of a model by name, and what of it is here: lines of a title and a value.

    Raises NotFound for a name that nobody has, and InvalidParams.
    """
    wanted = parse(name)
    snapshot = find(HubConfig.from_env().cache, wanted.repository, wanted.revision)
    return [
        *_known(wanted, snapshot),
        *(_present(snapshot, wanted) if snapshot else [("here", f"no: bitnet pull {name}")]),
    ]


def known_models() -> list[tuple[str, str, str, str]]:
    """The models that have names: name, size, whether it is here, and what it is."""
    return [
        (
            each.name,
            told_bytes(1e6 * each.size_mb) if each.size_mb else "",
            "here" if is_here(each.name) else "",
            each.what,
        )
        for each in registry().values()
    ]


def _cached(cache: Path, repository: str) -> Iterator[tuple[str, str, Path]]:
    """Name, revision and path of what is in the cache of a repository."""
    name = name_of(repository)
    wanted = parse(name)
    try:
        usual, found = find(cache, repository, wanted.revision), snapshots(cache, repository)
    except NotFound:
        yield name, "", folder_of(cache, repository)  # which cannot be read, as looking at it says
        return
    for each in found:
        full = name if each == usual else f"{repository}@{each.commit[:_SHOWN_COMMIT]}"
        revision = " ".join((*each.refs, each.commit[:_SHOWN_COMMIT]))
        ggufs = without_later_parts(
            sorted(path.relative_to(each.folder).as_posix() for path in each.folder.rglob("*.gguf"))
        )
        if len(ggufs) > 1 and not wanted.files and not (each.folder / "config.json").exists():
            _, at, commit = full.partition("@")
            yield from ((f"{repository}/{file}{at}{commit}", revision, each.folder / file) for file in ggufs)
        else:
            yield full, revision, model_in(each.folder, wanted.files) or each.folder


def _look(name: str, revision: str, path: Path) -> Installed:
    try:
        checkpoint = open_checkpoint(path)
    except BitNetError as error:
        return Installed(name, "", 0, revision, path, str(error))
    return Installed(name, _FORMATS[type(checkpoint)], checkpoint.num_bytes, revision, path)


def _known(wanted: Wanted, snapshot: Snapshot | None) -> Iterator[tuple[str, str]]:
    entry = wanted.entry
    if entry:
        yield "name", ", ".join((entry.name, *entry.aliases))
        yield "what", entry.what
    yield "repository", wanted.repository
    yield "revision", wanted.revision
    if entry and entry.size_mb:
        yield "size", f"about {told_bytes(1e6 * entry.size_mb)}"
    license = (_license(snapshot.folder) if snapshot else "") or (entry and entry.license)
    if license:
        yield "license", license


def _present(snapshot: Snapshot, wanted: Wanted) -> Iterator[tuple[str, str]]:
    path = model_in(snapshot.folder, wanted.files, wanted.repository)
    yield "here", str(path) if path else f"in part only: bitnet pull {wanted.name}"
    yield "commit", snapshot.commit
    for file in sorted(each for each in snapshot.folder.rglob("*") if each.is_file()):
        yield "file", f"{told_bytes(file.stat().st_size):>10}  {file.relative_to(snapshot.folder).as_posix()}"
    if path:
        try:
            texts = load_text_files(open_checkpoint(path))
            if texts.has_words:
                yield "chat template", ", ".join(sorted(texts.templates)) or "none: it continues text"
            else:
                yield "problem", str(lack_of_words(texts.path))
        except BitNetError as error:
            yield "problem", str(error)


def _license(folder: Path) -> str:
    """What the head of the model's card says."""
    try:
        with (folder / "README.md").open("rb") as file:
            lines = file.read(_MAX_CARD_BYTES).decode("utf-8", "replace").split("---", 2)[1].splitlines()
    except (OSError, IndexError):
        return ""
    said = dict(line.split(":", 1) for line in lines if line.startswith(("license:", "license_name:")))
    text = said.get("license_name", said.get("license", "")).strip()[:80]
    return text if text.isprintable() else ""

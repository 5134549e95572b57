"""The folder X.mlpackage: which files belong to it. None outside of it is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.json_files import Fields, file_size, read_json, shown
from bitnet_inference.own_files import require_own

SUFFIX, MANIFEST = ".mlpackage", "Manifest.json"
PROGRAM, WEIGHTS, TEXTS = "com.apple.CoreML/model.mlmodel", "com.apple.CoreML/weights", "bitnet-inference"
WEIGHTS_FILE = "weight.bin"
_ITEMS = (PROGRAM, WEIGHTS, TEXTS)
_CURE = "convert the model again"


@dataclass(frozen=True)
class Package:
    """Where the parts of a package lie; `texts` is the folder of config.json and the tokenizer."""

    program: Path
    weights: Path
    texts: Path

    @property
    def num_bytes(self) -> int:
        """Of the program and its weights."""
        return file_size(self.program) + file_size(self.weights)


def open_package(folder: Path) -> Package:
    """Check the manifest and what it names.

    Raises FormatError where something is missing, or leads out of the folder, and Unsupported for a package of others.
    """
    if folder.resolve().suffix != SUFFIX:
        raise FormatError(folder, "", f"Core ML wants a name that ends in {SUFFIX}: rename it")
    require_own(folder, folder / MANIFEST)
    manifest = read_json(folder / MANIFEST)
    entries = manifest.section("itemInfoEntries") or Fields(manifest.path, {})
    if len(entries.values) > len(_ITEMS):
        raise Unsupported(f"{folder}: has {len(entries.values)} items: only packages of `bitnet convert` are read")
    paths = {key: _path(entries, key) for key in entries.values}
    if missing := {PROGRAM, WEIGHTS}.difference(paths.values()):
        raise FormatError(manifest.path, "itemInfoEntries", f"{min(missing)} is missing: {_CURE}")
    if TEXTS not in paths.values():
        raise Unsupported(f"{folder}: holds no tokenizer: only packages of `bitnet convert` are read: {_CURE}")
    if paths.get(manifest.text("rootModelIdentifier", "")) != PROGRAM:
        raise manifest.wrong("rootModelIdentifier", f"is not the key of {PROGRAM}: {_CURE}")
    data = folder / "Data"
    package = Package(data / PROGRAM, data / WEIGHTS / WEIGHTS_FILE, data / TEXTS)
    for each in (package.program, package.weights, package.texts):
        require_own(folder, each)
    if not package.texts.is_dir():
        raise FormatError(package.texts, "", f"is no folder: {_CURE}")
    return package


def _path(entries: Fields, key: str) -> str:
    """Of an item: one that we write, so that none leads elsewhere."""
    entry = entries.section(key)
    path = entry.text("path", "") if entry else ""
    if path not in _ITEMS:
        why = f"{shown(path)} is not one of {', '.join(_ITEMS)}: only packages of `bitnet convert` are read"
        raise FormatError(entries.path, f"itemInfoEntries.{shown(key)}.path", why)
    return path

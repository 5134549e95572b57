"""How a folder of sentence-transformers says that the states of a text become one vector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Pooling
from bitnet_inference.formats.json_files import MAX_JSON_BYTES, Fields, read_bytes, read_json, shown
from bitnet_inference.json_objects import parse_json
from bitnet_inference.own_files import inside, require_own

_MODULES, _FOLDER = "modules.json", "1_Pooling"
_KINDS = ("Transformer", "Pooling", "Normalize")  # modules that an embedding may pass through

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "mean": "mean", "lasttoken": "last",
}  # fmt: skip


def read_pooling(folder: Path) -> Pooling | None:
    """What the config.json of the pooling says; None where there is none.

    Raises Unsupported for other ways than two, and where modules.json has vectors go through more than is computed.
    """
    file = inside(folder, _pooling_folder(folder)) / "config.json"
    if not os.path.lexists(file):
        return None
    require_own(folder, file)
    fields = read_json(file)
    modes = [key for key in fields.values if key.startswith("pooling_mode_") and fields.flag(key)]
    modes += [fields.text("pooling_mode", "")] if "pooling_mode" in fields else []
    if len(modes) != 1 or modes[0] not in _MODES:
        raise Unsupported(f"{file}: pooling by {shown(modes)}: only the mean and the last token are supported")
    return _MODES[modes[0]]


def _pooling_folder(folder: Path) -> str:
    """Where modules.json has the pooling; without one, where it usually is."""
    modules = list(_modules(folder))
    kinds = [module.text("type", "").rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:  # no model of embeddings
        return _FOLDER
    for kind in kinds:
        if kind not in _KINDS:
            why = f"{shown(kind)} is not computed, only {', '.join(_KINDS)}"
            raise Unsupported(f"{folder / _MODULES}: {why}: use another model")
    return modules[kinds.index("Pooling")].text("path", _FOLDER)


def _modules(folder: Path) -> Iterator[Fields]:
    file = folder / _MODULES
    if not os.path.lexists(file):
        return
    values = parse_json(read_bytes(inside(folder, _MODULES), MAX_JSON_BYTES), file, "")
    for place, value in enumerate(values if isinstance(values, list) else [values]):
        if not isinstance(value, dict):
            raise FormatError(file, "", f"{shown(value)} is no module: download the file again")
        yield Fields(file, value, f"{place}.")

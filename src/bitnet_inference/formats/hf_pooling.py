"""How a folder of sentence-transformers says that the states of a text become one vector."""

from __future__ import annotations

import os
from pathlib import Path

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.checkpoint import Pooling
from bitnet_inference.formats.json_files import read_json, shown
from bitnet_inference.own_files import require_own

_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "mean": "mean", "lasttoken": "last",
}  # fmt: skip


def read_pooling(folder: Path) -> Pooling | None:
    """What 1_Pooling/config.json says; None where there is none. Raises Unsupported for other ways than two."""
    file = folder / "1_Pooling" / "config.json"
    if not os.path.lexists(file):
        return None
    require_own(folder, file)
    fields = read_json(file)
    modes = [key for key in fields.values if key.startswith("pooling_mode_") and fields.flag(key)]
    modes += [fields.text("pooling_mode", "")] if "pooling_mode" in fields else []
    if len(modes) != 1 or modes[0] not in _MODES:
        raise Unsupported(f"{file}: pooling by {shown(modes)}: only the mean and the last token are supported")
    return _MODES[modes[0]]

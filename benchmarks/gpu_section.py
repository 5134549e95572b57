"""One section of `gpu.py`, in a process of its own: `gpu_section.py NAME FOLDER FILE`.

The numbers are written to FILE after each table, so that they are there whatever comes next.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gpu_kernels
import gpu_model
import torch
from agreement import models_here
from engine import table
from engine_streams import Rows
from gpu_card import Card, describe, measure_card
from synthesize import synthesize

from bitnet_inference.config import is_interpreted
from bitnet_inference.output_files import write_whole

Tables = Iterator[tuple[str, Rows]]


def main() -> None:
    """The command line."""
    name, folder, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    numbers: dict[str, object] = {}
    try:
        _measure(name, folder, file, numbers)
    except Exception as error:  # whatever a card, its driver or a compiler fails with, is a result
        traceback.print_exc()
        numbers["failed"] = " ".join(f"{type(error).__name__}: {error}".split())
    write_whole(file, json.dumps(numbers))
    sys.exit("failed" in numbers)


def _measure(name: str, folder: Path, file: Path, numbers: dict[str, object]) -> None:
    card = measure_card(torch.device("cpu" if is_interpreted() else "cuda"))
    print("\n".join(["", f"-- {name} --", *(f"{what}: {text}" for what, text in describe(card))]), flush=True)
    numbers |= {**dict(describe(card)), "bandwidth": card.bandwidth, "int8_peak": card.int8_peak}
    for title, rows in SECTIONS[name](card, folder):
        print("\n".join(["", *table(title, rows)]), flush=True)
        numbers[title] = rows
        if not all(row.get("agrees", True) for row in rows.values()):
            numbers["failed"] = f"{title}: other logits than the reference's"
        write_whole(file, json.dumps(numbers))


def _kernels(card: Card, folder: Path) -> Tables:
    for name, shape in gpu_kernels.shapes(card).items():
        yield f"products {name} {shape[0]}x{shape[1]}", gpu_kernels.products(card, shape)
    yield "attention", gpu_kernels.attention(card)
    yield "rows", gpu_kernels.rows(card)


def _model(card: Card, folder: Path) -> Tables:
    _write_missing(card, folder)
    for head in ("exact", "int8"):
        yield f"{head} head", gpu_model.speeds(card, folder, head, "cuda")


def _peer(card: Card, folder: Path) -> Tables:
    _write_missing(card, folder)
    yield "peer", gpu_model.peer(card, folder)


def _agreement(card: Card, folder: Path) -> Tables:
    for path in models_here():
        yield path.name, gpu_model.agreement(path, "cuda")


def _write_missing(card: Card, folder: Path) -> None:
    if not (folder / "model.safetensors").exists() and not (folder / "config.json").exists():
        synthesize("bitnet-2b-4t" if card.device.type == "cuda" else "tiny", folder)


SECTIONS: Mapping[str, Callable[[Card, Path], Tables]] = {
    "kernels": _kernels,
    "model": _model,
    "peer": _peer,
    "agreement": _agreement,
}

if __name__ == "__main__":
    main()

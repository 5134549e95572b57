"""The CUDA backend on a real card, checked and measured in one command: `gpu.py [FOLDER] [--section NAMES]`.

- "checks": the tests of the CUDA backend on the card, and the default model's logits beside the reference's;
- "kernels": each kernel alone, by the card's own copy bandwidth and int8 peak, which are measured first;
- "model": a model of the size that counts: loading, prompts, decoding, batches, memory;
- "peer": the same shape in bfloat16 in torch, with cuBLAS and CUDA graphs.

FOLDER is what `synthesize.py --shape bitnet-2b-4t FOLDER` writes; it is written into a temporary folder where none is
given. All of it takes some minutes. Without a card, TRITON_INTERPRET=1 runs it on tiny problems, to try the program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import gpu_kernels
import gpu_model
import torch
from engine import table
from engine_streams import Rows
from gpu_card import Card, describe, measure_card
from synthesize import synthesize

from bitnet_inference.errors import BitNetError, InvalidParams
from bitnet_inference.model_folder import find_model
from bitnet_inference.output_files import refuse_unwritable, write_whole

ROOT = Path(__file__).parents[1]
SECTIONS: Mapping[str, Callable[[Card, Path], Iterator[tuple[str, Rows]]]] = {
    "checks": lambda card, folder: _checks(),
    "kernels": lambda card, folder: _kernels(card),
    "model": lambda card, folder: _model(card, folder),
    "peer": lambda card, folder: iter([("peer", gpu_model.peer(card, folder))]),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path)
    parser.add_argument("--section", metavar="NAMES", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    try:
        sys.exit(_run(arguments))
    except (BitNetError, OSError) as error:
        parser.exit(2, f"gpu.py: {error}\n")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        refuse_unwritable(arguments.json)
    names = [name for name in arguments.section.split(",") if name]
    for name in names:
        if name not in SECTIONS:
            raise InvalidParams(f"--section has {name!r}: choose of {', '.join(SECTIONS)}")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidParams("there is no NVIDIA GPU here: set TRITON_INTERPRET=1 to try the program without one")
    card = measure_card(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print("\n".join(f"{name}: {text}" for name, text in describe(card)), flush=True)
    numbers: dict[str, object] = {**dict(describe(card)), "bandwidth": card.bandwidth, "int8_peak": card.int8_peak}
    with _folder(arguments.folder, card) as folder:
        for name in names:
            for title, rows in SECTIONS[name](card, folder):
                print("\n".join(["", *table(title, rows)]), flush=True)
                numbers[title] = rows
    if arguments.json:
        write_whole(arguments.json, json.dumps(numbers, indent=2) + "\n")
    wrong = [rows for rows in numbers.values() if isinstance(rows, dict) and _is_wrong(rows)]
    return 1 if wrong else 0


def _checks() -> Iterator[tuple[str, Rows]]:
    tests = sorted(map(str, (ROOT / "tests" / "backends").glob("test_cuda*.py")))
    on_card = {"TRITON_INTERPRET": "0"} | os.environ
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, env=on_card, check=False)
    yield "checks", {"tests of the CUDA backend": {"exit status": status.returncode}}
    yield "default model", gpu_model.agreement(find_model("default"), "cuda")


def _is_wrong(rows: Rows) -> bool:
    return any(row.get("exit status") or row.get("other clear tokens") for row in rows.values())


def _kernels(card: Card) -> Iterator[tuple[str, Rows]]:
    yield "products", gpu_kernels.products(card)
    yield "attention", gpu_kernels.attention(card)
    yield "rows", gpu_kernels.rows(card)


def _model(card: Card, folder: Path) -> Iterator[tuple[str, Rows]]:
    for head in ("exact", "int8"):
        yield f"{head} head", gpu_model.speeds(card, folder, head, "cuda")


@contextmanager
def _folder(given: Path | None, card: Card) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        synthesize("bitnet-2b-4t" if card.device.type == "cuda" else "tiny", Path(folder))
        yield Path(folder)


if __name__ == "__main__":
    main()

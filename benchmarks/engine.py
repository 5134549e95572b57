"""What the engine adds to a model, and what it saves: `engine.py FOLDER [--section gap,batch] [--json FILE]`.

Each section is one table. What is compared is measured in turns within one run, and ratios are medians over the
samples; those that other processes disturb are taken again. FOLDER is a model of the size that counts, as
`synthesize.py --shape bitnet-2b-4t FOLDER` writes it. "short", and rows that say "default", take the model that comes
with the package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from engine_drafts import speculation
from engine_loads import batch, overhead, short
from engine_streams import Rows, gap, prefix

from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BitNetError, InvalidParams
from bitnet_inference.model_folder import find_model
from bitnet_inference.output_files import refuse_unwritable, write_whole
from bitnet_inference.probe import Sampler

SECTIONS: Mapping[str, Callable[[Path, EngineConfig, Sampler], Rows]] = {
    "gap": gap,
    "speculation": speculation,
    "prefix": prefix,
    "batch": batch,
    "overhead": overhead,
    "short": short,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", help='a model, or "default"')
    parser.add_argument("--section", metavar="NAMES", help=f"of {', '.join(SECTIONS)}; else all")
    parser.add_argument("--threads", type=int, help="one a physical core otherwise")
    parser.add_argument("--samples", type=int, default=3, help="of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except (BitNetError, OSError) as error:
        parser.exit(2, f"engine.py: {error}\n")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        refuse_unwritable(arguments.json)
    if arguments.samples < 1:
        raise InvalidParams(f"--samples is {arguments.samples}: give at least 1")
    names, folder = choose(arguments.section), find_model(arguments.folder)
    config = EngineConfig.from_env(device="cpu", threads=arguments.threads).resolve()
    numbers: dict[str, object] = {"model": folder.name, "isa": config.isa, "threads": config.threads}
    print(f"{folder.name} on cpu ({config.isa}), {config.threads} threads")
    for name in names:
        sampler = Sampler(num_samples=arguments.samples, min_s=0)
        rows = SECTIONS[name](folder, config, sampler)
        print("\n".join(["", *table(name, rows), f"{sampler.summary()}"]), flush=True)
        numbers[name] = {"rows": rows, "samples": sampler.summary()}
    if arguments.json:
        write_whole(arguments.json, json.dumps(numbers, indent=2) + "\n")


def choose(names: str | None) -> list[str]:
    """The sections to run: those named, or all; raises InvalidParams for others than there are."""
    chosen = list(SECTIONS) if names is None else [name for name in names.split(",") if name]
    for name in chosen:
        if name not in SECTIONS:
            raise InvalidParams(f"--section has {name!r}: choose of {', '.join(SECTIONS)}")
    if not chosen:
        raise InvalidParams(f"--section is empty: choose of {', '.join(SECTIONS)}")
    return list(dict.fromkeys(chosen))


def table(title: str, rows: Rows) -> list[str]:
    """Lines: a title above each column of numbers, a name before each row."""
    width = max(len(title), *map(len, rows))
    columns = list(next(iter(rows.values())))
    cells = [[f"{value:,.4g}" for value in row.values()] for row in rows.values()]
    widths = [max(len(name), *(len(row[at]) for row in cells)) for at, name in enumerate(columns)]
    lines = [(title, columns), *zip(rows, cells, strict=True)]
    return ["   ".join([f"{name:<{width}}", *map(str.rjust, row, widths)]) for name, row in lines]


if __name__ == "__main__":
    main()

"""The server under load and under attack: `serving.py [FOLDER] [--section load,soak] [--json FILE]`.

Each section is one table, and ends with an error where an answer was not the library's. `bitnet serve` runs as a
process of its own, which this one starts; this one makes the load. FOLDER is a model, else the one that comes with the
package. "throughput" is for models of the size that counts, as `synthesize.py --shape bitnet-2b-4t FOLDER` writes them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from engine import table
from engine_streams import Rows
from serving_faults import faults
from serving_load import load, throughput
from serving_soak import soak

from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BitNetError, InvalidParams
from bitnet_inference.model_folder import find_model
from bitnet_inference.output_files import refuse_unwritable, write_whole

SECTIONS: Mapping[str, Callable[[str, int, argparse.Namespace], Rows]] = {
    "load": lambda model, threads, given: load(model, threads, given.streams, rate=given.rate),
    "throughput": lambda model, threads, given: throughput(model, threads, given.samples),
    "soak": lambda model, threads, given: soak(model, threads, given.minutes, given.rate),
    "faults": lambda model, threads, given: faults(model, threads),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="default")
    parser.add_argument("--section", metavar="NAMES", default="load", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--threads", type=int, help="one a physical core otherwise")
    parser.add_argument("--streams", type=int, default=300, help="of load: how many at once")
    parser.add_argument("--rate", type=float, default=25, help="of load and soak: requests a second")
    parser.add_argument("--samples", type=int, default=1, help="of throughput")
    parser.add_argument("--minutes", type=float, default=20, help="of soak")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except (BitNetError, OSError) as error:
        parser.exit(2, f"serving.py: {error}\n")


def _run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        refuse_unwritable(arguments.json)
    for name in ("streams", "rate", "samples", "minutes"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise InvalidParams(f"--{name} is {getattr(arguments, name)}: give more than 0")
    names = [name for name in arguments.section.split(",") if name]
    for name in names:
        if name not in SECTIONS:
            raise InvalidParams(f"--section has {name!r}: choose of {', '.join(SECTIONS)}")
    folder = find_model(arguments.folder)
    config = EngineConfig.from_env(device="cpu", threads=arguments.threads).resolve()
    assert config.threads is not None
    numbers: dict[str, object] = {"model": folder.name, "isa": config.isa, "threads": config.threads}
    print(f"{folder.name} on cpu ({config.isa}), {config.threads} threads")
    for name in names:
        numbers[name] = rows = SECTIONS[name](str(folder), config.threads, arguments)
        print("\n".join(["", *table(name, rows)]), flush=True)
    if arguments.json:
        write_whole(arguments.json, json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()

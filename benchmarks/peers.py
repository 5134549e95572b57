"""Ours beside llama.cpp and Transformers on the same weights, in turns: `peers.py FOLDER [--threads 2] [--json FILE]`.

FOLDER is a BitNet model, as `synthesize.py --shape bitnet-2b-4t FOLDER` writes it. llama.cpp gets the weights as GGUF
(TQ2_0, embedding and head F16), Transformers the folder. A GGUF file in its place, as of `--shape bonsai-1.7b`, is
opened by us and by llama.cpp. All decode greedily, each in a process of its own that sleeps while another is
measured. llama.cpp's arch "bitnet" has SiLU where this model has squared ReLU, so its text differs; what it computes
and reads is as much. A ratio is our speed by theirs: the median over pairs of samples that are taken one right after
the other. Pairs that other processes disturb are taken again.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from peer_engines import NEEDS, Peer, is_installed, llama_cpp_engine, our_engine, transformers_engine
from peer_process import EngineFailed, EngineProcess
from turns import Comparison, Row, Sample, longest, rows_of, take_pairs, take_sample

from bitnet_inference.bench import Workload
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BitNetError, InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.output_files import refuse_unwritable
from bitnet_inference.probe import MAX_ATTEMPTS, MAX_DISTURBANCE, machine_busy_s

INSTALL = 'pip install ".[peers]"'
Running = Sequence[tuple[Peer, EngineProcess]]


@dataclass(frozen=True)
class Result:
    """A row of the table: what, and ours beside each peer that ran it."""

    row: Row
    found: dict[str, Comparison]

    @property
    def ours(self) -> float:
        """Our tokens a second: the median over all pairs."""
        return statistics.median(pair.ours.tokens_s for each in self.found.values() for pair in each.pairs)

    def as_json(self) -> dict[str, Any]:
        """The numbers, down to the samples."""
        peers = {
            name: {"tokens_s": each.tokens_s, "ratio": each.ratio, "is_disturbed": each.is_disturbed, **asdict(each)}
            for name, each in self.found.items()
        }
        return {"row": str(self.row), "ours_tokens_s": self.ours, "peers": peers}


def compare(ours: EngineProcess, peers: Running, workload: Workload) -> Iterator[Result]:
    """Row by row, each peer in turns with ours."""
    for row in rows_of(workload):
        rows = [(process, own) for peer, process in peers if (own := peer.own(row)) is not None]
        if rows:
            ours.prepare(row)
            found = {theirs.name: _compared(ours, row, theirs, own, workload.num_samples) for theirs, own in rows}
            yield Result(row, found)


def _compared(ours: EngineProcess, row: Row, theirs: EngineProcess, own: Row, num_pairs: int) -> Comparison:
    theirs.prepare(own)
    return take_pairs(partial(_sample, ours, row), partial(_sample, theirs, own), num_pairs)


def _sample(process: EngineProcess, row: Row) -> Sample:
    return take_sample(partial(process.measure, row), row.num_tokens)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, help="for all; one a physical core otherwise")
    parser.add_argument("--samples", type=int, default=3, help="pairs a row")
    parser.add_argument("--peers", type=_names, metavar="NAMES", help=f"of {', '.join(NEEDS)}; else those installed")
    parser.add_argument("--isa", type=_names, default=[], metavar="NAMES", help="ours with these instruction sets too")
    parser.add_argument("--head", metavar="NAME", help="how ours computes the head, see EngineConfig")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="keep the GGUF file there, and use it if it is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except (BitNetError, EngineFailed, OSError, ValueError) as error:
        parser.exit(2, f"peers.py: {error}\n")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        refuse_unwritable(arguments.json)
    if arguments.gguf and not arguments.gguf.exists():
        refuse_unwritable(arguments.gguf)
    workload = Workload(num_samples=arguments.samples)
    room, needed = open_checkpoint(arguments.folder).config.max_positions, longest(workload)
    if room < needed:
        raise InvalidParams(f"{arguments.folder}: its context has {room} tokens: give a model with {needed}")
    head = {"head": arguments.head} if arguments.head else {}
    config = EngineConfig.from_env(device="cpu", threads=arguments.threads, **head).resolve()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first, *others = _started(stack, _engines(arguments, config, workload, scratch))
        conditions = _conditions(arguments.folder, config, (first, *others))
        print("{model} on {processor}, {threads} threads".format(**conditions))
        print("; ".join(conditions["engines"].values()), end="\n\n")
        results = _measured(first, others, workload)
    print("\n".join(["", *notes(results)]))
    if arguments.json:
        numbers = {**conditions, "results": [result.as_json() for result in results]}
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def choose(names: list[str] | None) -> list[str]:
    """The peers to measure: all those named, or those installed; raises InvalidParams for others than there are."""
    for name in names or ():
        if name not in NEEDS:
            raise InvalidParams(f"--peers has {name!r}: choose of {', '.join(NEEDS)}")
        if not is_installed(name):
            raise InvalidParams(f"--peers has {name}, which is not installed: {INSTALL}")
    if names is not None:
        return names
    for name in NEEDS:
        if not is_installed(name):
            print(f"{name} is left out, as it is not installed: {INSTALL}")
    return [name for name in NEEDS if is_installed(name)]


def _engines(arguments: argparse.Namespace, config: EngineConfig, workload: Workload, scratch: Path) -> Iterator[Peer]:
    """Ours, the peers, and ours with other instruction sets."""
    folder, threads, chosen = arguments.folder, config.threads or 1, choose(arguments.peers)
    file = folder if folder.is_file() else None
    if file and "transformers" in chosen:
        print("transformers is left out: it opens folders")
        chosen.remove("transformers")
    others = [replace(config, isa=isa).resolve() for isa in arguments.isa]
    if not chosen and not others:
        raise InvalidParams(f"there is nothing to compare with: {INSTALL}, or choose an --isa")
    yield our_engine(f"ours, {arguments.head}" if arguments.head else "ours", folder, config, workload)
    if "llama.cpp" in chosen:
        yield llama_cpp_engine(folder, file or arguments.gguf or scratch / "model.gguf", threads, workload)
    if "transformers" in chosen:
        yield transformers_engine(folder, threads, workload)
    for other in others:
        yield our_engine(f"ours, {other.isa}", folder, other, workload)


def _started(stack: ExitStack, engines: Iterable[Peer]) -> Iterator[tuple[Peer, EngineProcess]]:
    for engine in engines:
        print(f"loading {engine.name}", file=sys.stderr)
        yield engine, stack.enter_context(closing(EngineProcess(engine.name, engine.make)))


def _conditions(folder: Path, config: EngineConfig, running: Running) -> dict[str, Any]:
    engines = {engine.name: process.version for engine, process in running}
    return {
        "model": folder.resolve().name, "processor": _processor(), "threads": config.threads, "engines": engines
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _measured(ours: tuple[Peer, EngineProcess], peers: Running, workload: Workload) -> list[Result]:
    """All results; each row is printed when it is there."""
    names = [peer.name for peer, _ in peers]
    print(line("tokens/s", [ours[0].name, *(cell for name in names for cell in (name, "ratio"))]))
    results = []
    for result in compare(ours[1], peers, workload):
        results.append(result)
        cells = [cell for name in names for cell in _cells(result.found.get(name))]
        print(line(str(result.row), [f"{result.ours:.1f}", *cells]), flush=True)
    return results


def line(title: str, cells: Sequence[str]) -> str:
    """A line of the table."""
    return (f"{title:<18}" + "".join(f"{cell:>15}" for cell in cells)).rstrip()


def _cells(found: Comparison | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    return f"{found.tokens_s:.1f}", f"{found.ratio:.2f}x{'*' if found.is_disturbed else ' '}"


def notes(results: Sequence[Result]) -> list[str]:
    """What was wrong with the samples."""
    found = [each for result in results for each in result.found.values()]
    kept, discarded = sum(len(each.pairs) for each in found), sum(each.num_discarded for each in found)
    lines = [f"{kept} pairs kept, {discarded} discarded because other processes ran"]
    if machine_busy_s() is None:
        lines = [f"{kept} pairs; this system does not tell what other processes use: see that nothing else runs"]
    if any(each.is_disturbed for each in found):
        lines.append(
            f"* others took {MAX_DISTURBANCE:.0%} of the processors or more in too many of {MAX_ATTEMPTS} attempts a"
            " pair: measure again when nothing else runs"
        )
    return lines


if __name__ == "__main__":
    main()

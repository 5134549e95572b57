"""Ours beside llama.cpp on the same weights, in turns, in one process: `peers.py FOLDER [--threads 2] [--json FILE]`.

FOLDER is a BitNet model, as `synthesize.py --shape bitnet-2b-4t FOLDER` writes it. Its weights are written as GGUF
(TQ2_0, embedding and head F16) and run by llama-cpp-python (the extra "peers"). Both decode greedily. llama.cpp's arch
"bitnet" has SiLU where this model has squared ReLU, so its text differs; what it computes and reads is as much. The
samples of a pair are taken one right after the other; ratios are medians over the pairs. Samples that other processes
disturb are taken again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import llama_cpp
from gguf_file import write_gguf
from llama_cpp_peer import LlamaCpp

from bitnet_inference.backends import load_model
from bitnet_inference.bench import Runner, Workload
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BitNetError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.probe import Sampler, make_limits, median


class Peer(Protocol):
    """Who can be measured."""

    def prompt(self, length: int) -> None:
        """A prompt, up to the choice of the first token of the answer."""
        ...

    def decode(self, context: int, num_steps: int, num_sequences: int) -> None:
        """Greedy steps of all sequences, behind what lies in the cache."""
        ...


Result = tuple[str, float, float, float]  # what, our tokens a second, theirs, ratio


def compare(ours: Peer, theirs: Peer, workload: Workload, sampler: Sampler) -> list[Result]:
    """All that the workload says, one after the other; the sampler takes one sample at a time."""
    results = []

    def add(name: str, num_tokens: int, run: Callable[[Peer], None]) -> None:
        pairs = [[sampler.measure(lambda peer=peer: run(peer))[0].seconds for peer in (ours, theirs)]  # type: ignore[misc]
                 for _ in range(workload.num_samples)]  # fmt: skip
        mine, other = (num_tokens / statistics.median(each) for each in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        results.append((name, mine, other, ratio))
        print(f"{name:<18} {mine:>8.1f} {other:>10.1f} {ratio:>7.2f}x", flush=True)

    steps = workload.num_decoded
    for length in workload.prompts:
        add(f"prompt of {length}", length, lambda peer: peer.prompt(length))  # noqa: B023
    for context in workload.contexts:
        for peer in (ours, theirs):
            peer.prompt(max(context, 1))
        add(f"decoding at {context}", steps, lambda peer: peer.decode(context, steps, 1))  # noqa: B023
    steps = workload.num_batch_steps
    for count in workload.batches:
        add(f"{count} at a time", steps * count, lambda peer: peer.decode(0, steps, count))  # noqa: B023
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, help="for both; one a physical core otherwise")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--gguf", type=Path, help="keep the GGUF file there, and use it if it is there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    try:
        _run(arguments)
    except (BitNetError, OSError, ValueError) as error:
        parser.error(str(error))


def _run(arguments: argparse.Namespace) -> None:
    config = EngineConfig.from_env(device="cpu", threads=arguments.threads).resolve()
    threads = config.threads or 1
    checkpoint = open_checkpoint(arguments.folder)
    with tempfile.TemporaryDirectory() as room:
        path = arguments.gguf or Path(room) / "model.gguf"
        if not path.exists():
            write_gguf(checkpoint, path)
        model = load_model(checkpoint, config)
        workload = Workload(batches=(4, 8, 16), num_samples=arguments.samples).fitting(model)
        longest = max(*workload.prompts, *(context + workload.num_decoded for context in workload.contexts))
        theirs = LlamaCpp(path, threads, longest, max(workload.batches), workload.num_batch_steps)
        ours = Runner(model, workload)
        ours.warm_up()
        sampler = Sampler(make_limits(threads), config.isa, num_samples=1)
        print(f"{arguments.folder.name}, {threads} threads, {config.isa}; llama-cpp-python {llama_cpp.__version__}")
        print(f"{'tokens a second':<18} {'ours':>8} {'llama.cpp':>10} {'ratio':>8}")
        results = compare(ours, theirs, workload, sampler)
        theirs.close()
        model.close()
    bandwidth, int8_peak = (median(sampler.all, value) for value in (lambda s: s.bandwidth, lambda s: s.int8_peak))
    print(f"samples: {sampler.summary()}")
    print(f"beside them: {bandwidth / 1e9:.1f} GB/s read, {int8_peak / 1e9:.0f} billion int8 multiply-adds/s (medians)")
    if arguments.json:
        rows = [dict(zip(("what", "ours", "llama_cpp", "ratio"), row, strict=True)) for row in results]
        arguments.json.write_text(json.dumps({"threads": threads, "isa": config.isa, "results": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

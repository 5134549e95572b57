"""Who is measured: ours with its options, llama.cpp and Transformers; each is made in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from turns import Engine, Row, longest

from bitnet_inference.backends import load_model
from bitnet_inference.bench import Runner, Workload
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint

NEEDS = {"llama.cpp": ("llama_cpp", "gguf"), "transformers": ("torch", "transformers", "accelerate")}


@dataclass(frozen=True)
class Peer:
    """What starts an engine, and where it is so slow that it runs less: the longest context, sequences, and steps."""

    name: str
    make: Callable[[], Engine]
    max_room: int = sys.maxsize
    max_count: int = sys.maxsize
    max_steps: int = sys.maxsize

    def own(self, row: Row) -> Row | None:
        """The row as this engine runs it, None where it does not."""
        row = replace(row, num_steps=min(row.num_steps, self.max_steps))
        return row if row.room <= self.max_room and row.count <= self.max_count else None


def is_installed(name: str) -> bool:
    """Whether the libraries of a peer are there."""
    return all(find_spec(module) for module in NEEDS[name])


def our_engine(name: str, folder: Path, config: EngineConfig, workload: Workload) -> Peer:
    """This engine, with a configuration."""
    return Peer(name, partial(Ours, folder, config, workload))


def llama_cpp_engine(folder: Path, gguf: Path, threads: int, workload: Workload) -> Peer:
    """llama.cpp, on a GGUF file, which is written if it is not there."""
    if not gguf.exists():
        from gguf_file import write_file

        write_file(open_checkpoint(folder), gguf)
    return Peer("llama.cpp", partial(_llama_cpp, gguf, threads, workload))


def transformers_engine(folder: Path, threads: int, workload: Workload) -> Peer:
    """Transformers, on few rows: it makes a few tokens a second."""
    return Peer(
        "transformers", partial(_transformers, folder, threads, workload), max_room=128, max_count=4, max_steps=8
    )


class Ours(Runner):
    """This engine."""

    def __init__(self, folder: Path, config: EngineConfig, workload: Workload) -> None:
        """Loads the model; raises what loading raises."""
        super().__init__(load_model(open_checkpoint(folder), config), workload)
        self.version = f"bitnet-inference, {config.isa}"


def _llama_cpp(gguf: Path, threads: int, workload: Workload) -> Engine:
    from llama_cpp_peer import LlamaCpp

    return LlamaCpp(gguf, threads, longest(workload), max(workload.batches, default=1), workload.num_batch_steps)


def _transformers(folder: Path, threads: int, workload: Workload) -> Engine:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # or it starts processes, whose time does not count as its own
    from transformers_peer import Transformers

    return Transformers(folder, threads, longest(workload))

"""How long a model takes to open, and the memory that this takes, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

_MB = 1 << 20


def print_openings(paths: Sequence[Path], threads: int | None) -> None:
    """A line a path, as Markdown; the files are read once before, so that it is not the disk that is timed."""
    print("| model | file, MB | seconds | of processors | peak memory, MB | weights, MB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for path in paths:
        with get_context("spawn").Pool(1) as pool:
            print(pool.apply(_row, (path, threads)), flush=True)


def _row(path: Path, threads: int | None) -> str:
    import resource
    import time

    from bitnet_inference.backends import load_model
    from bitnet_inference.config import EngineConfig
    from bitnet_inference.formats import open_checkpoint

    for file in [path] if path.is_file() else path.iterdir():
        with file.open("rb") as opened:
            while opened.read(_MB):
                pass
    start, used = time.perf_counter(), time.process_time()
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, EngineConfig.from_env(threads=threads))
    seconds, used = time.perf_counter() - start, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cells = (path.name, f"{checkpoint.num_bytes / 1e6:.0f}", f"{seconds:.2f}", f"{used:.2f}", f"{peak / 1e6:.0f}",
             f"{model.num_bytes / 1e6:.0f}")  # fmt: skip
    return f"| {' | '.join(cells)} |"

"""How long launches on a card take: they are recorded as one CUDA graph, which is timed by events over and over."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

NUM_SAMPLES = 15
MIN_SAMPLE_S = 0.005

Launch = Callable[[], object]


def seconds_each(launches: Sequence[Launch], device: torch.device) -> float:
    """The median time of one of these launches, which run one after the other, often.

    Give launches that read different memory, more than the card's cache holds. Without a card (Triton's interpreter)
    each runs once, and the number says nothing.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - begin) / len(launches)
    replay = _recorded(launches)
    repeats = max(1, round(MIN_SAMPLE_S / max(_timed(replay, 3) / 3, 1e-6)))
    samples = [_timed(replay, repeats) / repeats for _ in range(NUM_SAMPLES)]
    return statistics.median(samples) / len(launches)


def _recorded(launches: Sequence[Launch]) -> Launch:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles what is compiled at the first launch
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    replay: Launch = graph.replay
    replay()
    torch.cuda.synchronize()
    return replay


def _timed(run: Launch, times: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

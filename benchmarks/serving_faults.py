"""What goes wrong around a server, and whether it and its other clients bear it."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from engine_streams import Numbers, Rows
from serving_client import Answer, ask
from serving_harm import HARMS
from serving_load import Wrong, by_library
from serving_process import Serving
from serving_soak import Known
from serving_traffic import faults as wrong_with
from serving_traffic import stories, times

from bitnet_inference.llm import LLM

CACHE_TOKENS = 16384
FULL = Path("/dev/full")  # a file on a disk that is full
CALM_S = 0.1  # until what has been left is let go
MAX_BUSY = 0.5  # of a processor, after a fault
NO_GAPS = dict.fromkeys(("gap p50 ms", "gap p95"), float("nan"))


def faults(
    model: str,
    threads: int,
    seconds: float = 3,
    share: float = 1.0,
    num_tokens: int = 300,
    but: Collection[str] = (),
) -> Rows:
    """Each fault for some seconds, in a `share` of its size, beside a neighbour that streams known texts; `but` these.

    Raises Wrong where the neighbour gets another text, where the server does not answer /health or goes on computing
    for clients that have left, and where clients of a server that is killed are not told.
    """
    with LLM.load(model, threads=threads) as llm:
        asked = stories(1, num_tokens)
        neighbour = Known(asked[0], by_library(llm, asked).truths[0])
    options = ("--max-cache-tokens", str(CACHE_TOKENS))
    rows: dict[str, Numbers] = {}
    with _another_process() as process:
        with Serving(model, threads, *options) as server:
            asyncio.run(ask(server.port, neighbour.question.request()))  # what is taken once is taken
            for name, (harm, most) in HARMS.items():
                if name in but:
                    continue
                work = partial(harm, server.port, math.ceil(share * most), seconds)
                rows[name] = _beside(server, neighbour, process, work, name)
            rows["kill -9"] = _killed(server, neighbour, math.ceil(share * 100))
        if "full disk" not in but:
            with Serving(model, threads, *options, log=FULL) as server:
                work = partial(HARMS["nothing"][0], server.port, 0, min(1.0, seconds))
                rows["full disk"] = _beside(server, neighbour, process, work, "full disk")
    return rows


@contextmanager
def _another_process() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(time.sleep, 0).result()
        yield pool


def _beside(server: Serving, neighbour: Known, process: Executor, harm: partial[int], name: str) -> Numbers:
    before = server.resident_bytes()
    number, answers, most = asyncio.run(_watched(server, neighbour, process, harm))
    for answer in answers:
        if found := wrong_with(answer, neighbour.truth):
            raise Wrong(f"{name}: the neighbour: {'; '.join(found)}")
    begin = time.perf_counter()
    if not server.is_healthy():
        raise Wrong(f"{name}: the server does not answer any more")
    health_s, busy = time.perf_counter() - begin, _busy(server)
    if busy > MAX_BUSY:
        raise Wrong(f"{name}: the server still computes: {100 * busy:.0f}% of a processor, nobody is there")
    seen = times(answers)
    return {
        "number": number,
        "gap p50 ms": seen.gap_ms[0],
        "gap p95": seen.gap_ms[1],
        "MB more": (most - before) / 1e6,
        "health ms": 1000 * health_s,
    }


async def _watched(
    server: Serving, neighbour: Known, process: Executor, harm: partial[int]
) -> tuple[int, list[Answer], int]:
    """What the harm returns, what the neighbour got meanwhile, and the most memory that the server had."""
    going = asyncio.get_running_loop().run_in_executor(process, harm)
    answers: list[Answer] = []
    most = server.resident_bytes()
    while not answers or not going.done():
        answers.append(await ask(server.port, neighbour.question.request()))
        most = max(most, server.resident_bytes())
    return await going, answers, most


def _busy(server: Serving) -> float:
    """The part of a processor that it uses while nobody asks anything."""
    busy = 1.0
    for _ in range(20):
        time.sleep(CALM_S)
        before, begin = server.cpu(), time.perf_counter()
        time.sleep(CALM_S)
        busy = server.cpu().since(before).process_s / (time.perf_counter() - begin)
        if busy <= MAX_BUSY:
            break
    return busy


def _killed(server: Serving, neighbour: Known, count: int) -> Numbers:
    """Kill it while so many streams go on: each is told by a connection that ends too early. It starts again."""

    async def under_way() -> list[Answer]:
        asked = [asyncio.create_task(ask(server.port, each.request())) for each in stories(count, 900)]
        await ask(server.port, neighbour.question.request(), leave_after=3)
        server.kill()
        return await asyncio.gather(*asked)

    told = sum(answer.error.startswith("connection lost") for answer in asyncio.run(under_way()))
    if told < count:
        raise Wrong(f"kill -9: of {count} clients {told} were told")
    begin = time.perf_counter()
    server.start()
    load_s = time.perf_counter() - begin
    answer = asyncio.run(ask(server.port, neighbour.question.request()))
    if found := wrong_with(answer, neighbour.truth):
        raise Wrong(f"kill -9: after it: {'; '.join(found)}")
    return {"number": told, **NO_GAPS, "MB more": float("nan"), "health ms": 1000 * load_s}

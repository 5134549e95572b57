"""Many streams at a time: is each its own, how fast do they come, and what does serving them cost?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from engine_streams import Numbers, Rows
from serving_client import Answer, ask
from serving_process import Cpu, Serving
from serving_traffic import Question, faults, ids, random_tokens, stories, times

from bitnet_inference.errors import BitNetError
from bitnet_inference.llm import LLM

CACHE_TOKENS = 32768
STREAMS, SHORTEST, LONGEST = 8, 32, 64  # of `throughput`
BOTH = SHORTEST + LONGEST  # tokens of a pair


class Wrong(BitNetError):
    """The server answered something that it must not."""


async def at_once(port: int, questions: Sequence[Question], rate: float | None = None) -> list[Answer]:
    """All answers. With a rate, so many a second begin on average, whatever became of those before; else all now."""
    dues = _dues(len(questions), rate)
    return await asyncio.gather(
        *(ask(port, each.request(), due_s=due) for each, due in zip(questions, dues, strict=True))
    )


def _dues(count: int, rate: float | None) -> list[float]:
    waits = np.random.default_rng(0).exponential(1 / rate, count) if rate else np.zeros(count)
    dues: list[float] = (time.perf_counter() + np.cumsum(waits)).tolist()
    return dues


@dataclass(frozen=True)
class Library:
    """What the library alone does with the same requests: texts, processor time and time."""

    truths: Sequence[Sequence[str]]
    cpu_s: float
    seconds: float


def by_library(llm: LLM, questions: Sequence[Question], rate: float | None = None) -> Library:
    """All of them, begun as `at_once` does, but read one after the other at the end: that costs as little as can be."""
    cpu_s, begin = time.process_time(), time.perf_counter()
    opened = []
    for each, due in zip(questions, _dues(len(questions), rate), strict=True):
        time.sleep(max(0.0, due - time.perf_counter()))
        opened.append(each.streams(llm))
    truths = [[stream.read().text for stream in streams] for streams in opened]
    return Library(truths, time.process_time() - cpu_s, time.perf_counter() - begin)


def load(model: str, threads: int, count: int = 300, num_tokens: int = 64, rate: float | None = None) -> Rows:
    """`count` streams at once, all compared with the library's texts; then as many more, at a rate where one is given.

    "us a token" is the server's processor time beyond the library's own for the same requests; "loop" is that of the
    thread with the event loop. Raises Wrong.
    """
    warm = stories(count, num_tokens)
    rates = {f"{count} at once": None} | ({f"{count}, {rate:g}/s": rate} if rate else {})
    sets = {name: stories(count, num_tokens, first_seed=1000 * number) for number, name in enumerate(rates, 1)}
    rows: dict[str, Numbers] = {}
    with LLM.load(model, threads=threads, max_cache_tokens=CACHE_TOKENS) as llm:
        by_library(llm, warm)  # what is taken once is taken
        alone = {name: by_library(llm, sets[name], rate) for name, rate in rates.items()}
    with Serving(model, threads, "--max-cache-tokens", str(CACHE_TOKENS)) as server:
        asyncio.run(at_once(server.port, warm))
        for name, rate in rates.items():
            rows[f"{name}, library"] = _of_library(alone[name], count * num_tokens)
            rows[name] = _measured(server, sets[name], alone[name], rate)
    return rows


def _of_library(alone: Library, num_tokens: int) -> Numbers:
    return {
        "right": len(alone.truths),
        "tokens/s": num_tokens / alone.seconds,
        **dict.fromkeys(("first p50 ms", "p95", "gap p50 ms", "gap p95"), float("nan")),
        "cpu us a token": 1e6 * alone.cpu_s / num_tokens,
        "of server": 0.0,
        "loop": 0.0,
    }


def _measured(server: Serving, questions: Sequence[Question], alone: Library, rate: float | None) -> Numbers:
    before, begin = server.cpu(), time.perf_counter()
    answers = asyncio.run(at_once(server.port, questions, rate))
    seconds, used = time.perf_counter() - begin, server.cpu().since(before)
    refuse_wrong(answers, alone.truths)
    return _row(questions, answers, alone, used, seconds)


def _row(
    questions: Sequence[Question], answers: Sequence[Answer], alone: Library, used: Cpu, seconds: float
) -> Numbers:
    seen, num_tokens = times(answers), sum(each.body["max_tokens"] for each in questions)
    (first, first_high), (gap, gap_high) = seen.first_ms, seen.gap_ms
    return {
        "right": len(answers),
        "tokens/s": num_tokens / seconds,
        "first p50 ms": first,
        "p95": first_high,
        "gap p50 ms": gap,
        "gap p95": gap_high,
        "cpu us a token": 1e6 * used.process_s / num_tokens,
        "of server": 1e6 * (used.process_s - alone.cpu_s) / num_tokens,
        "loop": 1e6 * used.loop_s / num_tokens,
    }


def refuse_wrong(answers: Sequence[Answer], truths: Sequence[Sequence[str]]) -> None:
    """Raise Wrong unless each answer is whole, its own, and the library's."""
    for answer, truth in zip(answers, truths, strict=True):
        if found := faults(answer, truth):
            raise Wrong(f"{'; '.join(found)}")
    every = [each for answer in answers for each in ids(answer)]
    if len(set(every)) != len(answers):
        raise Wrong(f"{len(answers)} answers have {len(set(every))} ids")


def throughput(model: str, threads: int, num_samples: int = 3) -> Rows:
    """Streams that go on, each with its next request when the last has ended: served, and by the library, in turns."""
    random, rows = np.random.default_rng(1), dict[str, Numbers]()
    with LLM.load(model, threads=threads, max_cache_tokens=CACHE_TOKENS) as llm, Serving(model, threads) as server:
        for number in range(num_samples + 1):
            pairs = [_pair(random, llm.config.vocab_size) for _ in range(STREAMS)]
            speed = STREAMS * BOTH / _served_s(server, pairs)
            alone = STREAMS * BOTH / _unserved_s(llm, pairs)
            if number:  # the first has warmed both up
                rows[f"sample {number}"] = {"served tokens/s": speed, "without HTTP": alone, "ratio": speed / alone}
    return rows


def _pair(random: np.random.Generator, vocab_size: int) -> list[Question]:
    """Two requests, as `bitnet bench --concurrency` sends them: together as long as any other two."""
    prompt, answer = random.integers(SHORTEST, LONGEST + 1, 2).tolist()
    both = ((prompt, answer), (BOTH - prompt, BOTH - answer))
    return [random_tokens(random, vocab_size, *each) for each in both]


def _served_s(server: Serving, pairs: Sequence[Sequence[Question]]) -> float:
    async def one(pair: Sequence[Question]) -> list[Answer]:
        return [await ask(server.port, each.request()) for each in pair]

    async def every() -> list[list[Answer]]:
        return await asyncio.gather(*map(one, pairs))

    begin = time.perf_counter()
    answers = [each for pair in asyncio.run(every()) for each in pair]
    seconds = time.perf_counter() - begin
    for answer in answers:
        if found := faults(answer):
            raise Wrong("; ".join(found))
    return seconds


def _unserved_s(llm: LLM, pairs: Sequence[Sequence[Question]]) -> float:
    def one(pair: Sequence[Question]) -> None:
        for each in pair:
            each.truth(llm)

    begin = time.perf_counter()
    with ThreadPoolExecutor(len(pairs)) as pool:
        list(pool.map(one, pairs))
    return time.perf_counter() - begin

"""What one reader sees: gaps between tokens while a prompt enters, and prompts that begin like others."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.llm import LLM
from bitnet_inference.probe import Sampler

Numbers = Mapping[str, float]
Rows = Mapping[str, Numbers]
LONG_PROMPT, SHARED = 3000, 1000  # tokens; less where the context is shorter
NUM_CALM = 48  # tokens of the running stream before the prompt enters
ONE = SamplingParams(temperature=0, max_tokens=1)
ON = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def medians(sampler: Sampler, work: Callable[[], Numbers]) -> Numbers:
    """Each of the numbers that the work returns: its median over the samples."""
    results: list[Numbers] = [result for sample in sampler.measure(work) for result in sample.results]
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def load(folder: Path, config: EngineConfig) -> LLM:
    """The model without drafts, which would make gaps uneven."""
    return LLM.load(folder, threads=config.threads, drafts="none")


def gap(folder: Path, config: EngineConfig, sampler: Sampler) -> Rows:
    """A running stream while a long prompt enters, and that prompt beside the stream and alone."""
    with load(folder, config) as llm:
        length = min(LONG_PROMPT, llm.max_context * 3 // 4)
        words = _Words(llm.config.vocab_size)
        llm.generate(words.take(length), ONE)
        return {f"prompt of {length}": medians(sampler, lambda: _disturbed(llm, words, length))}


def _disturbed(llm: LLM, words: _Words, length: int) -> Numbers:
    alone_s = llm.generate(words.take(length), ONE).usage.prompt_s
    with _Running(llm, words.take(20)) as stream:
        begin = time.perf_counter()
        beside_s = llm.generate(words.take(length), ONE).usage.prompt_s
        end = time.perf_counter()
    calm, during = stream.gaps(0.0, begin), stream.gaps(begin, end)
    usual_s = statistics.median(calm)
    return {
        "gap ms": 1000 * usual_s,
        "median x": statistics.median(during) / usual_s,
        "p95 x": float(np.percentile(during, 95)) / usual_s,
        "largest x": max(during) / usual_s,
        "prompt tokens/s alone": length / alone_s,
        "beside x": alone_s / beside_s,
    }


class _Words:
    """Random tokens, never the same again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._random = vocab_size, np.random.default_rng(0)

    def take(self, count: int) -> list[int]:
        """The next tokens."""
        taken: list[int] = self._random.integers(0, self._vocab_size, count).tolist()
        return taken


class _Running:
    """A stream that is read in a thread of its own until it is left; entered when it has given some tokens."""

    def __init__(self, llm: LLM, prompt: Sequence[int]) -> None:
        self._llm, self._prompt = llm, prompt
        self._times: list[float] = []
        self._num_wanted, self._are_there = NUM_CALM, threading.Event()
        self._is_left = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> _Running:
        self._thread.start()
        self._are_there.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._num_wanted = len(self._times) + 1  # the gap at the end is seen whole
        self._are_there.clear()
        self._are_there.wait()
        self._is_left = True
        self._thread.join()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Those that lie, in part, between these times; of the first tokens, where the engine learns its pace, none."""
        times = self._times[NUM_CALM // 4 :]
        return [later - earlier for earlier, later in pairwise(times) if earlier < end and later > begin]

    def _read(self) -> None:
        try:
            while not self._is_left:  # small models come to the end of their context
                self._read_one()
        finally:
            self._are_there.set()

    def _read_one(self) -> None:
        with self._llm.stream(self._prompt, ON) as stream:
            for piece in stream:
                self._times += [time.perf_counter()] * len(piece.token_ids)
                if len(self._times) >= self._num_wanted:
                    self._are_there.set()
                if self._is_left:
                    return


def prefix(folder: Path, config: EngineConfig, sampler: Sampler) -> Rows:
    """Time to the first token of a prompt, and of a second one that begins with the same tokens."""
    with load(folder, config) as llm:
        length = min(SHARED, llm.max_context * 3 // 4)
        words = _Words(llm.config.vocab_size)
        llm.generate(words.take(length), ONE)
        return {f"{length} shared": medians(sampler, lambda: _shared(llm, words, length))}


def _shared(llm: LLM, words: _Words, length: int) -> Numbers:
    beginning = words.take(length)
    first_s, second_s = (_first_token_s(llm, beginning + words.take(20)) for _ in range(2))
    return {"first ms": 1000 * first_s, "second ms": 1000 * second_s, "second / first": second_s / first_s}


def _first_token_s(llm: LLM, prompt: Sequence[int]) -> float:
    begin = time.perf_counter()
    llm.generate(prompt, ONE)
    return time.perf_counter() - begin

"""Measures the engine under load: streams that go on and on, beside the same work on the bare model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends import load_model, resolved
from bitnet_inference.bare_batch import BareBatch, TimedModel
from bitnet_inference.bench import conditions, rounding
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams, OutOfMemory
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.llm import LLM
from bitnet_inference.model.contract import Model
from bitnet_inference.model_folder import load_tokenizer
from bitnet_inference.probe import Sampler
from bitnet_inference.stream import Piece
from bitnet_inference.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0)
MAX_STREAMS = 1024  # a thread each reads them


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of the engine: so many streams at a time, each of which sends its next request when the last ended.

    A stream sends pairs of requests. Prompts and answers have `shortest` to `longest` tokens, and a pair as many as any
    other, so that all streams end together; prompts are random, so that none finds its beginning in the cache.
    """

    streams: tuple[int, ...] = (1, 2, 4, 8, 16)
    shortest: int = 64
    longest: int = 128
    num_pairs: int = 1
    num_samples: int = 3
    min_sample_s: float = 0.25

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1 or len(set(self.streams)) < len(self.streams):
            raise InvalidParams("numbers of streams must be at least 1, and each given once")
        if max(self.streams) > MAX_STREAMS:
            raise InvalidParams(f"{max(self.streams)} streams at a time are too many: give at most {MAX_STREAMS}")
        if not 1 <= self.shortest <= self.longest or min(self.num_pairs, self.num_samples) < 1:
            raise InvalidParams("lengths, pairs and samples must be at least 1, and shortest at most longest")

    def fitting(self, room: int) -> Load:
        """With lengths that fit a context of `room` tokens; raises InvalidParams where none does."""
        longest = min(self.longest, room // 2)
        if longest < 1:
            raise InvalidParams(f"nothing fits: the context has {room} tokens, a prompt and its answer take 2 at least")
        return replace(self, shortest=min(self.shortest, longest), longest=longest)

    @property
    def mean(self) -> int:
        """Tokens of a prompt, and of an answer, on average."""
        return (self.shortest + self.longest) // 2


@dataclass(frozen=True, kw_only=True)
class UnderLoad:
    """So many streams at a time: output tokens a second of all together, and what their readers see.

    `bare_tokens_s` is the same work on the model alone, all prompts and then all steps at once; `of_bare` the ratio,
    the median over the samples. `overhead` is the share of the time in which the model does not compute.
    """

    tokens_s: float
    bare_tokens_s: float
    of_bare: float
    overhead: float
    first_token_s: tuple[float, float]  # median and 95th percentile, as the next
    gap_s: tuple[float, float]

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers to read."""
        times = (f"{1000 * seconds:.1f}" for seconds in (*self.first_token_s, *self.gap_s))
        speeds = (f"{self.tokens_s:.1f}", f"{self.bare_tokens_s:.1f}", f"{100 * self.of_bare:.0f}%")
        return (*speeds, *times, f"{100 * self.overhead:.1f}%")

    def as_json(self) -> dict[str, float]:
        """The numbers, in the units that the names tell."""
        first, gap = ((1000 * median_s, 1000 * high_s) for median_s, high_s in (self.first_token_s, self.gap_s))
        return {
            "tokens_s": self.tokens_s,
            "bare_tokens_s": self.bare_tokens_s,
            "of_bare": self.of_bare,
            "overhead": self.overhead,
            **dict(zip(("first_token_p50_ms", "first_token_p95_ms"), first, strict=True)),
            **dict(zip(("gap_p50_ms", "gap_p95_ms"), gap, strict=True)),
        }


@dataclass(frozen=True, kw_only=True)
class EngineMeasurements:
    """What was measured, and on what; `concurrency` by the number of streams.

    `load` is what was asked of the engine; with `is_cut`, its lengths were cut to what the model has room for.
    """

    model: str
    num_parameters: int
    config: EngineConfig
    load: Load
    concurrency: dict[int, UnderLoad]
    samples: str
    is_cut: bool = False

    def lines(self) -> list[tuple[str, str]]:
        """On what and how it was measured: names and values."""
        config, load = self.config, self.load
        cut = ", cut to fit into the context" if self.is_cut else ""
        return [
            ("model", f"{self.model}, {self.num_parameters / 1e6:.1f} million parameters"),
            ("run on", f"{config.device} ({config.isa}), {config.threads} threads"),
            ("with", f"{config.cache_dtype} cache, {config.head} head, greedy, no drafts" + rounding(config)),
            ("requests", f"{load.shortest} to {load.longest} tokens of prompt, as many of answer{cut}"),
            ("samples", self.samples),
        ]

    def table(self) -> list[tuple[str, ...]]:
        """What was measured, under a row of titles; times in milliseconds, median and 95th percentile."""
        titles = ("tokens/s", "bare", "ratio", "first p50", "p95", "gap p50", "p95", "overhead")
        return [("", *titles), *((f"{count} at a time", *each.cells) for count, each in self.concurrency.items())]

    def as_json(self) -> dict[str, Any]:
        """The numbers, in the units that the names tell; speeds are tokens a second."""
        return {
            "concurrency": {str(count): each.as_json() for count, each in self.concurrency.items()},
            "shortest": self.load.shortest,
            "longest": self.load.longest,
            **conditions(self.model, self.config, self.samples),
        }


def measure_engine(
    path: str | Path,
    config: EngineConfig,
    load: Load,
    progress: Callable[[int, int], None] | None = None,
) -> EngineMeasurements:
    """Load the model under a path and measure its engine under load, cut to what fits into the context.

    Each sample of the engine has one of the bare model behind it, and both count or neither. Raises what loading
    raises, InvalidParams where the load does not fit the model, and OutOfMemory where the cache has no room for it.
    """
    wanted, folder = load, Path(path).resolve()
    checkpoint = open_checkpoint(folder)
    config, load = resolved(checkpoint, config), wanted.fitting(checkpoint.config.max_positions)
    tokenizer = load_tokenizer(checkpoint)
    with UnderTest(load_model(checkpoint, config, progress), tokenizer, load) as under_test:
        sampler = Sampler(num_samples=load.num_samples, min_s=load.min_sample_s)
        under_test.warm_up()
        return EngineMeasurements(
            model=folder.name,
            num_parameters=checkpoint.num_parameters,
            config=config,
            load=load,
            concurrency={count: under_test.measure(sampler, count) for count in load.streams},
            samples=sampler.summary(),
            is_cut=load != wanted,
        )


def _median(values: Iterable[float]) -> float:
    return float(np.median([*values]))


def _spread(values: Iterable[float]) -> tuple[float, float]:
    median, high = np.percentile([*values], (50, 95))
    return float(median), float(high)


class Run(NamedTuple):
    """A run of the engine: tokens a second, what it took, of that the model, and times to first tokens and between."""

    tokens_s: float
    seconds: float
    model_s: float
    first_s: list[float]
    gaps_s: list[float]


class UnderTest:
    """An LLM, and beside it the same model without an engine, in cache blocks of its own."""

    def __init__(self, model: Model, tokenizer: Tokenizer, load: Load) -> None:
        """Takes the model and the cache that the load needs; raises InvalidParams and OutOfMemory."""
        limits, most = model.capabilities, max(load.streams)
        if most > limits.max_sequences:
            model.close()
            raise InvalidParams(f"{most} streams at a time: the model computes at most {limits.max_sequences}")
        each = -(-2 * load.longest // limits.block_size)
        if 2 * most * each > limits.available_bytes // limits.block_bytes:
            model.close()
            raise OutOfMemory(f"the cache has no room for {most} streams twice: give fewer, or free memory")
        self._load, self._random = load, np.random.default_rng(0)
        self._model = TimedModel(model, num_more=most * each)
        self._llm = LLM(self._model, tokenizer, max_cache_tokens=most * each * limits.block_size, drafts="none")
        self._bare = BareBatch(model, first_block=most * each, num_blocks=most * each)

    def __enter__(self) -> UnderTest:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def warm_up(self) -> None:
        """Everything once, so that pages are touched and the engine knows its times."""
        self.run(max(self._load.streams))
        self.run_bare(max(self._load.streams))

    def measure(self, sampler: Sampler, count: int, params: SamplingParams = GREEDY) -> UnderLoad:
        """So many streams, sample by sample, each beside the bare model."""
        samples = sampler.measure(lambda: (self.run(count, params), self.run_bare(count)))
        pairs: list[tuple[Run, float]] = [pair for sample in samples for pair in sample.results]
        runs = [run for run, _ in pairs]
        return UnderLoad(
            tokens_s=_median(run.tokens_s for run in runs),
            bare_tokens_s=_median(bare for _, bare in pairs),
            of_bare=_median(run.tokens_s / bare for run, bare in pairs),
            overhead=_median(1 - run.model_s / run.seconds for run in runs),
            first_token_s=_spread(wait for run in runs for wait in run.first_s),
            gap_s=_spread(gap for run in runs for gap in run.gaps_s),
        )

    def run(self, count: int, params: SamplingParams = GREEDY) -> Run:
        """So many streams until all have ended; raises the error of a request."""
        streams = [_Reader(self._llm, self._requests(params)) for _ in range(count)]
        begin, model_s = time.perf_counter(), self._model.seconds
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
        seconds = time.perf_counter() - begin
        if errors := [stream.error for stream in streams if stream.error is not None]:
            raise errors[0]
        first = [wait for stream in streams for wait in stream.first_s]
        gaps = [gap for stream in streams for gap in stream.gaps_s]
        speed = (len(first) + len(gaps)) / seconds
        return Run(speed, seconds, self._model.seconds - model_s, first, gaps)

    def run_bare(self, count: int) -> float:
        """Tokens a second on the model alone, for prompts and answers of mean length, all sequences in step."""
        prompts = self._words(count * self._load.mean).reshape(count, -1)
        begin = time.perf_counter()
        self._bare.run(prompts, self._load.mean)
        return count * self._load.mean / (time.perf_counter() - begin)

    def _requests(self, params: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
        """Prompts and what to ask for, in pairs that are as long as any other."""
        requests: list[tuple[list[int], SamplingParams]] = []
        low, high = self._load.shortest, self._load.longest
        for _ in range(self._load.num_pairs):
            prompt, answer = self._random.integers(low, high + 1, 2).tolist()
            for num_prompt, num_answer in ((prompt, answer), (low + high - prompt, low + high - answer)):
                wanted = replace(params, max_tokens=num_answer, ignore_eos=True)
                requests.append((self._words(num_prompt).tolist(), wanted))
        return requests

    def _words(self, count: int) -> NDArray[np.int32]:
        return self._random.integers(0, self._llm.config.vocab_size, count, np.int32)


class _Reader(threading.Thread):
    """Sends its requests one after the other, and notes when their tokens come."""

    def __init__(self, llm: LLM, requests: Iterable[tuple[Sequence[int], SamplingParams]]) -> None:
        super().__init__(daemon=True)
        self._llm, self._requests = llm, requests
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """See Thread; an error is kept."""
        try:
            for prompt, params in self._requests:
                self._read(prompt, params)
        except Exception as error:
            self.error = error

    def _read(self, prompt: Sequence[int], params: SamplingParams) -> None:
        begin = time.perf_counter()
        times = arrivals(self._llm.stream(prompt, params))
        self.first_s.append(times[0] - begin)
        self.gaps_s += [later - earlier for earlier, later in pairwise(times)]


def arrivals(stream: Iterable[Piece]) -> list[float]:
    """When each token reaches whoever reads the stream, by time.perf_counter()."""
    return [now for piece in stream for now in [time.perf_counter()] * len(piece.token_ids)]

"""Measures a model: loading, prompts, decoding, batches, each beside what the machine can do at that moment."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends import load_model, resolved
from bitnet_inference.backends.cpu import CpuModel
from bitnet_inference.config import EngineConfig, num_processors
from bitnet_inference.errors import InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import ModelConfig, expected_shapes
from bitnet_inference.model.contract import Batch, Model
from bitnet_inference.probe import MIN_SAMPLE_S, Sampler, make_limits, median


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is measured: lengths of prompts, tokens of context before `num_decoded` tokens, and sequences at a time."""

    prompts: tuple[int, ...] = (128, 512)
    contexts: tuple[int, ...] = (0, 2048)
    batches: tuple[int, ...] = (1, 4, 8, 16)
    num_decoded: int = 64
    num_batch_steps: int = 16
    num_samples: int = 3
    min_sample_s: float = MIN_SAMPLE_S

    def __post_init__(self) -> None:
        counts = (*self.prompts, *self.batches, self.num_decoded, self.num_batch_steps, self.num_samples)
        if min(counts) < 1 or min(self.contexts, default=0) < 0:
            raise InvalidParams("prompts, batches, tokens and samples must be at least 1, and contexts at least 0")

    def fitting(self, model: Model) -> Workload:
        """Without what the model has no room for; raises InvalidParams where nothing is left."""
        room, most = model.config.max_positions, model.capabilities.max_sequences
        prompts = tuple(length for length in self.prompts if length <= room)
        contexts = tuple(context for context in self.contexts if context + self.num_decoded <= room)
        if not prompts and not contexts:
            raise InvalidParams(
                f"nothing fits: the context has {room} tokens, {self.num_decoded} of them to be decoded"
            )
        batches = tuple(count for count in self.batches if count <= most and self.num_batch_steps <= room)
        return Workload(**vars(self) | {"prompts": prompts, "contexts": contexts, "batches": batches})


@dataclass(frozen=True)
class Speed:
    """Tokens a second, the most that the machine would allow, and what limits it: "memory" or "arithmetic".

    `of_limit` is the median over the samples of the speed by the limit beside it. 0 and "" where no limit is known.
    """

    tokens_s: float
    limit: float = 0.0
    of_limit: float = 0.0
    limited_by: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The numbers to read."""
        if not self.limit:
            return f"{self.tokens_s:.1f}", "", "", ""
        return f"{self.tokens_s:.1f}", f"{self.limit:.1f}", f"{100 * self.of_limit:.0f}%", self.limited_by


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured, and on what; see Workload for the keys of `prompt`, `decode` and `batch`.

    A batch's speed counts the tokens of all its sequences. `peak_bytes` is the most memory that this process has had,
    without what the probes take. `bandwidth` is in bytes, `int8_peak` in multiply-adds a second, 0 on other devices
    than "cpu", and with more threads than processors.
    """

    model: str
    num_parameters: int
    config: EngineConfig
    load_s: float
    peak_bytes: int
    prompt: dict[int, Speed]
    decode: dict[int, Speed]
    batch: dict[int, Speed]
    bandwidth: float
    int8_peak: float
    samples: str

    def lines(self) -> list[tuple[str, str]]:
        """On what and how it was measured: names and values."""
        config = self.config
        probed = f"{self.bandwidth / 1e9:.1f} GB/s read, {self.int8_peak / 1e9:.0f} billion int8 multiply-adds/s"
        limits = f"{probed} (probed beside each sample)"
        if config.device == "cpu" and not self.bandwidth:
            limits = "not probed: there are more threads than processors that this process may use"
        return [
            ("model", f"{self.model}, {self.num_parameters / 1e6:.1f} million parameters"),
            ("run on", f"{config.device} ({config.isa}), {config.threads} threads"),
            ("with", f"{config.cache_dtype} cache, {config.head} head" + rounding(config)),
            ("load", f"{self.load_s:.2f} s"),
            ("peak memory", told_bytes(self.peak_bytes)),
            *([("limits", limits)] if config.device == "cpu" else []),
            ("samples", self.samples),
        ]

    def table(self) -> list[tuple[str, ...]]:
        """The speeds, under a row of titles."""
        return [
            ("", "tokens/s", "limit", "reached", "limited by"),
            *((f"prompt of {length}", *speed.cells) for length, speed in self.prompt.items()),
            *((f"decoding at {context}", *speed.cells) for context, speed in self.decode.items()),
            *((f"batch of {count}", *speed.cells) for count, speed in self.batch.items()),
        ]

    def as_json(self) -> dict[str, Any]:
        """The numbers, in the units that the names tell; speeds are tokens a second."""
        kinds = {"prompt": self.prompt, "decode": self.decode, "batch": self.batch}
        return {
            "load_s": self.load_s,
            "peak_rss_mb": self.peak_bytes / 1e6,
            **{kind: {str(key): speed.tokens_s for key, speed in each.items()} for kind, each in kinds.items()},
            "limits": {"bandwidth_gb_s": self.bandwidth / 1e9, "int8_gmac_s": self.int8_peak / 1e9},
            "of_limit": {kind: {str(key): s.of_limit for key, s in each.items()} for kind, each in kinds.items()},
            **conditions(self.model, self.config, self.samples),
        }


def rounding(config: EngineConfig) -> str:
    """How weights were rounded, to be added to other conditions."""
    layers = "" if config.quantize == "none" else f", matrices rounded to {config.quantize}"
    return layers + ("" if config.embedding == "exact" else f", embeddings rounded to {config.embedding}")


def conditions(model: str, config: EngineConfig, samples: str) -> dict[str, Any]:
    """What was measured, on what, and how, for the JSON of any measurement."""
    names = ("device", "gpus", "isa", "threads", "cache_dtype", "quantize", "head", "embedding")
    return {"model": model, **{name: getattr(config, name) for name in names}, "samples": samples}


def measure(
    path: str | Path,
    config: EngineConfig | None = None,
    workload: Workload | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Load the model under a path and measure it. What the model has no room for is left out.

    Raises what loading raises, and InvalidParams where nothing of the workload fits.
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    config = resolved(checkpoint, config or EngineConfig.from_env())
    model = load_model(checkpoint, config, progress)
    load_s = time.perf_counter() - start
    try:
        workload = (workload or Workload()).fitting(model)
        runner = Runner(model, workload)
        runner.warm_up()
        peak_bytes = _peak_bytes()
        threads = config.threads or 1  # more than processors wait for each other, in a probe as in a step
        limits = make_limits(threads) if isinstance(model, CpuModel) and threads <= num_processors() else None
        sampler = Sampler(limits, config.isa, workload.num_samples, workload.min_sample_s)
        bench = _Bench(runner, sampler, *num_multiply_adds(model.config))
        return Measurements(
            model=Path(path).resolve().name,
            num_parameters=checkpoint.num_parameters,
            config=config,
            load_s=load_s,
            peak_bytes=peak_bytes,
            prompt={length: bench.prompt(length) for length in workload.prompts},
            decode={context: bench.decode(context, workload.num_decoded, 1) for context in workload.contexts},
            batch={count: bench.decode(0, workload.num_batch_steps, count) for count in workload.batches},
            bandwidth=median(sampler.all, lambda sample: sample.bandwidth),
            int8_peak=median(sampler.all, lambda sample: sample.int8_peak),
            samples=sampler.summary(),
        )
    finally:
        model.close()


def num_multiply_adds(config: ModelConfig) -> tuple[int, int]:
    """Multiply-adds with weights that a token costs: up to the keys and values of the last layer, and behind.

    Of a prompt only the last token has the second part.
    """
    experts, at_end = config.experts, f"layers.{config.num_layers - 1}."
    every = last = 0
    for name, shape in expected_shapes(config):
        if len(shape) != 2 or name in ("embed", "head"):
            continue
        cost = math.prod(shape)
        if experts is not None and ".experts." in name:
            cost = cost * experts.used // experts.count
        if name.startswith(at_end) and name.removeprefix(at_end) not in ("q", "k", "v"):
            last += cost
        else:
            every += cost
    return every, last + config.vocab_size * config.hidden_size


class Runner:
    """Sequences on a model, each in blocks of its own; greedy, without the engine around it."""

    def __init__(self, model: Model, workload: Workload) -> None:
        """Takes the cache that the workload needs."""
        self.model, self._workload, self._limits = model, workload, model.capabilities
        longest = max([*workload.prompts, *(context + workload.num_decoded for context in workload.contexts)])
        self._each = -(-workload.num_batch_steps // self._limits.block_size)
        self._num_blocks = max(-(-longest // self._limits.block_size), self._each * max(workload.batches, default=1))
        model.reserve(self._num_blocks)
        self._words = np.random.default_rng(0).integers(0, model.config.vocab_size, max(longest, 1024), np.int32)

    def warm_up(self) -> None:
        """Everything once, shortly: pages are touched, and the longest context is in the cache."""
        for length in (*self._workload.prompts, max(self._workload.contexts, default=0)):
            self.prompt(length)
        for count in self._workload.batches:
            self.decode(0, 1, count)

    def prompt(self, length: int) -> None:
        """A prompt, up to the choice of the first token of the answer."""
        table = np.arange(self._num_blocks, dtype=np.int32)[None]
        for start in range(0, length, self._limits.max_tokens):
            end = min(start + self._limits.max_tokens, length)
            at = np.arange(start, end, dtype=np.int32)
            last = [end - start - 1] if end == length else []
            arrays = self._words[start:end], at, at, _int32(0, end - start), table
            output = self.model.forward(Batch(*arrays, wanted=_int32(*last)))
            if last:
                output.top(last, 1)

    def decode(self, context: int, num_steps: int, num_sequences: int) -> None:
        """Greedy steps of all sequences, behind what lies in the cache; several have no room but for short contexts."""
        tokens = self._words[:num_sequences]
        rows = np.arange(num_sequences, dtype=np.int32)
        table = np.arange(self._num_blocks, dtype=np.int32)[None]
        if num_sequences > 1:
            table = table[0, : num_sequences * self._each].reshape(num_sequences, self._each)
        size = self._limits.block_size
        last = context + num_steps - 1
        for position in range(context, last + 1):
            slots = table[:, position // size] * size + position % size
            starts = np.arange(num_sequences + 1, dtype=np.int32)
            batch = Batch(tokens, np.full_like(rows, position), slots, starts, table, has_next=position < last)
            output = self.model.forward(batch)
            tokens = output.top(rows.tolist(), 1)[0][:, 0]


@dataclass(frozen=True)
class _Bench:
    runner: Runner
    sampler: Sampler
    every: int  # multiply-adds of each token
    last: int  # and of those that somebody wants to know more of

    def prompt(self, length: int) -> Speed:
        return self._speed(lambda: self.runner.prompt(length), length, 1, [0], self.every * length + self.last)

    def decode(self, context: int, num_steps: int, num_sequences: int) -> Speed:
        contexts = [context + num_steps // 2] * num_sequences
        work = (self.every + self.last) * num_sequences
        run = lambda: self.runner.decode(context, num_steps, num_sequences)  # noqa: E731
        return self._speed(run, num_steps * num_sequences, num_steps, contexts, work)

    def _speed(
        self, run: Callable[[], None], num_tokens: int, num_steps: int, contexts: Sequence[int], multiply_adds: int
    ) -> Speed:
        """`contexts` and `multiply_adds` say what one of the steps takes."""
        samples = self.sampler.measure(run)
        speed = num_tokens / median(samples, lambda sample: sample.seconds)
        model = self.runner.model
        if not isinstance(model, CpuModel) or self.sampler.limits is None:
            return Speed(speed)
        num_bytes = model.bytes_read(contexts)
        memory_s = [num_steps * num_bytes / sample.bandwidth for sample in samples]
        arithmetic_s = [num_steps * multiply_adds / sample.int8_peak for sample in samples]
        least_s = list(map(max, memory_s, arithmetic_s))
        reached = float(np.median([least / sample.seconds for least, sample in zip(least_s, samples, strict=True)]))
        limited_by = "memory" if sum(memory_s) > sum(arithmetic_s) else "arithmetic"
        return Speed(speed, num_tokens / float(np.median(least_s)), reached, limited_by)


def _int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Measures a model: loading, prompts, generation. Medians, one sequence at a time, without the engine around it."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model

PROMPT_LENGTHS = (128, 512)
NUM_DECODED = 64
NUM_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured, and on what. Speeds are tokens a second.

    `prompt_speeds`: (length of the prompt, speed). `decode_speed`: one token at a time, behind the shortest prompt.
    `peak_bytes`: the most memory that this process has had.
    """

    model: str
    num_parameters: int
    device: str
    isa: str
    threads: int
    cache_dtype: str
    load_s: float
    prompt_speeds: tuple[tuple[int, float], ...]
    decode_speed: float
    peak_bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """What was measured, to read: names and values."""
        return [
            ("model", f"{self.model}, {self.num_parameters / 1e6:.1f} million parameters"),
            ("run on", f"{self.device} ({self.isa}), {self.threads} threads, {self.cache_dtype} cache"),
            ("load", f"{self.load_s:.2f} s"),
            *((f"prompt of {length}", f"{speed:.1f} tokens/s") for length, speed in self.prompt_speeds),
            ("generation", f"{self.decode_speed:.1f} tokens/s"),
            ("peak memory", f"{self.peak_bytes / 1e9:.2f} GB"),
        ]


def measure(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    prompt_lengths: Sequence[int] = PROMPT_LENGTHS,
    num_decoded: int = NUM_DECODED,
    num_repeats: int = NUM_REPEATS,
    progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Load the model under a path and measure it. Prompts that do not fit its context are left out.

    Raises what loading raises, and InvalidParams for numbers below 1 and for a context that holds none of the prompts.
    """
    if min(*prompt_lengths, num_decoded, num_repeats) < 1:
        raise InvalidParams("prompt lengths, decoded tokens and repeats must be at least 1")
    config = (config or EngineConfig.from_env()).resolve()
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, config, progress)
    load_s = time.perf_counter() - start
    try:
        runner = _Runner(model, _fitting(prompt_lengths, num_decoded, model), num_decoded)
        prompt_speeds = tuple((length, runner.prompt_speed(length, num_repeats)) for length in runner.lengths)
        decode_speed = runner.decode_speed(num_decoded, num_repeats)
    finally:
        model.close()
    return Measurements(
        model=Path(path).name,
        num_parameters=checkpoint.num_parameters,
        device=config.device,
        isa=config.isa,
        threads=config.threads or 1,
        cache_dtype=config.cache_dtype,
        load_s=load_s,
        prompt_speeds=prompt_speeds,
        decode_speed=decode_speed,
        peak_bytes=_peak_bytes(),
    )


def _fitting(prompt_lengths: Sequence[int], num_decoded: int, model: Model) -> list[int]:
    room = model.config.max_positions - num_decoded
    if fitting := sorted(length for length in set(prompt_lengths) if length <= room):
        return fitting
    raise InvalidParams(
        f"no prompt fits: the context has {model.config.max_positions} tokens, {num_decoded} of them to be decoded"
    )


class _Runner:
    """One sequence on a model, in blocks 0, 1, 2..."""

    def __init__(self, model: Model, lengths: list[int], num_decoded: int) -> None:
        self.lengths = lengths
        self._model = model
        self._limits = model.capabilities
        num_blocks = -(-(lengths[-1] + num_decoded) // self._limits.block_size)
        model.reserve(num_blocks)
        self._blocks = np.arange(num_blocks, dtype=np.int32)[None, :]
        self._words = np.random.default_rng(0).integers(0, model.config.vocab_size, lengths[-1] + num_decoded)

    def prompt_speed(self, length: int, num_repeats: int) -> float:
        """Tokens a second from the first token of a prompt to the choice of the first of the answer."""
        self._prompt(length)  # the first run finds cold caches and pages
        return length / statistics.median(_seconds(lambda: self._prompt(length)) for _ in range(num_repeats))

    def decode_speed(self, count: int, num_repeats: int) -> float:
        """Tokens a second, one at a time, each with its choice."""
        length = self.lengths[0]
        times = []
        for _ in range(num_repeats):
            self._prompt(length)
            times += [
                _seconds(lambda at=position: self._advance(at, 1))  # type: ignore[misc]
                for position in range(length, length + count)
            ]
        return 1 / statistics.median(times)

    def _prompt(self, length: int) -> None:
        for start in range(0, length, self._limits.max_tokens):
            self._advance(start, min(self._limits.max_tokens, length - start))

    def _advance(self, start: int, count: int) -> None:
        """Compute `count` tokens from position `start` on, and the best one behind them."""
        positions = np.arange(start, start + count, dtype=np.int32)
        batch = Batch(
            token_ids=self._words[start : start + count].astype(np.int32),
            positions=positions,
            slots=positions,
            starts=np.array([0, count], dtype=np.int32),
            block_tables=self._blocks,
        )
        self._model.forward(batch).top([count - 1], 1)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

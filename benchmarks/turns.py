"""Engines measured in turns, one process each: what is measured, when a sample counts, and what follows from pairs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bitnet_inference.bench import Workload
from bitnet_inference.probe import MAX_ATTEMPTS, MAX_DISTURBANCE, disturbance, machine_busy_s

REST_S = 0.25  # threads of OpenMP wait awake for up to 0.2 s when their work is done: the next engine must not see it


class Engine(Protocol):
    """What runs a model."""

    version: str

    def prompt(self, length: int) -> None:
        """A prompt, up to the choice of the first token of the answer."""
        ...

    def decode(self, context: int, num_steps: int, num_sequences: int) -> None:
        """Greedy steps of all sequences, behind what lies in the cache."""
        ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt of `prompt` tokens; or, where that is 0, steps of `count` sequences behind `context` tokens."""

    prompt: int = 0
    context: int = 0
    num_steps: int = 0
    count: int = 0

    def __str__(self) -> str:
        if self.prompt:
            return f"prompt of {self.prompt}"
        return f"batch of {self.count}" if self.count else f"decoding at {self.context}"

    @property
    def num_tokens(self) -> int:
        """Tokens that running it once computes."""
        return self.prompt or self.num_steps * max(1, self.count)

    @property
    def room(self) -> int:
        """Tokens of a sequence when it has run."""
        return self.prompt or self.context + self.num_steps

    def prepare(self, engine: Engine) -> None:
        """Put the context into the cache, and do once and untimed what is to be timed, shortly."""
        if self.prompt:
            engine.prompt(self.prompt)
        else:
            if self.context:
                engine.prompt(self.context)
            engine.decode(self.context, min(2, self.num_steps), max(1, self.count))

    def run(self, engine: Engine) -> None:
        """Do it once."""
        if self.prompt:
            engine.prompt(self.prompt)
        else:
            engine.decode(self.context, self.num_steps, max(1, self.count))


def rows_of(workload: Workload) -> list[Row]:
    """What is measured, in order."""
    return [
        *(Row(prompt=length) for length in workload.prompts),
        *(Row(context=context, num_steps=workload.num_decoded) for context in workload.contexts),
        *(Row(count=count, num_steps=workload.num_batch_steps) for count in workload.batches),
    ]


def longest(workload: Workload) -> int:
    """Tokens that a sequence of the workload has at most."""
    return max(row.room for row in rows_of(workload))


@dataclass(frozen=True)
class Timing:
    """What an engine's process says: seconds for a row once, and the processor time that all of its threads took."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Sample:
    """A speed, and the share of all processor time that went to other processes or virtual machines meanwhile."""

    tokens_s: float
    disturbance: float


@dataclass(frozen=True)
class Pair:
    """Two samples, one taken right after the other."""

    ours: Sample
    theirs: Sample

    @property
    def disturbance(self) -> float:
        """That of the sample which had more."""
        return max(self.ours.disturbance, self.theirs.disturbance)

    @property
    def is_disturbed(self) -> bool:
        """Others had so much that the ratio says little."""
        return self.disturbance > MAX_DISTURBANCE


@dataclass(frozen=True)
class Comparison:
    """The pairs of a row that count, and how many were discarded."""

    pairs: Sequence[Pair]
    num_discarded: int

    @property
    def ratio(self) -> float:
        """Our speed by theirs: the median over the pairs."""
        return statistics.median(pair.ours.tokens_s / pair.theirs.tokens_s for pair in self.pairs)

    @property
    def tokens_s(self) -> float:
        """Their speed: the median."""
        return statistics.median(pair.theirs.tokens_s for pair in self.pairs)

    @property
    def is_disturbed(self) -> bool:
        """Not enough pairs were free of other processes: disturbed ones are among them."""
        return any(pair.is_disturbed for pair in self.pairs)


def take_pairs(ours: Callable[[], Sample], theirs: Callable[[], Sample], count: int) -> Comparison:
    """Take pairs until `count` are undisturbed, or enough were tried; the least disturbed ones count."""
    pairs: list[Pair] = []
    while sum(not pair.is_disturbed for pair in pairs) < count and len(pairs) < MAX_ATTEMPTS * count:
        pairs.append(Pair(ours(), theirs()))
    return Comparison(sorted(pairs, key=lambda pair: pair.disturbance)[:count], max(0, len(pairs) - count))


def take_sample(measure: Callable[[], Timing], num_tokens: int) -> Sample:
    """Let another process measure, and see what the rest of the machine did meanwhile."""
    time.sleep(REST_S)
    busy, own, start = machine_busy_s(), time.process_time(), time.perf_counter()
    timing = measure()
    wall_s, after = time.perf_counter() - start, machine_busy_s()
    own_s = timing.cpu_s + time.process_time() - own
    share = disturbance((after or 0.0) - (busy or 0.0), own_s, wall_s, os.cpu_count() or 1)
    return Sample(num_tokens / timing.seconds, share)

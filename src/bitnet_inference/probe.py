"""Times work beside what the machine can do at that moment, and notices when other processes take the processors."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitnet_inference import native
from bitnet_inference.config import available_bytes

MIN_SAMPLE_S = 0.25  # the system counts processor time in steps of 10 ms
MAX_DISTURBANCE = 0.05
MAX_ATTEMPTS = 3  # a sample is tried so often, on average, until nothing disturbs it
PROBED_BYTES = 1 << 29


def make_limits(threads: int) -> native.Limits:
    """A native.Limits with memory far larger than caches are, where there is that much."""
    return native.Limits(max(1, min(PROBED_BYTES, available_bytes() // 4)), threads)


@dataclass(frozen=True)
class Sample:
    """One measurement: `seconds` for the work once, and what was probed just before it.

    `bandwidth` is in bytes, `int8_peak` in multiply-adds a second, 0 where nothing was probed. `disturbance` is the
    share of all processor time that went to other processes or virtual machines. `results`: what the work returned,
    each time that it was done.
    """

    seconds: float
    bandwidth: float
    int8_peak: float
    disturbance: float
    results: Sequence[Any] = ()

    @property
    def is_disturbed(self) -> bool:
        """Others had so much that the time says little."""
        return self.disturbance > MAX_DISTURBANCE


def disturbance(busy_s: float, own_s: float, wall_s: float, num_cpus: int) -> float:
    """The share of `num_cpus` processors' time that was busy with something that was not our own."""
    return max(0.0, busy_s - own_s) / max(wall_s * num_cpus, 1e-9)


def machine_busy_s() -> float | None:
    """Seconds that all processors have been busy, or taken by the host; None where the system does not tell."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, steal = map(int, words[1:9])
    return (user + nice + system + interrupts + soft_interrupts + steal) / os.sysconf("SC_CLK_TCK")


@dataclass
class Sampler:
    """Measures pieces of work, and remembers all samples.

    `limits` and `isa`: what to probe beside the work. A sample lasts at least `min_s`. `all` are the kept samples;
    `num_discarded` were disturbed. Where every attempt was disturbed, disturbed ones are kept.
    """

    limits: native.Limits | None = None
    isa: str = ""
    num_samples: int = 3
    min_s: float = MIN_SAMPLE_S
    all: list[Sample] = field(default_factory=list)
    num_discarded: int = 0

    def measure(self, work: Callable[[], object]) -> list[Sample]:
        """At least one and at most `num_samples` samples of the work, undisturbed ones if there were any."""
        kept: list[Sample] = []
        disturbed: list[Sample] = []
        while len(kept) < self.num_samples and len(kept) + len(disturbed) < MAX_ATTEMPTS * self.num_samples:
            sample = self._sample(work)
            (disturbed if sample.is_disturbed else kept).append(sample)
        result = kept or sorted(disturbed, key=lambda sample: sample.disturbance)[: self.num_samples]
        self.num_discarded += len(kept) + len(disturbed) - len(result)
        self.all += result
        return result

    def summary(self) -> str:
        """How many samples there are, and what was wrong with them."""
        text = f"{len(self.all)} kept, {self.num_discarded} discarded because other processes ran"
        if num_bad := sum(sample.is_disturbed for sample in self.all):
            text += f"; {num_bad} of those kept were disturbed too, and are too slow: measure again when nothing runs"
        return text

    def _sample(self, work: Callable[[], object]) -> Sample:
        busy, own, start = machine_busy_s(), time.process_time(), time.perf_counter()
        bandwidth = self.limits.read_bandwidth() if self.limits else 0.0
        int8_peak = self.limits.int8_peak(self.isa) if self.limits else 0.0
        begin = time.perf_counter()
        results: list[object] = []
        while not results or time.perf_counter() - begin < self.min_s:
            results.append(work())
        end, after = time.perf_counter(), machine_busy_s()
        others = (after or 0.0) - (busy or 0.0)
        share = disturbance(others, time.process_time() - own, end - start, os.cpu_count() or 1)
        share = share if busy is not None else 0.0
        return Sample((end - begin) / len(results), bandwidth, int8_peak, share, results)


def median(samples: list[Sample], value: Callable[[Sample], float]) -> float:
    """The median of a number of the samples."""
    return statistics.median(map(value, samples)) if samples else 0.0

"""A loaded model that has nothing to do takes no processor time: its threads sleep until a request wakes them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bitnet_inference import LLM, SamplingParams

TASKS = Path("/proc/self/task")
MAX_LOOKS, PAUSE_S = 50, 0.25


def threads() -> set[str]:
    return {task.name for task in TASKS.iterdir()}


def run_times(names: set[str]) -> dict[str, str]:
    """How long each thread has run, in nanoseconds, and how often, as the kernel counts."""
    return {name: (TASKS / name / "schedstat").read_text() for name in names}


@pytest.mark.skipif(not (TASKS.parent / "schedstat").exists(), reason="the system does not count run times of threads")
def test_idle_threads_do_not_run() -> None:
    before = threads()
    with LLM.load("default", threads=3, max_cache_tokens=1024) as llm:
        prompt = "Once upon a time there was a fox who lived near the river. " * 5
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=3))
        ours = threads() - before
        assert len(ours) == 3  # the engine's, and two that help it
        looks = [run_times(ours)]
        while len(looks) < 2 or looks[-1] != looks[-2]:  # they may still be on their way to sleep
            assert len(looks) < MAX_LOOKS, "a thread runs all the time, or wakes up again and again"
            time.sleep(PAUSE_S)
            looks.append(run_times(ours))


@pytest.mark.skipif(not TASKS.exists(), reason="the system does not tell where its threads may run")
def test_threads_may_run_where_they_might_before() -> None:
    before = threads()
    with LLM.load("default", threads=max(3, len(os.sched_getaffinity(0))), max_cache_tokens=1024) as llm:
        llm.generate(["Once upon a time"] * 8, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        assert all(os.sched_getaffinity(int(name)) == os.sched_getaffinity(0) for name in threads() - before)

"""Many requests at once: beside the bare model, what the engine itself takes, and a thousand short ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from engine_streams import Numbers, Rows

from bitnet_inference.backends import load_model
from bitnet_inference.bench_engine import GREEDY, Load, UnderTest
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.llm import LLM
from bitnet_inference.model_folder import find_model, load_tokenizer
from bitnet_inference.probe import Sampler
from bitnet_inference.stream import Generation

KINDS: Mapping[str, SamplingParams] = {
    "greedy": GREEDY,
    "top_k 40": SamplingParams(temperature=0.8, top_k=40),
    "top_p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
}
LENGTH = 48  # tokens of prompts, and of answers
NUM_SHORT, NUM_IN_FLIGHT, NUM_COMPARED = 1000, 64, 50
CACHE_TOKENS = 8192


def batch(folder: Path, config: EngineConfig, sampler: Sampler) -> Rows:
    """8 and 16 requests at once, twice, beside the bare model, which is greedy."""
    with _under_test(folder, config, 8, 16) as under_test:
        return {
            f"{count} {kind}": _beside_bare(under_test, sampler, count, params)
            for count in (8, 16)
            for kind, params in KINDS.items()
        }


@contextmanager
def _under_test(folder: Path, config: EngineConfig, *streams: int) -> Iterator[UnderTest]:
    checkpoint = open_checkpoint(folder)
    sizes = Load(streams=streams, shortest=LENGTH, longest=LENGTH)
    with UnderTest(load_model(checkpoint, config), load_tokenizer(checkpoint), sizes) as under_test:
        under_test.warm_up()
        yield under_test


def _beside_bare(under_test: UnderTest, sampler: Sampler, count: int, params: SamplingParams) -> Numbers:
    found = under_test.measure(sampler, count, params)
    return {
        "tokens/s": found.tokens_s,
        "bare": found.bare_tokens_s,
        "ratio": found.of_bare,
        "overhead %": 100 * found.overhead,
    }


def overhead(folder: Path, config: EngineConfig, sampler: Sampler) -> Rows:
    """What the engine adds to the model: 16 requests at once, and one stream of the default model."""
    rows: dict[str, Numbers] = {}
    for name, path, count in (("", folder, 16), ("default ", find_model("default"), 1)):
        with _under_test(path, config, count) as under_test:
            for kind, params in KINDS.items():
                found = under_test.measure(sampler, count, params)
                own_us = 1e6 * found.overhead * count / found.tokens_s
                rows[f"{name}{count} {kind}"] = {"% of a step": 100 * found.overhead, "us a step": own_us}
    return rows


def short(folder: Path, config: EngineConfig, sampler: Sampler) -> Rows:
    """A thousand short requests to the default model, many in flight, beside some of them one at a time."""
    # A small cache, all of which the first round touches: what grows behind that is no cache.
    with LLM.load("default", threads=config.threads, drafts="none", max_cache_tokens=CACHE_TOKENS) as llm:
        requests = _short_requests(llm.config.vocab_size)
        _all_at_once(llm, requests)  # what is taken once is taken
        at = np.random.default_rng(1).choice(NUM_SHORT, NUM_COMPARED, replace=False).tolist()
        samples = sampler.measure(lambda: _compared(llm, requests, at))
        results: list[Numbers] = [result for sample in samples for result in sample.results]
        return {f"sample {number}": result for number, result in enumerate(results, 1)}


Requests = Sequence[tuple[list[int], SamplingParams]]


def _short_requests(vocab_size: int) -> Requests:
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, top_p=0.95)
    sizes = random.integers(4, 33, (NUM_SHORT, 2)).tolist()
    return [
        (random.integers(0, vocab_size, prompt).tolist(), replace(params, seed=seed, max_tokens=answer))
        for seed, (prompt, answer) in enumerate(sizes)
    ]


def _compared(llm: LLM, requests: Requests, at: Sequence[int]) -> Numbers:
    before = _resident_bytes()
    _all_at_once(llm, requests)
    after, begin = _resident_bytes(), time.perf_counter()  # nobody holds the outputs
    together = _all_at_once(llm, requests)
    together_s, begin = time.perf_counter() - begin, time.perf_counter()
    alone = [llm.generate(*requests[index]) for index in at]
    alone_s = time.perf_counter() - begin
    speed, speed_alone = _num_tokens(together) / together_s, _num_tokens(alone) / alone_s
    return {
        "finished": sum(output.finish_reason in ("stop", "length") for output in together),
        "same": sum(together[index].token_ids == output.token_ids for index, output in zip(at, alone, strict=True)),
        "tokens/s": speed,
        "alone": speed_alone,
        "ratio": speed / speed_alone,
        "MB before": before / 1e6,
        "MB more": (after - before) / 1e6,
    }


def _all_at_once(llm: LLM, requests: Requests) -> list[Generation]:
    """The requests' outputs; so many at a time that some are always under way. Raises the error of a request."""
    waiting, outputs = list(enumerate(requests)), dict[int, Generation]()

    def send() -> None:
        while waiting:
            try:
                index, request = waiting.pop()
            except IndexError:  # another thread was quicker
                return
            outputs[index] = llm.generate(*request)

    threads = [threading.Thread(target=send) for _ in range(NUM_IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outputs[index] for index in range(len(requests))]


def _num_tokens(outputs: Sequence[Generation]) -> int:
    return sum(len(output.token_ids) for output in outputs)


def _resident_bytes() -> int:
    """What this process has in memory; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

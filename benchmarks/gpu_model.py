"""A whole model on a card: speeds beside what the card's bandwidth allows, memory, and a bfloat16 copy beside."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from agreement import Floats, difference, is_off, logits_of
from engine_streams import Numbers, Rows
from gpu_card import Card
from gpu_peer import BfloatCopy

from bitnet_inference.backends import load_model, resolved
from bitnet_inference.backends.cuda import CudaModel
from bitnet_inference.bench import Runner, Workload
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BitNetError
from bitnet_inference.formats import open_checkpoint

PROMPTS, CONTEXTS, BATCHES = (512, 2048, 4000), (0, 2048), (1, 8, 64)
NUM_SAMPLES = 5


def agreement(path: Path, device: str) -> Rows:
    """How far the logits of a few tokens are from the reference's; NaN where a device fails."""
    truth = logits_of(path, "reference")
    return {name: _beside(path, name, truth) for name in ("cpu", device)}


def _beside(path: Path, device: str, truth: Floats) -> Numbers:
    try:
        error, others = difference(logits_of(path, device), truth)
    except BitNetError as failure:  # the next model may do
        print(f"{path.name}: {failure}", flush=True)
        error, others = math.nan, 0
    return {"% RMS": 100 * error, "other clear tokens": others, "agrees": not is_off(error, others)}


def speeds(card: Card, path: Path, head: str, device: str) -> Rows:
    """Prompts, decoding and batches of the model in a folder, with an exact or rounded head."""
    before, begin = _memory(card), time.perf_counter()
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, resolved(checkpoint, EngineConfig(device=device, head=head, max_batch_tokens=4096)))
    assert isinstance(model, CudaModel)
    try:
        load_s, weights = time.perf_counter() - begin, _memory(card) - before
        workload = Workload(prompts=PROMPTS, contexts=CONTEXTS, batches=BATCHES).fitting(model)
        if card.device.type != "cuda":
            workload = replace(workload, prompts=(16,), contexts=(0,), batches=(2,), num_decoded=1, num_batch_steps=1)
        runner = Runner(model, workload)
        runner.warm_up()
        rows: dict[str, Numbers] = {
            f"load ({head} head)": {"tokens/s": 0.0, "s": load_s, "GB": weights / 1e9, "% of bandwidth": 0.0}
        }
        for length in workload.prompts:
            rows[f"prompt of {length}"] = _row(_seconds(partial(runner.prompt, length), card), length, 1, 0, card)
        cases = [(1, context, workload.num_decoded) for context in workload.contexts]
        cases += [(count, 0, workload.num_batch_steps) for count in workload.batches]
        for count, context, steps in cases:
            read = model.bytes_read([context + steps // 2] * count)
            seconds = _seconds(partial(runner.decode, context, steps, count), card)
            rows[f"{count} decoding at {context}"] = _row(seconds, count * steps, steps, read, card)
        return rows
    finally:
        model.close()


def peer(card: Card, path: Path) -> Rows:
    """The bfloat16 copy of the same shape: decoding."""
    config = open_checkpoint(path).config
    batches = BATCHES if card.device.type == "cuda" else (2,)
    rows: dict[str, Numbers] = {}
    for count in batches:
        seconds = BfloatCopy(config, count, 64, card.device).seconds_a_step()
        rows[f"bfloat16, {count} decoding"] = {"tokens/s": count / seconds, "us a step": seconds * 1e6}
        if card.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _row(seconds: float, num_tokens: int, num_steps: int, num_bytes: int, card: Card) -> Numbers:
    reached = 100 * num_steps * num_bytes / seconds / card.bandwidth
    return {"tokens/s": num_tokens / seconds, "s": seconds, "GB": num_bytes / 1e9, "% of bandwidth": reached}


def _seconds(run: Callable[[], object], card: Card) -> float:
    samples = []
    for _ in range(NUM_SAMPLES if card.device.type == "cuda" else 1):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def _memory(card: Card) -> int:
    return torch.cuda.memory_allocated(card.device) if card.device.type == "cuda" else 0

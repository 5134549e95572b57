"""A whole model on a card: speeds beside what the card's bandwidth allows, memory, and a bfloat16 copy beside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from engine_streams import Numbers, Rows
from gpu_card import Card
from gpu_peer import BfloatCopy
from numpy.typing import NDArray

from bitnet_inference.backends import load_model, resolved
from bitnet_inference.backends.cuda import CudaModel
from bitnet_inference.bench import Runner, Workload
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch

PROMPTS, CONTEXTS, BATCHES = (512, 2048, 4000), (0, 2048), (1, 8, 64)
NUM_SAMPLES = 5
Floats = NDArray[np.float32]


def agreement(path: str, device: str) -> Rows:
    """How far the logits of a few tokens are from the reference's: by their RMS; and other best tokens."""
    truth, ours = _logits(path, "reference"), {name: _logits(path, name) for name in ("cpu", device)}
    return {name: _difference(logits, truth) for name, logits in ours.items()}


def _logits(path: str, device: str) -> Floats:
    checkpoint = open_checkpoint(path)
    model = load_model(checkpoint, EngineConfig(device=device))
    try:
        count = min(40, model.config.max_positions)
        model.reserve(-(-count // model.capabilities.block_size))
        at = np.arange(count, dtype=np.int32)
        table = np.arange(-(-count // model.capabilities.block_size), dtype=np.int32)[None]
        ids = (17 + 7919 * at) % model.config.vocab_size
        return model.forward(Batch(ids, at, at, np.array([0, count], np.int32), table)).full(range(count))
    finally:
        model.close()


def _difference(logits: Floats, truth: Floats) -> Numbers:
    error = logits - truth
    best, second = np.sort(truth, axis=1)[:, ::-1][:, :2].T
    is_other = logits.argmax(1) != truth.argmax(1)
    is_clear = best - second > 2 * np.abs(error).max(1)
    return {
        "% RMS": 100 * float(np.sqrt(np.square(error).mean() / np.square(truth).mean())),
        "other best tokens": float(is_other.sum()),
        "of them clear ones": float((is_other & is_clear).sum()),
    }


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

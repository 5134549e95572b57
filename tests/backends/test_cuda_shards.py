"""A model on two GPUs: processes that compute together, their kernels interpreted on the processor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from bitnet_inference import LLM, SamplingParams
from bitnet_inference.backends import load_model
from bitnet_inference.backends.cuda_shards import ShardedModel
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BackendError, InvalidParams, OutOfMemory, Stopped
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model, Output
from bitnet_inference.model_folder import load_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "bitnet-packed"
IDS = np.load(GOLDEN / "golden.npz")["token_ids"].astype(np.int32)
NO_FLIP = 1e-4  # as in test_golden.py


def load(gpus: int, folder: Path = GOLDEN) -> ShardedModel:
    config = EngineConfig(device="cuda", gpus=gpus, cache_dtype="float32", threads=1).resolve()
    return ShardedModel(open_checkpoint(folder), config, lambda done, total: None)


@pytest.fixture(scope="module")
def two() -> Iterator[ShardedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        model = load(2)
    yield model
    model.close()


@pytest.fixture(scope="module")
def one() -> Iterator[ShardedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        model = load(1)
    yield model
    model.close()


def forward(model: Model, *pieces: tuple[int, int, int]) -> Output:
    """One forward of tokens from, to, of sequences that begin in these blocks."""
    at = [np.arange(begin, end, dtype=np.int32) for _, begin, end in pieces]
    slots = [16 * block + positions for (block, *_), positions in zip(pieces, at, strict=True)]
    starts = np.cumsum([0, *map(len, at)], dtype=np.int32)
    tables, positions = np.array([[block] for block, *_ in pieces], np.int32), np.concatenate(at)
    return model.forward(Batch(IDS[positions], positions, np.concatenate(slots), starts, tables))


def results(model: Model) -> list[np.ndarray]:
    """All that there is to know after a prompt beside a token of another sequence, and after its next token."""
    model.reserve(3)
    prompt = forward(model, (2, 0, 5), (0, 0, 1))
    found = [prompt.full([4, 5]), prompt.hidden([5, 4]), *prompt.top([4, 0], 300)]
    token = forward(model, (2, 5, 6))
    return [*found, token.full([0]), *token.top([0], 1)]


def test_two_gpus_give_the_bits_of_one(one: ShardedModel, two: ShardedModel) -> None:
    found, expected = results(two), results(one)
    assert all(map(np.array_equal, found, expected))
    logits, ids, scores = found[0][0], found[2][0], found[3][0]
    best = np.argsort(-logits, kind="stable")[:300]
    assert np.array_equal(ids, best) and np.array_equal(scores, logits[best]), "the best are those of all logits"


def test_logits_are_those_of_transformers(two: ShardedModel) -> None:
    two.reserve(1)
    found = forward(two, (0, 0, 8)).full(range(8))
    expected = np.load(GOLDEN / "golden.npz")["logits"][:8]
    assert np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()) < NO_FLIP


def test_every_gpu_has_the_biases_of_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of keys, which both have."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = GOLDEN.parent / "qwen2-bf16"
    model, golden = load(2, folder), np.load(folder / "golden.npz")
    model.reserve(1)
    at, ids = np.arange(4, dtype=np.int32), golden["token_ids"][:4].astype(np.int32)
    batch = Batch(ids, at, at, np.array([0, 4], np.int32), np.zeros((1, 1), np.int32))
    found, expected = model.forward(batch).full(range(4)), golden["logits"][:4]
    model.close()
    assert np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()) < 1e-3  # of 16-bit factors


def test_blocks_are_copied_on_all_gpus(two: ShardedModel) -> None:
    two.reserve(4)
    forward(two, (1, 0, 1))
    two.copy_blocks([(1, 3), (3, 2)])
    assert np.array_equal(forward(two, (2, 1, 2)).full([0]), forward(two, (1, 1, 2)).full([0]))


def test_a_cache_that_is_too_large_is_refused_and_the_model_goes_on(two: ShardedModel) -> None:
    with pytest.raises(OutOfMemory, match="a cache of 1000000000 blocks"):
        two.reserve(10**9)
    two.reserve(1)
    assert two.num_bytes == two._weight_bytes + two.capabilities.block_bytes


def test_a_block_lies_on_all_gpus(one: ShardedModel, two: ShardedModel) -> None:
    assert two.capabilities.block_bytes == one.capabilities.block_bytes


def test_a_request_ends_when_a_gpu_is_lost_and_so_do_all_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = load(2)
    with LLM(model, load_tokenizer(open_checkpoint(GOLDEN)), max_cache_tokens=64) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
        stream = llm.stream(IDS[:2].tolist(), params)
        pieces = iter(stream)
        next(pieces)
        os.kill(model.process_ids[1], signal.SIGKILL)
        with pytest.raises(BackendError, match=r"the process of GPU 1 ended \(-9\)"):
            list(pieces)
        with pytest.raises(BackendError, match=r"the process of GPU 1 ended \(-9\)"):
            llm.generate(IDS[:2].tolist(), params)
    with pytest.raises((Stopped, BackendError)):
        model.reserve(1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cpu", "gpus": 2}, 'gpus is 2, but device is "cpu": choose device="cuda", or one GPU'),
        ({"device": "cuda:1", "gpus": 2}, 'gpus is 2, but device is "cuda:1"'),
        ({"device": "cuda", "gpus": 5}, "gpus is 5, but a model of 4 heads runs on 4 at most"),
        ({"gpus": 0}, "gpus is 0: give a whole number from 1 to 64"),
    ],
)
def test_what_cannot_be_split_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidParams, match=why):
        load_model(open_checkpoint(GOLDEN), EngineConfig(**options))

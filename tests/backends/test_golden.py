"""Whole models against what Transformers computes from the same files (tests/golden), on every backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from devices import has

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model, Output
from bitnet_inference.model_folder import find_model

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
DEVICES = ("reference", "cpu", *(["mlx"] if has("mlx") else []))
# The golden seeds keep every int8 code away from a tie, so that no code flips: what is left is float32 rounding. The
# bound that holds even where a code flips is 3%.
NO_FLIP, ALWAYS = 1e-4, 3e-2


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def load(name: str, device: str, cache_dtype: str = "float32") -> Model:
    config = EngineConfig(device=device, cache_dtype=cache_dtype, threads=1)
    return load_model(open_checkpoint(GOLDEN / name), config)


def forward(model: Model, token_ids: np.ndarray) -> Output:
    """One forward of a whole sequence, in blocks 0, 1, 2, ..."""
    num_tokens, block_size = len(token_ids), model.capabilities.block_size
    num_blocks = -(-num_tokens // block_size)
    model.reserve(num_blocks)
    positions = np.arange(num_tokens, dtype=np.int32)
    starts = np.array([0, num_tokens], np.int32)
    return model.forward(Batch(token_ids, positions, positions, starts, np.arange(num_blocks, dtype=np.int32)[None]))


def relative_rms(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, device):
    golden = np.load(GOLDEN / name / "golden.npz")
    model = load(name, device)
    logits = forward(model, golden["token_ids"]).full(range(len(golden["token_ids"])))
    assert relative_rms(logits, golden["logits"]) < NO_FLIP
    model.close()


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_after_the_final_norm(name, device):
    golden = np.load(GOLDEN / name / "golden.npz")
    model = load(name, device)
    hidden = forward(model, golden["token_ids"]).hidden(range(len(golden["token_ids"])))
    assert relative_rms(hidden, golden["hidden"][-1]) < NO_FLIP
    model.close()


@pytest.mark.parametrize("name", NAMES)
def test_logits_with_the_default_cache(name, device):
    """Keys and values in bfloat16 flip codes: the looser bound."""
    golden = np.load(GOLDEN / name / "golden.npz")
    model = load(name, device, "bfloat16")
    logits = forward(model, golden["token_ids"]).full(range(len(golden["token_ids"])))
    assert relative_rms(logits, golden["logits"]) < ALWAYS
    model.close()


def test_the_default_model_is_that_of_the_reference():
    """Each rounds what the other does, in the second segment of attention too, until a code flips."""
    ids = np.random.default_rng(3).integers(3, 3000, 300).astype(np.int32)
    found, expected = (
        forward(load_model(open_checkpoint(find_model("default")), EngineConfig(device=device)), ids).full(range(300))
        for device in ("cpu", "reference")
    )
    assert relative_rms(found[:40], expected[:40]) < NO_FLIP
    assert relative_rms(found, expected) < ALWAYS


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text(name, device):
    """The continuation step by step, each step from Transformers' own tokens, wherever its margin is no tie."""
    golden = np.load(GOLDEN / name / "golden.npz")
    ids, margins = golden["greedy_ids"], golden["greedy_margins"]
    num_prompt = len(ids) - len(margins)
    model = load(name, device)
    logits = forward(model, ids).full(range(num_prompt - 1, len(ids) - 1))
    clear = margins > 2 * ALWAYS * golden["logits"].std()
    assert clear.sum() >= len(margins) // 2
    assert np.array_equal(logits.argmax(axis=1)[clear], ids[num_prompt:][clear])
    model.close()


def test_the_three_writings_of_one_model_give_the_same_bits(device):
    """Packed, as masters and unpacked: the scales are those that transformers itself rounds to bfloat16."""
    ids = np.load(GOLDEN / "bitnet-packed" / "golden.npz")["token_ids"]
    names = ("bitnet-packed", "bitnet-masters", "bitnet-unpacked")
    found = [forward(load(name, device), ids).full(range(len(ids))) for name in names]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])

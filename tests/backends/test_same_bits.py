"""The promise: the CPU backend gives the same bits on every path. Whole models, every logit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bitnet_inference import config as config_module
from bitnet_inference import native
from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import OutOfMemory
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model

GOLDEN = Path(__file__).parents[1] / "golden"
DEFAULT = Path(config_module.__file__).parent / "default_model"
FOLDERS = [DEFAULT, GOLDEN / "llama-rms-norm", GOLDEN / "llama3-bf16", GOLDEN / "llama-partial"]
NUM_TOKENS = 70


def load(folder: Path, isa: str, threads: int, cache_dtype: str = "bfloat16", ternary_format: str = "u2") -> Model:
    config = EngineConfig(isa=isa, threads=threads, cache_dtype=cache_dtype, ternary_format=ternary_format)
    model = load_model(open_checkpoint(folder), config)
    model.reserve(16)
    return model


def sequence(model: Model, ids: np.ndarray, start: int, first_block: int) -> tuple[np.ndarray, ...]:
    """Token ids, positions, slots and the block table of a piece of a sequence that has every second block."""
    size = model.capabilities.block_size
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    table = (first_block + 2 * np.arange(NUM_TOKENS // size + 1)).astype(np.int32)
    return ids, positions, table[positions // size] * size + positions % size, table


def logits(model: Model, pieces: list[tuple[np.ndarray, ...]]) -> np.ndarray:
    """One forward for several pieces."""
    ids, positions, slots, tables = zip(*pieces, strict=True)
    starts = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    flat = [np.concatenate(part).astype(np.int32) for part in (ids, positions, slots)]
    return model.forward(Batch(*flat, starts, np.stack(tables))).full(range(int(starts[-1])))


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def ids(folder: Path) -> np.ndarray:
    vocab = open_checkpoint(folder).config.vocab_size
    return np.random.default_rng(0).integers(0, vocab, NUM_TOKENS, np.int32)


@pytest.fixture(scope="module")
def expected(folder: Path, ids: np.ndarray) -> np.ndarray:
    model = load(folder, "generic", 1)
    return logits(model, [sequence(model, ids, 0, 0)])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_instruction_sets_and_threads(
    folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str, threads: int
) -> None:
    model = load(folder, isa, threads)
    assert logits(model, [sequence(model, ids, 0, 0)]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("cuts", [(1, 2, 3), (32,), (31, 33, 64), tuple(range(1, NUM_TOKENS))])
def test_chunks_of_the_prompt(folder: Path, ids: np.ndarray, expected: np.ndarray, cuts: tuple[int, ...]) -> None:
    model = load(folder, native.isas()[0], 2)
    bounds = [0, *cuts, NUM_TOKENS]
    chunks = [logits(model, [sequence(model, ids[a:b], a, 1)]) for a, b in pairwise(bounds)]
    assert np.concatenate(chunks).tobytes() == expected.tobytes()


@pytest.mark.parametrize("isa", native.isas())
def test_formats_in_memory(folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str) -> None:
    model = load(folder, isa, 2, ternary_format="t5")
    assert logits(model, [sequence(model, ids[:66], 0, 1)]).tobytes() == expected[:66].tobytes()
    one_by_one = [logits(model, [sequence(model, ids[i : i + 1], i, 1)]) for i in range(66, NUM_TOKENS)]
    assert np.concatenate(one_by_one).tobytes() == expected[66:].tobytes()


@pytest.mark.parametrize("isa", native.isas())
def test_an_int8_cache(folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str) -> None:
    whole = logits(generic := load(folder, "generic", 1, "int8"), [sequence(generic, ids, 0, 0)])
    model = load(folder, isa, 2, "int8")
    chunks = [logits(model, [sequence(model, ids[a:b], a, 1)]) for a, b in pairwise([0, 5, 40, NUM_TOKENS])]
    assert np.concatenate(chunks).tobytes() == whole.tobytes()
    assert np.sqrt(np.mean((whole - expected) ** 2) / np.mean(expected**2)) < 0.05


def test_neighbours_in_the_batch(folder: Path, ids: np.ndarray, expected: np.ndarray) -> None:
    model = load(folder, native.isas()[0], 2)
    logits(model, [sequence(model, ids[::-1].copy(), 0, 1)])
    first = logits(model, [sequence(model, ids[:40], 0, 0), sequence(model, ids[::-1][:7].copy(), 0, 1)])
    second = logits(model, [sequence(model, ids[::-1][7:30].copy(), 7, 1), sequence(model, ids[40:], 40, 0)])
    assert np.concatenate([first[:40], second[23:]]).tobytes() == expected.tobytes()


def test_a_cache_that_the_system_refuses_is_our_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def reserve(self, num_blocks: int) -> None:
            raise MemoryError

    model = load(folder, native.isas()[0], 1)
    monkeypatch.setattr(model, "_cache", Refusing())
    with pytest.raises(OutOfMemory, match="cache of 3 blocks"):
        model.reserve(3)


def test_rows_of_the_head_alone(folder: Path, ids: np.ndarray, expected: np.ndarray) -> None:
    model = load(folder, native.isas()[0], 2)
    token_ids, positions, slots, table = sequence(model, ids, 0, 0)
    batch = Batch(token_ids, positions, slots.astype(np.int32), np.array([0, NUM_TOKENS], np.int32), table[None])
    output = model.forward(batch)
    assert output.full([69, 3]).tobytes() == expected[[69, 3]].tobytes()
    best, values = output.top([5], 3)
    order = np.argsort(-expected[5], kind="stable")[:3]
    assert best[0].tolist() == order.tolist()
    assert values[0].tobytes() == expected[5][order].tobytes()

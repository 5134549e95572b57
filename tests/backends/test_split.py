"""A model on two devices gives the bits that it gives on one: here both are the CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bitnet_inference import LLM, SamplingParams
from bitnet_inference.backends import load_model
from bitnet_inference.backends.cpu import CpuModel
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.backends.split import SplitModel, load_stages
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import OutOfMemory, Stopped
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.model.contract import Batch, Capabilities, Model
from bitnet_inference.model.loader import record, stage_shapes
from bitnet_inference.model_folder import find_model, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
OPTIONS = EngineConfig(device="cpu", threads=1)


def stages(checkpoint: Checkpoint, cut: int, config: EngineConfig = OPTIONS) -> SplitModel:
    layers = range(cut), range(cut, checkpoint.config.num_layers)
    return load_stages(*(partial(CpuModel, checkpoint, config.resolve(), lambda *_: None, each) for each in layers))


def logits(model: Model, ids: np.ndarray, cuts: tuple[int, ...] = ()) -> np.ndarray:
    """Of all tokens, computed in pieces, in every second block."""
    size = model.capabilities.block_size
    model.reserve(2 * (len(ids) // size + 1))
    table, rows = 2 * np.arange(len(ids) // size + 1, dtype=np.int32), []
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        at = np.arange(start, end, dtype=np.int32)
        slots = table[at // size] * size + at % size
        output = model.forward(Batch(ids[start:end], at, slots, np.array([0, end - start], np.int32), table[None]))
        rows.append(output.full(range(end - start)))
    return np.concatenate(rows)


@pytest.mark.parametrize("name", NAMES)
def test_every_family_gives_the_same_bits(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, 45, np.int32)
    expected = logits(load_model(checkpoint, OPTIONS), ids)
    for cut in range(1, checkpoint.config.num_layers):
        assert logits(stages(checkpoint, cut), ids, (7, 33, 34)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "options", [{"head": "int8"}, {"quantize": "int8"}, {"cache_dtype": "int8"}, {"ternary_format": "t5"}]
)
def test_so_does_every_option(options: dict[str, str]) -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama3-bf16")
    ids, config = np.arange(20, dtype=np.int32), EngineConfig(device="cpu", threads=1, **options)
    expected = logits(load_model(checkpoint, config), ids)
    assert logits(stages(checkpoint, 1, config), ids).tobytes() == expected.tobytes()


def test_text_and_beams_are_the_same() -> None:
    path = find_model("default")
    checkpoint = open_checkpoint(path)
    seeded = SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=2)
    with LLM.load(path, threads=1, device="cpu", max_cache_tokens=4096) as llm:
        expected = [llm.generate(["The fox", "Once upon a time"], seeded), llm.embed(["The fox"])[0].tobytes()]
        choices = [each.read().text for each in llm.stream_choices("The owl", 3, seeded)]
    tokenizer = load_tokenizer(checkpoint)
    with LLM(stages(checkpoint, 2), tokenizer, max_cache_tokens=4096) as llm:
        found = [llm.generate(["The fox", "Once upon a time"], seeded), llm.embed(["The fox"])[0].tobytes()]
        assert [each.text for each in found[0]] == [each.text for each in expected[0]]
        assert [each.logprobs for each in found[0]] == [each.logprobs for each in expected[0]]
        assert found[1] == expected[1]
        assert [each.read().text for each in llm.stream_choices("The owl", 3, seeded)] == choices


@pytest.mark.parametrize("name", ["llama3-bf16", "qwen2-bf16", "qwen3-bitlinear", "gemma3-bf16", "llama-ternary-head"])
def test_the_estimate_of_a_stage_is_close(name: str) -> None:
    checkpoint, config = open_checkpoint(GOLDEN / name), OPTIONS.resolve()
    for layers in (range(1), range(1, checkpoint.config.num_layers)):
        stage = CpuModel(checkpoint, config, lambda *_: None, layers)
        stage.reserve(-(-1024 // stage.capabilities.block_size))
        assert stage.num_bytes <= estimate_bytes(checkpoint, config, 1024, layers) <= stage.num_bytes * 1.02
        stage.close()


def test_a_stage_that_cannot_be_loaded_closes_the_other() -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama3-bf16")
    first = CpuModel(checkpoint, OPTIONS.resolve(), lambda *_: None, range(1))

    def fails() -> CpuModel:
        raise OutOfMemory("it is full")

    with pytest.raises(OutOfMemory):
        load_stages(lambda: first, fails)
    with pytest.raises(Stopped):
        first.reserve(1)


class Noted:
    """A stage that computes nothing and takes notes."""

    num_bytes = 5

    def __init__(self, block_size: int, block_bytes: int, available_bytes: int) -> None:
        self.config = open_checkpoint(GOLDEN / "llama3-bf16").config
        self.capabilities = Capabilities(block_size, block_bytes, 3 * block_size, 7 * block_size, available_bytes)
        self.notes = ("rounded", str(block_size))
        self.num_blocks, self.pairs, self.tables = 0, [(0, 0)], np.zeros((0, 0), np.int32)

    def reserve(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def advance(self, batch: Batch, hidden: np.ndarray | None = None) -> np.ndarray:
        self.tables = batch.block_tables
        return np.ones((len(batch.token_ids), 2), np.float32)

    def forward(self, batch: Batch, hidden: np.ndarray | None = None) -> np.ndarray:  # type: ignore[override]
        self.tables = batch.block_tables
        assert hidden is not None
        return 2 * hidden

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.pairs = pairs

    def close(self) -> None:
        self.num_blocks = -1


def test_stages_with_blocks_of_different_sizes_share_the_larger_ones() -> None:
    small, large = Noted(4, 10, 1000), Noted(12, 20, 300)
    for first, last in ((small, large), (large, small)):
        model = SplitModel(first, last)
        limits = model.capabilities
        assert (limits.block_size, limits.block_bytes) == (12, 50)
        assert (limits.max_sequences, limits.max_tokens) == (12, 28), "the smaller ones"
        assert limits.available_bytes == 15 * 50, "300 bytes hold 15 blocks of 20 bytes"
        assert set(model.notes) == {"rounded", "4", "12"} and len(model.notes) == 3
        model.reserve(6)
        assert (small.num_blocks, large.num_blocks, model.num_bytes) == (18, 6, 10)
        one, table = np.zeros(1, np.int32), np.array([[5, 0], [2, 4]], np.int32)
        found = model.forward(Batch(one, one, one, np.array([0, 1], np.int32), table))
        assert np.array_equal(found, np.full((1, 2), 2, np.float32))
        assert small.tables.tolist() == [[15, 16, 17, 0, 1, 2], [6, 7, 8, 12, 13, 14]]
        assert small.tables.dtype == np.int32 and large.tables is table
        model.copy_blocks([(1, 2), (2, 0)])
        assert large.pairs == [(1, 2), (2, 0)]
        assert small.pairs == [(3, 6), (4, 7), (5, 8), (6, 0), (7, 1), (8, 2)]
        model.close()
        assert small.num_blocks == large.num_blocks == -1


def test_the_plans_of_stages_name_what_they_need() -> None:
    config = open_checkpoint(GOLDEN / "qwen3-embedding").config
    assert config.tie_embeddings and config.num_layers > 1
    stages = record(config, range(1)), record(config, range(1, config.num_layers))
    names = [
        {name for plan in (each.body, each.head, each.norm) for step in plan.steps for name in step.weights}
        for each in stages
    ]
    for found, layers in zip(names, (range(1), range(1, config.num_layers)), strict=True):
        assert found == set(dict(stage_shapes(config, layers)))
    assert names[0] | names[1] == set(dict(stage_shapes(config))) and names[0] & names[1] == {"embed"}
    first, last = stages
    assert first.body.input is None and last.body.input is not None and not first.head.steps
    assert (first.body.layers, last.body.layers) == (range(1), range(1, config.num_layers))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are interpreted, so that the processor stands for a GPU."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("name", ["bitnet-packed", "gemma3-bf16"])
def test_the_last_layers_on_a_gpu(on_gpu: None, name: str) -> None:
    """Within what the golden models are allowed, prompts and single tokens."""
    checkpoint = open_checkpoint(GOLDEN / name)
    golden = np.load(GOLDEN / name / "golden.npz")
    seen: list[tuple[int, int]] = []
    config = EngineConfig(device="cuda", gpu_layers=1, threads=1, cache_dtype="float32")
    model = load_model(checkpoint, config, lambda *done: seen.append(done))
    assert isinstance(model, SplitModel) and seen[-1] == (checkpoint.num_parameters, checkpoint.num_parameters)
    assert sorted(seen) == seen
    ids, expected = golden["token_ids"][:12].astype(np.int32), golden["logits"][:12]
    found = logits(model, ids, (10, 11))
    assert np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()) < 1e-3
    model.close()


PROMPT = [5, 6, 7, 8]


def test_an_llm_on_both_and_on_the_cpu_when_the_gpu_fails(on_gpu: None) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    options = {"threads": 1, "max_cache_tokens": 256, "drafts": "none"}
    with LLM.load(GOLDEN / "bitnet-packed", device="cpu", **options) as llm:
        expected = llm.generate(PROMPT, params).token_ids
    with LLM.load(GOLDEN / "bitnet-packed", device="cuda", gpu_layers=1, fallback="cpu", **options) as llm:
        assert llm.device == "cuda (the last 1) and cpu"
        assert llm.generate(PROMPT, params).token_ids == expected
        last = llm._engine._model._last  # type: ignore[attr-defined]
        last._hidden = last._hidden[:1]  # PyTorch finds no room for a second row
        assert llm.generate(PROMPT, params).token_ids == expected
        assert llm.failure.startswith("cuda (the last 1) and cpu failed, so the model was loaded for the CPU: ")
        assert llm.device == "cpu"

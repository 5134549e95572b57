"""Layers with several MLPs: against Transformers, against the reference, and what a step says of them.

That each path gives the same bits, test_same_bits.py shows.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from expert_samples import IDS, tensors, write_file, write_folder

from bitnet_inference import native
from bitnet_inference.backends import load_model
from bitnet_inference.backends.reference import chosen_experts
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Experts
from bitnet_inference.model.contract import Batch, Model

GOLDEN = Path(__file__).parent.parent / "golden" / "experts"


def load(path: Path, device: str = "cpu", **options: object) -> Model:
    config = EngineConfig(**{"threads": 2, "cache_dtype": "float32", "device": device} | options)
    model = load_model(open_checkpoint(path), config)
    model.reserve(16)
    return model


def step(model: Model, ids: np.ndarray) -> np.ndarray:
    """The logits of one sequence, in blocks 0, 1, 2, ..."""
    positions, table = np.arange(len(ids), dtype=np.int32), np.arange(16, dtype=np.int32)[None]
    batch = Batch(np.asarray(ids, np.int32), positions, positions, np.array([0, len(ids)], np.int32), table)
    return model.forward(batch).full(range(len(ids)))


def relative_rms(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["qwen3moe-of-best", "qwen3moe-of-all"])
def test_logits_are_those_of_transformers(name, device):
    golden = np.load(GOLDEN / name / "golden.npz")
    logits = step(load(GOLDEN / name, device), golden["token_ids"])
    assert np.abs(logits - golden["logits"]).max() < 1e-4 * np.abs(golden["logits"]).max()


@pytest.mark.parametrize("quantize", ["ternary", "int8"])
def test_dense_experts_are_rounded_as_by_the_reference(quantize):
    path = GOLDEN / "qwen3moe-of-best"
    found, expected = (step(load(path, device, quantize=quantize), IDS) for device in ("cpu", "reference"))
    assert relative_rms(found, expected) < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_ternary_experts_are_those_of_the_reference(tmp_path, num_tokens):
    path = write_folder(tmp_path / "model")
    ids = np.random.default_rng(2).integers(0, 300, num_tokens)
    found, expected = (step(load(path, device), ids) for device in ("cpu", "reference"))
    # Of many tokens some code flips, and what follows it differs.
    assert relative_rms(found, expected) < (1e-5 if num_tokens < 40 else 3e-2)


def mixture(scores: np.ndarray, used: int, renormalized: bool, threads: int = 2) -> np.ndarray:
    """What experts that multiply 16 columns by 1, 2, 3, ... make of ones, by the executor."""
    count, width = scores.shape[1], 16
    programs = []
    for expert in range(count):
        weight = native.DenseWeight(np.eye(width, dtype=np.float32) * (expert + 1), "float32")
        program = native.Program(0)
        program.dense(weight, (1, 0, width, 0, width), (2, 0, width, 0, width), None)
        programs.append(program)
    whole = native.Program(0)
    x, rows = (1, 0, width + count, 0, width), (1, 0, width + count, width, count)
    whole.mix(programs, x, rows, used, renormalized, (2, 0, width, 0, width))
    given = np.concatenate([np.ones((len(scores), width), np.float32), scores], axis=1)
    output = np.empty((len(scores), width), np.float32)
    native.Executor("generic", threads).run(whole, None, given, output, None, None)
    assert (output == output[:, :1]).all() or not np.isfinite(output).all()
    return output[:, 0]


@pytest.mark.parametrize("renormalized", [True, False])
def test_experts_are_chosen_and_added_up_as_by_the_reference(renormalized):
    random = np.random.default_rng(0)
    scores = random.integers(-3, 4, (50, 12)).astype(np.float32)  # with many that are equal
    for used in (1, 5, 12):
        best, shares = chosen_experts(scores, Experts(count=12, used=used, renormalized=renormalized))
        expected = ((best + 1) * shares).sum(axis=1)
        np.testing.assert_allclose(mixture(scores, used, renormalized), expected, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_no_number_spoils_its_own_token_alone(bad):
    scores = np.zeros((3, 4), np.float32)
    scores[1, 2] = bad
    found = mixture(scores, 4, True)
    assert np.isnan(found).tolist() == [False, True, False]


def test_a_score_of_minus_infinity_is_never_the_best_but_spoils_who_takes_it():
    scores = np.zeros((1, 4), np.float32)
    scores[0, 0] = -np.inf
    assert mixture(scores, 3, True) == pytest.approx(3)  # of 2, 3 and 4
    assert np.isnan(mixture(scores, 4, True)).all()


def simple(width: int = 16, to: int = 16) -> object:
    program = native.Program(0)
    weight = native.DenseWeight(np.zeros((to, width), np.float32), "float32")
    program.dense(weight, (1, 0, width, 0, width), (2, 0, to, 0, to), None)
    return program


@pytest.mark.parametrize(
    ("experts", "used", "message"),
    [
        ([], 1, "1 to 2\\^30 experts"),
        ([simple()], 0, "1 to 256 experts"),
        ([simple()], 2, "1 to 256 experts"),
        ([simple(), simple(32)], 1, "rows of other widths"),
        ([simple(), simple(16, 32)], 1, "rows of other widths"),
        ([simple(), native.Program(0)], 1, "rows of other widths"),
    ],
)
def test_impossible_mixtures_are_refused(experts, used, message):
    x, scores, out = (0, 0, 16, 0, 16), (0, 16, 16, 0, len(experts) or 1), (0, 32, 16, 0, 16)
    with pytest.raises(ValueError, match=message):
        native.Program(48).mix(experts, x, scores, used, True, out)


def test_an_expert_takes_no_more_steps_once_it_is_one():
    expert = simple()
    native.Program(48).mix([expert], (0, 0, 16, 0, 16), (0, 16, 16, 0, 1), 1, True, (0, 32, 16, 0, 16))
    with pytest.raises(ValueError, match="takes no more steps"):
        expert.add((1, 0, 16, 0, 16), (1, 0, 16, 0, 16), (2, 0, 16, 0, 16))


def test_bytes_read_count_the_experts_that_tokens_meet(tmp_path):
    """Of 8 experts, 3 for one token, and as good as all for many."""
    model = load(write_file(tmp_path / "model.gguf"), head="unscreened")
    none, one, many = (model.bytes_read([0] * count) for count in (0, 1, 50))
    size = native.TernaryWeight(256, [256], "u2").num_bytes
    experts = sum(".experts." in name for name in tensors()) * size
    block = model.capabilities.block_bytes // model.capabilities.block_size
    assert one - none == pytest.approx(block + 3 / 8 * experts, rel=0.3)
    assert many - none == pytest.approx(50 * block + experts, rel=0.3)


def test_steps_of_experts_are_timed_by_name(tmp_path):
    model = load(write_file(tmp_path / "model.gguf"))
    times = model.time_steps()
    step(model, IDS)
    verbs = Counter(time.verb for time in times() if time.plan == "body")
    assert verbs["experts ternary"] == 2 * 4 and verbs["experts gate+quantize"] == 4 and verbs["mix"] == 4 * 4

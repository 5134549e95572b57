"""Heads that are rounded to 8 or 6 bits: close to the exact one, the same bits on every path, and refused in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.backends import cpu, load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine import speculative
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.llm import LLM
from bitnet_inference.model.contract import Batch, Draw, best_of
from bitnet_inference.model_folder import find_model
from bitnet_inference.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
Floats = NDArray[np.float32]


def rounded_logits(weights: Floats, x: Floats, bits: int, isa: str, threads: int = 2) -> Floats:
    executor = native.Executor(isa, threads)
    head = native.QuantisedHead(native.DenseWeight(weights, "float32"), bits, executor)
    output = np.full((len(x), len(weights)), np.nan, np.float32)
    head.scores(executor, x, output)
    return output


@pytest.mark.parametrize(("bits", "most"), [(8, 0.012), (6, 0.05)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 15), (300, 100), (70, 2560)])
def test_rounded_logits_are_near_the_exact_ones(rows: int, columns: int, bits: int, most: float) -> None:
    rng = np.random.default_rng(rows)
    weights, x = rng.standard_normal((rows, columns), np.float32), rng.standard_normal((20, columns), np.float32)
    exact = x.astype(np.float64) @ weights.T.astype(np.float64)
    logits = rounded_logits(weights, x, bits, native.isas()[0])
    assert np.sqrt(np.mean((logits - exact) ** 2) / np.mean(exact**2)) < most


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("bits", [8, 6])
def test_rounded_logits_have_the_same_bits_on_every_path(bits: int, isa: str) -> None:
    rng = np.random.default_rng(bits)
    weights, x = rng.standard_normal((130, 90), np.float32), rng.standard_normal((35, 90), np.float32)
    expected = rounded_logits(weights, x, bits, "generic", 1)
    for threads in (1, 3):
        assert rounded_logits(weights, x, bits, isa, threads).tobytes() == expected.tobytes()
    for count in (1, 2, 3, 4, 5, 7, 8, 16, 17):
        assert rounded_logits(weights, x[:count], bits, isa).tobytes() == expected[:count].tobytes()


def test_the_border_of_a_rounded_head() -> None:
    executor, weight = native.Executor("generic", 1), native.DenseWeight(np.zeros((5, 20), np.float32), "float32")
    with pytest.raises(ValueError, match="6 or 8 bits"):
        native.QuantisedHead(weight, 4, executor)
    head = native.QuantisedHead(weight, 8, executor)
    for x, out in (((2, 19), (2, 5)), ((2, 20), (1, 5)), ((2, 20), (2, 4))):
        with pytest.raises(ValueError, match=r"width|out is"):
            head.scores(executor, np.zeros(x, np.float32), np.zeros(out, np.float32))
    wide = native.DenseWeight(np.zeros((1, native.MAX_HEAD_COLUMNS + 1), np.float32), "float32")
    with pytest.raises(ValueError, match="at most 32768 columns"):
        native.Screen(wide, executor)


@pytest.mark.parametrize("head", ["int8", "int6"])
def test_a_model_with_a_rounded_head(head: str) -> None:
    def logits(config: EngineConfig) -> Floats:
        model = load_model(open_checkpoint(find_model("default")), config)
        model.reserve(1)
        at = np.arange(9, dtype=np.int32)
        batch = Batch(at, at, at, np.array([0, 9], np.int32), np.zeros((1, 1), np.int32))
        output = model.forward(batch)
        best, values = output.top([3, 8], 2)
        full = output.full(range(9))
        assert best.tolist() == np.argsort(-full[[3, 8]], axis=1, kind="stable")[:, :2].tolist()
        assert values.tobytes() == np.take_along_axis(full[[3, 8]], best, axis=1).tobytes()
        return full

    exact, rounded = logits(EngineConfig()), logits(EngineConfig(head=head))
    assert 0 < np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2)) < 0.03


def test_the_screen_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    checkpoint = open_checkpoint(find_model("default"))
    screened, whole = (load_model(checkpoint, EngineConfig(head=head)) for head in ("exact", "unscreened"))
    assert screened.capabilities.quick_top > 1 == whole.capabilities.quick_top


KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={5: 2.0, 9: -9.0}),
    SamplingParams(temperature=0.0, min_tokens=9),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9, min_tokens=9),
    SamplingParams(temperature=0.9, top_p=0.95, presence_penalty=0.7, frequency_penalty=0.3),
    SamplingParams(temperature=1.2, top_k=100, min_p=0.01),
    SamplingParams(temperature=0.7, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, grammar=Grammar(regex="[a-e ]{30}")),
    SamplingParams(temperature=0.0, grammar=Grammar(choice=["the red fox", "the red hen"])),
]


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_of_every_kind_get_the_tokens_of_the_whole_head(monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    """Together; and with two tokens drafted for each by a model that knows better than to be wrong."""
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    monkeypatch.setattr(speculative, "MIN_STEP_S", 0.0)
    monkeypatch.setattr(speculative.Speculation, "_best_length", lambda *_: 2)
    prompts = [f"The fox ran to the hen and {number}" for number in range(len(KINDS))]
    # So many tokens that most steps are behind the last prompt, whose steps have no drafts.
    params = [replace(each, seed=seed, max_tokens=48, ignore_eos=True) for seed, each in enumerate(KINDS)]
    checkpoint, tokenizer = open_checkpoint(find_model("default")), Tokenizer.from_folder(find_model("default"))
    texts: list[list[int]] = []
    drawn = Counter[int]()  # draws by the number of their requests' rows

    def counted(hidden: Floats, draws: Sequence[Draw]) -> list[int]:
        drawn.update(Counter(seed for *_, seed, _, _, _ in draws).values())
        return model_sample(hidden, draws)

    for head in ("exact", "unscreened"):
        model = load_model(checkpoint, EngineConfig(head=head))
        model_sample = model.sample
        monkeypatch.setattr(model, "sample", counted)
        drafter = load_model(checkpoint, EngineConfig(head="unscreened")) if drafts else "none"
        with LLM(model, tokenizer, drafts=drafter) as llm:
            texts += [output.token_ids for output in llm.generate(prompts, params)]
    assert texts[: len(KINDS)] == texts[len(KINDS) :]
    assert drawn[3 if drafts else 1] > 9


@pytest.mark.parametrize(
    ("folder", "device", "why"), [("llama-ternary-head", "cpu", "is ternary"), ("bitnet-packed", "reference", "rounds")]
)
def test_a_head_that_cannot_be_rounded_is_refused(folder: str, device: str, why: str) -> None:
    with pytest.raises(InvalidParams, match=why):
        load_model(open_checkpoint(GOLDEN / folder), EngineConfig(head="int8", device=device))
    with pytest.raises(InvalidParams, match="choose one of exact"):
        EngineConfig(head="int4")


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_head_is_refused_where_it_is_rounded(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(GOLDEN / "llama-f16")
    matrix = checkpoint.matrix

    def broken_matrix(name: str) -> Any:
        found = matrix(name)
        if name == "head":
            data = np.array(found.data)
            data[3, 5] = broken
            found = replace(found, data=data)
        return found

    monkeypatch.setattr(checkpoint, "matrix", broken_matrix)
    with pytest.raises(FormatError, match=r"head: a weight is NaN, infinite"):
        load_model(checkpoint, EngineConfig(head="int8"))


def test_the_best_of_logits_tell_what_is_no_number_first() -> None:
    logits = np.array([[1, 3, np.nan, 3, -np.inf]], np.float32)
    for k in (1, 5):
        ids, values = best_of(logits, k)
        assert ids[0].tolist() == [2, 1, 3, 0, 4][:k] and np.isnan(values[0, 0])

"""Ternary matrices with a scale for every 64 or 128 columns of a row: the product, and whole models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from products import Floats, product

from bitnet_inference import native, ternary
from bitnet_inference.backends import load_model, reference
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import FormatError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes
from bitnet_inference.model.contract import Batch, Model
from bitnet_inference.model.loader import fused, record

ISAS = native.isas()
GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = ["bitnet-packed", "llama-rms-norm", "llama-partial", "llama-ternary-head"]
NUM_TOKENS = 70
SHAPES = [(1, 1), (31, 15), (33, 65), (5, 64), (70, 129), (100, 300), (32, 1024)]


def packed(codes: NDArray[np.int8], scales: Floats, group_size: int, layout: str = "codes") -> native.TernaryWeight:
    weight = native.TernaryWeight(codes.shape[1], [len(codes)], "u2", group_size)
    data = codes.view(np.uint8) if layout == "codes" else ternary.pack_quarters(codes)
    weight.pack(0, data, layout, scales)
    return weight


def fused_truth(x: Floats, codes: NDArray[np.int8], scales: Floats, group_size: int) -> Floats:
    """Fused multiply-adds in ascending order: a double holds each product, and its sum is rounded to float32 once."""
    quantised, by = ternary.quantize_rows(x)
    totals = np.zeros((len(x), len(codes)), np.float32)
    for sums, scale in zip(ternary.group_sums(quantised, codes, group_size), scales.T, strict=True):
        totals = (sums * scale.astype(np.float64) + totals).astype(np.float32)
    return totals * np.reciprocal(by)[:, None]


def case(rows: int, columns: int, tokens: int, group_size: int) -> tuple[NDArray[np.int8], Floats, Floats]:
    rng = np.random.default_rng(rows * columns + tokens)
    codes = rng.integers(-1, 2, (rows, columns), np.int8)
    scales = rng.standard_normal((rows, -(-columns // group_size)), np.float32)
    return codes, scales, rng.standard_normal((tokens, columns + rows), np.float32) * 3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_product_is_its_definition_to_the_bit(isa: str, group_size: int, rows: int, columns: int) -> None:
    codes, scales, x = case(rows, columns, 40, group_size)
    weight = packed(codes, scales, group_size)
    expected = fused_truth(x[:, :columns], codes, scales, group_size)
    added = x[:, columns:] + expected
    for tokens in (*range(1, 26), 32, 33, 40):
        assert np.array_equal(product(weight, isa, x[:tokens]), expected[:tokens]), f"{tokens} tokens"
        assert np.array_equal(product(weight, isa, x[:tokens], 2, residual=True), added[:tokens]), f"{tokens} tokens"


@pytest.mark.parametrize("isa", ISAS)
def test_many_tokens(isa: str) -> None:
    """Matrix products take them in blocks."""
    codes, scales, x = case(40, 200, 150, 64)
    expected = fused_truth(x[:, :200], codes, scales, 64)
    assert np.array_equal(product(packed(codes, scales, 64), isa, x, threads=3), expected)


def signs(rows: int, columns: int) -> NDArray[np.int8]:
    return np.random.default_rng(rows).choice(np.array([-1, 1], np.int8), (rows, columns))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (31, 64), (33, 160), (70, 224), (32, 1024)])
def test_weights_of_minus_and_plus_one_take_one_bit(isa: str, group_size: int, rows: int, columns: int) -> None:
    _, scales, x = case(rows, columns, 130, group_size)
    codes = signs(rows, columns)
    weight = packed(codes, scales, group_size)
    assert weight.one_bit and weight.num_bytes == -(-rows // 32) * 32 * (columns // 8 + 4 * -(-columns // group_size))
    expected = fused_truth(x[:, :columns], codes, scales, group_size)
    for tokens in (*range(1, 14), 25, 130):
        assert np.array_equal(product(weight, isa, x[:tokens]), expected[:tokens]), f"{tokens} tokens"


def test_a_zero_or_half_a_line_takes_two_bits() -> None:
    codes, scales = signs(32, 64), np.ones((32, 1), np.float32)
    assert packed(codes, scales, 64).one_bit and not packed(codes[:, :48].copy(), scales, 64).one_bit
    codes[31, 63] = 0
    assert not packed(codes, scales, 64).one_bit


@pytest.mark.parametrize("isa", ISAS)
def test_scales_take_16_bits_where_these_hold_all_of_them(isa: str) -> None:
    codes, _, x = case(70, 300, 130, 64)
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    scales = np.resize(every[np.isfinite(every)][::181], (70, 5)).copy()  # subnormal ones too
    for last, size in (
        (1 + 2.0**-10, 2),
        (1 + 2.0**-11, 4),
        (65504, 2),
        (65536, 4),
        (2.0**-24, 2),
        (1.5 * 2.0**-24, 4),
    ):
        scales[69, 4] = last
        weight = packed(codes, scales, 64)
        assert weight.num_bytes == 96 * (304 // 4 + size * 5)
        expected = fused_truth(x[:, :300], codes, scales, 64)
        for tokens in (1, 9, 130):
            assert np.array_equal(product(weight, isa, x[:tokens]), expected[:tokens])


def test_one_bit_is_packed_anew_and_written_as_two() -> None:
    """Of two stacked matrices the second gets a zero, and loses it again."""
    _, scales, x = case(72, 96, 5, 64)
    codes = signs(72, 96)
    weight = native.TernaryWeight(96, [32, 40], "u2", 64)
    for last in (0, 1, 0):
        codes[71, 95] = last
        for part, rows in enumerate((slice(0, 32), slice(32, 72))):
            weight.pack(part, codes[rows].view(np.uint8), "codes", scales[rows])
        assert weight.one_bit == bool(last)
        assert np.array_equal(product(weight, ISAS[0], x), fused_truth(x[:, :96], codes, scales, 64))
        plain = native.TernaryWeight(96, [32])
        plain.pack(0, codes[:32].view(np.uint8), "codes", 1.0)
        assert np.array_equal(weight.packed()[:1], plain.packed())


@pytest.mark.parametrize("group_size", [64, 128])
def test_the_reference_agrees(group_size: int) -> None:
    codes, scales, x = case(48, 200, 11, group_size)
    x[4] = 0  # a token of zeros gives zeros
    expected = reference.bit_linear(x[:, :200], codes, scales, group_size)
    y = product(packed(codes, scales, group_size), ISAS[0], x)
    assert np.allclose(y, expected, rtol=1e-5, atol=1e-4)
    assert not y[4].any() and not expected[4].any()
    powers = np.exp2(np.rint(scales)).astype(np.float32)  # nothing is rounded before the last product
    exact = reference.bit_linear(x[:, :200], codes, powers, group_size)
    assert np.array_equal(product(packed(codes, powers, group_size), ISAS[0], x), exact)


def test_one_scale_in_all_groups_is_one_scale() -> None:
    codes, _, x = case(33, 300, 5, 64)
    scales = np.full((33, 5), 0.5, np.float32)
    y = product(packed(codes, scales, 64), ISAS[0], x)
    assert np.array_equal(y, reference.bit_linear(x[:, :300], codes, 0.5))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_the_largest_sums(isa: str, tokens: int) -> None:
    codes, scales = np.ones((32, 4096), np.int8), np.ones((32, 32), np.float32)
    y = product(packed(codes, scales, 128), isa, np.full((tokens, 4096), -127, np.float32))
    assert np.allclose(y, -127 * 4096, rtol=1e-6)


def test_quarters_are_packed_the_same_way() -> None:
    codes, scales, x = case(70, 129, 3, 64)
    y = product(packed(codes, scales, 64, "quarters"), ISAS[0], x)
    assert np.array_equal(y, product(packed(codes, scales, 64), ISAS[0], x))


def test_stacked_matrices_keep_their_scales() -> None:
    parts = [case(rows, 100, 3, 64) for rows in (48, 5, 33)]
    x = parts[0][2]
    weight = native.TernaryWeight(100, [48, 5, 33], "u2", 64)
    for i, (codes, scales, _) in enumerate(parts):
        weight.pack(i, codes.view(np.uint8), "codes", scales)
    expected = [fused_truth(x[:, :100], codes, scales, 64) for codes, scales, _ in parts]
    assert np.array_equal(product(weight, ISAS[0], x), np.concatenate(expected, axis=1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [3, 20])
def test_a_row_that_is_not_finite_gives_no_number(isa: str, tokens: int) -> None:
    codes, scales, x = case(8, 100, tokens, 64)
    x[1, 3] = np.inf
    y = product(packed(codes, scales, 64), isa, x)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


class Grouped:
    """A golden checkpoint whose ternary matrices get random scales for groups of columns."""

    def __init__(self, folder: str, group_size: int) -> None:
        self._inner, self._group_size = open_checkpoint(GOLDEN / folder), group_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def group_size(self, name: str) -> int:
        return self._group_size if self._inner.is_ternary(name) else 0

    def matrix(self, name: str) -> Dense | Ternary:
        matrix = self._inner.matrix(name)
        if isinstance(matrix, Dense):
            return matrix
        rng = np.random.default_rng(len(name) + sum(name.encode()))
        scales = rng.uniform(0.5, 1.5, (matrix.shape[0], -(-matrix.shape[1] // self._group_size))) * matrix.scale
        return replace(matrix, scale=scales.astype(np.float32), group_size=self._group_size)


def load(checkpoint: Checkpoint, **options: Any) -> Model:
    model = load_model(checkpoint, EngineConfig(**options))
    model.reserve(16)
    return model


def logits(model: Model, ids: NDArray[np.int32], start: int = 0) -> Floats:
    """One forward of a piece of a sequence."""
    size = model.capabilities.block_size
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    table = np.arange(NUM_TOKENS // size + 1, dtype=np.int32)
    batch = Batch(ids, positions, positions, np.array([0, len(ids)], np.int32), table[None])
    return model.forward(batch).full(range(len(ids)))


@cache
def expected(folder: str, group_size: int) -> tuple[NDArray[np.int32], Floats]:
    checkpoint = Grouped(folder, group_size)
    ids = np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, NUM_TOKENS, np.int32)
    return ids, logits(load(checkpoint, isa="generic", threads=1), ids)


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("isa", ISAS)
def test_models_give_the_same_bits_everywhere(isa: str, folder: str, group_size: int) -> None:
    ids, whole = expected(folder, group_size)
    for threads in (1, 2, 3):
        model = load(Grouped(folder, group_size), isa=isa, threads=threads)
        assert logits(model, ids).tobytes() == whole.tobytes()
    for cuts in ((1, 2, 3), (31, 33, 64), (13, 29, 69)):
        pieces = [logits(model, ids[a:b], a) for a, b in pairwise([0, *cuts, NUM_TOKENS])]
        assert np.concatenate(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("ternary_format", ["t5"])
def test_they_are_u2_in_memory(ternary_format: str) -> None:
    ids, whole = expected("llama-partial", 64)
    model = load(Grouped("llama-partial", 64), ternary_format=ternary_format, threads=1)
    assert logits(model, ids).tobytes() == whole.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_steps_of_a_plan_that_become_two_are_both_timed(threads: int) -> None:
    ids, whole = expected("bitnet-packed", 64)
    model = load(Grouped("bitnet-packed", 64), threads=threads)
    take_times = model.time_steps()
    for _ in range(2):
        assert logits(model, ids).tobytes() == whole.tobytes()
        plan = fused(record(model.config), Grouped("bitnet-packed", 64)).body
        verbs = [verb for step in plan.steps for verb in [step.verb] * (2 if step.parts[0] == "ternary" else 1)]
        verbs.insert(len(verbs) - verbs[::-1].index("attend") - 1, "select")
        times = [time for time in take_times() if time.plan == "body"]
        assert [time.verb for time in times] == verbs and all(time.seconds > 0 for time in times)
        assert take_times() == ()


@pytest.mark.parametrize("folder", FOLDERS)
def test_models_agree_with_the_reference(folder: str) -> None:
    ids, whole = expected(folder, 64)
    found = logits(load(Grouped(folder, 64), device="reference"), ids)
    assert np.sqrt(np.square(found - whole).mean() / np.square(whole).mean()) < 3e-2


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: {"scale": 1.0}, "mixed up"),
        (lambda m: {"group_size": 0}, "mixed up"),
        (lambda m: {"group_size": 32}, "groups of 64 or 128"),
        (lambda m: {"scale": np.ones((2, 1), np.float32)}, r"scales are float32 \[\d+, \d+\], not float32 \[2, 1\]"),
        (lambda m: {"scale": m.scale.astype(np.float64)}, "not float64"),
        (lambda m: {"scale": m.scale * np.nan}, "NaN or infinite"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    device: str, change: Callable[[Ternary], dict[str, Any]], message: str
) -> None:
    class Broken(Grouped):
        def matrix(self, name: str) -> Dense | Ternary:
            matrix = super().matrix(name)
            return replace(matrix, **change(matrix)) if name == "layers.0.k" else matrix

    checkpoint = Broken("bitnet-packed", 64)
    with pytest.raises(FormatError, match=f"layers.0.k: .*{message}"):
        logits(load(checkpoint, device=device, threads=1), np.zeros(3, np.int32))


def test_one_product_has_one_size_of_groups() -> None:
    class Mixed(Grouped):
        def group_size(self, name: str) -> int:
            return 128 if name == "layers.0.k" else super().group_size(name)

    with pytest.raises(FormatError, match=r"layers.0.q layers.0.k layers.0.v: .* differ in size"):
        load(Mixed("bitnet-packed", 64), threads=1)


def test_one_scale_beside_groups_of_the_same_product() -> None:
    """As llama.cpp's TQ2_0 of a model some of whose projections were not ternary before."""

    class Partly(Grouped):
        def group_size(self, name: str) -> int:
            return super().group_size(name) if name.endswith((".k", ".down")) else 0

        def matrix(self, name: str) -> Dense | Ternary:
            return super().matrix(name) if self.group_size(name) else self._inner.matrix(name)

    ids = np.arange(3, 15, dtype=np.int32)
    found = [
        logits(load(Partly("bitnet-packed", 64), device=device, threads=1), ids) for device in ("cpu", "reference")
    ]
    assert np.sqrt(np.square(found[0] - found[1]).mean() / np.square(found[1]).mean()) < 3e-2


def test_files_of_today_have_one_scale() -> None:
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    assert {checkpoint.group_size(name) for name, _ in expected_shapes(checkpoint.config)} == {0}

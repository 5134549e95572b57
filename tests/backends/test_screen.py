"""The certified screen gives the best rows of the exact head, to the bit, whatever the rows and the input are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bitnet_inference import native

Floats = NDArray[np.float32]


def exact_logits(head: native.DenseWeight, executor: native.Executor, x: Floats) -> Floats:
    program = native.Program(16)
    program.dense(head, (1, 0, head.columns, 0, head.columns), (2, 0, head.rows, 0, head.rows), None)
    output = np.empty((len(x), head.rows), np.float32)
    executor.run(program, None, x, output)
    return output


def head_of(weights: NDArray[np.uint16], executor: native.Executor) -> native.DenseWeight:
    """As a backend has it: of codes where it is ternary."""
    head = native.DenseWeight(weights, "bfloat16")
    return head.as_codes(executor) or head


def assert_same(weights: NDArray[np.uint16], x: Floats, k: int, isa: str = native.isas()[0]) -> int:
    executor = native.Executor(isa, 2)
    head = head_of(weights, executor)
    ids, logits, computed = native.Screen(head, executor).top(executor, x, k)
    exact = exact_logits(native.DenseWeight(weights, "bfloat16"), executor, x)
    best = np.argsort(-exact, axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, best)
    assert logits.tobytes() == np.take_along_axis(exact, best, axis=1).tobytes()
    return int(computed)


OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
OFF |= {"frequency_penalty": 0.0, "bias_ids": [], "bias_values": [], "end_ids": []}


NO_TOKENS = np.zeros(0, np.int32)


def by(
    rule: native.SamplingRule,
    seed: int,
    position: int,
    tokens: NDArray[np.int32] = NO_TOKENS,
    mask: NDArray[np.uint32] | None = None,
) -> tuple[Any, ...]:
    """What a draw is given: a third of the tokens are the prompt, and where there are any the end tokens are banned."""
    return rule, tokens, len(tokens) // 3, len(tokens) > 0, seed, 1, position, mask


def share_unsure(
    weights: NDArray[np.uint16],
    x: Floats,
    isa: str = native.isas()[0],
    tokens: NDArray[np.int32] = NO_TOKENS,
    mask: NDArray[np.uint32] | None = None,
    **options: Any,
) -> float:
    """Draws four times from each input, as the sampler does from all logits; the share that the screen cannot tell."""
    executor = native.Executor(isa, 2)
    head = head_of(weights, executor)
    screen, sampler = native.Screen(head, executor), native.RowSampler(head.rows)
    exact = exact_logits(native.DenseWeight(weights, "bfloat16"), executor, x)
    rule = native.SamplingRule(head.rows, **(OFF | options))
    told = []
    for seed in range(4):
        draws = [by(rule, seed, position, tokens, mask) for position in range(len(x))]
        for drawn, (_, *rest), row in zip(screen.sample(executor, x, draws), draws, exact, strict=True):
            told.append(drawn != native.UNDECIDED)
            assert not told[-1] or drawn == sampler.sample(row, rule, *rest)
    return 1 - sum(told) / len(told)


def bfloat16(x: Floats) -> NDArray[np.uint16]:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("isa", native.isas())
def test_random_rows(isa: str) -> None:
    rng = np.random.default_rng(0)
    weights = bfloat16(rng.standard_normal((3001, 100), np.float32))
    for num_inputs in (1, 2, 3, 4, 5, 9):
        x = rng.standard_normal((num_inputs, 100)).astype(np.float32)
        assert assert_same(weights, x, 3, isa) < 1000 * num_inputs


@pytest.mark.parametrize("isa", native.isas())
def test_many_inputs_of_a_small_head_each_thread_some_of_its_own(isa: str) -> None:
    rng = np.random.default_rng(7)
    weights = bfloat16(rng.standard_normal((1500, 64), np.float32))
    for num_inputs in (16, 40):
        x = rng.standard_normal((num_inputs, 64)).astype(np.float32)
        assert_same(weights, x, 2, isa)
        tokens = np.arange(40, dtype=np.int32)
        assert share_unsure(weights, x, isa, tokens, temperature=0.3, repetition_penalty=1.3, top_p=0.9) < 0.5


def test_no_inputs_have_no_best() -> None:
    executor = native.Executor(native.isas()[0], 2)
    screen = native.Screen(native.DenseWeight(np.ones((30, 16), np.uint16), "bfloat16"), executor)
    nothing = np.zeros((0, 16), np.float32)
    assert screen.top(executor, nothing, 2)[0].shape == (0, 2) and screen.sample(executor, nothing, []) == []


def test_a_clear_winner_costs_little() -> None:
    rng = np.random.default_rng(1)
    weights = rng.standard_normal((20000, 256), np.float32)
    x = weights[7:8] + rng.standard_normal((1, 256)).astype(np.float32) * 0.5
    assert assert_same(bfloat16(weights), x, 1) < 20


def ternary(rng: np.random.Generator, shape: tuple[int, int], group: int, lowest: int) -> NDArray[np.uint16]:
    """Random codes, times a scale for each `group` columns of a row."""
    scales = np.repeat(rng.uniform(0.5, 1.5, (shape[0], -(-shape[1] // group))), group, axis=1)[:, : shape[1]]
    codes = rng.choice([-1, 0, 1] if lowest == 0 else [-1, 1], shape)
    return bfloat16((scales * codes).astype(np.float32))


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("lowest", [0, 1], ids=["with zeros", "one bit"])
@pytest.mark.parametrize("group, columns", [(128, 288), (64, 224), (1000, 100)])
def test_heads_that_are_ternary_themselves(isa: str, group: int, columns: int, lowest: int) -> None:
    """They are scored by their own codes, from one bit a weight, so that few rows are left."""
    rng = np.random.default_rng(11)
    weights = ternary(rng, (3001, columns), group, lowest)
    weights[rng.integers(0, 3001, 300)] = weights[rng.integers(0, 3001, 300)]  # ties
    weights[5, :group] = 0
    executor = native.Executor(isa, 2)
    head = head_of(weights, executor)
    assert head.has_codes and native.Screen(head, executor).num_bytes == 0
    assert head.num_bytes < 3001 * columns * (0.25 if lowest == 0 or columns % 32 else 0.125) * 1.3 + 2**15
    for num_inputs in (1, 2, 5, 9, 17):
        x = rng.standard_normal((num_inputs, columns)).astype(np.float32)
        assert assert_same(weights, x, 3, isa) < 100 * num_inputs
        exact = exact_logits(native.DenseWeight(weights, "bfloat16"), executor, x)
        assert exact_logits(head, executor, x).tobytes() == exact.tobytes()
        share_unsure(weights, x, isa, temperature=0.7, top_p=0.9)
    assert share_unsure(weights, x[:3] * 3, isa, top_p=0.95) == 0


@pytest.mark.parametrize("isa", native.isas())
def test_draws_from_ternary_heads_are_told_by_all_of_an_input(isa: str) -> None:
    """Where half of its codes leave the masses of flat logits open: with these alone 0.385 were not told."""
    rng = np.random.default_rng(14)
    weights = ternary(rng, (20000, 512), 128, 1)
    inputs = [rng.standard_normal((6, 512)).astype(np.float32) for _ in range(4)]
    assert np.mean([share_unsure(weights, x, isa, temperature=14.0, top_p=0.8) for x in inputs]) < 0.3


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("layout", ["codes", "signs"])
def test_heads_that_are_given_as_codes(isa: str, layout: str) -> None:
    rng, executor = np.random.default_rng(13), native.Executor(isa, 2)
    codes = rng.choice([-1, 0, 1] if layout == "codes" else [-1, 1], (9001, 288)).astype(np.int8)
    scales = bfloat16(rng.standard_normal((9001, 3)).astype(np.float32))
    scales[::7, 1] = 0
    floats = (scales.astype(np.uint32) << 16).view(np.float32)
    data = codes.view(np.uint8) if layout == "codes" else np.packbits(codes > 0, axis=1, bitorder="little")
    head = native.DenseWeight.of_codes(data, layout, floats, 288, 128)
    weights = codes * np.repeat(floats, 128, axis=1)[:, :288]
    x = rng.standard_normal((5, 288)).astype(np.float32)
    exact = exact_logits(native.DenseWeight(weights, "float32"), executor, x)
    assert np.array_equal(exact_logits(head, executor, x), exact)
    ids, logits, computed = native.Screen(head, executor).top(executor, x, 1)
    assert np.array_equal(ids[:, 0], exact.argmax(axis=1)) and np.array_equal(logits[:, 0], exact.max(axis=1))
    assert computed < 1000


def test_codes_of_another_shape_are_refused() -> None:
    data, scales = np.zeros((5, 288), np.uint8), np.ones((5, 3), np.float32)
    for wrong in (
        (data[:, :287], "codes", scales, 288, 128),
        (data, "signs", scales, 288, 128),
        (data, "quarters", scales, 288, 128),
        (data, "codes", scales[:, :2], 288, 128),
        (data, "codes", scales[:4], 288, 128),
        (data, "codes", scales, 288, 96),
        (data, "codes", scales * np.float32(np.nan), 288, 128),
        (data, "codes", scales * np.float32(1e-35), 288, 128),
        (data + np.uint8(2), "codes", scales, 288, 128),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            native.DenseWeight.of_codes(
                np.ascontiguousarray(wrong[0]), wrong[1], np.ascontiguousarray(wrong[2]), *wrong[3:]
            )


@pytest.mark.parametrize("column", [0, 130, 287])
def test_heads_that_are_ternary_but_for_one_weight(column: int) -> None:
    rng, executor = np.random.default_rng(12), native.Executor("generic", 2)
    weights = ternary(rng, (3001, 288), 128, 0)
    for bits in (0x4040, 0x7F80, 0x7FC0, 0x0001):  # 3, infinite, no number, and next to nothing
        weights[2777, column] = bits
        assert not head_of(weights, executor).has_codes


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.3},
    {"top_k": 20, "top_p": 0.8},
    {"min_p": 0.05},
    {"top_p": 0.99, "min_p": 0.01},
    {"top_p": 0.0},
]


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_from_random_rows(isa: str, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((3001, 100), np.float32) * np.float32(0.3)
    for num_inputs in (1, 5, 19):
        share_unsure(bfloat16(weights), rng.standard_normal((num_inputs, 100)).astype(np.float32), isa, **options)


def test_draws_from_rows_of_which_few_stand_out_are_told() -> None:
    rng = np.random.default_rng(6)
    weights = rng.standard_normal((20000, 256), np.float32) * np.float32(0.15)
    x = (weights[7:8] * 6 + rng.standard_normal((3, 256))).astype(np.float32)
    for options in OPTIONS:
        assert share_unsure(bfloat16(weights), x, **options) == 0


@pytest.mark.parametrize("share", [1.0, 0.5, 0.01, 0.0])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_draws_by_edited_logits(options: dict[str, Any], share: float) -> None:
    """The likeliest tokens are banned, penalized, masked or far below what a bias makes of others."""
    rng = np.random.default_rng(9)
    weights = rng.standard_normal((9000, 100), np.float32) * np.float32(0.3)
    x = rng.standard_normal((2, 100)).astype(np.float32)
    order = np.argsort(-(weights @ x[0]))
    bits = np.packbits(rng.random(9000) < share, bitorder="little")
    mask = np.full(-(-9000 // 32), 0xFFFFFFFF, np.uint32)  # bits behind the vocabulary mean nothing
    mask.view(np.uint8)[: len(bits)] = bits
    edits: dict[str, Any] = {"bias_ids": [int(order[-1]), 5], "bias_values": [9.0, -2.0], "end_ids": [int(order[0])]}
    edits |= {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    tokens = np.concatenate([order[:30], order[:9], order[50:60]]).astype(np.int32)
    for mask_or_none in (mask, None):
        assert share_unsure(bfloat16(weights), x, tokens=tokens, mask=mask_or_none, **(options | edits)) < 0.5


def test_draws_from_flat_rows_are_told_without_top_p() -> None:
    """Without it no mass is asked for; with it, and a mass that many tokens share, it takes all of them."""
    rng = np.random.default_rng(7)
    weights = bfloat16(rng.standard_normal((20000, 512), np.float32) * np.float32(0.1))
    x = rng.standard_normal((2, 512)).astype(np.float32)
    assert share_unsure(weights, x) == share_unsure(weights, x, temperature=20.0) == 0
    assert share_unsure(weights, x, temperature=20.0, top_p=0.7) > 0


def test_a_screen_that_seldom_tells_is_left_out_but_for_trials() -> None:
    rng = np.random.default_rng(8)
    weights = bfloat16(rng.standard_normal((20000, 512), np.float32) * np.float32(0.05))
    x = rng.standard_normal((8, 512)).astype(np.float32)
    head, executor = native.DenseWeight(weights, "bfloat16"), native.Executor(native.isas()[0], 2)
    screen = native.Screen(head, executor)
    flat, clear = (native.SamplingRule(20000, **(OFF | {"temperature": 20.0, "top_p": p})) for p in (0.7, 1.0))

    def told(rule: native.SamplingRule, num_turns: int) -> list[bool]:
        keys = [[by(rule, turn, row) for row in range(8)] for turn in range(num_turns)]
        return [screen.sample(executor, x, each)[0] != native.UNDECIDED for each in keys]

    told(flat, 100)
    after = told(clear, 200)
    assert not all(after[:8]) and all(after[-50:])


@pytest.mark.parametrize("isa", native.isas())
def test_draws_from_rows_whose_roundings_all_add_up(isa: str) -> None:
    """Logits that reach their upper ends: what is lost of a weight points where the input does, in half of the rows."""
    rng = np.random.default_rng(10)
    weights = rng.integers(-3, 4, (6000, 60)) + rng.choice([0.0, 0.49], (6000, 1)) * (signs := rng.choice([-1, 1], 60))
    x = np.broadcast_to(signs.astype(np.float32), (6, 60)).copy()
    weights[:, 0], x[:, 0] = 127, 0  # a step is 1, and the input is what its codes say
    rules: list[dict[str, Any]] = [{"top_k": 50}, {"top_p": 0.95}, {"top_p": 0.5, "min_p": 0.01}]
    for options in rules:
        for temperature in (2.0, 8.0):
            for count in (1, 6):
                assert share_unsure(bfloat16(weights), x[:count], isa, temperature=temperature, **options) < 1


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    inputs=st.sampled_from([2, 6, 9, 17]),  # few are scored another way than several, and so many in parts
    rows=st.integers(1, 200),
    columns=st.integers(1, 80),
    row_scale=st.sampled_from([0, 1e-38, 1e-6, 1, 1e6, 1e10]),
    x_scale=st.sampled_from([0, 1e-38, 1e-20, 1, 1e15]),
    kind=st.sampled_from(["random", "ties", "near ties", "outliers", "mixed norms", "orthogonal", "ternary"]),
)
def test_rows_that_are_made_to_break_it(
    seed: int, inputs: int, rows: int, columns: int, row_scale: float, x_scale: float, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    weights, x = rng.standard_normal((rows, columns)), rng.standard_normal((inputs, columns))
    if kind == "ties":
        weights = weights[rng.integers(0, max(1, rows // 10), rows)]
    if kind == "near ties":
        weights = weights[:1] * (1 + rng.integers(-2, 3, (rows, columns)) * 2.0**-8)
    if kind == "outliers":  # one huge weight takes all the resolution from the others of its row
        weights[np.arange(rows), rng.integers(0, columns, rows)] *= 1e4
        x[0, rng.integers(0, columns)] *= 1e4
    if kind == "mixed norms":
        weights *= 10.0 ** rng.integers(-8, 9, (rows, 1))
    if kind == "orthogonal":
        weights -= np.outer(weights @ x[0], x[0]) / (x[0] @ x[0])
    if kind == "ternary":
        weights = np.sign(weights) * rng.choice([1, 1 + 2.0**-7], (rows, 1)) * rng.choice([0, 1, 1], (rows, columns))
    weights_16 = bfloat16((weights * row_scale).astype(np.float32))
    x_32 = (x * x_scale).astype(np.float32)
    assert_same(weights_16, x_32, int(rng.integers(1, rows + 1)))
    options = OPTIONS[rng.integers(len(OPTIONS))] | {"top_k": int(rng.choice([0, 1, min(rows, 9), rows + 1]))}
    share_unsure(weights_16, x_32, **options)
    bias = {
        int(token): float(value) for token, value in zip(rng.integers(0, rows, 3), rng.normal(0, 3, 3), strict=True)
    }
    edits: dict[str, Any] = {
        "bias_ids": list(bias),
        "bias_values": list(bias.values()),
        "end_ids": [int(rng.integers(rows))],
    }
    edits |= {"repetition_penalty": rng.choice([1.0, 1.5]), "frequency_penalty": rng.choice([0.0, 1.0])}
    mask = rng.integers(0, 2**32, -(-rows // 32), np.uint32) & rng.integers(0, 2**32, -(-rows // 32), np.uint32)
    share_unsure(weights_16, x_32, tokens=rng.integers(0, rows, 20).astype(np.int32), mask=mask, **(options | edits))


@pytest.mark.parametrize("is_ternary", [False, True])
@pytest.mark.parametrize("inputs", [1, 6])
def test_inputs_that_differ_in_the_bits_that_come_last(inputs: int, is_ternary: bool) -> None:
    """Weights are what their codes say; the first element of an input sets the scale, and the others round apart."""
    rng = np.random.default_rng(4)
    for _ in range(10):
        weights = rng.integers(-1, 2, (150, 60)).astype(np.float32)
        x = np.where(rng.integers(0, 2, (inputs, 60)), np.float32(0.49), np.float32(0.51))
        weights[:, 0], x[:, 0] = 0, 127
        if not is_ternary:
            weights[0, 1:3] = 1, 2
        assert_same(bfloat16(weights), x, 3)


@pytest.mark.parametrize("inputs", [1, 6])
@pytest.mark.parametrize("value", [np.inf, -np.inf, 3.0e38])
def test_a_huge_weight_or_input(value: float, inputs: int) -> None:
    weights = np.random.default_rng(2).standard_normal((50, 20), np.float32)
    weights[3, 4] = value
    x = np.full((inputs, 20), 0.5, np.float32)
    assert_same(bfloat16(weights), x, 2)
    share_unsure(bfloat16(weights), x, top_p=0.9)


@pytest.mark.parametrize("inputs", [1, 6])
def test_what_is_not_a_number_is_seen(inputs: int) -> None:
    rng = np.random.default_rng(3)
    weights, x = rng.standard_normal((50, 20), np.float32), rng.standard_normal((inputs, 20)).astype(np.float32)
    weights[9, 0] = np.nan
    head, executor = native.DenseWeight(bfloat16(weights), "bfloat16"), native.Executor(native.isas()[0], 1)
    ids, logits, _ = native.Screen(head, executor).top(executor, x, 2)
    assert ids[0, 0] == 9 and np.isnan(logits[0, 0])
    share_unsure(bfloat16(weights), x, top_p=0.9)
    x[0, 5] = np.nan
    share_unsure(bfloat16(weights), x)
    assert np.isnan(native.Screen(head, executor).top(executor, x, 1)[1][0]).all()


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("inputs", [1, 6])
def test_false_bounds_of_a_file_still_give_rows(inputs: int, isa: str) -> None:
    rng = np.random.default_rng(4)
    weights, x = rng.standard_normal((300, 40)), rng.standard_normal((inputs, 40)).astype(np.float32)
    head, executor = native.DenseWeight(bfloat16(weights), "bfloat16"), native.Executor(isa, 2)
    high, low, numbers = native.Screen(head, executor).parts()
    low = rng.integers(0, 256, low.shape, np.uint8)
    numbers[1:] = 0  # as if no row were off: what 6 bits promise, 8 do not keep
    ids, logits, _ = native.Screen(head, high, low, numbers, executor).top(executor, x, 3)
    exact = exact_logits(head, executor, x)
    assert logits.tobytes() == np.take_along_axis(exact, ids, axis=1).tobytes()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    rules = [native.SamplingRule(300, **(OFF | options)) for options in OPTIONS]
    for rule in rules:
        screen = native.Screen(head, high, low, numbers, executor)
        assert all(-3 <= token < 300 for token in screen.sample(executor, x, [by(rule, 0, 0)] * inputs))


def test_impossible_questions_are_refused() -> None:
    head, executor = native.DenseWeight(np.zeros((5, 20), np.uint16), "bfloat16"), native.Executor("generic", 1)
    screen = native.Screen(head, executor)
    for k in (0, 6):
        with pytest.raises(ValueError, match="k lies outside"):
            screen.top(executor, np.zeros((1, 20), np.float32), k)
    with pytest.raises(ValueError, match="width"):
        screen.top(executor, np.zeros((1, 21), np.float32), 1)
    rule, other = native.SamplingRule(5, **OFF), native.SamplingRule(6, **OFF)
    for columns, draws in (
        (21, [by(rule, 0, 0)]),
        (20, []),
        (20, [by(other, 0, 0)]),
        (20, [(None, *by(rule, 0, 0)[1:])]),
        (20, [by(rule, 0, 0, np.array([5], np.int32))]),
        (20, [by(rule, 0, 0, mask=np.zeros(2, np.uint32))]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            screen.sample(executor, np.zeros((1, columns), np.float32), draws)

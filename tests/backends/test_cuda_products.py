"""Products on CUDA against the reference, in Triton's interpreter where there is no device."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
import triton
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.backends import cuda_dense, cuda_self_check, reference
from bitnet_inference.backends import cuda_products as products
from bitnet_inference.errors import KernelError, Unsupported
from bitnet_inference.formats.checkpoint import Dense, Ternary

DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
# Columns, rows, tokens: whole and broken tiles, every shape of program.
SHAPES = [(256, 16, 1), (300, 37, 2), (64, 1, 8), (1280, 33, 9), (1000, 40, 17), (128, 130, 33), (517, 70, 65),
          (300, 140, 130)]  # fmt: skip
Floats = NDArray[np.float32]


def numbers(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def activations(tokens: int, columns: int) -> Floats:
    x = numbers(1, tokens, columns)
    x[-1] = 0  # a row of zeros has the largest s_x
    x[0] *= 1e6
    return x


def codes(rows: int, columns: int, seed: int = 2) -> NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-1, 2, (rows, columns)).astype(np.int8)


def plain(values: NDArray[np.int8], scale: float | Floats = 0.7, group_size: int = 0) -> Ternary:
    return Ternary(values, "codes", (len(values), values.shape[1]), scale, group_size)


def integer_product(product: object, weight: object, x: Floats, residual: Floats | None = None) -> Floats:
    """`out` and the residual are columns of wider buffers, and what lies beside `out` stays as it is."""
    quantised, scales = (torch.from_numpy(each).to(DEVICE) for each in ternary.quantize_rows(x))
    room = torch.full((len(x), weight.rows + 12), 7.0, device=DEVICE)
    out = room[:, 8:-4]
    other = None
    if residual is not None:
        other = torch.zeros((len(x), weight.rows + 3), device=DEVICE)[:, : weight.rows]
        other.copy_(torch.from_numpy(residual))
    product(weight, quantised, scales, out, other)
    assert (room[:, :8] == 7).all() and (room[:, -4:] == 7).all()
    return out.cpu().numpy()


@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES)
def test_ternary_is_the_reference_bit_by_bit(columns: int, rows: int, tokens: int) -> None:
    x, values = activations(tokens, columns), codes(rows, columns)
    weight = products.TernaryWeight([plain(values)], DEVICE)
    expected = reference.bit_linear(x, values, 0.7)
    residual = numbers(3, tokens, rows)
    assert np.array_equal(integer_product(products.ternary, weight, x), expected)
    assert np.array_equal(integer_product(products.ternary, weight, x, residual), expected + residual)


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES[:-1])
def test_group_scales_are_added_in_the_reference_s_order(columns: int, rows: int, tokens: int, group_size: int) -> None:
    x, values = activations(tokens, columns), codes(rows, columns)
    scales = numbers(4, rows, -(-columns // group_size))
    weight = products.TernaryWeight([plain(values, scales, group_size)], DEVICE)
    expected = reference.bit_linear(x, values, scales, group_size)
    residual = numbers(3, tokens, rows)
    assert np.array_equal(integer_product(products.ternary, weight, x), expected)
    assert np.array_equal(integer_product(products.ternary, weight, x, residual), expected + residual)


@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES)
def test_int8_is_the_reference_bit_by_bit(columns: int, rows: int, tokens: int) -> None:
    x, values = activations(tokens, columns), numbers(5, rows, columns)
    values[0] = 0
    weight = products.Int8Weight([Dense(values, "float32")], DEVICE)
    expected = reference.int8_linear(x, reference.Int8(*ternary.quantize_weights(values)))
    residual = numbers(3, tokens, rows)
    assert np.array_equal(integer_product(products.int8, weight, x), expected)
    assert np.array_equal(integer_product(products.int8, weight, x, residual), expected + residual)


def test_the_residual_may_be_the_output() -> None:
    x, values = activations(3, 256), codes(48, 256)
    weight = products.TernaryWeight([plain(values)], DEVICE)
    quantised, scales = (torch.from_numpy(each).to(DEVICE) for each in ternary.quantize_rows(x))
    residual = numbers(3, 3, 48)
    out = torch.from_numpy(residual.copy()).to(DEVICE)
    products.ternary(weight, quantised, scales, out, out)
    assert np.array_equal(out.cpu().numpy(), reference.bit_linear(x, values, 0.7) + residual)


def test_stacked_matrices_keep_their_scales() -> None:
    x, parts = activations(5, 320), [codes(rows, 320, rows) for rows in (40, 9, 31)]
    scales = (0.3, 1.7, 2.0**-120)
    weight = products.TernaryWeight([plain(*pair) for pair in zip(parts, scales, strict=True)], DEVICE)
    expected = [reference.bit_linear(x, *pair) for pair in zip(parts, scales, strict=True)]
    assert np.array_equal(integer_product(products.ternary, weight, x), np.concatenate(expected, axis=1))


def test_stacked_group_scales_stand_beside_single_ones() -> None:
    x, first, second = activations(5, 320), codes(40, 320), codes(9, 320, 3)
    scales = numbers(6, 40, 3)
    weight = products.TernaryWeight([plain(first, scales, 128), plain(second, 0.3)], DEVICE)
    single = np.full((9, 3), 0.3, np.float32)
    expected = [reference.bit_linear(x, first, scales, 128), reference.bit_linear(x, second, single, 128)]
    assert np.array_equal(integer_product(products.ternary, weight, x), np.concatenate(expected, axis=1))


@pytest.mark.parametrize("layout", ["codes", "quarters", "u2", "t5"])
def test_every_layout_gives_the_same_weight(layout: str) -> None:
    values = codes(70, 300)
    pack = {"quarters": ternary.pack_quarters, "u2": ternary.pack_u2, "t5": ternary.pack_t5}.get(layout, np.copy)
    weight = products.TernaryWeight([Ternary(pack(values), layout, values.shape, 0.7)], DEVICE)
    assert torch.equal(weight.tiles, products.TernaryWeight([plain(values)], DEVICE).tiles)


def test_bytes_that_are_no_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="2-bit code 3"):
        products.TernaryWeight([Ternary(np.full((4, 16), 255, np.uint8), "quarters", (16, 16), 1.0)], DEVICE)
    with pytest.raises(ValueError, match="none of -1, 0 and 1"):
        products.TernaryWeight([plain(np.full((16, 16), 2, np.int8))], DEVICE)
    with pytest.raises(ValueError, match="NaN"):
        products.Int8Weight([Dense(np.full((2, 4), np.nan, np.float32), "float32")], DEVICE)


def test_sums_that_int32_does_not_hold_are_refused() -> None:
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (1, 1 << 18 | 5000), (0, 0))
    with pytest.raises(Unsupported, match="at most 264"):
        products.TernaryWeight([plain(wide)], DEVICE)


def test_the_largest_sums_are_exact() -> None:
    x, values = np.ones((2, 2048), np.float32), np.ones((3, 2048), np.int8)
    values[1] = -1
    weight = products.TernaryWeight([plain(values, 1.0)], DEVICE)
    assert np.array_equal(integer_product(products.ternary, weight, x), reference.bit_linear(x, values, 1.0))


def dense_of(values: Floats, dtype: str) -> Dense:
    if dtype == "bfloat16":
        return Dense((reference.to_bfloat16(values).view(np.uint32) >> 16).astype(np.uint16), dtype)
    return Dense(values.astype(dtype), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("columns", "rows", "tokens"), SHAPES)
def test_dense_products_are_close(columns: int, rows: int, tokens: int, dtype: str) -> None:
    matrix = dense_of(numbers(7, rows, columns), dtype)
    weight = products.DenseWeight([matrix], DEVICE)
    x, residual = numbers(8, tokens, columns), numbers(9, tokens, rows)
    room = torch.full((tokens, rows + 5), 7.0, device=DEVICE)
    out = room[:, 1:-4]
    out.copy_(torch.from_numpy(residual))
    products.dense(weight, torch.from_numpy(x).to(DEVICE), out, out)
    exact = x.astype(np.float64) @ reference.dense_matrix(matrix).T.astype(np.float64)
    error = out.cpu().numpy() - (exact + residual)
    assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) < 1e-4
    assert (room[:, :1] == 7).all() and (room[:, -4:] == 7).all()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter adds in NumPy's order")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dense_row_does_not_depend_on_the_others(dtype: str) -> None:
    weight = products.DenseWeight([dense_of(numbers(7, 100, 150), dtype)], DEVICE)
    x = torch.from_numpy(numbers(8, 130, 150)).to(DEVICE)
    whole = torch.zeros((130, 100), device=DEVICE)
    products.dense(weight, x, whole, None)
    for tokens in (1, 8, 9, 33, 65):
        part = torch.zeros((tokens, 100), device=DEVICE)
        products.dense(weight, x[:tokens], part, None)
        assert torch.equal(part, whole[:tokens]), tokens


def test_embeddings_are_the_rows_of_the_table() -> None:
    for dtype in ("bfloat16", "float16", "float32"):
        tables = [dense_of(numbers(7 + part, 30, 1100), dtype) for part in range(2)]
        weight = products.DenseWeight(tables, DEVICE)
        ids = np.array([59, 0, 30, 30, 29], np.int32)
        out = torch.zeros((5, 1104), device=DEVICE)
        products.embed(weight, torch.from_numpy(ids).to(DEVICE), out[:, 2:-2], 1.5)
        expected = np.concatenate([reference.dense_matrix(table) for table in tables])[ids] * np.float32(1.5)
        assert np.array_equal(out[:, 2:-2].cpu().numpy(), expected)


def test_dense_matrices_of_two_kinds_become_float32() -> None:
    tables = [dense_of(numbers(7, 3, 20), "bfloat16"), dense_of(numbers(8, 2, 20), "float32")]
    weight = products.DenseWeight(tables, DEVICE)
    expected = np.concatenate([reference.dense_matrix(table) for table in tables])
    assert np.array_equal(weight.data.cpu().numpy(), expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device has these tiles or doesn't")
@pytest.mark.parametrize("tokens", [5, 12, 150])
def test_the_tiles_of_large_matrices_give_the_same(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_ENOUGH_PROGRAMS", 1)
    x, values, residual = activations(tokens, 500), codes(280, 500), numbers(3, tokens, 280)
    weight = products.TernaryWeight([plain(values)], DEVICE)
    weight.is_hopper = True
    expected = reference.bit_linear(x, values, 0.7) + residual
    assert np.array_equal(integer_product(products.ternary, weight, x, residual), expected)


@pytest.mark.parametrize("module", [products, cuda_dense])
def test_variants_say_all_that_a_kernel_takes(module: ModuleType) -> None:
    variants = list(module.variants())
    assert variants
    for variant in variants:
        names = [name for name in variant.kernel.arg_names if name != "EARLY"]
        assert sorted([*variant.signature, *variant.constants]) == sorted(names)


def test_nothing_is_launched_for_no_tokens() -> None:
    weight = products.TernaryWeight([plain(codes(16, 256))], DEVICE)
    empty = torch.zeros((0, 256), dtype=torch.int8, device=DEVICE)
    products.ternary(weight, empty, torch.zeros(0, device=DEVICE), torch.zeros((0, 16), device=DEVICE), None)


def test_weights_know_their_size() -> None:
    weight = products.TernaryWeight([plain(codes(37, 300))], DEVICE)
    assert (weight.rows, weight.columns) == (37, 300)
    assert weight.num_bytes == 48 * 512 // 4 + 37 * 4
    table = products.DenseWeight([dense_of(numbers(1, 5, 9), "bfloat16")], DEVICE)
    assert (table.rows, table.columns, table.num_bytes) == (5, 9, 5 * 16 * 2)
    rounded = products.Int8Weight([dense_of(numbers(1, 5, 9), "bfloat16")], DEVICE)
    assert (rounded.rows, rounded.columns, rounded.num_bytes) == (5, 9, 16 * 256 + 5 * 4)


@pytest.mark.parametrize(("name", "words"), [("ternary", "wrong products"), ("dense", "wrong dense products")])
def test_a_device_with_wrong_products_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str, words: str) -> None:
    cuda_self_check.check_products(DEVICE)
    right = getattr(cuda_self_check, name)

    def wrong(weight, *arguments):
        right(weight, *arguments)
        arguments[-2][-1, -1] *= -1

    monkeypatch.setattr(cuda_self_check, name, wrong)
    with pytest.raises(KernelError, match=f"computes {words} of 1 tokens"):
        cuda_self_check.check_products(DEVICE)

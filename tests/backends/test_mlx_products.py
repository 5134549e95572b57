"""Products of MLX on its processor: those of codes to the bit, and matrices that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.backends import mlx_weights, reference
from bitnet_inference.backends.mlx_weights import MAX_COLUMNS, WeightReader, products
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Dense, Ternary
from bitnet_inference.formats.floats import to_bfloat16

SHAPES = [(1, 1), (33, 15), (70, 129), (16, 2560), (5, 6912)]
Floats = NDArray[np.float32]


class Matrices:
    """As much of a checkpoint as the reader asks for."""

    path = Path("somewhere")

    def __init__(self, **matrices: Dense | Ternary) -> None:
        self._matrices, self.released = matrices, []

    def matrix(self, name: str) -> Dense | Ternary:
        return self._matrices[name]

    def release(self, name: str) -> None:
        self.released.append(name)


def read(quantize: str = "none", **matrices: Dense | Ternary) -> mlx_weights.Stack:
    checkpoint: Any = Matrices(**matrices)
    stack = WeightReader(checkpoint, quantize).read(list(matrices))
    assert checkpoint.released == list(matrices)
    return stack


def random_codes(rows: int, columns: int) -> NDArray[np.int8]:
    return np.random.default_rng(rows).integers(-1, 2, (rows, columns), np.int8)


def rows_of(count: int, columns: int) -> Floats:
    return np.random.default_rng(count).standard_normal((count, columns), np.float32)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_ternary_products_are_the_specification_to_the_bit(rows: int, columns: int) -> None:
    codes, more = random_codes(rows, columns), random_codes(rows + 3, columns)
    stack = read(q=Ternary(codes, "codes", codes.shape, 0.37), k=Ternary(ternary.pack_u2(more), "u2", more.shape, 1.9))
    assert len(stack) == 1  # one product for both
    for count in (1, 2, 5, 33):
        x = rows_of(count, columns)
        found = [np.array(y) for y in products(mx.array(x), stack, None)]
        assert found[0].tobytes() == reference.bit_linear(x, codes, 0.37).tobytes()
        assert found[1].tobytes() == reference.bit_linear(x, more, 1.9).tobytes()


def test_the_largest_sum_is_exact_and_a_larger_one_is_refused() -> None:
    for columns in (MAX_COLUMNS, MAX_COLUMNS + 1):
        codes = np.ones((2, columns), np.int8)
        codes[1, ::2] = 0
        matrix = Ternary(codes, "codes", codes.shape, 1.0)
        if columns > MAX_COLUMNS:
            with pytest.raises(Unsupported, match=r'down has 132105 columns, .* choose "cpu"'):
                read(down=matrix)
            continue
        x = np.ones((1, columns), np.float32)
        x[0, 1] = -1 / 127
        (y,) = products(mx.array(x), read(down=matrix), None)
        assert np.array(y).tobytes() == reference.bit_linear(x, codes, 1.0).tobytes()


@pytest.mark.parametrize("group_size", [64, 128])
def test_groups_of_columns_have_their_scales(group_size: int) -> None:
    codes, x = random_codes(37, 300), rows_of(7, 300)
    scales = np.random.default_rng(1).random((37, -(-300 // group_size)), np.float32)
    (y,) = products(mx.array(x), read(o=Ternary(codes, "codes", codes.shape, scales, group_size)), None)
    expected = reference.bit_linear(x, codes, scales, group_size)
    assert np.abs(np.array(y) - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_stack_may_mix_what_it_is_made_of() -> None:
    codes, x = random_codes(8, 64), rows_of(3, 64)
    scales = np.full((8, 1), 0.5, np.float32)
    dense = Dense(rows_of(8, 64), "float32")
    stack = read(
        q=Ternary(codes, "codes", codes.shape, 0.5), k=Ternary(codes, "codes", codes.shape, scales, 64), v=dense
    )
    q, k, v = (np.array(y) for y in products(mx.array(x), stack, None))
    assert len(stack) == 3
    assert np.allclose(q, k, rtol=1e-5, atol=1e-6)
    assert np.allclose(v, x @ dense.data.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_of_int8_are_the_specification_to_the_bit(rows: int, columns: int) -> None:
    weights, x = rows_of(rows, columns), rows_of(9, columns)
    weights[0] = 0
    (y,) = products(mx.array(x), read("int8", **{"layers.0.up": Dense(weights, "float32")}), None)
    expected = reference.int8_linear(x, reference.Int8(*ternary.quantize_weights(weights)))
    assert np.array(y).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_weights_stay_as_wide_as_they_are(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_weights, "_CHUNK_WEIGHTS", 1000)  # so that the matrix is widened in parts
    weights, x = rows_of(50, 70), rows_of(3, 70)
    data = to_bfloat16(weights) if dtype == "bfloat16" else weights.astype(dtype)
    stack = read(head=Dense(data, dtype))
    assert sum(part.data.nbytes for part in stack) == data.nbytes
    (y,) = products(mx.array(x), stack, None)
    assert np.allclose(np.array(y), x @ reference.dense_matrix(Dense(data, dtype)).T, rtol=1e-5, atol=1e-5)


def test_codes_that_are_not_ternary_are_a_broken_file() -> None:
    codes = random_codes(8, 64)
    codes[3, 3] = 2
    with pytest.raises(FormatError, match="codes are -1, 0 and 1 only: download"):
        read(q=Ternary(codes, "codes", codes.shape, 1.0))
    with pytest.raises(FormatError, match="NaN or infinite: download"):
        read("int8", **{"layers.0.q": Dense(np.full((2, 2), np.nan, np.float32), "float32")})

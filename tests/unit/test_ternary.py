"""The packed layouts and the two quantisations against definitions written out entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bitnet_inference import native, ternary

SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 40))
CODES = SHAPES.flatmap(lambda shape: hnp.arrays(np.int8, shape, elements=st.integers(-1, 1)))
FLOATS = st.floats(-1e6, 1e6, width=32)


def forall(strategy):
    """`given` without a deadline: the machine may be busy with something else."""
    return lambda test: settings(deadline=None)(given(strategy)(test))


@forall(CODES)
def test_quarters_hold_row_i_times_r_plus_r_in_bits_2i(codes):
    packed = ternary.pack_quarters(codes)
    num_packed = -(-codes.shape[0] // 4)
    assert packed.shape == (num_packed, codes.shape[1])
    for row in range(4 * num_packed):
        expected = codes[row] + 1 if row < codes.shape[0] else np.zeros(codes.shape[1])
        assert np.array_equal(packed[row % num_packed] >> 2 * (row // num_packed) & 3, expected)


@forall(CODES)
def test_quarters_come_back(codes):
    assert np.array_equal(ternary.unpack_quarters(ternary.pack_quarters(codes), codes.shape[0]), codes)


def test_quarters_match_bytes_written_by_transformers():
    # transformers 5 pack_weights(torch.tensor([[-1, 0], [0, 1], [1, -1], [1, 1], [0, 0]]))
    codes = np.array([[-1, 0], [0, 1], [1, -1], [1, 1], [0, 0]], np.int8)
    assert ternary.pack_quarters(codes).tolist() == [[24, 17], [9, 10]]


@forall(CODES)
def test_u2_byte_order(codes):
    packed = ternary.pack_u2(codes)
    num_rows, num_columns = codes.shape
    assert packed.shape == (-(-num_rows // 32), -(-num_columns // 16), 128)
    for group, step, byte in np.ndindex(packed.shape):
        half, lane = divmod(byte, 64)
        row = 32 * group + 16 * half + lane // 4
        for field in range(4):
            column = 16 * step + 4 * field + lane % 4
            inside = row < num_rows and column < num_columns
            expected = codes[row, column] + 1 if inside else 1
            assert packed[group, step, byte] >> 2 * field & 3 == expected


@forall(CODES)
def test_u2_comes_back(codes):
    assert np.array_equal(ternary.unpack_u2(ternary.pack_u2(codes), codes.shape), codes)


def test_quarters_with_code_3_name_row_and_column():
    packed = ternary.pack_quarters(np.zeros((10, 5), np.int8))
    packed[1, 4] |= 3 << 4
    with pytest.raises(ValueError, match="row 7, column 4"):
        ternary.unpack_quarters(packed, 10)


def test_u2_with_code_3_names_row_and_column():
    packed = ternary.pack_u2(np.zeros((40, 20), np.int8))
    packed[1, 1, 4 * 3 + 2] |= 3
    with pytest.raises(ValueError, match="row 35, column 18"):
        ternary.unpack_u2(packed, (40, 20))


def test_code_3_in_the_padding_is_no_error():
    packed = ternary.pack_quarters(np.zeros((3, 5), np.int8))
    packed[0, 0] |= 3 << 6
    assert not ternary.unpack_quarters(packed, 3).any()


@forall(hnp.arrays(np.uint8, st.integers(0, 40)))
def test_has_invalid_agrees_with_the_four_fields(packed):
    expected = any(byte >> shift & 3 == 3 for byte in packed.tolist() for shift in (0, 2, 4, 6))
    assert native.has_invalid(packed[None]) == expected


@forall(CODES)
def test_sums_of_groups_add_up_to_the_product(codes):
    activations = np.arange(3 * codes.shape[1], dtype=np.int8).reshape(3, -1)
    sums = ternary.group_sums(activations, codes, 16)
    assert sums.shape == (-(-codes.shape[1] // 16), 3, len(codes))
    assert np.array_equal(sums.sum(axis=0), activations.astype(int) @ codes.T.astype(int))
    assert np.array_equal(sums[0], activations[:, :16].astype(int) @ codes[:, :16].T.astype(int))


@pytest.mark.parametrize("pack", [ternary.pack_quarters, ternary.pack_u2])
def test_packing_refuses_other_values(pack):
    with pytest.raises(ValueError, match="-1, 0 and 1"):
        pack(np.array([[2]], np.int8))


def test_unpacking_refuses_a_wrong_number_of_rows():
    with pytest.raises(ValueError, match="9 rows take 3 packed rows"):
        ternary.unpack_quarters(np.zeros((2, 4), np.uint8), 9)


def test_unpacking_refuses_a_wrong_number_of_steps():
    with pytest.raises(ValueError, match="array has"):
        ternary.unpack_u2(np.zeros((1, 1, 128), np.uint8), (32, 17))


@forall(SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=FLOATS)))
def test_ternarize_follows_the_formula(weights):
    codes, scale = ternary.ternarize(weights)
    mean = np.float32(np.abs(weights).astype(np.float64).mean())
    inverse = np.float32(1) / max(mean, np.float32(1e-5))
    assert scale == pytest.approx(1 / inverse, rel=3e-7)
    differs = codes != np.clip(np.rint(weights * inverse), -1, 1)
    # A mean one ulp off moves only values at the border, where W / m is a half.
    assert np.allclose(np.abs(weights[differs] * inverse), 0.5, rtol=1e-6)


@forall(SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=FLOATS)))
def test_ternarize_gives_the_bits_of_the_kernels(weights):
    codes, scale = ternary.ternarize(weights)
    native_codes, native_scale = native.ternarize(weights, "float32")
    assert np.array_equal(codes, native_codes)
    assert scale == np.float32(native_scale)


def test_the_mean_of_many_weights_has_the_bits_of_the_kernels():
    weights = np.random.default_rng(1).normal(size=(300, 1111)).astype(np.float32)
    assert ternary.ternarize(weights)[1] == np.float32(native.ternarize(weights, "float32")[1])


def test_ternarize_rounds_halves_to_even():
    codes, scale = ternary.ternarize(np.array([[0.5, -0.5, 1.5, 1.5]], np.float32))
    assert codes.tolist() == [[0, 0, 1, 1]]
    assert scale == 1


def test_ternarize_of_zeros_has_the_smallest_scale():
    codes, scale = ternary.ternarize(np.zeros((2, 3), np.float32))
    assert not codes.any()
    assert scale == pytest.approx(1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_ternarize_refuses_what_is_not_finite(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        ternary.ternarize(np.array([[1, bad]], np.float32))


@forall(SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=FLOATS)))
def test_quantize_rows_is_within_half_a_step(x):
    codes, scales = ternary.quantize_rows(x)
    assert codes.min() >= -127
    error = np.abs(codes - x.astype(np.float64) * scales[:, None].astype(np.float64))
    assert error.max() <= 0.5 + 1e-4


def test_quantize_rows_uses_the_reciprocal_form():
    largest = np.float32(1) + np.arange(1, 4000, dtype=np.float32)[:, None] / 4096
    _, scales = ternary.quantize_rows(largest)
    assert np.array_equal(scales, (1 / largest[:, 0]) * np.float32(127))
    assert not np.array_equal(scales, np.float32(127) / largest[:, 0])


def test_quantize_rows_of_zeros_is_zero():
    codes, scales = ternary.quantize_rows(np.zeros((1, 4), np.float32))
    assert not codes.any()
    assert scales[0] == pytest.approx(1.27e7)


def test_quantize_rows_rounds_halves_to_even():
    codes, _ = ternary.quantize_rows(np.array([[127, 0.5, 1.5, -2.5]], np.float32))
    assert codes.tolist() == [[127, 0, 2, -2]]

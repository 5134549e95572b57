"""Blocks of GGUF files against the `gguf` library, and by hand where it knows a type not."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf_samples import i2_s_bytes

from bitnet_inference.formats import ggml_blocks
from bitnet_inference.ternary import pack_quarters

RNG = np.random.default_rng(0)
HAND_MADE = ("I2_S", "Q1_0", "Q2_0", "Q2_0 (128 a scale)")


def random_blocks(name: str, num_blocks: int) -> np.ndarray:
    """Any bytes but for the scales, which are numbers."""
    num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    blocks = RNG.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
    for start in {0, 2, num_bytes - 2} if num_bytes > 4 else ():
        blocks[:, start : start + 2] = RNG.normal(size=(num_blocks, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", [block.name for block in ggml_blocks.BLOCKS.values() if block.name not in HAND_MADE])
def test_the_library_decodes_the_same(name):
    kind = gguf.GGMLQuantizationType[name]
    blocks = random_blocks(name, 24)
    expected = gguf.quants.dequantize(blocks.reshape(2, -1), kind)
    decoded = ggml_blocks.decode(int(kind), blocks.reshape(-1), expected.shape)
    assert decoded.dtype == np.float32 and np.array_equal(expected, decoded, equal_nan=True)
    assert ggml_blocks.num_bytes(int(kind), expected.shape) == blocks.nbytes


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_codes_times_scales_are_the_values(name):
    kind = int(gguf.GGMLQuantizationType[name])
    blocks = random_blocks(name, 12)
    codes = ggml_blocks.block_codes(kind, blocks.reshape(-1), (4, 768))
    scales = ggml_blocks.block_scales(kind, blocks.reshape(-1), (4, 768))
    assert codes.dtype == np.int8 and scales.shape == (4, 3)
    values = codes * np.repeat(scales, 256, axis=1)
    assert np.array_equal(values, ggml_blocks.decode(kind, blocks.reshape(-1), (4, 768)))


def test_q2_0_by_hand():
    """18 bytes: a float16, then four values a byte, the first in the lowest bits; 0..3 stand for -1..2."""
    block = np.array([0.5], np.float16).tobytes() + bytes([0b11_10_01_00] * 16)
    raw = np.frombuffer(block, np.uint8)
    assert ggml_blocks.decode(ggml_blocks.Q2_0, raw, (1, 64)).tolist() == [[-0.5, 0.0, 0.5, 1.0] * 16]


def test_q1_0_by_hand():
    """18 bytes: a float16, then eight signs a byte, the first in the lowest bit; 1 stands for +1."""
    block = np.array([0.5], np.float16).tobytes() + bytes([0b1000_0010] * 16)
    raw, values = np.frombuffer(block, np.uint8), [-0.5, 0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 0.5] * 16
    assert ggml_blocks.decode(ggml_blocks.Q1_0, raw, (1, 128)).tolist() == [values]
    assert ggml_blocks.decode_ternary(ggml_blocks.Q1_0, raw, (1, 128)).tolist() == [values]


@pytest.mark.parametrize("kind", list(ggml_blocks.TERNARY))
def test_ternary_types_are_exact_in_float16(kind):
    """With weights of +2 where there is room for them, and without, and scales that are small, negative or 0."""
    block = ggml_blocks.BLOCKS[kind]
    blocks = RNG.integers(0, 256, (40, block.num_bytes), dtype=np.uint8)
    scales = np.array([0.5, -3.25, 6e-8, -6.1e-5, 0], np.float16)[np.arange(40) % 5]
    blocks[:, ggml_blocks.TERNARY[kind].scale] = scales.view(np.uint8).reshape(40, 2)
    for mask in (255, 0x55):
        codes = slice(2, None) if ggml_blocks.TERNARY[kind].scale.start == 0 else slice(0, -2)
        blocks[:, codes] &= np.uint8(mask)
        raw, shape = blocks.reshape(-1), (40, block.num_values)
        found = ggml_blocks.decode_ternary(kind, raw, shape)
        assert found.dtype == np.float16 and np.array_equal(found, ggml_blocks.decode(kind, raw, shape))


@pytest.mark.parametrize("name", ["Q8_0", "TQ2_0", "F32"])
def test_large_tensors_are_decoded_in_pieces(name):
    kind = int(gguf.GGMLQuantizationType[name])
    per_block = ggml_blocks.BLOCKS[kind].num_values
    blocks = random_blocks(name, (1 << 18) // per_block + 3)
    whole = ggml_blocks.decode(kind, blocks.reshape(-1), (len(blocks), per_block))
    for part in (slice(0, 2), slice(-4, None)):
        few = ggml_blocks.decode(kind, blocks[part].reshape(-1), whole[part].shape)
        assert np.array_equal(whole[part], few, equal_nan=True)


@pytest.mark.parametrize("arm", [False, True])
def test_i2_s_by_hand(arm):
    codes = RNG.integers(-1, 2, (6, 64), dtype=np.int8)
    raw = i2_s_bytes(codes, 0.25, part=16 if arm else 32)
    assert len(raw) == ggml_blocks.num_bytes(ggml_blocks.I2_S, codes.shape)
    found, scale = ggml_blocks.i2_s(raw, codes.shape, arm)
    assert np.array_equal(found, codes) and scale == 0.25
    if not arm:
        assert np.array_equal(ggml_blocks.decode(ggml_blocks.I2_S, raw, codes.shape), codes * np.float32(0.25))


def test_i2_s_takes_a_third_code_for_nothing():
    raw = np.concatenate([np.full(32, 0b11_10_01_00, np.uint8), np.ones(1, np.float32).view(np.uint8)])
    assert ggml_blocks.i2_s(raw, (1, 128))[0].reshape(4, 32)[:, 0].tolist() == [0, 1, 0, -1]


@pytest.mark.parametrize("name, num_rows, num_columns", [("TQ2_0", 8, 512), ("I2_S", 8, 384), ("TQ2_0", 300, 1024)])
def test_encoded_codes_are_read_back_and_are_quarters_too(name, num_rows, num_columns):
    kind = ggml_blocks.TQ2_0 if name == "TQ2_0" else ggml_blocks.I2_S
    codes = RNG.integers(-1, 2, (num_rows, num_columns), dtype=np.int8)
    raw = ggml_blocks.encode_ternary(kind, codes, 0.75)
    assert raw.nbytes == ggml_blocks.num_bytes(kind, codes.shape)
    assert np.array_equal(ggml_blocks.decode(kind, raw, codes.shape), codes * np.float32(0.75))
    if name == "TQ2_0":
        assert np.array_equal(gguf.dequantize(raw, gguf.GGMLQuantizationType.TQ2_0), codes.reshape(-1) * 0.75)
    else:
        assert np.array_equal(raw, i2_s_bytes(codes, 0.75)) and ggml_blocks.i2_s_scale(raw) == 0.75
    rows = raw[: len(raw) - 32 if name == "I2_S" else None].reshape(num_rows, -1)
    assert np.array_equal(ggml_blocks.quarters(kind, rows), pack_quarters(codes))
    for row, column in ((0, 0), (num_rows - 1, num_columns // 4 - 1), (num_rows // 2, 31)):
        wrong = rows.copy()  # a code of 3 anywhere
        wrong[row, column // 64 * 66 + column % 64 if name == "TQ2_0" else column] |= 3 << 2 * (column % 4)
        assert ggml_blocks.quarters(kind, wrong) is None


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floats_are_rounded_as_the_library_rounds(name):
    kind = gguf.GGMLQuantizationType[name]
    values = RNG.normal(size=(5, 64)).astype(np.float32)
    encoded = ggml_blocks.encode_floats(int(kind), values[:, ::2])
    assert np.array_equal(
        gguf.dequantize(encoded, kind), gguf.dequantize(gguf.quantize(values[:, ::2], kind), kind).reshape(-1)
    )


def test_float16_has_an_end():
    assert ggml_blocks.encode_floats(ggml_blocks.F16, np.array([65504.0, np.inf], np.float32)).nbytes == 4
    with pytest.raises(OverflowError, match="70000 does not fit"):
        ggml_blocks.encode_floats(ggml_blocks.F16, np.array([70000.0], np.float32))

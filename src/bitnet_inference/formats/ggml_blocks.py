"""The blocks in which GGUF files hold numbers, a table row a type: how large they are, and what they stand for.

Layouts as in ggml-common.h and ggml-quants.c of llama.cpp; I2_S as in Microsoft's fork.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.formats.bit_fields import Bytes, bit_fields
from bitnet_inference.formats.floats import to_bfloat16, to_float32

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]

F32, F16, BF16 = 0, 1, 30
TQ1_0, TQ2_0, Q1_0, Q2_0, I2_S = 34, 35, 41, 42, 36
Q2_0_128 = 1 << 32  # older files' Q2_0, which have 128 weights a scale under the same number: no file names this one
_I2_TAIL = 32  # bytes behind the codes: one float32, the rest is nothing
_DECODED_VALUES = 1 << 18  # at a time: what is in between takes several times as much memory, and stays in the cache


class Block(NamedTuple):
    """`num_values` values take `num_bytes` bytes. `decode` turns blocks [n, num_bytes] into float32 [n, num_values]."""

    name: str
    num_values: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]


class TernaryBlock(NamedTuple):
    """How blocks [n, bytes] become codes int8 [n, values] and the scale of each, float32 [n]."""

    codes: Callable[[Bytes], Codes]
    scale: slice  # of the bytes: a float16


def num_bytes(type_id: int, shape: tuple[int, ...]) -> int:
    """What a tensor of a known type takes."""
    block = BLOCKS[type_id]
    tail = _I2_TAIL if type_id == I2_S else 0
    return math.prod(shape) // block.num_values * block.num_bytes + tail


def decode(type_id: int, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """The values of a tensor, float32 of `shape`. `raw` has num_bytes(type_id, shape) bytes.

    Where a scale is infinite or NaN, so are values.
    """
    if type_id == I2_S:
        codes, scale = i2_s(raw, shape)
        with np.errstate(all="ignore"):
            return codes.astype(np.float32) * np.float32(scale)
    values = np.empty(shape, np.float32)
    for part, blocks in _pieces(values, type_id, raw):
        with np.errstate(all="ignore"):
            part[:] = BLOCKS[type_id].decode(blocks)
    return values


def decode_ternary(type_id: int, raw: Bytes, shape: tuple[int, ...]) -> NDArray[np.float16]:
    """The values of a tensor of TERNARY, exactly: float16, as their scales are. A weight of +2 may be infinite."""
    values, kind = np.empty(shape, np.float16), TERNARY[type_id]
    for part, blocks in _pieces(values, type_id, raw):
        codes = kind.codes(blocks)
        if codes.max(initial=0) > 1:
            with np.errstate(all="ignore"):
                part[:] = BLOCKS[type_id].decode(blocks)
            continue
        # A scale with the sign of its code, or nothing: NumPy takes long to make float16 of floats.
        scales = np.ascontiguousarray(blocks[:, kind.scale]).view("<u2")
        signs = (codes.astype(np.int16) & np.int16(-0x8000)).view(np.uint16)
        part.view(np.uint16)[:] = (scales ^ signs) * (codes != 0)
    return values


def _pieces(values: NDArray[Any], type_id: int, raw: Bytes) -> Iterator[tuple[NDArray[Any], Bytes]]:
    """The values, and the blocks that they are made of, some at a time: [n, num_values] and [n, num_bytes]."""
    block = BLOCKS[type_id]
    parts, blocks = values.reshape(-1, block.num_values), raw.reshape(-1, block.num_bytes)
    step = _DECODED_VALUES // block.num_values
    return ((parts[begin : begin + step], blocks[begin : begin + step]) for begin in range(0, len(blocks), step))


def block_scales(type_id: int, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """The scale of each block of a ternary type: float32 [rows, blocks a row]."""
    blocks = raw.reshape(-1, BLOCKS[type_id].num_bytes)
    return _f16(blocks, TERNARY[type_id].scale).reshape(*shape[:-1], -1)


def block_codes(type_id: int, raw: Bytes, shape: tuple[int, ...]) -> Codes:
    """The codes of a ternary type: int8 of `shape`. They may be 2 where the type has room for it."""
    codes = np.empty(shape, np.int8)
    for part, blocks in _pieces(codes, type_id, raw):
        part[:] = TERNARY[type_id].codes(blocks)
    return codes


def block_signs(raw: Bytes, shape: tuple[int, ...]) -> Bytes:
    """The codes of Q1_0 as they stand there, as signs (ternary.py): uint8 [rows, columns / 8]."""
    blocks = raw.reshape(-1, BLOCKS[Q1_0].num_bytes)
    return np.ascontiguousarray(blocks[:, 2:]).reshape(shape[0], -1)


def i2_s(raw: Bytes, shape: tuple[int, ...], arm: bool = False) -> tuple[Codes, float]:
    """I2_S: codes int8 of `shape`, and the scale of all of them, which stands behind the codes.

    Values are one flat array: 128 of them are 32 bytes, the first 32 in the highest bits; on ARM (`arm`) some writers
    made it 64 in 16 bytes. The file does not say which. A code 3 stands for 0, as in the kernels of that fork.
    """
    num_codes = math.prod(shape) // 4
    part = 16 if arm else 32
    fields = _two_bits(raw[:num_codes].reshape(-1, part), (6, 4, 2, 0))
    fields[fields == 3] = 1
    return (fields.view(np.int8) - np.int8(1)).reshape(shape), i2_s_scale(raw)


def i2_s_scale(raw: Bytes) -> float:
    """The scale behind the codes of I2_S."""
    return float(raw[-_I2_TAIL:][:4].copy().view("<f4")[0])


def quarters(type_id: int, rows: Bytes) -> Bytes | None:
    """The codes of TQ2_0 or I2_S as quarters (ternary.py): uint8 [out / 4, in]; None where a code is 3.

    `rows` uint8 [out, bytes a row]: `out` is a multiple of 4, and rows are whole blocks, without I2_S's scale.
    """
    block_bytes, code_bytes = BLOCKS[type_id].num_bytes, 64 if type_id == TQ2_0 else 32
    found, has_invalid = native.quarters(np.ascontiguousarray(rows), block_bytes, code_bytes, type_id == I2_S)
    return None if has_invalid else found


def encode_ternary(type_id: int, codes: Codes, scale: float) -> Bytes:
    """Codes int8 [out, in] and their scale in TQ2_0 (rows of whole blocks) or in I2_S (whole blocks in all).

    TQ2_0 rounds the scale to float16.
    """
    fields = (codes.reshape(-1, 4, 32) + np.int8(1)).view(np.uint8)
    order = (0, 1, 2, 3) if type_id == TQ2_0 else (3, 2, 1, 0)
    packed = np.zeros((len(fields), 32), np.uint8)
    for place, field in enumerate(order):
        packed |= fields[:, field] << np.uint8(2 * place)
    if type_id == I2_S:
        tail = np.zeros(_I2_TAIL // 4, "<f4")
        tail[0] = scale
        return np.concatenate([packed.reshape(-1), tail.view(np.uint8)])
    blocks = np.empty((len(packed) // 2, BLOCKS[TQ2_0].num_bytes), np.uint8)
    blocks[:, :64] = packed.reshape(-1, 64)
    blocks[:, 64:] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(-1)


def encode_floats(type_id: int, values: Floats) -> Bytes:
    """Values in F32, F16 or BF16, rounded to the nearest. Raises OverflowError for what float16 does not reach."""
    if type_id == BF16:
        return np.ascontiguousarray(to_bfloat16(np.ascontiguousarray(values)), "<u2").reshape(-1).view(np.uint8)
    with np.errstate(over="ignore"):
        encoded = np.ascontiguousarray(values, "<f4" if type_id == F32 else "<f2")
    if not np.array_equal(np.isinf(encoded), np.isinf(values)):
        raise OverflowError(f"{np.abs(values).max():g} does not fit float16")
    return encoded.reshape(-1).view(np.uint8)


def _f16(blocks: Bytes, where: slice) -> Floats:
    """float16 numbers at some bytes of every block, [n, how many], in float32."""
    return np.ascontiguousarray(blocks[:, where]).view("<f2").astype(np.float32)


def _i8(blocks: Bytes, where: slice) -> Floats:
    return blocks[:, where].view(np.int8).astype(np.float32)


def _two_bits(packed: Bytes, shifts: tuple[int, ...]) -> Bytes:
    """[n, m] bytes to [n, 4 m] values 0..3: all those at the first shift, then the next."""
    return np.stack([(packed >> np.uint8(shift)) & np.uint8(3) for shift in shifts], axis=1).reshape(len(packed), -1)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, m] bytes to [n, 2 m]: all low halves, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _q4_0(b: Bytes) -> Floats:
    return (_nibbles(b[:, 2:]).astype(np.float32) - 8) * _f16(b, slice(0, 2))


def _q4_1(b: Bytes) -> Floats:
    return _nibbles(b[:, 4:]).astype(np.float32) * _f16(b, slice(0, 2)) + _f16(b, slice(2, 4))


def _q5_0(b: Bytes) -> Floats:
    values = (_nibbles(b[:, 6:]) | bit_fields(b[:, 2:6], 1) << np.uint8(4)).astype(np.float32) - 16
    return values * _f16(b, slice(0, 2))


def _q5_1(b: Bytes) -> Floats:
    values = (_nibbles(b[:, 8:]) | bit_fields(b[:, 4:8], 1) << np.uint8(4)).astype(np.float32)
    return values * _f16(b, slice(0, 2)) + _f16(b, slice(2, 4))


def _q8_0(b: Bytes) -> Floats:
    return _i8(b, slice(2, 34)) * _f16(b, slice(0, 2))


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 6-bit scales and minima of the 8 parts of a K block, from their 12 bytes: [n, 8] each."""
    low, high, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (last & 15) | (low >> 6) << 4], axis=1)
    minima = np.concatenate([high & 63, (last >> 4) | (high >> 6) << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_values(b: Bytes, values: Bytes) -> Floats:
    """d * scale * value - dmin * minimum, by parts of 32."""
    scales, minima = _k_scales(b[:, 4:16])
    factors, offsets = _f16(b, slice(0, 2)) * scales, _f16(b, slice(2, 4)) * minima
    parts = values.reshape(-1, 8, 32).astype(np.float32)
    return (factors[:, :, None] * parts - offsets[:, :, None]).reshape(-1, 256)


def _k_nibbles(packed: Bytes) -> Bytes:
    """128 bytes to 256 values: for each 32 bytes the low halves, then the high ones."""
    return _nibbles(packed.reshape(-1, 32)).reshape(-1, 256)


def _q4_k(b: Bytes) -> Floats:
    return _k_values(b, _k_nibbles(b[:, 16:]))


def _q5_k(b: Bytes) -> Floats:
    high = bit_fields(b[:, 16:48], 1).reshape(-1, 32, 8).transpose(0, 2, 1).reshape(-1, 256)
    return _k_values(b, _k_nibbles(b[:, 48:]) | high << np.uint8(4))


def _q6_k(b: Bytes) -> Floats:
    low = b[:, :128].reshape(-1, 2, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2)  # 128 values of each half: 2 x 32 low, 2 x 32 high
    high = _two_bits(b[:, 128:192].reshape(-1, 32), (0, 2, 4, 6)).reshape(-1, 2, 128)
    values = ((low | high << np.uint8(4)).astype(np.float32) - 32).reshape(-1, 16, 16)
    factors = _f16(b, slice(208, 210)) * _i8(b, slice(192, 208))
    return (factors[:, :, None] * values).reshape(-1, 256)


def _tq1_0_codes(b: Bytes) -> Codes:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)

    def digits(packed: Bytes, count: int) -> Bytes:
        wrapped = packed[:, None, :] * powers[:count, None]  # in 8 bits, as the format wants it
        return (wrapped.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)

    fields = np.concatenate([digits(b[:, :32], 5), digits(b[:, 32:48], 5), digits(b[:, 48:52], 4)], axis=1)
    return fields.view(np.int8) - np.int8(1)


def _tq2_0_codes(b: Bytes) -> Codes:
    fields = _two_bits(b[:, :64].reshape(-1, 32), (0, 2, 4, 6)).reshape(-1, 256)
    return fields.view(np.int8) - np.int8(1)


def _q2_0_codes(b: Bytes) -> Codes:
    return bit_fields(b[:, 2:], 2).view(np.int8) - np.int8(1)


def _q1_0_codes(b: Bytes) -> Codes:
    return bit_fields(b[:, 2:], 1).view(np.int8) * np.int8(2) - np.int8(1)


TERNARY = {
    TQ1_0: TernaryBlock(_tq1_0_codes, slice(52, 54)),
    TQ2_0: TernaryBlock(_tq2_0_codes, slice(64, 66)),
    Q1_0: TernaryBlock(_q1_0_codes, slice(0, 2)),
    Q2_0: TernaryBlock(_q2_0_codes, slice(0, 2)),
    Q2_0_128: TernaryBlock(_q2_0_codes, slice(0, 2)),
}


def _ternary_values(type_id: int) -> Callable[[Bytes], Floats]:
    kind = TERNARY[type_id]
    return lambda b: kind.codes(b).astype(np.float32) * _f16(b, kind.scale)


BLOCKS = {
    F32: Block("F32", 1, 4, lambda b: b.reshape(-1).view("<f4").reshape(-1, 1)),
    F16: Block("F16", 1, 2, lambda b: to_float32(b.reshape(-1).view("<f2"), "float16").reshape(-1, 1)),
    BF16: Block("BF16", 1, 2, lambda b: to_float32(b.reshape(-1).view("<u2"), "bfloat16").reshape(-1, 1)),
    2: Block("Q4_0", 32, 18, _q4_0),
    3: Block("Q4_1", 32, 20, _q4_1),
    6: Block("Q5_0", 32, 22, _q5_0),
    7: Block("Q5_1", 32, 24, _q5_1),
    8: Block("Q8_0", 32, 34, _q8_0),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k),
    TQ1_0: Block("TQ1_0", 256, 54, _ternary_values(TQ1_0)),
    TQ2_0: Block("TQ2_0", 256, 66, _ternary_values(TQ2_0)),
    I2_S: Block("I2_S", 128, 32, lambda b: np.zeros((len(b), 128), np.float32)),  # decode() has its scale
    Q1_0: Block("Q1_0", 128, 18, _ternary_values(Q1_0)),
    Q2_0: Block("Q2_0", 64, 18, _ternary_values(Q2_0)),
    Q2_0_128: Block("Q2_0 (128 a scale)", 128, 34, _ternary_values(Q2_0_128)),
}

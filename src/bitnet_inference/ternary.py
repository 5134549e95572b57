"""The layouts of packed ternary weights and the quantisations, in NumPy: the truth for formats and kernels.

A ternary matrix has the shape [out, in] and values -1, 0, 1. Its layouts:

    codes     int8 [out, in], the values themselves
    quarters  uint8 [ceil(out / 4), in], Hugging Face's packing
    u2        uint8 [ceil(out / 32), ceil(in / 16), 128], the kernels' R32/U2 layout
    t5        uint8 [ceil(out / 32), ceil(in / 80) * 4, 128], five values a byte
    signs     uint8 [out, ceil(in / 8)], a bit a value where all are -1 or +1

Packed, a value is stored as value + 1, in two bits but for t5 and signs; the fourth pattern, 3, is invalid everywhere,
and so are the bytes of t5 from 243 on.
Scales stand beside it: one a matrix, float32 [out], one a row, or float32 [out, ceil(in / group)], one for every
`group` columns of a row.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Layout = Literal["codes", "quarters", "u2", "t5", "signs"]
GROUP_ROWS = 32
STEP_COLUMNS = 16
STEP_BYTES = 128
BLOCK_COLUMNS = 80  # of t5: four steps of 20
NUM_T5 = 243  # bytes of t5 that mean something: from here on they are invalid
_MIN_MAGNITUDE = np.float32(1e-5)
_MEAN_LANES = 16


def pack_quarters(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes int8 [out, in] to quarters uint8 [R, in], R = ceil(out / 4).

    Bits 2i..2i+1 of packed row r hold row i * R + r, as transformers' `pack_weights` writes them: rows that only fill
    up the last quarter are 0 bits. Raises ValueError for values other than -1, 0, 1.
    """
    fields = _fields(codes)
    num_rows, num_columns = codes.shape
    num_packed = -(-num_rows // 4)
    padded = np.zeros((4 * num_packed, num_columns), np.uint8)
    padded[:num_rows] = fields
    return _join(padded.reshape(4, num_packed, num_columns))


def unpack_quarters(packed: NDArray[np.uint8], num_rows: int) -> NDArray[np.int8]:
    """Quarters uint8 [ceil(num_rows / 4), in] to codes int8 [num_rows, in].

    Raises ValueError, naming row and column, where a field is 3, and for a wrong number of packed rows.
    """
    if packed.ndim != 2 or packed.shape[0] != -(-num_rows // 4):
        raise ValueError(
            f"{num_rows} rows take {-(-num_rows // 4)} packed rows, the array has the shape {packed.shape}"
        )
    fields = _split(packed).reshape(4 * packed.shape[0], packed.shape[1])[:num_rows]
    return _codes(fields)


def pack_u2(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes int8 [out, in] to u2 uint8 [ceil(out / 32), ceil(in / 16), 128].

    In step k of a group, byte 64 * h + 4 * r + j holds row 16 * h + r of the group: bits 2p..2p+1 are column
    16 * k + 4 * p + j. Rows and columns that only fill up are weight 0 (field 1). Raises ValueError for values other
    than -1, 0, 1.
    """
    fields = _fields(codes)
    num_groups, num_steps = -(-codes.shape[0] // GROUP_ROWS), -(-codes.shape[1] // STEP_COLUMNS)
    padded = np.ones((num_groups * GROUP_ROWS, num_steps * STEP_COLUMNS), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = fields
    rows = padded.reshape(num_groups, GROUP_ROWS, num_steps, 4, 4)
    by_field = rows.transpose(3, 0, 2, 1, 4)  # field, group, step, row of the group, j
    return _join(by_field).reshape(num_groups, num_steps, STEP_BYTES)


def unpack_u2(packed: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.int8]:
    """u2 uint8 [ceil(out / 32), ceil(in / 16), 128] to codes int8 of `shape` [out, in].

    Raises ValueError, naming row and column, where a field is 3, and for a wrong number of groups or steps.
    """
    num_groups, num_steps, _ = expected = u2_shape(*shape)
    if packed.shape != expected:
        raise ValueError(f"{shape} takes {expected} bytes, the array has {packed.shape}")
    by_field = _split(packed.reshape(num_groups, num_steps, GROUP_ROWS, 4))
    rows = by_field.transpose(1, 3, 2, 0, 4).reshape(num_groups * GROUP_ROWS, num_steps * STEP_COLUMNS)
    return _codes(rows[: shape[0], : shape[1]])


def pack_t5(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes int8 [out, in] to t5 uint8 [ceil(out / 32), ceil(in / 80) * 4, 128]: five values a byte.

    Rows, bytes and the fields t0..t3 of value + 1 stand as in u2. The fields t4 are the columns behind all of those:
    byte 64 * h + 4 * r + j of step k, of K steps, has column 16 * K + 4 * k + j. With q = t0 + 3 * t1 + 9 * t2 +
    27 * t3 a byte is t4 << 6 | q where q < 64, and 192 + 3 * (q - 64) + t4 otherwise. Raises ValueError for values
    other than -1, 0, 1.
    """
    fields = _fields(codes)
    num_groups, num_steps, _ = t5_shape(*codes.shape)
    padded = np.ones((num_groups * GROUP_ROWS, num_steps * 20), np.uint8)
    padded[: codes.shape[0], : codes.shape[1]] = fields
    rows = padded.reshape(num_groups, GROUP_ROWS, num_steps * 20)
    t = rows[..., : num_steps * 16].reshape(num_groups, GROUP_ROWS, num_steps, 4, 4).transpose(3, 0, 2, 1, 4)
    t4 = rows[..., num_steps * 16 :].reshape(num_groups, GROUP_ROWS, num_steps, 4).transpose(0, 2, 1, 3)
    q = t[0] + 3 * t[1] + 9 * t[2] + 27 * t[3]
    packed: NDArray[np.uint8] = np.where(q < 64, t4 << 6 | q, 192 + 3 * (q.astype(np.int32) - 64) + t4).astype(np.uint8)
    return packed.reshape(num_groups, num_steps, STEP_BYTES)


def unpack_t5(packed: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.int8]:
    """t5 uint8 [ceil(out / 32), ceil(in / 80) * 4, 128] to codes int8 of `shape` [out, in].

    Raises ValueError where a byte is 243 or more, and for a wrong number of groups or steps.
    """
    num_groups, num_steps, _ = expected = t5_shape(*shape)
    if packed.shape != expected:
        raise ValueError(f"{shape} takes {expected} bytes, the array has {packed.shape}")
    if packed.size and packed.max() >= NUM_T5:
        raise ValueError(f"a byte is {packed.max()}: those of t5 are below {NUM_T5}")
    q = np.arange(NUM_T5)
    q[192:] = 64 + (q[192:] - 192) // 3
    q[:192] %= 64
    t4 = np.where(np.arange(NUM_T5) < 192, np.arange(NUM_T5) >> 6, np.arange(NUM_T5) % 3)
    tables = np.stack([*(q // 3**power % 3 for power in range(4)), t4]).astype(np.uint8)
    fields = tables[:, packed.reshape(num_groups, num_steps, GROUP_ROWS, 4)]
    num_rows = num_groups * GROUP_ROWS
    first = fields[:4].transpose(1, 3, 2, 0, 4).reshape(num_rows, num_steps * STEP_COLUMNS)
    rows = np.concatenate([first, fields[4].transpose(0, 2, 1, 3).reshape(num_rows, num_steps * 4)], axis=1)
    return _codes(rows[: shape[0], : shape[1]])


def unpack_signs(packed: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.int8]:
    """signs uint8 [out, ceil(in / 8)] to codes int8 of `shape` [out, in].

    Bit i of byte j is column 8 * j + i, and 1 stands for +1. Raises ValueError for a wrong number of rows or bytes.
    """
    if packed.shape != (shape[0], -(-shape[1] // 8)):
        raise ValueError(f"{shape} takes {(shape[0], -(-shape[1] // 8))} bytes, the array has {packed.shape}")
    bits = np.unpackbits(packed, axis=1, count=shape[1], bitorder="little")
    return bits.view(np.int8) * np.int8(2) - np.int8(1)


def u2_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of the array that holds a matrix [rows, columns] in u2."""
    return -(-rows // GROUP_ROWS), -(-columns // STEP_COLUMNS), STEP_BYTES


def t5_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """The shape of the array that holds a matrix [rows, columns] in t5."""
    return -(-rows // GROUP_ROWS), -(-columns // BLOCK_COLUMNS) * 4, STEP_BYTES


def unpack(data: NDArray[np.generic], layout: Layout, shape: tuple[int, int]) -> NDArray[np.int8]:
    """The codes int8 of `shape` [out, in] that an array in this layout holds; raises ValueError for what is none."""
    if layout == "codes":
        return data.view(np.int8)
    if layout == "quarters":
        return unpack_quarters(data.view(np.uint8), shape[0])
    if layout == "t5":
        return unpack_t5(data.view(np.uint8), shape)
    if layout == "signs":
        return unpack_signs(data.view(np.uint8), shape)
    return unpack_u2(data.view(np.uint8), shape)


def group_sums(activations: NDArray[np.int8], codes: NDArray[np.int8], group_size: int) -> NDArray[np.int64]:
    """The exact products of activations [tokens, in] and codes [out, in], by groups of columns: [groups, tokens, out].

    Every `group_size` columns are a group, the last of which may be short.
    """
    starts = range(0, codes.shape[1], group_size)
    pairs = ((activations[:, k : k + group_size], codes[:, k : k + group_size]) for k in starts)
    return np.stack([a.astype(np.int64) @ c.T.astype(np.int64) for a, c in pairs])


def ternarize(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], np.float32]:
    """Master weights float32 [out, in] to (codes int8 [out, in], multiplicative scale m), by absmean.

    As transformers' `WeightQuant`, in float32: s = 1 / max(mean|W|, 1e-5), codes = clamp(round(W * s), -1, 1) with
    halves to even, m = 1 / s. Raises ValueError if a weight is not finite.
    """
    mean = _mean_magnitude(weights)
    if not np.isfinite(mean):
        raise ValueError("a master weight is NaN or infinite")
    inverse = np.float32(1) / np.maximum(mean, _MIN_MAGNITUDE)
    scaled = weights * inverse
    np.rint(scaled, out=scaled)
    np.clip(scaled, -1, 1, out=scaled)
    return scaled.astype(np.int8), np.float32(1) / inverse


def quantize_weights(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Finite weights float32 [out, in] to (codes int8 [out, in] from -127 to 127, scales float32 [out]), by row.

    A weight is worth code * scale, scale = fl(max|w| / 254) * 2. Codes are floor(fl(fl(w / scale) + 128.5)) - 128; in
    rows without a weight above 1e-30 they are 0.
    """
    largest = np.abs(weights).max(axis=1, initial=0)
    half = np.where(largest > np.float32(1e-30), largest / np.float32(254), np.float32(0.5))
    steps = weights * (np.float32(0.5) / half)[:, None] + np.float32(128.5)
    codes = np.clip(steps, 1, 255).astype(np.int16) - np.int16(128)
    return codes.astype(np.int8), half * np.float32(2)


def quantize_table(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Finite embeddings float32 [vocab, hidden] to (codes int8 from -127 to 127, scales float32 [vocab]), by row.

    A weight is worth code * scale, scale = fl(max|w| / 127). Codes are fl(w / scale), rounded with halves to even; in
    rows without a weight above 1e-30 they are 0.
    """
    largest = np.abs(weights).max(axis=1, initial=0)
    scales = np.where(largest > np.float32(1e-30), largest / np.float32(127), np.float32(1))
    return np.rint(weights / scales[:, None]).astype(np.int8), scales


def quantize_rows(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Finite activations float32 [tokens, in] to (codes int8 [tokens, in], scales s_x float32 [tokens]).

    s_x = fl(fl(1 / max(max|x|, 1e-5)) * 127), the two roundings of torch's `127 / tensor`; codes = clamp(round(x *
    s_x), -128, 127) with halves to even. A product of codes is worth sum / s_x * m.
    """
    largest = np.maximum(np.abs(x).max(axis=1, initial=0), _MIN_MAGNITUDE)
    scales = (np.float32(1) / largest) * np.float32(127)
    codes = np.clip(np.rint(x * scales[:, None]), -128, 127)
    return codes.astype(np.int8), scales


def _mean_magnitude(weights: NDArray[np.float32]) -> np.float32:
    # One order on every machine, the kernels' own: 16 lanes along the flat array, then the lanes, in float64.
    flat = np.abs(weights.reshape(-1))
    padded = np.zeros((-(-flat.size // _MEAN_LANES), _MEAN_LANES), np.float64)
    padded.reshape(-1)[: flat.size] = flat
    total = np.cumsum(np.add.reduce(padded, axis=0))[-1]
    return np.float32(total / flat.size) if flat.size else np.float32(0)


def _fields(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    if codes.ndim != 2 or codes.dtype != np.int8:
        raise ValueError(f"codes are int8 [out, in], not {codes.dtype} {codes.shape}")
    if codes.size and (codes.min() < -1 or codes.max() > 1):
        raise ValueError("codes are -1, 0 and 1 only")
    return (codes + np.int8(1)).view(np.uint8)


def _codes(fields: NDArray[np.uint8]) -> NDArray[np.int8]:
    if fields.size and fields.max() > 2:
        row, column = np.unravel_index(int(np.argmax(fields > 2)), fields.shape)
        raise ValueError(f"row {row}, column {column} holds the 2-bit code 3: ternary codes are 0, 1 and 2")
    return fields.view(np.int8) - np.int8(1)


def _join(fields: NDArray[np.uint8]) -> NDArray[np.uint8]:
    low, second, third, high = fields
    joined: NDArray[np.uint8] = low | second << np.uint8(2) | third << np.uint8(4) | high << np.uint8(6)
    return joined


def _split(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.stack([(packed >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)])

"""Verb by verb: every instruction set of this machine against NumPy, and to the bit against the generic one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet_inference import native, ternary
from bitnet_inference.backends import reference
from bitnet_inference.backends.cpu_program import ACTIVATIONS
from bitnet_inference.backends.packing import packing
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import ChangedCheckpoint
from bitnet_inference.model_folder import find_model

ISAS = native.isas()
Floats = NDArray[np.float32]
INPUT, OUTPUT, ARENA = 1, 2, 0


def external(base: int, width: int, stride: int | None = None, column: int = 0) -> tuple[int, int, int, int, int]:
    return base, 0, stride or width, column, width


def run(program: native.Program, isa: str, x: Floats, width: int, threads: int = 1, batch=None) -> Floats:
    output = np.full((len(x), width), np.nan, np.float32)
    native.Executor(isa, threads).run(program, batch, x, output)
    return output


def packed(
    codes: NDArray[np.int8], scale: float, layout: str = "codes", ternary_format: str = "u2"
) -> native.TernaryWeight:
    weight = native.TernaryWeight(codes.shape[1], [codes.shape[0]], ternary_format)
    data = codes.view(np.uint8) if layout == "codes" else ternary.pack_quarters(codes)
    weight.pack(0, data, layout, scale)
    return weight


def product(weight: native.TernaryWeight, isa: str, x: Floats, threads: int = 1) -> Floats:
    padded = -(-weight.columns // 80) * 80
    program = native.Program(padded // 4 + 32)
    codes = (0, padded)
    program.rows_to_codes(external(INPUT, weight.columns), None, 0, None, 0.0, codes)
    program.ternary(weight, codes, external(OUTPUT, weight.rows), None)
    return run(program, isa, x, weight.rows, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("layout", "ternary_format"), [("codes", "u2"), ("quarters", "u2"), ("quarters", "t5")])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (31, 15), (32, 16), (33, 17), (100, 300), (64, 4096)])
def test_ternary_sums_are_exact(isa: str, layout: str, ternary_format: str, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows * columns)
    codes = rng.integers(-1, 2, (rows, columns), np.int8)
    weight = packed(codes, 1.0, layout, ternary_format)
    for tokens in (*range(1, 14), 29, 70):
        x = rng.integers(-127, 128, (tokens, columns)).astype(np.float32)
        x[:, 0] = 127  # the scale is 1 but for rounding: the codes are the integers themselves
        sums = x.astype(np.int64) @ codes.T.astype(np.int64)
        assert np.array_equal(np.rint(product(weight, isa, x)), sums), f"{tokens} tokens"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ternary_format", ["u2", "t5"])
@pytest.mark.parametrize("threads", [1, 3])
def test_more_tokens_than_meet_the_weights_at_a_time(isa: str, ternary_format: str, threads: int) -> None:
    rng = np.random.default_rng(3)
    weight = packed(rng.integers(-1, 2, (97, 8000), np.int8), 0.5, "codes", ternary_format)
    x = rng.standard_normal((250, 8000), np.float32)
    parts = [product(weight, isa, x[begin : begin + 31]) for begin in range(0, len(x), 31)]
    assert np.array_equal(product(weight, isa, x, threads), np.concatenate(parts))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ternary_format", ["u2", "t5"])
def test_the_largest_sums_do_not_overflow(isa: str, ternary_format: str) -> None:
    columns = 32768
    weight = packed(np.ones((32, columns), np.int8), 1.0, "codes", ternary_format)
    for tokens in (1, 2, 3, 8):
        y = product(weight, isa, np.full((tokens, columns), -127, np.float32))
        assert np.allclose(y, -127 * columns, rtol=1e-6)


class OfWidth(ChangedCheckpoint):
    """The default model, as far as its shapes go, with other numbers of columns."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(open_checkpoint(find_model("default")))
        widths = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        self.config = replace(self.original.config, **widths)


@pytest.mark.parametrize("isa", ISAS)
def test_weights_take_less_memory_where_that_is_faster(isa: str) -> None:
    assert isa.startswith("avx512") or not native.decodes_t5(isa)
    config = EngineConfig(isa=isa).resolve()
    assert packing(OfWidth(2560, 6912), config) == ("t5" if native.decodes_t5(isa) else "u2")
    for columns in (1, 64, 256, 257):  # the last block of 80 columns is as good as empty
        assert packing(OfWidth(columns, columns), config) == "u2"
    for forced in ("u2", "t5"):
        assert packing(OfWidth(256, 768), EngineConfig(isa=isa, ternary_format=forced).resolve()) == forced


@pytest.mark.parametrize("isa", ISAS)
def test_bit_linear_equals_the_reference(isa: str) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-1, 2, (48, 200), np.int8)
    x = rng.standard_normal((11, 200), np.float32) * 3
    x[4] = 0  # a token of zeros gives zeros
    expected = reference.bit_linear(x, codes, 0.7)
    assert np.array_equal(product(packed(codes, 0.7), isa, x, threads=2), expected)
    assert not expected[4].any()


def test_stacked_matrices_keep_their_scales_and_rows() -> None:
    rng = np.random.default_rng(2)
    parts = [rng.integers(-1, 2, (rows, 40), np.int8) for rows in (48, 5, 33)]
    weight = native.TernaryWeight(40, [len(part) for part in parts])
    for i, part in enumerate(parts):
        weight.pack(i, part.view(np.uint8), "codes", 0.5 + i)
    x = rng.standard_normal((3, 40), np.float32)
    expected = np.concatenate([reference.bit_linear(x, part, 0.5 + i) for i, part in enumerate(parts)], axis=1)
    assert np.array_equal(product(weight, ISAS[0], x), expected)


@pytest.mark.parametrize("layout", ["codes", "quarters"])
def test_packing_gives_the_bytes_of_the_specification(layout: str) -> None:
    codes = np.random.default_rng(3).integers(-1, 2, (70, 330), np.int8)
    assert packed(codes, 1.0, layout).packed().tobytes() == ternary.pack_u2(codes).tobytes()
    assert packed(codes, 1.0, layout, "t5").packed().tobytes() == ternary.pack_t5(codes).tobytes()


@pytest.mark.parametrize("columns", [330, 1, 7, 160])
def test_signs_are_packed_as_their_codes(columns: int) -> None:
    codes = np.random.default_rng(4).choice(np.array([-1, 1], np.int8), (70, columns))
    signs = np.packbits(codes > 0, axis=1, bitorder="little")
    assert np.array_equal(ternary.unpack(signs, "signs", codes.shape), codes)
    for ternary_format, pack in (("u2", ternary.pack_u2), ("t5", ternary.pack_t5)):
        weight = native.TernaryWeight(columns, [70], ternary_format)
        weight.pack(0, signs, "signs", 1.0)
        assert weight.packed().tobytes() == pack(codes).tobytes()
        with pytest.raises(ValueError, match="wrong shape"):
            weight.pack(0, signs[:69], "signs", 1.0)
    with pytest.raises(ValueError, match="bytes, the array has"):
        ternary.unpack(signs[:69], "signs", codes.shape)


def test_an_invalid_code_is_named() -> None:
    codes = np.zeros((8, 32), np.int8)
    data = ternary.pack_quarters(codes)
    data[1, 21] |= 3 << 4  # row 2 * 2 + 1
    weight = native.TernaryWeight(32, [8])
    with pytest.raises(ValueError, match="row 5, column 21"):
        weight.pack(0, data, "quarters", 1.0)
    codes[3, 4] = 2
    with pytest.raises(ValueError, match="row 3, column 4"):
        weight.pack(0, codes.view(np.uint8), "codes", 1.0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ternarize_equals_the_specification(dtype: str) -> None:
    weights = np.random.default_rng(4).standard_normal((37, 19), np.float32)
    data = weights.astype(np.float16).view(np.uint16) if dtype == "float16" else weights
    if dtype == "bfloat16":
        data = (reference.to_bfloat16(weights).view(np.uint32) >> 16).astype(np.uint16)
    exact = {"float32": weights, "float16": weights.astype(np.float16).astype(np.float32)}
    codes, scale = native.ternarize(data, dtype)
    expected_codes, expected_scale = ternary.ternarize(exact.get(dtype, reference.to_bfloat16(weights)))
    assert np.array_equal(codes, expected_codes)
    assert scale == pytest.approx(float(expected_scale), rel=2e-7)


def rows_step(isa: str, x: Floats, gated: str | None, norm: Floats | None, threads: int = 1) -> Floats:
    width = x.shape[1] // 2 if gated else x.shape[1]
    up = external(INPUT, width, x.shape[1], width) if gated else None
    activation = ACTIVATIONS[gated]
    program = native.Program(16)
    program.rows_to_floats(external(INPUT, width, x.shape[1]), up, activation, norm, 1e-5, external(OUTPUT, width))
    return run(program, isa, x, width, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gated", ACTIVATIONS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("width", [1, 16, 37, 256])
def test_gate_and_norm(isa: str, gated: str | None, normed: bool, width: int) -> None:
    if not (gated or normed):
        return
    rng = np.random.default_rng(width)
    x = rng.standard_normal((5, width * (2 if gated else 1)), np.float32) * 20
    norm = rng.standard_normal(width, np.float32) if normed else None
    y = rows_step(isa, x, gated, norm)
    expected = reference.gated(x[:, :width], x[:, width:], gated) if gated else x
    if norm is not None:
        expected = reference.rms_norm(expected, norm, 1e-5)
    assert np.allclose(y, expected, rtol=2e-6, atol=1e-6)
    assert y.tobytes() == rows_step("generic", x, gated, norm).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 5), (3, 16), (4, 37), (2, 256)])
def test_a_norm_that_is_shorter_than_its_rows_is_of_each_part(isa: str, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    x, norm = rng.standard_normal((5, heads * dim), np.float32), rng.standard_normal(dim, np.float32)
    y = rows_step(isa, x, None, norm)
    parts = [rows_step("generic", np.ascontiguousarray(part), None, norm) for part in np.split(x, heads, axis=1)]
    assert y.tobytes() == np.concatenate(parts, axis=1).tobytes()
    assert np.allclose(y, reference.rms_norm(x, norm, 1e-5), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_embeddings_are_scaled(isa: str) -> None:
    table = np.random.default_rng(0).standard_normal((7, 21), np.float32)
    program = native.Program(16)
    program.embed(native.DenseWeight(table, "float32"), external(OUTPUT, 21), 3.3)
    ids = np.array([6, 0, 3], np.int32)
    batch = (ids, ids * 0, ids * 0, np.array([0, 3], np.int32), np.zeros((1, 1), np.int32))
    y = np.empty((3, 21), np.float32)
    native.Executor(isa, 1).run(program, batch, None, y)
    assert y.tobytes() == (table[ids] * np.float32(3.3)).tobytes()


def test_silu_at_the_ends_of_its_range() -> None:
    x = np.array([[-200, -90, -87, 0, 87, 90, 200, 1e-30, 1, 1, 1, 1, 1, 1, 1, 1]], np.float32)
    y = rows_step(ISAS[0], x, "silu", None)
    assert np.isfinite(y).all()
    assert y[0, 4:7].tolist() == [87, 90, 200]
    assert abs(y[0, :3]).max() < 1e-30


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(1, 1, 1), (9, 33, 3), (40, 64, 9), (17, 100, 1)])
def test_dense(isa: str, dtype: str, rows: int, columns: int, tokens: int) -> None:
    rng = np.random.default_rng(rows)
    weights, x = rng.standard_normal((rows, columns), np.float32), rng.standard_normal((tokens, columns), np.float32)
    exact, data = weights, weights
    if dtype == "float16":
        exact, data = weights.astype(np.float16).astype(np.float32), weights.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        exact = reference.to_bfloat16(weights)
        data = (exact.view(np.uint32) >> 16).astype(np.uint16)
    weight = native.DenseWeight(data, dtype)

    def y(path: str, threads: int) -> Floats:
        program = native.Program(16)
        program.dense(weight, external(INPUT, columns), external(OUTPUT, rows), None)
        return run(program, path, x, rows, threads)

    assert np.allclose(y(isa, 1), x @ exact.T, rtol=1e-5, atol=1e-5)
    assert y(isa, 2).tobytes() == y("generic", 1).tobytes()
    one_by_one = np.concatenate([y(isa, 1)[i : i + 1] for i in range(tokens)])
    assert one_by_one.tobytes() == y(isa, 1).tobytes()


def attend(
    isa: str,
    cache_dtype: str,
    qkv: Floats,
    heads: int,
    kv_heads: int,
    dim: int,
    threads: int,
    window: int = 0,
    num_alone: int = 0,
) -> Floats:
    """One sequence of len(qkv) tokens in scattered blocks, the last `num_alone` in a step each; no rotation."""
    tokens, width = qkv.shape
    cache = native.Cache(cache_dtype, 1, kv_heads, dim)
    num_blocks = -(-tokens // native.BLOCK_TOKENS)
    cache.reserve(2 * num_blocks + 1)
    copy = native.DenseWeight(np.eye(width, dtype=np.float32), "float32")
    stride, queries, keys = -(-width // 16) * 16, heads * dim, kv_heads * dim
    program = native.Program(stride + -(-dim // 16) * 16)
    angles = (ARENA, stride, -(-dim // 16) * 16, 0, dim)
    q, k, v = ((ARENA, 0, stride, c, w) for c, w in ((0, queries), (queries, keys), (queries + keys, keys)))
    program.rotations([0.0] * (dim // 2), angles)
    program.dense(copy, external(INPUT, width), (ARENA, 0, stride, 0, width), None)
    program.rope_write(cache, 0, q, k, v, angles)
    program.attend(cache, 0, q, external(OUTPUT, queries), 1 / np.sqrt(dim), window)
    position = np.arange(tokens, dtype=np.int32)
    table = np.arange(num_blocks, dtype=np.int32)[::-1] * 2 + 1
    slots = table[position // native.BLOCK_TOKENS] * native.BLOCK_TOKENS + position % native.BLOCK_TOKENS
    table = np.ascontiguousarray(table[None])

    def step(a: int, b: int) -> Floats:
        arrays = (position[a:b] * 0, position[a:b], slots[a:b], np.array([0, b - a], np.int32), table)
        return run(program, isa, qkv[a:b], queries, threads, arrays)

    return np.concatenate([step(a, b) for a, b in pairwise([0, *range(tokens - num_alone, tokens + 1)]) if a < b])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 2), (33, 4, 2, 16), (70, 5, 1, 24), (256, 2, 2, 8), (600, 3, 1, 32), (300, 8, 2, 64)],
)
@pytest.mark.parametrize("window", [0, 5, 64, 300])
def test_attention(isa: str, cache_dtype: str, tokens: int, heads: int, kv_heads: int, dim: int, window: int) -> None:
    qkv = np.random.default_rng(tokens).standard_normal((tokens, (heads + 2 * kv_heads) * dim), np.float32)
    y = attend(isa, cache_dtype, qkv, heads, kv_heads, dim, 2, window)
    q, k, v = np.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=1)
    q, k, v = (x.reshape(tokens, -1, dim) for x in (q, k, v))
    k, v = reference.ROUNDINGS[cache_dtype](k), reference.ROUNDINGS[cache_dtype](v)
    expected = reference.attention(q, k, v, np.arange(tokens), dim**-0.5, window, cache_dtype).reshape(tokens, -1)
    # a weight at a tie may fall to either side, and an int8 code too
    ties = {"float32": 0.0, "bfloat16": 2**-8, "int8": 2e-2}[cache_dtype]
    assert np.allclose(y, expected, rtol=1e-4, atol=max(2e-6, ties * np.abs(v).max() / 2))
    assert np.median(np.abs(y - expected)) < 2e-6
    assert y.tobytes() == attend("generic", cache_dtype, qkv, heads, kv_heads, dim, 1, window).tobytes()
    # threads share a token's segments
    assert y.tobytes() == attend(isa, cache_dtype, qkv, heads, kv_heads, dim, 2, window, num_alone=1).tobytes()


def test_rotation_is_right_to_the_last_place() -> None:
    frequencies = [1.0, 0.1234567, 3.3e-5, 2.5]
    program = native.Program(16)
    program.rotations(frequencies, external(OUTPUT, 8))
    positions = np.array([0, 1, 2, 3, 4, 100, 4095, 131071], np.int32)
    arrays = (positions * 0, positions, positions * 0, np.arange(9, dtype=np.int32), np.zeros((8, 1), np.int32))
    output = np.empty((8, 8), np.float32)
    native.Executor(ISAS[0], 1).run(program, arrays, None, output)
    angles = (positions.astype(np.float32)[:, None] * np.array(frequencies, np.float32)).astype(np.float64)
    assert np.array_equal(output, np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: [-1]}, "token id"),
        ({0: [9]}, "token id"),
        ({1: [-1]}, "position"),
        ({1: [64]}, "position"),
        ({2: [64]}, "slot"),
        ({3: [0, 2]}, "starts"),
        ({3: [1, 1]}, "starts"),
        ({4: [[7]]}, "block"),
    ],
)
def test_a_batch_that_points_outside_is_refused(change: dict[int, list[int]], message: str) -> None:
    cache = native.Cache("float32", 1, 1, 16)
    cache.reserve(2)
    program = native.Program(64)
    x = (ARENA, 0, 48, 0, 48)
    program.embed(native.DenseWeight(np.zeros((9, 48), np.float32), "float32"), x)
    q, k, v = ((ARENA, 0, 48, c, 16) for c in (0, 16, 32))
    program.rotations([0.0] * 8, (ARENA, 48, 16, 0, 16))
    program.rope_write(cache, 0, q, k, v, (ARENA, 48, 16, 0, 16))
    program.attend(cache, 0, q, external(OUTPUT, 16), 1.0)
    arrays = [np.array(a, np.int32) for a in ([0], [0], [0], [0, 1], [[0]])]
    native.Executor(ISAS[0], 1).run(program, tuple(arrays), None, np.zeros((1, 16), np.float32))
    for index, values in change.items():
        arrays[index] = np.array(values, np.int32)
    with pytest.raises(ValueError, match=message):
        native.Executor(ISAS[0], 1).run(program, tuple(arrays), None, np.zeros((1, 16), np.float32))


def test_shapes_are_checked_at_the_border() -> None:
    weight = native.TernaryWeight(32, [8])
    with pytest.raises(ValueError, match="wrong shape"):
        weight.pack(0, np.zeros((8, 31), np.uint8), "codes", 1.0)
    program = native.Program(16)
    with pytest.raises(ValueError, match="outside the arena"):
        program.ternary(weight, (16, 32), external(OUTPUT, 8), None)
    with pytest.raises(ValueError, match="another width"):
        program.dense(
            native.DenseWeight(np.zeros((4, 5), np.float32), "float32"), external(INPUT, 6), external(OUTPUT, 4), None
        )
    with pytest.raises(ValueError, match="instruction set"):
        native.Executor("z80", 1)

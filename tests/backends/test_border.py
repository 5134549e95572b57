"""The border of the kernels: whatever Python passes, the process lives, and who asks wrongly hears why."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from bitnet_inference import native

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork() here")

ISA = native.isas()[0]
ARENA, INPUT, OUTPUT = 0, 1, 2
MAX = 2**63 - 1
Rows = tuple[int, int, int, int, int]
ROW, OUT = (ARENA, 0, 16, 0, 16), (OUTPUT, 0, 16, 0, 16)


def rows_of(base: int, width: int) -> Rows:
    return base, 0, width, 0, width


def dense(rows: int, columns: int) -> native.DenseWeight:
    return native.DenseWeight(np.ones((rows, columns), np.float32), "float32")


def doubling(width: int = 16) -> native.Program:
    """output = input + input."""
    program = native.Program(0)
    program.add(rows_of(INPUT, width), rows_of(INPUT, width), rows_of(OUTPUT, width))
    return program


def attention(cache: native.Cache, out: Rows = OUT) -> native.Program:
    program = native.Program(80)
    q, k, v = ((ARENA, 0, 48, column, 16) for column in (0, 16, 32))
    program.embed(dense(9, 48), rows_of(ARENA, 48))
    program.rotations([0.0] * 8, (ARENA, 48, 16, 0, 16))
    program.rope_write(cache, 0, q, k, v, (ARENA, 48, 16, 0, 16))
    program.attend(cache, 0, q, out, 1.0)
    return program


def selecting(cache: native.Cache) -> native.Program:
    """The same for tokens that are wanted."""
    program = attention(cache, (ARENA, 64, 16, 0, 16))
    program.select([(ARENA, 0, 48, 0, 48)])
    program.attend(cache, 0, (ARENA, 0, 48, 0, 16), OUT, 1.0)
    return program


def one_token(position: int = 0, table_width: int = 1) -> tuple[np.ndarray, ...]:
    table = np.zeros((1, table_width), np.int32)
    return (*(np.array(a, np.int32) for a in ([0], [position], [0], [0, 1])), table)


@pytest.mark.parametrize(
    "rows",
    [
        (ARENA, 0, MAX, MAX - 8, 16),
        (ARENA, MAX - 8, 16, 0, 16),
        (ARENA, 49, 16, 0, 16),
        (ARENA, -16, 16, 0, 16),
        (ARENA, 0, 16, -1, 16),
        (ARENA, 0, -16, 0, 16),
        (OUTPUT, 0, 1 << 40, 0, 16),
    ],
)
def test_rows_that_lie_outside(rows: Rows) -> None:
    with pytest.raises(ValueError, match=r"outside|2\^30"):
        native.Program(64).add(ROW, ROW, rows)


@pytest.mark.parametrize(
    "codes", [(MAX - 15, 16), (-16, 16), (0, 24), (0, 0), (1, 16), (64, 16), (0, 320), (0, 1 << 31)]
)
def test_codes_that_lie_outside(codes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="codes"):
        native.Program(64).rows_to_codes(ROW, None, 0, None, 0.0, codes)


@pytest.mark.parametrize("size", [-1, 1 << 62, MAX])
def test_an_impossible_arena(size: int) -> None:
    with pytest.raises(ValueError, match="arena"):
        native.Program(size)


@pytest.mark.parametrize(
    "write",
    [
        lambda p, x: p.embed(dense(2, 16), x),
        lambda p, x: p.rotations([1.0] * 8, x),
        lambda p, x: p.add(ROW, ROW, x),
        lambda p, x: p.bias(ROW, np.ones(16, np.float32), x),
        lambda p, x: p.dense(dense(16, 16), ROW, x, None),
        lambda p, x: p.rows_to_floats(ROW, None, 0, np.ones(16, np.float32), 1e-5, x),
        lambda p, x: p.rope_write(native.Cache("float32", 1, 1, 16), 0, x, ROW, ROW, ROW),
        lambda p, x: p.rope_write(native.Cache("float32", 1, 1, 16), 0, ROW, x, ROW, ROW),
        lambda p, x: p.attend(native.Cache("float32", 1, 1, 16), 0, ROW, x, 1.0),
    ],
)
def test_the_input_is_never_written(write: Callable[[native.Program, Rows], None]) -> None:
    with pytest.raises(ValueError, match="input cannot be written"):
        write(native.Program(64), (INPUT, 0, 16, 0, 16))


@pytest.mark.parametrize("width", [0, 15, 17])
def test_a_bias_is_as_wide_as_its_rows(width: int) -> None:
    with pytest.raises(ValueError, match="a bias has as many numbers"):
        native.Program(64).bias(ROW, np.ones(width, np.float32), OUT)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("width", [1, 16, 37])
def test_a_bias_is_added_to_every_row_and_to_its_columns_alone(isa: str, num_tokens: int, width: int) -> None:
    x = np.random.default_rng(width).normal(0, 3, (num_tokens, width + 9)).astype(np.float32)
    bias, found = np.full(width, 1 / 3, np.float32), np.zeros((num_tokens, width + 9), np.float32)
    program = native.Program(0)
    program.bias((INPUT, 0, width + 9, 5, width), bias, (OUTPUT, 0, width + 9, 2, width))
    native.Executor(isa, 3).run(program, None, x, found)
    expected = np.zeros_like(found)
    expected[:, 2 : 2 + width] = x[:, 5 : 5 + width] + bias
    assert found.tobytes() == expected.tobytes()


def test_rotations_need_positions() -> None:
    program = doubling()
    program.rotations([1.0] * 8, OUT)
    x = np.zeros((1, 16), np.float32)
    with pytest.raises(ValueError, match="needs a batch"):
        native.Executor(ISA, 1).run(program, None, x, x.copy())


@pytest.mark.parametrize("frequency", [float("nan"), float("inf"), -1.0, 1e30])
def test_a_frequency_that_no_model_has(frequency: float) -> None:
    with pytest.raises(ValueError, match="frequency"):
        native.Program(0).rotations([frequency] * 8, OUT)


def test_two_tables_of_different_vocabularies() -> None:
    program = native.Program(64)
    program.embed(dense(2, 16), ROW)
    with pytest.raises(ValueError, match="one vocabulary"):
        program.embed(dense(200000, 16), OUT)


def test_a_program_that_has_run_takes_no_more_steps() -> None:
    """Another thread may be going through its steps."""
    program, x = doubling(), np.ones((1, 16), np.float32)
    native.Executor(ISA, 1).run(program, None, x, x.copy())
    with pytest.raises(ValueError, match="no more steps"):
        program.add(OUT, OUT, OUT)


@pytest.mark.parametrize("position", [-1, 2**30, 2**31 - 1])
def test_a_position_far_outside(position: int) -> None:
    program = native.Program(0)
    program.rotations([1.0] * 8, OUT)
    with pytest.raises(ValueError, match="position"):
        native.Executor(ISA, 1).run(program, one_token(position), None, np.zeros((1, 16), np.float32))


def test_what_is_not_a_weight_or_a_cache() -> None:
    program = native.Program(64)
    never_made = native.DenseWeight.__new__(native.DenseWeight)
    for wrong in (None, 3, native.Cache("float32", 1, 1, 16), never_made):
        for write in (
            lambda x: program.embed(x, ROW),
            lambda x: program.dense(x, ROW, OUT, None),
            lambda x: program.ternary(x, (0, 16), OUT, None),
            lambda x: native.Screen(x, native.Executor(ISA, 1)),
        ):
            with pytest.raises(TypeError, match=r"belongs here, not|incompatible"):
                write(wrong)
    with pytest.raises((TypeError, RuntimeError)):
        program.attend(None, 0, ROW, OUT, 1.0)


def test_a_weight_that_was_packed_in_part() -> None:
    weight = native.TernaryWeight(16, [8, 8])
    codes = np.zeros((8, 16), np.uint8)
    weight.pack(0, codes, "codes", 1.0)
    with pytest.raises(ValueError, match="never packed"):
        native.Program(64).ternary(weight, (0, 16), OUT, None)
    weight.pack(1, codes, "codes", 1.0)
    program = native.Program(64)
    program.rows_to_codes(ROW, None, 0, None, 0.0, (0, 16))
    program.ternary(weight, (0, 16), OUT, None)
    with pytest.raises(ValueError, match="no ternary code"):
        weight.pack(1, codes + 7, "codes", 1.0)
    with pytest.raises(ValueError, match="never packed"):
        native.Program(64).ternary(weight, (0, 16), OUT, None)


def test_a_weight_is_packed_whenever_a_program_runs_with_it() -> None:
    weight, codes, found = packed(16), np.ones((1, 16), np.uint8), np.zeros((1, 1), np.float32)
    program = native.Program(64)
    program.rows_to_codes((INPUT, 0, 16, 0, 16), None, 0, None, 0.0, (0, 16))
    program.ternary(weight, (0, 16), (OUTPUT, 0, 1, 0, 1), None)
    with pytest.raises(ValueError, match="no ternary code"):
        weight.pack(0, codes + 7, "codes", 1.0)
    with pytest.raises(ValueError, match="never packed"):
        native.Executor(ISA, 1).run(program, None, np.ones((1, 16), np.float32), found)
    weight.pack(0, codes, "codes", 0.5)
    native.Executor(ISA, 1).run(program, None, np.ones((1, 16), np.float32), found)
    assert found == 8


def packed(columns: int, format: str = "u2") -> native.TernaryWeight:
    """One row of ones."""
    weight = native.TernaryWeight(columns, [1], format)
    weight.pack(0, np.ones((1, columns), np.uint8), "codes", 1.0)
    return weight


@pytest.mark.parametrize("written", [None, (16, 16), (0, 32)])
def test_a_product_takes_codes_that_a_step_has_written(written: tuple[int, int] | None) -> None:
    """What products in pairs count on stands beside them; of wider rows it would be that of other columns."""
    width = 16 if written is None else written[1]
    program = native.Program(128)
    if written is not None:
        program.rows_to_codes((INPUT, 0, width, 0, width), None, 0, None, 0.0, written)
    with pytest.raises(ValueError, match="that a step has written"):
        program.ternary(packed(16), (0, width), (OUTPUT, 0, 1, 0, 1), None)


@pytest.mark.parametrize("format", ["u2", "t5"])
def test_codes_that_another_step_overwrites(format: str) -> None:
    """Whatever stands in the list of their pairs, nothing behind the matrix is read, wrong as the sum is."""
    width, num_tokens = 112, 9
    listed = np.array([15 | 60001 << 16, *[60001 * 0x10001] * 8], np.uint32).view(np.float32)
    x = np.zeros((num_tokens, 2 * width), np.float32)
    x[:, :width] = np.resize(listed, width)
    program, executor = native.Program(width), native.Executor(ISA, 1)
    program.rows_to_codes((INPUT, 0, 2 * width, 0, 80), None, 0, None, 0.0, (0, 80))
    program.add((INPUT, 0, 2 * width, 0, width), (INPUT, 0, 2 * width, width, width), (ARENA, 0, width, 0, width))
    program.ternary(packed(80, format), (0, 80), (OUTPUT, 0, 1, 0, 1), None)
    executor.run(program, None, x, np.zeros((num_tokens, 1), np.float32))


@pytest.mark.parametrize("group_columns", [-64, 1, 16, 32, 96, 256, MAX])
def test_groups_of_impossible_sizes(group_columns: int) -> None:
    with pytest.raises(ValueError, match="64 or 128 columns"):
        native.TernaryWeight(1024, [8], "u2", group_columns)


def test_groups_are_u2() -> None:
    with pytest.raises(ValueError, match="are u2"):
        native.TernaryWeight(1024, [8], "t5", 64)
    weight = native.TernaryWeight(64, [8], "u2", 64)
    weight.pack(0, np.zeros((8, 64), np.uint8), "codes", np.ones((8, 1), np.float32))
    with pytest.raises(ValueError, match="whole steps"):
        native.Program(64).ternary(weight, (0, 48), (OUTPUT, 0, 8, 0, 8), None)


def test_scales_of_groups_are_what_they_are_said_to_be() -> None:
    codes, scales = np.zeros((8, 100), np.uint8), np.ones((8, 2), np.float32)
    weight, plain = native.TernaryWeight(100, [8], "u2", 64), native.TernaryWeight(100, [8])
    weight.pack(0, codes, "codes", scales)
    for shape in ((8, 1), (7, 2), (2, 8), (8, 3), (0, 2), (1, 1)):
        with pytest.raises(ValueError, match=r"scales are float32 \[rows, groups"):
            weight.pack(0, codes, "codes", np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=r"pass float32 \[rows, groups\]"):
        weight.pack(0, codes, "codes", 1.0)
    with pytest.raises(ValueError, match="pass a number"):
        plain.pack(0, codes, "codes", scales)
    for array in (
        scales.astype(np.float64),
        np.asfortranarray(scales),
        np.ones((8, 4), np.float32)[:, ::2],
        scales[None],
    ):
        with pytest.raises(TypeError):
            weight.pack(0, codes, "codes", array)
    odd = np.zeros(8 * 2 * 4 + 4, np.uint8)[1:65].view(np.float32).reshape(8, 2)
    with pytest.raises(ValueError, match="address"):
        weight.pack(0, codes, "codes", odd)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_of_a_group_is_finite(value: float) -> None:
    weight, scales = native.TernaryWeight(100, [8], "u2", 64), np.ones((8, 2), np.float32)
    codes = np.zeros((8, 100), np.uint8)
    weight.pack(0, codes, "codes", scales)
    scales[5, 1] = value
    with pytest.raises(ValueError, match="row 5, group 1 is no finite number"):
        weight.pack(0, codes, "codes", scales)
    with pytest.raises(ValueError, match="never packed"):
        native.Program(64).ternary(weight, (0, 112), (OUTPUT, 0, 8, 0, 8), None)


def test_scales_of_rows_are_what_they_are_said_to_be() -> None:
    codes, scales = np.zeros((8, 100), np.uint8), np.ones(8, np.float32)
    weight, grouped = native.TernaryWeight(100, [8]), native.TernaryWeight(100, [8], "u2", 64)
    weight.pack(0, codes, "codes", scales)
    for length in (0, 1, 7, 9):
        with pytest.raises(ValueError, match=r"scales of rows are float32 \[rows\]"):
            weight.pack(0, codes, "codes", np.ones(length, np.float32))
    with pytest.raises(ValueError, match=r"pass float32 \[rows, groups\]"):
        grouped.pack(0, codes, "codes", scales)
    for array in (scales.astype(np.float64), np.ones(16, np.float32)[::2]):
        with pytest.raises(TypeError):
            weight.pack(0, codes, "codes", array)
    odd = np.zeros(8 * 4 + 4, np.uint8)[1:33].view(np.float32)
    with pytest.raises(ValueError, match="address"):
        weight.pack(0, codes, "codes", odd)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_of_a_row_is_finite(value: float) -> None:
    weight, scales = native.TernaryWeight(16, [8]), np.ones(8, np.float32)
    codes = np.zeros((8, 16), np.uint8)
    weight.pack(0, codes, "codes", scales)
    scales[5] = value
    with pytest.raises(ValueError, match="row 5 is no finite number"):
        weight.pack(0, codes, "codes", scales)
    with pytest.raises(ValueError, match="never packed"):
        native.Program(64).ternary(weight, (0, 16), (OUTPUT, 0, 8, 0, 8), None)


def test_the_sums_of_groups_have_room_of_their_own() -> None:
    """The caller's arena ends before them: nothing else may be laid out there."""
    weight = native.TernaryWeight(100, [8], "u2", 64)
    weight.pack(0, np.ones((8, 100), np.uint8), "codes", np.ones((8, 2), np.float32))
    program = native.Program(48)
    program.rows_to_codes(rows_of(INPUT, 100), None, 0, None, 0.0, (0, 112))
    program.ternary(weight, (0, 112), rows_of(OUTPUT, 8), None)
    with pytest.raises(ValueError, match="outside the arena"):
        program.add((INPUT, 0, 100, 0, 2), (INPUT, 0, 100, 0, 2), (ARENA, 48, 2, 0, 2))
    x, y = np.ones((5, 100), np.float32), np.zeros((5, 8), np.float32)
    native.Executor(ISA, 1).run(program, None, x, y)
    assert np.allclose(y, 100)


@pytest.mark.parametrize("columns", [MAX, 262145, 0, -5, -MAX])
def test_a_table_of_codes_of_impossible_width(columns: int) -> None:
    for layout in ("codes", "signs"):
        with pytest.raises(ValueError, match="1 to 262144 columns"):
            native.DenseWeight.of_codes(np.zeros((2, 0), np.uint8), layout, np.zeros((2, 0), np.float32), columns, 64)


@pytest.mark.parametrize("rows", [[1 << 62], [1 << 62, 1 << 62], [1 << 30] * 3, [-1], [0], []])
def test_an_impossible_ternary_weight(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"row|part"):
        native.TernaryWeight(262144, rows)


def test_more_memory_than_there_is() -> None:
    with pytest.raises(MemoryError):
        native.TernaryWeight(262144, [1 << 30])
    with pytest.raises(MemoryError):
        native.Cache("float32", 65536, 1024, 65536).reserve((1 << 26) - 1)


@pytest.mark.parametrize("shape", [(1, 1, 1 << 30), (1, 1 << 30, 16), (1 << 30, 1, 16), (1, 1, 3), (0, 1, 16)])
def test_an_impossible_cache(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cache"):
        native.Cache("float32", *shape)


def test_memory_is_promised_to_a_cache_until_it_is_written_to() -> None:
    cache, before = native.Cache("float32", 4, 4, 128), native.promised_bytes()
    cache.reserve(64)
    whole = cache.block_bytes * cache.num_blocks
    assert native.promised_bytes() == before + whole and native.promised_bytes(cache) == before
    for block in range(1, 64):
        cache.copy(0, block)
    assert native.promised_bytes() < before + whole / 8
    cache.reserve(64)
    del cache
    assert native.promised_bytes() == before


def test_a_cache_that_could_not_be_reserved_is_empty() -> None:
    cache = native.Cache("float32", 65536, 1, 16)
    program, out = attention(cache), np.zeros((1, 16), np.float32)
    with pytest.raises(ValueError, match="slot"):
        native.Executor(ISA, 1).run(program, one_token(), None, out)
    cache.reserve(2)
    native.Executor(ISA, 1).run(program, one_token(), None, out)
    with pytest.raises(MemoryError):
        cache.reserve((1 << 26) - 1)
    assert cache.num_blocks == 0
    with pytest.raises(ValueError, match="slot"):
        native.Executor(ISA, 1).run(program, one_token(), None, out)
    with pytest.raises(ValueError, match="block"):
        cache.copy(0, 1)


def test_arrays_are_what_they_are_said_to_be() -> None:
    """None is converted in silence: what is written into a copy is lost, and an id of 64 bits is another in 32."""
    executor, x = native.Executor(ISA, 1), np.ones((4, 16), np.float32)
    wrong = [
        x.astype(np.float64),
        np.ones((4, 32), np.float32)[:, ::2],
        np.asfortranarray(x),
        x[0],
        x.astype(">f4"),
        x.astype(np.complex64),
    ]
    for array in wrong:
        with pytest.raises(TypeError):
            executor.run(doubling(), None, array, x.copy())
        with pytest.raises(TypeError):
            executor.run(doubling(), None, x, array)
    read_only = x.copy()
    read_only.flags.writeable = False
    executor.run(doubling(), None, read_only, x.copy())
    with pytest.raises(TypeError):
        executor.run(doubling(), None, x, read_only)
    program = native.Program(0)
    program.rotations([1.0] * 8, OUT)
    batch = one_token()
    for i in range(5):
        with pytest.raises(TypeError):
            executor.run(program, (*batch[:i], batch[i].astype(np.int64), *batch[i + 1 :]), None, x[:1].copy())


def test_none_for_an_array_of_the_batch() -> None:
    cache = native.Cache("float32", 1, 1, 16)
    cache.reserve(2)
    program, batch = attention(cache), one_token()
    for i in range(5):
        with pytest.raises(ValueError, match="None stands where"):
            native.Executor(ISA, 1).run(
                program, (*batch[:i], None, *batch[i + 1 :]), None, np.zeros((1, 16), np.float32)
            )


def test_what_runs_in_the_background_is_a_whole_model_in_one_cache() -> None:
    cache, other, executor = (
        native.Cache("float32", 1, 1, 16),
        native.Cache("float32", 1, 1, 16),
        native.Executor(ISA, 2),
    )
    for each in (cache, other):
        each.reserve(2)
    out, background = np.zeros((1, 16), np.float32), native.Background(executor)
    with pytest.raises(TypeError, match="Executor belongs here"):
        native.Background(cache)
    background.go_on(1.0)
    background.run_beside()
    executor.run(attention(cache), one_token(), None, out)
    program = native.Program(0)
    program.rotations([1.0] * 8, OUT)
    for wrong, batch, output, why in [
        (program, one_token(), out, "with a cache"),
        (attention(cache), one_token(position=native.BLOCK_TOKENS), out, "outside its sequence's block table"),
        (attention(cache), one_token(), np.zeros((2, 16), np.float32), "one row a token"),
        (attention(cache), one_token(), np.zeros((1, 32), np.float32), "another width"),
    ]:
        with pytest.raises(ValueError, match=why):
            background.begin(wrong, batch, output)
        assert not background.is_under_way
    background.begin(attention(cache), one_token(), found := np.zeros((1, 16), np.float32))
    background.run_beside()
    with pytest.raises(ValueError, match="the same cache"):
        executor.run(attention(other), one_token(), None, out)
    background.go_on(float("inf"))
    assert not background.is_under_way and found.tobytes() == out.tobytes() and out.any()


def test_a_cache_that_shrinks_under_what_runs_in_the_background() -> None:
    cache, executor, out = native.Cache("float32", 1, 1, 16), native.Executor(ISA, 2), np.zeros((1, 16), np.float32)
    cache.reserve(4)
    ids, positions, _, starts, table = one_token()
    background = native.Background(executor)
    background.begin(attention(cache), (ids, positions, np.array([3 * 32], np.int32), starts, table + 3), out)
    cache.reserve(1)
    with pytest.raises(ValueError, match="outside the cache"):
        background.go_on(float("inf"))
    background.forget()
    background.go_on(float("inf"))
    background.begin(attention(cache), one_token(), out)
    background.run_beside()
    del background  # nothing runs beside others any more
    executor.run(attention(cache), one_token(), None, out)
    assert out.any()


@pytest.mark.parametrize(
    ("wanted", "rows", "why"),
    [
        ([0, 0], 2, "ascend"),
        ([1, 0], 2, "ascend"),
        ([-1], 1, "of the batch"),
        ([2], 1, "of the batch"),
        ([0, 1, 2], 3, "than there are"),
        ([0], 2, "one row a token"),
        ([0, 1], 1, "one row a token"),
    ],
)
def test_wanted_tokens_that_are_none(wanted: list[int], rows: int, why: str) -> None:
    cache = native.Cache("float32", 1, 1, 16)
    cache.reserve(2)
    at, table = np.arange(2, dtype=np.int32), np.zeros((1, 1), np.int32)
    batch = (at, at, at, np.array([0, 2], np.int32), table)
    out = np.zeros((rows, 16), np.float32)
    with pytest.raises(ValueError, match=why):
        native.Executor(ISA, 1).run(selecting(cache), batch, None, out, None, np.array(wanted, np.int32))


def test_a_program_that_computes_all_to_the_end_takes_no_wanted_tokens() -> None:
    cache = native.Cache("float32", 1, 1, 16)
    cache.reserve(2)
    x, wanted = np.zeros((1, 16), np.float32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="all to the end"):
        native.Executor(ISA, 1).run(attention(cache), one_token(), None, x, None, wanted)
    with pytest.raises(ValueError, match="of a batch"):
        native.Executor(ISA, 1).run(doubling(), None, x, x.copy(), None, wanted)


@pytest.mark.parametrize(
    "kept",
    [
        [(INPUT, 0, 16, 0, 16)],
        [(OUTPUT, 0, 16, 0, 16)],
        [(ARENA, 0, 16, 8, 8)],
        [(ARENA, 0, 16, 0, 16), (ARENA, 8, 16, 0, 16)],
        [(ARENA, 16, 16, 0, 16), (ARENA, 0, 16, 0, 16)],
        [(ARENA, 56, 16, 0, 16)],
    ],
)
def test_rows_that_cannot_go_on(kept: list[Rows]) -> None:
    with pytest.raises(ValueError, match="arena"):
        native.Program(64).select(kept)


def test_what_is_written_before_some_are_selected_is_not_the_output() -> None:
    """Which has no rows for the others: they were written behind its end."""
    program = doubling()
    with pytest.raises(ValueError, match="a row for each selected token"):
        program.select([])


def test_a_program_selects_once() -> None:
    program = native.Program(64)
    program.select([])
    with pytest.raises(ValueError, match="once"):
        program.select([])


def test_what_needs_all_tokens_comes_before_some_are_selected() -> None:
    """Their ids and slots are not chosen from: the process ended."""
    program, row = native.Program(64), (ARENA, 0, 16, 0, 16)
    program.select([])
    with pytest.raises(ValueError, match="before some of them are selected"):
        program.embed(dense(2, 16), row)
    with pytest.raises(ValueError, match="before some of them are selected"):
        program.rope_write(native.Cache("float32", 1, 1, 16), 0, row, row, row, row)


def test_arrays_at_odd_addresses() -> None:
    odd = np.zeros(4 * 16 * 4 + 4, np.uint8)[1 : 1 + 4 * 16 * 4].view(np.float32).reshape(4, 16)
    x = np.ones((4, 16), np.float32)
    with pytest.raises(ValueError, match="address"):
        native.Executor(ISA, 1).run(doubling(), None, odd, x)
    with pytest.raises(ValueError, match="address"):
        native.Executor(ISA, 1).run(doubling(), None, x, odd)
    with pytest.raises(ValueError, match="address"):
        native.DenseWeight(odd, "float32")


def rule_of(vocab_size: int) -> native.SamplingRule:
    return native.SamplingRule(
        vocab_size, temperature=0.7, top_k=0, top_p=0.9, min_p=0.0, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, bias_ids=[3], bias_values=[0.3], end_ids=[],
    )  # fmt: skip


def at_odd_address(array: np.ndarray) -> np.ndarray:
    odd = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    odd[...] = array
    return odd


def test_what_is_sampled_lies_at_addresses_for_numbers() -> None:
    sampler, executor, rule = native.RowSampler(64), native.Executor(ISA, 1), rule_of(64)
    row, ids, mask = np.zeros(64, np.float32), np.arange(64, dtype=np.int32), np.full(2, 2**32 - 1, np.uint32)
    odd_row, odd_ids, odd_mask = at_odd_address(row), at_odd_address(ids), at_odd_address(mask)
    for wrong in (
        lambda: sampler.sample(odd_row, rule, ids, 4, False, 0, 0, 0),
        lambda: sampler.sample(row, rule, odd_ids, 4, False, 0, 0, 0),
        lambda: sampler.sample(row, rule, ids, 4, False, 0, 0, 0, odd_mask),
        lambda: sampler.sample_rows(executor, odd_row[None], [(0, rule, ids, 4, False, 0, 0, 0)]),
        lambda: sampler.sample_rows(executor, row[None], [(0, rule, odd_ids, 4, False, 0, 0, 0)]),
        lambda: sampler.sample_few(odd_ids, row, rule, 0, 0, 0),
        lambda: sampler.sample_few(ids, odd_row, rule, 0, 0, 0),
        lambda: sampler.score(odd_row, 3, 2),
        lambda: sampler.log_probabilities(odd_row[None], ids[:1]),
        lambda: sampler.log_probabilities(row[None], odd_ids[:1]),
    ):
        with pytest.raises(ValueError, match="address"):
            wrong()


def test_no_tokens_to_choose_from() -> None:
    none = np.empty(0, np.int32), np.empty(0, np.float32)
    assert native.RowSampler(64).sample_few(*none, rule_of(64), 0, 0, 0) == -2


def test_dense_weights_of_other_numbers() -> None:
    for array, dtype in ((np.zeros((2, 4), np.int32), "float32"), (np.zeros((2, 4), np.float16), "bfloat16")):
        with pytest.raises(ValueError, match="dense matrix"):
            native.DenseWeight(array, dtype)
    with pytest.raises((TypeError, ValueError)):
        native.DenseWeight(np.zeros((2, 4), ">f4"), "float32")
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="dense matrix"):
            native.DenseWeight(np.zeros(shape, np.float32), "float32")


def test_two_threads_share_an_executor_a_cache_and_a_sampler() -> None:
    """They take turns; another thread reserves anew meanwhile."""
    executor, cache = native.Executor(ISA, 2), native.Cache("float32", 1, 1, 16)
    cache.reserve(4)
    program, small = attention(cache), doubling(4096)
    sampler = native.RowSampler(1000)
    logits = np.arange(1000, dtype=np.float32) / 100
    expected = sampler.score(logits, 5, 900)
    failures: list[BaseException] = []

    def body(work: Callable[[], None]) -> None:
        try:
            for _ in range(300):
                work()
        except BaseException as error:
            failures.append(error)

    def attend() -> None:
        out = np.zeros((1, 16), np.float32)
        executor.run(program, one_token(), None, out)
        assert (out == 1).all()

    def double() -> None:
        x, out = np.ones((7, 4096), np.float32), np.zeros((7, 4096), np.float32)
        executor.run(small, None, x, out)
        assert (out == 2).all()

    def score() -> None:
        assert sampler.score(logits, 5, 900) == expected

    jobs = [attend, attend, double, score, score, lambda: cache.reserve(4), lambda: cache.copy(0, 1)]
    threads = [threading.Thread(target=body, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_many_best_tokens() -> None:
    logits = np.arange(100, dtype=np.float32)
    for num in (2**63, 2**64 - 1, 101):
        assert len(native.RowSampler(100).score(logits, 5, num)[1]) == 100


def set_rounding(mode: int) -> None:
    ctypes.CDLL(None).fesetround(mode)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the number of the rounding mode is Linux's")
def test_the_rounding_of_another_library_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((300, 64), np.float32), rng.standard_normal((1, 64)).astype(np.float32)
    rule = rule_of(300)

    def everything() -> tuple[object, ...]:
        executor, sampler = native.Executor(ISA, 2), native.RowSampler(300)
        head = native.DenseWeight(weights, "float32")
        ids, best, computed = native.Screen(head, executor).top(executor, x, 2)
        codes, scale = native.ternarize(weights, "float32")
        row = weights[:, 0].copy()
        tokens = [sampler.sample(row, rule, np.arange(9, dtype=np.int32), 4, False, s, 0, 0) for s in range(50)]
        scores = sampler.score(row, 5, 3), sampler.log_probabilities(row[None], np.array([5], np.int32))
        return ids.tobytes(), best.tobytes(), computed, codes.tobytes(), scale, tokens, scores

    upward = 0x400000 if os.uname().machine == "aarch64" else 0x800
    expected = everything()
    set_rounding(upward)
    try:
        found = everything()
    finally:
        set_rounding(0)
    assert found == expected


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_no_number(isa: str, value: float) -> None:
    """Int8 codes cannot say it; without care the row would look sound, and differ between instruction sets."""
    x = np.ones((3, 40), np.float32)
    x[1, 3], x[1, 0] = value, 1e30
    weight = native.TernaryWeight(40, [8])
    weight.pack(0, np.ones((8, 40), np.uint8), "codes", 1.0)
    program = native.Program(64)
    program.rows_to_codes(rows_of(INPUT, 40), None, 0, None, 0.0, (0, 48))
    program.ternary(weight, (0, 48), rows_of(OUTPUT, 8), None)
    y = np.zeros((3, 8), np.float32)
    native.Executor(isa, 1).run(program, None, x, y)
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("cache_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_token_that_is_not_finite_is_seen_by_those_behind_it(isa: str, cache_dtype: str, value: float) -> None:
    """And by nobody else: not by those before it, not by another sequence."""
    cache = native.Cache(cache_dtype, 1, 1, 16)
    cache.reserve(2)
    program = native.Program(64)
    table = np.ones((2, 48), np.float32)
    table[1, 32:] = value  # the values of token 1
    program.embed(native.DenseWeight(table, "float32"), rows_of(ARENA, 48))
    program.rotations([0.0] * 8, (ARENA, 48, 16, 0, 16))
    q, k, v = ((ARENA, 0, 48, column, 16) for column in (0, 16, 32))
    program.rope_write(cache, 0, q, k, v, (ARENA, 48, 16, 0, 16))
    program.attend(cache, 0, q, OUT, 1.0)
    lists = ([0, 1, 0, 0, 0], [0, 1, 2, 0, 1], [0, 1, 2, 32, 33], [0, 3, 5], [[0], [1]])
    y = np.zeros((5, 16), np.float32)
    native.Executor(isa, 1).run(program, tuple(np.array(a, np.int32) for a in lists), None, y)
    assert np.isfinite(y[[0, 3, 4]]).all()
    assert not np.isfinite(y[[1, 2]]).any()


def test_the_screen_near_the_ends_of_float32() -> None:
    """Products that underflow, and sums that overflow on their way: the exact head's rows all the same."""
    rng = np.random.default_rng(4)
    executor = native.Executor(ISA, 1)
    for scale_w, scale_x in ((1e-20, 1e-20), (1e-25, 1e-19), (1e-30, 1e-14), (1e-38, 1e-6), (1e19, 1e19), (1e36, 1.0)):
        weights = (rng.standard_normal((400, 48)) * scale_w).astype(np.float32)
        x = (rng.standard_normal((3, 48)) * scale_x).astype(np.float32)
        head = native.DenseWeight(weights, "float32")
        program = native.Program(0)
        program.dense(head, rows_of(INPUT, 48), rows_of(OUTPUT, 400), None)
        exact = np.zeros((3, 400), np.float32)
        executor.run(program, None, x, exact)
        ids, logits, _ = native.Screen(head, executor).top(executor, x, 3)
        finite = np.isfinite(exact).all(axis=1)
        order = np.argsort(-exact, axis=1, kind="stable")[:, :3]
        assert np.array_equal(ids[finite], order[finite])
        assert logits[finite].tobytes() == np.take_along_axis(exact, order, axis=1)[finite].tobytes()


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


UNSEEN_SEGMENTS = """
import numpy as np
from bitnet_inference import native

window, positions = WINDOW_AND_POSITIONS
cache, program = native.Cache("float32", 1, 1, 16), native.Program(64)
cache.reserve(1)
q, k, v, angles = *((0, 0, 48, column, 16) for column in (0, 16, 32)), (0, 48, 16, 0, 16)
program.embed(native.DenseWeight(np.ones((1, 48), np.float32), "float32"), (0, 0, 48, 0, 48))
program.rotations([0.0] * 8, angles)
program.rope_write(cache, 0, q, k, v, angles)
program.attend(cache, 0, q, (2, 0, 16, 0, 16), 1.0, window)
count = len(positions)
zeros, tables = np.zeros(count, np.int32), np.zeros((count, max(positions) // 32 + 1), np.int32)
batch = zeros, np.array(positions, np.int32), zeros, np.arange(count + 1, dtype=np.int32), tables
for isa in native.isas():
    native.Executor(isa, 4).run(program, batch, None, np.zeros((count, 16), np.float32))
print("alive")
"""


@pytest.mark.parametrize("case", [(64, [(1 << 24) + 63]), (0, [1 << 24, 40])])
def test_segments_that_a_token_does_not_see(case: tuple[int, list[int]]) -> None:
    """Behind its sequence, where another is longer, and before its window: the further, the further off they wrote."""
    done = run_alone(UNSEEN_SEGMENTS.replace("WINDOW_AND_POSITIONS", repr(case)))
    assert "alive" in done.stdout, (done.returncode, done.stderr)


FORKED = """
import os, sys
import numpy as np
from bitnet_inference import native

executor, sampler, rows = native.Executor("generic", 3), native.RowSampler(4), np.ones((4, 16), np.float32)
arena = native.Arena()
head = native.DenseWeight(rows, "float32")
screen = native.Screen(head, executor)
child = os.fork()
if child == 0:
    for use in (
        lambda: native.Screen(head, executor),
        lambda: screen.top(executor, rows, 1),
        lambda: sampler.score(rows[0, :4], 0, 1),
        lambda: screen.top(native.Executor("generic", 1), rows, 1),  # its own lock, too
        lambda: native.TernaryWeight(16, [1], arena=arena),
    ):
        try:
            use()
        except ValueError as error:
            print(error, flush=True)
    sys.exit(7)  # destroys the executor
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_fork
def test_an_executor_after_fork() -> None:
    done = run_alone(FORKED)
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("does not survive fork") == 5


FORKED_MEANWHILE = """
import os, signal, threading
from bitnet_inference import native

cache, asked, done = native.Cache("float32", 4, 4, 128), threading.Event(), False
cache.reserve((1 << 30) // cache.block_bytes)

def ask():
    while not done:
        native.promised_bytes()
        asked.set()

asking = threading.Thread(target=ask)
asking.start()
asked.wait()
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        native.Cache("float32", 1, 1, 16).reserve(1)
        try:
            cache.copy(0, 1)
        except ValueError as error:
            print(error, flush=True)
        del cache  # of the other process
        os._exit(native.promised_bytes())
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended:
        break
done = True
asking.join()
raise SystemExit(abs(ended))
"""


@needs_fork
def test_a_fork_while_another_thread_looks_at_the_caches() -> None:
    """A child can load a model, whoever held the list of caches, or one of them, when it was forked."""
    done = run_alone(FORKED_MEANWHILE)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.count("a cache does not survive fork") == 5


NO_THREADS = """
import resource
from bitnet_inference import native

mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (256 << 20), resource.RLIM_INFINITY))
for start in (lambda: native.Executor("generic", 1024), lambda: native.Limits(1, 256)):
    try:
        start()
    except (RuntimeError, MemoryError) as error:
        print("refused:", error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited as on Linux")
def test_a_system_that_gives_no_more_threads() -> None:
    done = run_alone(NO_THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused:") == 2


WRITTEN_MEANWHILE = """
import threading
import numpy as np
from bitnet_inference import native

size, count = 5000, 200_000
rule = native.SamplingRule(
    size, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.1, presence_penalty=0.0,
    frequency_penalty=0.0, bias_ids=[], bias_values=[], end_ids=[],
)
sampler, row, tokens, done = native.RowSampler(size), np.zeros(size, np.float32), np.zeros(count, np.int32), False

def write():
    while not done:
        tokens[-1] = 2**31 - 1
        tokens[-1] = 0

writer = threading.Thread(target=write)
writer.start()
for _ in range(50):
    for work in (
        lambda: sampler.sample(row, rule, tokens, 0, False, 0, 0, 0),
        lambda: sampler.log_probabilities(np.zeros((2, size), np.float32), tokens[-2:]),
    ):
        try:
            work()
        except ValueError:
            pass
done = True
writer.join()
print("alive")
"""


def test_tokens_that_another_thread_writes() -> None:
    """They were sound when they were checked."""
    done = run_alone(WRITTEN_MEANWHILE)
    assert "alive" in done.stdout, (done.returncode, done.stderr)


PACKED_MEANWHILE = """
import threading
import numpy as np
from bitnet_inference import native

rows = columns = 1024
signs, scales = np.ones((rows, columns), np.uint8), np.ones((rows, columns // 64), np.float32)
mixed = signs.copy()
mixed[0, 0] = 0  # then it takes two bits again
weight, done = native.TernaryWeight(columns, [rows], "u2", 64), False
weight.pack(0, signs, "codes", scales)
program = native.Program(columns)
program.rows_to_codes((1, 0, columns, 0, columns), None, 0, None, 0.0, (0, columns))
program.ternary(weight, (0, columns), (2, 0, rows, 0, rows), None)

def pack():
    while not done:
        for codes in (signs, mixed):
            try:
                weight.pack(0, codes, "codes", scales)
            except ValueError as error:
                assert "another thread is packing" in str(error) or "a program is running" in str(error)

def read(call):
    for _ in range(300):
        try:
            call()
        except ValueError as error:
            assert "another thread is packing" in str(error)

threads = [threading.Thread(target=pack) for _ in range(2)]
for thread in threads:
    thread.start()
read(weight.packed)
x, y = np.ones((6, columns), np.float32), np.zeros((6, rows), np.float32)
read(lambda: native.Executor("generic", 1).run(program, None, x, y))
done = True
for thread in threads:
    thread.join()
print("alive")
"""


def test_a_weight_that_several_threads_pack() -> None:
    """Packing moves its memory: others who read it meanwhile read what was no longer there."""
    done = run_alone(PACKED_MEANWHILE)
    assert "alive" in done.stdout, (done.returncode, done.stderr)


EMPTIED_MEANWHILE = """
import sys, threading
import numpy as np
from bitnet_inference import native

size, ids = 50_000, list(range(1000))

def rule():
    return native.SamplingRule(
        size, temperature=0.7, top_k=0, top_p=0.9, min_p=0.0, repetition_penalty=1.1, presence_penalty=0.0,
        frequency_penalty=0.0, bias_ids=ids, bias_values=[0.3] * len(ids), end_ids=[],
    )

rng, tokens, draws, done = np.random.default_rng(0), np.arange(size, dtype=np.int32), [], False
executor, sampler, rows = native.Executor("generic", 1), native.RowSampler(size), np.zeros((8, size), np.float32)
screen = native.Screen(native.DenseWeight(rng.standard_normal((size, 16), np.float32), "float32"), executor)
x = rng.standard_normal((8, 16), np.float32)

def empty():
    while not done:
        draws.clear()
        [rule() for _ in range(3)]  # stand where the others stood

emptying = threading.Thread(target=empty)
emptying.start()
sys.setswitchinterval(1e-5)
for _ in range(8):
    for number, mask, call in (((), (None,), lambda: screen.sample(executor, x, draws)),
                               ((0,), (), lambda: sampler.sample_rows(executor, rows, draws))):
        draws[:] = [(*(i + n for n in number), rule(), tokens, 4, False, 0, 0, 0, *mask) for i in range(8)]
        try:
            call()
        except ValueError as error:
            assert "one draw for each row" in str(error)
done = True
emptying.join()
print("alive")
"""


def test_draws_that_another_thread_takes_away() -> None:
    """The list is only looked at, but its rules are needed until the tokens are chosen."""
    done = run_alone(EMPTIED_MEANWHILE)
    assert "alive" in done.stdout, (done.returncode, done.stderr)


ENDED_MEANWHILE = """
import threading
import numpy as np
from bitnet_inference import native

executor, head = native.Executor("generic", 1), native.DenseWeight(np.ones((5000, 64), np.float32), "float32")
screen, sampler = native.Screen(head, executor), native.RowSampler(50_000)
begun = [threading.Event() for _ in range(2)]

def work(call, event):
    while True:
        call()
        event.set()

calls = (lambda: screen.top(executor, np.ones((4, 64), np.float32), 3)), lambda: sampler.score(row, 5, 3)
row = np.zeros(50_000, np.float32)
for call, event in zip(calls, begun):
    threading.Thread(target=work, args=(call, event), daemon=True).start()
for event in begun:
    event.wait()
"""


def test_an_interpreter_that_ends_while_threads_compute() -> None:
    done = run_alone(ENDED_MEANWHILE)
    assert done.returncode == 0, done.stderr

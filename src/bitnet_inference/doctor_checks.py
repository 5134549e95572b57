"""One check a verb: runs the kernels of one path on fixed numbers, and gives the bytes of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.config import CACHE_DTYPES

Check = Callable[[str], bytes]
Rows = tuple[int, int, int, int, int]
ARENA, INPUT, OUTPUT = 0, 1, 2


def ternary_product(isa: str) -> bytes:
    """Quantised rows times ternary matrices of all formats, for tiles of every kind of size."""
    results = []
    any_code, signs = (-1, 0, 1), (-1, 1)
    for weight_format, group_size, values in (
        ("u2", 0, any_code), ("t5", 0, any_code), ("u2", 64, any_code), ("u2", 128, any_code), ("u2", 128, signs)
    ):  # fmt: skip
        for rows, columns in ((70, 224), (33, 1040)):
            random = np.random.default_rng(rows)
            weight = native.TernaryWeight(columns, [rows], weight_format, group_size)
            scale = _normal(random, rows, -(-columns // group_size)) if group_size else 0.7
            matrix = random.choice(np.array(values, np.int8), (rows, columns))
            weight.pack(0, matrix.view(np.uint8), "codes", scale)
            codes = 0, -(-columns // 80) * 80
            program = native.Program(codes[1] // 4 + 32)
            program.rows_to_codes(_whole(INPUT, columns), None, 0, None, 0.0, codes)
            program.ternary(weight, codes, _whole(OUTPUT, rows), None)
            results += [_run(program, isa, _normal(random, tokens, columns), rows) for tokens in (1, 2, 3, 4, 11, 45)]
    return b"".join(results)


def rows(isa: str) -> bytes:
    """Gates, norms, and the additions of a residual."""
    random = np.random.default_rng(1)
    width, results = 117, []
    norm = random.standard_normal(width).astype(np.float32)
    x = 9 * _normal(random, 5, 2 * width)
    gate, up = (INPUT, 0, 2 * width, 0, width), (INPUT, 0, 2 * width, width, width)
    for activation, weights in ((0, norm), (1, None), (1, norm), (2, None), (2, norm), (3, norm)):
        program = native.Program(16)
        program.rows_to_floats(gate, up if activation else None, activation, weights, 1e-5, _whole(OUTPUT, width))
        results.append(_run(program, isa, x, width))
    program = native.Program(16)
    program.add(gate, up, _whole(OUTPUT, width))
    return b"".join([*results, _run(program, isa, x, width)])


def dense_product(isa: str) -> bytes:
    """Rows times dense matrices of every dtype."""
    results = []
    for dtype in ("float32", "float16", "bfloat16"):
        random = np.random.default_rng(2)
        weight = native.DenseWeight(_as_dtype(_normal(random, 37, 150), dtype), dtype)
        program = native.Program(16)
        program.dense(weight, _whole(INPUT, 150), _whole(OUTPUT, 37), None)
        results += [_run(program, isa, _normal(random, tokens, 150), 37) for tokens in (1, 3, 9)]
    return b"".join(results)


def attention(isa: str) -> bytes:
    """Embedding, rotation, the write into caches of every dtype, and attention over more than one segment."""
    return b"".join(_attention(isa, dtype, dim) for dtype in CACHE_DTYPES for dim in (40, 64))


def _attention(isa: str, dtype: str, dim: int) -> bytes:
    tokens, heads, kv_heads = 300, 6, 2
    width, queries, keys = (heads + 2 * kv_heads) * dim, heads * dim, kv_heads * dim
    table = native.DenseWeight(_normal(np.random.default_rng(3), tokens, width), "float32")
    num_blocks = -(-tokens // native.BLOCK_TOKENS)
    stride, turns = -(-width // 16) * 16, -(-dim // 16) * 16
    at = np.arange(tokens, dtype=np.int32)
    batch = (at, at, at, np.array([0, tokens], np.int32), np.arange(num_blocks, dtype=np.int32)[None])
    q, k, v = (
        (ARENA, 0, stride, column, wide) for column, wide in ((0, queries), (queries, keys), (queries + keys, keys))
    )
    cache = native.Cache(dtype, 1, kv_heads, dim)
    cache.reserve(num_blocks)
    program = native.Program(stride + turns)
    angles = (ARENA, stride, turns, 0, dim)
    program.embed(table, (ARENA, 0, stride, 0, width))
    program.rotations([10000.0 ** (-2 * i / dim) for i in range(dim // 2)], angles)
    program.rope_write(cache, 0, q, k, v, angles)
    program.attend(cache, 0, q, _whole(OUTPUT, queries), dim**-0.5)
    output = np.empty((tokens, queries), np.float32)
    native.Executor(isa, 2).run(program, batch, None, output)
    return output.tobytes()


def screen(isa: str) -> bytes:
    """The best logits of a head, and of one that is ternary itself, through the certified screen."""
    random = np.random.default_rng(4)
    head = native.DenseWeight(_as_dtype(_normal(random, 3001, 100), "bfloat16"), "bfloat16")
    signs = native.DenseWeight(np.sign(_normal(random, 3001, 96)), "float32")
    executor, results = native.Executor(isa, 2), []
    for each in (head, signs.as_codes(executor)):
        for inputs in (1, 3, 5, 16):
            ids, logits, _ = native.Screen(each, executor).top(executor, _normal(random, inputs, each.columns), 3)
            results += [ids.tobytes(), logits.tobytes()]
    return b"".join(results)


def rounded(isa: str) -> bytes:
    """Heads in 8 and 6 bits, and a layer and a table of embeddings in 8."""
    random, results = np.random.default_rng(5), []
    weight = native.DenseWeight(_normal(random, 300, 90), "float32")
    executor, x = native.Executor(isa, 2), _normal(random, 20, 90)
    heads = [native.QuantisedHead(weight, bits, executor) for bits in (8, 6)]
    for head in heads:
        output = np.empty((len(x), 300), np.float32)
        head.scores(executor, x, output)
        results.append(output.tobytes())
    codes = 0, 128
    program = native.Program(codes[1] // 4 + 32)
    program.rows_to_codes(_whole(INPUT, 90), None, 0, None, 0.0, codes)
    program.int8(heads[0], codes, _whole(OUTPUT, 300), None)
    results += [_run(program, isa, x[:count], 300) for count in (1, 5, 20)]
    table = native.Program(16)
    table.embed(native.Int8Table(weight, executor), _whole(OUTPUT, 90))
    at = np.arange(7, dtype=np.int32)
    batch = (41 * at, at, at, np.array([0, 7], np.int32), np.zeros((1, 1), np.int32))
    output = np.empty((7, 90), np.float32)
    executor.run(table, batch, None, output)
    return b"".join([*results, output.tobytes()])


CHECKS: Mapping[str, Check] = {
    "ternary product": ternary_product,
    "norms and gates": rows,
    "dense product": dense_product,
    "attention": attention,
    "screened head": screen,
    "8 and 6 bits": rounded,
}


def _whole(base: int, width: int) -> Rows:
    return base, 0, width, 0, width


def _run(program: Any, isa: str, x: NDArray[np.float32], width: int) -> bytes:
    output = np.empty((len(x), width), np.float32)
    native.Executor(isa, 1).run(program, None, x, output)
    return output.tobytes()


def _normal(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    return random.standard_normal((rows, columns), np.float32)


def _as_dtype(x: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return x if dtype == "float32" else (x.view(np.uint32) >> 16).astype(np.uint16)

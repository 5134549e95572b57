"""Integer products on CUDA, equal to the reference bit by bit.

Tensor cores take the weights as their first matrix and the tokens as their second, so that few tokens waste little. A
lane of a ternary tile has words of 16 weights; seven instructions (four LOP3 and three shifts) turn a word into four
registers that are operands as they stand. By the machine code for an H200 (4.8 TB/s over 132 processors at 1.8 GHz: 5
words a cycle), 28% of the slots in which instructions can be issued go into that while the words come from memory; the
whole loop for up to 8 tokens takes 11 to 17 instructions a word, 44% to 68% of them.

A row's result does not depend on how many are computed with it: integer sums are exact, and one expression follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bitnet_inference.backends.cuda_dense import dense, embed
from bitnet_inference.backends.cuda_early import early, wait_for_last
from bitnet_inference.backends.cuda_variants import SHAPES, TOKENS, Variant
from bitnet_inference.backends.cuda_weights import TILE_COLUMNS, DenseWeight, Int8Weight, TernaryWeight

__all__ = ["DenseWeight", "Int8Weight", "TernaryWeight", "dense", "embed", "int8", "ternary", "variants"]

_ENOUGH_PROGRAMS = 132  # one for each processor of a large device
_SHARED_BYTES = 96 << 10  # what a program may take everywhere
_INTEGER_MMA = ("IMMA", "IGMMA", "UTCIMMA")  # of capability 8 and 12, 9, 10
_MAX_BUFFERS = 5  # steps whose loads are under way


class _Launch(NamedTuple):
    """A kernel, the constants that it is compiled for, and how."""

    kernel: Any
    constants: dict[str, int]
    num_warps: int
    num_stages: int


def ternary(
    weight: TernaryWeight, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """out = codes @ weight.T, times the weights' scales and 1 / scales, as `reference.bit_linear` (+ residual).

    codes: int8 [T, columns]; scales: s_x, float32 [T]; out and residual: float32 [T, rows]. Rows may lie apart, their
    elements may not. `out` may be the residual.
    """
    _run(weight, codes, scales, out, residual)


def int8(
    weight: Int8Weight, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """As `ternary`, with weights of int8: `reference.int8_linear`."""
    _run(weight, codes, scales, out, residual)


def _run(
    weight: TernaryWeight | Int8Weight,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    tokens, (_, blocks, _, row_bytes) = len(codes), weight.tiles.shape
    if not tokens:
        return
    launch = _choose(weight.rows, blocks, row_bytes, weight.group_size, tokens, weight.is_hopper)
    other = out if residual is None else residual
    grid = (triton.cdiv(weight.rows, launch.constants["ROWS"]), triton.cdiv(tokens, launch.constants["TOKENS"]))
    launch.kernel[grid](
        weight.tiles, weight.scales, codes, scales, out, other,
        tokens, weight.rows, weight.columns, blocks, codes.stride(0), out.stride(0), other.stride(0),
        **launch.constants, HAS_RESIDUAL=residual is not None, INTERPRETED=not out.is_cuda, **early(out.device),
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _choose(rows: int, blocks: int, row_bytes: int, group_size: int, tokens: int, is_hopper: bool) -> _Launch:
    if group_size:
        constants = {"ROWS": 64, "TOKENS": 16 if tokens <= 16 else 64, "GROUP_SIZE": group_size}
        return _Launch(_grouped, constants, 4, 6 if tokens <= 16 else 3)
    is_ternary = row_bytes < TILE_COLUMNS
    if tokens <= 16 or (tokens <= 32 and rows < 64 * _ENOUGH_PROGRAMS):
        return _choose_slim(rows, blocks, row_bytes, tokens)
    if tokens <= 64:
        return _Launch(_wide, {"ROWS": 64, "TOKENS": 64, "ROW_BYTES": row_bytes}, 4, 4 if is_ternary else 3)
    if not is_ternary:
        return _Launch(_wide, {"ROWS": 64, "TOKENS": 128, "ROW_BYTES": row_bytes}, 8, 3)
    # Activations are four times as large as weights, so that more rows a program are what saves traffic.
    is_large = is_hopper and -(-rows // 256) * -(-tokens // 128) >= _ENOUGH_PROGRAMS
    constants = {"ROWS": 256 if is_large else 128, "TOKENS": 128, "ROW_BYTES": row_bytes}
    return _Launch(_wide, constants, 8, 4 if is_large else 3)


def _choose_slim(rows: int, blocks: int, row_bytes: int, tokens: int) -> _Launch:
    is_ternary = row_bytes < TILE_COLUMNS
    block_tokens = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
    block_rows = 32 if is_ternary and block_tokens <= 16 and rows >= 32 * _ENOUGH_PROGRAMS else 16
    # Tried on an H200: small programs, of which a processor has many, need half to two thirds of the time of large ones
    is_small = is_ternary and block_tokens == 8
    segments = 2 if is_small and blocks <= 16 else 4
    chains = 4 if is_ternary and (block_rows, block_tokens) == (16, 16) else 1
    step_bytes = segments * (block_rows * row_bytes + block_tokens * TILE_COLUMNS)
    buffers = min(3 if is_small else _MAX_BUFFERS, -(-blocks // segments), _SHARED_BYTES // step_bytes)
    constants = {"ROWS": block_rows, "TOKENS": block_tokens, "SEGMENTS": segments, "CHAINS": chains}
    return _Launch(_slim, constants | {"ROW_BYTES": row_bytes}, segments, buffers + 1)


def variants() -> Iterator[Variant]:
    """What the products of known models launch."""
    pointers = ("scales", "row_scales", "group_scales", "out", "residual")
    types = dict.fromkeys(pointers, "*fp32:16") | {"tiles": "*u8:16", "codes": "*i8:16"}
    types |= {"tokens": "i32", "blocks": "i32"}
    types |= dict.fromkeys(("rows", "columns", "codes_stride", "out_stride", "residual_stride"), "i32:16")
    kinds = ((TILE_COLUMNS // 4, 0), (TILE_COLUMNS // 4, 64), (TILE_COLUMNS // 4, 128), (TILE_COLUMNS, 0))
    for (rows, columns), tokens, kind, is_hopper in product(SHAPES, TOKENS, kinds, (False, True)):
        launch = _choose(rows, columns // TILE_COLUMNS, *kind, tokens, is_hopper)
        constants = launch.constants | {"HAS_RESIDUAL": True, "INTERPRETED": False}
        signature = {name: types[name] for name in launch.kernel.arg_names if name in types}
        only = (90,) if launch.constants["ROWS"] == 256 else ()
        yield Variant(launch.kernel, signature, constants, launch.num_warps, launch.num_stages, _INTEGER_MMA, only)


# What all kernels take: tiles and scales of a weight (cuda_weights), of `blocks` tiles of columns; codes int8 [tokens,
# columns] and their scales s_x float32 [tokens]; out and residual float32 [tokens, rows]; the strides of rows.
# INTERPRETED is for Triton's interpreter, which knows no assembly: the same in Triton's own words.
_UNPACK = tl.constexpr("""
    and.b32 $0, $4, 0xC0C0C0C0;
    shl.b32 $1, $4, 2;
    and.b32 $1, $1, 0xC0C0C0C0;
    shl.b32 $2, $4, 4;
    and.b32 $2, $2, 0xC0C0C0C0;
    shl.b32 $3, $4, 6;
    and.b32 $3, $3, 0xC0C0C0C0;
""")


@triton.jit
def _field(tile, FIELD: tl.constexpr):
    return ((tile << (2 * FIELD)) & 0xC0).to(tl.int8, bitcast=True)


@triton.jit
def _fields(tile, INTERPRETED: tl.constexpr):
    # The four quarters of a tile's columns, 64 times the weights.
    if INTERPRETED:
        fields = _field(tile, 0), _field(tile, 1), _field(tile, 2), _field(tile, 3)
    else:
        fields = tl.inline_asm_elementwise(
            _UNPACK, "=&r,=&r,=&r,=&r,r", [tile], dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4
        )
    return fields


@triton.jit
def _joined(tile, INTERPRETED: tl.constexpr):
    # int8 [..., 64, 2, 2] out of bytes [..., 64] of ternary tiles: the four fields of each byte; nothing moves.
    first, second, third, fourth = _fields(tile, INTERPRETED)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def _whole(tile, INTERPRETED: tl.constexpr):
    # int8 [rows, 256] out of the bytes [rows, 64 or 256] of tiles.
    if tile.shape[1] == 64:
        columns = tl.permute(_joined(tile, INTERPRETED), (0, 2, 3, 1))
        weights = tl.reshape(columns, (tile.shape[0], 256))
    else:
        weights = tile.to(tl.int8, bitcast=True)
    return weights


@triton.jit
def _chained(tile, CHAINS: tl.constexpr, INTERPRETED: tl.constexpr):
    # int8 [chains * segments, rows, 256 / chains] out of the bytes [segments, rows, 64 or 256] of tiles.
    if tile.shape[2] == 64 and CHAINS == 4:
        columns = tl.permute(_joined(tile, INTERPRETED), (3, 4, 0, 1, 2))
        weights = tl.reshape(columns, (4 * tile.shape[0], tile.shape[1], 64))
    elif tile.shape[2] == 64:
        columns = tl.permute(_joined(tile, INTERPRETED), (0, 1, 3, 4, 2))
        weights = tl.reshape(columns, (tile.shape[0], tile.shape[1], 256))
    else:
        weights = tile.to(tl.int8, bitcast=True)
    return weights


@triton.jit
def _starts(tiles, first_row, row, rows, blocks, ROW_BYTES: tl.constexpr):
    # Where rows from first_row on begin; behind the last tile of rows, that one is read again.
    tile = tl.minimum(row // 16, (rows - 1 - first_row) // 16)
    tile_bytes = blocks * (16 * ROW_BYTES)
    return tiles + (first_row // 16).to(tl.int64) * tile_bytes + (tile * tile_bytes + row % 16 * ROW_BYTES)


@triton.jit
def _inverses(scales, token, tokens):
    return tl.div_rn(1.0, tl.load(scales + token, mask=token < tokens, other=1.0))[None, :]


@triton.jit
def _factors(row_scales, scales, row, rows, token, tokens):
    # What sums are multiplied with: fl(float(sum) * fl(m * fl(1 / s_x))), as the reference rounds it.
    return tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None] * _inverses(scales, token, tokens)


@triton.jit
def _finish(
    totals, factors, out, residual, out_stride, residual_stride, first_row, row, rows, first_token, token, tokens,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    y = totals * factors
    mask = (first_row + row < rows)[:, None] & (first_token + token < tokens)[None, :]
    if HAS_RESIDUAL:
        start = residual + (first_token.to(tl.int64) * residual_stride + first_row)
        y += tl.load(start + (token[None, :] * residual_stride + row[:, None]), mask=mask)
    start = out + (first_token.to(tl.int64) * out_stride + first_row)
    tl.store(start + (token[None, :] * out_stride + row[:, None]), y, mask=mask)


@triton.jit
def _scale(
    sums, row_scales, scales, out, residual, out_stride, residual_stride, first_row, row, rows, first_token, tokens,
    HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, sums.shape[1])
    factors = _factors(row_scales, scales, first_row + row, rows, first_token + token, tokens)
    _finish(sums.to(tl.float32), factors, out, residual, out_stride, residual_stride,
            first_row, row, rows, first_token, token, tokens, HAS_RESIDUAL)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _slim(
    tiles, row_scales, codes, scales, out, residual,
    tokens, rows, columns, blocks, codes_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, CHAINS: tl.constexpr,
    ROW_BYTES: tl.constexpr, HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For few tokens: warps share the columns of a few rows, so that there are programs for every processor."""
    wait_for_last(EARLY)
    first_row, row = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    first_token, token = tl.program_id(1) * TOKENS, tl.arange(0, TOKENS)
    # A segment has CHAINS sums that don't wait for each other; one of four has a field's columns, which registers have.
    WIDTH: tl.constexpr = 256 // CHAINS
    chain, segment = tl.arange(0, CHAINS * SEGMENTS), tl.arange(0, SEGMENTS)
    begin = chain % SEGMENTS * 256 + chain // SEGMENTS * WIDTH
    column = begin[:, None, None] + tl.arange(0, WIDTH)[None, None, :]
    activations = codes + first_token.to(tl.int64) * codes_stride + (token[None, :, None] * codes_stride + column)
    inside = segment[:, None, None] * (16 * ROW_BYTES) + tl.arange(0, ROW_BYTES)[None, None, :]
    weights = _starts(tiles, first_row, row, rows, blocks, ROW_BYTES)[None, :, None] + inside
    is_token = (first_token + token < tokens)[None, :, None]
    # Asked for now: they would be waited for at the end.
    factors = _factors(row_scales, scales, first_row + row, rows, first_token + token, tokens)
    sums = tl.zeros([CHAINS * SEGMENTS, ROWS, TOKENS], tl.int32)
    for block in range(0, blocks, SEGMENTS):
        is_block = (segment < blocks - block)[:, None, None]
        tile = tl.load(weights + block * (16 * ROW_BYTES), mask=is_block, other=0)
        x = tl.load(activations + block * 256, mask=is_token & (column < columns - block * 256), other=0)
        operand = _chained(tile, CHAINS, INTERPRETED)
        sums = tl.dot(operand, tl.permute(x, (0, 2, 1)), sums, out_dtype=tl.int32)
    total = tl.sum(sums, 0)
    if ROW_BYTES == 64:
        total = total >> 6
    _finish(total.to(tl.float32), factors, out, residual, out_stride, residual_stride,
            first_row, row, rows, first_token, token, tokens, HAS_RESIDUAL)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _wide(
    tiles, row_scales, codes, scales, out, residual,
    tokens, rows, columns, blocks, codes_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, ROW_BYTES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For many tokens: a program has all columns of its rows and tokens."""
    wait_for_last(EARLY)
    first_row, row = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    first_token, token = tl.program_id(1) * TOKENS, tl.arange(0, TOKENS)
    weights = _starts(tiles, first_row, row, rows, blocks, ROW_BYTES)[:, None] + tl.arange(0, ROW_BYTES)[None, :]
    column = tl.arange(0, 256)[None, :]
    activations = codes + first_token.to(tl.int64) * codes_stride + (token[:, None] * codes_stride + column)
    is_token = (first_token + token < tokens)[:, None]
    sums = tl.zeros([ROWS, TOKENS], tl.int32)
    for block in range(blocks):
        tile = tl.load(weights + block * (16 * ROW_BYTES))
        x = tl.load(activations + block * 256, mask=is_token & (column < columns - block * 256), other=0)
        sums = tl.dot(_whole(tile, INTERPRETED), tl.trans(x), sums, out_dtype=tl.int32)
    if ROW_BYTES == 64:
        sums = sums >> 6
    if ROWS * TOKENS <= 128 * 128:
        _scale(sums, row_scales, scales, out, residual, out_stride, residual_stride,
               first_row, row, rows, first_token, tokens, HAS_RESIDUAL)  # fmt: skip
    else:  # in two parts: registers don't hold all residuals beside the sums
        left, right = tl.split(tl.permute(tl.reshape(sums, (ROWS, 2, TOKENS // 2)), (0, 2, 1)))
        _scale(left, row_scales, scales, out, residual, out_stride, residual_stride,
               first_row, row, rows, first_token, tokens, HAS_RESIDUAL)  # fmt: skip
        _scale(right, row_scales, scales, out, residual, out_stride, residual_stride,
               first_row, row, rows, first_token + TOKENS // 2, tokens, HAS_RESIDUAL)  # fmt: skip


@triton.jit
def _with_group(totals, sums, scale):
    # Two roundings, as in the reference.
    return totals + (sums >> 6).to(tl.float32) * tl.load(scale)[:, None]


@triton.jit
def _with_half(
    totals, left, right, activations, is_token, column, columns, scales, scales_stride, GROUP_SIZE: tl.constexpr
):
    # Two fields more, of 64 columns from `column` on; `scales` are those of the first of their groups.
    x = tl.load(activations, mask=is_token & (column < columns), other=0)
    sums = tl.dot(left, tl.trans(x), out_dtype=tl.int32)
    x = tl.load(activations + 64, mask=is_token & (column < columns - 64), other=0)
    if GROUP_SIZE == 128:
        sums = tl.dot(right, tl.trans(x), sums, out_dtype=tl.int32)
    else:
        totals = _with_group(totals, sums, scales)
        sums = tl.dot(right, tl.trans(x), out_dtype=tl.int32)
        scales += scales_stride
    return _with_group(totals, sums, scales)


@triton.jit(do_not_specialize=["tokens"])
def _grouped(
    tiles, group_scales, codes, scales, out, residual,
    tokens, rows, columns, blocks, codes_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As _wide, with a scale for 64 or 128 columns of a row: float32 [groups, rows], groups in ascending order."""
    wait_for_last(EARLY)
    first_row, row = tl.program_id(0) * ROWS, tl.arange(0, ROWS)
    first_token, token = tl.program_id(1) * TOKENS, tl.arange(0, TOKENS)
    weights = _starts(tiles, first_row, row, rows, blocks, 64)[:, None] + tl.arange(0, 64)[None, :]
    column = tl.arange(0, 64)[None, :]
    activations = codes + first_token.to(tl.int64) * codes_stride + (token[:, None] * codes_stride + column)
    is_token = (first_token + token < tokens)[:, None]
    group = group_scales + tl.minimum(first_row + row, rows - 1)
    totals = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(blocks):
        one, two, three, four = _fields(tl.load(weights + block * 1024), INTERPRETED)
        x, left = activations + block * 256, columns - block * 256
        totals = _with_half(totals, one, two, x, is_token, column, left, group, rows, GROUP_SIZE)
        group += 128 // GROUP_SIZE * rows
        totals = _with_half(totals, three, four, x + 128, is_token, column, left - 128, group, rows, GROUP_SIZE)
        group += 128 // GROUP_SIZE * rows
    _finish(totals, _inverses(scales, first_token + token, tokens), out, residual, out_stride, residual_stride,
            first_row, row, rows, first_token, token, tokens, HAS_RESIDUAL)  # fmt: skip

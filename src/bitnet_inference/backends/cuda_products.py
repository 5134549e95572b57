"""Integer products on CUDA, equal to the reference bit by bit.

Tensor cores take the weights as their first matrix and the tokens as their second, so that few tokens waste little. A
lane of a ternary tile has words of 16 weights; seven instructions turn a word into four registers that are operands as
they stand. On an H200 (4.8 TB/s over 132 processors at 1.8 GHz: 5 words a cycle) that is 28% of the slots in which
instructions can be issued while the words come from memory.

A row's result does not depend on how many are computed with it: integer sums are exact, and one expression follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bitnet_inference.backends.cuda_dense import dense, embed
from bitnet_inference.backends.cuda_variants import SHAPES, TOKENS, Variant
from bitnet_inference.backends.cuda_weights import TILE_COLUMNS, DenseWeight, Int8Weight, TernaryWeight

__all__ = ["DenseWeight", "Int8Weight", "TernaryWeight", "dense", "embed", "int8", "ternary", "variants"]

_MAX_SLIM_TOKENS = 32
_SEGMENTS = 4  # of columns, one a warp
_ENOUGH_PROGRAMS = 264  # two for each processor of the largest devices
_SHARED_BYTES = 96 << 10  # what a program may take everywhere
_MAX_BUFFERS = 5


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
    launch = _choose(weight.rows, blocks, row_bytes, weight.group_size, tokens)
    other = out if residual is None else residual
    grid = (
        triton.cdiv(weight.rows, launch.constants["ROWS"]),
        triton.cdiv(tokens, launch.constants["TOKENS"]),
    )
    launch.kernel[grid](
        weight.tiles, weight.scales, codes, scales, out, other,
        tokens, weight.rows, weight.columns, blocks, codes.stride(0), out.stride(0), other.stride(0),
        **launch.constants, HAS_RESIDUAL=residual is not None, INTERPRETED=not out.is_cuda,
        num_warps=launch.num_warps, num_stages=launch.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def _choose(rows: int, blocks: int, row_bytes: int, group_size: int, tokens: int) -> _Launch:
    if group_size:
        constants = {"ROWS": 64, "TOKENS": 16 if tokens <= 16 else 64, "GROUP_SIZE": group_size}
        return _Launch(_grouped, constants, 4, 3)
    if tokens <= _MAX_SLIM_TOKENS:
        return _choose_slim(rows, blocks, row_bytes, tokens)
    if tokens <= 64:
        return _Launch(_wide, {"ROWS": 64, "TOKENS": 64, "ROW_BYTES": row_bytes}, 4, 3)
    is_ternary = row_bytes < TILE_COLUMNS
    constants = {"ROWS": 128 if is_ternary else 64, "TOKENS": 128, "ROW_BYTES": row_bytes}
    return _Launch(_wide, constants, 8 if is_ternary else 4, 3)


def _choose_slim(rows: int, blocks: int, row_bytes: int, tokens: int) -> _Launch:
    block_tokens = next(each for each in (8, 16, _MAX_SLIM_TOKENS) if tokens <= each)
    block_rows = 32 if rows >= 32 * _ENOUGH_PROGRAMS and block_tokens * row_bytes <= 2048 else 16
    step_bytes = _SEGMENTS * (block_rows * row_bytes + block_tokens * TILE_COLUMNS)
    buffers = min(_MAX_BUFFERS, -(-blocks // _SEGMENTS), _SHARED_BYTES // step_bytes)
    constants = {"ROWS": block_rows, "TOKENS": block_tokens, "SEGMENTS": _SEGMENTS, "ROW_BYTES": row_bytes}
    return _Launch(_slim, constants, _SEGMENTS, buffers + 1)


def variants() -> Iterator[Variant]:
    """What the products of known models launch."""
    pointers = ("scales", "row_scales", "group_scales", "out", "residual")
    types = dict.fromkeys(pointers, "*fp32:16") | {
        "tiles": "*u8:16",
        "codes": "*i8:16",
        "tokens": "i32",
        "blocks": "i32",
    }
    types |= dict.fromkeys(("rows", "columns", "codes_stride", "out_stride", "residual_stride"), "i32:16")
    kinds = ((TILE_COLUMNS // 4, 0), (TILE_COLUMNS // 4, 64), (TILE_COLUMNS // 4, 128), (TILE_COLUMNS, 0))
    for (rows, columns), tokens, (row_bytes, group_size) in product(SHAPES, TOKENS, kinds):
        launch = _choose(rows, columns // TILE_COLUMNS, row_bytes, group_size, tokens)
        constants = launch.constants | {"HAS_RESIDUAL": True, "INTERPRETED": False}
        signature = {name: types[name] for name in launch.kernel.arg_names if name in types}
        yield Variant(launch.kernel, signature, constants, launch.num_warps, launch.num_stages, ("IMMA", "IGMMA"))


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
def _operand(tile, INTERPRETED: tl.constexpr):
    # int8 [..., 256] out of the bytes [..., 256 or 64] of a tile; fields come to lie behind each other without moving.
    if tile.shape[-1] == 256:
        operand = tile.to(tl.int8, bitcast=True)
    else:
        first, second, third, fourth = _fields(tile, INTERPRETED)
        pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
        if len(tile.shape) == 2:
            operand = tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (tile.shape[0], 256))
        else:
            operand = tl.reshape(tl.permute(pairs, (0, 1, 3, 4, 2)), (tile.shape[0], tile.shape[1], 256))
    return operand


@triton.jit
def _starts(tiles, row, rows, blocks, ROW_BYTES: tl.constexpr):
    # Where these rows begin; behind the last tile of rows, the last one is read again.
    tile = tl.minimum(row // 16, (rows - 1) // 16)
    return tiles + tile.to(tl.int64) * blocks * (16 * ROW_BYTES) + (row % 16) * ROW_BYTES


@triton.jit
def _finish(
    totals, factors, row, token, out, residual, rows, tokens, out_stride, residual_stride, HAS_RESIDUAL: tl.constexpr
):
    y = totals * factors
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    token = token.to(tl.int64)
    if HAS_RESIDUAL:
        y += tl.load(residual + token[None, :] * residual_stride + row[:, None], mask=mask)
    tl.store(out + token[None, :] * out_stride + row[:, None], y, mask=mask)


@triton.jit
def _factors(row_scales, scales, row, token, rows, tokens):
    # fl(m * fl(1 / s_x)), as the reference rounds it.
    inverses = tl.div_rn(1.0, tl.load(scales + token, mask=token < tokens, other=1.0))
    return tl.load(row_scales + row, mask=row < rows, other=0.0)[:, None] * inverses[None, :]


@triton.jit(do_not_specialize=["tokens"])
def _slim(
    tiles, row_scales, codes, scales, out, residual,
    tokens, rows, columns, blocks, codes_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, SEGMENTS: tl.constexpr, ROW_BYTES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """For few tokens: warps share the columns of a few rows, so that there are programs for every processor."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    segment = tl.arange(0, SEGMENTS)
    inside = segment[:, None, None] * (16 * ROW_BYTES) + tl.arange(0, ROW_BYTES)[None, None, :]
    weights = _starts(tiles, row, rows, blocks, ROW_BYTES)[None, :, None] + inside
    column = segment[:, None, None] * 256 + tl.arange(0, 256)[None, None, :]
    activations = codes + token.to(tl.int64)[None, :, None] * codes_stride + column
    sums = tl.zeros([SEGMENTS, ROWS, TOKENS], tl.int32)
    for block in range(0, blocks, SEGMENTS):
        tile = tl.load(weights + block * (16 * ROW_BYTES), mask=(segment < blocks - block)[:, None, None], other=0)
        there = (token < tokens)[None, :, None] & (column < columns - block * 256)
        x = tl.load(activations + block * 256, mask=there, other=0)
        sums = tl.dot(_operand(tile, INTERPRETED), tl.permute(x, (0, 2, 1)), sums, out_dtype=tl.int32)
    total = tl.sum(sums, 0)
    if ROW_BYTES == 64:
        total = total >> 6
    factors = _factors(row_scales, scales, row, token, rows, tokens)
    _finish(total.to(tl.float32), factors, row, token, out, residual, rows, tokens, out_stride, residual_stride,
            HAS_RESIDUAL)  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _wide(
    tiles, row_scales, codes, scales, out, residual,
    tokens, rows, columns, blocks, codes_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, ROW_BYTES: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """For many tokens: a program has all columns of its rows and tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    weights = _starts(tiles, row, rows, blocks, ROW_BYTES)[:, None] + tl.arange(0, ROW_BYTES)[None, :]
    column = tl.arange(0, 256)
    activations = codes + token.to(tl.int64)[:, None] * codes_stride + column[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.int32)
    for block in range(blocks):
        tile = tl.load(weights + block * (16 * ROW_BYTES))
        there = (token < tokens)[:, None] & (column < columns - block * 256)[None, :]
        x = tl.load(activations + block * 256, mask=there, other=0)
        sums = tl.dot(_operand(tile, INTERPRETED), tl.trans(x), sums, out_dtype=tl.int32)
    if ROW_BYTES == 64:
        sums = sums >> 6
    factors = _factors(row_scales, scales, row, token, rows, tokens)
    _finish(sums.to(tl.float32), factors, row, token, out, residual, rows, tokens, out_stride, residual_stride,
            HAS_RESIDUAL)  # fmt: skip


@triton.jit
def _quarter(activations, token, tokens, columns, first):
    # The codes of 64 columns from `first` on, as a second matrix.
    column = first + tl.arange(0, 64)
    there = (token < tokens)[:, None] & (column < columns)[None, :]
    return tl.trans(tl.load(activations + column[None, :], mask=there, other=0))


@triton.jit
def _with_group(totals, sums, group_scales, group, row, rows):
    # totals + sums * scale of the group, two roundings, as the reference adds them.
    scale = tl.load(group_scales + group * rows + row, mask=row < rows, other=0.0)
    return totals + (sums >> 6).to(tl.float32) * scale[:, None]


@triton.jit
def _with_half(
    totals, first, second, activations, token, tokens, columns, begin, group_scales, row, rows,
    GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    # Two of the four fields: 128 columns from `begin` on.
    group = begin // GROUP_SIZE
    sums = tl.dot(first, _quarter(activations, token, tokens, columns, begin), out_dtype=tl.int32)
    other = _quarter(activations, token, tokens, columns, begin + 64)
    if GROUP_SIZE == 128:
        sums = tl.dot(second, other, sums, out_dtype=tl.int32)
    else:
        totals = _with_group(totals, sums, group_scales, group, row, rows)
        sums = tl.dot(second, other, out_dtype=tl.int32)
        group += 1
    return _with_group(totals, sums, group_scales, group, row, rows)


@triton.jit(do_not_specialize=["tokens"])
def _grouped(
    tiles, group_scales, codes, scales, out, residual,
    tokens, rows, columns, blocks, codes_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Ternary weights with a scale for 64 or 128 columns (float32 [groups, rows]), groups in ascending order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    weights = _starts(tiles, row, rows, blocks, 64)[:, None] + tl.arange(0, 64)[None, :]
    activations = codes + token.to(tl.int64)[:, None] * codes_stride
    totals = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(blocks):
        first, second, third, fourth = _fields(tl.load(weights + block * 1024), INTERPRETED)
        totals = _with_half(totals, first, second, activations, token, tokens, columns, block * 256,
                            group_scales, row, rows, GROUP_SIZE)  # fmt: skip
        totals = _with_half(totals, third, fourth, activations, token, tokens, columns, block * 256 + 128,
                            group_scales, row, rows, GROUP_SIZE)  # fmt: skip
    inverses = tl.div_rn(1.0, tl.load(scales + token, mask=token < tokens, other=1.0))
    _finish(totals, inverses[None, :], row, token, out, residual, rows, tokens, out_stride, residual_stride,
            HAS_RESIDUAL)  # fmt: skip

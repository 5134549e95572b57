"""Products with dense weights on CUDA, and rows of embeddings.

Tensor cores multiply bfloat16 and add in float32. A float32 is the sum of two bfloat16 but for 2^-17 of it, so
activations are taken as two, and so are weights that are not bfloat16 in the file; the product of the two small parts
is left out. Columns are added in ascending order: tiles differ with the number of tokens, the order of a sum does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from bitnet_inference.backends.cuda_early import early, wait_for_last
from bitnet_inference.backends.cuda_variants import TOKENS, Variant
from bitnet_inference.backends.cuda_weights import DenseWeight

_COLUMNS = 64  # a step; all shapes of tiles must have the same, or sums would differ
_EMBED_COLUMNS = 1024
_FLOAT_MMA = ("HMMA", "HGMMA", "UTCHMMA")  # of capability 8 and 12, 9, 10
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # in Triton's words


@triton.jit
def _split(x, INTERPRETED: tl.constexpr):
    # Two bfloat16 whose sum is x but for 2^-17 of it. The interpreter does not multiply these: there they stay float32.
    high = x.to(tl.bfloat16)
    low = (x - high.to(tl.float32)).to(tl.bfloat16)
    if INTERPRETED:
        parts = high.to(tl.float32), low.to(tl.float32)
    else:
        parts = high, low
    return parts


@triton.jit(do_not_specialize=["tokens"])
def _dense_kernel(
    weights, x, out, residual, tokens, rows, columns, weight_stride, x_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    INTERPRETED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    from_row = tl.minimum(row, rows - 1).to(tl.int64)[:, None] * weight_stride + column[None, :]
    from_token = token.to(tl.int64)[:, None] * x_stride + column[None, :]
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    for begin in range(0, columns, COLUMNS):
        there = (column < columns - begin)[None, :]
        w = tl.load(weights + from_row + begin, mask=there, other=0.0)
        a = tl.load(x + from_token + begin, mask=(token < tokens)[:, None] & there, other=0.0)
        high, low = _split(w.to(tl.float32), INTERPRETED)
        x_high, x_low = _split(tl.trans(a), INTERPRETED)
        sums = tl.dot(high, x_high, sums)
        sums = tl.dot(high, x_low, sums)
        if weights.dtype.element_ty != tl.bfloat16:
            sums = tl.dot(low, x_high, sums)
    mask = (row < rows)[:, None] & (token < tokens)[None, :]
    token = token.to(tl.int64)
    if HAS_RESIDUAL:
        sums += tl.load(residual + token[None, :] * residual_stride + row[:, None], mask=mask)
    tl.store(out + token[None, :] * out_stride + row[:, None], sums, mask=mask)


@triton.jit
def _embed_kernel(table, token_ids, out, scale, columns, table_stride, out_stride, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(token_ids + token).to(tl.int64)
    values = tl.load(table + row * table_stride + column, mask=column < columns)
    tl.store(out + token * out_stride + column, values.to(tl.float32) * scale, mask=column < columns)


def dense(weight: DenseWeight, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> None:
    """out = x @ weight.T (+ residual); x float32 [T, columns], out and residual float32 [T, rows].

    Rows may lie apart. `out` may be the residual. The result is within 1e-4 of the exact one (relative RMS).
    """
    tokens = len(x)
    if not tokens:
        return
    block_tokens, block_rows, warps, stages = _tile(weight.data.dtype, tokens)
    other = out if residual is None else residual
    grid = (triton.cdiv(weight.rows, block_rows), triton.cdiv(tokens, block_tokens))
    _dense_kernel[grid](
        weight.data, x, out, other, tokens, weight.rows, weight.columns,
        weight.data.stride(0), x.stride(0), out.stride(0), other.stride(0),
        ROWS=block_rows, TOKENS=block_tokens, COLUMNS=_COLUMNS, HAS_RESIDUAL=residual is not None,
        INTERPRETED=not out.is_cuda, **early(out.device), num_warps=warps, num_stages=stages, enable_fp_fusion=False,
    )  # fmt: skip


def embed(weight: DenseWeight, token_ids: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """out[t] = row token_ids[t] of the weight, times scale; token_ids int32 [T], out float32 [T, columns]."""
    if not len(token_ids):
        return
    grid = (len(token_ids), triton.cdiv(weight.columns, _EMBED_COLUMNS))
    _embed_kernel[grid](
        weight.data, token_ids, out, float(scale), weight.columns, weight.data.stride(0), out.stride(0),
        COLUMNS=_EMBED_COLUMNS, enable_fp_fusion=False,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """What dense products and embeddings launch."""
    strides = dict.fromkeys(("rows", "columns", "weight_stride", "x_stride", "out_stride", "residual_stride"), "i32:16")
    floats = dict.fromkeys(("x", "out", "residual"), "*fp32:16")
    for (dtype, name), tokens in product(_NAMES.items(), (8, *TOKENS)):
        block_tokens, block_rows, warps, stages = _tile(dtype, tokens)
        signature = {"weights": f"*{name}:16", **floats, "tokens": "i32", **strides}
        constants = {"ROWS": block_rows, "TOKENS": block_tokens, "COLUMNS": _COLUMNS, "HAS_RESIDUAL": True}
        yield Variant(_dense_kernel, signature, constants | {"INTERPRETED": False}, warps, stages, _FLOAT_MMA)
    for name in _NAMES.values():
        signature = {"table": f"*{name}:16", "token_ids": "*i32:16", "out": "*fp32:16", "scale": "fp32"}
        signature |= dict.fromkeys(("columns", "table_stride", "out_stride"), "i32:16")
        yield Variant(_embed_kernel, signature, {"COLUMNS": _EMBED_COLUMNS})


def _tile(dtype: torch.dtype, tokens: int) -> tuple[int, int, int, int]:
    """Tokens and rows of a program, warps, stages."""
    is_split = dtype != torch.bfloat16  # into two parts, which take registers
    block_tokens = min(max(8, triton.next_power_of_2(tokens)), 64 if is_split else 128)
    if block_tokens == 128:
        return block_tokens, 128, 8, 3
    return block_tokens, 64, 8 if is_split and block_tokens == 64 else 4, 3 if is_split else 4

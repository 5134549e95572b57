"""Products with dense weights on CUDA, and rows of embeddings.

Activations are float32 and weights stay as they are. Where those are bfloat16, an activation is the sum of two
bfloat16, which leaves out 2^-17 of it. Other weights take three products of TF32, which lose less than float32 sums
do. Tensor cores add in float32, columns in ascending order: tiles differ with the number of tokens, the order of a sum
does not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bitnet_inference.backends.cuda_weights import DenseWeight

_COLUMNS = 64  # a step; all shapes of tiles must have the same, or sums would differ
_EMBED_COLUMNS = 1024


@triton.jit(do_not_specialize=["tokens"])
def _dense_kernel(
    weights, x, out, residual, tokens, rows, columns, weight_stride, x_stride, out_stride, residual_stride,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
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
        if weights.dtype.element_ty == tl.bfloat16 and not INTERPRETED:
            high = a.to(tl.bfloat16)
            low = (a - high.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(w, tl.trans(high), sums)
            sums = tl.dot(w, tl.trans(low), sums)
        else:
            sums = tl.dot(w.to(tl.float32), tl.trans(a), sums, input_precision="tf32x3")
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
        INTERPRETED=not out.is_cuda, num_warps=warps, num_stages=stages, enable_fp_fusion=False,
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


def _tile(dtype: torch.dtype, tokens: int) -> tuple[int, int, int, int]:
    """Tokens and rows of a program, warps, stages."""
    for block_tokens in (8, 16, 32, 64):
        if tokens <= block_tokens:
            return block_tokens, 64, 4, 4 if dtype == torch.bfloat16 else 3
    return (128, 128, 8, 3) if dtype == torch.bfloat16 else (64, 64, 4, 3)

"""Attention over the paged cache, in Triton: a kernel for sequences with few new tokens, and one for those with many.

Few: a program takes a token's heads of one key head, and a segment of its context; each segment starts its softmax
afresh, and a second kernel merges them. The segments of a token follow from its position alone: 128 positions, or as
many times that as makes no more than 32 segments. Many: a program for every 64 rows of queries, heads that share a key
head being rows of one product, walks over all positions.

What a token yields depends on its sequence alone, not on its neighbours, nor on how many programs share the work. Nor
does it depend on how a prompt is cut, but that pieces of up to MAX_FEW tokens are summed in another order than longer
ones. Queries and softmax weights enter products as the sum of two bfloat16, and so keep 16 bits; keys and values are
those of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnet_inference.backends.cuda_cache import BLOCK_TOKENS, Cache, CacheDtype, DeviceBatch, rounded_bfloat16
from bitnet_inference.backends.cuda_early import early, wait_for_last
from bitnet_inference.backends.cuda_variants import Variant

MAX_FEW = 16  # new tokens
_STEP_POSITIONS, _MAX_SEGMENTS = 128, 32
_PROGRAMS = 4  # for each processor of the device, at most: more would wait anyway
_LOG2_E = 1.4426950408889634
_UNBOUNDED = 1 << 30  # a window that no position leaves
_MERGE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_BLOCK, _FEW = tl.constexpr(BLOCK_TOKENS), tl.constexpr(MAX_FEW)
_STEP, _SEGMENTS = tl.constexpr(_STEP_POSITIONS), tl.constexpr(_MAX_SEGMENTS)


def attend(cache: Cache, layer: int, q: Tensor, out: Tensor, batch: DeviceBatch, scale: float, window: int) -> None:
    """Causal attention of q over the layer's cache; a query sees the last `window` positions up to its own, 0: all.

    q and out: float32 [T, heads * D], rows any distance apart; head h of q goes with key head h * kv_heads // heads.
    All positions up to a query's own must be in the cache. Rows of `out` behind the last token stay as they are. Takes
    memory for T * heads * D * 32 floats while it runs, less where `max_context` is below 4096, and hardly any for a
    sequence that is alone.
    """
    window = window or _UNBOUNDED
    tensors = (q, out, *cache.layer(layer), batch.positions, batch.starts, batch.block_tables)
    numbers = (q.stride(0), out.stride(0), batch.block_tables.stride(0), scale * _LOG2_E, window)
    _attend_few(cache, tensors, numbers, batch)
    if batch.max_query > MAX_FEW:
        share = q.shape[1] // cache.head_dim // cache.num_kv_heads
        constants, options = _launch(cache.dtype, cache.num_kv_heads, share, cache.head_dim, False, q.is_cuda)
        grid = (triton.cdiv(batch.max_query * share, constants["M"]), cache.num_kv_heads, len(batch.starts) - 1)
        _many[grid](*tensors, *numbers, **constants, **options)


def scratch_bytes(num_tokens: int, num_heads: int, dim: int) -> int:
    """Memory that `attend` takes for so many tokens, at most, while it runs."""
    return num_tokens * num_heads * _MAX_SEGMENTS * (dim + 2) * 4


def _attend_few(cache: Cache, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...], batch: DeviceBatch) -> None:
    """Every token of the sequences with few."""
    (q, out, *_), window = tensors, numbers[-1]
    num_tokens = len(q) if len(batch.starts) > 2 else min(len(q), MAX_FEW)  # more would not be few
    num_heads = q.shape[1] // cache.head_dim
    share, positions = num_heads // cache.num_kv_heads, min(batch.max_context, window + _STEP_POSITIONS - 1)
    slots = min(_MAX_SEGMENTS, triton.cdiv(positions, _STEP_POSITIONS))
    sums = torch.empty((num_tokens, num_heads, slots, cache.head_dim), device=q.device)
    extents = torch.empty((num_tokens, num_heads, slots, 2), device=q.device)
    constants, options = _launch(cache.dtype, cache.num_kv_heads, share, cache.head_dim, True, q.is_cuda)
    units = cache.num_kv_heads * triton.cdiv(share, constants["M"])
    busy = triton.cdiv(_PROGRAMS * cache.num_processors, num_tokens * units)
    grid = (num_tokens, units, min(slots, busy))
    _few[grid](*tensors, batch.sequences, sums, extents, *numbers, slots, **constants, **early(q.device), **options)
    if slots > 1:
        _merge[(num_tokens, num_heads)](
            out, batch.positions, batch.starts, batch.sequences, sums, extents, out.stride(0), window, slots,
            **_merge_constants(cache.head_dim), **early(q.device), **_MERGE_OPTIONS,
        )  # fmt: skip


def _merge_constants(dim: int) -> dict[str, Any]:
    return {"DIM": dim, "D": triton.next_power_of_2(dim)}


def _launch(
    dtype: CacheDtype, kv_heads: int, share: int, dim: int, is_few: bool, is_native: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options of a kernel, chosen so that nothing spills, and fits into 99 KB of shared memory."""
    padded, exact = triton.next_power_of_2(dim), dtype == "float32"
    rows = 16 if exact else min(32 if padded > 128 else 64, max(16, triton.next_power_of_2(share)) if is_few else 64)
    positions = 16 if exact and padded == dim and (dim, is_few) != (128, True) else 32  # tried: these don't spill
    constants = {
        "KV_HEADS": kv_heads, "SHARE": share, "DIM": dim, "D": padded, "M": rows, "N": positions,
        "INT8": dtype == "int8", "EXACT": exact, "NATIVE": is_native,
    }  # fmt: skip
    warps = 8 if padded > 128 or (dtype == "int8" and rows > 16) else 4
    stages = 5 if is_few and not exact else 3  # two for the block table, the others for tiles that are on their way
    return constants, {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}


def variants() -> Iterator[Variant]:
    """What BitNet b1.58 2B-4T and the default model launch, and other sizes of heads."""
    names: dict[CacheDtype, str] = {"bfloat16": "*bf16:16", "float32": "*fp32:16", "int8": "*i8:16"}
    for dtype, name in names.items():
        tensors = {"q": "*fp32:16", "out": "*fp32:16", "keys": name, "values": name}
        tensors |= dict.fromkeys(("key_scales", "value_scales"), "*fp32:16" if dtype == "int8" else name)
        tensors |= dict.fromkeys(("positions", "starts", "tables"), "*i32:16")
        numbers = {"q_stride": "i32:16", "out_stride": "i32:16", "table_stride": "i32"}
        numbers |= {"scale": "fp32", "window": "i32"}
        partial = {"sequences": "*i32:16", "partial": "*fp32:16", "extents": "*fp32:16", "slots": "i32"}
        others = ((2, 2, 32), (12, 1, 80), (1, 32, 64)) if dtype == "bfloat16" else ()
        for kv_heads, share, dim in ((5, 4, 128), (1, 4, 256), *others):
            for kernel, more in ((_few, partial), (_many, {})):
                constants, options = _launch(dtype, kv_heads, share, dim, kernel is _few, True)
                how, units = (
                    (options["num_warps"], options["num_stages"]),
                    () if constants["EXACT"] else ("HMMA", "HGMMA", "UTCHMMA"),
                )
                yield Variant(kernel, tensors | more | numbers, constants, *how, units)
    signature = dict.fromkeys(("out", "partial", "extents"), "*fp32:16")
    signature |= dict.fromkeys(("positions", "starts", "sequences"), "*i32:16")
    signature |= {"out_stride": "i32:16", "window": "i32", "slots": "i32"}
    for dim in (128, 32, 256):
        yield Variant(_merge, signature, _merge_constants(dim))


@triton.jit
def _product(x, y, EXACT: tl.constexpr, NATIVE: tl.constexpr):
    """x @ y: x float32, as the sum of two bfloat16 unless EXACT; y of the cache. NATIVE: bfloat16 can be multiplied."""
    if EXACT:
        return tl.dot(x, y, input_precision="ieee")
    elif NATIVE:  # noqa: RET505 - all returns would be compiled
        high, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
        low = (x - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(low, y, tl.dot(high, y))
    else:
        high, y = rounded_bfloat16(x), y.to(tl.float32)
        return tl.dot(rounded_bfloat16(x - high), y, tl.dot(high, y))


@triton.jit
def _walk(
    q, position, begin, end, table, keys,
    values, key_scales, value_scales, head, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, INT8: tl.constexpr,
    EXACT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Scaled queries [M, D] of these positions over positions begin .. end - 1: maxima, totals, weighted values.

    `begin` is a multiple of N, so that a position falls into the same tile for every query.
    """
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    at = tl.arange(0, D)
    for first in range(begin, end, N):
        seen = first + tl.arange(0, N)
        block = tl.load(table + seen // _BLOCK, mask=seen < end, other=0).to(tl.int64)
        place = (block * KV_HEADS + head) * _BLOCK + seen % _BLOCK
        offsets, mask = place[:, None] * DIM + at[None, :], (seen < end)[:, None] & (at < DIM)[None, :]
        key = tl.load(keys + offsets, mask=mask, other=0)
        scores = _product(q, tl.trans(key), EXACT, NATIVE)
        if INT8:
            scores *= tl.load(key_scales + place, mask=seen < end, other=0.0)[None, :]
        behind = position[:, None] - seen[None, :]
        scores = tl.where((behind >= 0) & (behind < window), scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, axis=1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # nothing seen yet
        weights, kept = tl.exp2(scores - shift[:, None]), tl.exp2(best - shift)
        total = total * kept + tl.sum(weights, axis=1)
        if INT8:
            weights *= tl.load(value_scales + place, mask=seen < end, other=0.0)[None, :]
        value = tl.load(values + offsets, mask=mask, other=0)
        sums = sums * kept[:, None] + _product(weights, value, EXACT, NATIVE)
        best = largest
    return best, total, sums


@triton.jit
def _segments(position, window):
    """How a token's context is cut: the first step of it, the steps of a segment, and the number of segments."""
    first = tl.maximum(position - window + 1, 0) // _STEP
    num_steps = position // _STEP + 1 - first
    steps = (num_steps + _SEGMENTS - 1) // _SEGMENTS
    return first, steps, (num_steps + steps - 1) // steps


@triton.jit(do_not_specialize=["slots"])
def _few(
    q, out, keys, values, key_scales, value_scales, positions, starts, tables, sequences, partial, extents, q_stride,
    out_stride, table_stride, scale, window, slots, KV_HEADS: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, INT8: tl.constexpr, EXACT: tl.constexpr, NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    token, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1) % KV_HEADS
    sequence = tl.load(sequences + token).to(tl.int64)
    start, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if (token < start) | (token >= stop) | (stop - start > _FEW):
        return
    position = tl.load(positions + token)
    first, steps, num_segments = _segments(position, window)
    rows, at = tl.program_id(1) // KV_HEADS * M + tl.arange(0, M), tl.arange(0, D)
    heads, mask = key_head * SHARE + rows, (rows < SHARE)[:, None] & (at < DIM)[None, :]
    column = heads[:, None] * DIM + at[None, :]
    query = tl.load(q + token * q_stride + column, mask=mask, other=0.0) * scale
    for segment in range(tl.program_id(2), num_segments, tl.num_programs(2)):
        begin = (first + segment * steps) * _STEP
        best, total, sums = _walk(
            query, tl.full([M], 0, tl.int32) + position, begin, tl.minimum(begin + steps * _STEP, position + 1),
            tables + sequence * table_stride, keys, values, key_scales, value_scales, key_head, window,
            KV_HEADS, DIM, D, M, N, INT8, EXACT, NATIVE,
        )  # fmt: skip
        if num_segments == 1:
            tl.store(out + token * out_stride + column, sums / total[:, None], mask=mask)
        else:
            place = (token * KV_HEADS * SHARE + heads) * slots + segment
            tl.store(partial + place[:, None] * DIM + at[None, :], sums, mask=mask)
            tl.store(extents + place * 2, best, mask=rows < SHARE)
            tl.store(extents + place * 2 + 1, total, mask=rows < SHARE)


@triton.jit(do_not_specialize=["slots"])
def _merge(
    out, positions, starts, sequences, partial, extents, out_stride, window, slots, DIM: tl.constexpr, D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(sequences + token)
    start, stop = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if (token < start) | (token >= stop) | (stop - start > _FEW):
        return
    _, _, num_segments = _segments(tl.load(positions + token), window)
    if num_segments == 1:
        return
    segments, at = tl.arange(0, _SEGMENTS), tl.arange(0, D)
    there, mask = segments < num_segments, (segments < num_segments)[:, None] & (at < DIM)[None, :]
    place = (token * tl.num_programs(1) + head) * slots + segments
    maxima = tl.load(extents + place * 2, mask=there, other=float("-inf"))
    totals = tl.load(extents + place * 2 + 1, mask=there, other=0.0)
    sums = tl.load(partial + place[:, None] * DIM + at[None, :], mask=mask, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima))
    merged = tl.sum(weights[:, None] * sums, axis=0) / tl.sum(weights * totals)
    tl.store(out + token * out_stride + head * DIM + at, merged, mask=at < DIM)


@triton.jit
def _many(
    q, out, keys, values, key_scales, value_scales,
    positions, starts, tables, q_stride, out_stride,
    table_stride, scale, window, KV_HEADS: tl.constexpr, SHARE: tl.constexpr,
    DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, INT8: tl.constexpr,
    EXACT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks start first
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    if (count <= _FEW) | (tile * M >= count * SHARE):
        return
    rows, at = tile * M + tl.arange(0, M), tl.arange(0, D)
    live = rows < count * SHARE
    token = (start + rows // SHARE).to(tl.int64)
    column = (head * SHARE + rows % SHARE)[:, None] * DIM + at[None, :]
    position = tl.load(positions + token, mask=live, other=-1)
    mask = live[:, None] & (at < DIM)[None, :]
    query = tl.load(q + token[:, None] * q_stride + column, mask=mask, other=0.0) * scale
    last = tl.max(position)
    begin = tl.maximum(tl.min(tl.where(live, position, last)) - window + 1, 0)
    _, total, sums = _walk(
        query, position, begin // N * N, last + 1, tables + sequence * table_stride, keys, values, key_scales,
        value_scales, head, window, KV_HEADS, DIM, D, M, N, INT8, EXACT, NATIVE,
    )  # fmt: skip
    total = tl.where(live, total, 1.0)
    tl.store(out + token[:, None] * out_stride + column, sums / total[:, None], mask=mask)

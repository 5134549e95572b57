"""The best of rows of logits, on the device: parts of a row are sorted down to k each, again until one part is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnet_inference.backends.cuda_variants import Variant

QUICK_TOP = 64  # beyond, whole rows are sorted
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_LOWEST = tl.constexpr(-(1 << 63))


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row of float32 [R, V], best first, lowest id first among equals: ids int32, logits float32.

    Both are [R, min(k, V)]. NaN counts as better than all numbers, and -0 equals 0. Rows may be any distance apart.
    """
    if k > QUICK_TOP:
        comparable = torch.where(logits.isnan(), torch.nan, logits + 0.0)
        best, ids = comparable.sort(dim=1, descending=True, stable=True)
        return ids[:, :k].to(torch.int32), best[:, :k]
    k, (num_rows, num_left) = min(k, logits.shape[1]), logits.shape
    constants = _constants(k)
    keys, kernel, numbers = logits, _best_logits, (logits.stride(0), num_left)
    while kernel is _best_logits or num_left > constants["KEPT"]:
        num_parts = triton.cdiv(num_left, constants["PART"])
        num_left = num_parts * constants["KEPT"]
        kept = torch.empty((num_rows, num_left), dtype=torch.int64, device=logits.device)
        kernel[(num_rows, num_parts)](keys, kept, *numbers, **constants, **_OPTIONS)
        keys, kernel, numbers = kept, _best_keys, (num_left, num_left)
    ids = torch.empty((num_rows, k), dtype=torch.int32, device=logits.device)
    best = torch.empty((num_rows, k), dtype=torch.float32, device=logits.device)
    _take[(num_rows,)](
        keys, logits, ids, best, logits.stride(0), k, KEPT=constants["KEPT"], num_warps=1, enable_fp_fusion=False
    )
    return ids, best


def _constants(k: int) -> dict[str, Any]:
    """How many candidates a program reads, and how many it keeps: few kernels, as each takes seconds to compile."""
    return {"KEPT": 1, "PART": 4096} if k == 1 else {"KEPT": QUICK_TOP, "PART": 1024}


def variants() -> Iterator[Variant]:
    """The best one, and the best up to 64."""
    for k in (1, QUICK_TOP):
        numbers = {"stride": "i32", "num_left": "i32"}
        yield Variant(_best_logits, {"logits": "*fp32:16", "kept": "*i64:16"} | numbers, _constants(k), 8)
        yield Variant(_best_keys, {"keys": "*i64:16", "kept": "*i64:16"} | numbers, _constants(k), 8)
        signature = {"keys": "*i64:16", "logits": "*fp32:16", "ids": "*i32:16", "best": "*fp32:16"}
        yield Variant(_take, signature | {"stride": "i32", "k": "i32"}, {"KEPT": _constants(k)["KEPT"]}, 1)


@triton.jit
def _best(keys, KEPT: tl.constexpr):
    if KEPT == 1:
        return tl.max(keys, axis=0, keep_dims=True)
    else:  # noqa: RET505 - both returns would be compiled
        return tl.topk(keys, KEPT)


@triton.jit
def _best_logits(logits, kept, stride, num_left, KEPT: tl.constexpr, PART: tl.constexpr):
    """The best keys of a part of a row: the upper half is ordered as the logits, the lower half as ids backwards."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * stride + ids, mask=ids < num_left, other=0.0) + 0.0  # -0 becomes 0
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(ids < num_left, (order << 32) | (0x7FFFFFFF - ids).to(tl.int64), _LOWEST)
    tl.store(kept + (row * tl.num_programs(1) + part) * KEPT + tl.arange(0, KEPT), _best(keys, KEPT))


@triton.jit
def _best_keys(keys, kept, stride, num_left, KEPT: tl.constexpr, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    found = tl.load(keys + row * stride + at, mask=at < num_left, other=_LOWEST)
    tl.store(kept + (row * tl.num_programs(1) + part) * KEPT + tl.arange(0, KEPT), _best(found, KEPT))


@triton.jit(do_not_specialize=["k"])
def _take(
    keys, logits, ids, best, stride, k,
    KEPT: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, KEPT)
    found = 0x7FFFFFFF - tl.load(keys + row * KEPT + at).to(tl.int32)
    tl.store(ids + row * k + at, found, mask=at < k)
    tl.store(best + row * k + at, tl.load(logits + row * stride + found, mask=at < k), mask=at < k)

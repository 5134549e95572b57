"""The paged cache of keys and values on the device, and the step that turns q and k and writes into it, in Triton."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnet_inference.backends.cuda_early import early, wait_for_last
from bitnet_inference.backends.cuda_variants import Variant

BLOCK_TOKENS = 16
CacheDtype = Literal["bfloat16", "float32", "int8"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
_HEADS = 4  # of q, or of k and v, that one program turns
_TOKENS = tl.constexpr(BLOCK_TOKENS)
# Products are rounded before they are added, as in the reference.
_OPTIONS = {"num_warps": 2, "enable_fp_fusion": False}


class DeviceBatch(NamedTuple):
    """A `contract.Batch` on the device, int32: S sequences with T tokens in all.

    A negative slot is written to nowhere: so are tokens that only fill up a graph, behind `starts[S]`. A sequence may
    have no tokens. `sequences` has each token's. The two bounds are known to the host: no sequence has more than
    `max_query` tokens, no position is `max_context` or more.
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    starts: Tensor  # [S + 1]
    block_tables: Tensor  # [S, B]
    sequences: Tensor  # [T]
    max_query: int
    max_context: int


class Cache:
    """Keys and values of all layers, in blocks of BLOCK_TOKENS: [layer, key or value, block, head, token, dimension].

    As int8 each head of each token has a scale, float32. Blocks hold anything until they are written.
    """

    def __init__(
        self, dtype: CacheDtype, num_layers: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.dtype, self.num_kv_heads, self.head_dim, self.device = dtype, num_kv_heads, head_dim, device
        self._num_layers = num_layers
        is_gpu = device.type == "cuda"
        self.num_processors: int = torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1
        item_bytes = head_dim * DTYPES[dtype].itemsize + (4 if dtype == "int8" else 0)
        self.block_bytes = 2 * num_layers * num_kv_heads * BLOCK_TOKENS * item_bytes
        self.reserve(0)

    @property
    def num_bytes(self) -> int:
        """Memory of the reserved blocks."""
        return int(self._values.nbytes + self._scales.nbytes)

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many blocks, in other memory than before; raises torch.cuda.OutOfMemoryError."""
        shape = (self._num_layers, 2, num_blocks, self.num_kv_heads, BLOCK_TOKENS)
        self._values = torch.empty(0)  # what was there goes first
        self._scales = torch.empty(shape if self.dtype == "int8" else 0, dtype=torch.float32, device=self.device)
        self._values = torch.empty((*shape, self.head_dim), dtype=DTYPES[self.dtype], device=self.device)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in order."""
        for group in _independent(pairs):
            sources, targets = torch.tensor(group, device=self.device).T
            self._values[:, :, targets] = self._values[:, :, sources]
            if self.dtype == "int8":
                self._scales[:, :, targets] = self._scales[:, :, sources]

    def layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The keys, the values, and their scales, which are the values once more where there are none."""
        keys, values = self._values[layer]
        return keys, values, *(self._scales[layer] if self.dtype == "int8" else (keys, values))


def rope_write(cache: Cache, layer: int, q: Tensor, k: Tensor, v: Tensor, angles: Tensor, batch: DeviceBatch) -> None:
    """Turn q in place; turn k and write it and v into the layer's cache, rounded to its dtype. k stays as it is.

    q: float32 [T, heads * D], k and v [T, kv_heads * D], angles [T, D] of `cuda_rows.rotations`; rows may be any
    distance apart. The cache holds the bits of `reference.rotated`, rounded by `to_bfloat16` or `to_int8`.
    """
    dim, kv_heads = cache.head_dim, cache.num_kv_heads
    num_heads = q.shape[1] // dim
    grid = (q.shape[0], triton.cdiv(num_heads, _HEADS) + triton.cdiv(kv_heads, _HEADS))
    _rope_write[grid](
        q, k, v, angles, batch.slots, *cache.layer(layer), q.stride(0), k.stride(0), v.stride(0), angles.stride(0),
        **_constants(cache.dtype, num_heads, kv_heads, dim), **early(q.device), **_OPTIONS,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """What BitNet b1.58 2B-4T and the default model launch, and heads of an odd size."""
    for dtype, name in (("bfloat16", "*bf16:16"), ("float32", "*fp32:16"), ("int8", "*i8:16")):
        signature = dict.fromkeys(("q", "k", "v", "angles"), "*fp32:16") | {"slots": "*i32:16"}
        signature |= dict.fromkeys(("keys", "values"), name)
        signature |= dict.fromkeys(("key_scales", "value_scales"), "*fp32:16" if dtype == "int8" else name)
        signature |= dict.fromkeys(("q_stride", "k_stride", "v_stride", "angles_stride"), "i32:16")
        for num_heads, kv_heads, dim in ((20, 5, 128), (4, 2, 32), (12, 12, 80)):
            yield Variant(_rope_write, signature, _constants(dtype, num_heads, kv_heads, dim), 2)


def _constants(dtype: str, num_heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    half = triton.next_power_of_2(dim // 2)
    return {
        "INT8": dtype == "int8",
        "HEADS": num_heads,
        "KV_HEADS": kv_heads,
        "DIM": dim,
        "HALF": half,
        "GROUP": _HEADS,
    }


def _independent(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The pairs in order, in groups in which no block is written before it is read, nor twice."""
    group: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, target in pairs:
        if source in written or target in written:
            yield group
            group, written = [], set()
        group.append((source, target))
        written.add(target)
    if group:
        yield group


@triton.jit
def _rounded_int8(first, second):
    """Two halves of rows to int8 codes, and the scale of each row, as `reference.to_int8` does it."""
    largest = tl.maximum(tl.max(_magnitudes(first), axis=1), tl.max(_magnitudes(second), axis=1))
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    return _nearest(tl.div_rn(first, divisor)), _nearest(tl.div_rn(second, divisor)), scale


@triton.jit
def _magnitudes(value):
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _nearest(value):
    # Beside 1.5 * 2^23 a float has no bits for fractions; halves go to even.
    return (value + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def rounded_bfloat16(value: tl.tensor) -> tl.tensor:
    """Float32 to the nearest bfloat16, ties to even, still as float32; in integers, which mean the same everywhere."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(value == value, nearest, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _write(
    first, second, target, scales, place, row_mask,
    at, DIM: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Both halves of heads, rounded, to their places, counted in heads of tokens."""
    to = target + place[:, None] * DIM + at[None, :]
    mask = row_mask[:, None] & (at < DIM // 2)[None, :]
    if INT8:
        first, second, scale = _rounded_int8(first, second)
        tl.store(scales + place, scale, mask=row_mask)
    elif target.dtype.element_ty == tl.bfloat16:
        first, second = rounded_bfloat16(first).to(tl.bfloat16), rounded_bfloat16(second).to(tl.bfloat16)
    tl.store(to, first, mask=mask)
    tl.store(to + DIM // 2, second, mask=mask)


@triton.jit
def _rope_write(
    q, k, v, angles, slots, keys, values,
    key_scales, value_scales, q_stride, k_stride, v_stride,
    angles_stride, INT8: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    cosine = tl.load(angles + token * angles_stride + at, mask=at < DIM // 2, other=0.0)[None, :]
    sine = tl.load(angles + token * angles_stride + DIM // 2 + at, mask=at < DIM // 2, other=0.0)[None, :]
    num_q_groups = (HEADS + GROUP - 1) // GROUP
    if group < num_q_groups:
        heads = group * GROUP + tl.arange(0, GROUP)
        mask = (heads < HEADS)[:, None] & (at < DIM // 2)[None, :]
        place = q + token * q_stride + heads[:, None] * DIM + at[None, :]
        a, b = tl.load(place, mask=mask, other=0.0), tl.load(place + DIM // 2, mask=mask, other=0.0)
        tl.store(place, a * cosine - b * sine, mask=mask)
        tl.store(place + DIM // 2, b * cosine + a * sine, mask=mask)
    else:
        heads = (group - num_q_groups) * GROUP + tl.arange(0, GROUP)
        slot = tl.load(slots + token).to(tl.int64)
        row_mask = heads < tl.where(slot < 0, 0, KV_HEADS)
        mask = row_mask[:, None] & (at < DIM // 2)[None, :]
        offsets = heads[:, None] * DIM + at[None, :]
        where = (slot // _TOKENS * KV_HEADS + heads) * _TOKENS + slot % _TOKENS
        place = k + token * k_stride + offsets
        a, b = tl.load(place, mask=mask, other=0.0), tl.load(place + DIM // 2, mask=mask, other=0.0)
        _write(a * cosine - b * sine, b * cosine + a * sine, keys, key_scales, where, row_mask, at, DIM, INT8)
        place = v + token * v_stride + offsets
        a, b = tl.load(place, mask=mask, other=0.0), tl.load(place + DIM // 2, mask=mask, other=0.0)
        _write(a, b, values, value_scales, where, row_mask, at, DIM, INT8)

"""Gate, RMSNorm and int8 quantisation of rows in one launch, rotary angles, and sums of rows, in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bitnet_inference.backends.cuda_early import early, wait_for_last
from bitnet_inference.backends.cuda_variants import Variant

MAX_HELD = 8192  # elements of a row that one program holds in registers
_MAX_BLOCK = 4096  # of longer rows, which are read again for every pass
_ADD_BLOCK = 1024
NONE, RELU2, SILU, GELU = (tl.constexpr(value) for value in range(4))
ACTIVATIONS = {None: 0, "relu2": 1, "silu": 2, "gelu": 3}


class Codes(NamedTuple):
    """Rows as bit_linear quantises them: `codes` int8 [T, K], `scales` float32 [T], the s_x of each row."""

    codes: Tensor
    scales: Tensor


def rows(
    x: Tensor, up: Tensor | None, activation: str | None, weight: Tensor | None, eps: float, out: Tensor | Codes
) -> None:
    """activation(x) * up, then RMSNorm, then quantisation by row: what is None is left out.

    x and up: float32 [T, K], rows any distance apart. `weight`: float32 [K], or shorter, dividing K: then each part of
    a row that is as long as it is normed on its own. `out`: float32 [T, K], which may be x, or the codes of the rows.
    Equal rows give equal bits in any batch. Codes and scales are those of `ternary.quantize_rows` of the rows that come
    without quantisation, but for the order in which a norm adds squares; a row with an element that is not finite gets
    the scale NaN.
    """
    num_rows, width = x.shape
    num_parts = 1 if weight is None else width // weight.shape[0]
    if num_parts > 1 and isinstance(out, Codes):
        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows(x, up, activation, weight, eps, normed)
        return rows(normed, None, None, None, 0.0, out)
    part = width // num_parts
    target, scales = out if isinstance(out, Codes) else (out, out)
    kernel, constants, num_warps = _row_launch(part, activation, weight is not None, isinstance(out, Codes))
    kernel[(num_rows, num_parts)](
        x, x if up is None else up, x if weight is None else weight, target, scales,
        x.stride(0), 0 if up is None else up.stride(0), target.stride(0), part, eps, **constants, **early(x.device),
        num_warps=num_warps, enable_fp_fusion=False,  # a fused multiply-add would move codes at ties
    )  # fmt: skip
    return None


def rotations(positions: Tensor, frequencies: Tensor, out: Tensor) -> None:
    """Positions int32 [T] times frequencies float32 [D / 2]: D / 2 cosines, then the sines, into float32 [T, D]."""
    half = frequencies.shape[0]
    constants = {"BLOCK": triton.next_power_of_2(half)}
    _rotations[(len(positions),)](
        positions, frequencies, out, out.stride(0), half, **constants, num_warps=1, enable_fp_fusion=False
    )


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """x + y, float32 [T, K]; `out` may be either."""
    grid = (x.shape[0], triton.cdiv(x.shape[1], _ADD_BLOCK))
    strides = x.stride(0), y.stride(0), out.stride(0)
    _add[grid](x, y, out, *strides, x.shape[1], BLOCK=_ADD_BLOCK, num_warps=4, enable_fp_fusion=False)


def variants() -> Iterator[Variant]:
    """What BitNet b1.58 2B-4T and the default model launch, and rows that are too long for registers."""
    inputs = dict.fromkeys(("x", "up", "weight"), "*fp32:16")
    numbers = dict.fromkeys(("x_stride", "up_stride", "out_stride", "width"), "i32:16") | {"eps": "fp32"}
    kinds = ((None, True, True), (None, True, False), (None, False, True), ("relu2", True, True), ("silu", False, True),
             ("gelu", False, True), ("silu", True, False))  # fmt: skip
    for width, (activation, is_normed, is_quantised) in product((128, 256, 768, 2560, 6912, 16384), kinds):
        kernel, constants, num_warps = _row_launch(width, activation, is_normed, is_quantised)
        outputs = {"out": "*i8:16" if is_quantised else "*fp32:16", "scales": "*fp32:16"}
        yield Variant(kernel, inputs | outputs | numbers, constants, num_warps)
    kernel, constants, num_warps = _row_launch(1, None, True, False)
    single = constants | dict.fromkeys(("x_stride", "up_stride", "out_stride", "width"), 1)  # as Triton takes any 1
    yield Variant(kernel, inputs | {"out": "*fp32:16", "scales": "*fp32:16", "eps": "fp32"}, single, num_warps)
    angles = {"positions": "*i32:16", "frequencies": "*fp32:16", "out": "*fp32:16"}
    yield Variant(_rotations, angles | {"out_stride": "i32:16", "half": "i32:16"}, {"BLOCK": 64}, 1)
    tensors = dict.fromkeys(("x", "y", "out"), "*fp32:16")
    numbers = dict.fromkeys(("x_stride", "y_stride", "out_stride", "width"), "i32:16")
    yield Variant(_add, tensors | numbers, {"BLOCK": _ADD_BLOCK})


def _row_launch(
    width: int, activation: str | None, is_normed: bool, is_quantised: bool
) -> tuple[Any, dict[str, Any], int]:
    """The kernel for rows of this width, its constants, and its number of warps."""
    kernel, block = (_held_row, triton.next_power_of_2(width)) if width <= MAX_HELD else (_long_row, _MAX_BLOCK)
    constants = {"ACTIVATION": ACTIVATIONS[activation], "NORM": is_normed, "QUANTIZE": is_quantised, "BLOCK": block}
    return kernel, constants, min(16, max(1, block // 512))


@triton.jit
def _gated(x, up, columns, width, ACTIVATION: tl.constexpr):
    """activation(x) * up of these columns; 0 beyond the width."""
    value = tl.load(x + columns, mask=columns < width, other=0.0)
    if ACTIVATION == NONE:
        return value
    if ACTIVATION == RELU2:
        kept = tl.where(value < 0, 0.0, value)
        value = kept * kept
    elif ACTIVATION == SILU:
        value = value / (1.0 + tl.exp(tl.minimum(-value, 87.0)))  # no overflow: what is left is nearly 0
    else:  # (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        exponent = value * (value * value * -0.0713548162726 - 1.59576912160573)
        value = value / (1.0 + tl.exp(tl.minimum(exponent, 87.0)))
    return value * tl.load(up + columns, mask=columns < width, other=0.0)


@triton.jit
def _root(squares, width, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, tl.cast(width, tl.float32)) + eps))  # 1 is no tensor


@triton.jit
def _magnitudes(value):
    """The bits of |value|: they are ordered as the magnitudes, with what is not finite above all others."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest):
    """s_x of a row whose largest magnitude has these bits: fl(fl(1 / max) * 127), two roundings."""
    magnitude = tl.maximum(largest.to(tl.float32, bitcast=True), 1e-5)
    return tl.where(largest < 0x7F800000, tl.div_rn(1.0, magnitude) * 127.0, float("nan"))


@triton.jit
def _codes(value, scale):
    """round(value * scale), halves to even: beside 1.5 * 2^23 a float has no bits for fractions."""
    return (value * scale + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _held_row(
    x, up, weight, out, scales, x_stride, up_stride, out_stride, width,
    eps, ACTIVATION: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * width
    columns = tl.arange(0, BLOCK)
    value = _gated(x + row * x_stride + column, up + row * up_stride + column, columns, width, ACTIVATION)
    if NORM:
        root = _root(tl.sum(value * value), width, eps)
        value = value * root * tl.load(weight + columns, mask=columns < width, other=0.0)
    target = out + row * out_stride + column + columns
    if QUANTIZE:
        scale = _scale(tl.max(_magnitudes(value)))
        tl.store(scales + row, scale)
        tl.store(target, _codes(value, scale), mask=columns < width)
    else:
        tl.store(target, value, mask=columns < width)


@triton.jit
def _long_row(
    x, up, weight, out, scales, x_stride, up_stride, out_stride, width,
    eps, ACTIVATION: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * width
    x, up, out = x + row * x_stride + column, up + row * up_stride + column, out + row * out_stride + column
    root = 1.0
    if NORM:
        squares = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, width, BLOCK):
            value = _gated(x, up, begin + tl.arange(0, BLOCK), width, ACTIVATION)
            squares += value * value
        root = _root(tl.sum(squares), width, eps)
    scale = 1.0
    if QUANTIZE:
        largest = tl.zeros([BLOCK], tl.int32)
        for begin in range(0, width, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            value = _gated(x, up, columns, width, ACTIVATION)
            if NORM:
                value = value * root * tl.load(weight + columns, mask=columns < width, other=0.0)
            largest = tl.maximum(largest, _magnitudes(value))
        scale = _scale(tl.max(largest))
        tl.store(scales + row, scale)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = _gated(x, up, columns, width, ACTIVATION)
        if NORM:
            value = value * root * tl.load(weight + columns, mask=columns < width, other=0.0)
        tl.store(out + columns, _codes(value, scale) if QUANTIZE else value, mask=columns < width)


@triton.jit
def _rotations(
    positions,
    frequencies,
    out,
    out_stride,
    half,
    BLOCK: tl.constexpr,
):
    token, at = tl.program_id(0), tl.arange(0, BLOCK)
    angles = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=at < half, other=0.0)
    tl.store(out + token * out_stride + at, tl.cos(angles), mask=at < half)
    tl.store(out + token * out_stride + half + at, tl.sin(angles), mask=at < half)


@triton.jit
def _add(
    x,
    y,
    out,
    x_stride,
    y_stride,
    out_stride,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(x + row * x_stride + columns, mask=columns < width)
    right = tl.load(y + row * y_stride + columns, mask=columns < width)
    tl.store(out + row * out_stride + columns, left + right, mask=columns < width)

"""float32 from the float formats that files hold, bfloat16 being kept as its uint16 bits, and roundings to them."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatName = Literal["float32", "float16", "bfloat16"]


def to_float32(data: NDArray[Any], dtype: FloatName) -> NDArray[np.float32]:
    """The values of an array of any shape in float32; exact. Not a copy where they are float32 already."""
    if dtype == "bfloat16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.astype(np.float32, copy=False)


def rounded(value: np.float32, dtype: FloatName) -> np.float32:
    """A finite value rounded to the nearest of `dtype`, halves to even."""
    if dtype == "float32":
        return value
    if dtype == "float16":
        return np.float32(np.float16(value))
    bits = int(np.float32(value).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return np.uint32(bits & 0xFFFF0000).view(np.float32)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of finite float32 values rounded to bfloat16, halves to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)

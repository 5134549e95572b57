"""Tensors of floats: their dtypes, their values in float32, and whether two are the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.floats import FloatName, to_float32
from bitnet_inference.formats.safetensors_files import Tensor

FLOATS: dict[str, FloatName] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_COMPARED_BYTES = 1 << 22  # at a time: compared whole, tables would take memory of their size


def dtype_of(tensor: Tensor | None) -> FloatName:
    """The dtype of a tensor of floats; float32 where there is none."""
    return FLOATS.get(tensor.dtype, "float32") if tensor else "float32"


def float_values(tensor: Tensor) -> NDArray[np.float32]:
    """The values of a tensor of floats, in float32."""
    return to_float32(tensor.array(), FLOATS[tensor.dtype])


def same_tables(one: Tensor, other: Tensor) -> bool:
    """Whether two tables hold the same bits, in the same dtype and shape."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not one.shape:
        return False
    first, second = (np.frombuffer(each.data, np.uint8, each.num_bytes, each.begin) for each in (one, other))
    places = (slice(at, at + _COMPARED_BYTES) for at in range(0, len(first), _COMPARED_BYTES))
    same = all(np.array_equal(first[place], second[place]) for place in places)
    one.release()
    other.release()
    return same

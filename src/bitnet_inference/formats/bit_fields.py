"""Small whole numbers in streams of bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def bit_fields(packed: Bytes, bits: int) -> Bytes:
    """Rows [n, m] of bytes as numbers of 1 to 8 bits: [n, 8 m / bits], the first in the lowest bits."""
    if bits == 8:
        return packed
    if bits == 1:
        return np.unpackbits(packed, axis=1, bitorder="little")
    if 8 % bits == 0:
        mask = np.uint8((1 << bits) - 1)
        fields = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
        return np.stack(fields, axis=2).reshape(len(packed), -1)
    single = np.unpackbits(packed, axis=1, bitorder="little").reshape(len(packed), -1, bits)
    return single @ (np.uint8(1) << np.arange(bits, dtype=np.uint8))

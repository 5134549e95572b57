"""Products of few rows as kernels for Apple's GPUs: each weight is read once, and nothing beside the weights.

They are bodies of functions: MLX writes the head from the names of the arrays. 32 lanes of a SIMD group share four rows
of the matrix and add up all of their columns for every token.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

MAX_TERNARY_TOKENS = 4  # beyond, MLX's own products read the weights less often
MAX_DENSE_TOKENS = 16  # beyond, it pays to widen the weights to float32 first, which MLX's own products need
ROWS, LANES, THREADS = 4, 32, 64  # rows and lanes of a SIMD group, threads of a group of threads

# codes: float32 [TOKENS, 16 * WORDS]; words: uint32 [OUT, WORDS]; scales: float32 [OUT]; inverse: float32 [TOKENS, 1]
# A byte's fields stay where they are and the code is divided by 4, 16, 64 instead, which is exact.
TERNARY = """
    const uint lane = thread_position_in_grid.x % 32;
    const uint first = thread_position_in_grid.x / 32 * 4;
    float sums[4][TOKENS] = {};
    for (uint word = lane; word < WORDS; word += 32) {
        uint fields[4];
        for (uint row = 0; row < 4; row++) {
            fields[row] = words[size_t(min(first + row, uint(OUT - 1))) * WORDS + word];
        }
        for (uint token = 0; token < TOKENS; token++) {
            const size_t at = (size_t(token) * WORDS + word) * 16;
            for (uint part = 0; part < 4; part++) {
                const float a = codes[at + 4 * part], b = codes[at + 4 * part + 1];
                const float c = codes[at + 4 * part + 2], d = codes[at + 4 * part + 3];
                const float all = a + b + c + d;
                for (uint row = 0; row < 4; row++) {
                    const uint four = fields[row] >> (8 * part);
                    sums[row][token] += a * float(four & 3) + b * 0.25f * float(four & 12) +
                                        c * 0.0625f * float(four & 48) + d * 0.015625f * float(four & 192) - all;
                }
            }
        }
    }
    for (uint row = 0; row < 4; row++) {
        for (uint token = 0; token < TOKENS; token++) {
            const float sum = simd_sum(sums[row][token]);
            if (lane == 0 && first + row < OUT) {
                out[size_t(token) * OUT + first + row] = sum * (scales[first + row] * inverse[token]);
            }
        }
    }
"""

# x: float32 [TOKENS, COLUMNS]; weights: bfloat16 or float16 [OUT, COLUMNS]
DENSE = """
    const uint lane = thread_position_in_grid.x % 32;
    const uint first = thread_position_in_grid.x / 32 * 4;
    float sums[4][TOKENS] = {};
    constexpr uint together = COLUMNS % 4 == 0 ? 4 : 1;
    for (uint begin = together * lane; begin < COLUMNS; begin += 32 * together) {
        for (uint column = begin; column < begin + together; column++) {
            float values[4];
            for (uint row = 0; row < 4; row++) {
                values[row] = float(weights[size_t(min(first + row, uint(OUT - 1))) * COLUMNS + column]);
            }
            for (uint token = 0; token < TOKENS; token++) {
                const float each = x[size_t(token) * COLUMNS + column];
                for (uint row = 0; row < 4; row++) {
                    sums[row][token] = fma(each, values[row], sums[row][token]);
                }
            }
        }
    }
    for (uint row = 0; row < 4; row++) {
        for (uint token = 0; token < TOKENS; token++) {
            const float sum = simd_sum(sums[row][token]);
            if (lane == 0 && first + row < OUT) {
                out[size_t(token) * OUT + first + row] = sum;
            }
        }
    }
"""


class MetalProducts:
    """The kernels, for arrays on Apple's GPU."""

    def __init__(self) -> None:
        """Raises RuntimeError where MLX has no Metal."""
        inputs = ["codes", "words", "scales", "inverse"]
        self._ternary: Any = mx.fast.metal_kernel("bitnet_ternary", inputs, ["out"], TERNARY)
        self._dense: Any = mx.fast.metal_kernel("bitnet_dense", ["x", "weights"], ["out"], DENSE)

    def ternary(self, codes: mx.array, words: mx.array, scales: mx.array, inverse: mx.array) -> mx.array:
        """As mlx_weights.Codes.product, of at most MAX_TERNARY_TOKENS rows: float32 [tokens, out]."""
        sizes = {"TOKENS": codes.shape[0], "OUT": words.shape[0], "WORDS": words.shape[1]}
        return _run(self._ternary, [codes, words, scales, inverse], sizes)

    def dense(self, x: mx.array, weights: mx.array) -> mx.array:
        """x @ weights^T in float32, of at most MAX_DENSE_TOKENS rows: [tokens, out]."""
        sizes = {"TOKENS": x.shape[0], "OUT": weights.shape[0], "COLUMNS": weights.shape[1]}
        return _run(self._dense, [x, weights], sizes)


def _run(kernel: Any, inputs: list[mx.array], sizes: dict[str, int]) -> mx.array:
    (out,) = kernel(
        inputs=inputs,
        template=list(sizes.items()),
        grid=(-(-sizes["OUT"] // ROWS) * LANES, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(sizes["TOKENS"], sizes["OUT"])],
        output_dtypes=[mx.float32],
    )
    return out


def metal_products() -> MetalProducts | None:
    """The kernels where there is Metal and they give the right numbers on this machine; None elsewhere."""
    if not mx.metal.is_available():
        return None
    try:
        metal = MetalProducts()
        return metal if is_right(metal) else None
    except RuntimeError:  # this Metal does not compile them
        return None


def is_right(metal: MetalProducts) -> bool:
    """Products of whole numbers that float32 and bfloat16 hold, with rows and words that fill no SIMD group."""
    fields, x = np.arange(9 * 528).reshape(9, 528) ** 2 % 3, np.arange(3 * 528).reshape(3, 528) ** 2 % 127
    words = (fields.reshape(9, 33, 16) << 2 * np.arange(16)).sum(axis=2).astype(np.uint32)
    codes, ones = mx.array(x.astype(np.float32)), mx.ones((9,))
    found = metal.ternary(codes, mx.array(words), ones, ones[:3, None])
    dense = metal.dense(codes, mx.array(fields.astype(np.float32)).astype(mx.bfloat16))
    mx.eval(found, dense)  # NumPy's way to them has none for the error of a kernel that does not compile
    return np.array_equal(found, x @ (fields - 1).T) and np.array_equal(dense, x @ fields.T)

"""The verbs of the decoder as operations of Core ML's MIL.

Tensors are [1, T, width] of one float type. In float32 they round in the order of the reference, but for sums. The
Neural Engine computes in float16, which ends at 65,504 and loses digits below 6e-5: there, squares are taken of what
was divided by its largest magnitude, and no factor is made from a small number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.checkpoint import Activation

UNIT = 1 / 128  # what a code of 1 is in a product: exact in float16, and sums of 65,504 columns still fit
_HALF_FLOOR = 2.0**-14  # the smallest number that float16 holds with all digits
_LEAST_LARGEST = 2.0**-9  # 127 divided by it is as large as float16 can be; rows below it have fewer steps
_UNSEEN = -3e4  # what is added to a score that must not count
Var = Any


@dataclass(frozen=True)
class Scaled:
    """What stands for `rows` times all `factors` [1, T, 1]; norms and quantisation need not multiply."""

    rows: Var
    factors: tuple[Var, ...] = ()


@dataclass(frozen=True)
class Codes:
    """Rows as codes -127 .. 127 by their largest magnitude, times UNIT; `inverse` [1, T, 1] makes them rows again."""

    rows: Var
    inverse: Var


class Verbs:
    """Adds operations to the function that is being built. `half`: in float16, else in float32."""

    def __init__(self, builder: Any, half: bool) -> None:
        self.mb, self.half = builder, half
        self.dtype: type[np.floating[Any]] = np.float16 if half else np.float32

    def number(self, value: float) -> np.floating[Any]:
        """A constant."""
        return self.dtype(value)

    def mul(self, x: Var, y: Var) -> Var:
        """x * y."""
        return self.mb.mul(x=x, y=y)

    def divided(self, x: Var, y: Var) -> Var:
        """x / y."""
        return self.mb.real_div(x=x, y=y)

    def reshaped(self, x: Var, *shape: int) -> Var:
        """x in another shape."""
        return self.mb.reshape(x=x, shape=shape)

    def plain(self, x: Scaled) -> Var:
        """The rows themselves."""
        return reduce(self.mul, x.factors, x.rows)

    def quantised(self, scaled: Scaled) -> Codes:
        """Rows of codes, a scale each."""
        x = scaled.rows
        if self.half:
            largest = self._largest(x, _LEAST_LARGEST)
            scale = self.divided(self.number(127), largest)
            inverse = self.mul(largest, self.number(1 / (127 * UNIT)))
        else:
            largest = self._largest(x, 1e-5)
            scale = self.mul(self.divided(self.number(1), largest), self.number(127))
            inverse = self.mul(self.divided(self.number(1), scale), self.number(1 / UNIT))
        codes = self.mb.round(x=self.mul(x, scale))
        return Codes(self.mul(codes, self.number(UNIT)), reduce(self.mul, scaled.factors, inverse))

    def product(self, x: Var, weight: Var) -> Var:
        """x @ W^T."""
        return self.mb.linear(x=x, weight=weight)

    def norm(self, x: Scaled, weight: Var, eps: float, parts: int = 1) -> Scaled:
        """RMSNorm, of each of the parts of a row on its own."""
        shape = x.rows.shape
        if parts > 1:
            assert not x.factors
            x = Scaled(self.reshaped(x.rows, *shape[:-1], parts, shape[-1] // parts))
        normed = self._half_normed(x, weight, eps) if self.half else self._normed(x.rows, weight, eps)
        return normed if parts == 1 else Scaled(self.reshaped(self.plain(normed), *shape))

    def _normed(self, x: Var, weight: Var, eps: float) -> Scaled:
        mean = self.mb.reduce_mean(x=self.mul(x, x), axes=[-1], keep_dims=True)
        root = self.mb.sqrt(x=self.mb.add(x=mean, y=self.number(eps)))
        return Scaled(self.mul(self.mul(x, self.divided(self.number(1), root)), weight))

    def _half_normed(self, x: Scaled, weight: Var, eps: float) -> Scaled:
        """x / sqrt(mean(x^2) + eps), both divided by the largest magnitude and by the factors of x."""
        largest = self._largest(x.rows, _HALF_FLOOR)
        rows, root = self.divided(x.rows, largest), self.number(math.sqrt(eps))
        for each in (largest, *x.factors):
            root = self.divided(root, each)
        mean = self.mb.reduce_mean(x=self.mul(rows, rows), axes=[-1], keep_dims=True)
        root = self.mb.sqrt(x=self.mb.add(x=mean, y=self.mul(root, root)))
        return Scaled(self.mul(rows, weight), (self.divided(self.number(1), root),))

    def gate(self, x: Var, up: Var, activation: Activation, is_normed: bool) -> Scaled:
        """activation(x) * up; with factors where float16 might not hold it and only norms read it."""
        factors: tuple[Var, ...] = ()
        if self.half and is_normed:
            up, largest = self._in_unit(up)
            factors = (largest,)
            if activation == "relu2":
                x, largest = self._in_unit(x)
                factors = (largest, largest, *factors)
        if activation == "relu2":
            positive = self.mb.relu(x=x)
            return Scaled(self.mul(self.mul(positive, positive), up), factors)
        bent = self.mb.silu(x=x) if activation == "silu" else self.mul(x, self.mb.sigmoid(x=self._inner(x)))
        return Scaled(self.mul(bent, up), factors)

    def _inner(self, x: Var) -> Var:
        """2 * sqrt(2 / pi) * (x + 0.044715 * x^3), for (1 + tanh(y)) / 2 = sigmoid(2 * y)."""
        bent = self.mb.add(x=self.mul(self.mul(x, x), self.number(0.044715)), y=self.number(1))
        return self.mul(self.mul(x, bent), self.number(2 * math.sqrt(2 / math.pi)))

    def rope(self, x: Var, cosine: Var, sine: Var, head_dim: int) -> Var:
        """The halves of each head turned; cosine and sine are [1, T, 1, head_dim / 2]."""
        shape, half = x.shape, head_dim // 2
        a, b = self.mb.split(x=self.reshaped(x, *shape[:2], -1, head_dim), split_sizes=[half, half], axis=-1)
        first = self.mb.sub(x=self.mul(a, cosine), y=self.mul(b, sine))
        second = self.mb.add(x=self.mul(b, cosine), y=self.mul(a, sine))
        return self.reshaped(self.mb.concat(values=[first, second], axis=-1), *shape)

    def heads(self, x: Var, head_dim: int) -> Var:
        """[1, T, heads * head_dim] as [1, heads, T, head_dim]."""
        return self.mb.transpose(x=self.reshaped(x, *x.shape[:2], -1, head_dim), perm=[0, 2, 1, 3])

    def attend(self, q: Var, keys: Var, values: Var, mask: Var, scale: float) -> Var:
        """Attention of q [1, T, heads * head_dim] over keys and values [1, kv_heads, positions, head_dim].

        The queries that share keys are rows of one product; `mask` [1, 1, rows, positions] is added to their scores.
        """
        (_, num_kv_heads, _, head_dim), (_, tokens, width) = keys.shape, q.shape
        rows = self.heads(self.mul(q, self.number(scale)), head_dim)
        rows = self.reshaped(rows, 1, num_kv_heads, -1, head_dim)
        scores = self.mb.add(x=self.mb.matmul(x=rows, y=keys, transpose_y=True), y=mask)
        mixed = self.mb.matmul(x=self.mb.softmax(x=scores, axis=-1), y=values)
        mixed = self.mb.transpose(x=self.reshaped(mixed, 1, -1, tokens, head_dim), perm=[0, 2, 1, 3])
        return self.reshaped(mixed, 1, tokens, width)

    def _largest(self, x: Var, floor: float) -> Var:
        """The largest magnitude of each row, or `floor` where that is larger."""
        found = self.mb.reduce_max(x=self.mb.abs(x=x), axes=[-1], keep_dims=True)
        return self.mb.maximum(x=found, y=self.number(floor))

    def _in_unit(self, x: Var) -> tuple[Var, Var]:
        largest = self._largest(x, _HALF_FLOOR)
        return self.divided(x, largest), largest


def mask_rows(num_tokens: int, context: int, window: int) -> NDArray[np.float32]:
    """What is added to scores, for every position: [tokens, 2 * context - 1], of which `context` columns are taken.

    From column context - 1 - p on, they are for tokens at the positions p, p + 1, ...: each sees up to itself, and with
    a window the last so many.
    """
    behind = np.arange(num_tokens)[:, None] + (context - 1) - np.arange(2 * context - 1)
    return np.where((behind >= 0) & (behind < (window or context)), 0, _UNSEEN).astype(np.float32)

"""Keys and values of past tokens as MLX arrays: an array a layer, in slots as the scheduler gives them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

BLOCK_TOKENS = 16
Rows = tuple[mx.array, ...]  # [tokens, 2, heads, head_dim], keys and then values; of int8, their scales too
_DTYPES = {"bfloat16": mx.bfloat16, "float32": mx.float32}


class MlxCache:
    """The slots of all blocks, and behind them one that nobody reads and one that is zero."""

    def __init__(self, dtype: str, num_layers: int, num_heads: int, head_dim: int) -> None:
        """`dtype`: "bfloat16", "float32", or "int8" with a scale for each token and head."""
        self._dtype, self._heads = dtype, (num_heads, head_dim)
        self.layers: list[Rows] = [()] * num_layers
        self.num_slots = 0

    @property
    def block_bytes(self) -> int:
        """What a block takes over all layers."""
        num_heads, head_dim = self._heads
        row = {"bfloat16": 2 * head_dim, "float32": 4 * head_dim, "int8": head_dim + 4}[self._dtype]
        return len(self.layers) * BLOCK_TOKENS * 2 * num_heads * row

    @property
    def num_bytes(self) -> int:
        """Memory of what is reserved."""
        return sum(array.nbytes for layer in self.layers for array in layer)

    @property
    def waste(self) -> int:
        """The slot of tokens that fill up a batch."""
        return self.num_slots

    @property
    def nothing(self) -> int:
        """The slot that is zero."""
        return self.num_slots + 1

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many blocks; what was there before is gone."""
        self.num_slots = num_blocks * BLOCK_TOKENS
        self.layers = [()] * len(self.layers)  # given back before more is taken
        self.layers = [self.encode(mx.zeros((self.num_slots + 2, 2, *self._heads))) for _ in self.layers]
        for layer in self.layers:
            mx.eval(layer)

    def encode(self, rows: mx.array) -> Rows:
        """Keys and values as they are kept."""
        if self._dtype != "int8":
            return (rows.astype(_DTYPES[self._dtype]),)
        scales = mx.abs(rows).max(axis=-1, keepdims=True) / 127
        codes = mx.round(rows / mx.where(scales > 0, scales, 1))
        return codes.astype(mx.int8), scales

    def decode(self, rows: Rows) -> mx.array:
        """Keys and values that were kept, in float32, as attention reads them."""
        codes, *scales = (each.astype(mx.float32) for each in rows)
        return codes * scales[0] if scales else codes

    def write(self, slots: mx.array, layers: Sequence[Rows]) -> None:
        """Put a row into each of these slots, in every layer: in place, if nothing that reads the layer still runs."""
        for kept, rows in zip(self.layers, layers, strict=True):
            for array, row in zip(kept, rows, strict=True):
                array[slots] = row
        mx.async_eval(self.layers)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in order."""
        origins: dict[int, int] = {}
        for source, target in pairs:
            origins[target] = origins.get(source, source)
        begun = _slots(origins.values())
        rows = [tuple(array[begun] for array in kept) for kept in self.layers]
        mx.eval(rows)
        mx.synchronize()
        self.write(_slots(origins), rows)


def _slots(blocks: Iterable[int]) -> mx.array:
    return (mx.array(list(blocks))[:, None] * BLOCK_TOKENS + mx.arange(BLOCK_TOKENS)).reshape(-1)

"""From the hidden states of a prompt to one vector, with the same bits on every machine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.config import check_flag
from bitnet_inference.engine.prompt_reader import PromptReader, broken
from bitnet_inference.errors import InvalidParams
from bitnet_inference.formats.checkpoint import Pooling


class Pool:
    """Pools a prompt of so many tokens: its last state, or the mean of all."""

    def __init__(self, num_tokens: int, pooling: Pooling) -> None:
        first = num_tokens - 1 if pooling == "last" else 0
        self.reader = PromptReader(self._read, range(first, num_tokens), "hidden")
        self._total: NDArray[np.float32] | None = None

    def vector(self, normalize: bool) -> NDArray[np.float32]:
        """The result, [hidden], once all has been read; of length 1 if it is to be normalised (zeros stay zeros)."""
        assert self._total is not None, "nothing has been read"
        mean: NDArray[np.float32] = self._total / np.float32(len(self.reader.positions))
        if not np.isfinite(mean).all():
            raise broken("hidden states hold NaN or infinity")
        return _of_length_1(mean) if normalize else mean

    def _read(self, first: int, rows: NDArray[np.float32]) -> None:
        # A row at a time, in the order of the tokens: each sum of two float32 is rounded by IEEE's rule, and no
        # library decides in which order many are added.
        for row in rows:
            self._total = row.copy() if self._total is None else self._total + row


def _of_length_1(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    # Squares of float32 are exact in float64, and fsum rounds their true sum: it has no order. Root and quotient are
    # rounded by IEEE's rule.
    wide = vector.astype(np.float64)
    length = math.sqrt(math.fsum(wide * wide))
    return (wide / length).astype(np.float32) if length else vector


def check_embedding(pooling: object, normalize: object) -> None:
    """Raises InvalidParams for what is no way to pool."""
    if pooling not in (None, "last", "mean"):
        raise InvalidParams(f'pooling is {pooling!r}: choose "last" or "mean", or None for what the model says')
    check_flag("normalize", normalize)

"""From shares of a step to the flat Batch that a Model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.ints import Ints
from bitnet_inference.engine.scheduler import Share
from bitnet_inference.model.contract import Batch


class Batches:
    """Builds one batch after the other. Most are like the last: the same requests, a token each, in the same arrays."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._like_last = _SingleTokens([])

    def build(self, shares: Sequence[Share]) -> Batch:
        """As build_batch; valid until the next call."""
        for _, num_tokens, draft in shares:
            if num_tokens > 1 or draft:
                return build_batch(shares, self._block_size)
        blocks = [request.blocks for request, _, _ in shares]
        if blocks != self._like_last.blocks:  # the same objects, which only grow
            self._like_last = _SingleTokens(blocks)
        return self._like_last.fill(shares, self._block_size)


class _SingleTokens:
    """The batches of requests that hold these blocks and compute one token each.

    Single values go through memoryviews: NumPy's own ways are long, and not in the cache behind a model's weights.
    """

    def __init__(self, blocks: list[Ints]) -> None:
        self.blocks, count = blocks, len(blocks)
        token_ids, positions, slots = np.empty((3, count), dtype=np.int32)
        starts, tables = np.arange(count + 1, dtype=np.int32), np.empty((count, 0), dtype=np.int32)
        self._batch = Batch(token_ids, positions, slots, starts, tables)
        self._token_ids, self._positions, self._slots = memoryview(token_ids), memoryview(positions), memoryview(slots)
        self._num_known = [0] * count  # blocks in the tables

    def fill(self, shares: Sequence[Share], block_size: int) -> Batch:
        for row, (request, _, _) in enumerate(shares):
            position = request.num_computed
            index = position // block_size
            if index >= self._num_known[row]:
                self._note_blocks(row)
            self._token_ids[row] = request.tokens[position]
            self._positions[row] = position
            self._slots[row] = request.blocks[index] * block_size + position % block_size
        return self._batch

    def _note_blocks(self, row: int) -> None:
        blocks = self.blocks[row]
        if blocks.length > self._batch.block_tables.shape[1]:
            self._batch = replace(self._batch, block_tables=_tables(self.blocks, 2 * blocks.length))
            self._num_known = [each.length for each in self.blocks]
        self._batch.block_tables[row, : blocks.length] = blocks.view
        self._num_known[row] = blocks.length


def build_batch(shares: Sequence[Share], block_size: int) -> Batch:
    """The next tokens of each share, drafted ones behind, in order; the requests already have the blocks for them."""
    starts = [0, *accumulate([share.num_rows for share in shares])]
    token_ids, positions, slots = np.empty((3, starts[-1]), dtype=np.int32)
    for start, (request, num_tokens, draft) in zip(starts, shares, strict=False):
        first, end = request.num_computed, start + num_tokens
        part = slice(start, end + len(draft))
        token_ids[start:end] = request.tokens.view[first : first + num_tokens]
        token_ids[end : part.stop] = draft
        at = positions[part]
        at[:] = np.arange(first, first + len(at))
        slots[part] = request.blocks.view[at // block_size] * block_size + at % block_size
    blocks = [share.request.blocks for share in shares]
    return Batch(token_ids, positions, slots, np.array(starts, dtype=np.int32), _tables(blocks))


def _tables(blocks: Sequence[Ints], width: int = 0) -> NDArray[np.int32]:
    """A row for each of the lists, padded with 0, of at least this width."""
    tables = np.zeros((len(blocks), max([width, *[each.length for each in blocks]])), dtype=np.int32)
    for row, each in zip(tables, blocks, strict=True):
        row[: each.length] = each.view
    return tables

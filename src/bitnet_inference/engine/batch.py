"""From shares of a step to the flat Batch that a Model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.ints import Ints
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.share import Share
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


def build_batch(shares: Sequence[Share], block_size: int) -> Batch:
    """The next tokens of each share, drafted ones behind, in order; the requests already have the blocks for them."""
    starts = [0, *accumulate([num_tokens + len(draft) for _, num_tokens, draft in shares])]
    rows, wanted = _Rows(starts[-1]), []
    for start, (request, num_tokens, draft) in zip(starts, shares, strict=False):
        if num_tokens == 1 and not draft:
            rows.set(start, request, block_size)
        else:
            rows.set_many(start, request, num_tokens, draft, block_size)
        wanted += _wanted(start, request, num_tokens, draft)
    tables = _tables([share.request.blocks for share in shares])
    return Batch(*rows.arrays, np.array(starts, dtype=np.int32), tables, wanted=np.array(wanted, dtype=np.int32))


def _wanted(start: int, request: Request, num_tokens: int, draft: Sequence[int]) -> list[int]:
    """The rows that its reader gets, of a prompt, and those that tell next tokens once all known ones are computed."""
    end, first, unread = start + num_tokens, start - request.num_computed, request.unread  # `first`: row of position 0
    told = range(end - 1, end + len(draft)) if num_tokens == request.num_pending else range(end, end)
    return [*range(first + unread.start, min(told.start, first + unread.stop)), *told]


class _SingleTokens:
    """The batches of requests that hold these blocks and compute one token each."""

    def __init__(self, blocks: list[Ints]) -> None:
        self.blocks, self._rows = blocks, _Rows(len(blocks))
        starts, tables = np.arange(len(blocks) + 1, dtype=np.int32), np.empty((len(blocks), 0), dtype=np.int32)
        self._batch, self._num_known = Batch(*self._rows.arrays, starts, tables), [0] * len(blocks)

    def fill(self, shares: Sequence[Share], block_size: int) -> Batch:
        has_next = True
        for row, (request, _, _) in enumerate(shares):
            self._rows.set(row, request, block_size)
            num_blocks = request.blocks.length
            if num_blocks > self._num_known[row]:
                self._note_blocks(row)
            if request.num_computed + 1 >= num_blocks * block_size:
                has_next = False
        if has_next != self._batch.has_next:
            self._batch = replace(self._batch, has_next=has_next)
        return self._batch

    def _note_blocks(self, row: int) -> None:
        blocks = self.blocks[row]
        if blocks.length > self._batch.block_tables.shape[1]:
            self._batch = replace(self._batch, block_tables=_tables(self.blocks, 2 * blocks.length))
        self._batch.block_tables[row, : blocks.length] = blocks.view
        self._num_known[row] = blocks.length


class _Rows:
    """Token ids, positions and slots: `arrays`, a value a row each.

    A single value goes through a memoryview: NumPy's own way is long, and not in the cache behind a model's weights.
    """

    def __init__(self, count: int) -> None:
        token_ids, positions, slots = np.empty((3, count), dtype=np.int32)
        self.arrays: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]] = token_ids, positions, slots
        self._token_ids, self._positions, self._slots = token_ids.data, positions.data, slots.data

    def set(self, row: int, request: Request, block_size: int) -> None:
        """The next token of a request."""
        position = request.num_computed
        self._token_ids[row] = request.tokens[position]
        self._positions[row] = position
        self._slots[row] = request.blocks[position // block_size] * block_size + position % block_size

    def set_many(self, start: int, request: Request, num_tokens: int, draft: Sequence[int], block_size: int) -> None:
        """The next tokens of a request, and its draft behind."""
        first, end = request.num_computed, start + num_tokens
        rows = slice(start, end + len(draft))
        token_ids, positions, slots = self.arrays
        token_ids[start:end] = request.tokens.view[first : first + num_tokens]
        token_ids[end : rows.stop] = draft
        at = positions[rows]
        at[:] = np.arange(first, first + len(at))
        slots[rows] = request.blocks.view[at // block_size] * block_size + at % block_size


def _tables(blocks: Sequence[Ints], width: int = 0) -> NDArray[np.int32]:
    """A row for each of the lists, padded with 0, of at least this width."""
    tables = np.zeros((len(blocks), max([width, *[each.length for each in blocks]])), dtype=np.int32)
    for row, each in zip(tables, blocks, strict=True):
        row[: each.length] = each.view
    return tables

"""A batch as MLX computes it: sequences with as many tokens stand side by side, filled up where shapes shall repeat."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.mlx_cache import BLOCK_TOKENS, MlxCache
from bitnet_inference.model.contract import Batch

MAX_TOGETHER = 1 << 14  # positions that sequences of one token each may have in all to be one group
_MIN_POSITIONS = 64
Ints = NDArray[np.int32]


class Group(NamedTuple):
    """C sequences with L tokens each, which see at most P positions.

    `rows`: which tokens of the batch, [C, L]; None: all of them, C being their number. `positions`: [C, L].
    `past`: the slots of what lies before these tokens, [C, P]; a slot that is zero where nothing does.
    """

    rows: mx.array | None
    positions: mx.array
    past: mx.array


class Step(NamedTuple):
    """What the verbs need of a batch: token ids and positions, [T], and who sees what.

    `order`: where in the groups, one after the other, each token stands, [T]; None: in order.
    """

    token_ids: mx.array
    positions: mx.array
    groups: tuple[Group, ...]
    order: mx.array | None = None


def decoding(batch: Batch, cache: MlxCache) -> tuple[Ints, ...] | None:
    """Token ids [T], positions [T], slots [T] and the slots of the past [T, P] of a batch of one token a sequence.

    T and P are few different numbers: what fills up goes into the slot of waste. None where the batch has other
    sequences, or where some see so much more than others that they should not stand side by side.
    """
    count = len(batch.token_ids)
    width = _filled(int(batch.positions.max()) + 1, _MIN_POSITIONS)
    if (np.diff(batch.starts) != 1).any() or count * width > MAX_TOGETHER:
        return None
    more = (0, _filled(count) - count)
    token_ids, positions = np.pad(batch.token_ids, more), np.pad(batch.positions, more)
    slots = np.pad(batch.slots, more, constant_values=cache.waste)
    tables = np.pad(batch.block_tables, (more, (0, 0)))
    return token_ids, positions, slots, _past(tables, positions, width, cache)


def any_step(batch: Batch, cache: MlxCache) -> Step:
    """Every batch, nothing filled up but what sequences of a group see."""
    begins, counts = batch.starts[:-1], np.diff(batch.starts)
    ends = batch.positions[np.maximum(batch.starts[1:] - 1, 0)] + 1
    keys = [(int(count), _filled(int(end), _MIN_POSITIONS)) for count, end in zip(counts, ends, strict=True)]
    groups, rows = [], []
    for key in sorted(set(keys) - {key for key in keys if key[0] == 0}):
        chosen = [index for index, each in enumerate(keys) if each == key]
        rows.append(begins[chosen][:, None] + np.arange(key[0], dtype=np.int32))
        past = _past(batch.block_tables[chosen], batch.positions[begins[chosen]], int(ends[chosen].max()), cache)
        groups.append(Group(mx.array(rows[-1]), mx.array(batch.positions[rows[-1]]), mx.array(past)))
    order = np.argsort(np.concatenate([each.reshape(-1) for each in rows])).astype(np.int32)
    return Step(mx.array(batch.token_ids), mx.array(batch.positions), tuple(groups), mx.array(order))


def _past(tables: Ints, lengths: Ints, width: int, cache: MlxCache) -> Ints:
    """The slots of so many positions of each sequence, [C, width], as far as it has them."""
    at = np.arange(width, dtype=np.int32)
    blocks = tables[:, np.minimum(at // BLOCK_TOKENS, tables.shape[1] - 1)]
    found = blocks * np.int32(BLOCK_TOKENS) + at % np.int32(BLOCK_TOKENS)
    return np.where(at < lengths[:, None], found, np.int32(cache.nothing))


def _filled(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())

"""A model whose layers lie on two devices: the first ones on one, the others, with the head, on another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.model.contract import Batch, Capabilities, Model, Output

Hidden = NDArray[np.float32]  # rows of all tokens of a batch: [T, hidden]


class FirstStage(Model, Protocol):
    """A `Model` that has the first layers and what comes before them, and a cache for these layers alone."""

    def advance(self, batch: Batch) -> Hidden:
        """Advance every sequence of the batch by its tokens, through these layers."""
        ...


class LastStage(Model, Protocol):
    """The same with the last layers and the head."""

    def forward(self, batch: Batch, hidden: Hidden | None = None) -> Output:
        """Advance every sequence of the batch; `hidden` is what the first stage has given."""
        ...


class SplitModel:
    """A `Model` of two stages, one after the other.

    Its cache blocks are those of the stage with the larger ones; a stage with smaller ones has several for each.
    """

    def __init__(self, first: FirstStage, last: LastStage) -> None:
        """Takes the stages: closing this one closes them."""
        self.config, self._first, self._last = last.config, first, last
        limits = [stage.capabilities for stage in self._stages]
        size = math.lcm(*(each.block_size for each in limits))
        self._parts = [size // each.block_size for each in limits]  # blocks of a stage in one of ours
        self.capabilities = _both(limits, self._parts, size)
        noted: list[tuple[str, ...]] = [getattr(stage, "notes", ()) for stage in self._stages]
        self.notes = tuple(dict.fromkeys(note for notes in noted for note in notes))  # no part of the contract

    @property
    def _stages(self) -> tuple[Model, Model]:
        return self._first, self._last

    @property
    def num_bytes(self) -> int:
        """Memory of weights and caches, on both devices."""
        return sum(stage.num_bytes for stage in self._stages)

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks on both devices; raises OutOfMemory."""
        for stage, parts in zip(self._stages, self._parts, strict=True):
            stage.reserve(num_blocks * parts)

    def forward(self, batch: Batch) -> Output:
        """Advance every sequence of the batch by its tokens, through one stage and then the other."""
        first, last = (_cut(batch, parts) for parts in self._parts)
        return self._last.forward(last, self._first.advance(first))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order, on both devices."""
        for stage, parts in zip(self._stages, self._parts, strict=True):
            stage.copy_blocks([(a * parts + i, b * parts + i) for a, b in pairs for i in range(parts)])

    def close(self) -> None:
        """Close both stages."""
        for stage in self._stages:
            stage.close()


def load_stages(load_first: Callable[[], FirstStage], load_last: Callable[[], LastStage]) -> SplitModel:
    """A model of two stages that are loaded one after the other; where the second cannot be, the first is closed."""
    first = load_first()
    try:
        return SplitModel(first, load_last())
    except BaseException:
        first.close()
        raise


def _both(limits: Sequence[Capabilities], parts: Sequence[int], block_size: int) -> Capabilities:
    """What both stages can do."""
    block_bytes = [each.block_bytes * count for each, count in zip(limits, parts, strict=True)]
    num_blocks = min(each.available_bytes // size for each, size in zip(limits, block_bytes, strict=True))
    first, last = limits
    return Capabilities(
        block_size=block_size,
        block_bytes=sum(block_bytes),
        max_sequences=min(each.max_sequences for each in limits),
        max_tokens=min(each.max_tokens for each in limits),
        available_bytes=num_blocks * sum(block_bytes),
        quick_top=last.quick_top,
        samples=last.samples,
        same_bits=all(each.same_bits for each in limits),
        has_hidden=last.has_hidden,
        tile_tokens=max(each.tile_tokens for each in limits),
        threads=first.threads or last.threads,
    )


def _cut(batch: Batch, parts: int) -> Batch:
    """The same for blocks of which so many make one of ours; slots count tokens, and stay what they are."""
    if parts == 1:
        return batch
    tables = np.repeat(batch.block_tables * np.int32(parts), parts, axis=1)
    tables += np.tile(np.arange(parts, dtype=np.int32), batch.block_tables.shape[1])
    return replace(batch, block_tables=tables)

"""A model without an engine: sequences in step, greedy; and one that notes how long it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.model.contract import Background, Batch, Draw, Model, Output, weakly

Result = TypeVar("Result")


class TimedModel:
    """A `Model` that counts the seconds in which it computes, and reserves more blocks than it is asked for."""

    def __init__(self, model: Model, num_more: int = 0) -> None:
        """`num_more` blocks are left to others, behind those that are reserved."""
        self.config, self.capabilities = model.config, model.capabilities
        if self.capabilities.begin is not None:
            self.capabilities = replace(self.capabilities, begin=weakly(self._begin))
        self.seconds = 0.0
        self.num_forwards = 0
        self._model, self._num_more = model, num_more

    @property
    def num_bytes(self) -> int:
        """See Model."""
        return self._model.num_bytes

    def reserve(self, num_blocks: int) -> None:
        """See Model."""
        self._model.reserve(num_blocks + self._num_more)

    def forward(self, batch: Batch) -> Output:
        """See Model."""
        self.num_forwards += 1
        return _TimedOutput(self, self.timed(lambda: self._model.forward(batch)))

    def _begin(self, batch: Batch) -> Background:
        assert self._model.capabilities.begin is not None, "asked only where there is a background"
        return _TimedBackground(self, self._model.capabilities.begin(batch))

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """See Model."""
        self.timed(lambda: self._model.copy_blocks(pairs))

    def close(self) -> None:
        """See Model."""
        self._model.close()

    def timed(self, work: Callable[[], Result]) -> Result:
        """Do it, and count its time."""
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds += time.perf_counter() - begin


class _TimedOutput:
    def __init__(self, model: TimedModel, output: Output) -> None:
        self._model, self._output = model, output

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self._model.timed(lambda: self._output.full(rows))

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return self._model.timed(lambda: self._output.top(rows, k))

    def sample(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        return self._model.timed(lambda: self._output.sample(rows, draws))

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self._model.timed(lambda: self._output.hidden(rows))


class _TimedBackground:
    def __init__(self, model: TimedModel, background: Background) -> None:
        self._model, self._background = model, background

    @property
    def output(self) -> Output | None:
        output = self._background.output
        return None if output is None else _TimedOutput(self._model, output)

    def forward(self, batch: Batch) -> Output:
        self._model.num_forwards += 1
        return _TimedOutput(self._model, self._model.timed(lambda: self._background.forward(batch)))

    def go_on(self, seconds: float) -> None:
        self._model.timed(lambda: self._background.go_on(seconds))

    def close(self) -> None:
        self._background.close()


class BareBatch:
    """Sequences on a model, each in blocks of its own; greedy, as fast as they go without an engine."""

    def __init__(self, model: Model, *, first_block: int, num_blocks: int) -> None:
        """Uses these blocks of the cache, which somebody has reserved."""
        self._model, self._first_block, self._num_blocks = model, first_block, num_blocks

    def run(self, prompts: NDArray[np.int32], num_steps: int) -> None:
        """Compute prompts [sequences, length], a step with many of them at a time, and so many tokens behind each."""
        (count, length), size = prompts.shape, self._model.capabilities.block_size
        each = -(-(length + num_steps) // size)
        assert count * each <= self._num_blocks, "the sequences have no room"
        tables = self._first_block + np.arange(count * each, dtype=np.int32).reshape(count, each)
        tokens = np.concatenate([self._prompt(prompts[part], tables[part]) for part in self._groups(count, length)])
        rows = np.arange(count, dtype=np.int32)
        starts = np.arange(count + 1, dtype=np.int32)
        for position in range(length, length + num_steps - 1):
            slots = tables[:, position // size] * size + position % size
            output = self._model.forward(Batch(tokens, np.full_like(rows, position), slots, starts, tables))
            tokens = output.top(rows.tolist(), 1)[0][:, 0]

    def _groups(self, count: int, length: int) -> list[slice]:
        """Sequences whose prompts fit into a step together."""
        step = max(1, self._model.capabilities.max_tokens // length)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _prompt(self, prompts: NDArray[np.int32], tables: NDArray[np.int32]) -> NDArray[np.int32]:
        """The first token of each answer."""
        (count, length), size = prompts.shape, self._model.capabilities.block_size
        at = np.arange(length, dtype=np.int32)
        slots = tables[:, at // size] * size + at % size
        starts = np.arange(count + 1, dtype=np.int32) * np.int32(length)
        arrays, last = (prompts.ravel(), np.tile(at, count), slots.ravel(), starts, tables), starts[1:] - 1
        output = self._model.forward(Batch(*arrays, wanted=last))
        return output.top(last.tolist(), 1)[0][:, 0]

"""What a step is told, padded to one of a few shapes, in memory that stays where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bitnet_inference.backends.cuda_cache import BLOCK_TOKENS, DeviceBatch
from bitnet_inference.backends.cuda_device import Gpu
from bitnet_inference.model.contract import Batch

_PROMPT_STEP, _DECODE_STEP = 256, 64  # counts above are multiples of these, those below are powers of two
_MIN_PROMPT, _MIN_BLOCKS = 16, 32
_ALIGNED = 16  # numbers: arrays begin on multiples of 64 bytes


class Shape(NamedTuple):
    """Counts that a step's launches depend on: of tokens, of sequences, and of blocks of the longest one.

    `decodes`: each sequence has one token at most, and there are as many of both.
    """

    num_tokens: int
    num_sequences: int
    num_blocks: int
    decodes: bool


def padded_shape(batch: Batch, max_tokens: int, max_sequences: int) -> Shape:
    """A shape that the batch fits into, the same for many batches."""
    num_tokens, num_sequences = len(batch.token_ids), len(batch.starts) - 1
    num_blocks = _power_of_two(int(batch.positions.max()) // BLOCK_TOKENS + 1, _MIN_BLOCKS)
    if num_tokens == num_sequences and (batch.starts[1:] > batch.starts[:-1]).all():
        count = min(_padded(num_tokens, _DECODE_STEP), max_sequences, max_tokens)
        return Shape(count, count, num_blocks, True)
    padded = min(_padded(max(num_tokens, _MIN_PROMPT), _PROMPT_STEP), max_tokens)
    return Shape(padded, min(_power_of_two(num_sequences, 1), max_sequences), num_blocks, False)


def usual_shapes(max_tokens: int, max_sequences: int) -> Iterator[Shape]:
    """Those of sequences of up to some hundred tokens that decode, and of one that is alone, with its prompt."""
    most = min(max_sequences, max_tokens)
    for count in sorted({min(_padded(count, _DECODE_STEP), most) for count in range(1, most + 1)}):
        yield Shape(count, count, _MIN_BLOCKS, True)
    prompts = range(min(_MIN_PROMPT, max_tokens), max_tokens + 1)
    for count in sorted({min(_padded(count, _PROMPT_STEP), max_tokens) for count in prompts}):
        yield Shape(count, 1, _power_of_two(-(-count // BLOCK_TOKENS), _MIN_BLOCKS), False)


def _padded(count: int, step: int) -> int:
    return _power_of_two(count, 1) if count <= step else -(-count // step) * step


def _power_of_two(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


class Inputs:
    """The arrays of a step of one shape: filled on the host, copied in one piece. `batch` are those on the device.

    Tokens that are added lie behind those of all sequences and are written nowhere; added sequences have none.
    """

    def __init__(self, shape: Shape, gpu: Gpu) -> None:
        self.shape = shape
        tokens, sequences, blocks, _ = shape
        sizes = [tokens, tokens, tokens, tokens, sequences + 1, sequences * blocks]
        begins = np.cumsum([0, *(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]).tolist()
        self._host = gpu.host((begins[-1],), torch.int32).zero_()  # no table has a block that is not there
        self._device = torch.zeros(begins[-1], dtype=torch.int32, device=gpu.device)
        self._copied = gpu.event()
        on_host = [self._host.numpy()[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        self._token_ids, self._positions, self._slots, self._sequences, self._starts, tables = on_host
        self._tables, self._counts = tables.reshape(sequences, blocks), np.arange(sequences, dtype=np.int32)
        on_device = [self._device.narrow(0, begin, size) for begin, size in zip(begins, sizes, strict=False)]
        token_ids, positions, slots, of_tokens, starts, placed = on_device
        max_query, max_context = 1 if shape.decodes else tokens, blocks * BLOCK_TOKENS
        placed = placed.view(sequences, blocks)
        self.batch = DeviceBatch(token_ids, positions, slots, starts, placed, of_tokens, max_query, max_context)

    def send(self, batch: Batch) -> None:
        """Fill the arrays and queue their copy."""
        if self._copied is not None:
            self._copied.synchronize()  # what was filled in last may still wait for its copy
        self._fill(batch)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _fill(self, batch: Batch) -> None:
        num_tokens, num_sequences = len(batch.token_ids), len(batch.starts) - 1
        _put(self._token_ids, batch.token_ids, 0)
        _put(self._positions, batch.positions, 0)
        _put(self._slots, batch.slots, -1)
        _put(self._starts, batch.starts, num_tokens)
        of_tokens = self._counts[:num_sequences]
        _put(self._sequences, of_tokens if self.shape.decodes else np.repeat(of_tokens, np.diff(batch.starts)), 0)
        width = min(self.shape.num_blocks, batch.block_tables.shape[1])  # which has room for more tokens
        self._tables[:num_sequences, :width] = batch.block_tables[:, :width]


def _put(target: NDArray[np.int32], values: NDArray[np.int32], filling: int) -> None:
    """The values, and behind them the filling."""
    target[: len(values)] = values
    target[len(values) :] = filling

"""From hidden states on the GPU to what the engine asks for on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitnet_inference.backends.cuda_device import Gpu
from bitnet_inference.backends.cuda_program import Parts, Program
from bitnet_inference.backends.cuda_top import QUICK_TOP, top
from bitnet_inference.model.loader import Plans

HEAD_ROWS = 64  # logits are computed for so many rows at a time
Best = tuple[Tensor, Tensor]  # token ids int32 [R, k] and their logits float32 [R, k], best first


class Head:
    """The head and the final norm, for rows of the hidden states that a step left on the device.

    `num_known`: so many first rows have their logits there, too; whoever queues a step says it anew.
    """

    def __init__(self, plans: Plans, parts: Parts, gpu: Gpu, hidden: Tensor, room: Tensor) -> None:
        """`room`: float32 numbers that nobody needs while this computes; logits lie there if there are enough."""
        self._gpu, self._hidden, self.num_known, sizes = gpu, hidden, 0, parts.config
        self._head, self._norm = Program(plans.head, parts, HEAD_ROWS), Program(plans.norm, parts, HEAD_ROWS)
        if len(room) < HEAD_ROWS * sizes.vocab_size:
            room = torch.zeros(HEAD_ROWS * sizes.vocab_size, device=parts.device)
        self._logits = room[: HEAD_ROWS * sizes.vocab_size].view(HEAD_ROWS, sizes.vocab_size)
        self._normed = torch.zeros(HEAD_ROWS, sizes.hidden_size, device=parts.device)

    def prepare(self) -> None:
        """Compile what finds more than the likeliest token, which steps of nothing do not want."""
        top(self._logits[:1], QUICK_TOP)

    def queue_best(self, num_rows: int) -> Best:
        """Queue the search for the likeliest token of each of the first rows; what will have them."""
        return _joined([top(logits, 1) for logits in self._run(self._head, self._hidden[:num_rows], self._logits)])

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of these rows and their logits: [R, k] each."""
        ids, found = (self._gpu.host((len(rows), k), dtype) for dtype in (torch.int32, torch.float32))
        if len(rows):
            best = _joined([top(logits, k) for logits in self._logits_of(rows)])
            for target, values in zip((ids, found), best, strict=True):
                target.copy_(values, non_blocking=True)
            self._gpu.wait()
        return ids.numpy(), found.numpy()

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these rows: [R, vocab]."""
        return self._brought(self._logits_of(rows), len(rows), self._logits.shape[1])

    def normed(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states of these rows after the final norm: [R, hidden]."""
        parts = self._run(self._norm, _picked(self._hidden, rows), self._normed)
        return self._brought(parts, len(rows), self._normed.shape[1])

    def _logits_of(self, rows: Sequence[int]) -> Iterator[Tensor]:
        if max(rows, default=0) < self.num_known:
            yield _picked(self._logits, rows)
            return
        self.num_known = 0
        yield from self._run(self._head, _picked(self._hidden, rows), self._logits)

    def _brought(self, parts: Iterator[Tensor], num_rows: int, width: int) -> NDArray[np.float32]:
        rows, begin = self._gpu.host((num_rows, width), torch.float32), 0
        for part in parts:
            rows[begin : begin + len(part)].copy_(part, non_blocking=True)
            begin += len(part)
        self._gpu.wait()
        found: NDArray[np.float32] = rows.numpy()
        return found

    def _run(self, program: Program, hidden: Tensor, output: Tensor) -> Iterator[Tensor]:
        """Some rows at a time, each valid until the next."""
        for part in hidden.split(HEAD_ROWS) if len(hidden) else ():
            program.run(len(part), output, input=part)
            yield output[: len(part)]


def _joined(parts: Sequence[Best]) -> Best:
    return (
        parts[0] if len(parts) == 1 else (torch.cat([ids for ids, _ in parts]), torch.cat([each for _, each in parts]))
    )


def _picked(values: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows; those that follow each other are not copied."""
    chosen = np.asarray(rows, np.int64)
    if (np.diff(chosen) == 1).all():
        first = int(chosen[0]) if len(chosen) else 0
        return values[first : first + len(chosen)]
    return values.index_select(0, torch.from_numpy(chosen).to(values.device))


class HostBest:
    """The likeliest token of each row of a step, on its way to the host."""

    def __init__(self, gpu: Gpu, max_rows: int) -> None:
        self._ids, self._logits = gpu.host((max_rows,), torch.int32), gpu.host((max_rows,), torch.float32)
        self._arrived = gpu.event()

    def bring(self, best: Best) -> None:
        """Queue the copy of the first of each row; what was brought before is overwritten."""
        for target, values in zip((self._ids, self._logits), best, strict=True):
            target[: len(values)].copy_(values[:, 0], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def rows(self, rows: Sequence[int] | NDArray[np.integer[Any]]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Wait until they are there; those of these rows: [R, 1] each."""
        if self._arrived is not None:
            self._arrived.synchronize()
        chosen = np.asarray(rows, np.intp)
        return self._ids.numpy()[chosen, None], self._logits.numpy()[chosen, None]

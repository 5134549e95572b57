"""Steps in order, and greedy ones ahead of time: queued while the engine still looks at the tokens of the last one.

A greedy step of the same sequences, a token later, needs nothing that the GPU does not know: its tokens are those that
it has just chosen. If the engine then asks for another step, what was computed ahead is forgotten. It has written
behind the last token of each sequence only, in blocks that these held then: whoever holds them later writes before
reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from bitnet_inference.backends.cuda_cache import BLOCK_TOKENS
from bitnet_inference.backends.cuda_device import Gpu
from bitnet_inference.backends.cuda_graphs import Graphs
from bitnet_inference.backends.cuda_head import Best, HostBest
from bitnet_inference.backends.cuda_inputs import Inputs, Shape, padded_shape
from bitnet_inference.backends.cuda_variants import Variant
from bitnet_inference.model.contract import Batch

MAX_SEQUENCES = 256
MIN_STREAK = 8  # steps of as many sequences in a row: then the next is likely to be one too
_ROWS = 64  # of token ids that one program of a kernel moves
_LOOK_UP = {"ROWS": _ROWS, "enable_fp_fusion": False}  # Triton warns of launches that do not say


class _Queued(NamedTuple):
    """A step that was queued. Where each sequence has one token, `best` are the likeliest next ones.

    `rows`: where those of the engine's sequences are, if the step had more sequences.
    """

    batch: Batch
    best: Best | None
    on_host: HostBest
    rows: NDArray[np.intp] | None = None


class Steps:
    """The steps of a model, one after the other."""

    def __init__(
        self, gpu: Gpu, launch: Callable[[Inputs], Best | None], max_tokens: int, captures: bool = True
    ) -> None:
        """`launch`, `captures`: see Graphs; `launch` returns the best of each token where each sequence has one."""
        self._gpu, self._graphs, self._max_tokens = gpu, Graphs(gpu, launch, captures), max_tokens
        self._on_host = [HostBest(gpu, MAX_SEQUENCES) for _ in range(2)]  # of the engine's step, and of the one ahead
        self._now: _Queued | None = None
        self._ahead: _Queued | None = None
        self._streak, self._is_greedy = 0, False
        self.num_ahead = 0  # steps that the engine found queued

    def prepare(self, shapes: Iterable[Shape]) -> None:
        """See Graphs."""
        self._graphs.prepare(shapes)
        nothing = torch.zeros(_ROWS, dtype=torch.int32, device=self._gpu.device)
        _look_up[(1,)](nothing, nothing, 0, **_LOOK_UP)

    def clear(self) -> None:
        """Forget everything: what steps read or write moves elsewhere."""
        self._graphs.clear()
        self._now = self._ahead = None

    def forget_ahead(self) -> None:
        """What steps read changes otherwise than by steps."""
        self._ahead = None

    def forward(self, batch: Batch) -> None:
        """Queue the step, unless it is queued already; and the next, if it is clear what that will be."""
        last, ahead, self._ahead = self._now, self._ahead, None
        rows = None if ahead is None or last is None else self._rows_of(ahead.batch, batch, last)
        if ahead is not None and rows is not None:
            has_all = len(rows) == len(ahead.batch.slots)
            self._now = ahead._replace(batch=batch, rows=None if has_all else rows)
            self.num_ahead += 1
        else:
            self._now = self._queue(batch)
        goes_on = last is not None and self._now.best is not None and len(batch.starts) == len(last.batch.starts)
        self._streak = self._streak + 1 if goes_on else 0
        if self._streak >= MIN_STREAK and self._is_greedy and (following := _following(self._now)) is not None:
            self._ahead = self._queue(following, self._now.best)

    @property
    def has_best(self) -> bool:
        """Whether `best` has the likeliest tokens of the last step."""
        return self._now is not None and self._now.best is not None

    def best(self, rows: Sequence[int]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Wait for the likeliest tokens of these rows of the last step, and their logits: [R, 1] each."""
        assert self._now is not None, "a step comes first"
        self._is_greedy = True
        return self._now.on_host.rows(_chosen(self._now, rows))

    def bring_back(self) -> None:
        """Have what the last step left on the device there, for those who want more than its likeliest tokens."""
        assert self._now is not None, "a step comes first"
        self._is_greedy = False
        if self._ahead is not None or self._now.rows is not None:
            self._ahead = None
            self._now = self._queue(self._now.batch)  # which writes what it wrote before

    def _queue(self, batch: Batch, best: Best | None = None) -> _Queued:
        """Its token ids are rows of `best`, where that is given."""
        step = self._graphs.step(padded_shape(batch, self._max_tokens, MAX_SEQUENCES))
        step.inputs.send(batch)
        if best is not None:
            count = len(batch.token_ids)
            _look_up[(triton.cdiv(count, _ROWS),)](step.inputs.batch.token_ids, best[0], count, **_LOOK_UP)
        found, on_host = step.run(), self._on_host[0]
        self._on_host.reverse()
        if found is not None:
            on_host.bring(found)
        return _Queued(batch, found, on_host)

    def _rows_of(self, queued: Batch, batch: Batch, last: _Queued) -> NDArray[np.intp] | None:
        """Where the sequences of a batch are in one that was queued behind the last step, if all are there."""
        if len(batch.token_ids) != len(batch.starts) - 1:
            return None
        if len(batch.token_ids) == len(queued.token_ids):
            rows = np.arange(len(batch.slots))
        else:
            rows = np.flatnonzero(np.isin(queued.slots, batch.slots))
        if not np.array_equal(batch.slots, queued.slots[rows]):
            return None
        if not np.array_equal(batch.positions, queued.positions[rows]):
            return None
        last_blocks = batch.positions // BLOCK_TOKENS
        width = int(last_blocks.max()) + 1
        differs = batch.block_tables[:, :width] != queued.block_tables[rows, :width]
        if (differs & (np.arange(width) <= last_blocks[:, None])).any():
            return None
        ids, _ = last.on_host.rows(queued.token_ids[rows])
        return rows if np.array_equal(batch.token_ids, ids[:, 0]) else None


def _chosen(step: _Queued, rows: Sequence[int]) -> NDArray[np.intp]:
    chosen = np.asarray(rows, np.intp)
    return chosen if step.rows is None else step.rows[chosen]


def _following(step: _Queued) -> Batch | None:
    """The same sequences a token later, if each has a place for it; its token ids are rows of the step's best."""
    batch = step.batch
    if not batch.has_next:
        return None
    rows = np.arange(len(batch.slots)) if step.rows is None else step.rows
    positions, tables = batch.positions + np.int32(1), batch.block_tables.copy()
    blocks, places = np.divmod(positions, np.int32(BLOCK_TOKENS))
    slots = tables[np.arange(len(tables)), blocks] * np.int32(BLOCK_TOKENS) + places
    return Batch(rows.astype(np.int32), positions, slots, batch.starts.copy(), tables)


def variants() -> Iterator[Variant]:
    """The one that there is."""
    yield Variant(_look_up, {"rows": "*i32:16", "values": "*i32:16", "count": "i32"}, {"ROWS": _ROWS})


@triton.jit(do_not_specialize=["count"])
def _look_up(rows: tl.tensor, values: tl.tensor, count: tl.tensor, ROWS: tl.constexpr) -> None:
    """Each of the rows becomes its value."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.load(rows + at, mask=at < count, other=0)
    tl.store(rows + at, tl.load(values + row, mask=at < count, other=0), mask=at < count)

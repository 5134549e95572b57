"""From shares of a step to the flat Batch that a Model computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.scheduler import Share
from bitnet_inference.model.contract import Batch


def build_batch(shares: Sequence[Share], block_size: int) -> Batch:
    """The next tokens of each share, drafted ones behind, in order; the requests already have the blocks for them."""
    counts = np.array([share.num_rows for share in shares])
    computed = np.array([share.request.num_computed for share in shares])
    starts = np.zeros(len(shares) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    sequences = np.repeat(np.arange(len(shares)), counts)
    positions = np.arange(starts[-1]) + (computed - starts[:-1])[sequences]
    tables = np.zeros((len(shares), max(len(share.request.blocks) for share in shares)), dtype=np.int32)
    for row, share in zip(tables, shares, strict=True):
        row[: len(share.request.blocks)] = share.request.blocks.view
    slots = tables[sequences, positions // block_size] * block_size + positions % block_size
    return Batch(
        token_ids=np.concatenate([_next_tokens(share) for share in shares]),
        positions=positions.astype(np.int32),
        slots=slots.astype(np.int32),
        starts=starts,
        block_tables=tables,
    )


def _next_tokens(share: Share) -> NDArray[np.int32]:
    first = share.request.num_computed
    known = share.request.tokens.view[first : first + share.num_tokens]
    return np.append(known, np.asarray(share.draft, np.int32)) if share.draft else known

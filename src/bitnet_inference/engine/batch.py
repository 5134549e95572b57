"""From shares of a step to the flat Batch that a Model computes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from bitnet_inference.engine.scheduler import Share
from bitnet_inference.model.contract import Batch


def build_batch(shares: Sequence[Share], block_size: int) -> Batch:
    """The next tokens of each share, drafted ones behind, in order; the requests already have the blocks for them."""
    starts = [0, *accumulate([share.num_tokens + len(share.draft) for share in shares])]
    token_ids, positions, slots = np.empty((3, starts[-1]), dtype=np.int32)
    tables = np.zeros((len(shares), max([len(share.request.blocks) for share in shares])), dtype=np.int32)
    for row, start, (request, num_tokens, draft) in zip(range(len(shares)), starts, shares, strict=False):
        first, tokens, blocks = request.num_computed, request.tokens.view, request.blocks.view
        tables[row, : len(blocks)] = blocks
        if num_tokens == 1 and not draft:  # most often; single values are set sooner than slices
            token_ids[start], positions[start] = tokens[first], first
            slots[start] = int(blocks[first // block_size]) * block_size + first % block_size
            continue
        end = start + num_tokens
        token_ids[start:end] = tokens[first : first + num_tokens]
        token_ids[end : end + len(draft)] = draft
        at = positions[start : end + len(draft)]
        at[:] = np.arange(first, first + len(at))
        slots[start : end + len(draft)] = blocks[at // block_size] * block_size + at % block_size
    return Batch(token_ids, positions, slots, np.array(starts, dtype=np.int32), tables)

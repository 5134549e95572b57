"""The blocks of an ONNX graph's cache against plain lists of what was written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_inference.backends.onnx_cache import BLOCK_TOKENS, OnnxCache
from bitnet_inference.errors import OutOfMemory

SHAPE = (4, 2, 3)  # planes, heads, features


def advance(cache, blocks, first, values):
    """Write tokens behind those that are in the blocks, as a graph does."""
    total = first + values.shape[2]
    past = cache.gather(blocks, first).copy()
    cache.present(total)[:] = np.concatenate([past, values], axis=2)
    cache.keep(blocks, first, total)
    return past


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["go on", "go back", "copy to"]), st.integers(1, 40)), max_size=25
    )
)
def test_every_sequence_finds_what_it_wrote(steps):
    """Three sequences, each of three blocks: they go on, take tokens back, and become copies of each other."""
    cache = OnnxCache(SHAPE[0], SHAPE[1], SHAPE[2], "float32")
    cache.reserve(9)
    tables = np.arange(9, dtype=np.int32)[::-1].reshape(3, 3)
    known = [np.zeros((SHAPE[0], SHAPE[1], 0, SHAPE[2]), np.float32) for _ in range(3)]
    counter = 0.0
    for at, what, count in steps:
        length = known[at].shape[2]
        if what == "copy to":
            other = (at + 1) % 3
            cache.copy([(int(a), int(b)) for a, b in zip(tables[at], tables[other], strict=True)])
            known[other] = known[at]
            continue
        if what == "go back":
            known[at] = known[at][:, :, : max(0, length - count)]
            continue
        count = min(count, 3 * BLOCK_TOKENS - length)
        if count:
            counter += 1
            values = counter + np.random.default_rng(int(counter)).random((*SHAPE[:2], count, SHAPE[2]), np.float32)
            assert np.array_equal(advance(cache, tables[at], length, values), known[at])
            known[at] = np.concatenate([known[at], values], axis=2)
    for at, table in enumerate(tables):
        assert np.array_equal(cache.gather(table, known[at].shape[2]), known[at])


def test_a_copy_into_blocks_that_were_just_written():
    cache = OnnxCache(SHAPE[0], SHAPE[1], SHAPE[2], "float16")
    cache.reserve(2)
    one, other = np.array([[0], [1]], np.int32)
    advance(cache, one, 0, np.ones((*SHAPE[:2], 5, SHAPE[2]), np.float16))
    advance(cache, other, 0, np.zeros((*SHAPE[:2], 5, SHAPE[2]), np.float16))
    cache.copy([(0, 1)])
    assert (cache.gather(other, 5) == 1).all()


def test_no_memory():
    cache = OnnxCache(*SHAPE, "float32")
    with pytest.raises(OutOfMemory, match="blocks takes"):
        cache.reserve(1 << 40)

"""A model split over several ranks: the rows of each, its plans, and that they compute what one rank computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_ranks import one_rank, ranks, run

from bitnet_inference import ternary
from bitnet_inference.backends.cuda_shards import best_of
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, ModelConfig, Ternary, expected_shapes
from bitnet_inference.model.loader import fused, record
from bitnet_inference.model.shard_plans import shard
from bitnet_inference.model.shard_weights import ShardCheckpoint, cut
from bitnet_inference.model.shards import heads, rank_config, rows

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
HEADS = st.tuples(st.integers(1, 8), st.integers(1, 6)).map(lambda sizes: (sizes[0] * sizes[1], sizes[0]))
CONFIG = ModelConfig(
    family="bitnet",
    vocab_size=384,
    hidden_size=96,
    intermediate_size=208,
    num_layers=2,
    num_heads=20,
    num_kv_heads=5,
    head_dim=8,
    max_positions=64,
    activation="relu2",
    norm_eps=1e-5,
    rope_theta=10000.0,
    sub_norms=True,
)
TOKENS = np.arange(3, 384, 29, dtype=np.int32)  # of every rank's part of the vocabulary


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_ranks_gives_the_bits_of_one(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    (hidden,) = run(one := one_rank(checkpoint, TOKENS), "body")
    (logits,), (normed,) = run(one, "head", hidden), run(one, "norm", hidden)
    for size in (1, 2, 3, 4):
        group = ranks(checkpoint, TOKENS, size)
        assert all(np.array_equal(each, hidden) for each in run(group, "body"))
        assert np.array_equal(np.concatenate(run(group, "head", hidden), axis=1), logits)
        assert all(np.array_equal(each, normed) for each in run(group, "norm", hidden))


class Made:
    """A checkpoint of weights that are made up; `dense`: ends of the names of its dense matrices."""

    def __init__(self, config: ModelConfig, dense: tuple[str, ...] = ("embed", "head"), group_size: int = 0) -> None:
        self.path, self.config, self._dense, self._group_size = Path("made"), config, dense, group_size
        self._arrays: dict[str, Any] = {}
        noise = np.random.default_rng(7)
        for name, shape in expected_shapes(config):
            if len(shape) == 1:
                self._arrays[name] = noise.uniform(0.5, 1.5, shape).astype(np.float32)
            elif name.endswith(dense):
                self._arrays[name] = Dense(noise.normal(0, 0.5, shape).astype(np.float32), "float32")
            else:
                scale = noise.uniform(0.1, 1, (shape[0], -(-shape[1] // group_size))) if group_size else 0.37
                scale = scale.astype(np.float32) if group_size else scale
                codes = noise.integers(-1, 2, shape).astype(np.int8)
                self._arrays[name] = Ternary(ternary.pack_u2(codes), "u2", shape, scale, group_size)

    def is_ternary(self, name: str) -> bool:
        return isinstance(self._arrays[name], Ternary)

    def group_size(self, name: str) -> int:
        return self._group_size if self.is_ternary(name) else 0

    def matrix(self, name: str) -> Dense | Ternary:
        return self._arrays[name]

    def vector(self, name: str) -> np.ndarray:
        return self._arrays[name]


@pytest.mark.parametrize(
    "made",
    [
        Made(CONFIG),
        Made(CONFIG, group_size=64),
        Made(replace(CONFIG, sub_norms=False, activation="silu"), ("embed", "head", ".k", ".down")),
        Made(replace(CONFIG, sub_norms=False, activation="silu", qkv_bias=True), ("embed", "head", ".k")),
        Made(replace(CONFIG, sub_norms=False, linear_norm=True, qkv_bias=True)),
    ],
)
def test_heads_of_keys_are_split_unevenly_and_shared_by_ranks(made: Any) -> None:
    (hidden,) = run(one := one_rank(made, TOKENS), "body")
    (logits,) = run(one, "head", hidden)
    for size in (2, 3, 5, 8, 20):
        group = ranks(made, TOKENS, size)
        assert all(np.array_equal(each, hidden) for each in run(group, "body"))
        assert np.array_equal(np.concatenate(run(group, "head", hidden), axis=1), logits)


def test_five_heads_of_keys_go_to_two_ranks_as_three_and_two() -> None:
    assert heads(CONFIG, 2) == (((0, 12), (0, 3)), ((12, 20), (3, 5)))
    assert [rank_config(CONFIG, rank, 2).num_kv_heads for rank in (0, 1)] == [3, 2]
    # Eight ranks: three heads of keys are held by two ranks, which have half of their queries each.
    assert heads(CONFIG, 8)[:3] == (((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)))
    assert heads(CONFIG, 8)[-1] == ((16, 20), (4, 5))


@given(HEADS, st.data())
def test_every_head_has_one_rank_and_every_rank_the_keys_of_its_queries(sizes: tuple[int, int], data: Any) -> None:
    config = replace(CONFIG, num_heads=sizes[0], num_kv_heads=sizes[1])
    size = data.draw(st.integers(1, config.num_heads))
    found, share = heads(config, size), config.num_heads // config.num_kv_heads
    assert [head for rank in found for head in range(*rank.queries)] == list(range(config.num_heads))
    for (first, last), keys in found:
        assert first < last and (first // share, (last - 1) // share + 1) == keys
        assert (last - first) % (keys[1] - keys[0]) == 0, "every head of keys has as many queries"


@given(st.integers(1, 20), st.sampled_from(["embed", "head", "layers.0.o", "layers.1.gate", "layers.0.down"]))
def test_every_row_has_one_rank(size: int, name: str) -> None:
    parts = rows(CONFIG, name, size)
    total = dict(expected_shapes(CONFIG))[name][0]
    assert [row for part in parts for row in range(*part)] == list(range(total))
    assert all(begin < end for begin, end in parts)
    assert total < 32 * size or all(begin % 32 == 0 for begin, _ in parts), "packed groups of rows stay whole"


def test_a_layer_of_bitnet_gathers_four_times_and_adds_nothing_up() -> None:
    made = Made(CONFIG)
    verbs = [step.verb for step in shard(fused(record(CONFIG), made), CONFIG, 1, 3).body.steps]
    assert verbs[:3] == ["rotations", "embed", "sum"]
    assert verbs[3 : 3 + len(verbs[3:]) // 2] == [
        "norm+quantize", "ternary", "rope+write", "attend", "gather", "norm+quantize", "ternary+add", "gather",
        "norm+quantize", "ternary", "gate", "gather", "norm+quantize", "ternary+add", "gather",
    ]  # fmt: skip


def test_the_best_of_all_parts_of_the_vocabulary_are_found_as_in_one_piece() -> None:
    whole = np.array([[1, 7, -1, 7, 0, 7, 2, 3], [4, np.nan, 5, np.inf, -np.inf, np.nan, 0, -0.0]], np.float32)
    parts = []
    for first, last in ((0, 3), (3, 4), (4, 8)):
        order = np.lexsort((-whole[:, first:last], ~np.isnan(whole[:, first:last])), axis=1)[:, :4].astype(np.int32)
        parts.append((order, np.take_along_axis(whole[:, first:last], order, axis=1)))
    ids, logits = best_of(parts, (0, 3, 4), 4)
    assert ids.tolist() == [[1, 3, 5, 7], [1, 5, 3, 2]]
    assert np.array_equal(logits, np.take_along_axis(whole, ids, axis=1), equal_nan=True)


def test_more_ranks_than_heads_are_refused() -> None:
    made = Made(replace(CONFIG, num_heads=2, num_kv_heads=1))
    with pytest.raises(InvalidParams, match="gpus is 3, but a model of 2 heads runs on 2 at most"):
        shard(fused(record(made.config), made), made.config, 0, 3)


@pytest.mark.parametrize("layout", ["codes", "quarters", "u2", "t5", "signs"])
@given(st.integers(1, 100), st.integers(1, 90), st.data())
def test_rows_are_cut_out_of_every_layout(layout: ternary.Layout, num_rows: int, columns: int, data: Any) -> None:
    codes = np.random.default_rng(num_rows * columns).integers(-1, 2, (num_rows, columns)).astype(np.int8)
    codes[codes == 0] = layout == "signs"
    begin = data.draw(st.integers(0, num_rows - 1) | st.just(num_rows // 64 * 32))
    end = data.draw(st.integers(begin + 1, num_rows) | st.just(num_rows))
    pack = {"codes": lambda codes: codes, "quarters": ternary.pack_quarters, "u2": ternary.pack_u2,
            "t5": ternary.pack_t5, "signs": lambda codes: np.packbits(codes > 0, 1, "little")}  # fmt: skip
    scale = np.arange(num_rows, dtype=np.float32)[:, None]
    found = cut(Ternary(pack[layout](codes), layout, codes.shape, scale, 128), (begin, end))
    assert found.shape == (end - begin, columns) and not found.problem()
    assert np.array_equal(ternary.unpack(found.data, found.layout, found.shape), codes[begin:end])
    assert np.array_equal(found.scale, scale[begin:end])


def test_whole_groups_of_rows_are_cut_out_as_they_are() -> None:
    matrix = Ternary(ternary.pack_t5(np.ones((96, 80), np.int8)), "t5", (96, 80), 1.0)
    assert np.shares_memory(cut(matrix, (32, 64)).data, matrix.data)


def test_a_code_that_is_none_is_told_with_its_file() -> None:
    made = Made(CONFIG)
    made._arrays["layers.0.q"] = Ternary(np.full((40, 96), 255, np.uint8), "quarters", (160, 96), 1.0)
    with pytest.raises(FormatError, match=r"made: layers\.0\.q: row 0, column 0 holds the 2-bit code 3"):
        ShardCheckpoint(made, 0, 2).matrix("layers.0.q")

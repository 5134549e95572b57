"""Ternary matrices with a scale for each row: the product, stacks with other matrices, and whole models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from products import Floats, product

from bitnet_inference import native
from bitnet_inference.backends import load_model, reference
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import FormatError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import ChangedCheckpoint, Dense, Ternary
from bitnet_inference.formats.packed_writer import write_packed
from bitnet_inference.model.contract import Batch, Model
from bitnet_inference.model.loader import sound_matrix
from bitnet_inference.model.shard_weights import ShardCheckpoint

ISAS = native.isas()
NUM_TOKENS = 50
Codes = NDArray[np.int8]


def case(rows: int, columns: int) -> tuple[Codes, Floats]:
    """A matrix whose scales are of both signs, and one of them 0."""
    rng = np.random.default_rng(rows * columns)
    scales = rng.standard_normal(rows, np.float32)
    scales[rows // 2] = 0
    return rng.integers(-1, 2, (rows, columns), np.int8), scales


def packed(ternary_format: str, *parts: tuple[Codes, float | Floats]) -> native.TernaryWeight:
    weight = native.TernaryWeight(parts[0][0].shape[1], [len(codes) for codes, _ in parts], ternary_format)
    for i, (codes, scale) in enumerate(parts):
        weight.pack(i, codes.view(np.uint8), "codes", scale)
    return weight


def inputs(rows: int, columns: int, tokens: int) -> Floats:
    return np.random.default_rng(tokens).standard_normal((tokens, columns + rows), np.float32) * 3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ternary_format", ["u2", "t5"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 65), (100, 300), (64, 2560)])
def test_the_product_is_the_reference_to_the_bit(
    isa: str, ternary_format: str, tokens: int, rows: int, columns: int
) -> None:
    codes, scales = case(rows, columns)
    x = inputs(rows, columns, tokens)
    weight, expected = packed(ternary_format, (codes, scales)), reference.bit_linear(x[:, :columns], codes, scales)
    assert product(weight, isa, x, 2).tobytes() == expected.tobytes()
    assert product(weight, isa, x, 2, residual=True).tobytes() == (x[:, columns:] + expected).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ternary_format", ["u2", "t5"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_stacked_matrices_keep_their_scales(isa: str, ternary_format: str, tokens: int) -> None:
    """One scale between matrices with one a row, whose last rows fill no group."""
    (first, scales), (second, _), (third, others) = (case(rows, 200) for rows in (45, 5, 33))
    weight = packed(ternary_format, (first, scales), (second, 0.7), (third, others))
    x = inputs(83, 200, tokens)
    parts = ((first, scales), (second, 0.7), (third, others))
    expected = [reference.bit_linear(x[:, :200], codes, scale) for codes, scale in parts]
    assert product(weight, isa, x, 2).tobytes() == np.concatenate(expected, axis=1).tobytes()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_equal_scales_are_one_scale(isa: str, tokens: int) -> None:
    codes, _ = case(70, 300)
    x, equal = inputs(70, 300, tokens), np.full(70, 0.7, np.float32)
    one = product(packed("u2", (codes, 0.7)), isa, x, 2)
    assert product(packed("u2", (codes, equal)), isa, x, 2).tobytes() == one.tobytes()
    assert reference.bit_linear(x[:, :300], codes, equal).tobytes() == one.tobytes()


def test_a_matrix_that_is_packed_anew_has_its_new_scales() -> None:
    codes, scales = case(40, 100)
    x, weight = inputs(40, 100, 3), packed("u2", (codes, scales))
    for scale in (0.5, scales[::-1].copy()):
        weight.pack(0, codes.view(np.uint8), "codes", scale)
        assert (
            product(weight, ISAS[0], x, 2).tobytes() == product(packed("u2", (codes, scale)), ISAS[0], x, 2).tobytes()
        )


class Rowed(ChangedCheckpoint):
    """A golden model whose ternary matrices get a scale for each row, those that are named at least."""

    def __init__(self, scales: Callable[[Ternary], Any], names: tuple[str, ...] = ("",)) -> None:
        super().__init__(open_checkpoint(Path(__file__).parents[1] / "golden/bitnet-packed"))
        self._scales, self._names = scales, names

    def matrix(self, name: str) -> Dense | Ternary:
        matrix = self.original.matrix(name)
        is_changed = isinstance(matrix, Ternary) and name.endswith(self._names)
        return replace(matrix, scale=self._scales(matrix)) if is_changed else matrix


def random_scales(matrix: Ternary) -> Floats:
    rng = np.random.default_rng(matrix.shape[0])
    return (rng.uniform(0.5, 1.5, matrix.shape[0]) * rng.choice((-1, 1), matrix.shape[0]) * matrix.scale).astype("f4")


def equal_scales(matrix: Ternary) -> Floats:
    return np.full(matrix.shape[0], matrix.scale, np.float32)


def load(checkpoint: ChangedCheckpoint, **options: Any) -> Model:
    model = load_model(checkpoint, EngineConfig(**options))
    model.reserve(16)
    return model


def logits(model: Model, ids: NDArray[np.int32], start: int = 0) -> Floats:
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    table = np.arange(NUM_TOKENS // model.capabilities.block_size + 1, dtype=np.int32)
    batch = Batch(ids, positions, positions, np.array([0, len(ids)], np.int32), table[None])
    return model.forward(batch).full(range(len(ids)))


def ids_of(checkpoint: ChangedCheckpoint) -> NDArray[np.int32]:
    return np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, NUM_TOKENS, np.int32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ternary_format", ["u2", "t5"])
def test_models_give_the_same_bits_everywhere(isa: str, ternary_format: str) -> None:
    checkpoint = Rowed(random_scales)
    ids = ids_of(checkpoint)
    whole = logits(load(checkpoint, isa="generic", threads=1), ids)
    model = load(checkpoint, isa=isa, ternary_format=ternary_format, threads=2)
    pieces = [logits(model, ids[a:b], a) for a, b in pairwise([0, 1, 4, 12, NUM_TOKENS])]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("names", [("",), (".k", ".gate")])
def test_models_agree_with_the_reference(names: tuple[str, ...]) -> None:
    checkpoint = Rowed(random_scales, names)
    found, expected = (logits(load(checkpoint, device=device), ids_of(checkpoint)) for device in ("cpu", "reference"))
    assert np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()) < 3e-2


def test_a_model_of_equal_scales_is_the_model() -> None:
    ids, plain = ids_of(Rowed(equal_scales)), Rowed(equal_scales, ("none",))
    assert logits(load(Rowed(equal_scales)), ids).tobytes() == logits(load(plain), ids).tobytes()


def test_a_scale_a_row_beside_groups_of_the_same_product() -> None:
    """The scale of a row is that of all its groups of columns."""

    class Partly(Rowed):
        def group_size(self, name: str) -> int:
            return 64 if name.endswith((".v", ".up")) else 0

        def matrix(self, name: str) -> Dense | Ternary:
            matrix = super().matrix(name)
            if not self.group_size(name):
                return matrix
            assert isinstance(matrix, Ternary)
            scales = np.repeat(matrix.scale[:, None], -(-matrix.shape[1] // 64), axis=1)
            return replace(matrix, scale=scales, group_size=64)

    checkpoint = Partly(random_scales)
    found, expected = (logits(load(each), ids_of(checkpoint)) for each in (checkpoint, Rowed(random_scales)))
    assert np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()) < 3e-2


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (lambda m: np.ones(7, np.float32), r"scales are float32 \[\d+\], not float32 \[7\]"),
        (lambda m: np.ones(m.shape[0]), "not float64"),
        (lambda m: np.ones((m.shape[0], 1), np.float32), "mixed up"),
        (lambda m: np.full(m.shape[0], np.nan, np.float32), "NaN or infinite"),
    ],
)
def test_scales_that_do_not_fit_are_named(device: str, scales: Callable[[Ternary], Any], message: str) -> None:
    with pytest.raises(FormatError, match=f"layers.0.k: .*{message}"):
        logits(load(Rowed(scales, ("0.k",)), device=device), np.zeros(3, np.int32))


def test_ranks_have_the_scales_of_their_rows() -> None:
    parts = [ShardCheckpoint(Rowed(random_scales), rank, 2).matrix("layers.0.up") for rank in (0, 1)]
    whole = Rowed(random_scales).matrix("layers.0.up")
    assert np.array_equal(np.concatenate([part.scale for part in parts]), whole.scale)


def test_who_cannot_take_a_scale_a_row_refuses_it() -> None:
    with pytest.raises(FormatError, match=r"layers.0.q: its rows have a scale each, which only the devices"):
        sound_matrix(Rowed(random_scales), "layers.0.q")


def test_packed_files_keep_the_scales_of_rows(tmp_path: Path) -> None:
    original = Rowed(random_scales)
    write_packed(original, {}, tmp_path / "m.safetensors")
    packed = open_checkpoint(tmp_path / "m.safetensors")
    assert packed.check() == []
    np.testing.assert_array_equal(packed.matrix("layers.0.q").scale, original.matrix("layers.0.q").scale)

"""Tables of embeddings in int8: the specification to the bit on every path, beside a tied head, in half the memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from bitnet_inference import native, ternary
from bitnet_inference.backends import cpu, load_model
from bitnet_inference.backends.reference import dense_matrix
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.bench import conditions, rounding
from bitnet_inference.cli.commands import app
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import ChangedCheckpoint, Dense, Ternary
from bitnet_inference.model.contract import Batch, Output

GOLDEN = Path(__file__).parents[1] / "golden"
APART, TIED, SCALED = "llama-bitlinear", "bitnet-packed", "gemma3-bf16"  # the last multiplies embeddings
Floats = NDArray[np.float32]


class OtherTable(ChangedCheckpoint):
    """A golden model with another table of embeddings."""

    def __init__(self, name: str, table: Floats) -> None:
        super().__init__(open_checkpoint(GOLDEN / name))
        self._table = table

    def matrix(self, name: str) -> Dense | Ternary:
        return Dense(self._table, "float32") if name == "embed" else super().matrix(name)


def table_of(name: str) -> Floats:
    matrix = open_checkpoint(GOLDEN / name).matrix("embed")
    assert isinstance(matrix, Dense)
    return dense_matrix(matrix)


def rounded(table: Floats) -> Floats:
    codes, scales = ternary.quantize_table(table)
    return codes * scales[:, None]


def run(name: str, table: Floats | None = None, **options: object) -> Output:
    """A model reads 40 tokens; with a table, by the rows of that."""
    checkpoint = open_checkpoint(GOLDEN / name) if table is None else OtherTable(name, table)
    model = load_model(checkpoint, EngineConfig(**{"device": "cpu", "threads": 2} | options))
    model.reserve(4)
    ids, at = np.random.default_rng(1).integers(0, 384, 40, np.int32), np.arange(40, dtype=np.int32)
    return model.forward(Batch(ids, at, at, np.array([0, 40], np.int32), np.arange(4, dtype=np.int32)[None]))


def hard_table(rows: int, columns: int) -> Floats:
    rng = np.random.default_rng(columns)
    table = rng.standard_normal((rows, columns), np.float32) * rng.choice([1, 1e-4, 1e3, 1e-31], (rows, 1))
    table[0] = 0
    table[1] = np.arange(columns) % 8 + 0.5  # halves, by a scale of 1
    table[1, 0] = 127
    table[2, 0] = -3e38
    return table.astype(np.float32)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (40, 15), (300, 100)])
def test_a_row_is_the_specification_to_the_bit(rows: int, columns: int, dtype: str, isa: str) -> None:
    table, ids = hard_table(rows, columns), np.arange(rows, dtype=np.int32)
    data = {"float32": table, "float16": np.clip(table, -6e4, 6e4).astype(np.float16).view(np.uint16)}
    matrix = data.get(dtype, (table.view(np.uint32) >> 16).astype(np.uint16))
    wide = matrix.view(np.float16) if dtype == "float16" else matrix
    expected = rounded(dense_matrix(Dense(wide, dtype))) * np.float32(0.3)
    for threads in (1, 3):
        executor, program, out = native.Executor(isa, threads), native.Program(0), np.empty_like(table)
        made = native.Int8Table(native.DenseWeight(matrix, dtype), executor)
        program.embed(made, (2, 0, columns, 0, columns), 0.3)
        starts, blocks = np.array([0, rows], np.int32), np.zeros((1, rows), np.int32)
        executor.run(program, (ids, ids, ids, starts, blocks), None, out)
        assert out.tobytes() == expected.tobytes()
        assert made.num_bytes == rows * (columns + 4)


def test_nothing_is_off_by_more_than_half_a_step() -> None:
    table = hard_table(300, 100)
    largest = np.abs(table).max(axis=1, keepdims=True)
    half_a_step = np.where(largest > 1e-30, largest / 254 * (1 + 1e-5), 1e-30)
    assert (np.abs(rounded(table) - table) <= half_a_step).all()


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_named(device: str, bad: float) -> None:
    table = table_of(APART)
    table[:, 3] = bad
    with pytest.raises(FormatError, match="embed: a weight is NaN or infinite"):
        run(APART, table, embedding="int8", device=device).full([0])


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("name", [APART, SCALED, TIED])
def test_a_model_reads_the_rounded_rows_and_nothing_else_of_them(name: str, isa: str) -> None:
    expected = run(name, rounded(table_of(name)), isa="generic", threads=1)
    for threads in (1, 3):
        found = run(name, embedding="int8", isa=isa, threads=threads)
        assert found.hidden(range(40)).tobytes() == expected.hidden(range(40)).tobytes()
        if name == APART:
            assert found.full(range(40)).tobytes() == expected.full(range(40)).tobytes()


@pytest.mark.parametrize("name", [APART, SCALED, TIED])
def test_the_reference_does_alike(name: str) -> None:
    found = run(name, embedding="int8", device="reference").hidden(range(40))
    assert found.tobytes() == run(name, rounded(table_of(name)), device="reference").hidden(range(40)).tobytes()
    assert not np.array_equal(found, run(name, device="reference").hidden(range(40)))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_tied_head_stays_exact(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    output = run(TIED, embedding="int8", device=device)
    logits = output.full(range(40))
    exact = output.hidden(range(40)).astype(np.float64) @ table_of(TIED).T.astype(np.float64)
    assert np.abs(logits - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.array_equal(output.top(range(40), 1)[0][:, 0], logits.argmax(axis=1))


def test_a_tied_head_that_is_rounded_has_codes_of_its_own() -> None:
    output, executor = run(TIED, embedding="int8", head="int8"), native.Executor("generic", 1)
    head = native.QuantisedHead(native.DenseWeight(table_of(TIED), "float32"), 8, executor)
    expected = np.empty((40, 384), np.float32)
    head.scores(executor, output.hidden(range(40)), expected)
    assert output.full(range(40)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "head", "more"),
    # Bytes of a row beside its 64 codes and its scale: 128 less, but where a tied head reads the same floats, or where
    # those of a head that is rounded are only mapped.
    [(APART, "exact", -128), (TIED, "exact", 0), (APART, "int8", -128), (TIED, "int8", 0)],
)
def test_memory_is_known_before_and_half_of_what_it_was(name: str, head: str, more: int) -> None:
    def sizes(embedding: str) -> tuple[int, int]:
        config = EngineConfig(device="cpu", threads=1, head=head, embedding=embedding).resolve()
        checkpoint = open_checkpoint(GOLDEN / name)
        return load_model(checkpoint, config).num_bytes, estimate_bytes(checkpoint, config, 0)

    taken, told = (after - before for before, after in zip(sizes("exact"), sizes("int8"), strict=True))
    assert taken == told == 384 * (64 + 4 + more)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mlx", "onnx", "coreml"])
def test_devices_that_do_not_have_it(device: str) -> None:
    with pytest.raises(InvalidParams, match=f'embedding is "int8", which .* but device is "{device}": leave it out'):
        EngineConfig(device=device, embedding="int8").resolve()


def test_other_words_are_refused() -> None:
    with pytest.raises(InvalidParams, match="embedding is 'int6': choose one of exact, int8"):
        EngineConfig(embedding="int6")


def test_measurements_say_so() -> None:
    config = EngineConfig(quantize="int8", embedding="int8")
    assert rounding(config) == ", matrices rounded to int8, embeddings rounded to int8"
    assert conditions("m", config, "")["embedding"] == "int8"


def test_the_command() -> None:
    path = str(GOLDEN / APART)
    result = CliRunner().invoke(app, ["run", "hello", "-m", path, "-n", "2", "--embedding", "int8"])
    assert result.exit_code == 0
    result = CliRunner().invoke(app, ["run", "hello", "-m", path, "-n", "2", "--embedding", "int6"])
    assert result.exit_code == 2 and result.stderr.count("\n") == 1

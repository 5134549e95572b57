"""Dense models that are rounded when they are loaded: to int8 by row, and to ternary as masters are."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from bitnet_inference import LLM, Models, SamplingParams, convert, native, ternary
from bitnet_inference.backends import load_model
from bitnet_inference.backends.reference import Int8, dense_matrix, int8_linear
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.cli.commands import app
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import ChangedCheckpoint, Checkpoint, Dense, Ternary
from bitnet_inference.formats.ternarized import TernarizedCheckpoint, quantized, relative_error
from bitnet_inference.model.contract import Batch

GOLDEN = Path(__file__).parents[1] / "golden"
Floats = NDArray[np.float32]
DENSE = ("llama-f32", "llama-f16", "llama3-bf16", "qwen2-bf16", "qwen3-bf16", "gemma3-bf16")


def logits(path: Path, **options: object) -> Floats:
    model = load_model(open_checkpoint(path), EngineConfig(cache_dtype="float32", threads=2, **options))
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 40, np.int32)
    positions, size = np.arange(40, dtype=np.int32), model.capabilities.block_size
    model.reserve(-(-40 // size))
    table = np.arange(-(-40 // size), dtype=np.int32)[None]
    found = model.forward(Batch(ids, positions, positions, np.array([0, 40], np.int32), table)).full(range(40))
    model.close()
    return found


def distance(found: Floats, expected: Floats) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


class Holding(ChangedCheckpoint):
    """A checkpoint with one matrix in the place of all."""

    def __init__(self, original: Checkpoint, matrix: Dense) -> None:
        super().__init__(original)
        self._matrix = matrix

    def matrix(self, name: str) -> Dense:
        return self._matrix


def masters(path: Path) -> Path:
    """A folder of master weights whose config.json does not say so."""
    shutil.copytree(GOLDEN / "llama-masters-f32", path)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    return path


# int8


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (17, 15), (100, 300), (33, 1030)])
def test_a_product_is_the_specification_to_the_bit(isa: str, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    weights, most = rng.standard_normal((rows, columns), np.float32), 70
    weights[0] = 0
    weights[rows // 2] *= 1e-4
    x, residual = rng.standard_normal((most, columns), np.float32), rng.standard_normal((most, rows), np.float32)
    executor, padded = native.Executor(isa, 2), -(-columns // 64) * 64
    weight = native.QuantisedHead(native.DenseWeight(weights, "float32"), 8, executor)
    assert weight.is_finite
    expected = int8_linear(x, Int8(*ternary.quantize_weights(weights)))
    both, width = np.concatenate([x, residual], axis=1), columns + rows
    for added in (False, True):
        program = native.Program(padded // 4 + 11)
        program.rows_to_codes((1, 0, width, 0, columns), None, 0, None, 0.0, (0, padded))
        program.int8(weight, (0, padded), (2, 0, rows, 0, rows), (1, 0, width, columns, rows) if added else None)
        for count in (1, 2, 3, 5, 6, 7, 8, 9, 16, 17, 33, most):
            out = np.empty((count, rows), np.float32)
            executor.run(program, None, both[:count].copy(), out)
            whole = expected[:count] + residual[:count] if added else expected[:count]
            assert out.tobytes() == whole.tobytes()


def test_the_border_of_a_product() -> None:
    executor, weight = native.Executor("generic", 1), native.DenseWeight(np.ones((8, 20), np.float32), "float32")
    whole, rough = (native.QuantisedHead(weight, bits, executor) for bits in (8, 6))
    out = (2, 0, 8, 0, 8)
    for made, codes, to, message in (
        (rough, (0, 64), out, "8 bits"), (whole, (0, 16), out, "whole steps"), (whole, (0, 32), out, "lines of 64"),
        (whole, (0, 64), (2, 0, 9, 0, 9), "width"), (whole, (64, 64), out, "arena"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            native.Program(32).int8(made, codes, to, None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_weights_that_cannot_be_rounded(bad: float) -> None:
    weights = np.ones((20, 20), np.float32)
    weights[18, 3] = bad
    weight = native.QuantisedHead(native.DenseWeight(weights, "float32"), 8, native.Executor("generic", 1))
    assert not weight.is_finite


@pytest.mark.parametrize("name", DENSE)
def test_int8_models_agree_and_are_near_the_exact_ones(name: str) -> None:
    exact, cpu, reference = (
        logits(GOLDEN / name, **options)
        for options in ({}, {"quantize": "int8"}, {"quantize": "int8", "device": "reference"})
    )
    assert distance(cpu, reference) < 0.03
    assert 1e-4 < distance(cpu, exact) < 0.15  # tiny random models amplify what is lost


@pytest.mark.parametrize("head", ["unscreened", "int8", "int6"])
def test_heads_are_rounded_apart(head: str) -> None:
    one, other = (logits(GOLDEN / "llama-f32", quantize="int8", head=each) for each in ("exact", head))
    assert distance(other, one) < 0.1
    assert np.array_equal(one, other) == (head == "unscreened")


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_ternary_matrices_stay_beside_int8(device: str) -> None:
    exact, found = (logits(GOLDEN / "llama-partial", quantize=each, device=device) for each in ("none", "int8"))
    assert 0 < distance(found, exact) < 0.15


@pytest.mark.parametrize(("quantize", "device"), [("int8", "cpu"), ("int8", "reference"), ("ternary", "cpu")])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, quantize: str, device: str) -> None:
    path = masters(tmp_path / "model")
    name = "model.layers.1.mlp.up_proj.weight"
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    at = 8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]
    content[at : at + 4] = b"\0\0\xc0\x7f"
    file.write_bytes(content)
    with pytest.raises(FormatError, match=r"layers\.1\.up"):
        logits(path, quantize=quantize, device=device)


# ternary


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_masters_that_nobody_declared(tmp_path: Path, device: str) -> None:
    said = logits(GOLDEN / "llama-masters-f32", device=device)
    assert np.array_equal(logits(masters(tmp_path / "model"), device=device, quantize="ternary"), said)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dequantised_matrices_are_found_again(dtype: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / {"float32": "llama-f32", "float16": "llama-f16"}.get(dtype, "llama3-bf16"))
    codes = np.random.default_rng(2).integers(-1, 2, (64, 64)).astype(np.int8)
    values = codes * np.float32(0.375)
    data = {"float32": values, "float16": values.astype(np.float16)}.get(dtype)
    wide = Dense((values.view(np.uint32) >> 16).astype(np.uint16) if data is None else data, dtype)
    rounded = quantized(Holding(checkpoint, wide), "ternary")
    found = rounded.matrix("layers.0.q")
    assert isinstance(rounded, TernarizedCheckpoint) and isinstance(found, Ternary)
    assert np.array_equal(found.data, codes)
    assert found.scale == 0.375
    assert rounded.findings() == ()


@pytest.mark.parametrize(("columns", "size"), [(256, 128), (192, 64)])
def test_scales_of_groups_are_found_again(columns: int, size: int) -> None:
    """As the unpacked files of PrismML's Bonsai, and TriLM's, whose scales differ between parts of a matrix."""
    random = np.random.default_rng(4)
    codes = random.integers(-1, 2, (40, columns)).astype(np.int8)
    scales = np.exp2(random.integers(-3, 3, (40, columns // size))).astype(np.float32)
    values = codes * np.repeat(scales, size, axis=1)
    checkpoint = Holding(open_checkpoint(GOLDEN / "llama-f32"), Dense(values, "float32"))
    rounded = quantized(checkpoint, "ternary")
    found = rounded.matrix("layers.0.q")
    assert isinstance(found, Ternary) and rounded.group_size("layers.0.q") == found.group_size == size
    assert np.array_equal(found.data, codes) and np.array_equal(found.scale, scales)
    assert rounded.findings() == ()
    values[39, -1] = 0.4
    assert quantized(checkpoint, "ternary").group_size("layers.0.q") == 0


def test_what_is_lost_is_measured() -> None:
    weights = np.random.default_rng(3).standard_normal((500, 300), np.float32)
    codes, scale = ternary.ternarize(weights)
    lost = weights.astype(np.float64) - codes * float(scale)
    found = relative_error(Dense(weights, "float32"), Ternary(codes, "codes", (500, 300), float(scale)))
    assert found == pytest.approx(np.sqrt((lost**2).sum() / (weights.astype(np.float64) ** 2).sum()), rel=1e-4)
    assert 0.4 < found < 0.6


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_model_tells_what_was_lost(device: str) -> None:
    with LLM.load(GOLDEN / "llama-f32", device=device, quantize="ternary") as llm:
        (note,) = llm.notes
        assert "14 matrices" in note and "% of layers." in note and "\n" not in note
        assert llm.generate("hello", SamplingParams(max_tokens=2, ignore_eos=True)).token_ids
    with LLM.load(GOLDEN / "llama-f32", device=device, quantize="int8", embedding="int8") as llm:
        of_layers, of_table = llm.notes
    checkpoint = open_checkpoint(GOLDEN / "llama-f32")
    table = dense_matrix(checkpoint.matrix("embed"))
    codes, scales = ternary.quantize_table(table)
    error = 100 * distance(codes * scales[:, None], table)
    assert f"embeddings were rounded to int8, which takes {error:.1f}% of them away" in of_table
    assert re.search(r"14 matrices were rounded to int8, .* 0\.\d% of them .*0\.\d% of layers", of_layers)


def test_commands(tmp_path: Path) -> None:
    path = str(GOLDEN / "llama-f32")
    for quantize, notes in (("ternary", 1), ("int8", 1), ("none", 0)):
        result = CliRunner().invoke(app, ["run", "hello", "-m", path, "-n", "2", "--quantize", quantize])
        assert result.exit_code == 0
        assert result.stderr.count("note: ") == notes
    target = str(tmp_path / "x.gguf")
    result = CliRunner().invoke(app, ["convert", path, target, "--quantize", "ternary"])
    assert result.exit_code == 0
    assert "were rounded to ternary" in result.stderr
    result = CliRunner().invoke(app, ["convert", path, target, "--quantize", "int8"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("target", ["x.gguf", "x.safetensors"])
def test_files_of_rounded_models(tmp_path: Path, target: str) -> None:
    result = convert(masters(tmp_path / "model"), tmp_path / target, quantize="ternary")
    assert [note for note in result.notes if "rounded to ternary" in note]
    assert np.array_equal(logits(tmp_path / target), logits(GOLDEN / "llama-masters-f32"))


@pytest.mark.parametrize("quantize", ["ternary", "int8"])
def test_there_must_be_something_to_round(quantize: str) -> None:
    with pytest.raises(InvalidParams, match="ternary already"):
        LLM.load(quantize=quantize)
    with pytest.raises(InvalidParams, match="ternary already"), Models(quantize=quantize).use():
        pass
    with pytest.raises(InvalidParams, match="quantize is 'int4'"):
        LLM.load(quantize="int4")


def test_draft_models_stay_as_they_are(tmp_path: Path) -> None:
    drafts = GOLDEN / "llama-masters-f32"
    with LLM.load(masters(tmp_path / "model"), quantize="ternary", drafts=drafts, threads=1) as llm:
        assert llm.generate("hello", SamplingParams(max_tokens=8, ignore_eos=True)).token_ids


@pytest.mark.parametrize("quantize", ["ternary", "int8"])
def test_memory_is_known_before(quantize: str) -> None:
    checkpoint, config = open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(quantize=quantize, threads=1).resolve()
    model = load_model(checkpoint, config)
    assert model.num_bytes <= estimate_bytes(checkpoint, config, 0) * 1.1
    assert model.num_bytes < load_model(checkpoint, EngineConfig(threads=1)).num_bytes

"""Folders of mlx_lm: matrices of few bits with a scale and a bias for groups of columns, some of them ternary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from mlx_samples import affine_parts, mlx_folder
from tiny_folders import bfloat16, safetensors_bytes

from bitnet_inference import LLM
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.formats.safetensors_files import open_tensors
from bitnet_inference.summary import summarize

GOLDEN = Path(__file__).parents[1] / "golden"
Q = "model.layers.0.self_attn.q_proj"
IDS = list(range(5, 37))


def logits(path: Path, device: str = "cpu") -> np.ndarray:
    with LLM.load(path, device=device, cache_dtype="float32", threads=1 if device == "cpu" else None) as llm:
        return llm.logits(IDS)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_codes_scales_and_biases_are_the_weights(tmp_path, bits, group_size):
    """Logits are those of a dense folder with the values, to the bit."""
    values = mlx_folder(tmp_path / "mlx", bits, group_size)
    shutil.copytree(GOLDEN / "llama-f32", tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").write_bytes(safetensors_bytes(values))
    checkpoint, dense = open_checkpoint(tmp_path / "mlx"), open_checkpoint(tmp_path / "dense")
    assert checkpoint.check() == [] and checkpoint.num_parameters == dense.num_parameters
    assert not checkpoint.is_ternary("layers.0.q") and checkpoint.dtype("layers.0.q") == "float32"
    assert np.array_equal(checkpoint.matrix("layers.1.down").data, dense.matrix("layers.1.down").data)
    assert f"of {bits} bits in groups of {group_size}" in "\n".join(checkpoint.notes())
    assert logits(tmp_path / "mlx").tobytes() == logits(tmp_path / "dense").tobytes()


def test_biases_of_layers_beside_those_of_groups(tmp_path):
    source = GOLDEN / "qwen2-bf16"
    values = mlx_folder(tmp_path / "mlx", 4, 32, source=source)
    files = open_tensors(tmp_path / "mlx").tensors
    assert {f"{Q}.bias", f"{Q}.biases"} <= {*files}
    shutil.copytree(source, tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").write_bytes(safetensors_bytes(values))
    checkpoint, dense = open_checkpoint(tmp_path / "mlx"), open_checkpoint(tmp_path / "dense")
    assert checkpoint.check() == dense.check() == []
    assert np.array_equal(checkpoint.vector("layers.0.q.bias"), values[f"{Q}.bias"])
    assert logits(tmp_path / "mlx").tobytes() == logits(tmp_path / "dense").tobytes()


@pytest.mark.parametrize("bits, dtype", [(1, "bfloat16"), (2, "bfloat16"), (2, "float16"), (2, "float32")])
def test_ternary_matrices_in_groups(tmp_path, bits, dtype):
    """As PrismML's Bonsai: the scale of a group of 64 and minus that, or minus half of it, as the bias."""
    values = mlx_folder(tmp_path, bits, 64, ternary=True, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    matrix, table = checkpoint.matrix("layers.0.q"), checkpoint.matrix("embed")
    assert checkpoint.check() == [] and checkpoint.group_size("layers.0.q") == matrix.group_size == 64
    assert np.array_equal(matrix.data * np.repeat(matrix.scale, 64, axis=1), values[f"{Q}.weight"])
    assert set(np.unique(matrix.data)) == ({-1, 1} if bits == 1 else {-1, 0, 1})
    assert table.dtype == checkpoint.dtype("embed") == dtype and not checkpoint.is_ternary("embed")
    assert np.array_equal(to_float32(table.data, table.dtype), values["model.embed_tokens.weight"])
    ours, reference = logits(tmp_path), logits(tmp_path, "reference")
    assert np.square(ours - reference).mean() < 0.03**2 * np.square(reference).mean()


def test_one_scale_for_all_is_one_scale(tmp_path):
    mlx_folder(tmp_path, 2, 64, ternary=True, scales=[0.25])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.group_size("layers.0.q") == 0 and checkpoint.matrix("layers.0.q").scale == 0.25


def test_groups_that_kernels_do_not_know_are_dense(tmp_path):
    mlx_folder(tmp_path, 2, 32, ternary=True)
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.is_ternary("layers.0.q") and checkpoint.matrix("layers.0.q").dtype == "bfloat16"


@pytest.mark.parametrize("name", ["bitnet-packed", "bitnet-bitlinear"])
def test_packed_ternary_matrices_beside_a_quantised_table(tmp_path, name):
    """As mlx-community's BitNet 2B-4T: config.json tells of the table alone; scales multiply unless it says more."""
    source = open_checkpoint(GOLDEN / name)
    tensors = {name: tensor.array() for name, tensor in open_tensors(source.path).tensors.items()}
    shutil.copytree(source.path, tmp_path / "mlx")
    module = "model.embed_tokens"
    floats = to_float32(tensors.pop(f"{module}.weight"), source.dtype("embed"))
    parts, values = affine_parts(floats, 8, 64)
    tensors |= {f"{module}.{part}": array for part, array in parts.items()}
    (tmp_path / "mlx" / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    said = {"group_size": 64, "bits": 8, "mode": "affine"}
    config["quantization"] = said
    if name == "bitnet-packed":
        config["quantization_config"] = said
    (tmp_path / "mlx" / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path / "mlx")
    assert checkpoint.check() == [] and checkpoint.is_ternary("layers.0.q")
    assert ("weight_scale multiplies" if name == "bitnet-packed" else "weight_scale divides") in checkpoint.notes()[2]
    assert checkpoint.matrix("layers.0.q").scale == source.matrix("layers.0.q").scale
    assert np.array_equal(checkpoint.matrix("embed").data, values)
    assert logits(tmp_path / "mlx").shape == (len(IDS), 384)


def test_weights_of_two_are_not_ternary(tmp_path):
    def change(tensors):
        tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"] | np.uint32(3)

    mlx_folder(tmp_path, 2, 64, ternary=True, change=change)
    with pytest.raises(Unsupported, match=r"holds weights of \+2, so it is not ternary: use"):
        open_checkpoint(tmp_path).matrix("layers.0.q")


def test_a_scale_that_is_no_number(tmp_path):
    def change(tensors):
        tensors[f"{Q}.scales"], tensors[f"{Q}.biases"] = (bfloat16(np.full((64, 1), sign * np.inf)) for sign in (1, -1))

    mlx_folder(tmp_path, 2, 64, ternary=True, change=change)
    with pytest.raises(FormatError, match="a scale is NaN or infinite: download"):
        open_checkpoint(tmp_path).matrix("layers.0.q")


@pytest.mark.parametrize(
    "part, array, why",
    [
        ("weight", np.zeros((64, 8), np.uint8), "U8 .* holds no codes"),
        ("weight", np.zeros((64, 9), np.uint32), "holds no codes"),
        ("weight", np.zeros((63, 8), np.uint32), "holds no codes"),
        ("weight", np.zeros((64, 0), np.uint32), "holds no codes"),
        ("weight", np.zeros((64, 14), np.uint32), "holds no codes"),
        ("scales", np.zeros((64, 1), np.uint8), "are not floats of one dtype"),
        ("biases", np.zeros((64, 1), np.float16), "are not floats of one dtype"),
        ("scales", np.zeros((64, 3), np.uint16), "are not for groups"),
        ("biases", np.zeros((64, 2), np.uint16), "are not for groups"),
        ("scales", np.zeros(64, np.uint16), "are not for groups"),
    ],
)
def test_what_is_wrong_with_a_matrix(tmp_path, part, array, why):
    mlx_folder(tmp_path, 4, 64, change=lambda tensors: tensors.update({f"{Q}.{part}": array}))
    (problem,) = open_checkpoint(tmp_path).check()
    assert f"{Q}.weight: " in problem and problem.endswith(": download the model again")
    with pytest.raises(FormatError, match=why):
        open_checkpoint(tmp_path).matrix("layers.0.q")


def test_missing_biases_are_named(tmp_path):
    mlx_folder(tmp_path, 4, 64, change=lambda tensors: tensors.pop(f"{Q}.biases"))
    assert any(f"{Q}.biases: the tensor is missing" in problem for problem in open_checkpoint(tmp_path).check())


@pytest.mark.parametrize("quantization", [{"mode": "mxfp4"}, {"lm_head": {"mode": "nvfp4", "bits": 4}}])
def test_modes_without_biases_are_refused(tmp_path, quantization):
    mlx_folder(tmp_path, 4, 32, quantization={"group_size": 32, "bits": 4, **quantization})
    with pytest.raises(Unsupported, match=r"MLX's quantization mode '(mxfp4|nvfp4)': only 'affine' is read"):
        open_checkpoint(tmp_path)


def test_what_inspect_says(tmp_path):
    mlx_folder(tmp_path, 2, 64, ternary=True)
    summary = summarize(tmp_path)
    assert not summary.problems and any("quantised by MLX: " in value for _, value in summary.groups["model"])

"""One model in every format: the same packed ternary matrices to the bit, and the same text.

benchmarks/formats.py compares more, with what others compute from the same files.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf_samples
import numpy as np
import pytest
from gguf_samples import write_default
from onnx_samples import make_decoder
from onnx_samples import write_model as write_onnx_model

from bitnet_inference import LLM, InvalidParams, SamplingParams, convert, native
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Ternary, expected_shapes
from bitnet_inference.model_folder import find_model

GOLDEN = Path(__file__).parents[1] / "golden"
PARAMS = SamplingParams(temperature=0.0, max_tokens=24)
LOSSLESS = ("packed file", "i2_s by us", "tq2_0 by us", "I2_S", "TQ1_0", "TQ2_0", "several files", "F16", "F32")


def write(kind: str, folder: Path) -> Path:
    """The default model in a format that holds its scales and its table exactly."""
    if kind == "packed file":
        return convert("default", folder / "x.safetensors").path
    if kind.endswith("by us"):
        return convert("default", folder / "x.gguf", kind.split()[0]).path
    if kind == "several files":
        write_default(folder / "x.gguf", "I2_S", per_file=40)
        return folder / "x-00002-of-00002.gguf"
    write_default(folder / "x.gguf", kind)
    return folder / "x.gguf"


def packed(path: Path) -> dict[str, bytes]:
    """Every ternary matrix as the kernels have it, its shape and its scale."""
    checkpoint, found = open_checkpoint(path), {}
    for name, shape in expected_shapes(checkpoint.config):
        if len(shape) == 2 and checkpoint.is_ternary(name):
            matrix = checkpoint.matrix(name)
            assert isinstance(matrix, Ternary) and not matrix.group_size
            weight = native.TernaryWeight(shape[1], [shape[0]], "t5")
            data = np.ascontiguousarray(matrix.data).view(np.uint8)
            weight.pack(0, data.reshape(len(data), -1), matrix.layout, matrix.scale)
            found[name] = weight.packed().tobytes() + np.float32(matrix.scale).tobytes()
    return found


@pytest.fixture(scope="module")
def expected() -> tuple[dict[str, bytes], str]:
    with LLM.load("default") as llm:
        return packed(find_model("default")), llm.generate("Once upon a time", PARAMS).text


@pytest.mark.parametrize("kind", LOSSLESS)
def test_every_format_gives_the_same_matrices_and_text(tmp_path, expected, kind):
    path = write(kind, tmp_path)
    assert packed(path) == expected[0]
    with LLM.load(path) as llm:
        assert llm.generate("Once upon a time", PARAMS).text == expected[1]


def test_i2_s_in_the_order_of_arm(tmp_path, expected, monkeypatch):
    monkeypatch.setattr(gguf_samples, "i2_s_bytes", partial(gguf_samples.i2_s_bytes, part=16))
    path = write("I2_S", tmp_path)
    with LLM.load(path, arm_i2_s=True) as llm:
        assert llm.generate("Once upon a time", PARAMS).text == expected[1]
    assert packed(convert(path, tmp_path / "usual.gguf", arm_i2_s=True).path) == expected[0]
    assert packed(path) != expected[0]
    with pytest.raises(InvalidParams, match="leave arm_i2_s out"):
        LLM.load(write("TQ2_0", tmp_path), arm_i2_s=True)
    write_onnx_model(tmp_path / "model.onnx", make_decoder())
    for other in ("default", tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(InvalidParams, match="leave arm_i2_s out"):
            LLM.load(other, arm_i2_s=True)


@pytest.mark.parametrize("path", [*sorted(path.parent for path in GOLDEN.glob("*/config.json")), None])
def test_the_dtype_of_a_matrix_is_known_before_it_is_read(tmp_path, path):
    if path is None:
        path = tmp_path / "x.gguf"
        write_default(path, "F16", "Q8_0")
    for checkpoint in map(open_checkpoint, (path, convert(path, tmp_path / "x.safetensors").path)):
        shapes = expected_shapes(checkpoint.config)
        dense = [name for name, shape in shapes if len(shape) == 2 and not checkpoint.is_ternary(name)]
        assert [checkpoint.dtype(name) for name in dense] == [checkpoint.matrix(name).dtype for name in dense]

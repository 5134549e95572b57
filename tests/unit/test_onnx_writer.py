"""`convert` to ONNX: what is written beside the file, what is refused, and what a failure leaves."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from tiny_folders import BITLINEAR, Folder, folder
from typer.testing import CliRunner

from bitnet_inference import convert
from bitnet_inference.backends.onnx_check import compare, relative_rms
from bitnet_inference.cli.commands import app
from bitnet_inference.conversion.onnx_files import write_onnx_model
from bitnet_inference.errors import BackendError, FormatError, InvalidParams, Unavailable, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.hf_config import read_config
from bitnet_inference.formats.json_files import Fields
from bitnet_inference.model_folder import find_model, load_text_files
from bitnet_inference.text.folders import read_folder
from bitnet_inference.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
FAMILIES = ("bitnet-packed", "llama-bitlinear", "llama3-bf16", "llama-f32", "qwen2-bf16", "qwen3-bitlinear",
            "gemma3-bf16")  # fmt: skip
BESIDE = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_beside_it_say_what_the_models_own_say(tmp_path, name):
    source = open_checkpoint(GOLDEN / name)
    result = convert(source.path, tmp_path / "model.onnx")
    assert sorted(os.listdir(tmp_path)) == [*BESIDE[:2], "model.onnx", *BESIDE[2:]]
    assert vars(read_folder(tmp_path)) == vars(load_text_files(source)) | {"path": tmp_path}
    said = Fields(tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text()))
    assert read_config(said, None) == replace(source.config, embed_scale=read_config(said, None).embed_scale)
    assert (result.num_bytes, result.tensors) == ((tmp_path / "model.onnx").stat().st_size, ())
    assert result.agreement is not None and max(result.agreement[:3]) < 1e-5
    assert result.agreement.num_greedy == result.agreement.num_tokens == 16


def test_a_gguf_files_words_become_files(tmp_path):
    made = convert(GOLDEN / "llama-bitlinear", tmp_path / "a.gguf")
    (tmp_path / "onnx").mkdir()
    convert(made.path, tmp_path / "onnx" / "model.onnx", check=False)
    found, expected = read_folder(tmp_path / "onnx"), load_text_files(open_checkpoint(made.path))
    assert (found.named, found.templates, found.add_bos) == (expected.named, expected.templates, None)
    words, same = Tokenizer(found), Tokenizer(expected)
    assert words.affixes == same.affixes == ([same.bos_id], []) and words.to_json() == same.to_json()


def test_weights_beside_the_file_are_replaced_with_it(tmp_path):
    source, target = open_checkpoint(GOLDEN / "bitnet-packed"), tmp_path / "x.onnx"
    data = tmp_path / "x.onnx.data"
    first = write_onnx_model(source, load_text_files(source), target, max_inline_bytes=0)
    assert first.num_bytes == target.stat().st_size + data.stat().st_size and not first.notes
    before = data.read_bytes()
    small = write_onnx_model(source, load_text_files(source), target, small=True, max_inline_bytes=0)
    assert data.read_bytes() != before and small.num_bytes < first.num_bytes
    alone = write_onnx_model(source, load_text_files(source), target)
    assert [str(data) in note and "no longer used" in note for note in alone.notes] == [True]
    assert sorted(os.listdir(tmp_path)) == [*BESIDE, "x.onnx", "x.onnx.data"]
    onnx.checker.check_model(str(target), full_check=True)


@pytest.mark.parametrize("name", [*BESIDE, "x.onnx.data"])
def test_files_of_another_model_are_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidParams, match=f"{name} is there, and"):
        convert("default", tmp_path / "x.onnx")
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "{}"


def broken() -> Folder:
    """A code 3 in the last matrix: it is found when that is read."""
    model = folder("llama", BITLINEAR, tied=False)
    model.config |= {"vocab_size": 384}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name] = np.ones((384, 8), np.float32)
    model.tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 255
    return model


def infinite() -> Folder:
    """No logit is a number."""
    model = broken()
    model.tensors["model.layers.0.mlp.down_proj.weight"][:] = 0
    model.tensors["lm_head.weight"][:] = np.inf
    return model


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(
    "make, error, why", [(broken, FormatError, "2-bit code 3"), (infinite, BackendError, "off by")]
)
def test_a_failure_leaves_the_old_files(tmp_path, make, error, why, small):
    (tmp_path / "model").mkdir()
    make().write(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "llama-f16" / name, tmp_path / "model" / name)
    (tmp_path / "x.onnx").write_text("before")
    (tmp_path / "x.onnx.data").write_text("data")
    with pytest.raises(error, match=why), np.errstate(all="ignore"):
        source = open_checkpoint(tmp_path / "model")
        write_onnx_model(source, load_text_files(source), tmp_path / "x.onnx", small=small, max_inline_bytes=0)
    assert sorted(os.listdir(tmp_path)) == ["model", "x.onnx", "x.onnx.data"]
    assert [(tmp_path / name).read_text() for name in ("x.onnx", "x.onnx.data")] == ["before", "data"]


def test_another_models_file_does_not_agree(tmp_path):
    convert(GOLDEN / "bitnet-packed", tmp_path / "x.onnx", check=False)
    found = compare(open_checkpoint(GOLDEN / "bitnet-bitlinear"), tmp_path / "x.onnx", [1, 2, 3, 4, 5, 6])
    assert min(found[:3]) > 0.5 and found.num_greedy < found.num_tokens == 6
    (tmp_path / "x.onnx").write_bytes(b"\x08\x07")
    with pytest.raises(BackendError, match=r"x\.onnx: ONNX Runtime refuses it: "):
        compare(open_checkpoint(GOLDEN / "bitnet-packed"), tmp_path / "x.onnx", [1, 2])


def test_without_onnx_runtime_nothing_is_checked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Unavailable, match=r'pip install "bitnet-inference\[onnx\]"'):
        convert("default", tmp_path / "x.onnx")
    assert os.listdir(tmp_path) == []
    assert convert("default", tmp_path / "x.onnx", check=False).agreement is None


def test_how_far_logits_are_off():
    ones = np.ones((2, 2), np.float32)
    assert relative_rms(ones * 3, ones) == 2.0 and relative_rms(ones * 0, ones * 0) == 0.0
    assert relative_rms(ones, ones * 0) == relative_rms(ones * np.nan, ones) == float("inf")


@pytest.mark.parametrize(
    "source, target, options, error, message",
    [
        ("default", "x.gguf", {"small": True}, InvalidParams, "only ONNX and Core ML are written small"),
        ("default", "x.onnx", {"compressed": True}, InvalidParams, "only packed files are compressed"),
        ("default", "x.onnx", {"kind": "f16"}, InvalidParams, "only GGUF files have types: leave the type f16 out"),
        ("default", "absent/x.onnx", {}, InvalidParams, "there is no folder"),
        (GOLDEN / "qwen3-embedding", "x.onnx", {}, Unsupported, "is a model of embeddings: only decoders"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, source, target, options, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        convert(source, target, **options)
    assert os.listdir() == []


def test_the_command_says_how_large_and_how_exact_it_is(tmp_path):
    run, file = CliRunner(), tmp_path / "story.onnx"
    result = run.invoke(app, ["convert", str(find_model("default")), str(file)])
    assert result.exit_code == 0, result.output
    assert f"{file}: {file.stat().st_size / 1e6:.1f} MB\n" in result.stdout
    assert "run in ONNX Runtime: logits are off by" in result.stdout
    assert "16 of 16 greedy tokens are the same" in result.stdout
    exact = file.stat().st_size
    result = run.invoke(app, ["convert", "default", str(file), "--small", "--no-check"])
    assert result.exit_code == 0 and "ONNX Runtime" not in result.output and file.stat().st_size < 0.6 * exact

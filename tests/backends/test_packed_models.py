"""Packed files on the backends: the same bits as from the file that they were made of, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_groups import Grouped, load, logits

from bitnet_inference import LLM, SamplingParams, native, ternary
from bitnet_inference.backends import cpu
from bitnet_inference.errors import FormatError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.packed_writer import write_packed
from bitnet_inference.model_folder import find_model, load_text_files
from bitnet_inference.text.embedded import to_embedded

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
SHAPES = [(1, 1), (31, 15), (33, 65), (70, 129), (32, 80), (100, 300)]
PACK = {"u2": ternary.pack_u2, "t5": ternary.pack_t5}


def rewritten(checkpoint: Any, tmp_path: Path, **options: Any) -> Any:
    write_packed(checkpoint, {}, tmp_path / "model.safetensors", **options)
    packed = open_checkpoint(tmp_path / "model.safetensors")
    assert packed.check() == []
    return packed


def same_logits(one: Any, other: Any, **options: Any) -> bool:
    ids = np.random.default_rng(1).integers(0, one.config.vocab_size, 40, np.int32)
    found = [logits(load(each, threads=1, cache_dtype="float32", **options), ids) for each in (one, other)]
    return np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_as_from_the_folder(tmp_path, name, compressed):
    original = open_checkpoint(GOLDEN / name)
    packed = rewritten(original, tmp_path, compressed=compressed)
    assert packed.config == original.config
    assert packed.num_parameters == original.num_parameters
    assert same_logits(original, packed)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("options", [{"ternary_format": "u2"}, {"ternary_format": "t5"}, {"device": "reference"}])
def test_every_format_and_backend(tmp_path, options, compressed):
    original = open_checkpoint(find_model("default"))
    packed = rewritten(original, tmp_path, compressed=compressed)
    assert packed.matrix("layers.0.down").layout == ("t5" if compressed else "u2")
    assert same_logits(original, packed, **options)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("name", ["bitnet-packed", "llama-ternary-head"])
def test_groups_of_columns_keep_their_scales(tmp_path, name, group_size, compressed):
    original = Grouped(name, group_size)
    packed = rewritten(original, tmp_path, compressed=compressed)
    assert packed.group_size("layers.0.q") == group_size
    assert same_logits(original, packed)


def test_a_model_answers_as_from_its_folder(tmp_path):
    checkpoint = open_checkpoint(find_model("default"))
    write_packed(checkpoint, to_embedded(load_text_files(checkpoint)), tmp_path / "model.safetensors")
    with LLM.load() as one, LLM.load(tmp_path / "model.safetensors") as other:
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
        assert other.generate("Once upon a time", params).text == one.generate("Once upon a time", params).text
        assert other.tokenizer.generation == one.tokenizer.generation


@pytest.mark.parametrize("target", ["u2", "t5"])
@pytest.mark.parametrize("source", ["u2", "t5"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_copy_their_own_layouts(shape, source, target):
    codes = np.random.default_rng(sum(shape)).integers(-1, 2, shape).astype(np.int8)
    weight = native.TernaryWeight(shape[1], [shape[0]], target)
    data = PACK[source](codes)
    weight.pack(0, data.reshape(len(data), -1), source, 0.5)
    assert np.array_equal(weight.packed().reshape(-1), PACK[target](codes).reshape(-1))


@pytest.mark.parametrize("target", ["u2", "t5"])
@pytest.mark.parametrize("byte", [0x03, 0x0C, 0x30, 0xC0])
def test_the_fourth_pattern_is_refused(target, byte):
    data = ternary.pack_u2(np.zeros((40, 20), np.int8))
    data[1, 0, 5] |= byte
    weight = native.TernaryWeight(20, [40], target)
    with pytest.raises(ValueError, match="rows from 32 on"):
        weight.pack(0, data.reshape(len(data), -1), "u2", 1.0)


@pytest.mark.parametrize("target", ["u2", "t5"])
@pytest.mark.parametrize("byte", [243, 255])
def test_bytes_of_t5_that_mean_nothing_are_refused(target, byte):
    data = ternary.pack_t5(np.zeros((40, 20), np.int8))
    data[1, 2, 5] = byte
    weight = native.TernaryWeight(20, [40], target)
    with pytest.raises(ValueError, match="rows from 32 on"):
        weight.pack(0, data.reshape(len(data), -1), "t5", 1.0)
    with pytest.raises(ValueError, match=f"a byte is {byte}"):
        ternary.unpack(data, "t5", (40, 20))
    with pytest.raises(ValueError, match="wrong shape"):
        weight.pack(0, data[:1].reshape(1, -1), "t5", 1.0)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_code_3_in_a_file_is_named(tmp_path, device):
    packed = rewritten(open_checkpoint(GOLDEN / "bitnet-packed"), tmp_path)
    content = bytearray(packed.path.read_bytes())
    tensor = packed._tensors["layers.1.up.u2"]
    content[tensor.begin + 7] = 0xFF
    packed.path.write_bytes(content)
    broken = open_checkpoint(packed.path)
    assert broken.check() == []
    assert [line for line in broken.verify() if "layers.1.up.u2" in line]
    with pytest.raises(FormatError, match=r"layers\.1\.up"):
        logits(load(broken, device=device, threads=1), np.zeros(2, np.int32))


def test_the_screen_in_a_file_is_that_of_its_head(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    original = open_checkpoint(GOLDEN / "llama3-bf16")
    packed = rewritten(original, tmp_path, min_screened=1)
    one, other = (load(each, threads=1) for each in (original, packed))
    for made, read in zip(one._screen.parts(), other._screen.parts(), strict=True):
        assert np.array_equal(made, read)
    hidden = np.random.default_rng(0).standard_normal((20, original.config.hidden_size)).astype(np.float32)
    for made, read in zip(one.top(hidden, 5), other.top(hidden, 5), strict=True):
        assert np.array_equal(made, read)
    assert rewritten(original, tmp_path).screen() is None


@pytest.mark.parametrize(("at", "number"), [(0, np.inf), (0, -1.0), (1, -1e-30), (4, np.nan)])
def test_bounds_that_cannot_be_are_refused(tmp_path, monkeypatch, at, number):
    """Or fewer rows would be kept than are asked for."""
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    packed = rewritten(open_checkpoint(GOLDEN / "llama3-bf16"), tmp_path, min_screened=1)
    numbers = packed.screen()[2].copy()
    numbers[at, 7] = number
    content = bytearray(packed.path.read_bytes())
    begin = packed._tensors["screen.numbers"].begin
    content[begin : begin + numbers.nbytes] = numbers.tobytes()
    packed.path.write_bytes(content)
    with pytest.raises(FormatError, match="screen"):
        load(open_checkpoint(packed.path), threads=1)

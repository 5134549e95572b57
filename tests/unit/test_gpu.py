"""Checkpoints of Microsoft's GPU code: the same model as Hugging Face's folder of it, and what is wrong is named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from gpu_samples import CONFIG, HEADS, codes, gpu_tensors, hf_folder, packed, write_gpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meta_samples import headers, read_or_refused, torch_bytes, write_ranks
from tiny_folders import bfloat16

from bitnet_inference import LLM, SamplingParams, convert, ternary
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Ternary, expected_shapes
from bitnet_inference.formats.gpu import GpuCheckpoint
from bitnet_inference.formats.gpu_config import gpu_config
from bitnet_inference.formats.gpu_int2 import runs_of, u2_of
from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.summary import summarize
from bitnet_inference.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same model as Hugging Face's folder, packed and dequantised, each with its words."""
    path = tmp_path_factory.mktemp("gpu")
    for kind in ("int2", "fp16"):
        write_ranks(write_gpu(path / kind, gpu_tensors(kind), kind))
        (path / kind / "params.json").unlink()
    (path / "hf").mkdir()
    words = Tokenizer.from_folder(path / "int2")
    hf_folder().write(path / "hf")
    (path / "hf" / "tokenizer.json").write_text(words.to_json())
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (path / "hf" / "tokenizer_config.json").write_text(json.dumps(named))
    return path


@pytest.mark.parametrize("kind", ["int2", "fp16"])
def test_the_same_weights_as_a_hugging_face_folder(folders, kind):
    found, other = (open_checkpoint(folders / each) for each in (kind, "hf"))
    assert isinstance(found, GpuCheckpoint)
    assert found.check() == []
    assert found.config == other.config
    assert found.num_parameters == other.num_parameters
    for name, shape in expected_shapes(found.config):
        if len(shape) == 1:
            assert np.array_equal(found.vector(name), other.vector(name))
            continue
        ours, theirs = found.matrix(name), other.matrix(name)
        assert found.is_ternary(name) == other.is_ternary(name) == isinstance(ours, Ternary)
        if isinstance(ours, Ternary):
            assert ours.scale == theirs.scale, name
            assert ours.problem() == ""
            ours, theirs = (ternary.unpack(each.data, each.layout, each.shape) for each in (ours, theirs))
            assert np.array_equal(ours, theirs), name
        else:
            assert np.array_equal(ours.data, theirs.data) and found.dtype(name) == theirs.dtype
        found.release(name)


@pytest.mark.parametrize("kind", ["int2", "fp16"])
def test_the_same_text(folders, kind):
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    with LLM.load(folders / kind) as found, LLM.load(folders / "hf") as other:
        (one,), (two,) = (llm.generate(["hello the"], params) for llm in (found, other))
        assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)
        talk = found.encode_chat([{"role": "user", "content": " Hi "}])
        user, answer = map(found.tokenizer.encode, ("User: Hi", "Assistant: "))
        assert talk == [*user, found.tokenizer.special["<|eot_id|>"], *answer[1:]]
        assert user[0] == answer[0] == found.tokenizer.bos_id
        assert len(found.eos_ids) == 2


def test_it_becomes_a_file_of_ours(folders, tmp_path):
    convert(folders / "int2", tmp_path / "x.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM.load(folders / "int2") as one, LLM.load(tmp_path / "x.safetensors") as other:
        assert one.generate("hello", params).token_ids == other.generate("hello", params).token_ids


def test_what_it_is_told_to_be(folders):
    summary = summarize(folders / "int2")
    assert summary.problems == []
    notes = " ".join(value for group in summary.groups.values() for _, value in group)
    assert "model_state_int2.pt" in notes and "copy of the embeddings" in notes


def test_int2_goes_before_floats(folders, tmp_path):
    shutil.copytree(folders / "int2", tmp_path / "both")
    (tmp_path / "both" / "model_state_fp16.pt").write_bytes(b"?")
    assert "model_state_int2.pt" in open_checkpoint(tmp_path / "both").notes()[0]
    (tmp_path / "both" / "model.safetensors").write_bytes(b"?")  # then it is Hugging Face's
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path / "both")
    with pytest.raises(FormatError, match="give the folder"):
        open_checkpoint(folders / "int2" / "model_state_int2.pt")


def test_a_head_of_its_own(tmp_path):
    tensors = gpu_tensors()
    tensors["output.weight"] = tensors["output.weight"][::-1].copy()
    checkpoint = open_checkpoint(write_gpu(tmp_path, tensors))
    assert not checkpoint.config.tie_embeddings
    assert np.array_equal(checkpoint.matrix("head").data, tensors["output.weight"])
    del tensors["output.weight"]
    assert open_checkpoint(write_gpu(tmp_path, tensors)).config.tie_embeddings


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (160, 64)])
def test_the_packing(shape):
    codes = np.random.default_rng(0).integers(-1, 2, shape).astype(np.int8)
    assert np.array_equal(ternary.unpack_u2(u2_of(runs_of(packed(codes))), shape), codes)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 17), (15, 31), (47, 95), (20, 70)])
def test_a_code_that_stands_for_nothing(row, column):
    codes = np.zeros((48, 96), np.int8)
    codes[row, column] = -2
    with pytest.raises(ValueError, match=f"row {row}, column {column} holds the 2-bit code 0"):
        runs_of(packed(codes))


# Configurations


def shapes(**changed):
    sizes = {
        "tok_embeddings.weight": (128256, 2560),
        "layers.29.attention.attn_sub_norm.weight": (2560,),
        "layers.29.feed_forward.ffn_sub_norm.weight": (6912,),
    }
    return {name: Tensor(None, "BF16", shape, 0, 0, None) for name, shape in (sizes | changed).items()}


def test_the_published_model_needs_no_config(tmp_path):
    config = gpu_config(tmp_path, shapes())
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 20, 5, 128)
    assert (config.activation, config.sub_norms, config.rope_theta) == ("relu2", True, 500000.0)


@pytest.mark.parametrize("changed", [{"tok_embeddings.weight": (128256, 2048)}, {"tok_embeddings.weight": ()},
                                     {"layers.29.attention.attn_sub_norm.weight": (1,)}])  # fmt: skip
def test_others_do(tmp_path, changed):
    with pytest.raises(FormatError, match=r"config\.json: is missing.*put the model's own"):
        gpu_config(tmp_path, shapes(**changed))


def test_more_layers_than_the_published_model_are_refused(tmp_path):
    found = shapes() | shapes(**{"layers.30.attention_norm.weight": (2560,)})
    with pytest.raises(FormatError, match=r"config\.json: is missing"):
        gpu_config(tmp_path, found)


def test_models_that_this_code_does_not_compute(tmp_path):
    path = write_gpu(tmp_path, gpu_tensors())
    (path / "config.json").write_text(
        json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    with pytest.raises(Unsupported, match="hold BitNet models"):
        open_checkpoint(path)


# What is wrong with the tensors


def change(tensors, name, value):
    tensors[f"layers.1.{name}"] = value
    return f"layers.1.{name}"


WRONG = {
    "missing": lambda t: t.pop("norm.weight") is None or "norm.weight",
    "more": lambda t: t.update(more=np.zeros(1, np.uint16)) or "'more'",
    "scales": lambda t: t.pop("layers.1.attention.wo.weight_scale") is None or "wo.weight_scale",
    "shape": lambda t: change(t, "feed_forward.w2.weight", np.zeros((64, 8), np.int8)),
    "vector": lambda t: change(t, "ffn_norm.weight", np.zeros(3, np.uint16)),
    "int8 norm": lambda t: change(t, "ffn_norm.weight", np.zeros(64, np.int8)),
    "int8 scale": lambda t: change(t, "feed_forward.w2.weight_scale", np.zeros(4, np.int8)),
    "one scale": lambda t: change(t, "feed_forward.w2.weight_scale", bfloat16([1.0])),
    "zero": lambda t: change(t, "attention.wqkv.weight_scale", bfloat16([1.0, 1.0, 0.0, 1.0])),
    "negative": lambda t: change(t, "feed_forward.w13.weight_scale", bfloat16([1.0, -1.0, 0.0, 0.0])),
    "NaN": lambda t: change(t, "feed_forward.w2.weight_scale", np.array([0x7FC0, 0, 0, 0], np.uint16)),
    "NaN norm": lambda t: change(t, "attention_norm.weight", np.full(64, 0x7FC0, np.uint16)),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named(tmp_path, what):
    tensors = gpu_tensors()
    name = WRONG[what](tensors)
    (line,) = open_checkpoint(write_gpu(tmp_path, tensors)).check()
    assert name in line
    assert "\n" not in line


def test_an_invalid_code_is_named(tmp_path):
    tensors = gpu_tensors()
    wrong = tensors["layers.0.attention.wqkv.weight"].copy()
    wrong.reshape(-1)[-1] &= 0x3F
    tensors["layers.0.attention.wqkv.weight"] = wrong
    checkpoint = open_checkpoint(write_gpu(tmp_path, tensors))
    assert checkpoint.check() == []
    with pytest.raises(FormatError, match=r"layers\.0\.attention\.wqkv\.weight: row 127, column .* the 2-bit code 0"):
        checkpoint.matrix("layers.0.v")


def test_masters_are_ternarised(tmp_path):
    rng, tensors = np.random.default_rng(0), gpu_tensors("fp16")
    weights = rng.standard_normal((64, 64)).astype(np.float32)
    tensors["layers.0.attention.wo.weight"] = weights
    found = open_checkpoint(write_gpu(tmp_path, tensors, "fp16")).matrix("layers.0.o")
    expected, scale = ternary.ternarize(weights)
    assert np.array_equal(found.data, expected)
    assert found.scale == scale


def test_heads_that_do_not_fit(tmp_path):
    path = write_gpu(tmp_path, gpu_tensors())
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": HEADS}))
    assert any("wqkv" in line for line in open_checkpoint(path).check())


SOUND = torch_bytes(gpu_tensors())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.sampled_from(headers(SOUND)), st.binary(max_size=4), st.integers(0, 4))
def test_any_change_of_a_file_is_read_or_refused(tmp_path, start, insert, removed):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model_state_int2.pt").write_bytes(SOUND[:start] + insert + SOUND[start + removed :])
    read_or_refused(tmp_path)


def test_the_samples_differ():
    assert not np.array_equal(codes(0, "self_attn.k_proj"), codes(0, "self_attn.v_proj"))

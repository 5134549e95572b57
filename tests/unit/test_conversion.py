"""GGUF files that we write: read back by us and by the `gguf` library; what falls back, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_samples import I2_S, codes_of, i2_s_bytes, own_name, write_default
from gpu_samples import gpu_tensors, write_gpu
from meta_samples import PARAMS, cut, meta_tensors, random_weights, write_meta, write_ranks
from tiny_folders import BITLINEAR, ONLINE, folder

from bitnet_inference import LLM, Conversion, SamplingParams, convert
from bitnet_inference.errors import FormatError, InvalidParams, ModelError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, LocalLayers, ModelConfig, RopeScaling, Ternary, expected_shapes
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.formats.gguf_config import read_config
from bitnet_inference.formats.gguf_metadata import architecture_of, describe, rope_factors
from bitnet_inference.formats.gguf_writer import record
from bitnet_inference.formats.titles import source_of, title_of
from bitnet_inference.formats.yarn import sharpened, yarn_attention, yarn_factors
from bitnet_inference.model.rope import inverse_frequencies
from bitnet_inference.model_folder import default_params, defaults_of, find_model, load_tokenizer
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import BITNET_TEMPLATE, corrections

GOLDEN = Path(__file__).parents[1] / "golden"
TALK = [{"role": "user", "content": "Tell me a story about a fox"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
TERNARY_GOLDEN = ("bitnet-packed", "bitnet-masters", "bitnet-unpacked", "llama-bitlinear", "llama-autobitlinear",
                  "llama-masters-f32", "llama-partial", "llama-ternary-head", "bitnet-1bitllm")  # fmt: skip
DENSE_GOLDEN = ("llama3-bf16", "llama-f16", "llama-f32", "qwen2-bf16")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Conversion]:
    path = tmp_path_factory.mktemp("converted")
    return {kind: convert("default", path / f"{kind}.gguf", kind) for kind in ("i2_s", "tq2_0", "f16")}


def is_equal(one, other) -> bool:
    """Whether two checkpoints hold the same matrices and norms, to the bit."""
    for name, shape in expected_shapes(other.config):
        if len(shape) == 1:
            same = np.array_equal(one.vector(name), other.vector(name))
        else:
            a, b = one.matrix(name), other.matrix(name)
            same = type(a) is type(b)
            if same and isinstance(a, Ternary):
                same = a.scale == b.scale and np.array_equal(codes_of(a), codes_of(b))
            elif same:
                same = a.dtype == b.dtype and np.array_equal(a.data, b.data.view(a.data.dtype))
        if not same:
            return False
    return True


def logits(path, **options):
    with LLM.load(path, **options) as llm:
        return llm.logits(llm.tokenizer.encode("The fox and the bear"))


@pytest.mark.parametrize("kind", ["i2_s", "tq2_0", "f16"])
def test_the_default_model_is_the_same_again(written, kind):
    path, source = written[kind].path, open_checkpoint(find_model("default"))
    found = open_checkpoint(path)
    assert found.check() == [] and (kind == "f16" or is_equal(found, source))
    assert {name for name in dict(expected_shapes(source.config)) if source.is_ternary(name)} == {
        name for name in dict(expected_shapes(source.config)) if found.is_ternary(name)
    }
    assert found.config.norm_eps == pytest.approx(source.config.norm_eps)
    same = {"norm_eps": source.config.norm_eps, "eos_ids": source.config.eos_ids}
    assert replace(found.config, **same) == source.config
    with LLM.load("default") as llm, LLM.load(path) as again:
        assert again.chat(TALK, GREEDY).token_ids == llm.chat(TALK, GREEDY).token_ids
        assert set(again.eos_ids) == set(llm.eos_ids)


@pytest.mark.parametrize("kind", ["tq2_0", "f16"])
def test_the_library_reads_the_same(written, kind):
    reader, source = gguf.GGUFReader(written[kind].path), open_checkpoint(find_model("default"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, shape in expected_shapes(source.config):
        tensor = tensors.pop(own_name(name))
        assert tuple(tensor.shape[::-1]) == shape
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if len(shape) == 1:
            assert tensor.tensor_type.name == "F32" and np.array_equal(values, source.vector(name))
        elif isinstance(matrix := source.matrix(name), Ternary):
            assert tensor.tensor_type.name == kind.upper()
            assert np.array_equal(values, codes_of(matrix) * np.float32(matrix.scale))
        else:
            expected = to_float32(matrix.data.view(np.uint16), "bfloat16")
            assert tensor.tensor_type.name == ("BF16" if kind == "tq2_0" else "F16")
            assert np.array_equal(values, expected if kind == "tq2_0" else expected.astype(np.float16))
    assert not tensors
    field = reader.fields
    assert field["general.architecture"].contents() == "bitnet-b1.58"
    assert field["general.file_type"].contents() == {"tq2_0": 37, "f16": 1}[kind]
    assert field["bitnet-b1.58.embedding_length"].types == [gguf.GGUFValueType.UINT32]
    assert len(field["tokenizer.ggml.tokens"].contents()) == source.config.vocab_size
    assert field["tokenizer.ggml.add_bos_token"].contents() is True


def test_i2_s_is_written_as_by_hand(written):
    source = open_checkpoint(find_model("default"))
    tensor = open_checkpoint(written["i2_s"].path)._tensors["blk.1.ffn_down.weight"]
    matrix = source.matrix("layers.1.down")
    assert tensor.type_id == I2_S
    assert np.array_equal(tensor.raw(), i2_s_bytes(codes_of(matrix), matrix.scale))


@pytest.mark.parametrize("name", TERNARY_GOLDEN)
def test_i2_s_keeps_every_family_to_the_bit(tmp_path, name):
    """q and k of Llama change places in the file, and come back; a ternary head stays one."""
    result = convert(GOLDEN / name, tmp_path / "model.gguf", "i2_s")
    found, source = open_checkpoint(result.path), open_checkpoint(GOLDEN / name)
    assert is_equal(found, source) and all(each.error == 0 for each in result.tensors)
    assert np.array_equal(logits(result.path), logits(GOLDEN / name))
    ours, theirs = load_tokenizer(found), load_tokenizer(source)
    assert defaults_of(ours) == defaults_of(theirs) != SamplingParams() and not result.notes
    assert set(theirs.eos_ids) <= {*ours.eos_ids, *found.config.eos_ids}
    assert (ours.bos_id, ours.templates, ours.affixes) == (theirs.bos_id, theirs.templates, theirs.affixes)


@pytest.mark.parametrize("name", DENSE_GOLDEN)
def test_dense_models_become_float16(tmp_path, name):
    source = open_checkpoint(GOLDEN / name)
    with pytest.raises(InvalidParams, match="no ternary matrix: convert it to the type f16"):
        convert(GOLDEN / name, tmp_path / "model.gguf", "tq2_0")
    result = convert(GOLDEN / name, tmp_path / "model.gguf", "f16")
    found = open_checkpoint(result.path)
    assert found.matrix("layers.1.k").dtype == "float16"
    assert np.allclose(inverse_frequencies(found.config), inverse_frequencies(source.config), rtol=1e-6)
    ours, theirs = (logits(path, cache_dtype="float32") for path in (result.path, GOLDEN / name))
    assert np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2)) < 0.004
    assert not any("ternary" in note for note in result.notes)
    worst = max(each.error for each in result.tensors)
    assert (worst == 0) == (name == "llama-f16") and worst < 1e-3


def test_what_tq2_0_has_no_room_for_falls_back(tmp_path):
    """Rows of 64 are no blocks of 256. Beside dense projections, the rest is of their type."""
    result = convert(GOLDEN / "llama-bitlinear", tmp_path / "model.gguf", "tq2_0")
    assert {each.type for each in result.tensors} == {"BF16", "F16", "F32"}
    assert "multiples of 256 columns, so 14 became F16: blk.0.attn_q.weight" in result.notes[0]
    assert "and 11 more" in result.notes[0] and "dense ones" in result.notes[1]
    assert "dense ones" in convert(GOLDEN / "qwen3-bitlinear", tmp_path / "qwen3.gguf", "f16").notes[0]
    source, matrix = open_checkpoint(GOLDEN / "llama-bitlinear"), open_checkpoint(result.path).matrix("layers.1.q")
    ternary = source.matrix("layers.1.q")
    assert isinstance(matrix, Dense)
    assert np.array_equal(matrix.data, (codes_of(ternary) * np.float32(ternary.scale)).astype(np.float16))
    result = convert(GOLDEN / "llama-partial", tmp_path / "partial.gguf", "tq2_0")
    assert "so 10 became BF16" in result.notes[0] and np.isfinite(logits(result.path)).all()


def test_scales_that_float16_does_not_have(tmp_path):
    source = open_checkpoint(find_model("default"))
    codes = codes_of(source.matrix("layers.0.q"))
    change = {
        "layers.0.q": Ternary(codes, "codes", codes.shape, 1 / 3),
        "layers.1.q": Ternary(codes, "codes", codes.shape, 70000.0),
    }
    write_default(tmp_path / "a.gguf", "I2_S", change={"layers.0.q": change["layers.0.q"]})
    result = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "tq2_0")
    errors = {each.name: each.error for each in result.tensors if each.error}
    off = abs(float(np.float16(1 / 3)) - 1 / 3) * 3
    assert errors == {"blk.0.attn_q.weight": pytest.approx(off, rel=1e-3)} and not result.notes
    write_default(tmp_path / "a.gguf", "I2_S", change={"layers.1.q": change["layers.1.q"]})
    with pytest.raises(Unsupported, match=r"blk.1.attn_q.weight: 70000 does not fit float16"):
        convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "f16")
    assert open_checkpoint(result.path).check() == [] and sorted(os.listdir(tmp_path)) == ["a.gguf", "b.gguf"]


def test_a_scale_below_0_has_no_place_in_a_gguf_file(tmp_path):
    packed = convert(GOLDEN / "bitnet-packed", tmp_path / "a.safetensors").path
    data = packed.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    begin, end = (size + each for each in json.loads(data[8:size])["layers.0.down.scale"]["data_offsets"])
    packed.write_bytes(data[:begin] + np.float32(-1.5).tobytes() + data[end:])
    with pytest.raises(Unsupported, match=r"its scale is -1\.5"):
        convert(packed, tmp_path / "b.gguf")
    assert not (tmp_path / "b.gguf").exists()


def test_groups_of_columns_with_scales_of_their_own(tmp_path):
    """Become float16 in a "llama" file. In one of BitNet they would be read as ternary again, with one scale."""
    folder = open_checkpoint(find_model("default"))
    values = codes_of(folder.matrix("layers.0.down")) * np.repeat(np.array([[0.5, 0.25, 2.0]], np.float32), 256, axis=1)
    drop = [name for name, _ in expected_shapes(folder.config) if "sub_norm" in name]
    change = {"layers.0.down": Dense(values, "float32")}
    write_default(tmp_path / "a.gguf", "TQ2_0", arch="llama", drop=drop, change=change)
    result = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "i2_s")
    assert "groups of 128 columns, so 1 became F16: blk.0.ffn_down.weight" in result.notes[0]
    raw = open_checkpoint(result.path)._tensors["blk.0.ffn_down.weight"].raw()
    assert np.array_equal(raw.view(np.float16).reshape(values.shape), values)
    write_default(tmp_path / "a.gguf", "TQ2_0", change=change)
    with pytest.raises(Unsupported, match=r"layers.0.down has scales for groups of columns, .* X.safetensors"):
        convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "i2_s")


@pytest.mark.parametrize(
    "quantization, dense", [(None, "q"), (ONLINE | {"modules_to_not_convert": ["lm_head", "down_proj"]}, "down")]
)
def test_dense_layers_of_bitnet_have_no_place_in_a_gguf_file(tmp_path, quantization, dense):
    """Who reads the architecture takes them for ternary ones; rounded so, they are."""
    model = folder("bitnet", quantization)
    model.config["vocab_size"], model.tensors["model.embed_tokens.weight"] = 384, np.ones((384, 8), np.float32)
    model.write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "llama-f16" / name, tmp_path / name)
    for kind in ("i2_s", "f16"):
        with pytest.raises(Unsupported, match=f"layers.0.{dense} is dense, .* --quantize ternary"):
            convert(tmp_path, tmp_path / "x.gguf", kind)
    assert open_checkpoint(convert(tmp_path, tmp_path / "x.gguf", "f16", quantize="ternary").path).check() == []


def test_the_metadata_of_a_gguf_file_stays_as_it_is(tmp_path):
    write_default(tmp_path / "a.gguf", "TQ2_0", arch="bitnet-25", **{"general.author": "Mia", "x.y": "ä"})
    result = convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "i2_s")
    before, after = (dict(open_checkpoint(tmp_path / name).records) for name in ("a.gguf", "b.gguf"))
    assert after.pop("general.file_type") == record("general.file_type", 40)
    before.pop("general.file_type", None)
    assert list(before) == list(after) and all(before[key] == after[key] for key in before)
    assert is_equal(open_checkpoint(result.path), open_checkpoint(tmp_path / "a.gguf")) and not result.notes


def test_a_pre_tokenizer_gets_the_name_that_llama_cpp_knows(tmp_path):
    write_default(tmp_path / "a.gguf", "TQ2_0", pre="falcon_e")
    convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "f16")
    assert open_checkpoint(tmp_path / "b.gguf").metadata["tokenizer.ggml.pre"] == "llama-bpe"


def test_what_microsofts_files_say_wrongly_is_written_right():
    wrong = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [""] * 128256}
    wrong["tokenizer.chat_template"] = "Human: {{ messages[0].content }}\n\nBITNETAssistant: "
    right = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.chat_template": BITNET_TEMPLATE}
    assert corrections(wrong) == right and not corrections(wrong | right)


def config(**more) -> ModelConfig:
    return replace(open_checkpoint(GOLDEN / "llama-bitlinear").config, **more)


def test_a_model_keeps_its_name_from_file_to_file(tmp_path):
    """Whatever the files are called, and not that of a commit in the Hub's cache."""
    folder = tmp_path / "models--owner--story-b1.58" / "snapshots" / ("0" * 40)
    shutil.copytree(find_model("default"), folder)
    steps = ("a.gguf", "b.safetensors", "c.gguf", "d.safetensors", "e.safetensors", "f.gguf")
    for source, target in pairwise((folder, *(tmp_path / step for step in steps))):
        convert(source, target)
        checkpoint = open_checkpoint(target)
        assert checkpoint.metadata.get("general.name", "story-b1.58") == title_of(checkpoint) == "story-b1.58"
    convert(folder, tmp_path / "d.safetensors")
    assert "source: 'story-b1.58'" in open_checkpoint(tmp_path / "d.safetensors").notes()
    assert title_of(open_checkpoint(Path(__file__).with_name("packed_v1.safetensors"))) == "bitnet-packed"
    (folder / "original").mkdir()  # where Meta's own files lie
    assert source_of(folder / "original") == "story-b1.58" and source_of(folder / "a-1.5.gguf") == "a-1.5.gguf"


def test_the_keys_of_a_model():
    values = describe(Path("folder"), config(head_dim=24), "name")
    assert values["general.name"] == "name" and values["llama.attention.value_length"] == 24
    assert values["llama.rope.freq_base"] == 1000042.0 and values["llama.attention.head_count_kv"] == 2
    linear = describe(Path("x"), config(rope_scaling=RopeScaling(kind="linear", factor=2.0)), "x")
    assert (linear["llama.rope.scaling.type"], linear["llama.rope.scaling.factor"]) == ("linear", 2.0)
    llama3 = config(rope_scaling=RopeScaling(kind="llama3", factor=8.0), rope_theta=500000.0)
    plain = inverse_frequencies(replace(llama3, rope_scaling=None))
    assert np.allclose(plain / rope_factors(llama3), inverse_frequencies(llama3), rtol=1e-6)
    assert rope_factors(config()) is None
    with pytest.raises(Unsupported, match=r"rope.freq_base is 1e\+50, which does not fit float32"):
        describe(Path("x"), config(rope_theta=1e50), "x")
    assert record("k", "a\udc80") == record("k", "a?")


@pytest.mark.parametrize(
    "said, kept, lost",
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}, None, ()),
        ({"do_sample": True, "top_k": 20, "transformers_version": "5.0"}, None, ()),
        ({"temperature": 0.7, "use_cache": True, "output_attentions": False}, None, ()),
        ({"do_sample": True, "top_k": -1, "repetition_penalty": 1.1}, None, ()),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.3}, {"repetition_penalty": 1.3}, ()),
        ({"temperature": 0.6, "typical_p": 0.9, "max_new_tokens": 8}, {"temperature": 0.6},
         ("max_new_tokens, typical_p",)),
        ({"do_sample": False}, {}, ()),
    ],
)  # fmt: skip
def test_what_a_model_recommends_goes_with_the_file(tmp_path, said, kept, lost):
    shutil.copytree(GOLDEN / "llama-bitlinear", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({**said, "eos_token_id": 377}))
    result = convert(tmp_path / "model", tmp_path / "x.gguf")
    assert [note.rpartition(": ")[2] for note in result.notes] == list(lost)
    convert(tmp_path / "x.gguf", tmp_path / "x.safetensors")
    for file in ("x.gguf", "x.safetensors"):
        found = load_tokenizer(open_checkpoint(tmp_path / file)).generation
        assert default_params(found) == default_params(said if kept is None else kept)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("temp", "hot", r"x\.gguf: general\.sampling\.temp: is no number"),
        ("top_k", True, r"x\.gguf: general\.sampling\.top_k: is no number"),
        ("temp", -1.0, r"x\.gguf: temperature is -1"),
        ("top_p", float("nan"), r"x\.gguf: top_p is nan"),
    ],
)
def test_recommendations_of_a_gguf_file_that_are_none(written, key, value, message):
    metadata = open_checkpoint(written["i2_s"].path).metadata | {f"general.sampling.{key}": value}
    with pytest.raises(FormatError, match=message):
        defaults_of(Tokenizer.from_metadata("x.gguf", metadata))


def yarn(head_dim=32, **more) -> ModelConfig:
    """As a folder says it, of a model that was trained for 4,096 positions at first."""
    factors = yarn_factors(4.0, 4096, 1e4, head_dim, **more)
    return config(
        rope_scaling=RopeScaling(kind="factors", factor=4.0, factors=factors), rope_theta=1e4, head_dim=head_dim,
        attention_scale=sharpened(yarn_attention(4.0), head_dim), norm_eps=0.5,
    )  # fmt: skip


def test_yarn_goes_with_the_file():
    values = describe(Path("x"), yarn(), "x")
    kept = {"type": "yarn", "factor": 4.0, "original_context_length": 4096}
    assert {key: values[f"llama.rope.scaling.{key}"] for key in kept} == kept and rope_factors(yarn()) is None
    found = read_config(Path("x"), values, yarn().vocab_size, yarn().tie_embeddings, ())
    assert (found.rope_scaling, found.score_scale) == (yarn().rope_scaling, pytest.approx(yarn().score_scale))
    blunt = replace(yarn(beta_fast=4.0), attention_scale=None)  # what the keys do not say a tensor does
    assert np.allclose(rope_factors(blunt), blunt.rope_scaling.factors)
    for other in (yarn(beta_fast=4.0), replace(yarn(), attention_scale=0.5)):
        with pytest.raises(Unsupported, match=r'scaled by yarn, with other numbers than those that "llama"'):
            describe(Path("x"), other, "x")


def test_rotations_that_llama_cpp_scales_in_llamas_files_alone(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for name, count in (("qwen3-bitlinear", 1), ("llama-bitlinear", 0)):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        said = json.loads((tmp_path / name / "config.json").read_text())
        said["rope_scaling"] = {**scaling, "original_max_position_embeddings": 64}
        (tmp_path / name / "config.json").write_text(json.dumps(said))
        notes = convert(tmp_path / name, tmp_path / f"{name}.gguf").notes
        assert (
            sum(note.startswith("rope_freqs.weight scales rotations") and "llama.cpp" in note for note in notes)
            == count
        )


GEMMA = {"activation": "gelu", "head_norms": True, "post_norms": True, "embed_scale": 8.0}


@pytest.mark.parametrize(
    "more, message",
    [
        ({"linear_norm": True}, "a norm before every projection"),
        ({"head_norms": True, "linear_norm": True, "linear_norm_eps": 1e-3}, "its own epsilon"),
        ({"embed_scale": 2.0}, "embeddings are multiplied by 2, which"),
        ({"attention_scale": 0.5}, "scores of attention are multiplied by 0.5, those of"),
        ({"local": LocalLayers(layers=(0,), window=4, rope_theta=1e4)}, "see a window only"),
        (GEMMA | {"embed_scale": 2.0}, "embeddings are multiplied by 2, which"),
        (GEMMA | {"attention_scale": 0.5}, "scores of attention are multiplied by 0.5, those of"),
        (GEMMA | {"local": LocalLayers(layers=(1,), window=4, rope_theta=1e4)}, "see a window only"),
        ({"post_norms": True}, "no architecture of GGUF has silu with such norms"),
        ({"qkv_bias": True, "head_norms": True}, "no architecture of GGUF has silu with such norms and biases"),
        ({"qkv_bias": True, "linear_norm": True}, '"qwen2" has no place for a norm before every projection'),
        ({"activation": "relu2"}, "no architecture of GGUF has relu2"),
        ({"sub_norms": True, "tie_embeddings": False}, "embeddings for its head"),
        ({"sub_norms": True, "tie_embeddings": True, "vocab_size": 128256}, "would be read as relu2"),
    ],
)
def test_models_that_have_no_place_in_a_gguf_file(more, message):
    with pytest.raises(Unsupported, match=message):
        architecture_of(Path("x"), config(**more))
    assert architecture_of(Path("x"), config(sub_norms=True, tie_embeddings=True)) == "bitnet"
    assert architecture_of(Path("x"), config(**GEMMA)) == "gemma3"
    assert architecture_of(Path("x"), config(head_norms=True, linear_norm=True)) == "qwen3"
    assert architecture_of(Path("x"), config(qkv_bias=True)) == "qwen2"


def test_how_to_pool_is_written():
    assert describe(Path("x"), config(pooling="last"), "x")["llama.pooling_type"] == 3
    assert "llama.pooling_type" not in describe(Path("x"), config(), "x")


@pytest.mark.parametrize(
    "source, target, kind, message",
    [
        ("default", "x.gguf", "q4_0", "'q4_0' is not known: choose one of i2_s, tq2_0, f16"),
        ("default", "x.bin", "i2_s", "end it in .gguf"),
        ("default", "x.onnx", "i2_s", "only GGUF files have types"),
        ("default", "absent/x.gguf", "i2_s", "there is no folder"),
        ("default", "folder.gguf", "i2_s", "cannot be written"),
        ("absent", "x.gguf", "i2_s", "no such file or folder"),
        ("own.gguf", "own.gguf", "i2_s", "it is the source"),
        (GOLDEN / "llama-rms-norm", "x.gguf", "i2_s", "a norm before every projection"),
        (GOLDEN / "bitnet-bitlinear", "x.gguf", "i2_s", "another one"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, source, target, kind, message):
    monkeypatch.chdir(tmp_path)
    Path("folder.gguf").mkdir()
    Path("own.gguf").write_bytes(b"GGUF")
    with pytest.raises((InvalidParams, ModelError), match=message):
        convert(source, target, kind)
    assert sorted(os.listdir()) == ["folder.gguf", "own.gguf"] and Path("own.gguf").read_bytes() == b"GGUF"


def test_parts_of_the_source_are_not_written_over(tmp_path):
    write_default(tmp_path / "x.gguf", "I2_S", per_file=40)
    one, two = sorted(tmp_path.iterdir())
    (tmp_path / "link.gguf").symlink_to(two)
    for target in (one, two, tmp_path / "link.gguf"):
        with pytest.raises(InvalidParams, match="it is the source"):
            convert(one, target)
    assert not open_checkpoint(one).check()
    for _ in range(2):
        assert convert(one, tmp_path / "x-00001-of-00003.gguf").path.is_file()


def test_weights_of_a_folder_are_not_written_over(tmp_path):
    """The source's own ones least of all."""
    for name, message in (("bitnet-packed", "is there, and no packed file"), ("llama-f32", "in the place of")):
        source = shutil.copytree(GOLDEN / name, tmp_path / name)
        before = sorted(os.listdir(source))
        with pytest.raises(InvalidParams, match=message):
            convert(source, source / "model.safetensors")
        assert sorted(os.listdir(source)) == before and not open_checkpoint(source).check()
        for _ in range(2):  # one of before is replaced
            assert convert(source, source / "x.safetensors").path.is_file()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"cut")
    with pytest.raises(InvalidParams, match="is there, and no packed file"):
        convert(source, broken)


def test_weights_of_a_folder_are_not_hidden(tmp_path):
    """Neither those of the source, nor another model's: what is read first in a folder is not written beside them."""
    for name, write in (("gpu", lambda folder: write_gpu(folder, gpu_tensors())), ("onnx", write_onnx_folder)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
        with pytest.raises(InvalidParams, match="in the place of"):
            convert("default", tmp_path / name / "model.safetensors")
    meta = write_meta(tmp_path / "meta", cut(meta_tensors(random_weights()), 1))
    write_ranks(meta)
    with pytest.raises(InvalidParams, match=r"has Meta's weights, which a config\.json would hide"):
        convert(meta, meta / "model.onnx")


def write_onnx_folder(folder):
    convert("default", folder / "model.onnx", check=False)


def test_what_cannot_be_read_again_is_not_written(tmp_path):
    """Nor does it take the place of what was there."""
    source = shutil.copytree(GOLDEN / "bitnet-packed", tmp_path / "source")
    old = tmp_path / "old.safetensors"
    convert(source, old)
    before = old.read_bytes()
    (source / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(FormatError, match=r"generation_config\.json: temperature is -1"):
        convert(source, old)
    (source / "generation_config.json").unlink()
    (source / "additional_chat_templates").mkdir()
    for number in range(9):
        (source / "additional_chat_templates" / f"n{number}.jinja").write_text("x" * 1_000_000)
    with pytest.raises(Unsupported, match="chat templates and the like have 9"):
        convert(source, old)
    assert old.read_bytes() == before


def test_named_tokens_of_a_template_have_no_place_in_a_gguf_file(tmp_path):
    source = shutil.copytree(GOLDEN / "llama-partial", tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ bos_token }}{{ image_token }}{{ messages[0].content }}")
    config = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"image_token": "the", "sep_token": "fox"}))
    with pytest.raises(Unsupported, match="has the image_token, which its chat template writes"):
        convert(source, tmp_path / "x.gguf")


def test_a_failure_in_the_middle_leaves_the_old_file(tmp_path):
    """A code 3 is found when its matrix is read; before that, other tensors were written."""
    model = folder("llama", BITLINEAR, tied=False)
    model.config |= {"vocab_size": 384}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name] = np.zeros((384, 8), np.float32)
    model.tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = 255
    (tmp_path / "model").mkdir()
    model.write(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "llama-f16" / name, tmp_path / "model" / name)
    (tmp_path / "x.gguf").write_text("before")
    seen = []
    with pytest.raises(FormatError, match="2-bit code 3"):
        convert(tmp_path / "model", tmp_path / "x.gguf", "i2_s", progress=lambda done, total: seen.append(done))
    assert len(seen) > 5 and (tmp_path / "x.gguf").read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["model", "x.gguf"]


def test_progress_and_sizes(tmp_path):
    seen = []
    result = convert(GOLDEN / "bitnet-packed", tmp_path / "x.gguf", progress=lambda *pair: seen.append(pair))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == seen[-1][1]
    assert len(seen) == len(result.tensors) and result.num_bytes == result.path.stat().st_size
    assert sum(each.num_bytes for each in result.tensors) < result.num_bytes
    assert (
        json.loads((GOLDEN / "bitnet-packed" / "config.json").read_text())["vocab_size"] == result.tensors[0].shape[0]
    )


def test_a_meta_checkpoint_with_its_words(tmp_path):
    """float16 matrices are the same again; q and k, which have adjacent pairs there too, and the scaled rotations."""
    shards = cut(meta_tensors(random_weights("float16")), 2, 0)
    meta = write_ranks(write_meta(tmp_path / "meta", shards, PARAMS | {"use_scaled_rope": True}))
    found, source = open_checkpoint(convert(meta, tmp_path / "x.gguf", "f16").path), open_checkpoint(meta)
    assert is_equal(found, source) and found.config.rope_scaling == source.config.rope_scaling
    ours, theirs = load_tokenizer(found), load_tokenizer(source)
    assert (ours.vocabulary(), ours.special, ours.templates) == (theirs.vocabulary(), theirs.special, theirs.templates)
    assert set(theirs.eos_ids) <= {*ours.eos_ids, *found.config.eos_ids}


def test_all_end_tokens_that_have_a_place(tmp_path):
    """One has a key already, two more have one each; <|eot_id|> and its like are known by their names."""
    shutil.copytree(GOLDEN / "llama-f16", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [377, 383, 7, 8, 9]}))
    result = convert(tmp_path / "model", tmp_path / "x.gguf", "f16")
    with LLM.load(tmp_path / "model") as llm, LLM.load(result.path) as again:
        assert set(llm.eos_ids) - set(again.eos_ids) == {9}
    assert result.notes == ("the end tokens 9 have no place in the file",)

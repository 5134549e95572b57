"""Qwen3, Gemma 3, BitNet-embeddings and 1bitLLM: what their files say of them, and the same bits from GGUF files.

What the models compute is compared with Transformers in tests/backends/test_golden.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import codes_of, write_default, write_model

from bitnet_inference import LLM, convert
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import LocalLayers, RopeScaling, expected_shapes
from bitnet_inference.formats.packed_writer import write_packed
from bitnet_inference.formats.safetensors_files import open_tensors
from bitnet_inference.summary import summarize

GOLDEN = Path(__file__).parent.parent / "golden"
IDS = list(range(3, 60))
ABSENT = object()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ALIKE = {"attention_factor": 1.0}  # as layers without yarn


def changed(tmp_path: Path, name: str, **changes) -> Path:
    """A golden folder with other values in its config.json."""
    folder = shutil.copytree(GOLDEN / name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(path: Path, **options: Any) -> np.ndarray:
    with LLM.load(path, device="cpu", threads=1, **options) as llm:
        return llm.logits(IDS)


def test_old_bitnet_models_are_ternary_although_nothing_says_so():
    checkpoint = open_checkpoint(GOLDEN / "bitnet-1bitllm")
    config = checkpoint.config
    assert (config.family, config.activation, config.sub_norms, config.tie_embeddings) == ("bitnet", "silu", True, True)
    assert checkpoint.is_ternary("layers.1.down") and not checkpoint.is_ternary("embed")
    assert checkpoint.check() == []


def test_an_old_bitnet_model_without_a_head_is_tied(tmp_path):
    config = open_checkpoint(changed(tmp_path, "bitnet-1bitllm", tie_word_embeddings=False, hidden_act=ABSENT)).config
    assert config.tie_embeddings and config.activation == "silu"


def test_windows_of_qwen_are_refused_and_kinds_of_layers_say_nothing_of_llama(tmp_path):
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    for name in ("qwen2-bf16", "qwen3-bf16"):
        with pytest.raises(Unsupported, match="layer_types: windows"):
            open_checkpoint(changed(tmp_path, name, **layers))
        with pytest.raises(Unsupported, match="use_sliding_window: windows"):
            open_checkpoint(changed(tmp_path / "used", name, use_sliding_window=True))
    assert open_checkpoint(changed(tmp_path, "llama-f32", **layers)).config.local is None


def test_activations_of_other_widths_are_refused(tmp_path):
    with pytest.raises(Unsupported, match="input_bits"):
        open_checkpoint(changed(tmp_path, "bitnet-1bitllm", input_bits=4))


def test_norms_of_gemma_are_one_plus_what_is_stored_but_for_those_of_projections():
    folder = GOLDEN / "gemma3-embedding"
    checkpoint, tensors = open_checkpoint(folder), open_tensors(folder).tensors
    found = {"norm": "norm", "layers.1.mlp_norm": "layers.1.pre_feedforward_layernorm",
             "layers.1.attn_post_norm": "layers.1.post_attention_layernorm",
             "layers.2.k_norm": "layers.2.self_attn.k_norm"}  # fmt: skip
    for name, module in found.items():
        stored = (tensors[f"{module}.weight"].array().astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(checkpoint.vector(name), stored + np.float32(1))
    stored = (tensors["layers.0.mlp.up_proj.norm.weight"].array().astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(checkpoint.vector("layers.0.up.norm"), stored)


def test_what_a_gemma_config_says(tmp_path):
    config = open_checkpoint(GOLDEN / "gemma3-bf16").config
    assert config.local == LocalLayers(layers=(0, 2), window=6, rope_theta=10000.0)
    assert (config.rope_theta, config.attention_scale, config.activation) == (1e6, 20**-0.5, "gelu")
    assert config.embed_scale == 6.3125  # the root of 40, in bfloat16
    old = dict.fromkeys(("layer_types", "rope_parameters", "query_pre_attn_scalar"), ABSENT)
    old |= {"sliding_window_pattern": 3}
    config = open_checkpoint(changed(tmp_path, "gemma3-bf16", **old, rope_local_base_freq=500.0)).config
    assert config.local == LocalLayers(layers=(0, 1), window=6, rope_theta=500.0)
    assert config.attention_scale == 1 / 16
    both = {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_scaling": {"type": "linear", "factor": 8}}
    config = open_checkpoint(changed(tmp_path / "both", "gemma3-bf16", **both)).config
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(kind="linear", factor=8.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": YARN}},
        {"rope_parameters": ABSENT, "rope_scaling": YARN},
    ],
)
def test_what_is_not_done_of_gemma(tmp_path, changes):
    with pytest.raises(Unsupported) as caught:
        open_checkpoint(changed(tmp_path, "gemma3-bf16", **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("types", "more"), [(["full_attention"] * 3, {}), (["full_attention"] * 2 + ["sliding_attention"], ALIKE)]
)
def test_yarn_that_sharpens_all_layers_of_gemma_alike_is_done(tmp_path, types, more):
    sections = {"full_attention": YARN | more}
    config = open_checkpoint(changed(tmp_path, "gemma3-bf16", rope_parameters=sections, layer_types=types)).config
    assert config.rope_scaling is not None and config.rope_scaling.kind == "factors"
    assert (config.local is None) == (not more)


def test_scaled_rotations_of_local_layers_are_refused_for_being_there(tmp_path):
    sections = {"full_attention": {}, "sliding_attention": YARN}
    with pytest.raises(Unsupported, match="only layers without a window can have scaled rotations"):
        open_checkpoint(changed(tmp_path, "gemma3-bf16", rope_parameters=sections))


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["sliding_attention", "full_attention", "chunked"]])
def test_kinds_of_layers_that_are_not_those_of_the_model(tmp_path, types):
    with pytest.raises(FormatError, match="layer_types"):
        open_checkpoint(changed(tmp_path, "gemma3-bf16", layer_types=types))


@pytest.mark.parametrize("name", ["qwen3-embedding", "gemma3-embedding"])
def test_embedding_models_pool_as_their_folder_says(tmp_path, name):
    folder = changed(tmp_path, name)
    assert open_checkpoint(folder).config.pooling == "mean"  # what they are known to do
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "word_embedding_dimension": 48}
    for said, pooling in ((modes, "last"), ({"pooling_mode": "mean"}, "mean")):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
        with LLM.load(folder, threads=1) as llm:
            assert llm.config.pooling == pooling
            assert np.array_equal(llm.embed([1, 2, 3]), llm.embed([1, 2, 3], pooling=pooling))
            other = "mean" if pooling == "last" else "last"
            assert not np.array_equal(llm.embed([1, 2, 3]), llm.embed([1, 2, 3], pooling=other))
    for said in ({"pooling_mode_cls_token": True}, {}, {"pooling_mode": "max"}, modes | {"pooling_mode": "mean"}):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
        with pytest.raises(Unsupported, match="pooling"):
            open_checkpoint(folder)


def modules(*steps: tuple[str, str]) -> list[dict[str, str]]:
    return [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in steps]


def test_vectors_go_through_the_modules_that_the_folder_names(tmp_path):
    folder = changed(tmp_path, "qwen3-embedding")
    said = folder / "modules.json"
    (folder / "pool").mkdir()
    (folder / "pool" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    known = (("Transformer", ""), ("Pooling", "pool"))
    for steps in (known, (*known, ("Normalize", "2_Normalize"))):
        said.write_text(json.dumps(modules(*steps)))
        assert open_checkpoint(folder).config.pooling == "last"
    said.write_text(json.dumps(modules(("Transformer", ""), ("LogitScore", "1_LogitScore"))))  # scores, no vectors
    assert open_checkpoint(folder).config.pooling == "mean"
    said.write_text(json.dumps(modules(*known, ("Dense", "2_Dense"))))
    with pytest.raises(Unsupported, match=r"modules.json: 'Dense' is not computed"):
        open_checkpoint(folder)
    for broken in ("{", "3", "[3]", json.dumps(modules(("Pooling", "../pool")))):
        said.write_text(broken)
        with pytest.raises(FormatError):
            open_checkpoint(folder)


def test_inspect_shows_what_is_special():
    assert "biases of q, k and v" in dict(summarize(GOLDEN / "qwen2-bf16").groups["model"])["family"]
    lines = dict(summarize(GOLDEN / "gemma3-embedding").groups["model"])
    for words in ("gelu", "norms of heads", "a norm before every projection", "embeddings times 6.3125"):
        assert words in lines["family"]
    assert "2 layers see 16 tokens (rope base 10000)" in lines["attention"]
    assert lines["embeddings"] == "pooled by the mean"


WINDOW = {"attention__sliding_window": 6, "attention__sliding_window_pattern": 2}


@pytest.mark.parametrize(
    ("name", "arch", "projections", "more"),
    [
        ("bitnet-1bitllm", "bitnet", "I2_S", {}),  # rows of 48 and 104, which are no blocks of 128
        ("qwen2-bitlinear", "qwen2", "I2_S", {}),
        ("qwen2-bf16", "qwen2", "BF16", {}),
        ("qwen3-bitlinear", "qwen3", "I2_S", {}),
        ("qwen3-bf16", "qwen3", "BF16", {}),
        ("qwen3-embedding", "qwen3", "I2_S", {"pooling_type": 1}),
        ("gemma3-bf16", "gemma3", "BF16", WINDOW),
        ("gemma3-embedding", "gemma3", "F32", WINDOW | {"attention__sliding_window": 16, "pooling_type": 3}),
    ],
)
def test_a_gguf_file_gives_the_same_bits_as_the_folder(tmp_path, name, arch, projections, more):
    folder = changed(tmp_path, name, query_pre_attn_scalar=24)  # a GGUF file says nothing of it: head_dim it is
    table = "F16" if name == "bitnet-1bitllm" else "BF16"
    write_model(tmp_path / "f.gguf", folder, arch, projections, table, **more)
    checkpoint, other = open_checkpoint(tmp_path / "f.gguf"), open_checkpoint(folder)
    assert checkpoint.check() == []
    assert checkpoint.config.local == other.config.local
    assert checkpoint.config.pooling == {1: "mean", 3: "last"}.get(more.get("pooling_type", 0))
    names = [name for name, shape in expected_shapes(other.config) if len(shape) == 2]
    assert [*map(checkpoint.is_ternary, names)] == [*map(other.is_ternary, names)]
    assert logits(tmp_path / "f.gguf").tobytes() == logits(folder).tobytes()


@pytest.mark.parametrize(
    "name",
    ["qwen2-bitlinear", "qwen3-bitlinear", "qwen3-embedding", "gemma3-embedding", "qwen2-bf16", "qwen3-bf16",
     "gemma3-bf16"],
)  # fmt: skip
def test_what_is_converted_gives_the_same_bits_as_the_folder(tmp_path, name):
    """Ternary matrices to I2_S; dense ones become float16, which rounds."""
    folder = changed(tmp_path, name, query_pre_attn_scalar=24)
    is_dense = name.endswith("bf16")
    path = convert(folder, tmp_path / "f.gguf", "f16" if is_dense else "i2_s").path
    checkpoint, other = open_checkpoint(path), open_checkpoint(folder)
    assert checkpoint.check() == []
    flags = ("head_norms", "post_norms", "linear_norm", "qkv_bias", "tie_embeddings")
    for field in ("local", "pooling", "activation", *flags):
        assert getattr(checkpoint.config, field) == getattr(other.config, field), field
    assert checkpoint.metadata["general.architecture"] == name.partition("-")[0]
    if is_dense:
        ours, theirs = (logits(each, cache_dtype="float32") for each in (path, folder))
        assert np.square(ours - theirs).mean() < 0.004**2 * np.square(theirs).mean()
    else:
        assert logits(path).tobytes() == logits(folder).tobytes()


def test_norms_in_f16_are_read(tmp_path):
    write_model(tmp_path / "f.gguf", GOLDEN / "qwen3-embedding", "qwen3", "F16", "F16", norms="F16", pooling_type=1)
    checkpoint, other = open_checkpoint(tmp_path / "f.gguf"), open_checkpoint(GOLDEN / "qwen3-embedding")
    for name in ("norm", "layers.0.q_norm", "layers.1.o.norm"):
        assert np.allclose(checkpoint.vector(name), other.vector(name), rtol=1e-3)


@pytest.mark.parametrize("more", [{"pooling_type": 2}, {"final_logit_softcapping": 30.0}])
def test_what_is_not_done_of_a_gguf_file(tmp_path, more):
    write_model(tmp_path / "f.gguf", GOLDEN / "gemma3-bf16", "gemma3", "BF16", "BF16", **more)
    with pytest.raises(Unsupported, match=next(iter(more))):
        open_checkpoint(tmp_path / "f.gguf")


def test_a_gemma_file_without_a_window_has_no_local_layers(tmp_path):
    write_model(tmp_path / "f.gguf", GOLDEN / "gemma3-bf16", "gemma3", "BF16", "BF16")
    assert open_checkpoint(tmp_path / "f.gguf").config.local is None


@pytest.mark.parametrize("kind, size", [("Q2_0", 64), ("Q2_0_128", 128)])
def test_qwen_with_a_scale_for_every_64_or_128_weights(tmp_path, kind, size):
    other = write_model(tmp_path / "f.gguf", GOLDEN / "qwen3-bitlinear", "qwen3", kind, "BF16")  # but for down
    checkpoint = open_checkpoint(tmp_path / "f.gguf")
    matrix = checkpoint.matrix("layers.1.o")
    assert (checkpoint.group_size("layers.1.o"), checkpoint.group_size("layers.1.down")) == (size, 0)
    assert np.array_equal(codes_of(matrix), codes_of(other.matrix("layers.1.o")))
    assert np.array_equal(matrix.scale, ((np.arange(64 * 128 // size) % 3 + 1) / 64).reshape(64, -1))
    with LLM.load(tmp_path / "f.gguf", device="reference", cache_dtype="float32") as llm:
        expected = llm.logits(IDS)
    with LLM.load(tmp_path / "f.gguf", device="cpu", cache_dtype="float32", threads=1) as llm:
        assert np.square(llm.logits(IDS) - expected).mean() < 0.03**2 * np.square(expected).mean()


def test_weights_of_one_bit_and_a_table_of_them(tmp_path):
    """As PrismML's Bonsai: nothing but -1 and +1 with a scale for 128 of them, in embeddings too."""
    other = write_default(tmp_path / "f.gguf", "Q1_0", "Q1_0")
    checkpoint = open_checkpoint(tmp_path / "f.gguf")
    matrix, table = checkpoint.matrix("layers.1.down"), checkpoint.matrix("embed")
    assert checkpoint.group_size("layers.1.down") == 128 and checkpoint.is_ternary("layers.1.down")
    assert np.array_equal(codes_of(matrix), np.where(codes_of(other.matrix("layers.1.down")) > 0, 1, -1))
    assert np.array_equal(matrix.scale, ((np.arange(256 * 6) % 3 + 1) / 64).reshape(256, 6))
    assert (table.dtype, checkpoint.dtype("embed")) == ("float16", "float16")
    assert set(np.unique(np.abs(table.data * 64))) == {1, 2, 3}
    with LLM.load(tmp_path / "f.gguf", device="reference", cache_dtype="float32") as llm:
        expected = llm.logits(IDS)
    with LLM.load(tmp_path / "f.gguf", device="cpu", cache_dtype="float32", threads=1) as llm:
        assert np.square(llm.logits(IDS) - expected).mean() < 0.03**2 * np.square(expected).mean()


@pytest.mark.parametrize("kind", ["Q1_0", "TQ1_0", "TQ2_0"])
def test_a_table_in_a_ternary_type_knows_its_codes(tmp_path, kind):
    write_default(tmp_path / "f.gguf", "TQ2_0", kind)
    checkpoint = open_checkpoint(tmp_path / "f.gguf")
    codes, table = checkpoint.table_codes("embed"), checkpoint.matrix("embed")
    assert np.array_equal(codes_of(codes) * np.repeat(codes.scale, codes.group_size, axis=1), table.data)
    assert checkpoint.table_codes("layers.0.q") is None


def test_a_ternary_head_gets_no_screen_in_a_file(tmp_path):
    """Its own codes are one, and soon found again."""
    write_default(tmp_path / "f.gguf", "Q1_0", "Q1_0")
    write_packed(open_checkpoint(tmp_path / "f.gguf"), {}, tmp_path / "p.safetensors", min_screened=1)
    packed = open_checkpoint(tmp_path / "p.safetensors")
    assert packed.check() == [] and packed.screen() is None


def test_an_added_token_that_the_model_has_no_row_for_is_a_note(tmp_path):
    """Gemma 3's tokenizer has one for images, more than its embeddings have rows."""
    folder = shutil.copytree(GOLDEN / "gemma3-bf16", tmp_path / "model")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 384, "content": "<image>"})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    summary = summarize(folder)
    assert not summary.problems
    assert ("note", "the model has no rows for added tokens: <image>") in summary.groups["words"]

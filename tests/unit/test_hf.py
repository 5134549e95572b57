"""Hugging Face folders: what their tensors mean, and that everything wrong with them is named."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from tiny_folders import (
    BITLINEAR,
    HIDDEN,
    LAYER,
    OFFLINE,
    ONLINE,
    PROJECTIONS,
    VOCAB,
    Q,
    bfloat16,
    codes_of,
    floats_of,
    folder,
    sharded,
)

from bitnet_inference import ternary
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, Ternary

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))


def codes(matrix):
    return matrix.data if matrix.layout == "codes" else ternary.unpack_quarters(matrix.data, matrix.shape[0])


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_checkpoint_is_sound(name):
    assert open_checkpoint(GOLDEN / name).check() == []


@pytest.mark.parametrize("name", NAMES)
def test_golden_matrices_are_what_transformers_made_of_them(name):
    checkpoint, golden = open_checkpoint(GOLDEN / name), np.load(GOLDEN / name / "golden.npz")
    for key in (key for key in golden.files if key.endswith(".weight")):
        matrix = checkpoint.matrix(key.removesuffix(".weight"))
        assert np.array_equal(codes(matrix), golden[key])
        assert matrix.scale == pytest.approx(golden[key.replace(".weight", ".m")], rel=2e-7)


def test_masters_and_packed_weights_of_one_model_have_the_same_scales():
    masters, packed = open_checkpoint(GOLDEN / "bitnet-masters"), open_checkpoint(GOLDEN / "bitnet-packed")
    assert masters.matrix("layers.1.up").scale == packed.matrix("layers.1.up").scale


def test_parameters_are_counted_by_weight():
    # 384 * 64 embeddings, and twice 12,288 attention + 30,720 MLP + 352 norms, and the last norm
    assert open_checkpoint(GOLDEN / "bitnet-packed").num_parameters == 384 * 64 + 2 * (12288 + 30720 + 352) + 64


def test_bytes_are_those_of_all_shards():
    files = GOLDEN.glob("llama-bitlinear/*.safetensors")
    assert open_checkpoint(GOLDEN / "llama-bitlinear").num_bytes == sum(file.stat().st_size for file in files)


def test_autobitlinear_scales_multiply(tmp_path):
    matrix = open_checkpoint(folder(quantization=OFFLINE).write(tmp_path)).matrix("layers.0.down")
    assert matrix.layout == "quarters"
    assert np.array_equal(codes(matrix), codes_of(PROJECTIONS["down"][1]))
    assert matrix.scale == 1.5


@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_bitlinear_scales_divide(tmp_path, family):
    matrix = open_checkpoint(folder(family, BITLINEAR).write(tmp_path)).matrix("layers.0.q")
    assert matrix.scale == np.float32(1) / np.float32(1.5)


def test_rows_that_are_no_multiple_of_four(tmp_path):
    model = folder(quantization=OFFLINE)
    wide = codes_of((14, HIDDEN), 9)
    model.config["intermediate_size"] = 14
    model.tensors |= {f"{LAYER}mlp.{name}_proj.weight": ternary.pack_quarters(wide) for name in ("gate", "up")}
    model.tensors[f"{LAYER}mlp.down_proj.weight"] = ternary.pack_quarters(codes_of((HIDDEN, 14)))
    model.tensors[f"{LAYER}mlp.ffn_sub_norm.weight"] = floats_of((14,))
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    assert np.array_equal(codes(checkpoint.matrix("layers.0.up")), wide)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bfloat16"])
def test_unpacked_offline_weights(tmp_path, dtype):
    model, values = folder(quantization=OFFLINE), codes_of(PROJECTIONS["q"][1], 3)
    model.tensors[f"{Q}.weight"] = bfloat16(values) if dtype == "bfloat16" else values.astype(dtype)
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    assert np.array_equal(checkpoint.matrix("layers.0.q").data, values)
    assert checkpoint.matrix("layers.0.q").scale == 1.5


def test_masters_taken_for_unpacked_weights_are_refused(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors[f"{Q}.weight"] = floats_of(PROJECTIONS["q"][1])
    with pytest.raises(FormatError, match='set quantization_mode to "online"'):
        open_checkpoint(model.write(tmp_path)).matrix("layers.0.q")


def test_masters_in_float32_keep_their_scale(tmp_path):
    model = folder(quantization=ONLINE)
    matrix = open_checkpoint(model.write(tmp_path)).matrix("layers.0.q")
    expected, scale = ternary.ternarize(model.tensors[f"{Q}.weight"])
    assert np.array_equal(matrix.data, expected)
    assert matrix.scale == scale


def test_the_scale_of_masters_in_bfloat16_is_rounded_to_it(tmp_path):
    model = folder(quantization=ONLINE)
    _, scale = ternary.ternarize(model.tensors[f"{Q}.weight"])
    model.tensors[f"{Q}.weight"] = bfloat16(model.tensors[f"{Q}.weight"])
    found = open_checkpoint(model.write(tmp_path)).matrix("layers.0.q").scale
    assert found != scale
    assert found == pytest.approx(scale, rel=2**-8)
    assert not np.float32(found).view(np.uint32) & 0xFFFF


def test_masters_that_are_not_finite_are_refused(tmp_path):
    model = folder(quantization=ONLINE)
    model.tensors[f"{Q}.weight"][1, 2] = np.nan
    with pytest.raises(FormatError, match=r"layers\.0\.q: a master weight is NaN"):
        open_checkpoint(model.write(tmp_path)).matrix("layers.0.q")


def test_dense_matrices_are_mapped_as_they_stand(tmp_path):
    model = folder("llama")
    values = floats_of(PROJECTIONS["q"][1], 7)
    model.tensors[f"{Q}.weight"] = bfloat16(values)
    model.tensors[f"{LAYER}mlp.up_proj.weight"] = floats_of(PROJECTIONS["up"][1]).astype(np.float16)
    checkpoint = open_checkpoint(model.write(tmp_path))
    dense = checkpoint.matrix("layers.0.q")
    assert isinstance(dense, Dense)
    assert dense.dtype == "bfloat16"
    assert np.array_equal(dense.data, bfloat16(values))
    assert checkpoint.matrix("layers.0.up").dtype == "float16"
    assert checkpoint.matrix("layers.0.down").dtype == "float32"
    assert not dense.data.flags.owndata


@pytest.mark.parametrize("padding", range(4))
def test_data_on_any_address(tmp_path, padding):
    model = folder("llama")
    checkpoint = open_checkpoint(model.write(tmp_path, padding))
    found = checkpoint.matrix("layers.0.q").data
    assert found.flags.aligned
    assert np.array_equal(found, model.tensors[f"{Q}.weight"])


def test_vectors_are_float32(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors["model.norm.weight"] = bfloat16(floats_of((HIDDEN,), 1))
    vector = open_checkpoint(model.write(tmp_path)).vector("norm")
    assert vector.dtype == np.float32
    assert np.array_equal(vector, floats_of((HIDDEN,), 1))


def test_names_of_nothing_are_key_errors(tmp_path):
    checkpoint = open_checkpoint(folder(quantization=OFFLINE).write(tmp_path))
    with pytest.raises(KeyError):
        checkpoint.matrix("head")
    with pytest.raises(KeyError):
        checkpoint.vector("layers.1.attn_norm")


def test_norms_of_projections(tmp_path):
    model = folder("llama", {**OFFLINE, "use_rms_norm": True, "rms_norm_eps": 1e-3})
    norms = {module: floats_of((shape[1],), 8) for module, shape in PROJECTIONS.values()}
    model.tensors |= {f"{module}.rms_norm.weight": norm for module, norm in norms.items()}
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    assert (checkpoint.config.linear_norm, checkpoint.config.linear_norm_eps) == (True, 1e-3)
    assert np.array_equal(checkpoint.vector("layers.0.down.norm"), norms[PROJECTIONS["down"][0]])


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def with_biases(quantization=None):
    model = folder("llama", quantization)
    model.config |= QWEN2
    for seed, (name, (module, shape)) in enumerate(PROJECTIONS.items()):
        if name in ("q", "k", "v"):
            model.tensors[f"{module}.bias"] = bfloat16(floats_of(shape[:1], 20 + seed))
    return model


@pytest.mark.parametrize("quantization", [None, BITLINEAR, ONLINE])
def test_biases_of_q_k_and_v(tmp_path, quantization):
    checkpoint = open_checkpoint(with_biases(quantization).write(tmp_path))
    assert checkpoint.check() == [] and checkpoint.config.qkv_bias
    for seed, (name, (_, shape)) in enumerate(list(PROJECTIONS.items())[:3]):
        vector = checkpoint.vector(f"layers.0.{name}.bias")
        assert vector.dtype == np.float32 and np.array_equal(vector, floats_of(shape[:1], 20 + seed))
        assert isinstance(checkpoint.matrix(f"layers.0.{name}"), Ternary) == bool(quantization)
    with pytest.raises(KeyError):
        checkpoint.vector("layers.0.o.bias")


def test_what_is_wrong_with_biases(tmp_path):
    model, again = with_biases(), "download the model again"
    model.tensors["model.layers.0.self_attn.o_proj.bias"] = floats_of((HIDDEN,))
    model.tensors[f"{Q}.bias"][1] = 0x7F80  # infinity
    model.tensors[f"{PROJECTIONS['k'][0]}.bias"] = floats_of((HIDDEN,))
    del model.tensors[f"{PROJECTIONS['v'][0]}.bias"]
    found = [line.removeprefix(str(tmp_path)) for line in open_checkpoint(model.write(tmp_path)).check()]
    assert found == [
        f"/model.safetensors: {Q}.bias: a bias is NaN or infinite: {again}",
        f"/model.safetensors: {PROJECTIONS['k'][0]}.bias: F32 (8,) should have the shape (4,): {again}",
        f": {PROJECTIONS['v'][0]}.bias: the tensor is missing: {again}",
        ": config.json has no place for 1 tensors: 'model.layers.0.self_attn.o_proj.bias': use the config.json that "
        "belongs to them",
    ]


def test_a_bias_that_some_programs_multiply_by_the_scale_is_unsupported(tmp_path):
    with pytest.raises(Unsupported, match=r"a bias beside packed weights of .* autobitlinear: use the master"):
        open_checkpoint(with_biases(OFFLINE).write(tmp_path))
    model = with_biases({**OFFLINE, "modules_to_not_convert": ["lm_head", "q_proj", "k_proj", "v_proj"]})
    for name in ("q", "k", "v"):  # the scale of o is not theirs
        module, shape = PROJECTIONS[name]
        model.tensors[f"{module}.weight"] = floats_of(shape)
        del model.tensors[f"{module}.weight_scale"]
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == [] and checkpoint.is_ternary("layers.0.o")


# A head that is tied


def test_a_stored_copy_of_a_tied_head_is_ignored(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors["lm_head.weight"] = model.tensors["model.embed_tokens.weight"]
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    assert checkpoint.config.tie_embeddings
    assert any("lm_head.weight is ignored" in note for note in checkpoint.notes())


@pytest.mark.parametrize("row", [0, 1, VOCAB - 1])
def test_another_head_stored_in_a_tied_model_unties_it_as_in_transformers(tmp_path, row):
    model = folder(quantization=OFFLINE)
    head = model.tensors["model.embed_tokens.weight"].copy()
    head[row] = floats_of((HIDDEN,), 99)
    model.tensors["lm_head.weight"] = head
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert not checkpoint.config.tie_embeddings
    assert np.array_equal(checkpoint.matrix("head").data, head)
    assert any("not tied, although" in note for note in checkpoint.notes())


def test_tables_of_a_billion_empty_rows_take_no_time(tmp_path):
    model = folder(quantization=OFFLINE)
    header = {name: {"dtype": "F32", "shape": [10**9, 0], "data_offsets": [0, 0]} for name in
              ("model.embed_tokens.weight", "lm_head.weight")}  # fmt: skip
    text = json.dumps(header).encode()
    (path := model.write(tmp_path) / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert open_checkpoint(path.parent).check()


def test_tables_that_are_one_number(tmp_path):
    model = folder(quantization=OFFLINE)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name] = np.array(1.0, np.float32)
    problems = open_checkpoint(model.write(tmp_path)).check()
    assert [name in line for name, line in zip(("embed_tokens", "lm_head"), problems, strict=True)] == [True, True]


def test_a_tied_table_may_be_stored_as_the_head(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors["lm_head.weight"] = model.tensors.pop("model.embed_tokens.weight")
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    assert np.array_equal(checkpoint.matrix("embed").data, model.tensors["lm_head.weight"])


# modules_to_not_convert


@pytest.mark.parametrize(
    ("listed", "ternary_names"),
    [
        (None, ["q", "k", "v", "o", "gate", "up", "down"]),
        (["lm_head"], ["q", "k", "v", "o", "gate", "up", "down"]),
        ([], ["q", "k", "v", "o", "gate", "up", "down", "head"]),
        (["lm_head", "model.layers.0.mlp"], ["q", "k", "v", "o"]),
        (["lm_head", "model.layers.0"], []),
        (["lm_head", "model.layers.00"], ["q", "k", "v", "o", "gate", "up", "down"]),
        (["lm_head", "q_proj"], ["k", "v", "o", "gate", "up", "down"]),
        (["lm_head", "model.layers.*.self_attn"], ["gate", "up", "down"]),
        (["lm_head", "model.layers.0.mlp.gate"], ["q", "k", "v", "o", "gate", "up", "down"]),
        (["lm_head", "mlp"], ["q", "k", "v", "o", "gate", "up", "down"]),
    ],
)
def test_which_matrices_are_ternary(tmp_path, listed, ternary_names):
    model = folder("llama", {**OFFLINE, "modules_to_not_convert": listed}, tied=False)
    checkpoint = open_checkpoint(model.write(tmp_path))
    every = [f"layers.0.{name}" for name in PROJECTIONS] + ["head"]
    found = [name.removeprefix("layers.0.") for name in every if checkpoint.is_ternary(name)]
    assert found == ternary_names


def test_a_matrix_that_is_not_converted_is_dense(tmp_path):
    model = folder("llama", {**OFFLINE, "modules_to_not_convert": ["lm_head", "q_proj"]})
    model.tensors[f"{Q}.weight"] = floats_of(PROJECTIONS["q"][1])
    del model.tensors[f"{Q}.weight_scale"]
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    assert isinstance(checkpoint.matrix("layers.0.q"), Dense)
    assert isinstance(checkpoint.matrix("layers.0.k"), Ternary)


def test_a_ternary_head_tied_to_the_embeddings_is_unsupported(tmp_path):
    model = folder("llama", {**OFFLINE, "modules_to_not_convert": []})
    with pytest.raises(Unsupported, match="add lm_head to modules_to_not_convert"):
        open_checkpoint(model.write(tmp_path))


def test_norms_before_some_projections_only_are_unsupported(tmp_path):
    quantization = {**OFFLINE, "use_rms_norm": True, "modules_to_not_convert": ["lm_head", "q_proj"]}
    with pytest.raises(Unsupported, match="use_rms_norm"):
        open_checkpoint(folder("llama", quantization).write(tmp_path))


# check()


def test_everything_wrong_is_named_at_once(tmp_path):
    model = folder(quantization=OFFLINE, tied=False)
    del model.tensors["lm_head.weight"]
    model.tensors["model.layers.0.self_attn.q_proj.bias"] = floats_of((8,))
    model.tensors["model.norm.weight"][3] = np.inf
    model.tensors[f"{LAYER}mlp.up_proj.weight"] = np.zeros((3, HIDDEN + 1), np.uint8)
    model.tensors[f"{LAYER}input_layernorm.weight"] = np.zeros(HIDDEN, np.float64)
    model.tensors[f"{Q}.weight_scale"] = bfloat16([np.inf])
    found = open_checkpoint(model.write(tmp_path)).check()
    for place in (
        "lm_head.weight",
        "q_proj.bias",
        "model.norm",
        "up_proj.weight",
        "input_layernorm",
        "q_proj.weight_scale",
    ):
        assert sum(place in line for line in found) == 1, place
    assert len(found) == 6
    assert not any("\n" in line for line in found)


@pytest.mark.parametrize("value", [0.0, -1.5, np.nan, np.inf])
@pytest.mark.parametrize("quantization", [OFFLINE, BITLINEAR])
def test_impossible_scales(tmp_path, value, quantization):
    model = folder(quantization=quantization)
    model.tensors[f"{Q}.weight_scale"] = np.array([value], np.float32)
    checkpoint = open_checkpoint(model.write(tmp_path))
    (line,) = checkpoint.check()
    assert "q_proj.weight_scale" in line
    with pytest.raises(FormatError, match="is no scale"):
        checkpoint.matrix("layers.0.q")


def test_a_scale_whose_reciprocal_overflows(tmp_path):
    model = folder(quantization=BITLINEAR)
    model.tensors[f"{Q}.weight_scale"] = np.array([1e-40], np.float32)
    assert len(open_checkpoint(model.write(tmp_path)).check()) == 1


@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,)])
def test_a_scale_is_one_number(tmp_path, shape):
    model = folder(quantization=OFFLINE)
    model.tensors[f"{Q}.weight_scale"] = np.ones(shape, np.float32)
    assert ["one float" in line for line in open_checkpoint(model.write(tmp_path)).check()] == [True]


def test_a_missing_scale_suggests_masters(tmp_path):
    model = folder(quantization=OFFLINE)
    del model.tensors[f"{Q}.weight_scale"]
    (line,) = open_checkpoint(model.write(tmp_path)).check()
    assert 'set quantization_mode to "online"' in line


def test_packed_weights_in_an_online_model(tmp_path):
    model = folder(quantization=OFFLINE)
    model.config["quantization_config"] = ONLINE
    found = open_checkpoint(model.write(tmp_path)).check()
    assert sum('set quantization_mode to "offline"' in line for line in found) == 7


def test_packed_weights_without_quantization_config(tmp_path):
    model = folder(quantization=OFFLINE)
    del model.config["quantization_config"]
    assert any("add the quantization_config" in line for line in open_checkpoint(model.write(tmp_path)).check())


def test_a_vocabulary_that_the_table_does_not_have(tmp_path):
    model = folder(quantization=OFFLINE)
    model.config["vocab_size"] = VOCAB + 1
    (line,) = open_checkpoint(model.write(tmp_path)).check()
    assert "model.embed_tokens.weight: F32 (10, 8) should have the shape (11, 8)" in line


def test_old_rotary_tables_are_tolerated(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = floats_of((2,))
    assert open_checkpoint(model.write(tmp_path)).check() == []


def test_many_problems_are_cut_short(tmp_path):
    model = folder(quantization=OFFLINE)
    model.config["num_hidden_layers"] = 512
    found = open_checkpoint(model.write(tmp_path)).check()
    assert len(found) == 101
    assert found[-1].endswith("and more")


def test_an_invalid_code_is_named_when_the_matrix_is_read(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors[f"{Q}.weight"][1, 5] |= 3 << 2
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check() == []
    with pytest.raises(FormatError, match=r"layers\.0\.q: row 3, column 5 holds the 2-bit code 3"):
        checkpoint.matrix("layers.0.q")


def test_a_matrix_that_does_not_fit_is_refused_without_check(tmp_path):
    model = folder(quantization=OFFLINE)
    model.tensors[f"{Q}.weight"] = np.zeros((3, HIDDEN), np.uint8)
    with pytest.raises(FormatError, match="should have the shape"):
        open_checkpoint(model.write(tmp_path)).matrix("layers.0.q")


# Opening


def test_shards(tmp_path):
    model = folder(quantization=OFFLINE)
    sharded(tmp_path, model, 3)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.check() == []
    assert np.array_equal(checkpoint.matrix("embed").data, model.tensors["model.embed_tokens.weight"])
    assert "safetensors files: 3" in checkpoint.notes()[0]


def test_stop_tokens_of_both_files(tmp_path):
    model = folder(quantization=OFFLINE)
    model.config |= {"eos_token_id": 7, "bos_token_id": 1}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7], "temperature": 0.6}')
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.config.eos_ids == (7, 9)
    assert checkpoint.config.bos_id == 1
    assert checkpoint.generation["temperature"] == 0.6


def test_stop_tokens_of_the_generation_config_stand_for_those_of_the_family(tmp_path):
    model = folder(quantization=OFFLINE)
    model.config.pop("eos_token_id", None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert open_checkpoint(model.write(tmp_path)).config.eos_ids == (9,)


def test_remote_code_is_not_run(tmp_path):
    model = folder(quantization=OFFLINE)
    model.config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "modeling.py").write_text("raise SystemExit('run')")
    assert any("auto_map" in note for note in open_checkpoint(model.write(tmp_path)).notes())


@pytest.mark.parametrize(
    ("quantization", "note"),
    [
        (OFFLINE, "multiplies (autobitlinear)"),
        (BITLINEAR, "divides (bitlinear, transformers' default)"),
        (ONLINE, "ternarised at load"),
        (None, "dense weights"),
    ],
)
def test_notes_say_how_weights_are_meant(tmp_path, quantization, note):
    notes = open_checkpoint(folder(quantization=quantization).write(tmp_path)).notes()
    assert sum(note in line for line in notes) == 1


def test_a_large_model_opens_without_being_read(tmp_path):
    """The 2B-4T shape over 1.2 GB of nothing: only its scales and norms are looked at."""
    model = folder(quantization=OFFLINE)
    config = {"hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 30, "num_attention_heads": 20}
    model.config |= {**config, "num_key_value_heads": 5, "vocab_size": 128256}
    header, position = {}, 0
    for name, dtype, shape in _names_of_the_2b_model():
        num_bytes = int(np.prod(shape)) * (1 if dtype == "U8" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + num_bytes]}
        position += num_bytes
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    found = open_checkpoint(tmp_path).check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # reading it all takes 4,800 and more
    assert len(found) == 101
    assert all("weight_scale" in line for line in found[:100])


def _names_of_the_2b_model():
    yield "model.embed_tokens.weight", "BF16", (128256, 2560)
    yield "model.norm.weight", "BF16", (2560,)
    sizes = {"self_attn.q_proj": (640, 2560), "self_attn.k_proj": (160, 2560), "self_attn.v_proj": (160, 2560)}
    sizes |= {"self_attn.o_proj": (640, 2560), "mlp.gate_proj": (1728, 2560), "mlp.up_proj": (1728, 2560)}
    sizes |= {"mlp.down_proj": (640, 6912)}
    for layer in range(30):
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.attn_sub_norm"):
            yield f"model.layers.{layer}.{name}.weight", "BF16", (2560,)
        yield f"model.layers.{layer}.mlp.ffn_sub_norm.weight", "BF16", (6912,)
        for name, shape in sizes.items():
            yield f"model.layers.{layer}.{name}.weight", "U8", shape
            yield f"model.layers.{layer}.{name}.weight_scale", "BF16", (1,)

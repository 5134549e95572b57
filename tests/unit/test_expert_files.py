"""Models with several MLPs a layer: what their files say, and what they compute. Maple's files are expert_samples'."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import expert_samples
import numpy as np
import pytest
from expert_samples import EXPERTS, IDS, VOCAB, tensors, write_file, write_folder
from mlx_samples import affine_parts
from tiny_folders import bfloat16, safetensors_bytes

from bitnet_inference import LLM, convert
from bitnet_inference.backends.reference import chosen_experts
from bitnet_inference.bench import num_multiply_adds
from bitnet_inference.errors import FormatError, InvalidParams, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Experts, LocalLayers, RopeScaling, Ternary
from bitnet_inference.formats.experts import refuse_norms_of_experts
from bitnet_inference.formats.packed_config import read_config, write_config
from bitnet_inference.formats.safetensors_files import open_tensors, read_container
from bitnet_inference.summary import summarize
from bitnet_inference.ternary import unpack

GOLDEN = Path(__file__).parent.parent / "golden" / "experts"
MOE = GOLDEN / "qwen3moe-of-best"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("maple"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("maple") / "model.gguf")


def logits(path: Path, ids: list[int] = IDS, device: str = "cpu") -> np.ndarray:
    with LLM.load(path, device=device, threads=1, cache_dtype="float32") as llm:
        return llm.logits(ids)


def values(matrix: object) -> np.ndarray:
    assert isinstance(matrix, Ternary) and np.ndim(matrix.scale) == 1
    return unpack(np.ascontiguousarray(matrix.data), matrix.layout, matrix.shape) * np.reshape(matrix.scale, (-1, 1))


def test_what_a_folder_says(folder):
    config = open_checkpoint(folder).config
    assert config.experts == Experts(count=EXPERTS, used=3, renormalized=True)
    assert (config.intermediate_size, config.activation, config.rotary_dim) == (256, "silu7", 32)
    # FlashAttention's window of 8 beside the token's own position, as the model's own code has it.
    assert config.local == LocalLayers(layers=(0, 1, 2), window=9, rope_theta=10000.0)
    assert config.plain_global


def test_what_a_file_says(file):
    config = open_checkpoint(file).config
    assert config.experts == Experts(count=EXPERTS, used=3, renormalized=True)
    assert config.local == LocalLayers(layers=(0, 1, 2), window=8, rope_theta=10000.0)  # as llama.cpp counts
    assert (config.activation, config.rotary_dim, config.plain_global) == ("silu7", 32, True)


def test_what_is_told_of_a_file(file):
    lines = dict(summarize(file).groups["model"])
    assert lines["layers"] == "4 of hidden size 256, inner size 256, 8 experts each, 3 for a token"
    assert lines["attention"].endswith("3 layers see 8 tokens (rope base 10000 for 32 features of a head)")
    assert lines["context"] == "256 tokens, no rotations in layers that see all of it"


@pytest.mark.parametrize("name", ["layers.3.k", "layers.0.experts.7.gate", "layers.2.experts.3.down"])
def test_every_row_has_its_own_scale(folder, file, name):
    of_folder, of_file = (open_checkpoint(path) for path in (folder, file))
    assert of_folder.check() == of_file.check() == []
    layer, *rest = name.split(".")[1:]
    part = f"mlp.experts.{rest[1]}.{rest[2]}_proj" if len(rest) == 3 else f"self_attn.{rest[0]}_proj"
    expected = tensors()[f"model.layers.{layer}.{part}.weight"]
    assert of_file.group_size(name) == of_folder.group_size(name) == 0
    np.testing.assert_array_equal(values(of_folder.matrix(name)), expected)
    np.testing.assert_array_equal(values(of_file.matrix(name)), expected)


def write_mlx_folder(folder: Path) -> Path:
    """As DeepGrove's mlx_lm writes it: experts in stacks, a scale for each row, embeddings and head in 4 bits."""
    parts: dict[str, np.ndarray] = {"lm_head_flash.token_map": np.zeros((2, 2), np.uint32)}  # of its approximate head
    stacks: dict[str, list[np.ndarray]] = {}
    for name, weights in tensors().items():
        module = name.removesuffix(".weight")
        if "_proj" in module:
            fours = (np.sign(weights).astype(np.int8) + 1).reshape(len(weights), -1, 4).astype(np.uint8)
            packed = (fours << np.uint8([0, 2, 4, 6])).sum(axis=2, dtype=np.uint8).view(np.uint32)
            stacked = re.sub(r"experts\.\d+", "switch_mlp", module)
            for kind, part in (("weight", packed), ("row_alpha", bfloat16(np.abs(weights).max(axis=1)))):
                stacks.setdefault(f"{stacked}.{kind}", []).append(part)
        elif module in ("lm_head", "model.word_embeddings"):
            found, _ = affine_parts(weights, 4, 64)
            parts |= {f"{module}.{kind}": part for kind, part in found.items()}
        else:
            parts[name] = bfloat16(weights)
    parts |= {name: np.stack(each) if "switch_mlp" in name else each[0] for name, each in stacks.items()}
    write_folder(folder, quantization={"group_size": 128, "bits": 2, "mode": "affine"})
    (folder / "model.safetensors").write_bytes(safetensors_bytes(parts))
    return folder


def test_folders_of_mlx_have_the_same_projections(folder, tmp_path):
    checkpoint = open_checkpoint(write_mlx_folder(tmp_path / "mlx"))
    assert checkpoint.check() == []
    for name in ("layers.1.v", "layers.3.experts.6.down"):
        np.testing.assert_array_equal(values(checkpoint.matrix(name)), values(open_checkpoint(folder).matrix(name)))
    assert np.isfinite(logits(tmp_path / "mlx")).all()


def test_a_folder_of_mlx_without_the_scale_of_a_row_is_named(tmp_path):
    path = write_mlx_folder(tmp_path / "mlx")
    parts = {name: tensor.array() for name, tensor in open_tensors(path).tensors.items()}
    parts["model.layers.2.mlp.switch_mlp.up_proj.row_alpha"] = np.zeros((EXPERTS, 255), np.uint16)
    (path / "model.safetensors").write_bytes(safetensors_bytes(parts))
    with pytest.raises(FormatError, match=r"layers\.2\.mlp\.experts\.0\.up_proj.* is no scale for each row"):
        logits(path)


def test_experts_with_one_scale_and_with_many_take_a_step_together(tmp_path):
    path = write_folder(tmp_path / "model", quantization={"group_size": 64, "bits": 2, "mode": "affine"})
    parts = {name: tensor.array() for name, tensor in open_tensors(path).tensors.items()}
    for expert in range(EXPERTS):
        module = f"model.layers.0.mlp.experts.{expert}.gate_proj"
        weights, scales = tensors()[f"{module}.weight"], (0.5,) if expert == 1 else (0.25, 0.5)
        found, _ = affine_parts(weights, 2, 64, ternary=True, scales=scales)
        parts |= {f"{module}.{kind}": part for kind, part in found.items()}
    (path / "model.safetensors").write_bytes(safetensors_bytes(parts))
    sizes = [open_checkpoint(path).group_size(f"layers.0.experts.{expert}.gate") for expert in range(3)]
    assert sizes == [64, 0, 64]
    np.testing.assert_allclose(logits(path), logits(path, device="reference"), rtol=1e-4, atol=1e-4)


def test_folders_and_files_give_the_same_bits_within_a_window(folder, file):
    np.testing.assert_array_equal(logits(folder, IDS[:8]), logits(file, IDS[:8]))
    assert not np.array_equal(logits(folder, IDS[:9])[8], logits(file, IDS[:9])[8])  # which has another one


def test_experts_may_stand_alone_as_in_older_files(file, tmp_path):
    np.testing.assert_array_equal(logits(write_file(tmp_path / "old.gguf", stacked=False)), logits(file))


def test_a_single_expert_stands_in_stacks_too(tmp_path, monkeypatch):
    monkeypatch.setattr(expert_samples, "EXPERTS", 1)
    path = write_file(tmp_path / "model.gguf", expert_count=1, expert_used_count=1)
    folder = write_folder(tmp_path / "model", num_experts=1, num_experts_per_tok=1)
    np.testing.assert_array_equal(logits(path, IDS[:8]), logits(folder, IDS[:8]))


def test_logits_are_those_of_llama_cpp(tmp_path):
    """golden/experts/maple.npy: what llama-cpp-python 0.3.36 computes from the same file in float32, behind a window
    of 8 too (tests/peers/test_experts.py compares anew)."""
    expected = np.load(GOLDEN / "maple.npy")
    path = write_file(tmp_path / "model.gguf", "f32")
    for device in ("reference", "cpu"):
        assert np.abs(logits(path, device=device) - expected).max() < 1e-4


def test_tokens_of_a_layer_without_rotations_have_no_order(tmp_path):
    """It sees what was before, and not where."""
    weights = {name: values for name, values in tensors().items() if not re.search(r"layers\.[123]\.", name)}
    changes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    path = write_folder(tmp_path / "model", weights, **changes)
    first, other = (logits(path, ids)[-1] for ids in (IDS, [*IDS[5::-1], *IDS[6:]]))
    assert np.abs(first - other).max() < 1e-5
    turned = write_folder(tmp_path / "turned", weights, **changes, nope_on_global_attention=False)
    assert np.abs(logits(turned, IDS)[-1] - first).max() > 0.01


def test_of_equal_scores_the_lower_number_is_better():
    best, shares = chosen_experts(np.float32([[1, 3, 3, 0, 3]]), Experts(count=5, used=2))
    assert best.tolist() == [[1, 2]] and shares.tolist() == [[0.5, 0.5]]


def test_shares_of_all_scores_do_not_add_up_to_one():
    _, shares = chosen_experts(np.zeros((1, 4), np.float32), Experts(count=4, used=2, renormalized=False))
    assert shares.tolist() == [[0.25, 0.25]]


def test_a_token_multiplies_with_the_experts_that_it_goes_through(file):
    config = open_checkpoint(file).config
    every, last = num_multiply_adds(config)
    head, mlp, keys = VOCAB * 256, 3 * 3 * 256 * 256 + EXPERTS * 256, 2 * 128 * 256
    assert last - head == 256 * 256 + mlp  # o, and three experts with the router, of the last layer
    assert every + last - head == 4 * (2 * 256 * 256 + keys + mlp)


def test_a_row_with_other_weights_is_named(tmp_path):
    weights = tensors()
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][5, :2] = 1.0, 0.5
    path = write_folder(tmp_path / "model", weights)
    with pytest.raises(FormatError, match=r"layers\.1\.experts\.2\.up: a row has other weights than -m, 0 and m"):
        logits(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: .* from 1 to 8"),
        ({"num_experts": 1 << 15}, "num_experts: .* from 1 to 4096"),
        ({"num_shared_experts": 1}, "num_shared_experts: layers with other MLPs than routed experts"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace: layers with other MLPs"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: layers with other MLPs"),
        ({"moe_router_enable_expert_bias": True}, "a router with biases"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"partial_rotary_factor": 0.49}, "partial_rotary_factor: .* rotates 31 of 64 features"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: .* of 4 layers"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "scaled rotations of this family"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_a_folder_cannot_be_is_said(tmp_path, changes, message):
    path = write_folder(tmp_path / "model", {"a": np.zeros(1, np.float32)}, **changes)
    with pytest.raises((FormatError, Unsupported), match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_used_count": 9}, "expert_used_count: .* from 1 to 8"),
        ({"expert_count": 0}, "expert_count: .* from 1 to"),
        ({"expert_shared_count": 1}, "expert_shared_count: layers with other MLPs"),
        ({"expert_gating_func": 2}, "expert_gating_func: only the softmax"),
        ({"swiglu_clamp_exp": [7.0, 7.0, 7.0, 5.0]}, "swiglu_clamp_exp is not 7"),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern: .* list of 4 flags"),
        ({"rope.dimension_count": 33}, "rope.dimension_count is not 64"),
        ({"expert_count": 7}, "ffn_gate_exps.* not that of 7 matrices"),
    ],
)
def test_what_a_file_cannot_be_is_said(tmp_path, changes, message):
    with pytest.raises((FormatError, Unsupported), match=message):
        logits(write_file(tmp_path / "model.gguf", **changes))


@pytest.mark.parametrize("norms", ["linear_norm", "sub_norms"])
def test_experts_with_norms_of_their_own_are_refused(folder, norms):
    config = replace(open_checkpoint(folder).config, **{norms: True})
    with pytest.raises(Unsupported, match="norms before the projections of experts"):
        refuse_norms_of_experts(folder, config)


def test_rotary_factors_are_as_many_as_turn(folder):
    scaling = RopeScaling(kind="factors", factor=2.0, factors=(2.0,) * 32)  # for 64 features, of which 32 turn
    config = replace(open_checkpoint(folder).config, rope_scaling=scaling)
    with pytest.raises(FormatError, match=r"factors: .* is not a list of 16 numbers"):
        read_config(write_config(config), folder)


@pytest.mark.parametrize(("key", "value"), [("mlp_only_layers", [0]), ("use_sliding_window", True)])
def test_other_layers_of_qwen_are_refused(tmp_path, key, value):
    path = shutil.copytree(MOE, tmp_path / "model")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(
        text.replace("{", f'{{"{key}": {str(value).lower()},', 1)
        .replace(f'"{key}": [],', "")
        .replace(f'"{key}": false,', "")
    )
    with pytest.raises(Unsupported, match=key):
        open_checkpoint(path)


@pytest.mark.parametrize("options", [{"device": "mlx"}, {"device": "cuda"}, {"gpu_layers": 2}])
def test_devices_without_experts_are_refused(options):
    with pytest.raises(InvalidParams, match='has experts, which "cpu" and "reference" compute: leave it out'):
        LLM.load(MOE, **options)


def test_other_files_than_packed_ones_are_not_written(tmp_path):
    for name in ("model.gguf", "model.onnx"):
        with pytest.raises(Unsupported, match="has experts, for which only packed files are written"):
            convert(MOE, tmp_path / name)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("source", ["folder", "file", "dense"])
def test_packed_they_are_the_same(tmp_path, request, source, compressed):
    original = MOE if source == "dense" else request.getfixturevalue(source)
    packed = tmp_path / "model.safetensors"
    convert(original, packed, compressed=compressed)
    checkpoint = open_checkpoint(packed)
    assert checkpoint.check() == list(checkpoint.verify()) == []
    assert checkpoint.config == open_checkpoint(original).config
    np.testing.assert_array_equal(logits(packed), logits(original))


def test_packed_they_stand_in_stacks(tmp_path, folder):
    convert(folder, tmp_path / "model.safetensors")
    stored = read_container(tmp_path / "model.safetensors").tensors
    assert stored["layers.0.experts.down.u2"].shape == (EXPERTS, 8, 16, 128)
    assert stored["layers.0.experts.down.scale"].shape == (EXPERTS, 256)  # of each row


def test_packed_beside_others_one_scale_is_that_of_each_row(tmp_path):
    weights, name = tensors(), "layers.1.experts.2.up"
    theirs = "model.layers.1.mlp.experts.2.up_proj.weight"
    weights[theirs] = np.sign(weights[theirs]) / 8
    original = write_file(tmp_path / "model.gguf", weights=weights)
    assert open_checkpoint(original).matrix(name).scale == 0.125
    convert(original, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "model.safetensors").matrix(name).scale, [0.125] * 256)
    np.testing.assert_array_equal(logits(tmp_path / "model.safetensors"), logits(original))


def test_a_packed_stack_of_other_experts(tmp_path):
    path = tmp_path / "model.safetensors"
    convert(MOE, path)
    path.write_bytes(path.read_bytes().replace(b'"count\\": 8', b'"count\\": 7', 1))
    with pytest.raises(FormatError, match=r"layers.0.experts.gate: is no stack of 7 experts: convert the model again"):
        open_checkpoint(path)


def test_a_packed_expert_in_a_stack_and_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    convert(MOE, path)
    name, other = b'"layers.1.mlp_norm":', b'"layers.0.experts.1.up":'
    room = b" " * (len(other) - len(name))
    content = path.read_bytes().replace(name, other, 1)
    path.write_bytes(content.replace(b"}" + room, b"}", 1))
    with pytest.raises(FormatError, match=r"layers.0.experts.1.up: stands in a stack of all experts too"):
        open_checkpoint(path)

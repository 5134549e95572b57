"""MiniCPM and Granite: what they multiply besides their weights, from folders and GGUF files, and longrope.

What the models compute is compared with Transformers in tests/backends/test_golden.py.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_samples import write_model

from bitnet_inference import LLM, convert
from bitnet_inference.errors import FormatError, ModelError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, RopeScaling
from bitnet_inference.formats.hf_config_writer import config_json
from bitnet_inference.formats.multipliers import Multipliers
from bitnet_inference.formats.safetensors_files import open_tensors

GOLDEN = Path(__file__).parent.parent / "golden"
MINICPM, GRANITE = GOLDEN / "minicpm-f32", GOLDEN / "granite-bf16"
RESIDUAL = 1.4 / math.sqrt(2)
KEYS = {"embedding_scale": 12.0, "residual_scale": RESIDUAL, "logit_scale": 4.0}
SHORT = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": SHORT}
IDS = list(range(3, 60))


def changed(tmp_path: Path, **changes: Any) -> Path:
    """The folder of MiniCPM with other values in its config.json."""
    folder = shutil.copytree(MINICPM, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(path: Path) -> np.ndarray:
    with LLM.load(path, device="cpu", threads=1, cache_dtype="float32") as llm:
        return llm.logits(IDS)


def in_pairs(checkpoint: Checkpoint, name: str) -> Dense:
    """A matrix with its rows as GGUF files of such models have them: features 2j and 2j + 1 of a head are turned."""
    matrix, half = checkpoint.matrix(name), checkpoint.config.head_dim // 2
    assert isinstance(matrix, Dense)
    heads = matrix.data.reshape(-1, 2, half, matrix.data.shape[1])
    return replace(matrix, data=np.ascontiguousarray(heads.swapaxes(1, 2).reshape(matrix.data.shape)))


def write_gguf(tmp_path: Path, arch: str = "minicpm", table: str = "F32", **keys: Any) -> Path:
    """The model as converters write it: weights as they are, multipliers in keys, longrope in tensors."""
    plain = changed(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama")
    checkpoint = open_checkpoint(plain)
    change = {
        name: in_pairs(checkpoint, name) for layer in (0, 1) for name in (f"layers.{layer}.q", f"layers.{layer}.k")
    }
    extra = {f"rope_factors_{kind}.weight": np.array(SHORT, np.float32) for kind in ("short", "long")}
    keys = {"rope__scaling__type": "longrope"} | keys
    write_model(tmp_path / "m.gguf", plain, arch, table, table, change=change, extra=extra, **keys)
    shutil.rmtree(plain)
    return tmp_path / "m.gguf"


def test_multipliers_go_into_embeddings_norms_and_their_epsilon():
    checkpoint, stored = open_checkpoint(MINICPM), open_tensors(MINICPM).tensors
    config = checkpoint.config
    assert config.family == "minicpm" and checkpoint.check() == []
    assert config.embed_scale == pytest.approx(12 / RESIDUAL, rel=1e-7)
    assert config.norm_eps == pytest.approx(1e-6 / RESIDUAL**2, rel=1e-7)
    for name, module, factor in (
        ("norm", "model.norm", 0.25),
        ("layers.1.mlp_norm", "model.layers.1.post_attention_layernorm", 1),
    ):
        assert np.array_equal(checkpoint.vector(name), stored[f"{module}.weight"].array() * np.float32(factor))


def test_granite_says_them_otherwise_and_multiplies_scores():
    config = open_checkpoint(GRANITE).config
    assert (config.family, config.attention_scale) == ("granite", 0.125)
    assert config.embed_scale == pytest.approx(12 / 0.22, rel=1e-7)


def test_what_a_silent_config_means(tmp_path):
    silent = dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base", "rope_scaling", "tie_word_embeddings"))
    folder = changed(tmp_path, **silent)
    config = open_checkpoint(folder).config
    assert config.embed_scale == pytest.approx(math.sqrt(2), rel=1e-7)
    assert config.rope_scaling is None
    vector = open_tensors(folder).tensors["model.norm.weight"].array()
    assert np.array_equal(open_checkpoint(folder).vector("norm"), vector * np.float32(1 / 64))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"scale_emb": 0}, FormatError, "scale_emb"),
        ({"scale_depth": -1.4}, FormatError, "scale_depth"),
        ({"dim_model_base": "256"}, FormatError, "dim_model_base"),
        ({"scale_emb": 1e30}, FormatError, "the multiplier of embed is 1e.30"),
        ({"scale_depth": 1e-9}, FormatError, "the multiplier of residual"),
        ({"dim_model_base": 1e-30}, FormatError, "the multiplier of logits is 6.4e"),
        ({"sparse_config": {"kernel_size": 32}}, Unsupported, "sparse_config"),
        ({"num_experts": 8}, Unsupported, "num_experts: experts are not supported: use another model"),
        ({"rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}}, Unsupported, "longrope turns keys"),
        (  # a factor says what cosine and sine are multiplied by, not how long texts are
            {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 64, "factor": 1.0}},
            Unsupported,
            "longrope turns keys",
        ),
        ({"rope_scaling": LONGROPE | {"attention_factor": 1e30}}, FormatError, "scores are multiplied by 2.5e"),
        ({"scale_depth": 1e6, "rms_norm_eps": 1e-36}, FormatError, "the epsilon of norms is 2e-48"),
        ({"scale_depth": 1e-5, "rms_norm_eps": 1e36}, FormatError, "the epsilon of norms is 2e.46"),
        ({"rope_scaling": LONGROPE | {"short_factor": SHORT[1:]}}, FormatError, "short_factor"),
        ({"rope_scaling": LONGROPE | {"short_factor": 2.0}}, FormatError, "short_factor"),
        ({"rope_scaling": LONGROPE | {"short_factor": [0.0, *SHORT[1:]]}}, FormatError, "short_factor.0"),
    ],
)
def test_what_is_wrong_or_not_done(tmp_path, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(changed(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_has_the_short_factors_where_no_text_can_be_long(tmp_path, kind):
    scaling = {"type": kind, "short_factor": SHORT, "long_factor": [9.0] * 8}
    config = open_checkpoint(changed(tmp_path, rope_scaling=scaling | {"attention_factor": 1.5})).config
    assert config.rope_scaling == RopeScaling(
        kind="factors", factor=float(np.float32(3.8)), factors=tuple(map(float, np.float32(SHORT)))
    )
    assert config.attention_scale == pytest.approx(1.5**2 / 4, rel=1e-7)


def test_a_gguf_file_gives_the_same_bits_as_the_folder(tmp_path):
    path = write_gguf(tmp_path, **KEYS)
    checkpoint = open_checkpoint(path)
    assert checkpoint.check() == [] and checkpoint.config.family == "minicpm"
    assert logits(path).tobytes() == logits(MINICPM).tobytes()


def test_a_gguf_file_without_keys_has_the_multipliers_of_minicpm_2b(tmp_path):
    path = write_gguf(tmp_path, residual_scale=0.0)  # which says nothing either
    assert open_checkpoint(path).config.embed_scale == pytest.approx(12 / RESIDUAL, rel=1e-7)
    ours, theirs = logits(path), logits(MINICPM)  # 256 / 64 and 16 / 64
    assert np.allclose(ours, theirs * 16, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"embedding_scale": -1.0}, "embedding_scale"),
        ({"logit_scale": float("nan")}, "logit_scale"),
        ({"residual_scale": 1e-9}, "the multiplier of residual"),
        ({"rope__scaling__original_context_length": 64}, "longrope turns keys"),
        ({"rope__scaling__attn_factor": 1.2}, "attn_factor"),
        ({"rope__scaling__factor": 4.0}, "rope.scaling.factor beside longrope"),
        ({"rope__scale_linear": 4.0}, "rope.scaling.factor beside longrope"),
    ],
)
def test_what_is_wrong_or_not_done_in_a_gguf_file(tmp_path, keys, message):
    path = write_gguf(tmp_path, **keys)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_a_norm_that_becomes_infinite_is_no_warning():
    assert np.isinf(Multipliers(logits=2e-6).vector("norm", np.full(2, 1e38, np.float32))).all()


def test_granite_without_rotations_is_refused(tmp_path):
    """As llama.cpp computes files that say so; other architectures rotate all the same."""
    with pytest.raises(Unsupported, match=r"rope\.scaling\.finetuned is false"):
        open_checkpoint(write_gguf(tmp_path, "granite", rope__scaling__finetuned=False, **KEYS))
    assert open_checkpoint(write_gguf(tmp_path, rope__scaling__finetuned=False, **KEYS)).check() == []


def test_factors_of_longrope_have_no_place_in_a_file_of_another_scaling(tmp_path):
    path = write_gguf(tmp_path, rope__scaling__type="linear")
    assert any("rope_factors_" in problem for problem in open_checkpoint(path).check())


def test_what_is_converted_is_granite_and_gives_the_same_bits_again(tmp_path):
    first = write_gguf(tmp_path, table="F16", **KEYS)
    second = convert(first, tmp_path / "2.gguf", "f16").path
    third = convert(second, tmp_path / "3.gguf", "f16").path
    for path in (second, third):
        checkpoint = open_checkpoint(path)
        assert checkpoint.check() == []
        assert checkpoint.metadata["general.architecture"] == "granite"
        assert not any(key.startswith("minicpm.") for key in checkpoint.metadata)
        assert logits(path).tobytes() == logits(first).tobytes()


@pytest.mark.parametrize("folder", [MINICPM, GRANITE])
def test_packed_files_give_the_same_bits(tmp_path, folder):
    path = convert(folder, tmp_path / "p.safetensors").path
    assert logits(path).tobytes() == logits(folder).tobytes()


def test_a_config_for_other_programs_is_that_of_granite():
    said = config_json(open_checkpoint(MINICPM).config)
    assert (said["architectures"], said["attention_multiplier"]) == (["GraniteForCausalLM"], 0.25)
    assert said["embedding_multiplier"] == pytest.approx(12 / RESIDUAL, rel=1e-7)

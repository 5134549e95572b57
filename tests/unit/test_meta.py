"""Meta's checkpoints: the same model as Hugging Face's folder of it, and that everything wrong with them is named."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meta_samples import (
    PARAMS,
    SIZES,
    cut,
    headers,
    hf_folder,
    meta_tensors,
    random_weights,
    read_or_refused,
    torch_bytes,
    write_meta,
    write_ranks,
)

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import FormatError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import RopeScaling, expected_shapes
from bitnet_inference.formats.meta import MetaCheckpoint
from bitnet_inference.llm import LLM
from bitnet_inference.summary import plan_of, summarize
from bitnet_inference.text.tokenizer import Tokenizer

VOCAB = SIZES.vocab


def shards(num_shards=1, embed_axis=0, dtype="bfloat16"):
    return cut(meta_tensors(random_weights(dtype)), num_shards, embed_axis)


def opened(path, parts=None, **params):
    return open_checkpoint(write_meta(path, shards() if parts is None else parts, PARAMS | params))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("num_shards", "embed_axis"), [(1, 0), (2, 0), (2, 1)])
def test_the_same_weights_as_a_hugging_face_folder(tmp_path, dtype, num_shards, embed_axis):
    meta = opened(tmp_path, shards(num_shards, embed_axis, dtype))
    (tmp_path / "hf").mkdir()
    other = open_checkpoint(hf_folder(random_weights(dtype)).write(tmp_path / "hf"))
    assert isinstance(meta, MetaCheckpoint)
    assert meta.check() == []
    assert meta.num_parameters == other.num_parameters
    assert dict(expected_shapes(meta.config)) == dict(expected_shapes(other.config))
    for name, shape in expected_shapes(meta.config):
        if len(shape) == 1:
            assert np.array_equal(meta.vector(name), other.vector(name))
            continue
        ours, theirs = meta.matrix(name), other.matrix(name)
        assert ours.dtype == theirs.dtype
        assert ours.data.flags.c_contiguous
        assert np.array_equal(ours.data, theirs.data), name
        meta.release(name)
        assert np.array_equal(meta.matrix(name).data, theirs.data) and meta.dtype(name) == theirs.dtype


@pytest.mark.parametrize(("num_shards", "scaled"), [(1, False), (2, True)])
def test_the_same_logits_and_text(tmp_path, num_shards, scaled):
    meta = write_ranks(write_meta(tmp_path / "meta", shards(num_shards), PARAMS | {"use_scaled_rope": scaled}))
    (tmp_path / "hf").mkdir()
    other = hf_folder(random_weights(), scaled).write(tmp_path / "hf")
    words = Tokenizer.from_folder(meta)
    (other / "tokenizer.json").write_text(words.to_json())
    (other / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin_of_text|>"}))
    params, texts = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), []
    with (
        LLM.load(meta, threads=1, max_cache_tokens=512) as ours,
        LLM.load(other, threads=1, max_cache_tokens=512) as theirs,
    ):
        ids = ours.tokenizer.encode("hello the and 123")
        assert ids == theirs.tokenizer.encode("hello the and 123")
        assert np.array_equal(ours.logits(ids), theirs.logits(ids))
        texts = [llm.generate("hello", params) for llm in (ours, theirs)]
        assert ours.chat([{"role": "user", "content": "hello"}], params).usage.num_output_tokens == 16
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[0].text == texts[1].text


def test_params(tmp_path):
    config = opened(tmp_path, model_parallel_size=1, max_seq_len=512).config
    assert (config.intermediate_size, config.head_dim, config.norm_eps, config.rope_theta) == (192, 16, 1e-5, 500000.0)
    assert (config.activation, config.tie_embeddings, config.max_positions) == ("silu", False, 8192)
    assert config.rope_scaling is None


def test_llama_31_scales_its_rope(tmp_path):
    checkpoint = opened(tmp_path, use_scaled_rope=True)
    scaling = RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    assert checkpoint.config.rope_scaling == scaling
    assert checkpoint.config.max_positions == 131072


@pytest.mark.parametrize(
    ("params", "factor"),
    [
        ({"dim": 2048, "n_layers": 16}, 32.0),
        ({"dim": 3072, "n_layers": 28}, 32.0),
        ({"dim": 4096, "n_layers": 32}, 8.0),
        ({"dim": 2048, "n_layers": 16, "rope_scaling_factor": 8.0}, 8.0),
    ],
)
def test_llama_32_was_trained_with_another_factor(tmp_path, params, factor):
    """Its small models; params.json does not say so, and Meta's own code of that time had 8 for all."""
    checkpoint = opened(tmp_path, use_scaled_rope=True, **params)
    assert checkpoint.config.rope_scaling.factor == factor
    assert f"scaled by {factor:g} from 8192 positions" in " ".join(checkpoint.notes())


def test_without_output_weight_the_head_is_tied(tmp_path):
    parts = shards(2)
    for part in parts:
        del part["output.weight"]
    checkpoint = opened(tmp_path, parts)
    assert checkpoint.config.tie_embeddings and checkpoint.check() == []
    assert "the head is tied to the embeddings" in " ".join(checkpoint.notes())
    parts[0]["output.weight"] = shards(2)[0]["output.weight"]
    assert any("output.weight" in line for line in problems(tmp_path, parts))


@pytest.mark.parametrize(
    ("dim", "multiplier", "multiple", "inner"),
    [(4096, 1.3, 1024, 14336), (8192, 1.3, 4096, 28672), (16384, 1.2, 4096, 53248), (4096, None, 256, 11008)],
)
def test_the_sizes_of_published_models(tmp_path, dim, multiplier, multiple, inner):
    params = {"dim": dim, "ffn_dim_multiplier": multiplier, "multiple_of": multiple, "n_heads": dim // 128}
    assert opened(tmp_path, n_kv_heads=None, **params).config.intermediate_size == inner


@pytest.mark.parametrize("given", [-1, None])
@pytest.mark.parametrize(("num_shards", "embed_axis"), [(1, 0), (2, 0), (2, 1)])
def test_a_vocabulary_that_the_embeddings_tell(tmp_path, given, num_shards, embed_axis):
    checkpoint = opened(tmp_path, shards(num_shards, embed_axis), vocab_size=given)
    assert checkpoint.config.vocab_size == VOCAB
    assert checkpoint.check() == []


def test_what_params_leave_out(tmp_path):
    params = {key: PARAMS[key] for key in ("dim", "n_layers", "n_heads")}
    config = open_checkpoint(write_meta(tmp_path, shards(), params)).config
    assert (config.num_kv_heads, config.norm_eps, config.rope_theta) == (config.num_heads, 1e-5, 500000.0)
    assert config.intermediate_size == 256  # 170 rounded up to a multiple of 256


@pytest.mark.parametrize(
    ("said", "expected"), [({"rope_theta": None}, (10000.0, 4096)), ({"rope_theta": 1e6}, (1e6, 16384))]
)
def test_llama_2_with_more_words_is_told_by_its_pieces(tmp_path, said, expected):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b\n\x05<unk>")
    checkpoint = opened(tmp_path, **said)
    assert (checkpoint.config.rope_theta, checkpoint.config.max_positions) == expected
    assert not any("list of ranks" in note for note in checkpoint.notes())


def test_llama_2_has_no_rope_theta(tmp_path):
    tensors = {"tok_embeddings.weight": np.zeros((32000, 1), np.uint16)}
    params = {"dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 32000}
    config = open_checkpoint(write_meta(tmp_path, [tensors], params)).config
    assert (config.rope_theta, config.max_positions) == (10000.0, 4096)


def test_notes(tmp_path):
    parts = shards()
    parts[0]["rope.freqs"] = np.zeros(8, np.float32)
    checkpoint = opened(tmp_path, parts, use_scaled_rope=True, rope_theta=None, more=1)
    assert checkpoint.check() == []
    notes = "\n".join(checkpoint.notes())
    for part in (
        "shards: 1",
        "131072 positions",
        "scaled by 8",
        "rope_theta is missing",
        "named as in Llama 3.1",
        "rope.freqs is ignored",
        "'more'",
    ):
        assert part in notes


def test_inspect_and_plan(tmp_path):
    summary = summarize(write_ranks(write_meta(tmp_path, shards(2))))
    assert summary.problems == []
    assert ("chat template", "default") in summary.groups["words"]
    assert "fused: " in plan_of(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dim", 0), ("dim", 66), ("dim", 1 << 40), ("dim", "64"), ("dim", None), ("n_layers", 0), ("n_layers", 10**6),
        ("n_heads", 0), ("n_heads", True), ("n_kv_heads", 3), ("n_kv_heads", -1), ("norm_eps", math.nan),
        ("norm_eps", -1e-5), ("norm_eps", "1e-5"), ("rope_theta", math.inf), ("rope_theta", 0), ("vocab_size", -2),
        ("vocab_size", 1 << 40), ("vocab_size", 1.5), ("multiple_of", 0), ("multiple_of", 1 << 60),
        ("ffn_dim_multiplier", math.nan), ("ffn_dim_multiplier", 1e30), ("ffn_dim_multiplier", 1e-30),
        ("use_scaled_rope", 1),
    ],
)  # fmt: skip
def test_impossible_params(tmp_path, key, value):
    with pytest.raises(FormatError, match=rf"params.json: {key}") as caught:
        opened(tmp_path, **{key: value})
    assert "\n" not in str(caught.value)


# What is wrong with the tensors


SOUND = torch_bytes(shards()[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.sampled_from(headers(SOUND)), st.binary(max_size=4), st.integers(0, 4))
def test_any_change_of_a_shard_is_read_or_refused(tmp_path, start, insert, removed):
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    (tmp_path / "consolidated.00.pth").write_bytes(SOUND[:start] + insert + SOUND[start + removed :])
    read_or_refused(tmp_path)


def problems(path, parts, **params):
    checkpoint = opened(path, parts, **params)
    found = checkpoint.check()
    assert all("\n" not in line and line.isascii() for line in found)
    return found


def test_everything_wrong_is_named_at_once(tmp_path):
    first, second = shards(2)
    del first["norm.weight"]
    del second["layers.0.attention.wq.weight"]
    first["layers.0.attention.wk.weight"] = first["layers.0.attention.wk.weight"].view(np.float16)
    second["layers.0.attention.wo.weight"] = second["layers.0.attention.wo.weight"][:, 1:].copy()
    second["layers.1.ffn_norm.weight"] = second["layers.1.ffn_norm.weight"][::-1].copy()
    first["layers.1.attention_norm.weight"][0] = 0x7FC0  # NaN
    first["layers.0.ffn_norm.weight"] = np.zeros(3, np.uint16)
    first["more\n.weight"] = np.zeros(1, np.uint16)
    found = problems(tmp_path, [first, second])
    for parts in (
        ("norm.weight", "missing in consolidated.00.pth"), ("wq.weight", "missing in consolidated.01.pth"),
        ("wk.weight", "same dtype"), ("wo.weight", "do not make up the shape [64, 64]"),
        ("layers.1.ffn_norm", "not the same in all shards"), ("layers.1.attention_norm", "NaN"),
        ("layers.0.ffn_norm", "has the shape (3,), not [64]"), ("no place for 1 tensors: 'more\\n.weight'",),
    ):  # fmt: skip
        assert [line for line in found if all(part in line for part in parts)], parts
    assert len(found) == 8


def test_a_wrong_tensor_is_not_read(tmp_path):
    parts = shards()
    parts[0]["layers.0.attention.wq.weight"] = np.zeros((64, 32), np.uint16)
    del parts[0]["norm.weight"]
    checkpoint = opened(tmp_path, parts)
    with pytest.raises(FormatError, match=r"wq.weight"):
        checkpoint.matrix("layers.0.q")
    with pytest.raises(FormatError, match=r"norm.weight"):
        checkpoint.vector("norm")
    with pytest.raises(KeyError):
        checkpoint.matrix("layers.9.q")


def test_the_last_shard_is_missing(tmp_path):
    found = problems(tmp_path, shards(2)[:1])
    assert any("all of its shards" in line for line in found)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_is_missing(tmp_path, rank):
    write_meta(tmp_path, shards(2) + shards(1))
    os.remove(tmp_path / f"consolidated.{rank:02}.pth")
    with pytest.raises(FormatError, match=rf"consolidated.{rank:02}.pth: the shard is missing"):
        open_checkpoint(tmp_path)


def test_no_shards(tmp_path):
    with pytest.raises(FormatError, match=r"consolidated.00.pth: the shard is missing"):
        opened(tmp_path, [])


def test_no_embeddings(tmp_path):
    with pytest.raises(FormatError, match=r"tok_embeddings.weight: the table of embeddings is missing"):
        opened(tmp_path, [{"norm.weight": np.zeros(64, np.uint16)}])


@pytest.mark.parametrize("shape", [(0, 64), (1 << 40, 0)])
def test_embeddings_of_no_bytes(tmp_path, shape):
    with pytest.raises(FormatError, match="vocab_size"):
        opened(tmp_path, [{"tok_embeddings.weight": np.zeros(shape, np.uint16)}], vocab_size=-1)


def test_params_that_lie_about_sizes_allocate_nothing(tmp_path):
    lies = {"dim": 65536, "n_layers": 512, "n_heads": 512, "n_kv_heads": 512, "vocab_size": 1 << 21}
    checkpoint = opened(tmp_path, **lies)
    assert len(checkpoint.check()) == 101
    with pytest.raises(FormatError):
        checkpoint.matrix("layers.0.q")


def test_a_file_alone_points_to_its_folder(tmp_path):
    write_meta(tmp_path, shards())
    with pytest.raises(FormatError, match=r"give the folder that holds it and its params.json"):
        open_checkpoint(tmp_path / "consolidated.00.pth")


def test_params_are_missing(tmp_path):
    (tmp_path / "consolidated.00.pth").write_bytes(torch_bytes({}))
    with pytest.raises(FormatError, match=r"params.json: is missing beside the weights"):
        open_checkpoint(tmp_path)


def test_a_shard_that_links_out_of_the_folder(tmp_path):
    folder = write_meta(tmp_path / "model", shards())
    (folder / "consolidated.00.pth").rename(tmp_path / "elsewhere")
    (folder / "consolidated.00.pth").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="leads out of the folder"):
        open_checkpoint(folder)

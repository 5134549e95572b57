"""benchmarks/synthesize.py writes what it says: sound files in a real shape, zeros and logits as told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bitnet_inference import LLM, ternary
from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch
from bitnet_inference.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def synthesize(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import synthesize

    return synthesize


def test_the_tiny_shape_is_sound(synthesize, tmp_path):
    synthesize.synthesize("tiny", tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.check() == []
    assert checkpoint.config.eos_ids == (511,)


def test_weights_have_the_share_of_zeros_of_the_real_model(synthesize, tmp_path):
    synthesize.synthesize("tiny", tmp_path)
    matrix = open_checkpoint(tmp_path).matrix("layers.2.up")
    values = ternary.unpack_quarters(matrix.data, matrix.shape[0])
    assert (values == 0).mean() == pytest.approx(0.42, abs=0.01)
    assert values.mean() == pytest.approx(0, abs=0.01)


def test_a_seed_gives_the_same_file_and_another_seed_another(synthesize, tmp_path):
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize.synthesize("tiny", tmp_path / name, seed)
        written.append((tmp_path / name / "model.safetensors").read_bytes())
    assert written[0] == written[1]
    assert written[0] != written[2]


@pytest.mark.parametrize(("peak", "lowest", "highest"), [(1, 0, 2), (6, 4.5, 7.5)])
def test_the_peak_is_how_far_the_best_logit_stands_out(synthesize, tmp_path, peak, lowest, highest):
    synthesize.synthesize("tiny", tmp_path, peak=peak)
    model = load_model(open_checkpoint(tmp_path), EngineConfig(device="cpu", threads=1))
    model.reserve(1)
    ids = np.arange(8, dtype=np.int32)
    batch = Batch(ids, ids, ids, np.array([0, 8], np.int32), np.zeros((1, 1), np.int32))
    logits = model.forward(batch).full(range(8))
    own = (logits[ids, ids] - logits.mean(axis=1)) / logits.std(axis=1)
    assert lowest < own.mean() < highest
    assert logits.std() == pytest.approx(2.5, rel=0.3)


def test_bonsai_is_a_gguf_file_of_one_bit_weights(synthesize, tmp_path, monkeypatch):
    """Of a few layers, with embeddings that stand out as they are told."""
    small = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 640}  # fmt: skip
    monkeypatch.setitem(synthesize.SHAPES, "bonsai-1.7b", synthesize.SHAPES["bonsai-1.7b"] | small)
    synthesize.synthesize("bonsai-1.7b", tmp_path, peak=6)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.check() == [] and checkpoint.group_size("layers.1.o") == 128
    down = checkpoint.matrix("layers.2.down")
    assert set(np.unique(ternary.unpack(down.data, down.layout, down.shape))) == {-1, 1}
    with LLM.load(tmp_path / "model.gguf", device="cpu", threads=1) as llm:
        ids = np.arange(32)
        logits = llm.logits(ids)
    own = (logits[ids, ids] - logits.mean(axis=1)) / logits.std(axis=1)
    assert 4.5 < own.mean() < 7.5
    with pytest.raises(ValueError, match="peak 30 is not between 0 and"):
        synthesize.synthesize("bonsai-1.7b", tmp_path / "other", peak=30)


def test_maple_is_a_gguf_file_with_a_scale_for_each_row_of_its_experts(synthesize, tmp_path, monkeypatch):
    small = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_experts": 16, "vocab_size": 640}  # fmt: skip
    monkeypatch.setitem(synthesize.SHAPES, "maple-20b", synthesize.SHAPES["maple-20b"] | small)
    synthesize.synthesize("maple-20b", tmp_path, peak=6)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.check() == [] and checkpoint.config.local.window == 512
    down = checkpoint.matrix("layers.2.experts.15.down")
    assert down.scale.shape == (512,)
    assert set(np.unique(ternary.unpack(down.data, down.layout, down.shape))) == {-1, 0, 1}
    with LLM.load(tmp_path / "model.gguf", device="cpu", threads=1) as llm:
        ids = np.arange(32)
        logits = llm.logits(ids)
    own = (logits[ids, ids] - logits.mean(axis=1)) / logits.std(axis=1)
    assert 4 < own.mean() < 8


def test_an_impossible_peak_is_refused(synthesize, tmp_path):
    with pytest.raises(ValueError, match="peak is 16"):
        synthesize.synthesize("tiny", tmp_path, peak=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--seed=-1"], "seed is -1: give 0 or more"), (["--peak=nan"], "peak is nan"), ([], "File exists: ")],
)
def test_what_cannot_be_written_is_one_line_and_leaves_nothing(
    synthesize, tmp_path, monkeypatch, capsys, options, message
):
    target = tmp_path / "model"
    if not options:
        target.write_text("a file")
    monkeypatch.setattr("sys.argv", ["synthesize.py", "--shape=tiny", *options, str(target)])
    with pytest.raises(SystemExit) as caught:
        synthesize.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and line.startswith("synthesize.py: ") and message in line
    assert not target.is_dir()


def test_the_2b_shape_has_the_configuration_of_the_real_file(synthesize):
    config = synthesize.SHAPES["bitnet-2b-4t"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in sizes] == [2560, 6912, 30, 20, 5]
    assert (config["vocab_size"], config["max_position_embeddings"], config["rope_theta"]) == (128256, 4096, 500000.0)
    assert "head_dim" not in config


def test_every_id_has_a_token_of_its_own(synthesize, tmp_path):
    synthesize.synthesize("tiny", tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    assert sorted(spec["model"]["vocab"].values()) == list(range(512))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special == {token["content"]: token["id"] for token in spec["added_tokens"]}
    assert tokenizer.affixes == ([tokenizer.bos_id], [])

"""benchmarks/peers.py: the same weights for both, in turns. Needs the extra "peers"."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from bitnet_inference.backends.reference import dense_matrix, ternary_codes
from bitnet_inference.bench import Workload
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, Ternary
from bitnet_inference.probe import Sampler

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def checkpoint(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from synthesize import synthesize

    synthesize("tiny", tmp_path / "tiny")
    return open_checkpoint(tmp_path / "tiny")


def test_the_gguf_has_the_same_weights(checkpoint, tmp_path):
    from gguf_file import write_gguf

    write_gguf(checkpoint, tmp_path / "tiny.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    for name, ours in (("blk.1.ffn_down.weight", "layers.1.down"), ("blk.3.attn_q.weight", "layers.3.q")):
        matrix = checkpoint.matrix(ours)
        assert isinstance(matrix, Ternary)
        expected = ternary_codes(matrix) * np.float32(np.float16(matrix.scale))
        assert np.array_equal(gguf.dequantize(tensors[name].data, tensors[name].tensor_type), expected)
    table = checkpoint.matrix("embed")
    assert isinstance(table, Dense)
    assert np.array_equal(tensors["token_embd.weight"].data, dense_matrix(table).astype(np.float16))


def test_llama_cpp_runs_it(checkpoint, tmp_path):
    from gguf_file import write_gguf
    from llama_cpp_peer import LlamaCpp

    write_gguf(checkpoint, tmp_path / "tiny.gguf")
    peer = LlamaCpp(tmp_path / "tiny.gguf", threads=1, max_context=64, max_batch=4, num_batch_steps=2)
    peer.prompt(40)
    peer.decode(40, 3, 1)
    peer.decode(0, 2, 4)
    peer.close()


def test_the_peers_are_measured_in_turns(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from peers import compare

    calls = []

    class Played:
        def __init__(self, name):
            self.name = name

        def prompt(self, length):
            calls.append((self.name, "prompt", length))

        def decode(self, context, num_steps, num_sequences):
            calls.append((self.name, context, num_steps * num_sequences))

    workload = Workload(prompts=(8,), contexts=(4,), batches=(2,), num_decoded=3, num_batch_steps=5, num_samples=2)
    results = compare(Played("a"), Played("b"), workload, Sampler(num_samples=1, min_s=0))
    assert [result[0] for result in results] == ["prompt of 8", "decoding at 4", "2 at a time"]
    kinds = [[call for call in calls if call[0] == name] for name in "ab"]
    assert [call[1:] for call in kinds[0]] == [call[1:] for call in kinds[1]] and (4, 3) in [c[1:] for c in kinds[0]]
    assert "ratio" not in capsys.readouterr().err

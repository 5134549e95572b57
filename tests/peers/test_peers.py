"""benchmarks/peers.py: the same weights for all, in turns. Needs the extra "peers"."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from bitnet_inference.backends.reference import dense_matrix, ternary_codes
from bitnet_inference.bench import Workload
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, Ternary

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def checkpoint(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from synthesize import synthesize

    synthesize("tiny", tmp_path / "tiny")
    return open_checkpoint(tmp_path / "tiny")


def test_the_gguf_has_the_same_weights(checkpoint, tmp_path):
    from gguf_file import write_file

    write_file(checkpoint, tmp_path / "tiny.gguf")
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
    from gguf_file import write_file
    from llama_cpp_peer import LlamaCpp

    write_file(checkpoint, tmp_path / "tiny.gguf")
    peer = LlamaCpp(tmp_path / "tiny.gguf", threads=1, max_context=64, max_batch=4, num_batch_steps=2)
    peer.prompt(40)
    peer.decode(40, 3, 1)
    peer.decode(0, 2, 4)
    peer.close()


@pytest.mark.filterwarnings("ignore")  # torch warns about itself
def test_transformers_runs_it(checkpoint, tmp_path):
    from transformers_peer import Transformers

    peer = Transformers(tmp_path / "tiny", threads=1, max_context=64)
    peer.prompt(40)
    peer.decode(40, 3, 1)
    peer.decode(40, 3, 1)
    assert peer._cache.get_seq_length() == 43
    peer.decode(0, 2, 4)
    assert peer._cache.get_seq_length() == 2


def test_engines_sleep_while_another_is_measured(checkpoint, tmp_path):
    from peer_engines import llama_cpp_engine, our_engine, transformers_engine
    from peer_process import EngineProcess
    from turns import REST_S, Row

    folder, workload, row = tmp_path / "tiny", Workload(contexts=(0,)), Row(prompt=128)
    config = EngineConfig(threads=2).resolve()
    for peer in (
        our_engine("ours", folder, config, workload),
        llama_cpp_engine(folder, tmp_path / "tiny.gguf", 2, workload),
        transformers_engine(folder, 2, workload),
    ):
        process = EngineProcess(peer.name, peer.make)
        process.prepare(row)
        timing = process.measure(row)
        assert timing.seconds > 0 and timing.cpu_s > 0
        time.sleep(REST_S)
        before = processor_s(process.pid)
        time.sleep(0.5)
        assert processor_s(process.pid) - before <= 0.01, peer.name
        process.close()


def processor_s(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_an_engine_that_fails_is_named(checkpoint, tmp_path):
    from peer_engines import our_engine
    from peer_process import EngineFailed, EngineProcess
    from turns import Row

    peer = our_engine("ours", tmp_path / "absent", EngineConfig(threads=1).resolve(), Workload())
    with pytest.raises(EngineFailed, match=r"^ours: NotFound: .*absent"):
        EngineProcess(peer.name, peer.make)
    peer = our_engine("ours", tmp_path / "tiny", EngineConfig(threads=1).resolve(), Workload())
    process = EngineProcess(peer.name, peer.make)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="ours ended with exit code -9"):
        process.measure(Row(prompt=8))


def test_the_table_and_the_numbers(checkpoint, tmp_path, monkeypatch, capsys):
    import peers

    monkeypatch.setattr(
        peers, "Workload", lambda **_: Workload(prompts=(128, 256), contexts=(), batches=(2,), num_samples=1)
    )
    file = tmp_path / "numbers.json"
    monkeypatch.setattr(
        sys, "argv", ["peers.py", str(tmp_path / "tiny"), "--threads", "1", "--isa", "generic", "--json", str(file)]
    )
    peers.main()
    titles, *rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert titles.split() == "tokens/s ours llama.cpp ratio transformers ratio ours, generic ratio".split()
    assert [row[:13].rstrip() for row in rows] == ["prompt of 128", "prompt of 256", "batch of 2"]
    numbers = json.loads(file.read_text())
    assert numbers["threads"] == 1 and numbers["engines"]["ours, generic"] == "bitnet-inference, generic"
    results = numbers["results"]
    assert [set(result["peers"]) for result in results] == [
        {"llama.cpp", "transformers", "ours, generic"},
        {"llama.cpp", "ours, generic"},
        {"llama.cpp", "transformers", "ours, generic"},
    ]
    peer = results[0]["peers"]["llama.cpp"]
    assert peer["ratio"] == peer["pairs"][0]["ours"]["tokens_s"] / peer["pairs"][0]["theirs"]["tokens_s"]


@pytest.mark.parametrize(
    "options, message",
    [
        (["--json", "absent/x"], "absent/x cannot be written"),
        (["--peers", "ollama"], "--peers has 'ollama'"),
        (["--peers", ""], "nothing to compare with"),
        (["--isa", "mmx"], "isa is 'mmx'"),
        (["--gguf", "absent/x"], "absent/x cannot be written"),
        (["--samples", "0"], "at least 1"),
    ],
)
def test_mistakes_are_one_line(checkpoint, tmp_path, monkeypatch, capsys, options, message):
    import peers

    monkeypatch.setattr(sys, "argv", ["peers.py", str(tmp_path / "tiny"), *options])
    with pytest.raises(SystemExit, match="2"):
        peers.main()
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("peers.py: ") and message in error

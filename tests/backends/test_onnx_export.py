"""ONNX files that we write, run in ONNX Runtime, beside the reference; and what onnx's own checker says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from test_groups import Grouped

from bitnet_inference.backends import load_model, reference
from bitnet_inference.backends.onnx_check import relative_rms
from bitnet_inference.config import EngineConfig
from bitnet_inference.conversion import onnx_verbs as verbs
from bitnet_inference.conversion.onnx_graphs import onnx_graph
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.onnx_writer import MICROSOFT, Graph, Weight, write_onnx
from bitnet_inference.model.contract import Batch

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
# Wholly or in part.
DENSE = ("gemma3-bf16", "granite-bf16", "llama-f16", "llama-f32", "llama-partial", "llama3-bf16", "minicpm-f32",
         "qwen2-bf16", "qwen3-bf16")  # fmt: skip
# The golden seeds keep every code away from a tie: what is left is float32 rounding.
NO_FLIP = 1e-5
Floats = NDArray[np.float32]


def start(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def written(folder: Path, checkpoint: Checkpoint, small: bool = False, **options: Any) -> Any:
    path = folder / "model.onnx"
    write_onnx(onnx_graph(checkpoint, small), path, {"family": checkpoint.config.family}, **options)
    return start(path)


def run(
    session: Any, ids: Any, past: Sequence[Floats] = (), **inputs: NDArray[np.int64]
) -> tuple[Floats, list[Floats]]:
    """Logits and the cache behind `ids` [batch, tokens]; masks and positions are those of no padding unless given."""
    ids = np.atleast_2d(np.asarray(ids, np.int64))
    shapes = {each.name: each.shape for each in session.get_inputs() if each.name.startswith("past")}
    past = past or [np.zeros((len(ids), heads, 0, dim), np.float32) for _, heads, _, dim in shapes.values()]
    total = past[0].shape[2] + ids.shape[1]
    plain = {
        "input_ids": ids,
        "attention_mask": np.ones((len(ids), total), np.int64),
        "position_ids": np.tile(np.arange(past[0].shape[2], total), (len(ids), 1)),
    }
    logits, *present = session.run(None, {**plain, **inputs, **dict(zip(shapes, past, strict=True))})
    return logits, present


def golden(name: str) -> Any:
    return np.load(GOLDEN / name / "golden.npz")


def reference_logits(checkpoint: Checkpoint, ids: NDArray[np.int32]) -> Floats:
    model = load_model(checkpoint, EngineConfig(device="reference", cache_dtype="float32"))
    blocks = -(-len(ids) // model.capabilities.block_size)
    model.reserve(blocks)
    places, table = np.arange(len(ids), dtype=np.int32), np.arange(blocks, dtype=np.int32)[None]
    batch = Batch(ids.astype(np.int32), places, places, np.array([0, len(ids)], np.int32), table)
    return model.forward(batch).full(range(len(ids)))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_is_what_the_reference_computes(tmp_path, name):
    """At once, and token by token behind the cache; the likeliest tokens are Transformers' own."""
    checkpoint, found = open_checkpoint(GOLDEN / name), golden(name)
    session = written(tmp_path, checkpoint)
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    ids = found["token_ids"]
    whole, cached = run(session, ids)
    expected = reference_logits(checkpoint, ids)
    assert relative_rms(whole[0], expected) < NO_FLIP
    past: list[Floats] = []
    for at, token in enumerate(ids):
        logits, past = run(session, token, past)
        assert relative_rms(logits[0, 0], expected[at]) < 10 * NO_FLIP
    assert all(np.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in zip(past, cached, strict=True))
    margins, ids = found["greedy_margins"], found["greedy_ids"]
    begin = len(ids) - len(margins)
    clear = margins > 0.06 * found["logits"].std()
    best = run(session, ids)[0][0, begin - 1 : -1].argmax(axis=1)
    assert clear.sum() >= len(margins) // 2 and np.array_equal(best[clear], ids[begin:][clear])


@pytest.mark.parametrize("name", ["bitnet-packed", "gemma3-bf16", "llama3-bf16", "qwen3-bitlinear"])
def test_neighbours_and_padding_change_nothing(tmp_path, name):
    """The shorter of two texts has padding in front, and goes on behind it; with a window, too."""
    checkpoint, ids = open_checkpoint(GOLDEN / name), golden(name)["token_ids"].astype(np.int64)
    session = written(tmp_path, checkpoint)
    long, short, missing = ids, ids[::-1][:15], len(ids) - 15
    both = np.stack([long, np.concatenate([np.zeros(missing, np.int64), short])])
    mask = np.ones((2, len(ids)), np.int64)
    mask[1, :missing] = 0
    places = np.maximum(mask.cumsum(axis=1) - 1, 0)
    logits, past = run(session, both, attention_mask=mask, position_ids=places)
    assert relative_rms(logits[0], run(session, long)[0][0]) < NO_FLIP
    alone, own_past = run(session, short)
    assert relative_rms(logits[1, missing:], alone[0]) < NO_FLIP
    mask, token = np.concatenate([mask, np.ones((2, 1), np.int64)], axis=1), ids[3:4]
    logits, _ = run(session, [token, token], past, attention_mask=mask, position_ids=places[:, -1:] + 1)
    assert relative_rms(logits[1], run(session, token, own_past)[0][0]) < NO_FLIP


@pytest.mark.parametrize("name", ["bitnet-packed", "gemma3-bf16", "qwen2-bf16"])
def test_another_runtime_computes_the_same(tmp_path, name):
    """ONNX's own evaluator, in NumPy, which knows standard operators only."""
    checkpoint, ids = open_checkpoint(GOLDEN / name), golden(name)["token_ids"]
    expected, _ = run(written(tmp_path, checkpoint), ids)
    config, numbers = checkpoint.config, np.arange(len(ids))[None]
    inputs = {"input_ids": ids[None].astype(np.int64), "attention_mask": np.ones_like(numbers), "position_ids": numbers}
    empty = np.zeros((1, config.num_kv_heads, 0, config.head_dim), np.float32)
    past = {f"past_key_values.{n}.{part}": empty for n in range(config.num_layers) for part in ("key", "value")}
    with np.errstate(over="ignore"):  # exp, for what is far below 0
        logits = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(["logits"], inputs | past)[0]
    assert relative_rms(logits, expected) < NO_FLIP


@pytest.mark.parametrize("name", NAMES)
def test_small_files_say_almost_the_same(tmp_path, name):
    checkpoint, found = open_checkpoint(GOLDEN / name), golden(name)
    session = written(tmp_path, checkpoint, small=True)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    logits, _ = run(session, found["token_ids"])
    assert relative_rms(logits[0], found["logits"]) < (0.1 if name in DENSE else 0.01)


def int8_product(graph: Graph, x: verbs.Quantised, codes: NDArray[np.int8], scale: str) -> str:
    weight = Weight("weight", "int8", codes.T.shape, lambda: iter((codes.T,)))
    return verbs.ternary(graph, x, [(graph.weight(weight), scale)])


def two_bit_product(graph: Graph, x: verbs.Quantised, codes: NDArray[np.int8], scale: str) -> str:
    rows, blocks = len(codes), -(-codes.shape[1] // 127)
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 127))).reshape(rows, blocks, 127)
    fields = np.pad(padded, ((0, 0), (0, 0), (0, 1))).astype(np.uint8) + np.uint8(2)
    packed = sum(fields[..., at::4] << (2 * at) for at in range(4)).astype(np.uint8)
    weight = Weight("weight", "uint8", packed.shape, lambda: iter((packed,)))
    ones = graph.constant(np.ones((rows, blocks)), "float32", "ones")
    return verbs.small(graph, x, graph.weight(weight), ones, scale)


@pytest.mark.parametrize("product", [int8_product, two_bit_product])
@pytest.mark.parametrize("width", [16, 127, 128, 300])
def test_products_are_the_definition_to_the_bit(tmp_path, width, product):
    """With 2 bits the runtime rounds codes again, and must find them whole. None is made another operator."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((1, 99, width), np.float32)
    x[0, 3], x[0, 4, : width // 2] = 0, 1e-6
    codes, scale = rng.integers(-1, 2, (40, width), np.int8), 0.7
    graph = Graph()
    graph.inputs["x"] = ("float32", (1, "tokens", width))
    name = product(graph, verbs.Quantised(graph, "x", width), codes, graph.constant(scale, "float32", "m"))
    graph.outputs[name] = ("float32", (1, "tokens", 40))
    write_onnx(graph, tmp_path / "x.onnx", {})
    (found,) = start(tmp_path / "x.onnx").run(None, {"x": x})
    assert np.array_equal(found[0], reference.bit_linear(x[0], codes, scale))


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("name", ["bitnet-packed", "llama-partial", "llama-ternary-head"])
def test_scales_for_groups_of_columns(tmp_path, name, group_size):
    checkpoint, ids = Grouped(name, group_size), golden(name)["token_ids"]
    expected = reference_logits(checkpoint, ids)
    exact, _ = run(written(tmp_path, checkpoint), ids)
    assert np.median(list(map(relative_rms, exact[0], expected))) < NO_FLIP and relative_rms(exact[0], expected) < 0.03
    small, _ = run(written(tmp_path, checkpoint, small=True), ids)
    assert relative_rms(small[0], expected) < 0.1


def test_what_stands_in_a_file(tmp_path):
    """Optimum's names and shapes, an old operator set, none but standard operators unless it is small."""
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    session = written(tmp_path, checkpoint)
    model = onnx.load(tmp_path / "model.onnx")
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 13)] and model.ir_version == 7
    assert {each.key: each.value for each in model.metadata_props} == {"family": "bitnet"}
    shapes = {each.name: each.shape for each in (*session.get_inputs(), *session.get_outputs())}
    batch, total = "batch_size", "total_sequence_length"
    assert list(shapes)[:5] == ["input_ids", "attention_mask", "position_ids", *list(shapes)[3:5]]
    assert shapes["input_ids"] == shapes["position_ids"] == [batch, "sequence_length"]
    assert shapes["attention_mask"] == [batch, total] and shapes["logits"] == [batch, "sequence_length", 384]
    assert shapes["past_key_values.1.key"] == [batch, 2, "past_sequence_length", 16]
    assert shapes["present.1.value"] == [batch, 2, total, 16] and len(shapes) == 3 + 1 + 2 * 4
    weights = {each.name: each for each in model.graph.initializer}
    assert weights["layers.0.q"].data_type == onnx.TensorProto.INT8 and "head" not in weights
    assert weights["embed"].data_type == onnx.TensorProto.FLOAT
    written(tmp_path, checkpoint, small=True)
    model = onnx.load(tmp_path / "model.onnx")
    assert {each.domain for each in model.opset_import} == {"", MICROSOFT}
    bits = [each.i for node in model.graph.node for each in node.attribute if each.name == "bits"]
    assert sorted(bits) == [2] * 14 + [8]


def test_weights_beside_the_graph(tmp_path):
    checkpoint, ids = open_checkpoint(GOLDEN / "llama-partial"), golden("llama-partial")["token_ids"]
    inside, _ = run(written(tmp_path, checkpoint), ids)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    seen: list[tuple[int, int]] = []
    beside, _ = run(written(tmp_path, checkpoint, max_inline_bytes=0, progress=lambda *pair: seen.append(pair)), ids)
    assert np.array_equal(inside, beside)
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] == onnx_graph(checkpoint).num_bytes
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    model, end = onnx.load(tmp_path / "model.onnx", load_external_data=False), 0
    for tensor in model.graph.initializer:
        place = {each.key: each.value for each in tensor.external_data}
        assert bool(place) == (tensor.data_location == onnx.TensorProto.EXTERNAL)
        if place:
            begin, size = int(place["offset"]), int(place["length"])
            assert place["location"] == "model.onnx.data" and begin % (4096 if size >= 4096 else 64) == 0
            assert begin >= end and size >= 1024
            end = begin + size
        else:
            assert len(tensor.raw_data) < 1024
    assert end == (tmp_path / "model.onnx.data").stat().st_size

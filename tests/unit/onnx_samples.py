"""ONNX decoders made by hand of the weights of a golden folder, so that what Transformers computed holds for them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    external_data_helper,
    helper,
    numpy_helper,
)

from bitnet_inference.backends.reference import dense_matrix
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.model.rope import inverse_frequencies

GOLDEN = Path(__file__).parent.parent / "golden" / "llama-f32"
WORDS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
FLOAT, FLOAT16, INT64, INT32, BOOL = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL,
)  # fmt: skip


@dataclass
class Kind:
    """How a decoder is made: the type of its cache, what it takes and gives, and whether by GroupQueryAttention."""

    cache: int = FLOAT
    integers: int = INT64
    has_positions: bool = True
    has_hidden: bool = False
    is_merged: bool = False
    is_genai: bool = False
    half_logits: bool = False
    keeps_logits: bool = False


@dataclass
class Nodes:
    """A graph that is being made."""

    nodes: list[NodeProto] = field(default_factory=list)
    tensors: dict[str, TensorProto] = field(default_factory=dict)

    def add(self, op: str, *inputs: Any, name: str = "", **attributes: Any) -> str:
        name = name or f"{op}_{len(self.nodes)}"
        made = [each if isinstance(each, str) else self.constant(each) for each in inputs]
        self.nodes.append(helper.make_node(op, made, [name], **attributes))
        return name

    def constant(self, values: Any, name: str = "") -> str:
        array = np.asarray(values)
        name = name or f"constant_{len(self.tensors)}"
        self.tensors[name] = numpy_helper.from_array(array, name)
        return name


def make_decoder(kind: Kind | None = None, folder: Path = GOLDEN) -> ModelProto:
    """The Llama of a golden folder as a graph with a cache."""
    return _Maker(open_checkpoint(folder), kind or Kind()).make()


def write_model(path: Path, model: ModelProto, words: bool = True) -> Path:
    """Write it to `path`, with the words and configurations of the golden folder beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    for name in WORDS if words else ():
        shutil.copy(GOLDEN / name, path.parent / name)
    return path


def write_genai(folder: Path, model: ModelProto) -> Path:
    """Write it as onnxruntime-genai's model builder does, without config.json; returns the folder."""
    write_model(folder / "decoder.onnx", model)
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink()
    decoder = {
        "filename": "decoder.onnx", "head_size": 16, "hidden_size": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "session_options": {"provider_options": []},
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", "past_key_names": "past.%d.k",
                   "past_value_names": "past.%d.v"},
        "outputs": {"logits": "scores", "present_key_names": "now.%d.k", "present_value_names": "now.%d.v"},
    }  # fmt: skip
    sizes = {"context_length": 256, "vocab_size": 384, "bos_token_id": 376, "eos_token_id": [377, 383]}
    search = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_length": 256}
    about = {"model": {**sizes, "type": "llama", "decoder": decoder}, "search": search}
    (folder / "genai_config.json").write_text(json.dumps(about))
    return folder


def outside(model: ModelProto, name: str = "model.onnx_data") -> ModelProto:
    """The same with all larger tensors marked to lie in a file beside it, once it is saved by onnx.save."""
    external_data_helper.convert_model_to_external_data(model, True, name, size_threshold=1024)
    return model


class _Maker:
    def __init__(self, checkpoint: Checkpoint, kind: Kind) -> None:
        self.checkpoint, self.kind, self.config = checkpoint, kind, checkpoint.config
        self.graph = Nodes()

    def make(self) -> ModelProto:
        graph, config, kind = self.graph, self.config, self.kind
        self.positions()
        graph.constant(self.matrix("embed"), "embed")
        x = graph.add("Gather", "embed", "input_ids")
        for layer in range(config.num_layers):
            x = graph.add("Add", x, self.attention(self.norm(x, f"layers.{layer}.attn_norm"), layer))
            x = graph.add("Add", x, self.mlp(self.norm(x, f"layers.{layer}.mlp_norm"), f"layers.{layer}."))
        hidden = self.norm(x, "norm")
        if kind.has_hidden:
            graph.add("Identity", hidden, name="last_hidden_state")
        if kind.keeps_logits:
            first = graph.add("Reshape", graph.add("Neg", "num_logits_to_keep"), [1])
            hidden = graph.add("Slice", hidden, first, [np.iinfo(np.int64).max], [1])
        logits = self.linear(hidden, "head")
        if kind.half_logits:
            logits = graph.add("Cast", logits, to=FLOAT16)
        graph.add("Identity", logits, name=self.name("logits", "scores"))
        body = helper.make_graph(graph.nodes, "decoder", *self.ports(), list(graph.tensors.values()))
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(body, opset_imports=opsets, ir_version=8, producer_name="by hand")

    def name(self, plain: str, genai: str) -> str:
        return genai if self.kind.is_genai else plain

    def past(self, layer: int, part: str) -> str:
        return self.name(f"past_key_values.{layer}.{part}", f"past.{layer}.{part[0]}")

    def present(self, layer: int, part: str) -> str:
        return self.name(f"present.{layer}.{part}", f"now.{layer}.{part[0]}")

    def ports(self) -> tuple[list[Any], list[Any]]:
        config, kind, port = self.config, self.kind, helper.make_tensor_value_info
        inputs = [port("input_ids", kind.integers, ["b", "s"]), port("attention_mask", kind.integers, ["b", "t"])]
        inputs += [port("position_ids", kind.integers, ["b", "s"])] if kind.has_positions else []
        inputs += [port("use_cache_branch", BOOL, [1])] if kind.is_merged else []
        inputs += [port("num_logits_to_keep", INT64, [])] if kind.keeps_logits else []
        logits = FLOAT16 if kind.half_logits else FLOAT
        outputs = [port(self.name("logits", "scores"), logits, ["b", "s", config.vocab_size])]
        outputs += [port("last_hidden_state", FLOAT, ["b", "s", config.hidden_size])] if kind.has_hidden else []
        for layer in range(config.num_layers):
            for part in ("key", "value"):
                shape = ["b", config.num_kv_heads, "p", "d" if kind.is_genai else config.head_dim]
                inputs.append(port(self.past(layer, part), kind.cache, shape))
                outputs.append(port(self.present(layer, part), kind.cache, ["b", shape[1], "t", shape[3]]))
        return inputs, outputs

    def matrix(self, name: str) -> Any:
        return np.ascontiguousarray(dense_matrix(self.checkpoint.matrix(name)))

    def linear(self, x: str, name: str) -> str:
        if name not in self.graph.tensors:
            self.graph.constant(np.ascontiguousarray(self.matrix(name).T), name)
        return self.graph.add("MatMul", x, name)

    def norm(self, x: str, name: str) -> str:
        add = self.graph.add
        squares = add("ReduceMean", add("Mul", x, x), axes=[-1], keepdims=1)
        roots = add("Sqrt", add("Add", squares, np.float32(self.config.norm_eps)))
        return add("Mul", add("Div", x, roots), self.checkpoint.vector(name))

    def mlp(self, x: str, layer: str) -> str:
        gate, add = self.linear(x, layer + "gate"), self.graph.add
        inner = add("Mul", add("Mul", gate, add("Sigmoid", gate)), self.linear(x, layer + "up"))
        return self.linear(inner, layer + "down")

    def positions(self) -> None:
        """Cosines and sines [b, 1, s, half], and what hides later tokens from earlier ones: [b, 1, 1, s, t]."""
        add, kind = self.graph.add, self.kind
        positions = "position_ids"
        mask = add("Cast", "attention_mask", to=INT64)
        if not kind.has_positions:
            count = add("Slice", add("Shape", "input_ids"), [1], [2])
            ends = add("Sub", add("CumSum", mask, np.int64(1)), np.int64(1))
            positions = add("Slice", ends, add("Neg", count), [np.iinfo(np.int64).max], [1])
        self.total = add("Slice", add("Shape", mask), [1], [2])
        if kind.is_genai:
            frequencies = inverse_frequencies(self.config, False)
            angles = np.arange(self.config.max_positions, dtype=np.float32)[:, None] * frequencies
            self.graph.constant(np.cos(angles), "cosines")
            self.graph.constant(np.sin(angles), "sines")
            counts = add("ReduceSum", mask, [1], keepdims=0)
            self.lengths = add("Cast", add("Sub", counts, np.int64(1)), to=INT32)
            self.whole = add("Cast", add("Squeeze", self.total, [0]), to=INT32)
            return
        wide = add("Cast", add("Unsqueeze", positions, [1, 3]), to=FLOAT)
        angles = add("Mul", wide, inverse_frequencies(self.config, False).astype(np.float32))
        self.cosines, self.sines = add("Cos", angles), add("Sin", angles)
        columns = add("Range", np.int64(0), add("Squeeze", self.total, [0]), np.int64(1))
        rows = add("Cast", add("Unsqueeze", positions, [1, 2, 4]), to=INT64)
        self.hidden = add("Where", add("Greater", columns, rows), np.float32(-np.inf), np.float32(0))

    def heads(self, x: str, count: int) -> str:
        """[b, count, s, head_dim]."""
        split = self.graph.add("Reshape", x, np.array([0, 0, count, self.config.head_dim]))
        return self.graph.add("Transpose", split, perm=[0, 2, 1, 3])

    def rotated(self, x: str) -> str:
        add, half = self.graph.add, self.config.head_dim // 2
        a, b = add("Slice", x, [0], [half], [3]), add("Slice", x, [half], [2 * half], [3])
        first = add("Sub", add("Mul", a, self.cosines), add("Mul", b, self.sines))
        return add("Concat", first, add("Add", add("Mul", b, self.cosines), add("Mul", a, self.sines)), axis=3)

    def cached(self, x: str, layer: int, part: str) -> str:
        """Everything so far, in float32, after it has become the output."""
        add, past, present = self.graph.add, self.past(layer, part), self.present(layer, part)
        if self.kind.cache != FLOAT:
            x = add("Cast", x, to=self.kind.cache)
        if self.kind.is_merged:
            add("If", "use_cache_branch", name=present, then_branch=_branch("Concat", past, x, axis=2),
                else_branch=_branch("Identity", x))  # fmt: skip
        else:
            add("Concat", past, x, name=present, axis=2)
        return add("Cast", present, to=FLOAT) if self.kind.cache != FLOAT else present

    def attention(self, x: str, layer: int) -> str:
        config, add = self.config, self.graph.add
        q, k, v = (self.linear(x, f"layers.{layer}.{name}") for name in "qkv")
        if self.kind.is_genai:
            return self.linear(self.group_query(q, k, v, layer), f"layers.{layer}.o")
        k = self.cached(self.rotated(self.heads(k, config.num_kv_heads)), layer, "key")
        v = self.cached(self.heads(v, config.num_kv_heads), layer, "value")
        share, dim = config.num_heads // config.num_kv_heads, config.head_dim
        grouped = np.array([0, config.num_kv_heads, share, -1, dim])
        q = add("Reshape", self.rotated(self.heads(q, config.num_heads)), grouped)
        keys = add("Transpose", add("Unsqueeze", k, [2]), perm=[0, 1, 2, 4, 3])
        scores = add("Mul", add("MatMul", q, keys), np.float32(config.score_scale))
        weights = add("Softmax", add("Add", scores, self.hidden), axis=-1)
        values = add("MatMul", weights, add("Unsqueeze", v, [2]))
        rows = add("Transpose", add("Reshape", values, np.array([0, config.num_heads, -1, dim])), perm=[0, 2, 1, 3])
        return self.linear(add("Reshape", rows, np.array([0, 0, config.num_heads * dim])), f"layers.{layer}.o")

    def group_query(self, q: str, k: str, v: str, layer: int) -> str:
        pasts = [self.past(layer, part) for part in ("key", "value")]
        presents = [self.present(layer, part) for part in ("key", "value")]
        name = f"attention_{layer}"
        inputs = [q, k, v, *pasts, self.lengths, self.whole, "cosines", "sines"]
        self.graph.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                [name, *presents],
                domain="com.microsoft",
                do_rotary=1,
                num_heads=self.config.num_heads,
                kv_num_heads=self.config.num_kv_heads,
            )
        )
        return name


def _branch(op: str, *inputs: str, **attributes: Any) -> GraphProto:
    node = helper.make_node(op, inputs, ["chosen"], **attributes)
    return helper.make_graph([node], op, [], [helper.make_tensor_value_info("chosen", FLOAT, None)])


def attribute_graph(body: GraphProto) -> AttributeProto:
    """An attribute that holds a graph."""
    return helper.make_attribute("body", body)

"""Writes seeds/: sound models of a few kilobytes, each by the library that owns its format, where there is one.

    PYTHONPATH=tests:tests/unit python tests/attacks/make_seeds.py      needs gguf, onnx, safetensors and torch

The golden folders (tests/golden, written by Transformers) are seeds too. What is in seeds/ is committed: run this only
to add a seed. A folder is a model; one that holds a single file stands for that file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import gpu_samples as gpu
import meta_samples as meta
import numpy as np
import onnx
import torch
from expert_samples import CONFIG as MAPLE
from gguf_samples import Q2_0, q2_0_bytes, write_model
from mlx_samples import mlx_folder
from onnx import TensorProto, external_data_helper, helper, numpy_helper
from onnx_samples import Kind, make_decoder, outside
from safetensors.numpy import save_file
from test_text_sentencepiece import SAMPLES, message
from test_text_sentencepiece import model as sentencepiece_model
from tiny_folders import bfloat16, safetensors_bytes

from bitnet_inference.conversion.convert import convert

HERE = Path(__file__).parent
SEEDS, GOLDEN = HERE / "seeds", HERE.parent / "golden"
WORDS = SAMPLES["prefix"]["tokens"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(WORDS),
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 1e4, "bos_token_id": 1, "eos_token_id": 2,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 32},
}  # fmt: skip


def _values(*shape: int) -> np.ndarray:
    values = np.random.default_rng(shape[0]).normal(len(shape) == 1, 0.2, shape)
    return values.astype(np.float32)


def _hugging_face_in_shards(folder: Path, config: dict[str, Any] = LLAMA) -> None:
    """A Llama of one layer in two shards with an index, and SentencePiece's tokenizer.model."""
    folder.mkdir()
    layer, hidden, inner, dim = "model.layers.0.", 16, 32, config.get("head_dim", 8)
    shapes = {
        f"{layer}self_attn.{part}_proj": (rows, hidden) for part, rows in (("q", 2 * dim), ("k", dim), ("v", dim))
    }
    shapes |= {f"{layer}self_attn.o_proj": (hidden, 2 * dim), f"{layer}mlp.down_proj": (hidden, inner)}
    shapes |= {f"{layer}mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
    shapes |= {f"{layer}input_layernorm": (hidden,), f"{layer}post_attention_layernorm": (hidden,)}
    first = {"model.embed_tokens.weight": _values(len(WORDS), hidden).astype(np.float16)}
    second = {f"{name}.weight": _values(*shape).astype(np.float16) for name, shape in shapes.items()}
    second |= {"model.norm.weight": _values(hidden), "lm_head.weight": _values(len(WORDS), hidden)}
    weight_map = {}
    for file, tensors in (("model-1.safetensors", first), ("model-2.safetensors", second)):
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    template = "{% for message in messages %}<s>{{ message['role'] }} {{ message['content'] | trim }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.7, "top_p": 0.9}))


def _meta_in_shards(folder: Path) -> None:
    """Two shards of torch.save, params.json, and a list of ranks."""
    params = {**meta.PARAMS, "dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "multiple_of": 16}
    folder.mkdir()
    meta.write_ranks(folder)
    params["vocab_size"] = vocab = len(meta.rank_lines()) + 257  # an even number
    shapes = {"attention.wq": (8, 16), "attention.wk": (8, 16), "attention.wv": (8, 16), "attention.wo": (16, 8)}
    shapes |= {"feed_forward.w1": (24, 16), "feed_forward.w3": (24, 16), "feed_forward.w2": (16, 24)}
    shapes |= {"attention_norm": (16,), "ffn_norm": (16,)}
    shapes = {f"layers.0.{name}.weight": shape for name, shape in shapes.items()}
    shapes |= {"tok_embeddings.weight": (vocab // 2, 16), "output.weight": (vocab // 2, 16), "norm.weight": (16,)}
    for rank in range(2):
        tensors = {name: torch.from_numpy(_values(*shape)).bfloat16() for name, shape in shapes.items()}
        torch.save(tensors, folder / f"consolidated.{rank:02}.pth")
    (folder / "params.json").write_text(json.dumps(params))


def _gguf_of_many_types(folder: Path) -> None:
    """A Llama whose matrices are of as many types as there are, with rotary factors and SentencePiece's words."""
    folder.mkdir()
    hidden, inner, heads, keys = 256, 64, 4, 1
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "<0x0A>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 6 + [-1.0, -2.0, -3.0, 0.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1, 1, 6])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kinds = {"attn_q": "TQ2_0", "attn_k": "TQ1_0", "attn_v": "Q4_K", "ffn_gate": "Q6_K", "ffn_up": "Q5_K"}
    shapes = {"attn_q": (64, hidden), "attn_k": (16, hidden), "attn_v": (16, hidden), "ffn_gate": (inner, hidden)}
    shapes |= {"ffn_up": (inner, hidden)}
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[kinds[name]]
        raw = shape[1] // 256 * gguf.GGML_QUANT_SIZES[kind][1]
        data = np.random.default_rng(1).integers(0, 128, (shape[0], raw), np.uint8)
        if kinds[name] in ("TQ1_0", "TQ2_0"):
            data = gguf.quants.quantize(np.sign(_values(*shape)) * np.float32(0.5), kind)
        else:  # small scales: float16 at the beginning of a block, or at its end
            at = [208] if kinds[name] == "Q6_K" else [0, 2]
            for begin in at:
                data.reshape(-1, raw)[:, begin : begin + 2] = np.array([0.001], "<f2").view(np.uint8)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.add_tensor("blk.0.attn_output.weight", _values(hidden, 64).astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.ffn_down.weight", gguf.quants.quantize(_values(hidden, inner), kind), raw_dtype=kind)
    writer.add_tensor("token_embd.weight", _values(len(tokens), hidden).astype(np.float16))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", _values(hidden))
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, 8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_with_experts(folder: Path) -> None:
    """A Maple of two layers, a window in the first: three experts each in stacks of Q2_0, whose rows are a block."""
    folder.mkdir()
    hidden, inner, dim, experts = 64, 64, 16, 3
    writer = gguf.GGUFWriter(folder / "model.gguf", "maple")
    writer.add_embedding_length(hidden)
    writer.add_expert_feed_forward_length(inner)
    writer.add_context_length(64)
    writer.add_block_count(2)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(2)
    writer.add_sliding_window(8)
    writer.add_sliding_window_pattern([True, False])
    writer.add_array("maple.swiglu_clamp_exp", [7.0, 7.0])
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "<0x0A>"]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 6 + [-1.0, -2.0, -3.0, 0.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1, 1, 6])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    projections = {"attn_q": (2 * dim, hidden), "attn_k": (dim, hidden), "attn_v": (dim, hidden)}
    projections |= {f"ffn_{part}_exps": (experts, inner, hidden) for part in ("gate", "up", "down")}
    for layer in range(2):
        for name, shape in projections.items():
            data = q2_0_bytes(np.sign(_values(*shape)).astype(np.int8))
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.I8)
            info = writer.tensors[-1][f"blk.{layer}.{name}.weight"]
            info.shape, info.dtype = shape, Q2_0
        writer.add_tensor(f"blk.{layer}.attn_output.weight", _values(hidden, 2 * dim).astype(np.float16))
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", _values(experts, hidden))
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", dim), ("attn_k_norm", dim)):
            writer.add_tensor(f"blk.{layer}.{name}.weight", _values(size))
    writer.add_tensor("token_embd.weight", _values(len(tokens), hidden).astype(np.float16))
    writer.add_tensor("output_norm.weight", _values(hidden))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _folder_with_experts(folder: Path, config: dict[str, Any], embed: str, experts: dict[str, np.ndarray]) -> None:
    """A layer of a Maple or of a Qwen 3, whose experts stand in stacks, and SentencePiece's tokenizer.model."""
    folder.mkdir()
    hidden, dim = 32, 8
    sizes = {"hidden_size": hidden, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": dim, "num_experts_per_tok": 2, "vocab_size": len(WORDS),
             "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    layer = "model.layers.0."
    tensors = {f"{layer}self_attn.{part}_proj": np.sign(_values(rows * dim, hidden)) / 4
               for part, rows in (("q", 2), ("k", 1), ("v", 1))}  # fmt: skip
    tensors |= {f"{layer}self_attn.o_proj": np.sign(_values(hidden, 2 * dim)) / 4}
    tensors |= {f"{layer}{name}": np.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{layer}self_attn.{part}_norm": np.ones(dim) for part in "qk"}
    tensors |= {f"{layer}mlp.gate": np.sign(_values(3, hidden)), "model.norm": np.ones(hidden)}
    tensors |= {name: np.sign(_values(len(WORDS), hidden)) / 2 for name in (embed, "lm_head")}
    stored = {f"{name}.weight": bfloat16(values) for name, values in tensors.items()}
    stacks = {f"{layer}mlp.{name}": values for name, values in experts.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored | stacks))
    (folder / "config.json").write_text(json.dumps(config | sizes))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())


def _mlx_with_experts(folder: Path) -> None:
    """As DeepGrove's mlx_lm packs Maple: a scale for each row."""
    more = {"num_experts": 3, "layer_types": ["sliding_attention"]}
    said = {"group_size": 128, "bits": 2, "mode": "affine"}
    codes = np.random.RandomState(0).choice(np.array([0x55555555, 0x16841684], np.uint32), (3, 32, 2))
    parts = {"weight": codes, "row_alpha": bfloat16(np.arange(1, 97).reshape(3, 32) / 64)}
    experts = {f"switch_mlp.{name}_proj.{part}": values for name in ("gate", "up", "down")
               for part, values in parts.items()}  # fmt: skip
    _folder_with_experts(folder, MAPLE | more | {"quantization": said}, "model.word_embeddings", experts)


def _qwen_with_experts(folder: Path) -> None:
    """As transformers 5 may write it: gate above up in one stack."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_local_experts": 3,
              "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
    experts = {
        "experts.gate_up_proj": np.sign(_values(3, 64, 32)) / 4,
        "experts.down_proj": np.sign(_values(3, 32, 32)),
    }
    stored = {name: bfloat16(values) for name, values in experts.items()}
    _folder_with_experts(folder, config, "model.embed_tokens", stored)


def _gpu(folder: Path) -> None:
    """A layer as Microsoft's GPU code keeps it, packed, and a list of ranks."""
    folder.mkdir()
    meta.write_ranks(folder)
    (folder / "params.json").unlink()
    vocab = len(meta.rank_lines()) + 256
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": vocab}  # fmt: skip
    tensors = {"tok_embeddings.weight": gpu.vector(1, vocab, 32), "norm.weight": gpu.vector(2, 32)}
    tensors["output.weight"] = tensors["tok_embeddings.weight"]
    for name, (own, _) in zip(range(3, 7), gpu.VECTORS.values(), strict=True):
        tensors[f"layers.0.{own}.weight"] = gpu.vector(name, 32)
    for own, rows in (("attention.wqkv", 64), ("attention.wo", 32), ("feed_forward.w13", 64), ("feed_forward.w2", 32)):
        tensors[f"layers.0.{own}.weight"] = gpu.packed(np.sign(_values(rows, 32)).astype(np.int8))
        tensors[f"layers.0.{own}.weight_scale"] = gpu.vector(7, 4) & 0x7FFF  # not below 0
    gpu.write_gpu(folder, tensors, config=False)
    (folder / "config.json").write_text(json.dumps(gpu.CONFIG | sizes))


def _onnx(folder: Path, kind: Kind) -> None:
    """A Llama as a graph: one file and its data, or onnxruntime-genai's folder without a config.json."""
    name = "decoder.onnx" if kind.is_genai else "model.onnx"
    folder.mkdir()
    source = folder / "source"
    _hugging_face_in_shards(source, LLAMA | {"head_dim": 16})  # GroupQueryAttention wants a multiple of 16
    model = make_decoder(kind, source)
    onnx.save(model if kind.is_genai else outside(model), folder / name)
    for text in ("tokenizer.model", "tokenizer_config.json", *(() if kind.is_genai else ("config.json",))):
        shutil.copy(source / text, folder)
    shutil.rmtree(source)
    if kind.is_genai:
        _genai_config(folder, name)


def _genai_config(folder: Path, name: str) -> None:
    inputs = {"past_key_names": "past.%d.k", "past_value_names": "past.%d.v"}
    outputs = {"logits": "scores", "present_key_names": "now.%d.k", "present_value_names": "now.%d.v"}
    sizes = {"head_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    decoder = {"filename": name, "hidden_size": 16, "inputs": inputs, "outputs": outputs, **sizes}
    more = {"type": "llama", "context_length": 64, "vocab_size": len(WORDS), "bos_token_id": 1, "eos_token_id": [2]}
    about = {"model": {**more, "decoder": decoder}, "search": {"do_sample": True, "top_k": 3}}
    (folder / "genai_config.json").write_text(json.dumps(about))


def _small_onnx(path: Path) -> None:
    """Ports of a decoder, and every way in which a tensor is kept; the data of one lie in the file itself."""
    inner = helper.make_graph([], "inner", [], [], [numpy_helper.from_array(np.zeros(2, np.float32), "g")])
    nodes = [
        helper.make_node("MatMulNBits", ["x", "d", "a"], ["y"], domain="com.microsoft", K=64, N=1, bits=2),
        helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner),
        helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(np.arange(3), "e")),
    ]
    tensors = [
        numpy_helper.from_array(np.ones((2, 1), np.float16), "a"),
        *(helper.make_tensor(name, kind, [2], [0, 1]) for name, kind in (("b", 1), ("c", 9), ("f", 7), ("h", 11))),
        helper.make_tensor("d", TensorProto.UINT8, [1, 2, 8], bytes(16), raw=True),
        helper.make_tensor("i", TensorProto.INT8, [4], bytes(4), raw=True),
    ]
    external_data_helper.set_external_data(tensors[-1], path.name, 8, 4)
    tensors[-1].ClearField("raw_data")
    port, cache = helper.make_tensor_value_info, ["b", 2, "p", 8]
    inputs = [port("input_ids", 7, ["b", "s"]), *(port(f"past_key_values.0.{x}", 1, cache) for x in ("key", "value"))]
    outputs = [port("logits", 1, ["b", "s", 9]), *(port(f"present.0.{x}", 1, cache) for x in ("key", "value"))]
    body = helper.make_graph(nodes, "small", inputs, outputs, tensors)
    path.write_bytes(helper.make_model(body, producer_name="by hand").SerializeToString())


def _small_files(folder: Path) -> None:
    """Files of a few hundred bytes that are no models, for readers of headers."""
    folder.mkdir()
    tensors = {"a": _values(4, 3).astype(np.float16), "b": _values(5), "c": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    several = {"a": torch.ones(3, 4).bfloat16(), "b": torch.ones(5), "c": torch.nn.Parameter(torch.ones(2, 2).half())}
    torch.save(several, folder / "model.pth")
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["<unk>", "a", "b"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    for name, values in (("a", _values(2, 8)), ("b", _values(4).astype(np.float16))):
        writer.add_tensor(name, values)
    for name, kind, wide in (("c", "Q8_0", 32), ("d", "Q4_1", 32), ("e", "TQ1_0", 256)):
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(np.sign(_values(1, wide)), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _small_onnx(folder / "model.onnx")
    pieces = [
        ("<unk>", 0.0, 2),
        ("<s>", 0.0, 3),
        ("</s>", 0.0, 3),
        ("\u2581", -1.0, 1),
        ("a", -2.0, 1),
        ("\u2581a", -3.0, 1),
    ]
    rows = [(1, message({1: piece, 2: score, 3: kind})) for piece, score, kind in pieces]
    (folder / "tokenizer.model").write_bytes(message([*rows, (2, message({3: 2, 41: 1})), (3, message({4: 0}))]))
    template = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] | trim }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def main() -> None:
    """Write all of them anew."""
    shutil.rmtree(SEEDS, ignore_errors=True)
    SEEDS.mkdir()
    _small_files(SEEDS / "small")
    _hugging_face_in_shards(SEEDS / "hf-shards")
    _meta_in_shards(SEEDS / "meta-shards")
    mlx_folder(SEEDS / "mlx", 2, 64, ternary=True)
    _gguf_of_many_types(SEEDS / "gguf-types")
    for name, projections, arch in (("gguf-i2s", "I2_S", "bitnet-b1.58"), ("gguf-groups", "Q2_0", "bitnet-b1.58")):
        (SEEDS / name).mkdir()
        write_model(SEEDS / name / "model.gguf", GOLDEN / "bitnet-packed", arch, projections, "BF16")
    for name, source in (("packed", GOLDEN / "bitnet-packed"), ("packed-groups", SEEDS / "gguf-groups/model.gguf")):
        (SEEDS / name).mkdir()
        convert(source, SEEDS / name / "model.safetensors")
    _gguf_with_experts(SEEDS / "gguf-experts")
    _mlx_with_experts(SEEDS / "mlx-experts")
    _qwen_with_experts(SEEDS / "hf-experts")
    (SEEDS / "packed-experts").mkdir()
    convert(SEEDS / "mlx-experts", SEEDS / "packed-experts" / "model.safetensors")
    _gpu(SEEDS / "gpu")
    (SEEDS / "gguf-parts").mkdir()
    write_model(SEEDS / "gguf-parts/model.gguf", GOLDEN / "bitnet-packed", "bitnet-b1.58", "I2_S", "F16", per_file=20)
    _onnx(SEEDS / "onnx", Kind(is_merged=True, has_hidden=True, keeps_logits=True))
    _onnx(SEEDS / "onnx-genai", Kind(is_genai=True, has_positions=False))
    (SEEDS / "packed-compressed").mkdir()
    convert(SEEDS / "hf-shards", SEEDS / "packed-compressed" / "model.safetensors", compressed=True)


if __name__ == "__main__":
    main()

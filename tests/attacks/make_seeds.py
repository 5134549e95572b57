"""Writes seeds/: sound models of a few kilobytes, each by the library that owns its format, where there is one.

    PYTHONPATH=tests/unit python tests/attacks/make_seeds.py      needs gguf, safetensors and torch

The golden folders (tests/golden, written by Transformers) are seeds too. What is in seeds/ is committed: run this only
to add a seed. A folder is a model; one that holds a single file stands for that file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import meta_samples as meta
import numpy as np
import torch
from gguf_samples import write_model
from safetensors.numpy import save_file
from test_text_sentencepiece import SAMPLES, message
from test_text_sentencepiece import model as sentencepiece_model

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


def _hugging_face_in_shards(folder: Path) -> None:
    """A Llama of one layer in two shards with an index, and SentencePiece's tokenizer.model."""
    folder.mkdir()
    layer, hidden, inner = "model.layers.0.", 16, 32
    shapes = {f"{layer}self_attn.{part}_proj": (rows, hidden) for part, rows in (("q", 16), ("k", 8), ("v", 8))}
    shapes |= {f"{layer}self_attn.o_proj": (hidden, hidden), f"{layer}mlp.down_proj": (hidden, inner)}
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
    (folder / "config.json").write_text(json.dumps(LLAMA))
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
    _gguf_of_many_types(SEEDS / "gguf-types")
    for name, projections, arch in (("gguf-i2s", "I2_S", "bitnet-b1.58"), ("gguf-groups", "Q2_0", "bitnet-b1.58")):
        (SEEDS / name).mkdir()
        write_model(SEEDS / name / "model.gguf", GOLDEN / "bitnet-packed", arch, projections, "BF16")
    for name, source in (("packed", GOLDEN / "bitnet-packed"), ("packed-groups", SEEDS / "gguf-groups/model.gguf")):
        (SEEDS / name).mkdir()
        convert(source, SEEDS / name / "model.safetensors")
    (SEEDS / "packed-compressed").mkdir()
    convert(SEEDS / "hf-shards", SEEDS / "packed-compressed" / "model.safetensors", compressed=True)


if __name__ == "__main__":
    main()

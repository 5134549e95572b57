"""Tiny models of DeepGrove's Maple: a folder as it was published, in bfloat16, and GGUF files as llama.cpp has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tiny_folders import bfloat16, safetensors_bytes

from bitnet_inference.formats.floats import to_bfloat16

HIDDEN, INNER, HEADS, KEYS, DIM, EXPERTS, LAYERS, VOCAB = 256, 256, 4, 2, 64, 8, 4, 300
IDS = [131, 7, 250, 12, 99, 45, 3, 201, 77, 180, 64, 28]
CONFIG: dict[str, Any] = {
    "architectures": ["MapleForCausalLM"],
    "model_type": "maple",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,  # which nothing has
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 256,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "num_shared_experts": 0,
    "norm_topk_prob": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "nope_on_global_attention": True,
    "tie_word_embeddings": False,
}
_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
}  # fmt: skip
_WHOLE = {"token_embd": "model.word_embeddings", "output_norm": "model.norm", "output": "lm_head"}
_TQ2_0 = gguf.GGMLQuantizationType.TQ2_0


def tensors() -> dict[str, NDArray[np.float32]]:
    """The weights, which bfloat16 holds exactly: by a generator whose numbers no release of NumPy changes."""
    random = np.random.RandomState(0)

    def ternary(rows: int, columns: int, size: float = 0.08) -> NDArray[Any]:
        return random.randint(-1, 2, (rows, columns)) * _rounded(random.uniform(0.5, 1.5, (rows, 1)) * size)

    found = {f"{_WHOLE['token_embd']}.weight": random.normal(0, 1, (VOCAB, HIDDEN))}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            found[f"{at}{name}.weight"] = random.normal(1, 0.1, size)
        for name, rows in (("q", HEADS), ("k", KEYS), ("v", KEYS)):
            found[f"{at}self_attn.{name}_proj.weight"] = ternary(rows * DIM, HIDDEN)
        found[f"{at}self_attn.o_proj.weight"] = ternary(HIDDEN, HEADS * DIM, 0.012)
        found |= {f"{at}self_attn.{name}_norm.weight": random.normal(1, 0.1, DIM) for name in "qk"}
        found[f"{at}mlp.gate.weight"] = random.normal(0, 0.5, (EXPERTS, HIDDEN))
        for expert in range(EXPERTS):
            for name, rows, size in (("gate", INNER, 0.3), ("up", INNER, 0.3), ("down", HIDDEN, 0.006)):
                found[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = ternary(rows, HIDDEN, size)
    found["model.norm.weight"] = random.normal(1, 0.1, HIDDEN)
    found["lm_head.weight"] = random.normal(0, 0.08, (VOCAB, HIDDEN))
    return {name: _rounded(values) for name, values in found.items()}


def _rounded(values: NDArray[Any]) -> NDArray[np.float32]:
    return (to_bfloat16(values.astype(np.float32)).astype(np.uint32) << 16).view(np.float32)


def write_folder(folder: Path, weights: dict[str, NDArray[np.float32]] | None = None, **changes: Any) -> Path:
    """The folder, with other values in its config.json; None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    bits = {name: bfloat16(values) for name, values in (weights or tensors()).items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(bits))
    return folder


def write_file(
    path: Path,
    kind: str = "tq2_0",
    weights: dict[str, NDArray[np.float32]] | None = None,
    *,
    stacked: bool = True,
    **changes: Any,
) -> Path:
    """A GGUF file: projections in TQ2_0 or F32, experts `stacked` or as older files have them, and other metadata."""
    weights, writer = weights or tensors(), gguf.GGUFWriter(path, "maple")
    for key, value in (_metadata() | changes).items():
        _add(writer, f"maple.{key}", value)
    writer.add_tokenizer_model("none")
    for own, name in _WHOLE.items():
        writer.add_tensor(f"{own}.weight", weights[f"{name}.weight"])
    for layer in range(LAYERS):
        own, at = f"blk.{layer}.", f"model.layers.{layer}."
        for part, name in _NAMES.items():
            _put(writer, f"{own}{part}.weight", weights[f"{at}{name}.weight"], kind)
        for part in ("gate", "up", "down"):
            each = [weights[f"{at}mlp.experts.{expert}.{part}_proj.weight"] for expert in range(EXPERTS)]
            if stacked:
                _put(writer, f"{own}ffn_{part}_exps.weight", np.stack(each), kind)
            for expert, matrix in enumerate([] if stacked else each):
                _put(writer, f"{own}ffn_{part}.{expert}.weight", matrix, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "block_count": LAYERS,
        "context_length": 256,
        "embedding_length": HIDDEN,
        "feed_forward_length": 4096,
        "expert_feed_forward_length": INNER,
        "expert_count": EXPERTS,
        "expert_used_count": 3,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KEYS,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, True, False],
        "rope.freq_base": 10000.0,
        "rope.dimension_count": DIM // 2,
        "swiglu_clamp_exp": [7.0] * LAYERS,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _put(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: str) -> None:
    if kind == "f32" or values.ndim == 1 or "gate_inp" in name:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, _TQ2_0), raw_dtype=_TQ2_0)

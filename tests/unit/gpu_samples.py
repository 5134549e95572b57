"""Checkpoints of Microsoft's GPU code, a few kilobytes each, and Hugging Face's folder of the same model.

The packing is written from its description, a weight at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from meta_samples import torch_bytes
from numpy.typing import NDArray
from tiny_folders import OFFLINE, Folder, bfloat16, codes_of

from bitnet_inference.ternary import pack_quarters

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 64, 96, 4, 2, 16, 2, 544
CONFIG = {
    "architectures": ["BitNetForCausalLM"], "model_type": "bitnet", "hidden_act": "relu2", "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "quantization_config": OFFLINE,
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
VECTORS = {
    "input_layernorm": ("attention_norm", HIDDEN), "post_attention_layernorm": ("ffn_norm", HIDDEN),
    "self_attn.attn_sub_norm": ("attention.attn_sub_norm", HEADS * DIM),
    "mlp.ffn_sub_norm": ("feed_forward.ffn_sub_norm", INNER),
}  # fmt: skip
STACKS = {
    "attention.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",), "feed_forward.w13": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.w2": ("mlp.down_proj",),
}  # fmt: skip


def codes(layer: int, matrix: str) -> NDArray[np.int8]:
    """The ternary values of a matrix, in Hugging Face's order of rows."""
    return codes_of(MATRICES[matrix], 100 * layer + list(MATRICES).index(matrix))


def scale(layer: int, matrix: str) -> float:
    """Its scale, which is different for each and a bfloat16."""
    return (1 + list(MATRICES).index(matrix) + 8 * layer) / 16


def vector(seed: int, *shape: int) -> NDArray[np.uint16]:
    """Random floats, as bfloat16."""
    values = np.random.default_rng(seed).normal(1 if len(shape) == 1 else 0, 0.5, shape).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def hf_folder() -> Folder:
    """The model for Hugging Face's reader."""
    tensors: dict[str, NDArray[Any]] = {
        "model.embed_tokens.weight": vector(1, VOCAB, HIDDEN), "model.norm.weight": vector(2, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for own, (_, size) in VECTORS.items():
            tensors[f"{at}{own}.weight"] = vector(10 * layer + size, size)
        for own in MATRICES:
            tensors[f"{at}{own}.weight"] = pack_quarters(codes(layer, own))
            tensors[f"{at}{own}.weight_scale"] = bfloat16([scale(layer, own)])
    return Folder(CONFIG, tensors)


def in_pairs(rows: NDArray[Any]) -> NDArray[Any]:
    """The rows of a head in Meta's order: features j and j + DIM / 2 are neighbours."""
    order = [head + half + j for head in range(0, len(rows), DIM) for j in range(DIM // 2) for half in (0, DIM // 2)]
    return rows[order]


def stacked(layer: int, stack: str, value: Any) -> NDArray[Any]:
    """What `value(layer, matrix)` gives for the matrices of a stack, one below the other."""
    parts = [value(layer, own) for own in STACKS[stack]]
    if stack == "attention.wqkv":
        parts[:2] = map(in_pairs, parts[:2])
    return np.concatenate(parts)


def packed(weights: NDArray[np.int8]) -> NDArray[np.int8]:
    """int8 [out, in / 4]: tiles of 16 by 32, four codes a byte, and the codes of each 32-bit word interleaved."""
    num_rows, num_columns = weights.shape
    data = bytearray()
    for top in range(0, num_rows, 16):
        for left in range(0, num_columns, 32):
            flat = []
            for i in range(16):
                for j in range(32):
                    thread = 2 * i + j // 16
                    row, column = (thread // 16) * 8 + thread % 8, j % 16 + 16 * ((thread % 16) // 8)
                    flat.append(int(weights[top + row, left + column]) + 2)
            for begin in range(0, len(flat), 16):
                # The value order of a word, from its low bits: 0, 4, 8, 12, 1, 5, 9, 13, ...
                order = [4 * (at % 4) + at // 4 for at in range(16)]
                word = sum(flat[begin + index] << 2 * at for at, index in enumerate(order))
                data += word.to_bytes(4, "little")
    return np.frombuffer(bytes(data), np.int8).reshape(num_rows, num_columns // 4)


def floats(layer: int, matrix: str) -> NDArray[np.uint16]:
    """The dequantised matrix, as bfloat16."""
    return bfloat16(codes(layer, matrix) * np.float32(scale(layer, matrix)))


def gpu_tensors(kind: str = "int2") -> dict[str, NDArray[Any]]:
    """The tensors of model_state_int2.pt, or of model_state_fp16.pt."""
    folder = hf_folder().tensors
    embed = folder["model.embed_tokens.weight"]
    tensors = {"tok_embeddings.weight": embed, "output.weight": embed, "norm.weight": folder["model.norm.weight"]}
    for layer in range(LAYERS):
        for own, (name, _) in VECTORS.items():
            tensors[f"layers.{layer}.{name}.weight"] = folder[f"model.layers.{layer}.{own}.weight"]
        for stack, parts in STACKS.items():
            key = f"layers.{layer}.{stack}.weight"
            if kind == "fp16":
                tensors[key] = stacked(layer, stack, floats)
                continue
            tensors[key] = packed(stacked(layer, stack, codes))
            scales = [scale(layer, own) for own in parts]
            tensors[f"{key}_scale"] = bfloat16([*scales, *[0.0] * (4 - len(scales))])
    return tensors


def write_gpu(path: Path, tensors: dict[str, NDArray[Any]], kind: str = "int2", config: bool = True) -> Path:
    """Write the file, and config.json if wanted; returns the path."""
    path.mkdir(exist_ok=True)
    (path / f"model_state_{kind}.pt").write_bytes(torch_bytes(tensors))
    if config:
        (path / "config.json").write_text(json.dumps(CONFIG))
    return path

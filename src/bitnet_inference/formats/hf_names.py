"""Canonical names (formats/checkpoint.py) as modules and tensors of transformers' BitNet and Llama models."""

from __future__ import annotations

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "mlp_sub_norm": "mlp.ffn_sub_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def module_name(name: str) -> str:
    """The module that owns a canonical name: "layers.3.q" -> "model.layers.3.self_attn.q_proj"."""
    if name in _TOP:
        return _TOP[name]
    _, layer, part, *norm = name.split(".")
    module = f"model.layers.{layer}.{_IN_LAYER[part]}"
    return f"{module}.rms_norm" if norm else module


def is_tolerated(tensor: str) -> bool:
    """Whether a tensor that no model needs may stand in a file all the same: old rotary tables."""
    return tensor.endswith("rotary_emb.inv_freq")

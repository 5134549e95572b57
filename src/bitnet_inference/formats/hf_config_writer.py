"""A ModelConfig as the config.json of a Hugging Face folder, for programs that look up sizes and tokens there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bitnet_inference.formats.checkpoint import ModelConfig, RopeScaling

_GRANITE = ("GraniteForCausalLM", "granite")
_CLASSES = {
    "bitnet": ("BitNetForCausalLM", "bitnet"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "granite": _GRANITE,
    "minicpm": _GRANITE,  # which transformers knows, and computes alike
}
_ACTIVATIONS = {"relu2": "relu2", "silu": "silu", "gelu": "gelu_pytorch_tanh"}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What the file says. Weights and their quantisation are not described: they are no longer in the folder."""
    architecture, model_type = _CLASSES.get(config.family, (None, config.family))
    activation = "hidden_activation" if config.family == "gemma3" else "hidden_act"
    is_multiplied = model_type == _GRANITE[1]
    values = {
        "architectures": architecture and [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        activation: _ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "embedding_multiplier": config.embed_scale if is_multiplied else None,
        "attention_multiplier": config.score_scale if is_multiplied else None,
        "query_pre_attn_scalar": _scalar(config) if not is_multiplied else None,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling and _scaling(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
        "use_cache": True,
    }
    return {key: value for key, value in (values | _local(config)).items() if value is not None}


def _scalar(config: ModelConfig) -> float | None:
    return config.attention_scale and round(config.attention_scale**-2, 6)


def _scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """None for factors of a GGUF file that follow no rule."""
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "factors":
        return None
    names = {"original_max_positions": "original_max_position_embeddings", "kind": "rope_type"}
    return {names.get(key, key): value for key, value in asdict(scaling).items() if key != "factors"}


def _local(config: ModelConfig) -> dict[str, Any]:
    if config.local is None:
        return {}
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {
        "sliding_window": config.local.window,
        "rope_local_base_freq": config.local.rope_theta,
        "layer_types": [kinds[layer in config.local.layers] for layer in range(config.num_layers)],
    }

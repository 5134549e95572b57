"""A ModelConfig as the metadata of a GGUF file (FORMATS 3.4): the way back from gguf_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.gguf_config import ARCHITECTURES, is_misnamed, llama3_factors

ROPE_FACTORS = "rope_freqs.weight"
_PREFERRED = ("bitnet-b1.58", "bitnet", "llama")


def architecture_of(path: Path, config: ModelConfig) -> str:
    """The `general.architecture` that computes what the model does. Raises Unsupported where there is none."""
    name = _name_of(config)
    if name is None or config.linear_norm:
        extra = "a norm before every projection" if config.linear_norm else f"{config.activation}, sub-norms or none"
        raise Unsupported(f"{path}: no architecture of GGUF has {extra}: it stays in its own format")
    is_plain = config.embed_scale == 1 and config.attention_scale is None and config.local is None
    if config.head_norms or config.post_norms or not is_plain:
        raise Unsupported(f"{path}: GGUF files of the family {config.family} are read only: it stays in its own format")
    if not config.tie_embeddings and not ARCHITECTURES[name].own_head:
        why = f'the architecture "{name}" takes the embeddings for its head, the model has another one'
        raise Unsupported(f"{path}: {why}: it stays in its own format")
    if is_misnamed({"general.architecture": name}, config.vocab_size):
        why = f"SiLU with {config.vocab_size} tokens would be read as relu2, for converters misname such models"
        raise Unsupported(f"{path}: {why}: it stays in its own format")
    return name


def describe(path: Path, config: ModelConfig) -> dict[str, Any]:
    """The metadata but for the tokenizer's. Raises Unsupported as architecture_of does."""
    name = architecture_of(path, config)
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        sizes |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.pooling is not None:
        sizes["pooling_type"] = {"mean": 1, "last": 3}[config.pooling]
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_scaling.factor)}
    for key, value in sizes.items():
        if isinstance(value, float) and not 1e-37 < value < 1e38:
            raise Unsupported(f"{path}: {key} is {value:g}, which does not fit float32: it stays in its own format")
    general = {"general.architecture": name, "general.type": "model", "general.name": path.resolve().name}
    return {**general, "general.quantization_version": 2, **{f"{name}.{key}": value for key, value in sizes.items()}}


def rope_factors(config: ModelConfig) -> NDArray[np.float32] | None:
    """What a tensor of its own divides rotary frequencies by; None where they are divided alike, or not at all."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "linear":
        return None
    factors = scaling.factors or llama3_factors(scaling, config.rope_theta, config.head_dim)
    return np.array(factors, np.float32)


def _name_of(config: ModelConfig) -> str | None:
    wanted = (config.activation, config.sub_norms)
    kinds = ((name, ARCHITECTURES[name]) for name in _PREFERRED)
    return next((name for name, kind in kinds if (kind.activation, kind.sub_norms) == wanted), None)

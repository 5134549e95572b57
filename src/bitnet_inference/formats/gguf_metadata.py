"""A ModelConfig as the metadata of a GGUF file: the way back from gguf_config."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.floats import FloatName, rounded
from bitnet_inference.formats.gguf_config import (
    ARCHITECTURES,
    GEMMA_PERIOD,
    MULTIPLIERS,
    SCORES,
    Architecture,
    gemma_scale,
    is_misnamed,
    llama3_factors,
)
from bitnet_inference.formats.yarn import usual_original, yarn_attention

ROPE_FACTORS = "rope_freqs.weight"
_STAYS = "it stays in its own format"
_TABLES: tuple[FloatName, ...] = ("float32", "float16", "bfloat16")  # dtypes to which Gemma's factor is rounded
_PREFERRED = ("bitnet-b1.58", "bitnet", "llama", "qwen2", "qwen3", "gemma3")
_MULTIPLIED = "granite"  # of "minicpm" older versions of llama.cpp do not read the multipliers


def architecture_of(path: Path, config: ModelConfig) -> str:
    """The `general.architecture` that computes what the model does. Raises Unsupported where there is none."""
    name = _name_of(config)
    if name is None:
        what = f"{config.activation} with such norms{' and biases' if config.qkv_bias else ''}"
        raise Unsupported(f"{path}: no architecture of GGUF has {what}: {_STAYS}")
    if why := _no_place(config, name):
        raise Unsupported(f"{path}: {why}: {_STAYS}")
    if is_misnamed({"general.architecture": name}, config.vocab_size):
        why = f"SiLU with {config.vocab_size} tokens would be read as relu2, for converters misname such models"
        raise Unsupported(f"{path}: {why}: {_STAYS}")
    return name


def _no_place(config: ModelConfig, name: str) -> str:
    """What the model has and a file of this architecture cannot say; empty where there is nothing."""
    kind = ARCHITECTURES[name]
    if config.linear_norm and not (kind.head_norms and config.linear_norm_eps == config.norm_eps):
        return f'the architecture "{name}" has no place for a norm before every projection, or for its own epsilon'
    if not config.tie_embeddings and not kind.own_head:
        return f'the architecture "{name}" takes the embeddings for its head, the model has another one'
    if kind.multiplied:
        return "" if config.local is None else f'in "{name}" no layer sees a window only'
    default = (1 / math.sqrt(config.head_dim)) if not kind.gemma else _gemma_scale(config)
    if not math.isclose(config.score_scale, default, rel_tol=1e-9) and not _original_of_yarn(config):
        if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
            return f'its rotations are scaled by yarn, with other numbers than those that "{name}" has a place for'
        return f'scores of attention are multiplied by {config.score_scale:g}, those of "{name}" by {default:g}'
    scales = {float(rounded(np.float32(math.sqrt(config.hidden_size)), dtype)) for dtype in _TABLES}
    if config.embed_scale not in (scales if kind.gemma else {1.0}):
        return f'embeddings are multiplied by {config.embed_scale:g}, which "{name}" does not do'
    if config.local is not None and not (kind.gemma and _period(config)):
        return f'in "{name}" other layers see a window only than in the model'
    return ""


def _original_of_yarn(config: ModelConfig) -> int | None:
    """For how many positions a model with yarn was trained first, where keys say all of it; None for others."""
    scaling, theta = config.rope_scaling, config.rope_theta
    if scaling is None or scaling.kind != "factors" or config.local is not None or theta <= 1:
        return None
    if not math.isclose(config.score_scale, yarn_attention(scaling.factor) ** 2 / math.sqrt(config.head_dim)):
        return None
    return usual_original(scaling.factors, scaling.factor, theta, config.head_dim, config.max_positions)


def _gemma_scale(config: ModelConfig) -> float:
    said = gemma_scale(config.num_layers, config.hidden_size / config.num_heads)
    return 1 / math.sqrt(config.head_dim) if said is None else said


def _period(config: ModelConfig) -> int:
    """Every how many layers one is no local one; 0 where there is no such number."""
    every, local = range(config.num_layers), config.local.layers if config.local else ()
    periods = (GEMMA_PERIOD, *range(2, config.num_layers + 2))
    return next((each for each in periods if local == tuple(at for at in every if (at + 1) % each)), 0)


def describe(path: Path, config: ModelConfig, title: str) -> dict[str, Any]:
    """The metadata but for the tokenizer's, of a model of that name. Raises Unsupported as architecture_of does."""
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
    if config.local is not None:
        sizes |= {"attention.sliding_window": config.local.window, "rope.freq_base_swa": config.local.rope_theta}
        sizes["attention.sliding_window_pattern"] = _period(config)
    if ARCHITECTURES[name].multiplied:
        sizes |= _multipliers(config)
    if config.pooling is not None:
        sizes["pooling_type"] = {"mean": 1, "last": 3}[config.pooling]
    original = _original_of_yarn(config)
    if config.rope_scaling is not None and (original or config.rope_scaling.kind == "linear"):
        sizes["rope.scaling.type"] = "yarn" if original else "linear"
        sizes["rope.scaling.factor"] = float(config.rope_scaling.factor)
    if original:
        sizes["rope.scaling.original_context_length"] = original
    for key, value in sizes.items():
        if isinstance(value, float) and not 1e-37 < value < 1e38:
            raise Unsupported(f"{path}: {key} is {value:g}, which does not fit float32: it stays in its own format")
    general = {"general.architecture": name, "general.type": "model", "general.name": title}
    return {**general, "general.quantization_version": 2, **{f"{name}.{key}": value for key, value in sizes.items()}}


def _multipliers(config: ModelConfig) -> dict[str, float]:
    """By the keys of an architecture that has them; all but that of embeddings are in norms and their epsilon."""
    return dict(zip(MULTIPLIERS, (config.embed_scale, 1.0, 1.0), strict=True)) | {SCORES: config.score_scale}


def rope_factors(config: ModelConfig) -> NDArray[np.float32] | None:
    """What a tensor of its own divides rotary frequencies by; None where keys say how, or they stay as they are."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "linear" or _original_of_yarn(config):
        return None
    factors = scaling.factors or llama3_factors(scaling, config.rope_theta, config.head_dim)
    return np.array(factors, np.float32)


def _name_of(config: ModelConfig) -> str | None:
    if config.family in ARCHITECTURES and ARCHITECTURES[config.family].multiplied:
        return _MULTIPLIED

    def parts(kind: Architecture) -> tuple[object, ...]:
        return kind.activation, kind.sub_norms, kind.head_norms, kind.gemma, kind.qkv_bias

    wanted = (config.activation, config.sub_norms, config.head_norms, config.post_norms, config.qkv_bias)
    return next((name for name in _PREFERRED if parts(ARCHITECTURES[name]) == wanted), None)

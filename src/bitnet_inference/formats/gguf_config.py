"""The metadata of a GGUF file as a ModelConfig."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Activation, LocalLayers, ModelConfig, Pooling, RopeScaling
from bitnet_inference.formats.experts import gguf_experts, nope_layers
from bitnet_inference.formats.json_files import Fields, shown
from bitnet_inference.formats.multipliers import Multipliers, usual_multipliers
from bitnet_inference.formats.sizes import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
)
from bitnet_inference.formats.yarn import LONG_TEXTS, sharpened, yarn_attention, yarn_factors

_LLAMA3_VOCAB = 128256  # the vocabulary of Microsoft's models; 1bitLLM's have 32,000 tokens


@dataclass(frozen=True)
class Architecture:
    """What a `general.architecture` means. `permuted`: rows of q and k stand in adjacent pairs; `own_head`: a head
    that the file holds counts; `gemma`: norms behind attention and MLP, scaled embeddings, local layers; `multiplied`:
    keys say what embeddings, residual and logits are multiplied by, and scores; `experts`: layers have several MLPs;
    `nope`: layers without a window are not rotated."""

    name: str
    activation: Activation
    sub_norms: bool
    permuted: bool
    own_head: bool
    head_norms: bool = False
    qkv_bias: bool = False
    gemma: bool = False
    multiplied: bool = False
    experts: bool = False
    nope: bool = False


ARCHITECTURES = {
    "bitnet": Architecture("bitnet", "silu", sub_norms=True, permuted=False, own_head=False),
    "bitnet-25": Architecture("bitnet", "relu2", sub_norms=True, permuted=False, own_head=False),
    "bitnet-b1.58": Architecture("bitnet", "relu2", sub_norms=True, permuted=False, own_head=False),
    "llama": Architecture("llama", "silu", sub_norms=False, permuted=True, own_head=True),
    "qwen2": Architecture("qwen2", "silu", sub_norms=False, permuted=False, own_head=True, qkv_bias=True),
    "qwen3": Architecture("qwen3", "silu", sub_norms=False, permuted=False, own_head=True, head_norms=True),
    "qwen3moe": Architecture(
        "qwen3moe", "silu", sub_norms=False, permuted=False, own_head=True, head_norms=True, experts=True
    ),
    "maple": Architecture(
        "maple", "silu7", sub_norms=False, permuted=False, own_head=True, head_norms=True, experts=True, nope=True
    ),
    "gemma3": Architecture(
        "gemma3", "gelu", sub_norms=False, permuted=False, own_head=True, head_norms=True, gemma=True
    ),
    "minicpm": Architecture("minicpm", "silu", sub_norms=False, permuted=True, own_head=True, multiplied=True),
    "granite": Architecture("granite", "silu", sub_norms=False, permuted=True, own_head=True, multiplied=True),
}
MULTIPLIERS, SCORES = ("embedding_scale", "residual_scale", "logit_scale"), "attention.scale"
SHORT_FACTORS = "rope_factors_short.weight"  # the tensor of longrope for short texts
_POOLINGS: dict[int, Pooling | None] = {0: None, 1: "mean", 3: "last"}
_ROTATED = "rope.dimension_count"
_INNER_OF_EXPERTS = "expert_feed_forward_length"
_PER_LAYER = (_INNER_OF_EXPERTS, "feed_forward_length", "attention.head_count", "attention.head_count_kv")
_GEMMA_27B_LAYERS = 62  # whose scores are divided by the root of hidden_size / num_heads
GEMMA_PERIOD, GEMMA_LOCAL_THETA = 6, 10000.0  # where a file does not say them: every sixth layer is no local one


def read_architecture(path: Path, metadata: Mapping[str, Any]) -> Architecture:
    """The architecture of a file; raises FormatError where it names none, Unsupported for others."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise FormatError(path, "general.architecture", f"{shown(name)} is no name: download the file again")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise Unsupported(f"{path}: the architecture {shown(name)} is not supported: use one of {known}")
    return ARCHITECTURES[name]


def is_misnamed(metadata: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether "bitnet" stands for a model that needs relu2: converters give that name to Microsoft's models too."""
    return metadata.get("general.architecture") == "bitnet" and vocab_size == _LLAMA3_VOCAB


def is_longrope(metadata: Mapping[str, Any]) -> bool:
    """Whether rotary factors are those of longrope, of which short texts have others than long ones."""
    kind = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type")
    return isinstance(kind, str) and kind == "longrope"  # an array compares item by item


def read_multipliers(path: Path, metadata: Mapping[str, Any], config: ModelConfig) -> Multipliers:
    """What the file says of embeddings, residual and logits beside its ModelConfig; a 0 says nothing."""
    kind = read_architecture(path, metadata)
    if not kind.multiplied:
        return Multipliers()
    fields, usual = _fields(path, metadata), usual_multipliers(kind.name, config.num_layers, config.hidden_size)
    found = {key: fields.positive(key) for key in MULTIPLIERS if _is_set(fields, key)}
    return Multipliers(
        embed=found.get("embedding_scale", usual.embed),
        residual=found.get("residual_scale", usual.residual),
        logits=found.get("logit_scale", usual.logits),
    )


def _fields(path: Path, metadata: Mapping[str, Any]) -> Fields:
    prefix = f"{metadata['general.architecture']}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Fields(path, values | {key: _in_all_layers(path, key, values.get(key)) for key in _PER_LAYER}, prefix)


def read_config(
    path: Path,
    metadata: Mapping[str, Any],
    vocab_size: int,
    tied: bool,
    rope_factors: tuple[float, ...],
    short_factors: tuple[float, ...] = (),
) -> ModelConfig:
    """The ModelConfig of a file with a vocabulary of that size, multipliers aside; `rope_factors` divide the rotary
    frequencies, `short_factors` those of longrope.

    Raises FormatError for values that contradict each other or cannot be, Unsupported for what is not done.
    """
    kind, fields = read_architecture(path, metadata), _fields(path, metadata)
    _check(fields, kind, vocab_size)
    num_heads, num_kv_heads, head_dim, rotary_dim = _heads(fields, kind)
    rope_scaling, sharpness = _scaling(fields, rope_factors, short_factors, head_dim)
    num_layers, hidden_size = fields.size("block_count", MAX_LAYERS), fields.size("embedding_length", MAX_HIDDEN)
    bos_id, eos_ids = _tokens(Fields(path, dict(metadata)), vocab_size)
    config = ModelConfig(
        family=kind.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.size(_INNER_OF_EXPERTS if kind.experts else "feed_forward_length", MAX_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=fields.size("context_length", MAX_POSITIONS),
        activation="relu2" if is_misnamed(metadata, vocab_size) else kind.activation,
        norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.positive("rope.freq_base", 10000.0),
        rope_scaling=rope_scaling,
        tie_embeddings=tied,
        sub_norms=kind.sub_norms,
        post_norms=kind.gemma,
        head_norms=kind.head_norms,
        qkv_bias=kind.qkv_bias,
        attention_scale=_score_scale(fields, kind, num_layers, hidden_size / num_heads, sharpness, head_dim),
        local=_local_layers(fields, num_layers) if kind.gemma else None,
        pooling=_pooling(fields),
        bos_id=bos_id,
        eos_ids=eos_ids,
    )
    return _with_experts(fields, kind, config, rotary_dim) if kind.experts else config


def _tokens(fields: Fields, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The one that begins a text, and those that end it."""
    bos, *ends = (fields.ids(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom"))
    every_end = dict.fromkeys(token for ids in ends for token in ids)
    return next((token for token in bos if token < vocab_size), None), tuple(t for t in every_end if t < vocab_size)


def _check(fields: Fields, kind: Architecture, vocab_size: int) -> None:
    if not 1 <= vocab_size <= MAX_VOCAB:
        raise FormatError(
            fields.path, "token_embd.weight", f"{vocab_size} rows, not 1 to {MAX_VOCAB}: download it again"
        )
    if not fields.flag("attention.causal", True):
        raise Unsupported(f"{fields.path}: attention.causal is false: tokens cannot look ahead: use another model")
    if kind.name == "granite" and not fields.flag("rope.scaling.finetuned", True):  # elsewhere the key says nothing
        why = "rope.scaling.finetuned is false: models without rotations are not supported"
        raise Unsupported(f"{fields.path}: {why}: use another model")


def _in_all_layers(path: Path, key: str, value: Any) -> Any:
    """A size for which a file may have a list, one for each layer; raises Unsupported where they differ."""
    if not isinstance(value, np.ndarray) or not len(value):
        return value
    if (value != value[0]).any():
        raise Unsupported(f"{path}: {key} differs from layer to layer: use another model")
    return value[0].item()


def _score_scale(
    fields: Fields, kind: Architecture, num_layers: int, features_a_head: float, sharpness: float, head_dim: int
) -> float | None:
    if kind.multiplied and _is_set(fields, SCORES):
        return sharpness * sharpness * fields.positive(SCORES)
    if not kind.gemma:
        return sharpened(sharpness, head_dim)
    if sharpness != 1.0:
        raise Unsupported(f"{fields.path}: rope.scaling.type yarn is not supported for {kind.name}: use another model")
    return gemma_scale(num_layers, features_a_head)


def gemma_scale(num_layers: int, features_a_head: float) -> float | None:
    """What scores are multiplied by, where it is not 1 / sqrt(head_dim): files of Gemma 3 say nothing of it."""
    return features_a_head**-0.5 if num_layers == _GEMMA_27B_LAYERS else None


def _local_layers(fields: Fields, num_layers: int) -> LocalLayers | None:
    """All but every sixth layer, where the file names a window; or those that a list of flags says."""
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if _is_set(fields, key):
            raise Unsupported(f"{fields.path}: {key}: capped logits and scores are not supported: use another model")
    if not _is_set(fields, "attention.sliding_window"):
        return None
    key = "attention.sliding_window_pattern"
    flags = fields.values.get(key)
    if isinstance(flags, np.ndarray):
        if flags.dtype != np.bool_ or len(flags) != num_layers:
            raise fields.wrong(key, f"is neither a number nor a list of {num_layers} flags: correct it")
        layers = tuple(np.flatnonzero(flags).tolist())
    else:
        period = fields.size(key, MAX_LAYERS, GEMMA_PERIOD)
        layers = tuple(layer for layer in range(num_layers) if (layer + 1) % period)
    window = fields.size("attention.sliding_window", MAX_POSITIONS)
    theta = fields.positive("rope.freq_base_swa", GEMMA_LOCAL_THETA)
    return LocalLayers(layers=layers, window=window, rope_theta=theta) if layers else None


def _with_experts(fields: Fields, kind: Architecture, config: ModelConfig, rotary_dim: int | None) -> ModelConfig:
    config = replace(config, experts=gguf_experts(fields, config.num_layers))
    return _without_some_rotations(fields, config, rotary_dim) if kind.nope else config


def _without_some_rotations(fields: Fields, config: ModelConfig, rotary_dim: int | None) -> ModelConfig:
    """With windows in the layers that a list of flags says, which alone rotate."""
    if config.rope_scaling is not None:
        raise Unsupported(f"{fields.path}: rope.scaling: scaled rotations of this architecture are not supported")
    clamps = fields.values.get("swiglu_clamp_exp", 7.0)
    if not isinstance(clamps, np.ndarray | float | int) or isinstance(clamps, bool) or np.any(clamps != np.float32(7)):
        raise Unsupported(f"{fields.path}: swiglu_clamp_exp is not 7, which is not supported: use another model")
    key, theta = "attention.sliding_window_pattern", config.rope_theta
    window = fields.size("attention.sliding_window", MAX_POSITIONS)
    local = nope_layers(window, _flags(fields, key, config.num_layers), fields.positive("rope.freq_base_swa", theta))
    return replace(config, local=local, rotary_dim=rotary_dim, plain_global=True)


def _flags(fields: Fields, key: str, num_layers: int) -> list[bool]:
    flags = fields.values.get(key)
    if not isinstance(flags, np.ndarray) or flags.dtype != np.bool_ or len(flags) != num_layers:
        raise fields.wrong(key, f"is not a list of {num_layers} flags: correct it")
    return [bool(flag) for flag in flags]


def _pooling(fields: Fields) -> Pooling | None:
    kind = fields.values.get("pooling_type", 0)
    if type(kind) is not int or kind not in _POOLINGS:
        raise Unsupported(f"{fields.path}: pooling_type {shown(kind)} is not supported: only 0, 1 (mean) and 3 (last)")
    return _POOLINGS[kind]


def _heads(fields: Fields, kind: Architecture) -> tuple[int, int, int, int | None]:
    """How many of queries and of keys, their size, and of how many features of it are rotated, None for all."""
    hidden = fields.size("embedding_length", MAX_HIDDEN)
    num_heads = fields.size("attention.head_count", MAX_HEADS)
    num_kv_heads = fields.size("attention.head_count_kv", MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("attention.head_count_kv", f"does not divide head_count, {num_heads}: download it again")
    if "attention.key_length" not in fields and hidden % num_heads:
        raise fields.wrong("embedding_length", f"is no multiple of head_count, {num_heads}: download it again")
    head_dim = fields.size("attention.key_length", MAX_HEAD_DIM, max(1, hidden // num_heads))
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise fields.wrong("attention.key_length", f"makes heads of {head_dim} features: download it again")
    rotary_dim = fields.size(_ROTATED, MAX_HEAD_DIM, head_dim)
    is_partial = kind.nope and rotary_dim % 2 == 0 and rotary_dim < head_dim
    for key in ("attention.value_length", *(() if is_partial else (_ROTATED,))):
        if fields.size(key, MAX_HEAD_DIM, head_dim) != head_dim:
            raise Unsupported(
                f"{fields.path}: {key} is not {head_dim}, the size of a head: only whole heads are rotated"
            )
    return num_heads, num_kv_heads, head_dim, rotary_dim if is_partial else None


def _scaling(
    fields: Fields, factors: tuple[float, ...], short_factors: tuple[float, ...], head_dim: int
) -> tuple[RopeScaling | None, float]:
    """How frequencies are scaled, and what cosine and sine are multiplied by."""
    if short_factors:
        return _longrope(fields, short_factors, head_dim), 1.0
    kind = fields.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        others = f"only linear, yarn, and longrope with the tensor {SHORT_FACTORS}"
        raise Unsupported(f"{fields.path}: rope.scaling.type {shown(kind)} is not supported: {others}")
    _refuse_sharpened(fields)
    theta, factor = fields.positive("rope.freq_base", 10000.0), _factor(fields) if kind != "none" else None
    if not factors:
        if kind == "yarn" and factor is not None:
            return _yarn(fields, factor, theta, head_dim)
        return RopeScaling(kind="linear", factor=factor) if factor else None, 1.0
    if factor not in (None, 1.0):
        raise Unsupported(f"{fields.path}: rope.scaling.factor beside rope_freqs.weight is not supported: leave it out")
    found = _of_factors(fields, "rope_freqs.weight", factors, head_dim)
    known = (scaling for scaling in _LLAMA3 if _is_close(factors, llama3_factors(scaling, theta, head_dim)))
    return next(known, found), 1.0


def _longrope(fields: Fields, factors: tuple[float, ...], head_dim: int) -> RopeScaling:
    """By the factors of short texts, which hold where no text is longer than those of the first training."""
    _refuse_sharpened(fields)
    if _factor(fields) not in (None, 1.0):  # llama.cpp stretches by both
        raise Unsupported(f"{fields.path}: rope.scaling.factor beside longrope is not supported: leave it out")
    length = fields.size("context_length", MAX_POSITIONS)
    if length > fields.size("rope.scaling.original_context_length", MAX_POSITIONS, length):
        raise Unsupported(f"{fields.path}: rope.scaling.type: {LONG_TEXTS}: use another model")
    return _of_factors(fields, SHORT_FACTORS, factors, head_dim)


def _of_factors(fields: Fields, name: str, factors: tuple[float, ...], head_dim: int) -> RopeScaling:
    if len(factors) != head_dim // 2 or not all(0 < factor < 1e9 for factor in factors):
        raise FormatError(fields.path, name, f"are no {head_dim // 2} factors: download it again")
    return RopeScaling(kind="factors", factor=max(factors), factors=factors)


def _refuse_sharpened(fields: Fields) -> None:
    if fields.positive("rope.scaling.attn_factor", 1.0) != 1:
        raise Unsupported(
            f"{fields.path}: rope.scaling.attn_factor is not 1, which is not supported: use another model"
        )


def _factor(fields: Fields) -> float | None:
    """By how much contexts are stretched: as in llama.cpp without a type too, and under an older name."""
    key = "rope.scaling.factor" if "rope.scaling.factor" in fields else "rope.scale_linear"
    return fields.positive(key) if _is_set(fields, key) else None


def _yarn(fields: Fields, factor: float, theta: float, head_dim: int) -> tuple[RopeScaling, float]:
    """As llama.cpp computes it."""
    for key, usual in (("rope.scaling.yarn_ext_factor", (-1, 1)), ("rope.scaling.yarn_log_multiplier", (0,))):
        value = fields.values.get(key, usual[0])
        if type(value) not in (int, float) or value not in usual:
            raise Unsupported(f"{fields.path}: {key} is not {usual[-1]}, which is not supported: use another model")
    if theta <= 1:
        raise fields.wrong("rope.freq_base", "is not above 1: correct it")
    original = fields.size(
        "rope.scaling.original_context_length", MAX_POSITIONS, fields.size("context_length", MAX_POSITIONS)
    )
    fast, slow = (
        fields.positive(f"rope.scaling.yarn_beta_{key}", value) for key, value in (("fast", 32.0), ("slow", 1.0))
    )
    factors = yarn_factors(factor, original, theta, head_dim, beta_fast=fast, beta_slow=slow)
    sharpness = fields.positive("rope.scaling.yarn_attn_factor", 1.0) * yarn_attention(factor)
    return RopeScaling(kind="factors", factor=factor, factors=factors), sharpness


def _is_set(fields: Fields, key: str) -> bool:
    """Whether a value stands there, and not 0, which means none."""
    value = fields.values.get(key)
    return value is not None and not (type(value) in (int, float) and value == 0)


# Llama 3.1 and 3.2. Files hold their factors rounded to float32; the rule itself gives the frequencies to the last bit.
_LLAMA3 = tuple(RopeScaling(kind="llama3", factor=factor) for factor in (8.0, 32.0))


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> list[float]:
    """What the rule of Llama 3.1 divides the frequencies by."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    factors = []
    for index in range(head_dim // 2):
        turns = scaling.original_max_positions * theta ** (-2 * index / head_dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return factors


def _is_close(factors: tuple[float, ...], others: list[float]) -> bool:
    return all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(factors, others, strict=True))

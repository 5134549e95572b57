"""config.json of a Hugging Face folder as a ModelConfig. Defaults are those of transformers' configuration classes."""

from __future__ import annotations

import numpy as np

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Activation, LocalLayers, ModelConfig, RopeScaling
from bitnet_inference.formats.experts import nope_layers, read_experts
from bitnet_inference.formats.hf_families import Family, find_family
from bitnet_inference.formats.hf_quantization import Quantization
from bitnet_inference.formats.json_files import Fields, shown
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

_ORIGINAL = "original_max_position_embeddings"
_PARTIAL, _NOPE = "partial_rotary_factor", "nope_on_global_attention"
_LOCAL, _FULL = "sliding_attention", "full_attention"  # kinds of layers


_ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2", "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}


def read_config(fields: Fields, quantization: Quantization | None, more_eos_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The ModelConfig of a config.json; `more_eos_ids` come from generation_config.json.

    Raises FormatError for values that contradict each other or cannot be, Unsupported for other architectures and for
    biases, activations and rotary embeddings that the decoder does not have.
    """
    family = find_family(fields)
    _refuse_extras(fields, family)
    vocab_size, num_layers = fields.size("vocab_size", MAX_VOCAB), fields.size("num_hidden_layers", MAX_LAYERS)
    num_heads, num_kv_heads, head_dim = _heads(fields, family.head_dim)
    max_positions = fields.size("max_position_embeddings", MAX_POSITIONS, family.max_positions)
    bos_ids = fields.ids("bos_token_id", family.bos_id)
    eos_ids = fields.ids("eos_token_id", None if more_eos_ids else family.eos_id) + more_eos_ids
    theta, scaling, sharpness = _rope(fields, family, max_positions, head_dim)
    inner = "moe_intermediate_size" if family.experts else "intermediate_size"
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size", MAX_HIDDEN),
        intermediate_size=fields.size(inner, MAX_INTERMEDIATE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        activation=_activation(fields, family),
        norm_eps=fields.positive("rms_norm_eps", family.norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings", family.tie_embeddings),
        sub_norms=family.sub_norms,
        linear_norm=quantization is not None and quantization.norm,
        linear_norm_eps=1e-6 if quantization is None else quantization.norm_eps,
        post_norms=family.post_norms,
        head_norms=family.head_norms,
        qkv_bias=family.qkv_bias,
        attention_scale=_score_scale(fields, family, sharpness, head_dim),
        local=_layers_with_windows(fields, family, num_layers, theta, scaling, sharpness),
        experts=read_experts(fields, num_layers, family.nope) if family.experts else None,
        rotary_dim=_rotary_dim(fields, head_dim) if family.nope else None,
        plain_global=family.nope and fields.flag(_NOPE, True),
        bos_id=next((token for token in bos_ids if token < vocab_size), None),
        eos_ids=tuple(token for token in dict.fromkeys(eos_ids) if token < vocab_size),
    )


def _refuse_extras(fields: Fields, family: Family) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key) and not family.qkv_bias:  # whose class has neither key, and biases all the same
            why = "linear layers with a bias are not supported in this family: use another model"
            raise Unsupported(f"{fields.path}: {key}: {why}")
    if family.masters and fields.size("input_bits", 32, 8) != 8:
        raise Unsupported(f"{fields.path}: input_bits: only activations of 8 bits are supported")
    has_kinds = family.name in ("qwen2", "qwen3", "qwen3moe")  # for Llama they are nothing
    kinds = fields.strings("layer_types") if has_kinds else None
    windows = {"layer_types": _LOCAL in (kinds or ()), "use_sliding_window": fields.flag("use_sliding_window")}
    for key, is_there in windows.items():
        if is_there:
            raise Unsupported(f"{fields.path}: {key}: windows of this family are not supported: use another model")
    for key, looks_ahead in (("use_bidirectional_attention", True), ("is_causal", False)):
        if fields.flag(key, not looks_ahead) == looks_ahead:
            raise Unsupported(f"{fields.path}: {key}: tokens cannot look ahead: use another model")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if key in fields:
            raise Unsupported(f"{fields.path}: {key}: capped logits and scores are not supported: use another model")
    if not family.nope:
        _refuse_partial(fields)


def _refuse_partial(section: Fields) -> None:
    if section.positive(_PARTIAL, 1.0) != 1:
        raise Unsupported(f"{section.path}: {_PARTIAL}: only whole heads can be rotated")


def _heads(fields: Fields, default_dim: int | None) -> tuple[int, int, int]:
    hidden = fields.size("hidden_size", MAX_HIDDEN)
    num_heads = fields.size("num_attention_heads", MAX_HEADS)
    num_kv_heads = fields.size("num_key_value_heads", MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"does not divide num_attention_heads, {num_heads}: correct one")
    if "head_dim" in fields or default_dim:
        source, head_dim = "head_dim", fields.size("head_dim", MAX_HEAD_DIM, default_dim)
    elif hidden % num_heads:
        raise fields.wrong("hidden_size", f"is no multiple of num_attention_heads, {num_heads}: add head_dim")
    else:
        source, head_dim = "hidden_size", hidden // num_heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        why = f"makes heads of {head_dim} features, not an even number up to {MAX_HEAD_DIM}: correct it"
        raise fields.wrong(source, why)
    return num_heads, num_kv_heads, head_dim


def _score_scale(fields: Fields, family: Family, sharpness: float, head_dim: int) -> float | None:
    if family.attention_multiplier is not None:
        return sharpness * sharpness * fields.positive("attention_multiplier", family.attention_multiplier)
    scalar = family.attention_scalar and fields.positive("query_pre_attn_scalar", family.attention_scalar)
    return sharpened(sharpness, head_dim, scalar)


def _activation(fields: Fields, family: Family) -> Activation:
    name = fields.text(family.activation_key, family.activation)
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise Unsupported(f"{fields.path}: {family.activation_key} {shown(name)} is not supported: only {known}")
    if family.nope and name == "silu":  # whose experts cut what they multiply (modeling_maple.py)
        return "silu7"
    return _ACTIVATIONS[name]


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    section = fields.section("rope_parameters")
    said = section if section is not None and _PARTIAL in section else fields
    rotary_dim = int(head_dim * said.positive(_PARTIAL, 0.5))
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise said.wrong(_PARTIAL, f"rotates {rotary_dim} of {head_dim} features, not an even number: correct it")
    return rotary_dim


def _nope(fields: Fields, num_layers: int, theta: float, scaling: RopeScaling | None) -> LocalLayers | None:
    """Layers with a window, which alone rotate, or all by the same base."""
    if scaling is not None:
        raise Unsupported(f"{fields.path}: rope_scaling: scaled rotations of this family are not supported")
    types = fields.strings("layer_types") or [_LOCAL if (at + 1) % 4 else _FULL for at in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {_LOCAL, _FULL}:
        raise _wrong_layers(fields, num_layers)
    # The model's own code (modeling_maple.py) asks FlashAttention for so many positions beside the token's own; GGUF
    # files are computed with one less, by llama.cpp and here.
    window = fields.size("sliding_window", MAX_POSITIONS, 512) + 1
    return nope_layers(window, [kind == _LOCAL for kind in types], theta)


def _wrong_layers(fields: Fields, num_layers: int) -> FormatError:
    return fields.wrong("layer_types", f"does not say {_LOCAL} or {_FULL} of {num_layers} layers: correct it")


def _rope(fields: Fields, family: Family, max_positions: int, head_dim: int) -> tuple[float, RopeScaling | None, float]:
    """The base, how frequencies are scaled, and what cosine and sine are multiplied by."""
    section = _rope_section(fields, family)
    if family.nope and section is not None:
        section = section.without(_PARTIAL)
    theta = fields.positive("rope_theta", family.rope_theta)
    if section is None or not section.values:
        return theta, None, 1.0
    theta = section.positive("rope_theta", theta)
    # transformers 5: outside of rope_parameters it wins, where they are not for each kind of layer.
    owner = fields if _ORIGINAL in fields and family.local_rope_theta is None else section
    if _rope_type(section) == "yarn":
        return theta, *_yarn(section, owner, theta, max_positions, head_dim)
    if _rope_type(section) in ("longrope", "su"):  # its older name
        return theta, *_longrope(section, owner, max_positions, head_dim)
    return theta, _scaling(section, owner, max_positions), 1.0


def _rope_section(fields: Fields, family: Family) -> Fields | None:
    """What is said of rotations, in layers without a window where there are others, as transformers 5 finds it."""
    scaling, section = fields.section("rope_scaling"), fields.section("rope_parameters")
    if family.local_rope_theta is not None:
        section = _of_full_layers(fields, scaling, section)
    elif scaling is not None and scaling.values:  # replaces rope_parameters
        section = scaling
    if section is not None and any(isinstance(value, dict) for value in section.values.values()):
        raise _not_by_kinds(fields)
    return section


def _of_full_layers(fields: Fields, scaling: Fields | None, section: Fields | None) -> Fields:
    """rope_scaling is added to what rope_parameters say of layers without a window."""
    if section is not None and not {*section.values} <= {_FULL, _LOCAL}:
        raise _not_by_kinds(fields)
    whole = section.section(_FULL) if section is not None else None
    values = (whole.values if whole else {}) | (scaling.values if scaling else {})
    return Fields(fields.path, values, "rope_scaling." if scaling else f"rope_parameters.{_FULL}.")


def _not_by_kinds(fields: Fields) -> Unsupported:
    return Unsupported(
        f"{fields.path}: rope_parameters: not one for each kind of layer is supported: use another model"
    )


def _layers_with_windows(
    fields: Fields, family: Family, num_layers: int, theta: float, scaling: RopeScaling | None, sharpness: float
) -> LocalLayers | None:
    if family.nope:
        return _nope(fields, num_layers, theta, scaling)
    local = _local_layers(fields, family, num_layers) or _windows(fields, family, num_layers, theta, scaling)
    if local is not None and sharpness != 1.0:  # one number multiplies the scores of all layers
        why = "sharpens the scores of the layers without a window alone, which is not supported: use another model"
        raise Unsupported(f"{fields.path}: rope_type yarn {why}")
    return local


def _local_layers(fields: Fields, family: Family, num_layers: int) -> LocalLayers | None:
    """The layers of `layer_types`, or all but every n-th one, that see a window only."""
    if family.local_rope_theta is None:
        return None
    period = fields.size("sliding_window_pattern", MAX_LAYERS, 6)
    types = fields.strings("layer_types") or [_LOCAL if (at + 1) % period else _FULL for at in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {_LOCAL, _FULL}:
        raise _wrong_layers(fields, num_layers)
    theta = fields.positive("rope_local_base_freq", family.local_rope_theta)
    section = fields.section("rope_parameters")
    local = section.section(_LOCAL) if section else None
    if local is not None:
        theta = local.positive("rope_theta", theta)
        if _rope_type(local) == "yarn" or _scaling(local, local, 1) is not None:
            raise Unsupported(f"{fields.path}: rope_parameters: only layers without a window can have scaled rotations")
    layers = tuple(at for at, kind in enumerate(types) if kind == _LOCAL)
    window = fields.size("sliding_window", MAX_POSITIONS, 4096)
    return LocalLayers(layers=layers, window=window, rope_theta=theta) if layers else None


def _windows(
    fields: Fields, family: Family, num_layers: int, theta: float, scaling: RopeScaling | None
) -> LocalLayers | None:
    """All layers where all see a window, as in Mistral; null is none."""
    is_null = "sliding_window" in fields.values and "sliding_window" not in fields
    if family.window is None or is_null:
        return None
    window = fields.size("sliding_window", MAX_POSITIONS, family.window)
    if window >= fields.size("max_position_embeddings", MAX_POSITIONS, family.max_positions):
        return None
    if scaling is not None:
        raise Unsupported(f"{fields.path}: sliding_window: not with scaled rotations: use another model")
    return LocalLayers(layers=tuple(range(num_layers)), window=window, rope_theta=theta)


def _rope_type(section: Fields) -> str:
    return section.text("rope_type", section.text("type", "default"))


def _yarn(section: Fields, owner: Fields, theta: float, max_positions: int, head_dim: int) -> tuple[RopeScaling, float]:
    """`owner` says for how many positions the model was trained first."""
    _refuse_partial(section)
    original = owner.size(_ORIGINAL, MAX_POSITIONS, max_positions)
    factor = section.positive("factor", max_positions / original if _ORIGINAL in owner else None)
    if theta <= 1:
        raise section.wrong("rope_theta", "is not above 1: correct it")
    factors = yarn_factors(
        factor,
        original,
        theta,
        head_dim,
        beta_fast=section.positive("beta_fast", 32.0),
        beta_slow=section.positive("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
    )
    keys = ("mscale", "mscale_all_dim")  # both, and neither of them 0, or they say nothing
    scales = [section.positive(key) for key in keys if section.values.get(key) not in (None, 0)]
    sharpness = section.positive("attention_factor", yarn_attention(factor, *scales if len(scales) == 2 else ()))
    return RopeScaling(kind="factors", factor=factor, factors=factors), sharpness


def _longrope(section: Fields, owner: Fields, max_positions: int, head_dim: int) -> tuple[RopeScaling, float]:
    """The short factors, which hold where no text is longer than those that the model was trained on first."""
    _refuse_partial(section)
    original = owner.size(_ORIGINAL, MAX_POSITIONS, max_positions)
    if max_positions > original or section.positive("factor", 1.0) > 1:  # a factor of 1 keeps no text short
        raise Unsupported(f"{section.path}: rope_type {LONG_TEXTS}: use another model")
    found = section.values.get("short_factor")
    if not isinstance(found, list) or len(found) != head_dim // 2:
        raise section.wrong(
            "short_factor", f"is not a list of {head_dim // 2} numbers, half the size of a head: correct it"
        )
    each = Fields(section.path, {str(at): factor for at, factor in enumerate(found)}, "short_factor.")
    factors = tuple(float(np.float32(each.positive(key))) for key in each.values)  # as transformers and GGUF files
    return RopeScaling(kind="factors", factor=max(factors), factors=factors), section.positive("attention_factor", 1.0)


def _scaling(section: Fields, owner: Fields, max_positions: int) -> RopeScaling | None:
    _refuse_partial(section)
    kind = _rope_type(section)
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=section.positive("factor"))
    if kind != "llama3":
        raise Unsupported(
            f"{section.path}: rope_type {shown(kind)} is not supported: only default, linear, llama3, longrope, yarn"
        )
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if high <= low:
        raise section.wrong("high_freq_factor", f"is not above low_freq_factor, {low}: correct one")
    return RopeScaling(
        kind="llama3",
        factor=section.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=owner.size(_ORIGINAL, MAX_POSITIONS, max_positions),
    )

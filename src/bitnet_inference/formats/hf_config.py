"""config.json of a Hugging Face folder as a ModelConfig. Defaults are those of transformers' configuration classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.checkpoint import ModelConfig, RopeScaling
from bitnet_inference.formats.hf_quantization import Quantization
from bitnet_inference.formats.json_files import Fields, shown

# Far above every model of these families; below what would let a lying file make anyone allocate gigabytes.
_MAX_HIDDEN, _MAX_INTERMEDIATE, _MAX_VOCAB = 1 << 16, 1 << 18, 1 << 21
_MAX_LAYERS, _MAX_HEADS, _MAX_HEAD_DIM, _MAX_POSITIONS = 512, 512, 1024, 1 << 23


@dataclass(frozen=True)
class _Family:
    """What differs between the families that are read here, and the defaults of their configuration classes."""

    name: str
    architecture: str
    activation: str
    norm_eps: float
    rope_theta: float
    bos_id: int
    eos_id: int
    sub_norms: bool


_FAMILIES = (
    _Family("bitnet", "BitNetForCausalLM", "relu2", 1e-5, 500000.0, 128000, 128001, sub_norms=True),
    _Family("llama", "LlamaForCausalLM", "silu", 1e-6, 10000.0, 1, 2, sub_norms=False),
)
_ACTIVATIONS: dict[str, Literal["relu2", "silu"]] = {"relu2": "relu2", "silu": "silu", "swish": "silu"}


def read_config(fields: Fields, quantization: Quantization | None, more_eos_ids: tuple[int, ...] = ()) -> ModelConfig:
    """The ModelConfig of a config.json; `more_eos_ids` come from generation_config.json.

    Raises FormatError for values that contradict each other or cannot be, Unsupported for other architectures and for
    biases, activations and rotary embeddings that the decoder does not have.
    """
    family = _family(fields)
    _refuse_extras(fields)
    vocab_size = fields.size("vocab_size", _MAX_VOCAB)
    num_heads, num_kv_heads, head_dim = _heads(fields)
    max_positions = fields.size("max_position_embeddings", _MAX_POSITIONS, 2048)
    bos_ids = fields.ids("bos_token_id", family.bos_id)
    eos_ids = fields.ids("eos_token_id", family.eos_id) + more_eos_ids
    theta, scaling = _rope(fields, family.rope_theta, max_positions)
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=fields.size("hidden_size", _MAX_HIDDEN),
        intermediate_size=fields.size("intermediate_size", _MAX_INTERMEDIATE),
        num_layers=fields.size("num_hidden_layers", _MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        activation=_activation(fields, family.activation),
        norm_eps=fields.positive("rms_norm_eps", family.norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        sub_norms=family.sub_norms,
        linear_norm=quantization is not None and quantization.norm,
        linear_norm_eps=1e-6 if quantization is None else quantization.norm_eps,
        bos_id=next((token for token in bos_ids if token < vocab_size), None),
        eos_ids=tuple(token for token in dict.fromkeys(eos_ids) if token < vocab_size),
    )


def _family(fields: Fields) -> _Family:
    named = fields.strings("architectures") or ()
    model_type = fields.text("model_type", "")
    for family in _FAMILIES:
        if family.architecture in named or (not named and family.name == model_type):
            if model_type not in ("", family.name):
                raise fields.wrong("model_type", f"contradicts the architecture {family.architecture}: correct it")
            return family
    found = ", ".join(named) or f"model_type {shown(model_type)}"
    known = ", ".join(family.architecture for family in _FAMILIES)
    raise Unsupported(f"{fields.path}: the architecture {shown(found)} is not supported: use one of {known}")


def _refuse_extras(fields: Fields) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key):
            raise Unsupported(f"{fields.path}: {key}: linear layers with a bias are not supported")
    for section in (fields, fields.section("rope_scaling"), fields.section("rope_parameters")):
        if section is not None and section.positive("partial_rotary_factor", 1.0) != 1:
            raise Unsupported(f"{fields.path}: partial_rotary_factor: only whole heads can be rotated")


def _heads(fields: Fields) -> tuple[int, int, int]:
    hidden = fields.size("hidden_size", _MAX_HIDDEN)
    num_heads = fields.size("num_attention_heads", _MAX_HEADS)
    num_kv_heads = fields.size("num_key_value_heads", _MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"does not divide num_attention_heads, {num_heads}: correct one")
    if "head_dim" in fields:
        source, head_dim = "head_dim", fields.size("head_dim", _MAX_HEAD_DIM)
    elif hidden % num_heads:
        raise fields.wrong("hidden_size", f"is no multiple of num_attention_heads, {num_heads}: add head_dim")
    else:
        source, head_dim = "hidden_size", hidden // num_heads
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        why = f"makes heads of {head_dim} features, not an even number up to {_MAX_HEAD_DIM}: correct it"
        raise fields.wrong(source, why)
    return num_heads, num_kv_heads, head_dim


def _activation(fields: Fields, default: str) -> Literal["relu2", "silu"]:
    name = fields.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise Unsupported(f"{fields.path}: hidden_act {shown(name)} is not supported: only {known}")
    return _ACTIVATIONS[name]


def _rope(fields: Fields, default_theta: float, max_positions: int) -> tuple[float, RopeScaling | None]:
    # transformers 5: rope_scaling, where it says anything, replaces rope_parameters; a theta inside wins.
    section = fields.section("rope_scaling")
    if section is None or not section.values:
        section = fields.section("rope_parameters")
    theta = fields.positive("rope_theta", default_theta)
    if section is None or not section.values:
        return theta, None
    if any(isinstance(value, dict) for value in section.values.values()):
        raise Unsupported(f"{fields.path}: rope_parameters: a rotary embedding for each kind of layer is not supported")
    return section.positive("rope_theta", theta), _scaling(section, max_positions)


def _scaling(section: Fields, max_positions: int) -> RopeScaling | None:
    kind = section.text("rope_type", section.text("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=section.positive("factor"))
    if kind != "llama3":
        raise Unsupported(f"{section.path}: rope_type {shown(kind)} is not supported: only default, linear, llama3")
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if high <= low:
        raise section.wrong("high_freq_factor", f"is not above low_freq_factor, {low}: correct one")
    return RopeScaling(
        kind="llama3",
        factor=section.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=section.size("original_max_position_embeddings", _MAX_POSITIONS, max_positions),
    )

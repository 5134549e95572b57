"""The families of Hugging Face folders that are read here, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.json_files import Fields, shown

_OLD_BITNET = {"attn_sub_norm": "self_attn.inner_attn_ln", "mlp_sub_norm": "mlp.ffn_layernorm"}
_GEMMA = {
    "mlp_norm": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: how it is named, the defaults of its configuration class, and how it computes.

    `architectures`: with a head, and those of bare models. `renamed`: modules of a layer by canonical name, where they
    are called otherwise than in Llama. `masters`: matrices are ternarised although no quantization_config says so.
    `one_plus`: norms multiply by 1 + w. `scaled_embeddings`: by the root of the hidden size. `local_rope_theta`: some
    layers are local ones, with this base. `window`: all layers are, with so many positions where config.json is silent.
    `attention_scalar`: scores are divided by its root, not by head_dim's; `attention_multiplier`: they are multiplied
    by it. `activation_key` is the key of config.json. `experts`: layers have several MLPs. `row_scales`: projections
    are -m, 0 and m with an m for each row, although no quantization_config says so. `nope`: layers without a window are
    not rotated, and half of a head in the others, where config.json is silent.
    """

    name: str
    architectures: tuple[str, ...]
    model_type: str
    activation: str
    norm_eps: float
    rope_theta: float
    bos_id: int | None
    eos_id: int | None
    head_dim: int | None = None
    max_positions: int = 2048
    tie_embeddings: bool = False
    activation_key: str = "hidden_act"
    renamed: Mapping[str, str] = field(default_factory=dict)
    sub_norms: bool = False
    masters: bool = False
    head_norms: bool = False
    qkv_bias: bool = False
    post_norms: bool = False
    one_plus: bool = False
    scaled_embeddings: bool = False
    local_rope_theta: float | None = None
    window: int | None = None
    attention_scalar: float | None = None
    attention_multiplier: float | None = None
    experts: bool = False
    row_scales: bool = False
    nope: bool = False


_FAMILIES = (
    Family(
        name="bitnet", architectures=("BitNetForCausalLM",), model_type="bitnet", activation="relu2",
        norm_eps=1e-5, rope_theta=500000.0, bos_id=128000, eos_id=128001, sub_norms=True,
    ),
    Family(  # 1bitLLM's models
        name="bitnet", architectures=("BitnetForCausalLM",), model_type="llama", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=1, eos_id=2, sub_norms=True, masters=True, renamed=_OLD_BITNET,
    ),
    Family(
        name="llama", architectures=("LlamaForCausalLM",), model_type="llama", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=1, eos_id=2,
    ),
    Family(
        name="llama", architectures=("MistralForCausalLM",), model_type="mistral", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=1, eos_id=2, max_positions=131072, window=4096,
    ),
    Family(
        name="qwen2", architectures=("Qwen2ForCausalLM", "Qwen2Model"), model_type="qwen2", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=None, eos_id=None, max_positions=32768, qkv_bias=True,
    ),
    Family(
        name="qwen3", architectures=("Qwen3ForCausalLM", "Qwen3Model"), model_type="qwen3", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=None, eos_id=None, head_dim=128, max_positions=32768,
        head_norms=True,
    ),
    Family(
        name="qwen3moe", architectures=("Qwen3MoeForCausalLM",), model_type="qwen3_moe", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=None, eos_id=None, max_positions=32768, head_norms=True, experts=True,
    ),
    Family(  # DeepGrove's
        name="maple", architectures=("MapleForCausalLM",), model_type="maple", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=None, eos_id=None, head_dim=128, max_positions=131072,
        head_norms=True, experts=True, row_scales=True, nope=True, renamed={"embed": "word_embeddings"},
    ),
    Family(
        name="gemma3", architectures=("Gemma3ForCausalLM", "Gemma3TextModel"), model_type="gemma3_text",
        activation="gelu_pytorch_tanh", activation_key="hidden_activation", norm_eps=1e-6, rope_theta=1000000.0,
        bos_id=2, eos_id=1, head_dim=256, max_positions=131072, tie_embeddings=True, head_norms=True, post_norms=True,
        one_plus=True, scaled_embeddings=True, local_rope_theta=10000.0, attention_scalar=256.0, renamed=_GEMMA,
    ),
    Family(  # BitCPM too; with multipliers
        name="minicpm", architectures=("MiniCPMForCausalLM",), model_type="minicpm", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=1, eos_id=2, tie_embeddings=True,
    ),
    Family(
        name="granite", architectures=("GraniteForCausalLM",), model_type="granite", activation="silu",
        norm_eps=1e-6, rope_theta=10000.0, bos_id=1, eos_id=2, attention_multiplier=1.0,
    ),
)  # fmt: skip


def find_family(fields: Fields) -> Family:
    """The family of a config.json; raises Unsupported for others, FormatError where it contradicts itself."""
    named = fields.strings("architectures") or ()
    model_type = fields.text("model_type", "")
    for family in _FAMILIES:
        known = next((name for name in family.architectures if name in named), None)
        # Without a name the type tells, which 1bitLLM's models share with others.
        if known or (not named and family.model_type == model_type and not family.masters):
            if model_type not in ("", family.model_type):
                raise fields.wrong("model_type", f"contradicts the architecture {known}: correct it")
            return family
    found = ", ".join(named) or f"model_type {shown(model_type)}"
    every = ", ".join(family.architectures[0] for family in _FAMILIES)
    raise Unsupported(f"{fields.path}: the architecture {shown(found)} is not supported: use one of {every}")

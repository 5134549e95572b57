"""Canonical names (formats/checkpoint.py) as modules and tensors of transformers' models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from bitnet_inference.formats.checkpoint import is_bias

_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "mlp_sub_norm": "mlp.ffn_sub_norm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}


@dataclass(frozen=True)
class Names:
    """How the files of a folder name things: `prefix` stands before all but the head, `norm` are projections' norms.

    `renamed`: modules, those of a layer by the last part of the canonical name, where they are called otherwise than in
    most families.
    """

    prefix: str = "model."
    norm: str = "rms_norm"
    renamed: Mapping[str, str] = field(default_factory=dict)

    def module(self, name: str) -> str:
        """The module that owns a canonical name: "layers.3.q" -> "model.layers.3.self_attn.q_proj"."""
        if name == "head":
            return "lm_head"
        if "." not in name:
            return self.prefix + (self.renamed.get(name) or {"embed": "embed_tokens"}.get(name, name))
        _, layer, part, *of = name.split(".")
        if part == "experts":
            number, projection = of
            return f"{self.prefix}layers.{layer}.mlp.experts.{number}.{projection}_proj"
        module = f"{self.prefix}layers.{layer}.{self.renamed.get(part) or _IN_LAYER[part]}"
        return f"{module}.{self.norm}" if of == ["norm"] else module

    def tensor(self, name: str) -> str:
        """The tensor that holds a canonical name: the weight of its module, or the bias."""
        return f"{self.module(name)}.{'bias' if is_bias(name) else 'weight'}"


def find_names(tensors: Collection[str], renamed: Mapping[str, str]) -> Names:
    """The names that the files use: those of a bare model have no "model." in front."""
    prefix = "" if "embed_tokens.weight" in tensors else "model."
    names = Names(prefix, "norm", renamed)
    return names if f"{names.module('layers.0.q.norm')}.weight" in tensors else replace(names, norm="rms_norm")


def is_tolerated(tensor: str) -> bool:
    """Whether a tensor that no model needs may stand in a file all the same: old rotary tables, and what DeepGrove's
    mlx_lm finds likely tokens by."""
    return tensor.endswith("rotary_emb.inv_freq") or tensor.startswith("lm_head_flash.")

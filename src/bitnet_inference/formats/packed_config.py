"""The ModelConfig as JSON, as our own files hold it, and back: read as strictly as any other stranger's."""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, TypeVar, get_args

from bitnet_inference.formats.checkpoint import Activation, Experts, LocalLayers, ModelConfig, Pooling, RopeScaling
from bitnet_inference.formats.json_files import Fields, parse_object, shown
from bitnet_inference.formats.sizes import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_USED_EXPERTS,
    MAX_VOCAB,
)

WHERE = "__metadata__.config"
_AGAIN = "convert the model again"
_MAX_FAMILY = 40
# What files do not have where it is not set: so a model without stays readable, to the byte, for programs that do not
# know it, and these refuse a model with it.
_LATER = frozenset({"qkv_bias", "experts", "rotary_dim", "plain_global"})
_Known = TypeVar("_Known", bound=str)
_ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
_POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
_SCALINGS: tuple[Literal["linear", "llama3", "factors"], ...] = ("linear", "llama3", "factors")


def write_config(config: ModelConfig) -> str:
    """The configuration as JSON: every field of ModelConfig, none more; null for what there is not.

    Those of _LATER only where they are set.
    """
    said = {key: value for key, value in asdict(config).items() if value or key not in _LATER}
    return json.dumps(said, allow_nan=False, sort_keys=True)


def read_config(text: str, path: Path) -> ModelConfig:
    """The configuration that stands in a file; raises FormatError for what is missing, unknown or cannot be."""
    found = Fields(path, parse_object(text.encode("utf-8", "surrogatepass"), path, WHERE, _AGAIN), f"{WHERE}.")
    _require_names(found, {field.name for field in fields(ModelConfig)}, _LATER)
    num_heads, num_kv_heads, head_dim = _heads(found)
    vocab_size = found.size("vocab_size", MAX_VOCAB)
    bos_id, eos_ids = _tokens(found, vocab_size)
    rotary_dim = _rotary_dim(found, head_dim) if "rotary_dim" in found else None
    return ModelConfig(
        family=_word(found, "family"),
        vocab_size=vocab_size,
        hidden_size=found.size("hidden_size", MAX_HIDDEN),
        intermediate_size=found.size("intermediate_size", MAX_INTERMEDIATE),
        num_layers=found.size("num_layers", MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=found.size("max_positions", MAX_POSITIONS),
        activation=_one_of(found, "activation", _ACTIVATIONS),
        norm_eps=found.positive("norm_eps"),
        rope_theta=found.positive("rope_theta"),
        rope_scaling=_scaling(found.section("rope_scaling"), rotary_dim or head_dim),
        tie_embeddings=found.flag("tie_embeddings"),
        sub_norms=found.flag("sub_norms"),
        linear_norm=found.flag("linear_norm"),
        linear_norm_eps=found.positive("linear_norm_eps"),
        post_norms=found.flag("post_norms"),
        head_norms=found.flag("head_norms"),
        qkv_bias=found.flag("qkv_bias"),
        embed_scale=found.positive("embed_scale"),
        attention_scale=found.positive("attention_scale") if "attention_scale" in found else None,
        local=_local(found.section("local"), found.size("num_layers", MAX_LAYERS)),
        experts=_experts(found.section("experts"), found.size("num_layers", MAX_LAYERS)),
        rotary_dim=rotary_dim,
        plain_global=found.flag("plain_global"),
        pooling=_one_of(found, "pooling", _POOLINGS) if "pooling" in found else None,
        bos_id=bos_id,
        eos_ids=eos_ids,
    )


def _heads(found: Fields) -> tuple[int, int, int]:
    num_heads, num_kv_heads = found.size("num_heads", MAX_HEADS), found.size("num_kv_heads", MAX_HEADS)
    head_dim = found.size("head_dim", MAX_HEAD_DIM)
    if head_dim % 2:
        raise found.wrong("head_dim", f"is not even: {_AGAIN}")
    if num_heads % num_kv_heads:
        raise found.wrong("num_kv_heads", f"does not divide num_heads, {num_heads}: {_AGAIN}")
    return num_heads, num_kv_heads, head_dim


def _tokens(found: Fields, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """The one that begins a text, and those that end it."""
    bos_ids, eos_ids = found.ids("bos_id", -1), found.ids("eos_ids")
    for key, ids in (("bos_id", bos_ids), ("eos_ids", eos_ids)):
        if len(bos_ids) > 1 or max(ids, default=0) >= vocab_size:
            raise found.wrong(key, f"is outside the vocabulary of {vocab_size} tokens: {_AGAIN}")
    return bos_ids[0] if bos_ids else None, eos_ids


def _scaling(found: Fields | None, num_rotated: int) -> RopeScaling | None:
    if found is None:
        return None
    _require_names(found, {field.name for field in fields(RopeScaling)})
    kind, factors = _one_of(found, "kind", _SCALINGS), found.values.get("factors")
    if not isinstance(factors, list) or len(factors) != (num_rotated // 2 if kind == "factors" else 0):
        raise found.wrong("factors", f'is not a list of {num_rotated // 2} numbers for "factors", else empty: {_AGAIN}')
    each = Fields(found.path, {str(index): factor for index, factor in enumerate(factors)}, f"{WHERE}.factors.")
    low, high = found.positive("low_freq_factor"), found.positive("high_freq_factor")
    if high <= low:
        raise found.wrong("high_freq_factor", f"is not above low_freq_factor, {low}: {_AGAIN}")
    return RopeScaling(
        kind=kind,
        factor=found.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=found.size("original_max_positions", MAX_POSITIONS),
        factors=tuple(each.positive(key) for key in each.values),
    )


def _local(found: Fields | None, num_layers: int) -> LocalLayers | None:
    if found is None:
        return None
    _require_names(found, {field.name for field in fields(LocalLayers)})
    layers = found.ids("layers")
    if list(layers) != sorted(set(layers)) or max(layers, default=0) >= num_layers:
        raise found.wrong("layers", f"are not numbers of the {num_layers} layers in order: {_AGAIN}")
    window, theta = found.size("window", MAX_POSITIONS), found.positive("rope_theta")
    return LocalLayers(layers=layers, window=window, rope_theta=theta)


def _experts(found: Fields | None, num_layers: int) -> Experts | None:
    if found is None:
        return None
    _require_names(found, {field.name for field in fields(Experts)})
    count = found.size("count", MAX_EXPERTS // num_layers)
    used, renormalized = found.size("used", min(count, MAX_USED_EXPERTS)), found.flag("renormalized")
    return Experts(count=count, used=used, renormalized=renormalized)


def _rotary_dim(found: Fields, head_dim: int) -> int:
    rotary_dim = found.size("rotary_dim", head_dim)
    if rotary_dim % 2:
        raise found.wrong("rotary_dim", f"is not even: {_AGAIN}")
    return rotary_dim


def _require_names(found: Fields, known: set[str], may_lack: Set[str] = frozenset()) -> None:
    if others := sorted(known.symmetric_difference(found.values) - may_lack):
        raise found.wrong(shown(others[0]), f"is missing, or under a name that means nothing here: {_AGAIN}")


def _word(found: Fields, key: str) -> str:
    word = found.text(key, "")
    if not 0 < len(word) <= _MAX_FAMILY or not word.isascii() or not word.isprintable():
        raise found.wrong(key, f"is no short name: {_AGAIN}")
    return word


def _one_of(found: Fields, key: str, known: tuple[_Known, ...]) -> _Known:
    value = found.text(key, "")
    for each in known:
        if value == each:
            return each
    raise found.wrong(key, f"is none of {', '.join(known)}: {_AGAIN}")

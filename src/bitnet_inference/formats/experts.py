"""What configurations say of experts, and of windows with rotations beside layers without either."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Experts, LocalLayers, ModelConfig
from bitnet_inference.formats.gguf_file import GgufTensor
from bitnet_inference.formats.json_files import Fields
from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.formats.sizes import MAX_EXPERTS, MAX_LAYERS, MAX_USED_EXPERTS

_PERIOD, _BIASES = "decoder_sparse_step", "moe_router_enable_expert_bias"
_Tensor = TypeVar("_Tensor", Tensor, GgufTensor)
_ONLY_EXPERTS = "layers with other MLPs than routed experts are not supported: use another model"


def read_experts(fields: Fields, num_layers: int, renormalized: bool) -> Experts:
    """Of a config.json; `renormalized` where it is silent."""
    for key in ("num_shared_experts", "n_shared_experts", "first_k_dense_replace", "mlp_only_layers"):
        _refuse(fields, key, bool(fields.values.get(key)), _ONLY_EXPERTS)
    _refuse(fields, _PERIOD, fields.size(_PERIOD, MAX_LAYERS, 1) != 1, _ONLY_EXPERTS)
    _refuse(fields, _BIASES, fields.flag(_BIASES), "a router with biases is not supported: use another model")
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"  # the first is transformers 5's
    count = fields.size(name, MAX_EXPERTS // num_layers, 128)
    used = fields.size("num_experts_per_tok", min(count, MAX_USED_EXPERTS), 8)
    return Experts(count=count, used=used, renormalized=fields.flag("norm_topk_prob", renormalized))


def gguf_experts(fields: Fields, num_layers: int) -> Experts:
    """Of a GGUF file: shares add up to 1 over the best, as llama.cpp has it for these architectures."""
    softmax = "only the softmax of scores is supported: use another model"
    usual = (("expert_shared_count", 0, _ONLY_EXPERTS), ("leading_dense_block_count", 0, _ONLY_EXPERTS))
    for key, number, why in (*usual, ("expert_gating_func", 1, softmax)):
        value = fields.values.get(key, number)
        _refuse(fields, key, type(value) is not int or value != number, why)
    count = fields.size("expert_count", MAX_EXPERTS // num_layers)
    return Experts(count=count, used=fields.size("expert_used_count", min(count, MAX_USED_EXPERTS)))


def refuse_norms_of_experts(path: Path, config: ModelConfig) -> None:
    """Raises Unsupported where each expert would have norms of its own."""
    if config.experts is not None and (config.linear_norm or config.sub_norms):
        raise Unsupported(f"{path}: norms before the projections of experts are not supported: use another model")


def cut_stacks(
    tensors: dict[str, _Tensor],
    stack: re.Pattern[str],
    most: int,
    parts: Callable[[str, re.Match[str], _Tensor], Iterator[tuple[str, _Tensor]]],
    cure: str = "keep one of them",
) -> dict[str, _Tensor]:
    """The tensors, with the named `parts` of each whose name is that of a `stack`, `most` at most, in its place.

    Where there are more, nothing is cut. Raises FormatError where a part stands alone too. A name is written for each
    part, so `stack` should match none that a stranger could make as long as he likes.
    """
    stacks = {name: found for name in tensors if (found := stack.fullmatch(name))}
    if len(stacks) > most:
        return tensors
    every = {name: tensor for name, tensor in tensors.items() if name not in stacks}
    for name, found in stacks.items():
        for own, part in parts(name, found, tensors[name]):
            if own in every:
                raise FormatError(part.path, own, f"stands in a stack of all experts too: {cure}")
            every[own] = part
    return every


def nope_layers(window: int, types: list[bool], theta: float) -> LocalLayers | None:
    """Layers with windows of so many positions, which alone rotate; None where there are none."""
    layers = tuple(at for at, is_local in enumerate(types) if is_local)
    return LocalLayers(layers=layers, window=window, rope_theta=theta) if layers else None


def _refuse(fields: Fields, key: str, is_so: bool, why: str) -> None:
    if is_so:
        raise Unsupported(f"{fields.path}: {key}: {why}")

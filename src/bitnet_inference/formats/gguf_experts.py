"""The stacked matrices of experts in GGUF files, as a tensor for each expert: what older files have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from bitnet_inference.formats.ggml_blocks import I2_S
from bitnet_inference.formats.gguf_file import GgufTensor
from bitnet_inference.formats.sizes import MAX_EXPERTS

_STACK = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)_exps\.weight")


def with_each_expert(tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
    """The tensors, with `blk.N.ffn_gate.E.weight` and so on, in the place of the stacks of all experts of a layer."""
    stacks = {name for name, tensor in tensors.items() if _STACK.fullmatch(name) and _can_be_cut(tensor)}
    if sum(tensors[name].shape[0] for name in stacks) > 3 * MAX_EXPERTS:
        return tensors
    whole = {name: tensor for name, tensor in tensors.items() if name not in stacks}
    return whole | {own: part for name in stacks for own, part in _parts(name, tensors[name])}


def _can_be_cut(tensor: GgufTensor) -> bool:
    return len(tensor.shape) == 3 and tensor.type_id != I2_S  # which has one scale, behind all of its rows


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    count, *shape = tensor.shape
    own = name.removesuffix("_exps.weight")
    size = (tensor.end - tensor.begin) // count  # rows are whole blocks
    for number in range(count):
        begin = tensor.begin + number * size
        yield f"{own}.{number}.weight", replace(tensor, shape=tuple(shape), begin=begin, end=begin + size)

"""The stacked matrices of experts in safetensors files, as tensors of their own for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.formats.sizes import MAX_EXPERTS

# As transformers 5 may write them, gate above up; and as MLX does, with what it packs them by.
_STACK = re.compile(r"(.*\.mlp\.)(?:experts\.(gate_up_proj|down_proj)|switch_mlp\.(gate|up|down)_proj\.(\w+))")


def with_each_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with `mlp.experts.E.gate_proj.weight` and so on, in the place of the stacks of all experts."""
    stacks = {name: found for name in tensors if (found := _STACK.fullmatch(name)) and len(tensors[name].shape) > 1}
    if sum(tensors[name].shape[0] for name in stacks) > 9 * MAX_EXPERTS:
        return tensors
    whole = {name: tensor for name, tensor in tensors.items() if name not in stacks}
    return whole | {own: part for name in stacks for own, part in _parts(stacks[name], tensors[name])}


def _parts(name: re.Match[str], stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    own, fused, projection, kind = name.groups()
    for number, part in enumerate(stack.cut(stack.shape[0])):
        at = f"{own}experts.{number}."
        matrix = replace(part, shape=part.shape[1:])
        if projection:
            yield f"{at}{projection}_proj.{kind}", matrix
        elif fused == "down_proj":
            yield f"{at}down_proj.weight", matrix
        elif len(matrix.shape) == 2 and matrix.shape[0] % 2 == 0:
            yield from zip((f"{at}gate_proj.weight", f"{at}up_proj.weight"), matrix.cut(2), strict=True)

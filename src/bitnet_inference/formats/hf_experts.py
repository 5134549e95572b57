"""The stacked matrices of experts in safetensors files, as tensors of their own for each expert."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.experts import cut_stacks
from bitnet_inference.formats.json_files import shown
from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.formats.sizes import MAX_EXPERTS

# As transformers 5 may write them, gate above up; and as MLX does, with what it packs them by.
_STACK = re.compile(
    r"((?:model\.)?layers\.[0-9]{1,3}\.mlp\.)"
    r"(?:experts\.(gate_up|down)_proj|switch_mlp\.(gate|up|down)_proj\.(weight|scales|biases|row_alpha))"
)


def with_each_expert(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The tensors, with `mlp.experts.E.gate_proj.weight` and so on, in the place of the stacks of so many experts.

    Raises FormatError for a stack of another number, and where an expert stands alone too.
    """
    return cut_stacks(tensors, _STACK, 9 * MAX_EXPERTS // count, partial(_parts, count))


def _parts(count: int, name: str, found: re.Match[str], stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    own, fused, projection, kind = found.groups()
    has_two = fused == "gate_up"
    if stack.shape[:1] != (count,) or (has_two and (len(stack.shape) != 3 or stack.shape[1] % 2)):
        what = f"no stack of {count} experts" + (", gate above up" if has_two else "")
        raise FormatError(stack.path, name, f"{stack.dtype} {shown(stack.shape)} is {what}: download the model again")
    kinds = ["gate_proj.weight", "up_proj.weight"] if has_two else [f"{fused or projection}_proj.{kind or 'weight'}"]
    shape = (stack.shape[1] // 2, *stack.shape[2:]) if has_two else stack.shape[1:]
    parts = stack.cut(count * len(kinds), shape)
    for number in range(count):
        for each in kinds:
            yield f"{own}experts.{number}.{each}", next(parts)

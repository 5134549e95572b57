"""The matrices of experts in our own file: those of all experts of a layer stand in one tensor, a stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import ModelConfig, expected_shapes, without_expert
from bitnet_inference.formats.experts import cut_stacks
from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.formats.sizes import MAX_EXPERTS

_STACK = re.compile(r"(layers\.[0-9]{1,3}\.experts\.)((?:gate|up|down)(?:\.(?:u2|t5|scale|scale64|scale128))?)")
_AGAIN = "convert the model again"


def written_together(config: ModelConfig) -> dict[str, list[str]]:
    """The canonical names of what stands in one place, by the name of that: a weight, or those of a stack."""
    together: dict[str, list[str]] = {}
    for name, _ in expected_shapes(config):
        together.setdefault(without_expert(name), []).append(name)
    return together


def is_stack(name: str) -> bool:
    """Whether a name of `written_together` is that of a stack."""
    return _STACK.fullmatch(name) is not None


def with_each_expert(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The tensors, with `layers.N.experts.E.gate.u2` and so on, in the place of the stacks of so many experts.

    Raises FormatError for a stack of another number, and where an expert stands alone too.
    """
    return cut_stacks(tensors, _STACK, 6 * MAX_EXPERTS // count, partial(_parts, count), _AGAIN)


def _parts(count: int, name: str, found: re.Match[str], stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    if stack.shape[:1] != (count,):
        raise FormatError(stack.path, name, f"is no stack of {count} experts: {_AGAIN}")
    for number, part in enumerate(stack.cut(count, stack.shape[1:])):
        yield f"{found[1]}{number}.{found[2]}", part

"""The matrices of experts in our own file: those of all experts of a layer stand in one tensor, a stack."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from bitnet_inference.formats.checkpoint import ModelConfig, expected_shapes
from bitnet_inference.formats.safetensors_files import Tensor

_OF_ONE = re.compile(r"(layers\.\d+\.experts\.)\d+\.(\w+)")
_STACK = re.compile(r"(layers\.\d+\.experts\.)((?:gate|up|down)(?:\.\w+)?)")


def written_together(config: ModelConfig) -> dict[str, list[str]]:
    """The canonical names of what stands in one place, by the name of that: a weight, or those of a stack."""
    together: dict[str, list[str]] = {}
    for name, _ in expected_shapes(config):
        together.setdefault(_OF_ONE.sub(r"\1\2", name), []).append(name)
    return together


def is_stack(name: str) -> bool:
    """Whether a name of `written_together` is that of a stack."""
    return _STACK.fullmatch(name) is not None


def with_each_expert(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The tensors, with `layers.N.experts.E.gate.u2` and so on, in the place of the stacks of so many experts."""
    return dict(named for name, tensor in tensors.items() for named in _parts(name, tensor, count))


def _parts(name: str, tensor: Tensor, count: int) -> Iterator[tuple[str, Tensor]]:
    found = _STACK.fullmatch(name)
    if found is None or tensor.shape[:1] != (count,):
        yield name, tensor
        return
    for number, part in enumerate(tensor.cut(count)):
        yield f"{found[1]}{number}.{found[2]}", replace(part, shape=part.shape[1:])

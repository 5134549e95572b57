"""The stacked matrices of experts in GGUF files, as a tensor for each expert: what older files have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.experts import cut_stacks
from bitnet_inference.formats.ggml_blocks import I2_S
from bitnet_inference.formats.gguf_file import GgufTensor
from bitnet_inference.formats.sizes import MAX_EXPERTS

_STACK = re.compile(r"(blk\.[0-9]{1,3}\.ffn_(?:gate|up|down))_exps\.weight")
_OF_EACH = re.compile(r"blk\.[0-9]{1,3}\.ffn_(?:gate_inp|(?:gate|up|down)_exps)\.weight")


def with_each_expert(tensors: dict[str, GgufTensor], count: int) -> dict[str, GgufTensor]:
    """The tensors, with `blk.N.ffn_gate.E.weight` and so on, in the place of the stacks of so many experts.

    Raises FormatError for a stack of another number, and where an expert stands alone too, Unsupported for I2_S.
    """
    if count == 1:  # a size of 1 behind all others is not kept
        tensors = {name: _as_of_one(tensor) if _OF_EACH.fullmatch(name) else tensor for name, tensor in tensors.items()}
    return cut_stacks(tensors, _STACK, 3 * MAX_EXPERTS // count, partial(_parts, count))


def _as_of_one(tensor: GgufTensor) -> GgufTensor:
    return replace(tensor, shape=(1, *tensor.shape))


def _parts(count: int, name: str, found: re.Match[str], stack: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    if len(stack.shape) != 3 or stack.shape[0] != count:
        why = f"has the shape {list(stack.shape)}, not that of {count} matrices: download the file again"
        raise FormatError(stack.path, name, why)
    if stack.type_id == I2_S:  # which has one scale, behind all of its rows
        raise Unsupported(f"{stack.path}: {name}: stacks of experts in I2_S are not supported: use the model in TQ2_0")
    size = (stack.end - stack.begin) // count  # rows are whole blocks
    for number in range(count):
        begin = stack.begin + number * size
        part = GgufTensor(stack.path, stack.type_id, stack.shape[1:], begin, begin + size, stack.data)
        yield f"{found[1]}.{number}.weight", part

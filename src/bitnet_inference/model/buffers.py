"""Buffers of a plan, planned by lifetime: every value gets a place in one arena, and places are used again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bitnet_inference.model.plan import Plan, Step, Value

ALIGNMENT = 16  # floats: 64 bytes a token, so that every buffer is aligned for any number of tokens


@dataclass(frozen=True)
class Layout:
    """Where the values of a plan live: offsets and the whole size, in floats a token."""

    offsets: Mapping[int, int]
    num_floats: int


def padded_codes(width: int) -> int:
    """Bytes of a token's codes: whole steps of every ternary format, 80 at most, and then lines of 64."""
    return _odd((width + 79) // 80 * 80, 64)


def num_floats(value: Value) -> int:
    """The room that a value takes, in floats a token: codes have a scale, a sum, an offset, and a list of pairs."""
    padded = padded_codes(value.width)
    floats = padded // 4 + 11 if value.kind == "int8" else value.width
    return _odd(floats, ALIGNMENT)


def _odd(size: int, line: int) -> int:
    """An odd number of lines: neighbouring tokens would otherwise meet in few sets of a cache."""
    return ((size + line - 1) // line | 1) * line


def plan_buffers(plan: Plan) -> Layout:
    """First fit over lifetimes; a product overwrites a residual that ends in it. Input and output stay outside."""
    last_use = {value.root.id: i for i, step in enumerate(plan.steps) for value in (*step.inputs, *_outputs(step))}
    outside = {value.id for value in (plan.input, plan.output) if value}
    offsets: dict[int, int] = {}
    live: dict[int, int] = {}  # offset -> end
    size = 0
    for i, step in enumerate(plan.steps):
        if step.output and step.output.root.id not in offsets and step.output.root.id not in outside:
            root = step.output.root
            offset = _residual(step, i, last_use, offsets)
            offsets[root.id] = _first_fit(live, num_floats(root)) if offset is None else offset
            live[offsets[root.id]] = offsets[root.id] + num_floats(root)
            size = max(size, live[offsets[root.id]])
        _free(step, i, last_use, offsets, live)
    return Layout(offsets, size)


def _outputs(step: Step) -> tuple[Value, ...]:
    return (step.output,) if step.output else ()


def _residual(step: Step, index: int, last_use: Mapping[int, int], offsets: Mapping[int, int]) -> int | None:
    if not step.verb.endswith("+add") or last_use[step.inputs[1].root.id] != index:
        return None
    is_wider = step.inputs[1].parent is not None  # rows of the sum would lie elsewhere
    return None if is_wider else offsets.get(step.inputs[1].id)


def _first_fit(live: Mapping[int, int], size: int) -> int:
    offset = 0
    for begin, end in sorted(live.items()):
        if offset + size <= begin:
            break
        offset = end
    return offset


def _free(
    step: Step, index: int, last_use: Mapping[int, int], offsets: Mapping[int, int], live: dict[int, int]
) -> None:
    kept = offsets.get(step.output.root.id) if step.output else None
    for value in (*step.inputs, *_outputs(step)):
        offset = offsets.get(value.root.id)
        if last_use[value.root.id] == index and offset is not None and (offset != kept or value is step.output):
            live.pop(offset, None)

"""Passes that rewrite a recorded plan into the steps that the native executor runs.

Each pass keeps every bit: a fused step does the same operations in the same order as its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Literal

from bitnet_inference.model.plan import Plan, Step, Value

ROW_VERBS = ("gate", "norm", "quantize")
PRODUCTS = ("ternary", "int8", "dense")
ProductOf = Callable[[str], Literal["ternary", "int8", "dense"]]  # of a canonical name


def fuse(plan: Plan, product_of: ProductOf, shapes: Mapping[str, tuple[int, ...]], num_rotated: int) -> Plan:
    """All passes in order, on the plans of experts too. `product_of` says which product each matrix takes, `shapes` how
    large it is, `num_rotated` how many features of a head turn."""
    plan = lower_linear(plan, product_of, shapes)
    plan = fuse_rows(plan)
    plan = fuse_residual(plan)
    plan = fuse_rope(plan, num_rotated)
    inner = (tuple(fuse(each, product_of, shapes, num_rotated) for each in step.plans) for step in plan.steps)
    return replace(plan, steps=tuple(replace(step, plans=plans) for step, plans in zip(plan.steps, inner, strict=True)))


def lower_linear(plan: Plan, product_of: ProductOf, shapes: Mapping[str, tuple[int, ...]]) -> Plan:
    """`linear` becomes `quantize` and `ternary` or `int8`, or `dense`; a mixed stack becomes a product for each run."""
    next_id = plan.next_id()
    steps: list[Step] = []
    for step in plan.steps:
        if step.verb != "linear":
            steps.append(step)
            continue
        assert step.output is not None
        codes, column, kinds = None, 0, [product_of(name) for name in step.weights]
        if {*kinds} != {"dense"}:
            codes = Value(next_id, step.inputs[0].width, "int8")
            steps.append(Step("quantize", step.inputs, codes))
            next_id += 1
        for kind, group in groupby(zip(kinds, step.weights, strict=True), key=lambda pair: pair[0]):
            names = tuple(name for _, name in group)
            width, output = sum(shapes[name][0] for name in names), step.output
            if width != output.width:
                output = Value(next_id, width, parent=step.output, column=column)
                next_id, column = next_id + 1, column + width
            inputs = (codes,) if kind != "dense" and codes else step.inputs
            steps.append(Step(kind, inputs, output, names))
    return replace(plan, steps=tuple(steps))


def fuse_rows(plan: Plan) -> Plan:
    """gate, norm and quantize that follow each other on the same rows become one step."""
    uses, producers = plan.uses(), plan.producers()
    fused: dict[int, Step] = {}  # by the output of the last part
    dropped: set[int] = set()
    for step in plan.steps:
        if step.verb not in ROW_VERBS or step.output is None:
            continue
        first = producers.get(step.inputs[0].id)
        before = first and fused.get(first.output.id if first.output else -1)
        parts = before.parts if before and before.output and uses[before.output.id] == 1 else ("quantize",)
        if before and before.output and parts[-1] != "quantize" and step.verb not in parts:
            assert step.verb != "gate", "nothing gates rows that were gated or normed before"
            dropped.add(before.output.id)
            step = Step(f"{before.verb}+{step.verb}", before.inputs, step.output, before.weights + step.weights,
                        {**before.attributes, **step.attributes})  # fmt: skip
        assert step.output is not None
        fused[step.output.id] = step
    steps = (fused.get(step.output.id, step) if step.output else step for step in plan.steps)
    return replace(plan, steps=tuple(step for step in steps if not step.output or step.output.id not in dropped))


def fuse_residual(plan: Plan) -> Plan:
    """A product whose only use is to be added to x adds it itself."""
    uses, producers = plan.uses(), plan.producers()
    fused: dict[int, Step] = {}
    dropped: set[int] = set()
    for step in plan.steps:
        if step.verb != "add":
            continue
        x, y = step.inputs
        product = producers[y.id]
        if product.verb in PRODUCTS and uses[y.id] == 1 and step.output:
            dropped.add(y.id)
            fused[step.output.id] = replace(
                product, verb=product.verb + "+add", inputs=(*product.inputs, x), output=step.output
            )
    steps = (fused.get(step.output.id, step) if step.output else step for step in plan.steps)
    return replace(plan, steps=tuple(step for step in steps if not step.output or step.output.id not in dropped))


def fuse_rope(plan: Plan, num_rotated: int) -> Plan:
    """The rotations of q and k and the cache write become one step in place.

    The angles are computed once a token, for local layers and for others.
    """
    producers, ropes = plan.producers(), [step for step in plan.steps if step.verb == "rope"]
    kinds = sorted({step.attributes.get("local", False) for step in ropes})
    angles = {local: Value(plan.next_id() + at, num_rotated) for at, local in enumerate(kinds)}
    steps = [
        Step("rotations", (), value, attributes={"local": True} if local else {}) for local, value in angles.items()
    ]
    for step in plan.steps:
        if step.verb == "attend":
            q, k, v = step.inputs
            rope_q, rope_k = producers[q.id], producers[k.id]
            turned = angles[rope_q.attributes.get("local", False)]
            q, k = rope_q.inputs[0], rope_k.inputs[0]
            steps.append(Step("rope+write", (q, k, v, turned), None, attributes=step.attributes))
            step = replace(step, inputs=(q,))
        if step.verb != "rope":
            steps.append(step)
    return replace(plan, steps=tuple(steps))

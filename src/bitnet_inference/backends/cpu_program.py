"""From a fused plan to a native program: every step of the plan becomes one call here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.model.buffers import num_floats, plan_buffers
from bitnet_inference.model.plan import Plan, Step, Value
from bitnet_inference.model.rope import inverse_frequencies

ARENA, INPUT, OUTPUT = 0, 1, 2  # Base in kernels/executor.h
ACTIVATIONS = {None: 0, "relu2": 1, "silu": 2}  # Activation in kernels/kernels.h
Rows = tuple[int, int, int, int, int]
Weights = Mapping[tuple[str, ...], Any]


def compile_program(
    plan: Plan, config: ModelConfig, weights: Weights, vector: Callable[[str], NDArray[np.float32]], cache: Any
) -> Any:
    """A native.Program that does the steps of the plan. `vector` gives norm weights by canonical name."""
    compiler = _Compiler(plan, config, weights, vector, cache)
    for step in plan.steps:
        compiler.emit(step)
    return compiler.program


class _Compiler:
    def __init__(
        self,
        plan: Plan,
        config: ModelConfig,
        weights: Weights,
        vector: Callable[[str], NDArray[np.float32]],
        cache: Any,
    ) -> None:
        self.plan, self.config, self.weights, self.vector, self.cache = plan, config, weights, vector, cache
        self.layout = plan_buffers(plan)
        self.block_order = any(isinstance(w, native.TernaryWeight) and w.format == "t5" for w in weights.values())
        self.program: Any = native.Program(self.layout.num_floats)

    def emit(self, step: Step) -> None:
        if step.parts[0] in ("gate", "norm", "quantize"):
            self._rows_step(step)
            return
        {
            "embed": self._embed,
            "ternary": self._product,
            "dense": self._product,
            "rotations": self._rotations,
            "rope": self._rope_write,
            "attend": self._attend,
            "add": self._add,
        }[step.parts[0]](step)

    def _rows(self, value: Value | None) -> Rows:
        assert value is not None and value.root.kind == "float32"
        root = value.root
        if root in (self.plan.input, self.plan.output):
            base, offset, stride = (INPUT if root == self.plan.input else OUTPUT), 0, root.width
        else:
            base, offset, stride = ARENA, self.layout.offsets[root.id], num_floats(root)
        return base, offset, stride, value.column, value.width

    def _codes(self, value: Value | None) -> tuple[int, int, bool]:
        assert value is not None and value.kind == "int8"
        whole = 80 if self.block_order else 16
        return self.layout.offsets[value.id], (value.width + whole - 1) // whole * whole, self.block_order

    def _rows_step(self, step: Step) -> None:
        gated, normed = "gate" in step.parts, "norm" in step.parts
        task = (
            self._rows(step.inputs[0]),
            self._rows(step.inputs[1]) if gated else None,
            ACTIVATIONS[step.attributes.get("activation")],
            np.ascontiguousarray(self.vector(step.weights[0])) if normed else None,
            step.attributes.get("eps", 0.0),
        )
        if step.parts[-1] == "quantize":
            self.program.rows_to_codes(*task, self._codes(step.output))
        else:
            self.program.rows_to_floats(*task, self._rows(step.output))

    def _embed(self, step: Step) -> None:
        self.program.embed(self.weights[step.weights], self._rows(step.output))

    def _product(self, step: Step) -> None:
        residual = self._rows(step.inputs[1]) if step.parts[-1] == "add" else None
        weight, output = self.weights[step.weights], self._rows(step.output)
        if step.parts[0] == "ternary":
            self.program.ternary(weight, self._codes(step.inputs[0]), output, residual)
        else:
            self.program.dense(weight, self._rows(step.inputs[0]), output, residual)

    def _rotations(self, step: Step) -> None:
        self.program.rotations(inverse_frequencies(self.config).tolist(), self._rows(step.output))

    def _rope_write(self, step: Step) -> None:
        q, k, v, angles = map(self._rows, step.inputs)
        self.program.rope_write(self.cache, step.attributes["layer"], q, k, v, angles)

    def _attend(self, step: Step) -> None:
        scale = 1.0 / math.sqrt(self.config.head_dim)
        self.program.attend(
            self.cache, step.attributes["layer"], self._rows(step.inputs[0]), self._rows(step.output), scale
        )

    def _add(self, step: Step) -> None:
        x, y = step.inputs
        self.program.add(self._rows(x), self._rows(y), self._rows(step.output))

"""From a fused plan to a native program: every step of the plan becomes one call here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.model.buffers import num_floats, padded_codes, plan_buffers
from bitnet_inference.model.plan import Plan, Step, StepTime, Value
from bitnet_inference.model.rope import inverse_frequencies

ARENA, INPUT, OUTPUT = 0, 1, 2  # Base in kernels/executor.h
ACTIVATIONS = {None: 0, "relu2": 1, "silu": 2, "gelu": 3, "silu7": 4}  # Activation in kernels/kernels.h
Rows = tuple[int, int, int, int, int]
Weights = Mapping[tuple[str, ...], Any]


class NativePlan:
    """A plan that runs in one native call."""

    def __init__(self, program: Any, verbs: Sequence[str], selects: bool) -> None:
        """`verbs` has the plan's verb for each step of the native.Program; `selects`: it takes `wanted` tokens."""
        self.program, self.verbs, self.selects = program, verbs, selects
        self._seconds: NDArray[np.float64] | None = None  # of each step; None: nobody asks

    def run(self, executor: Any, arrays: Any, input: Any, output: NDArray[np.float32], wanted: Any = None) -> None:
        """See native.Executor.run."""
        executor.run(self.program, arrays, input, output, self._seconds, wanted)

    def time_steps(self) -> None:
        """From now on, measure how long each step takes."""
        self._seconds = np.zeros(len(self.verbs))

    def take_times(self, name: str) -> list[StepTime]:
        """How long each step took since the times were taken last; none if it did not run. `name` is the plan's."""
        if self._seconds is None or not self._seconds.any():
            return []
        seconds = self._seconds.tolist()
        self._seconds[:] = 0
        return [StepTime(name, *each) for each in zip(self.verbs, seconds, strict=True)]


def compile_plan(
    plan: Plan, config: ModelConfig, weights: Weights, vector: Callable[[str], NDArray[np.float32]], cache: Any
) -> NativePlan:
    """A native program that does the steps of the plan. `vector` gives norm weights and biases by canonical name.

    If the plan begins with token ids and goes through all layers, the tokens that a batch does not want have no part in
    what comes behind the keys and values of the last one: a thirtieth of a prompt for thirty layers.
    """
    compiler = _Compiler(plan, config, weights, vector, cache)
    selects = plan.input is None and plan.layers.stop == config.num_layers
    verbs: list[str] = []
    for index, step in enumerate(plan.steps):
        if selects and step.parts[0] == "attend" and step.attributes["layer"] == config.num_layers - 1:
            compiler.select(index)
            verbs.append("select")
        verbs += compiler.emit(step, len(verbs))
    return NativePlan(compiler.program, verbs, selects)


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
        self.layout, self.first_layer = plan_buffers(plan), plan.layers.start
        self.program: Any = native.Program(self.layout.num_floats)

    def emit(self, step: Step, num_before: int) -> list[str]:
        """A verb for each of the native steps that it becomes."""
        inner: Sequence[str] = ()
        if step.parts[0] in ("gate", "norm", "quantize"):
            self._rows_step(step)
        elif step.verb == "mix":
            inner = self._mix(step)
        else:
            self._single(step)
        verbs = [step.verb] * (self.program.num_steps - num_before - len(inner))
        return [*verbs[:-1], *(f"experts {verb}" for verb in inner), *verbs[-1:]]

    def _single(self, step: Step) -> None:
        {
            "embed": self._embed,
            "ternary": self._product,
            "int8": self._product,
            "dense": self._product,
            "rotations": self._rotations,
            "rope": self._rope_write,
            "attend": self._attend,
            "add": self._add,
            "bias": self._bias,
        }[step.parts[0]](step)

    def select(self, index: int) -> None:
        """From this step of the plan on, the wanted tokens alone."""
        done = {step.output.root for step in self.plan.steps[:index] if step.output}
        kept = done & {value.root for step in self.plan.steps[index:] for value in step.inputs}
        self.program.select(sorted(map(self._rows, kept)))

    def _rows(self, value: Value | None) -> Rows:
        assert value is not None and value.root.kind == "float32"
        root = value.root
        if root in (self.plan.input, self.plan.output):
            base, offset, stride = (INPUT if root == self.plan.input else OUTPUT), 0, root.width
        else:
            base, offset, stride = ARENA, self.layout.offsets[root.id], num_floats(root)
        return base, offset, stride, value.column, value.width

    def _codes(self, value: Value | None) -> tuple[int, int]:
        assert value is not None and value.kind == "int8"
        return self.layout.offsets[value.id], padded_codes(value.width)

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
        scale = step.attributes.get("scale", 1.0)
        self.program.embed(self.weights[step.weights], self._rows(step.output), scale)

    def _product(self, step: Step) -> None:
        residual = self._rows(step.inputs[1]) if step.parts[-1] == "add" else None
        weight, output = self.weights[step.weights], self._rows(step.output)
        if step.parts[0] == "dense":
            self.program.dense(weight, self._rows(step.inputs[0]), output, residual)
        else:
            product = self.program.ternary if step.parts[0] == "ternary" else self.program.int8
            product(weight, self._codes(step.inputs[0]), output, residual)

    def _rotations(self, step: Step) -> None:
        frequencies = inverse_frequencies(self.config, step.attributes.get("local", False))
        self.program.rotations(frequencies.tolist(), self._rows(step.output))

    def _rope_write(self, step: Step) -> None:
        q, k, v, angles = map(self._rows, step.inputs)
        self.program.rope_write(self.cache, step.attributes["layer"] - self.first_layer, q, k, v, angles)

    def _attend(self, step: Step) -> None:
        layer, q, output = step.attributes["layer"], self._rows(step.inputs[0]), self._rows(step.output)
        scale, window = self.config.score_scale, self.config.window_of(layer)
        self.program.attend(self.cache, layer - self.first_layer, q, output, scale, window)

    def _add(self, step: Step) -> None:
        x, y = step.inputs
        self.program.add(self._rows(x), self._rows(y), self._rows(step.output))

    def _mix(self, step: Step) -> Sequence[str]:
        """The verbs of the steps that all experts do together, before the last one."""
        experts = [compile_plan(plan, self.config, self.weights, self.vector, None) for plan in step.plans]
        x, scores = map(self._rows, step.inputs)
        used, renormalized = step.attributes["used"], step.attributes["renormalized"]
        programs = [expert.program for expert in experts]
        self.program.mix(programs, x, scores, used, renormalized, self._rows(step.output))
        return experts[0].verbs

    def _bias(self, step: Step) -> None:
        vector = np.concatenate([self.vector(name) for name in step.weights])
        self.program.bias(self._rows(step.inputs[0]), vector, self._rows(step.output))

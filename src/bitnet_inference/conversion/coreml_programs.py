"""The recorded decoder as a Core ML program with a state.

It has two functions, "main" for one token and "prompt" for several, which share their weights and the state.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.conversion.coreml_verbs import Scaled, Var, Verbs, mask_rows
from bitnet_inference.conversion.coreml_weights import Arrays, Weights
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.coreml import KEYS, ONE, SEVERAL, VALUES
from bitnet_inference.model.loader import record
from bitnet_inference.model.plan import Plan, Step, Value
from bitnet_inference.model.rope import inverse_frequencies

CHUNK_TOKENS = 64  # of a prompt that are computed at a time


def coreml_program(library: Any, arrays: Arrays, context: int) -> Any:
    """A MIL program. `library` is coremltools; the states have room for `context` tokens.

    Inputs are input_ids int32 [1, T] and position int32 [1], that of the first of them; position + T is at most
    `context`. Outputs are logits [1, T, vocab] and what went into the states, new_keys and new_values float16
    [layers, kv_heads, T, head_dim].
    """
    mil = library.converters.mil.mil
    program = mil.Program()
    for name, num_tokens in {ONE: 1, SEVERAL: min(CHUNK_TOKENS, context)}.items():
        program.add_function(name, _function(library, arrays, num_tokens, context))
    program.default_function_name = ONE
    program.export_as_multifunction = True
    return program


def _function(library: Any, arrays: Arrays, num_tokens: int, context: int) -> Any:
    builder, mil = library.converters.mil.Builder, library.converters.mil.mil
    config = arrays.checkpoint.config
    cache_shape = (config.num_layers, config.num_kv_heads, context, config.head_dim)
    inputs = {
        "input_ids": builder.placeholder(shape=(1, num_tokens), dtype=mil.types.int32),
        "position": builder.placeholder(shape=(1,), dtype=mil.types.int32),
        KEYS: builder.state_tensor_placeholder(shape=cache_shape, dtype=mil.types.fp16),
        VALUES: builder.state_tensor_placeholder(shape=cache_shape, dtype=mil.types.fp16),
    }
    with mil.Function(inputs, opset_version=library.target.iOS18) as function:
        export = _Export(Verbs(builder, arrays.compute == "float16"), arrays, mil.types, function.inputs, context)
        plans = record(config)
        hidden = export.run(plans.body)
        logits = export.run(plans.head, hidden)
        function.set_outputs([builder.identity(x=logits, name="logits"), *export.new_rows()])
    return function


class _Export:
    """A plan becomes operations, step by step; values are known by what they are columns of, and where these begin."""

    def __init__(self, verbs: Verbs, arrays: Arrays, types: Any, inputs: dict[str, Var], context: int) -> None:
        self._verbs, self._inputs, self._context = verbs, inputs, context
        self._mb, self._config = verbs.mb, arrays.checkpoint.config
        self._weights = Weights(arrays, verbs, types)
        self._num_tokens = inputs["input_ids"].shape[1]
        self._found: dict[tuple[int, int], Scaled] = {}
        self._only_normed: set[int] = set()
        self._new: dict[str, list[Var]] = {KEYS: [], VALUES: []}
        self._angles, self._mask = cache(self._make_angles), cache(self._make_mask)

    def run(self, plan: Plan, start: Var = None) -> Var:
        """Add the steps of a plan whose input is `start`; returns what comes out."""
        self._found = {(plan.input.id, 0): Scaled(start)} if plan.input else {}
        read = {value.root.id for step in plan.steps if step.verb != "norm" for value in step.inputs}
        self._only_normed = {step.output.id for step in plan.steps if step.output} - {*read, plan.output.root.id}
        for step in plan.steps:
            self._add(step)
        return self._rows(plan.output)

    def new_rows(self) -> list[Var]:
        """What the keys and the values of the states have got, as outputs."""
        return [self._mb.concat(values=rows, axis=0, name=f"new_{name}") for name, rows in self._new.items()]

    def _rows(self, value: Value) -> Var:
        return self._verbs.plain(self._scaled(value))

    def _scaled(self, value: Value) -> Scaled:
        return self._found[value.root.id, value.column]

    def _add(self, step: Step) -> None:
        verbs, more = self._verbs, step.attributes
        assert step.output is not None
        if step.verb == "linear":
            self._linear(step)
            return
        if step.verb == "bias":
            self._bias(step)
            return
        if step.verb == "norm":
            weight = self._weights.vector(step.weights[0])
            made = verbs.norm(self._scaled(step.inputs[0]), weight, more["eps"], more.get("parts", 1))
        elif step.verb == "gate":
            gate, up = map(self._rows, step.inputs)
            made = verbs.gate(gate, up, more["activation"], step.output.id in self._only_normed)
        else:
            made = Scaled(self._plain(step))
        self._found[step.output.id, 0] = made

    def _plain(self, step: Step) -> Var:
        more, inputs = step.attributes, list(map(self._rows, step.inputs))
        match step.verb:
            case "embed":
                rows, scale = self._weights.rows(step.weights[0], self._inputs["input_ids"]), more.get("scale", 1.0)
                return rows if scale == 1 else self._verbs.mul(rows, self._verbs.number(scale))
            case "rope":
                cosine, sine = self._angles(more.get("local", False))
                return self._verbs.rope(inputs[0], cosine, sine, self._config.head_dim)
            case "add":
                return self._mb.add(x=inputs[0], y=inputs[1])
        assert step.verb == "attend"
        q, k, v = inputs
        return self._attend(q, k, v, more["layer"])

    def _linear(self, step: Step) -> None:
        """The products of a stack one by one: each is some columns of the step's output. x is quantised once."""
        assert step.output is not None
        x, column = self._scaled(step.inputs[0]), 0
        rows, quantised = cache(lambda: self._verbs.plain(x)), cache(lambda: self._verbs.quantised(x))
        for name in step.weights:
            self._found[step.output.id, column] = Scaled(self._weights.product(name, rows, quantised))
            column += self._weights.shapes[name][0]

    def _bias(self, step: Step) -> None:
        """Vectors added to some columns of a stack each."""
        assert step.output is not None
        (stack,), column = step.inputs, 0
        for name in step.weights:
            product = self._verbs.plain(self._found[stack.id, column])
            biased = self._mb.add(x=product, y=self._weights.vector(name))
            self._found[step.output.id, column] = Scaled(biased)
            column += self._weights.shapes[name][0]

    def _attend(self, q: Var, k: Var, v: Var, layer: int) -> Var:
        keys, values = (self._cached(name, x, layer) for name, x in ((KEYS, k), (VALUES, v)))
        return self._verbs.attend(q, keys, values, self._mask(self._config.window_of(layer)), self._config.score_scale)

    def _cached(self, name: str, x: Var, layer: int) -> Var:
        """Rows put into a state; returns all of the layer's [1, kv_heads, context, head_dim]."""
        mb, state, shape = self._mb, self._inputs[name], self._inputs[name].shape
        rows = self._verbs.heads(x, shape[3])
        rows = rows if self._verbs.half else mb.cast(x=rows, dtype="fp16")  # Core ML has no other states
        self._new[name].append(rows)
        begin, end = self._corners(layer)
        written = mb.slice_update(x=mb.read_state(input=state), update=rows, begin=begin, end=end)
        whole = mb.coreml_update_state(state=state, value=written)
        found = mb.slice_by_index(x=whole, begin=(layer, 0, 0, 0), end=(layer + 1, *shape[1:]))
        return found if self._verbs.half else mb.cast(x=found, dtype="fp32")

    def _corners(self, layer: int) -> tuple[Var, Var]:
        """Where in a state the rows of a layer begin and end."""
        config, first = self._config, self._inputs["position"]
        last = self._mb.add(x=first, y=np.int32(self._num_tokens))
        begin = self._mb.concat(values=[np.array([layer, 0], np.int32), first, np.zeros(1, np.int32)], axis=0)
        ends = np.array([layer + 1, config.num_kv_heads], np.int32), last, np.array([config.head_dim], np.int32)
        return begin, self._mb.concat(values=list(ends), axis=0)

    def _make_angles(self, local: bool) -> tuple[Var, Var]:
        """Cosines and sines of the tokens' positions, [1, T, 1, head_dim / 2]."""
        name, size = "rope.local" if local else "rope", self._config.head_dim // 2
        begin = self._mb.concat(values=[self._inputs["position"], np.zeros(1, np.int32)], axis=0)
        turned = angles(self._config, self._context, local)

        def rows(part: str, table: NDArray[np.float32]) -> Var:
            stored = self._weights.constant(f"{name}.{part}", lambda: table.astype(self._verbs.dtype))
            taken = self._mb.slice_by_size(x=stored, begin=begin, size=[self._num_tokens, size])
            return self._verbs.reshaped(taken, 1, self._num_tokens, 1, size)

        return rows("cosine", np.cos(turned)), rows("sine", np.sin(turned))

    def _make_mask(self, window: int) -> Var:
        """What is added to the scores of all queries that share keys: [1, 1, share * T, context]."""
        tokens, context = self._num_tokens, self._context
        table = self._weights.constant(
            f"mask.{tokens}.{window}", lambda: mask_rows(tokens, context, window).astype(self._verbs.dtype)
        )
        start = self._mb.sub(x=np.array([context - 1], np.int32), y=self._inputs["position"])
        begin = self._mb.concat(values=[np.zeros(1, np.int32), start], axis=0)
        rows = self._mb.slice_by_size(x=table, begin=begin, size=[tokens, context])
        share = self._config.num_heads // self._config.num_kv_heads
        rows = rows if share == 1 else self._mb.concat(values=[rows] * share, axis=0)
        return self._verbs.reshaped(rows, 1, 1, share * tokens, context)


def angles(config: ModelConfig, context: int, local: bool) -> NDArray[np.float32]:
    """By how much each position turns: float32 [context, head_dim / 2]."""
    return np.arange(context, dtype=np.float32)[:, None] * inverse_frequencies(config, local)

"""The recorded decoder as an ONNX graph: a decoder with past, with the inputs and outputs that Optimum gives it."""

from __future__ import annotations

from functools import cache

from bitnet_inference.conversion import onnx_verbs as verbs
from bitnet_inference.conversion.onnx_weights import Weights
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.onnx_writer import Graph
from bitnet_inference.model.loader import record
from bitnet_inference.model.plan import Plan, Step, Value
from bitnet_inference.model.rope import inverse_frequencies

_IDS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"
_BATCH, _LENGTH, _PAST, _ALL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"


def onnx_graph(checkpoint: Checkpoint, small: bool = False) -> Graph:
    """The graph of a checkpoint that is sound; its weights are read when it is written.

    `small`: ternary matrices in 2 bits and dense ones in 8, for an operator that ONNX Runtime alone has.
    """
    export = _Export(checkpoint, small)
    plans = record(checkpoint.config)
    hidden = export.run(plans.body)
    export.run(plans.head, hidden, "logits")
    return export.graph


class _Export:
    """A plan becomes nodes, step by step; values are known by what they are columns of, and where these begin."""

    def __init__(self, checkpoint: Checkpoint, small: bool) -> None:
        self.graph, self._config = Graph(), checkpoint.config
        self._weights = Weights(checkpoint, self.graph, small)
        self._names: dict[tuple[int, int], str] = {}
        self._turned: dict[bool, tuple[str, str]] = {}
        self._biases: dict[int, str] = {}
        self._declare()

    def run(self, plan: Plan, start: str = "", output: str = "") -> str:
        """Add the steps of a plan whose input is `start`; returns the name of what comes out, `output` if given."""
        self._names = {(plan.input.id, 0): start} if plan.input else {}
        for step in plan.steps:
            self._add(step)
        found = self._name(plan.output)
        return self.graph.add("Identity", found, name=output) if output else found

    def _declare(self) -> None:
        graph, config = self.graph, self._config
        for name, length in ((_IDS, _LENGTH), (_MASK, _ALL), (_POSITIONS, _LENGTH)):
            graph.inputs[name] = ("int64", (_BATCH, length))
        graph.outputs["logits"] = ("float32", (_BATCH, _LENGTH, config.vocab_size))
        for layer in range(config.num_layers):
            for part in ("key", "value"):
                heads = (_BATCH, config.num_kv_heads)
                graph.inputs[_past(layer, part)] = ("float32", (*heads, _PAST, config.head_dim))
                graph.outputs[_present(layer, part)] = ("float32", (*heads, _ALL, config.head_dim))

    def _name(self, value: Value) -> str:
        return self._names[value.root.id, value.column]

    def _add(self, step: Step) -> None:
        graph, more = self.graph, step.attributes
        x, y, z = ([self._name(value) for value in step.inputs] + [""] * 3)[:3]
        assert step.output is not None
        match step.verb:
            case "embed":
                made = self._embed(step.weights[0], more.get("scale", 1.0))
            case "norm":
                made = verbs.norm(graph, x, self._weights.vector(step.weights[0]), more["eps"], more.get("parts", 1))
            case "rope":
                made = verbs.rope(graph, x, self._angles(more.get("local", False)), self._config.head_dim)
            case "attend":
                made = self._attend(x, y, z, more["layer"])
            case "gate":
                made = verbs.gate(graph, x, y, more["activation"])
            case "add":
                made = graph.add("Add", x, y)
            case "bias":
                self._bias(step)
                return
            case _:
                self._linear(step, x)
                return
        self._names[step.output.id, 0] = made

    def _embed(self, name: str, scale: float) -> str:
        rows = self._weights.rows(name, _IDS)
        return rows if scale == 1 else self.graph.add("Mul", rows, verbs.number(self.graph, scale))

    def _linear(self, step: Step, x: str) -> None:
        """The products of a stack one by one: each is some columns of the step's output. x is quantised once."""
        assert step.verb == "linear" and step.output is not None
        quantised, column = cache(lambda: verbs.Quantised(self.graph, x, step.inputs[0].width)), 0
        for name in step.weights:
            self._names[step.output.id, column] = self._weights.product(name, x, quantised)
            column += self._weights.shapes[name][0]

    def _bias(self, step: Step) -> None:
        """Vectors added to some columns of a stack each."""
        assert step.output is not None
        (stack,), column = step.inputs, 0
        for name in step.weights:
            product = self._names[stack.id, column]
            self._names[step.output.id, column] = self.graph.add("Add", product, self._weights.vector(name))
            column += self._weights.shapes[name][0]

    def _angles(self, local: bool) -> tuple[str, str]:
        if local not in self._turned:
            name = "rope.local_frequencies" if local else "rope.frequencies"
            frequencies = self.graph.constant(inverse_frequencies(self._config, local), "float32", name)
            self._turned[local] = verbs.angles(self.graph, _POSITIONS, frequencies)
        return self._turned[local]

    def _attend(self, q: str, k: str, v: str, layer: int) -> str:
        config = self._config
        heads = verbs.Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        window = config.window_of(layer)
        if window not in self._biases:
            share = heads.num_heads // heads.num_kv_heads
            self._biases[window] = verbs.mask(self.graph, _IDS, _MASK, share, window)
        for part, x in (("key", k), ("value", v)):
            verbs.cached(self.graph, x, _past(layer, part), _present(layer, part), heads.num_kv_heads)
        keys, values = (_present(layer, part) for part in ("key", "value"))
        return verbs.attend(self.graph, q, keys, values, self._biases[window], heads, config.score_scale)


def _past(layer: int, part: str) -> str:
    return f"past_key_values.{layer}.{part}"


def _present(layer: int, part: str) -> str:
    return f"present.{layer}.{part}"

"""A recorded computation: a straight list of steps over values, with T (the tokens of a batch) left open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from bitnet_inference.formats.checkpoint import Experts
from bitnet_inference.model.contract import Expert


@dataclass(frozen=True)
class Value:
    """T rows of `width` numbers: float32, or the int8 codes of quantised rows.

    A value with a `parent` is columns `column` .. `column + width` of it.
    """

    id: int
    width: int
    kind: Literal["float32", "int8"] = "float32"
    parent: Value | None = None
    column: int = 0

    @property
    def root(self) -> Value:
        """The value that has this one's storage."""
        return self.parent or self

    def __str__(self) -> str:
        if self.parent is None:
            return f"%{self.id}"
        return f"%{self.parent.id}[{self.column}:{self.column + self.width}]"


@dataclass(frozen=True)
class Step:
    """One verb, or several fused into one ("norm+quantize").

    `weights` are canonical names; `attributes` are numbers and words that the verb needs. `plans` are those of experts,
    all with as many steps, each from some rows to as many.
    """

    verb: str
    inputs: tuple[Value, ...]
    output: Value | None
    weights: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[Plan, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The verbs that this step does, in order."""
        return tuple(self.verb.split("+"))

    def __str__(self) -> str:
        result = f"{self.output!s:>6} = " if self.output else " " * 9
        shape = f"{self.output.kind}[T, {self.output.width}]" if self.output else ""
        words = [*map(str, self.inputs), *self.weights, *(f"{k}={v}" for k, v in self.attributes.items())]
        line = f"{result}{self.verb:<24} {shape:<20} {' '.join(words)}".rstrip()
        first = "".join(f"\n    {step}" for plan in self.plans[:1] for step in plan.steps)
        return f"{line} {len(self.plans)} experts, the first of which does{first}" if first else line


@dataclass(frozen=True)
class Plan:
    """Steps in order, from `input` (None: from the batch's token ids) to `output`."""

    steps: tuple[Step, ...]
    output: Value
    input: Value | None = None

    def every_step(self) -> Iterator[Step]:
        """The steps in order, those of experts behind the one that mixes them."""
        for step in self.steps:
            yield step
            for plan in step.plans:
                yield from plan.every_step()

    def uses(self) -> Counter[int]:
        """How many steps read each value, by id; the plan's output counts as read once more."""
        return Counter([value.id for step in self.steps for value in step.inputs] + [self.output.id])

    def producers(self) -> dict[int, Step]:
        """The step that makes each value, by id."""
        return {step.output.id: step for step in self.steps if step.output}

    def next_id(self) -> int:
        """An id that no value of the plan has."""
        return 1 + max((value.id for step in self.steps for value in _values(step)), default=self.output.id)

    @property
    def layers(self) -> range:
        """The layers whose keys and values it caches."""
        layers = [step.attributes["layer"] for step in self.steps if step.parts[0] == "attend"]
        return range(layers[0], layers[-1] + 1) if layers else range(0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps))


def _values(step: Step) -> Iterator[Value]:
    yield from step.inputs
    if step.output:
        yield step.output


class StepTime(NamedTuple):
    """How long a step of a plan took; `plan` is a field of Plans, `verb` the step's: "select" leaves tokens out."""

    plan: str
    verb: str
    seconds: float


class Recorder:
    """The `Ops` that writes down instead of computing: its tensors are values, its weights names with their rows."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: the shape of every canonical name."""
        self._shapes = shapes
        self._steps: list[Step] = []
        self._num_values = 0

    def plan(self, output: Value, input: Value | None = None) -> Plan:
        """What has been recorded."""
        return Plan(tuple(self._steps), output, input)

    def value(self, width: int, parent: Value | None = None, column: int = 0) -> Value:
        """A new value."""
        self._num_values += 1
        return Value(self._num_values - 1, width, parent=parent, column=column)

    def _record(
        self, verb: str, width: int, inputs: tuple[Value, ...], weights: Sequence[str] = (), **more: Any
    ) -> Value:
        output = self.value(width)
        self._steps.append(Step(verb, inputs, output, tuple(weights), more))
        return output

    def weight(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names themselves."""
        return tuple(names)

    def embed(self, table: tuple[str, ...], scale: float) -> Value:
        """See Ops."""
        return self._record("embed", self._shapes[table[0]][1], (), table, **({} if scale == 1 else {"scale": scale}))

    def norm(self, x: Value, name: str, eps: float) -> Value:
        """See Ops."""
        parts = x.width // self._shapes[name][0]
        return self._record("norm", x.width, (x,), (name,), eps=eps, **({} if parts == 1 else {"parts": parts}))

    def linear(self, x: Value, weight: tuple[str, ...], biases: Sequence[str] = ()) -> tuple[Value, ...]:
        """See Ops. The biases of a stack are a step of their own, one vector behind the other."""
        widths = [self._shapes[name][0] for name in weight]
        y = self._record("linear", sum(widths), (x,), weight)
        if biases:
            y = self._record("bias", y.width, (y,), biases)
        if len(weight) == 1:
            return (y,)
        columns = [sum(widths[:i]) for i in range(len(widths))]
        return tuple(self.value(width, y, column) for width, column in zip(widths, columns, strict=True))

    def rope(self, x: Value, local: bool) -> Value:
        """See Ops."""
        return self._record("rope", x.width, (x,), (), **({"local": True} if local else {}))

    def attend(self, q: Value, k: Value, v: Value, layer: int) -> Value:
        """See Ops."""
        return self._record("attend", q.width, (q, k, v), layer=layer)

    def gate(self, gate: Value, up: Value, activation: str) -> Value:
        """See Ops."""
        return self._record("gate", gate.width, (gate, up), activation=activation)

    def mix(self, x: Value, scores: Value, experts: Experts, expert: Expert[Value]) -> Value:
        """See Ops. Each expert is a plan of its own."""
        plans = []
        for number in range(experts.count):
            ops = Recorder(self._shapes)
            rows = ops.value(x.width)
            plans.append(ops.plan(expert(ops, number, rows), rows))
        output = self.value(plans[0].output.width)
        more = {"used": experts.used, "renormalized": experts.renormalized}
        self._steps.append(Step("mix", (x, scores), output, (), more, tuple(plans)))
        return output

    def add(self, x: Value, y: Value) -> Value:
        """See Ops."""
        return self._record("add", x.width, (x, y))

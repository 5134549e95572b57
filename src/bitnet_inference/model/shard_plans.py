"""The pass that turns the fused plans of a model into those of one rank of a group.

Two verbs come in. `gather` makes whole rows of the columns that each rank has (`widths`, in the order of the ranks);
`sum` adds, in place, rows that are 0 on every rank but one. All ranks do them in the same order with the same T.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.model.fusion import PRODUCTS
from bitnet_inference.model.loader import Plans
from bitnet_inference.model.plan import Plan, Step, Value
from bitnet_inference.model.shards import Rows, heads, require_shards, rows

HEAD_NORMS = ("q_norm", "k_norm")  # of each head alone


def shard(plans: Plans, config: ModelConfig, rank: int, num_ranks: int) -> Plans:
    """The plans of a rank; its weights are the rows that `shards.rows` says, its heads those of `shards.rank_config`.

    Body and norm yield whole rows on every rank, the head the logits of the rank's rows of the vocabulary. An `embed`
    has `first` and `count`, the tokens whose rows the rank has: for all others it yields 0. Raises InvalidParams where
    the model has too few heads.
    """
    require_shards(config, num_ranks)
    group = _Group(config, rank, num_ranks)
    body, norm = (_Pass(plan, group).run(whole=True) for plan in (plans.body, plans.norm))
    return Plans(body, _Pass(plans.head, group).run(whole=False), norm)


@dataclass(frozen=True)
class _Group:
    config: ModelConfig
    rank: int
    size: int

    def matrix(self, name: str) -> _Part:
        """The split of what a matrix yields."""
        return _Part(rows(self.config, name, self.size))

    def attention(self) -> _Part:
        """The split of what all heads yield."""
        width = self.config.head_dim
        return _Part(tuple((begin * width, end * width) for (begin, end), _ in heads(self.config, self.size)))


class _Part(NamedTuple):
    """Columns of a value that are split: from where to where each rank has them; the last one has the last."""

    ranks: tuple[Rows, ...]

    @property
    def width(self) -> int:
        """How many there are."""
        return self.ranks[-1][1]

    def of(self, rank: int) -> int:
        begin, end = self.ranks[rank]
        return end - begin


@dataclass
class _Pass:
    plan: Plan
    group: _Group
    steps: list[Step] = field(default_factory=list)
    split: dict[int, list[_Part]] = field(default_factory=dict)  # the parts of values that are split, by id
    gathered: dict[tuple[int, int], Value] = field(default_factory=dict)  # by id and column
    num_values: int = 0

    def run(self, whole: bool) -> Plan:
        """The rank's plan; `whole`: what it yields is gathered."""
        self.num_values = self.plan.next_id()
        self._find_parts()
        for step in self.plan.steps:
            self._emit(step)
        output = self._whole(self.plan.output) if whole else self._mine(self.plan.output)
        return Plan(tuple(self.steps), output, self.plan.input)

    def _find_parts(self) -> None:
        """What products yield, in the order of columns: a stack of several kinds is several products."""
        products = [step for step in self.plan.steps if step.parts[0] in PRODUCTS]
        for step in sorted(products, key=lambda step: step.output.column if step.output else 0):
            assert step.output is not None
            self.split.setdefault(step.output.root.id, []).extend(map(self.group.matrix, step.weights))

    def _emit(self, step: Step) -> None:
        first = step.parts[0]
        if first == "embed":
            self._embed(step)
        elif first in PRODUCTS:
            self._product(step)
        elif first == "gate":
            self._gate(step)
        elif first == "attend":
            self._attend(step)
        elif first == "rope":
            self.steps.append(replace(step, inputs=tuple(map(self._mine, step.inputs))))
        elif first == "norm" and step.weights[0].endswith(HEAD_NORMS):
            self._norm_heads(step)
        elif first == "bias":
            self._bias(step)
        else:
            self.steps.append(replace(step, inputs=tuple(map(self._whole, step.inputs))))

    def _embed(self, step: Step) -> None:
        assert step.output is not None
        begin, end = self.group.matrix(step.weights[0]).ranks[self.group.rank]
        self.steps.append(replace(step, attributes={**step.attributes, "first": begin, "count": end - begin}))
        self.steps.append(Step("sum", (step.output,), None))

    def _product(self, step: Step) -> None:
        assert step.output is not None
        inputs = [self._whole(step.inputs[0])]
        if step.parts[-1] == "add":
            (begin, end), residual = self.group.matrix(step.weights[0]).ranks[self.group.rank], step.inputs[1]
            inputs.append(self._new(end - begin, self._whole(residual), begin))
        self.steps.append(replace(step, inputs=tuple(inputs), output=self._mine(step.output)))

    def _gate(self, step: Step) -> None:
        """What follows in the same step works on whole rows, and becomes one of its own."""
        assert step.output is not None
        gate, up = map(self._mine, step.inputs)
        (part,) = self._parts(step.inputs[0])
        gated = step.output if len(step.parts) == 1 else self._new(part.width)
        self.split[gated.id] = [part]
        activation = {"activation": step.attributes["activation"]}
        self.steps.append(Step("gate", (gate, up), self._mine(gated), attributes=activation))
        if gated is not step.output:
            rest = {name: value for name, value in step.attributes.items() if name != "activation"}
            verb = "+".join(step.parts[1:])
            self.steps.append(Step(verb, (self._whole(gated),), step.output, step.weights, rest))

    def _attend(self, step: Step) -> None:
        assert step.output is not None
        self.split[step.output.id] = [self.group.attention()]
        self.steps.append(replace(step, inputs=(self._mine(step.inputs[0]),), output=self._mine(step.output)))

    def _norm_heads(self, step: Step) -> None:
        assert step.output is not None and step.verb == "norm"
        self.split[step.output.id] = self._parts(step.inputs[0])
        rest = {name: value for name, value in step.attributes.items() if name != "parts"}
        output = self._mine(step.output)
        if (parts := output.width // self.group.config.head_dim) > 1:
            rest["parts"] = parts
        self.steps.append(replace(step, inputs=(self._mine(step.inputs[0]),), output=output, attributes=rest))

    def _bias(self, step: Step) -> None:
        assert step.output is not None
        self.split[step.output.id] = self._parts(step.inputs[0])
        self.steps.append(replace(step, inputs=(self._mine(step.inputs[0]),), output=self._mine(step.output)))

    def _parts(self, value: Value) -> list[_Part]:
        """The parts that the columns of a split value are."""
        parts, column, found = self.split[value.root.id], 0, []
        for part in parts:
            if value.column <= column < value.column + value.width:
                found.append(part)
            column += part.width
        assert sum(part.width for part in found) == value.width, "a part is taken whole"
        return found

    def _mine(self, value: Value) -> Value:
        """The columns of a value that the rank has; the value itself where it is not split."""
        if value.root.id not in self.split:
            return value
        rank, width = self.group.rank, sum(part.of(self.group.rank) for part in self._parts(value))
        if value.parent is None:
            return replace(value, width=width)
        column, before = 0, 0
        for part in self.split[value.root.id]:
            if column < value.column:
                before += part.of(rank)
            column += part.width
        return replace(value, width=width, parent=self._mine(value.parent), column=before)

    def _whole(self, value: Value) -> Value:
        """The value with the columns of all ranks, gathered when it is asked for first."""
        if value.root.id not in self.split:
            return value
        key = value.root.id, value.column
        if key not in self.gathered:
            (part,) = self._parts(value)
            widths = tuple(end - begin for begin, end in part.ranks)
            self.gathered[key] = self._new(sum(widths))
            assert sum(widths) == value.width, "what several ranks have is never gathered"
            self.steps.append(Step("gather", (self._mine(value),), self.gathered[key], attributes={"widths": widths}))
        return self.gathered[key]

    def _new(self, width: int, parent: Value | None = None, column: int = 0) -> Value:
        self.num_values += 1
        return Value(self.num_values - 1, width, parent=parent, column=column)

"""The recorded plan, what the passes make of it, and where its buffers lie."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_inference.formats.checkpoint import LocalLayers, ModelConfig, expected_shapes
from bitnet_inference.model.buffers import num_floats, plan_buffers
from bitnet_inference.model.fusion import fuse
from bitnet_inference.model.loader import record
from bitnet_inference.model.plan import Plan, Step, Value

CONFIG = ModelConfig(
    family="bitnet",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=128,
    activation="relu2",
    norm_eps=1e-5,
    rope_theta=10000.0,
    tie_embeddings=True,
    sub_norms=True,
)
LLAMA = dataclasses.replace(CONFIG, sub_norms=False, activation="silu", tie_embeddings=False)
NORMED = dataclasses.replace(LLAMA, linear_norm=True)
DENSE = ("embed", "head")


def fused(config: ModelConfig, dense: tuple[str, ...] = DENSE) -> Plan:
    body, shapes = record(config).body, dict(expected_shapes(config))
    return fuse(body, lambda name: "dense" if name.endswith(dense) else "ternary", shapes, config.head_dim)


def verbs(plan: Plan, layer: int = 0) -> list[str]:
    per_layer = (len(plan.steps) - 2) // CONFIG.num_layers
    return [step.verb for step in plan.steps[2 + layer * per_layer :][:per_layer]]


def test_a_layer_of_bitnet_is_ten_steps() -> None:
    expected = [
        "norm+quantize", "ternary", "rope+write", "attend", "norm+quantize", "ternary+add",
        "norm+quantize", "ternary", "gate+norm+quantize", "ternary+add",
    ]  # fmt: skip
    plan = fused(CONFIG)
    assert [step.verb for step in plan.steps[:2]] == ["rotations", "embed"]
    assert verbs(plan) == verbs(plan, 1) == expected


def test_without_sub_norms_the_rows_are_quantised_as_they_are() -> None:
    assert verbs(fused(LLAMA))[4] == "quantize"
    assert verbs(fused(LLAMA))[8] == "gate+quantize"


def test_a_norm_for_each_projection_is_quantised_for_each() -> None:
    names = verbs(fused(NORMED))
    assert names[:7] == ["norm", *["norm+quantize", "ternary"] * 3]


def test_a_norm_of_what_was_normed_is_a_step_of_its_own() -> None:
    both = dataclasses.replace(NORMED, sub_norms=True)
    assert verbs(fused(both))[9:12] == ["norm", "norm+quantize", "ternary+add"]


def test_gemma_norms_heads_and_what_is_added_and_turns_local_layers_by_other_angles() -> None:
    local = LocalLayers(layers=(1,), window=8, rope_theta=100.0)
    gemma = dataclasses.replace(LLAMA, head_norms=True, post_norms=True, embed_scale=2.0, local=local)
    plan = fused(gemma)
    assert [step.verb for step in plan.steps[:3]] == ["rotations", "rotations", "embed"]
    assert [step.attributes.get("local", False) for step in plan.steps[:2]] == [False, True]
    a_layer = ["norm+quantize", "ternary", "norm", "norm", "rope+write", "attend", "quantize", "ternary", "norm", "add",
               "norm+quantize", "ternary", "gate+quantize", "ternary", "norm", "add"]  # fmt: skip
    assert [step.verb for step in plan.steps[3:]] == a_layer * 2
    turns = [step.inputs[3] for step in plan.steps if step.verb == "rope+write"]
    assert turns == [step.output for step in plan.steps[:2]]


def test_biases_of_a_stack_are_one_step_behind_its_products() -> None:
    qwen = dataclasses.replace(LLAMA, qkv_bias=True)
    for dense in (DENSE, (*DENSE, ".k")):
        plan = fused(qwen, dense)
        products = [step for step in plan.steps if step.weights and step.weights[0][-2:] in (".q", ".k", ".v")]
        biases = [step for step in plan.steps if step.verb == "bias"]
        assert [step.weights for step in biases] == [
            tuple(f"layers.{layer}.{name}.bias" for name in "qkv") for layer in range(2)
        ]
        for layer, bias in enumerate(biases):
            (stack,), of_layer = bias.inputs, products[layer * len(products) // 2 :][: len(products) // 2]
            assert {step.output.root for step in of_layer if step.output} == {stack} and stack.width == 128
            write = next(step for step in plan.steps[plan.steps.index(bias) :] if step.verb == "rope+write")
            assert [(value.root, value.column) for value in write.inputs[:3]] == [
                (bias.output, 0), (bias.output, 64), (bias.output, 96)
            ]  # fmt: skip


def test_biases_behind_norms_for_each_projection_are_for_each() -> None:
    qwen = dataclasses.replace(NORMED, qkv_bias=True)
    assert verbs(fused(qwen))[:10] == ["norm", *["norm+quantize", "ternary", "bias"] * 3]


def test_a_dense_model_has_no_codes() -> None:
    plan = fuse(record(LLAMA).body, lambda name: "dense", dict(expected_shapes(LLAMA)), LLAMA.head_dim)
    assert verbs(plan) == ["norm", "dense", "rope+write", "attend", "dense+add", "norm", "dense", "gate", "dense+add"]


def test_a_stack_of_both_kinds_becomes_a_product_for_each_run() -> None:
    plan = fused(CONFIG, ("embed", ".k"))
    q, k, v = (step for step in plan.steps if step.weights and step.weights[0].startswith("layers.0.") and
               step.weights[0][-1] in "qkv")  # fmt: skip
    assert [step.verb for step in (q, k, v)] == ["ternary", "dense", "ternary"]
    assert [(step.output.column, step.output.width) for step in (q, k, v) if step.output] == [
        (0, 64),
        (64, 32),
        (96, 32),
    ]
    assert q.inputs == v.inputs != k.inputs


def test_scores_and_hidden_states_have_plans_of_their_own() -> None:
    plans = record(CONFIG)
    assert [step.verb for step in plans.head.steps] == ["norm", "linear"]
    assert [step.verb for step in plans.norm.steps] == ["norm"]
    assert plans.head.input and plans.head.output.width == CONFIG.vocab_size


def test_a_plan_reads_as_a_list() -> None:
    line = next(line for line in str(fused(CONFIG)).splitlines() if "layers.0.q" in line)
    assert line.split()[1:5] == ["=", "ternary", "float32[T,", "128]"]


def lifetimes(plan: Plan) -> dict[int, tuple[int, int, int]]:
    """First write, last use and size of every value in the arena, by the id of its root."""
    spans: dict[int, tuple[int, int, int]] = {}
    for i, step in enumerate(plan.steps):
        values: list[Value] = [*step.inputs, *([step.output] if step.output else [])]
        for root in (value.root for value in values):
            first = spans.get(root.id, (i, i, 0))[0]
            spans[root.id] = first, i, num_floats(root)
    return spans


@pytest.mark.parametrize("config", [CONFIG, LLAMA, NORMED, dataclasses.replace(LLAMA, qkv_bias=True)])
@given(dense=st.sets(st.sampled_from([".q", ".k", ".v", ".o", ".gate", ".up", ".down"])))
def test_values_that_live_together_lie_apart(config: ModelConfig, dense: set[str]) -> None:
    plan = fused(config, (*DENSE, *dense))
    layout = plan_buffers(plan)
    spans = lifetimes(plan)
    placed = {id: (*spans[id], offset) for id, offset in layout.offsets.items()}
    residuals = {(step.inputs[1].root.id, step.output.root.id) for step in plan.steps
                 if step.verb.endswith("+add") and step.output}  # fmt: skip
    for a, (first_a, last_a, size_a, at_a) in placed.items():
        assert at_a % 16 == 0 and at_a + size_a <= layout.num_floats
        for b, (first_b, last_b, size_b, at_b) in placed.items():
            together = a < b and first_a <= last_b and first_b <= last_a
            handed_over = ((a, b) in residuals and last_a == first_b) or ((b, a) in residuals and last_b == first_a)
            if together and not handed_over:
                assert at_a + size_a <= at_b or at_b + size_b <= at_a, (a, b)
    assert plan.output.id not in layout.offsets


def test_a_sum_does_not_overwrite_a_residual_that_is_columns_of_wider_rows() -> None:
    x = Value(0, 64)
    codes, part, whole = Value(1, 64, "int8"), Value(2, 32, parent=x, column=32), Value(4, 32)
    add = Step("ternary+add", (codes, part), Value(3, 32), ("o",))
    steps = (Step("embed", (), x), Step("quantize", (x,), codes), add, Step("norm", (Value(3, 32),), whole, ("norm",)))
    layout = plan_buffers(Plan(steps, whole))
    assert layout.offsets[3] >= layout.offsets[0] + 64


def test_buffers_are_used_again() -> None:
    two, many = plan_buffers(fused(CONFIG)), plan_buffers(fused(dataclasses.replace(CONFIG, num_layers=12)))
    assert two.num_floats == many.num_floats

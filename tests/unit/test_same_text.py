"""A request's text does not depend on what else runs: random arrivals, cancels, preemptions, budgets."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import Listener, ScriptedModel, generate, greedy_text, run

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import Request

NUM_STEPS = 30  # until the last arrival or cancel


class Job(NamedTuple):
    """A request, when it comes, and when it is cancelled."""

    request: Request
    listener: Listener
    prompt: list[int]
    positions: range
    heard: list[tuple[int, list[float]]]
    start: int
    cancel_at: int | None


@st.composite
def jobs(draw):
    prompt = draw(st.lists(st.integers(0, 22), min_size=1, max_size=20))
    length, seed = draw(st.integers(0, 25)), draw(st.integers(0, 3))
    temperature, overflow = draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from(["error", "sliding"]))
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=length, overflow=overflow)
    start, cancel_after = draw(st.integers(0, 12)), draw(st.sampled_from([None, None, None, 0, 3, 9]))
    heard: list[tuple[int, list[float]]] = []

    def hear(position, logits):
        heard.extend((position + row, values.tolist()) for row, values in enumerate(logits))

    listener = Listener()
    start_at = draw(st.integers(0, len(prompt)))
    positions = range(start_at, draw(st.integers(start_at, len(prompt))))
    kind = draw(st.sampled_from(["logits", "hidden", None]))
    reader = None if kind is None else PromptReader(hear, positions, kind)
    request = Request(prompt, params, listener, eos_ids=[0], reader=reader)
    cancel_at = None if cancel_after is None else start + cancel_after
    return Job(request, listener, prompt, positions, heard, start, cancel_at)


def run_all(engine, all_jobs):
    step, num_blocks = 0, engine.num_free_blocks
    while step <= NUM_STEPS or engine.has_work:
        for job in all_jobs:
            if job.start == step:
                engine.submit(job.request)
            if job.cancel_at == step:
                engine.cancel(job.request)
        engine.step()
        held = [block for job in all_jobs for block in job.request.blocks.view.tolist()]
        assert len(set(held)) == num_blocks - engine.num_free_blocks
        step += 1
        assert step < 5000, "the engine does not come to an end"
    assert engine.num_free_blocks == num_blocks


@settings(max_examples=150, deadline=None)
@given(
    all_jobs=st.lists(jobs(), min_size=1, max_size=9),
    num_blocks=st.integers(6, 40),
    max_sequences=st.integers(1, 5),
    max_tokens=st.integers(1, 30),
    block_size=st.sampled_from([1, 4, 7]),
)
def test_the_same_text_as_alone(all_jobs, num_blocks, max_sequences, max_tokens, block_size):
    limits = {"num_blocks": max(num_blocks, -(-24 // block_size)), "block_size": block_size}
    model = ScriptedModel(max_sequences=max_sequences, max_tokens=max_tokens, **limits)
    run_all(Engine(model), all_jobs)
    for job in all_jobs:
        alone = generate(ScriptedModel(**limits), job.prompt, job.request.params, eos_ids=[0])
        if job.cancel_at is not None and job.listener.reason == "cancelled":
            assert job.listener.token_ids == alone.token_ids[: len(job.listener.token_ids)]
            continue
        assert (job.listener.token_ids, job.listener.reason) == (alone.token_ids, alone.reason)
        if job.request.reads:
            width = None if job.request.reads == "logits" else model.config.hidden_size
            rows = [model.logits_after(job.prompt[: at + 1])[:width].tolist() for at in job.positions]
            assert job.heard == list(zip(job.positions, rows, strict=True))


def test_preemption_happens_and_nobody_notices():
    model = ScriptedModel(num_blocks=8, block_size=4, max_sequences=4)
    engine, listeners = Engine(model), [Listener() for _ in range(4)]
    for first, listener in enumerate(listeners):
        engine.submit(Request([first] * 4, SamplingParams(temperature=0.0, max_tokens=20), listener))
    run(engine)
    for first, listener in enumerate(listeners):
        assert listener.token_ids == greedy_text(model, [first] * 4, 20)
    assert model.num_tokens > 4 * 23, "tokens were computed again"

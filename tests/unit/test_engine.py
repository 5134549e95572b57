"""The engine, step by step, on a scripted model."""

from __future__ import annotations

import numpy as np
import pytest
import sampling_truth as truth
from scripted import Listener, ScriptedModel, generate, greedy_text, run

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import EngineError, InvalidParams, OutOfMemory, PromptTooLong, QueueFull

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)


def test_greedy_text_is_the_models_own():
    model = ScriptedModel()
    listener = generate(model, [1, 2, 3], GREEDY)
    assert listener.token_ids == greedy_text(model, [1, 2, 3], 10)
    assert listener.reason == "length"
    assert model.full_rows == [], "greedy requests need no whole vocabulary"
    assert model.num_forwards == 10
    assert (listener.usage.num_prompt_tokens, listener.usage.num_output_tokens) == (3, 10)


def test_a_seeded_sample_is_what_the_plain_truth_draws():
    model = ScriptedModel()
    listener = generate(
        model, [4, 5], SamplingParams(temperature=0.8, top_k=9, top_p=0.9, seed=-1, max_tokens=20), choice=2
    )
    tokens = [4, 5]
    for _ in range(20):
        bits = truth.noise((1 << 64) - 1, 2, len(tokens))
        logits = model.logits_after(tokens)
        tokens.append(truth.sample(logits, bits=bits, temperature=0.8, top_k=9, top_p=0.9, min_p=0.0))
    assert listener.token_ids == tokens[2:]


def test_without_a_seed_one_is_drawn_and_told():
    model, params = ScriptedModel(vocab_size=1000), SamplingParams(max_tokens=20)
    first, second = (Request([1], params, Listener()) for _ in range(2))
    assert first.seed != second.seed
    engine = Engine(model)
    engine.submit(first)
    run(engine)
    again = generate(model, [1], SamplingParams(max_tokens=20, seed=first.seed))
    assert again.token_ids == first.sink.token_ids


@pytest.mark.parametrize("use", ["eos", "stop_token_ids"])
def test_an_end_token_stops_and_is_not_delivered(use):
    model = ScriptedModel()
    text = greedy_text(model, [7], 10)
    end = text[4]
    ends_at = text.index(end)
    if use == "eos":
        listener = generate(model, [7], GREEDY, eos_ids=[end])
    else:
        listener = generate(model, [7], SamplingParams(temperature=0.0, stop_token_ids=[end], max_tokens=10))
    assert listener.token_ids == text[:ends_at]
    assert listener.reason == "stop" and listener.finishes[0].token_id == end
    assert listener.usage.num_output_tokens == ends_at


def test_ignore_eos_makes_the_models_end_an_ordinary_token():
    model = ScriptedModel()
    text = greedy_text(model, [7], 10)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=10)
    assert generate(model, [7], params, eos_ids=[text[4]]).token_ids == text
    both = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=[text[4]], max_tokens=10)
    assert generate(model, [7], both, eos_ids=[text[4]]).reason == "stop"


def test_min_tokens_bans_the_ends_until_then():
    model = ScriptedModel(vocab_size=3)
    params = SamplingParams(temperature=0.0, min_tokens=5, max_tokens=50)
    prompt = [0]
    assert np.argmax(model.logits_after(prompt + [0] * 5)) == 1, "the model would end here at once"
    listener = generate(model, prompt, params, eos_ids=[1, 2])
    assert listener.token_ids == [0] * 5
    assert listener.reason == "stop" and listener.finishes[0].token_id == 1


def test_min_tokens_that_leave_nothing_end_with_an_error():
    model = ScriptedModel(vocab_size=3)
    listener = generate(model, [0], SamplingParams(min_tokens=2), eos_ids=[0, 1, 2])
    assert listener.reason == "error" and listener.token_ids == []
    assert "no token" in str(listener.finishes[0].error)


def test_a_sink_that_has_enough_ends_its_request():
    listener = generate(ScriptedModel(), [1], GREEDY, listener=Listener(stop_at=3))
    assert listener.reason == "stop" and listener.finishes[0].token_id is None
    assert len(listener.token_ids) == 3


def test_max_tokens_zero_computes_the_prompt_alone():
    model = ScriptedModel()
    listener = generate(model, [1, 2], SamplingParams(max_tokens=0))
    assert (listener.reason, listener.token_ids, model.num_tokens) == ("length", [], 2)


def test_the_end_of_the_context_ends_the_text():
    model = ScriptedModel(max_positions=12)
    listener = generate(model, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None))
    assert listener.token_ids == greedy_text(model, [1, 2, 3], 9)
    assert listener.reason == "length"


def test_a_small_cache_is_a_short_context():
    model = ScriptedModel(num_blocks=2, block_size=4)
    listener = generate(model, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None))
    assert (listener.reason, len(listener.token_ids)) == ("length", 5)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_and_bias_see_the_right_history(penalty):
    model = ScriptedModel(vocab_size=5)
    values = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, penalty: 1.7}
    params = SamplingParams(temperature=0.0, logit_bias={3: 1.0}, max_tokens=40, **values)
    names = {name.removesuffix("_penalty"): value for name, value in values.items()}
    prompt = [2, 2, 4]
    tokens = list(prompt)
    for _ in range(40):
        logits = truth.edited(model.logits_after(tokens), tokens, 3, bias={3: 1.0}, banned=[], **names)
        tokens.append(int(np.argmax(logits)))
    assert generate(model, prompt, params).token_ids == tokens[3:]
    assert greedy_text(model, prompt, 40) != tokens[3:]


def test_logprobs_are_the_models_own():
    model = ScriptedModel()
    params = SamplingParams(temperature=0.2, logprobs=2, logit_bias={0: 100.0}, seed=1, max_tokens=2)
    listener = generate(model, [9], params)
    assert listener.token_ids == [0, 0]
    for history, entry in zip(([9], [9, 0]), listener.logprobs, strict=True):
        logits = model.logits_after(history).astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(exact[0], abs=1e-6)
        assert [i for i, _ in entry.top] == np.argsort(-logits, kind="stable")[:2].tolist()
        assert [x for _, x in entry.top] == pytest.approx(np.sort(exact)[::-1][:2], abs=1e-6)
    chosen_alone = generate(model, [9], SamplingParams(temperature=0.0, logprobs=0, max_tokens=1))
    assert chosen_alone.logprobs[0].top == ()
    assert generate(model, [9], GREEDY).logprobs == [None] * 10


@pytest.mark.parametrize("max_tokens", [1, 3, 64])
def test_prompt_logits_come_in_order_and_once(max_tokens):
    model, heard = ScriptedModel(max_tokens=max_tokens), []
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    generate(
        model,
        prompt,
        SamplingParams(max_tokens=0),
        reader=PromptReader(lambda at, x: heard.append((at, x.copy())), range(8)),
    )
    assert [at for at, _ in heard] == list(range(0, 8, max_tokens))
    assert np.concatenate([x for _, x in heard]).tolist() == [
        model.logits_after(prompt[: i + 1]).tolist() for i in range(8)
    ]


def test_the_whole_context_can_be_scored_but_not_continued():
    model, heard = ScriptedModel(max_positions=8), []
    whole = SamplingParams(max_tokens=0)
    generate(model, [1] * 8, whole, reader=PromptReader(lambda at, x: heard.append(x.shape), range(8)))
    assert heard == [(8, 23)]
    with pytest.raises(PromptTooLong, match="8 tokens, at most 7"):
        generate(model, [1] * 8, GREEDY)
    with pytest.raises(PromptTooLong, match="9 tokens, at most 8"):
        generate(model, [1] * 9, whole)


def test_of_a_prompt_beyond_the_context_it_is_said_what_fits_into_the_cache():
    model = ScriptedModel(num_blocks=2, block_size=4, max_positions=16)
    with pytest.raises(PromptTooLong, match="17 tokens, at most 7 fit"):
        generate(model, [1] * 17, GREEDY)


def test_a_failing_callback_ends_its_request_alone():
    def fall_over(position, logits):
        raise RuntimeError("no")

    engine, listeners = Engine(ScriptedModel()), [Listener(), Listener()]
    engine.submit(Request([1, 2], GREEDY, listeners[0], reader=PromptReader(fall_over, range(2))))
    engine.submit(Request([1, 2], GREEDY, listeners[1]))
    run(engine)
    assert [listener.reason for listener in listeners] == ["error", "length"]


@pytest.mark.parametrize("prompt", [[], [[1]], [1.5], "text", [1, [2]], [-1], [1 << 40], [10**30], [True, False], None])
def test_no_list_of_token_ids(prompt):
    with pytest.raises(InvalidParams):
        Request(prompt, GREEDY, Listener())


def test_what_can_never_run_is_refused_at_once():
    model = ScriptedModel(num_blocks=3, block_size=4)
    with pytest.raises(InvalidParams, match="token 23: the vocabulary has 0 to 22"):
        generate(model, [23], GREEDY)
    with pytest.raises(InvalidParams, match="stop_token_ids"):
        generate(model, [1], SamplingParams(stop_token_ids=[23]))
    with pytest.raises(OutOfMemory, match="max_cache_tokens"):
        generate(model, [1] * 12, GREEDY)
    assert generate(model, [1] * 11, GREEDY).reason == "length"


def test_a_full_queue_says_so():
    engine = Engine(ScriptedModel(), max_waiting=2)
    for _ in range(2):
        engine.submit(Request([1], GREEDY, Listener()))
    with pytest.raises(QueueFull, match="2 requests"):
        engine.submit(Request([1], GREEDY, Listener()))
    run(engine)
    engine.submit(Request([1], GREEDY, Listener()))


def test_no_room_for_a_single_block():
    with pytest.raises(OutOfMemory, match="KV cache"):
        Engine(ScriptedModel(num_blocks=0))


def test_the_cache_is_as_large_as_useful():
    assert Engine(ScriptedModel(num_blocks=10**6)).num_free_blocks == 8 * 16
    assert Engine(ScriptedModel(num_blocks=10)).num_free_blocks == 10
    assert Engine(ScriptedModel(num_blocks=10), max_num_blocks=4).num_free_blocks == 4


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=10), SamplingParams(temperature=0.0, logprobs=1)])
def test_broken_logits_end_only_their_request(params, value):
    def break_logits(history, logits):
        if history[0] == 2 and len(history) == 4:
            logits[:] = value

    model = ScriptedModel()
    model.change_logits = break_logits
    engine, broken, sound = Engine(model), Listener(), Listener()
    engine.submit(Request([2], params, broken))
    engine.submit(Request([1], GREEDY, sound))
    run(engine)
    assert (broken.reason, sound.reason) == ("error", "length")
    assert isinstance(broken.finishes[0].error, EngineError)
    assert "at position 4: its weights are broken" in str(broken.finishes[0].error)
    assert len(broken.token_ids) == 3
    assert sound.token_ids == greedy_text(model, [1], 10)


def test_a_raising_sink_ends_only_its_request():
    engine, bad, good = Engine(ScriptedModel()), Listener(fail_at=2), Listener()
    for listener in (bad, good):
        engine.submit(Request([1], GREEDY, listener))
    run(engine)
    assert (bad.reason, good.reason) == ("error", "length")
    assert str(bad.finishes[0].error) == "the listener fell over"


def test_a_sink_that_raises_at_the_end_harms_nobody(caplog):
    class Grumbler(Listener):
        def finish(self, finish, usage):
            super().finish(finish, usage)
            raise RuntimeError("I was not done")

    engine, bad, good = Engine(ScriptedModel()), Grumbler(), Listener()
    for listener in (bad, good):
        engine.submit(Request([1], GREEDY, listener))
    run(engine)
    assert (bad.reason, good.reason) == ("length", "length")
    assert "I was not done" in caplog.text


def test_a_failing_forward_ends_the_requests_of_its_step_and_no_more():
    model = ScriptedModel(max_sequences=2)
    engine, listeners = Engine(model), [Listener() for _ in range(3)]
    for listener in listeners:
        engine.submit(Request([1], GREEDY, listener))

    def fail(batch):
        if model.num_forwards == 3:
            model.num_forwards += 1
            raise MemoryError("no more")

    model.before_forward = fail
    run(engine)
    assert [listener.reason for listener in listeners] == ["error", "error", "length"]
    assert listeners[2].token_ids == greedy_text(model, [1], 10)
    assert engine.num_free_blocks == engine._scheduler.pool.num_blocks


def test_cancelling():
    model = ScriptedModel(max_sequences=1)
    engine, listeners = Engine(model), [Listener() for _ in range(3)]
    requests = [Request([1], GREEDY, listener) for listener in listeners]
    for request in requests:
        engine.submit(request)
    engine.step()
    engine.cancel(requests[0])  # running
    engine.cancel(requests[2])  # waiting
    engine.cancel(requests[2])
    engine.step()
    assert [len(listener.token_ids) for listener in listeners] == [1, 1, 0]
    run(engine)
    engine.cancel(requests[1])  # has ended
    engine.cancel(Request([1], GREEDY, Listener()))  # was never submitted
    engine.step()
    assert [listener.reason for listener in listeners] == ["cancelled", "length", "cancelled"]
    assert not engine.has_work


def test_a_request_ends_when_its_time_is_over():
    now, model = [0.0], ScriptedModel(max_sequences=1)
    engine, listeners = Engine(model, clock=lambda: now[0]), [Listener() for _ in range(3)]
    for timeout_s, listener in zip((5, 7, None), listeners, strict=True):
        engine.submit(Request([1], GREEDY, listener, terms=Terms(timeout_s=timeout_s)))
    for now[0] in range(9):
        engine.step()
    assert [len(listener.token_ids) for listener in listeners] == [5, 2, 2]
    run(engine)
    assert [listener.reason for listener in listeners] == ["timeout", "timeout", "length"]
    assert not engine.has_work


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), pytest.param(10**400, id="huge"), "5", True])
@pytest.mark.parametrize("priority", [0, 1.5, "high", True, None, 10**9])
def test_impossible_terms_are_refused(timeout_s, priority):
    with pytest.raises(InvalidParams, match="timeout_s" if priority == 0 and priority is not True else "priority"):
        Terms(priority=priority, timeout_s=timeout_s)


def test_terms_are_python_s_own_numbers_whatever_they_are_given_as():
    for small in (np.int8, np.uint8):  # the negative of which is 246
        assert Request([1], GREEDY, Listener(), terms=Terms(priority=small(10))).rank < (0, 0)
    now = [1e9 + 0.25]  # which float32 rounds to whole minutes
    engine, listener = Engine(ScriptedModel(), clock=lambda: now[0]), Listener()
    engine.submit(Request([1], GREEDY, listener, terms=Terms(timeout_s=np.float32(0.5))))
    engine.step()
    assert engine.seconds_to_deadline() == 0.5 and not listener.finishes


def test_a_long_prompt_does_not_stall_running_requests():
    model = ScriptedModel(max_tokens=8, max_positions=256)
    engine, runner, newcomer = Engine(model), Listener(), Listener()
    engine.submit(Request([1], SamplingParams(temperature=0.0, max_tokens=40), runner))
    engine.step()
    engine.submit(Request([2] * 100, GREEDY, newcomer))
    for num_tokens in range(2, 16):
        engine.step()
        assert len(runner.token_ids) == num_tokens, "a token in every step"
    run(engine)
    assert newcomer.token_ids == greedy_text(model, [2] * 100, 10)

"""What one request has computed, others with the same beginning find; and no text changes by it."""

from __future__ import annotations

import pytest
from scripted import Listener, ScriptedModel, generate, greedy_text, run

from bitnet_inference.engine.blocks import BlockPool
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.prompt_reader import PromptReader
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.terms import Terms
from bitnet_inference.errors import InvalidParams

PROMPT = [number % 23 for number in range(18)]  # four blocks of four, and two tokens


def ask(engine, prompt, num_tokens=5, **options):
    """What the next request hears, run to its end; its text is what it would be alone."""
    listener = Listener()
    engine.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens), listener, **options))
    run(engine)
    assert listener.token_ids == greedy_text(engine._model, prompt, num_tokens)
    return listener


def num_cached(engine, prompt, **options):
    before = engine._model.num_tokens
    listener = ask(engine, prompt, **options)
    cached, num_output = listener.usage.num_cached_tokens, len(listener.token_ids)
    assert engine._model.num_tokens - before == len(prompt) - cached + num_output - 1
    return cached


def test_the_same_beginning_is_computed_once():
    engine = Engine(ScriptedModel())
    assert num_cached(engine, PROMPT) == 0
    assert num_cached(engine, PROMPT) == 17
    assert num_cached(engine, [*PROMPT[:9], 0, 0, 0, 0, 0]) == 9, "the block in which they part is copied"
    assert num_cached(engine, [5, *PROMPT[1:]]) == 0
    assert num_cached(engine, PROMPT[4:]) == 0, "the same tokens elsewhere are another content"


def test_the_last_token_is_always_computed():
    engine = Engine(ScriptedModel())
    assert [num_cached(engine, PROMPT[:8], num_tokens=1) for _ in range(3)] == [0, 7, 7]


def test_the_next_turn_of_a_talk_finds_the_answer_too():
    engine = Engine(ScriptedModel())
    answer = ask(engine, PROMPT, num_tokens=11).token_ids
    assert num_cached(engine, [*PROMPT, *answer, 3, 4]) == 28, "18 + 10 tokens were computed"


def test_salts_keep_tenants_apart():
    engine = Engine(ScriptedModel())
    assert [num_cached(engine, PROMPT, terms=Terms(cache_salt=salt)) for salt in "aabab"] == [0, 17, 0, 17, 17]
    assert num_cached(engine, PROMPT) == 0
    with pytest.raises(InvalidParams, match="cache_salt"):
        Terms(cache_salt=5)


def test_prompt_logits_are_computed_all_the_same():
    engine, heard = Engine(ScriptedModel()), []
    ask(engine, PROMPT)
    listener = ask(engine, PROMPT, reader=PromptReader(lambda at, logits: heard.append(len(logits)), range(18)))
    assert listener.usage.num_cached_tokens == 0 and sum(heard) == len(PROMPT)


def test_running_requests_share_and_only_full_blocks():
    model = ScriptedModel()
    engine, requests = Engine(model), []
    for _ in range(3):
        requests.append(Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=20), Listener()))
        engine.submit(requests[-1])
        while not requests[-1].num_output:
            engine.step()
    tables = [request.blocks.view.tolist() for request in requests]
    assert tables[0][:4] == tables[1][:4] == tables[2][:4]
    assert len({table[4] for table in tables}) == 3
    run(engine)
    assert all(request.sink.token_ids == greedy_text(model, PROMPT, 20) for request in requests)


def test_of_blocks_that_part_within_the_one_with_the_most_is_copied():
    """Of 32 tokens four at least: a copy too has its price."""
    engine = Engine(ScriptedModel(block_size=32))
    text = [number % 23 for number in range(45)]
    for known in (20, 30, 10):
        ask(engine, [*text[:known], *[9] * (34 - known)])
    for common, expected in ((3, 0), (4, 4), (15, 15), (20, 20), (29, 29), (31, 30)):
        assert num_cached(engine, [*text[:common], 22, 0, 1, 2], num_tokens=1) == expected


def test_a_copy_that_would_take_the_last_room_is_not_made():
    engine = Engine(ScriptedModel(num_blocks=3, block_size=4))
    ask(engine, [0, 1, 2, 3, 4, 5], num_tokens=1)
    assert num_cached(engine, [0, 1, 9, 9, 9, 9, 9, 9, 9], num_tokens=1) == 0


def test_what_was_used_last_stays_longest():
    engine = Engine(ScriptedModel(num_blocks=10, block_size=4))
    prompts = [[number] * 9 for number in range(3)]
    for prompt in prompts:
        num_cached(engine, prompt, num_tokens=1)
    assert num_cached(engine, prompts[0], num_tokens=1) == 8
    assert num_cached(engine, [9] * 9, num_tokens=1) == 0
    assert num_cached(engine, prompts[0], num_tokens=1) == 8
    assert num_cached(engine, prompts[1], num_tokens=1) == 4, "the end of a text goes before its beginning"


def test_after_preemption_its_own_blocks_are_found_again():
    model = ScriptedModel(num_blocks=6, block_size=4)
    engine, listeners = Engine(model), [Listener() for _ in range(2)]
    for first, listener in enumerate(listeners):
        engine.submit(Request([first] * 9, SamplingParams(temperature=0.0, max_tokens=8), listener))
    run(engine)
    for first, listener in enumerate(listeners):
        assert listener.token_ids == greedy_text(model, [first] * 9, 8)
        assert listener.usage.num_cached_tokens == 0, "what it had computed itself is no gift"
    assert 2 * 16 < model.num_tokens < 2 * 16 + 12


def test_a_failed_step_publishes_nothing():
    model = ScriptedModel()

    def fail(batch):
        raise MemoryError("no more")

    engine, listener = Engine(model), Listener()
    model.before_forward = fail
    engine.submit(Request(PROMPT, SamplingParams(), listener))
    run(engine)
    assert listener.reason == "error"
    model.before_forward = lambda batch: None
    assert num_cached(engine, PROMPT) == 0


def test_a_copy_that_was_not_made_is_not_found():
    model = ScriptedModel(block_size=32)
    engine, copy, text = Engine(model), model.copy_blocks, [number % 23 for number in range(45)]
    ask(engine, text)

    def fail(pairs):
        raise MemoryError("no more")

    model.copy_blocks, listener = fail, Listener()
    engine.submit(Request([*text[:40], 9, 8], SamplingParams(), listener))
    run(engine)
    assert listener.reason == "error"
    model.copy_blocks = copy
    ask(engine, [*text[:40], 9, 8, 7])  # whose text is what it would be alone


def test_contents_are_compared_whole():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    first = pool.publish(blocks[0], "", b"one")
    second = pool.publish(blocks[1], first, b"two")
    assert pool.find("", b"one") == (blocks[0], first) and pool.find(first, b"two") == (blocks[1], second)
    assert pool.find("", b"two") is pool.find("salt", b"one") is pool.find(second, b"two") is None
    pool.release(blocks[::-1])
    assert pool.num_free == 3 and pool.num_idle(blocks) == 2
    pool.share(blocks)
    assert pool.num_free == 1 and pool.num_idle(blocks) == 0
    pool.release(blocks[::-1])
    assert pool.allocate(2) == [2, blocks[1]], "blank blocks first, then the one released longest ago"
    assert pool.find(first, b"two") is None and pool.find("", b"one") == (blocks[0], first)


def test_texts_alone_and_with_hits_are_equal_when_sampled():
    model, params = ScriptedModel(), SamplingParams(seed=7, max_tokens=12)
    engine, listeners = Engine(model), [Listener(), Listener()]
    for listener in listeners:
        engine.submit(Request(PROMPT, params, listener))
        run(engine)
    alone = generate(ScriptedModel(), PROMPT, params).token_ids
    assert [listener.token_ids for listener in listeners] == [alone, alone]
    assert listeners[1].usage.num_cached_tokens == 17


def choices(engine, prompt, count, params, **options):
    """So many choices of one prompt, submitted at once."""
    requests = []
    for choice in range(count):
        leader = requests[0] if requests else None
        requests.append(Request(prompt, params, Listener(), choice=choice, leader=leader, **options))
        engine.submit(requests[-1])
    return requests


@pytest.mark.parametrize("num_prompt", [1, 2, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("max_tokens", [3, 64])
def test_choices_compute_their_prompt_once_and_keep_it_once(num_prompt, max_tokens):
    model, params = ScriptedModel(max_tokens=max_tokens), SamplingParams(seed=3, max_tokens=6)
    engine, prompt = Engine(model), PROMPT[:num_prompt]
    requests = choices(engine, prompt, 3, params)
    while not all(request.num_output for request in requests):
        engine.step()
    tables = [request.blocks.view.tolist() for request in requests]
    num_full = (num_prompt - 1) // 4
    assert tables[0][:num_full] == tables[1][:num_full] == tables[2][:num_full]
    assert len({block for table in tables for block in table[num_full:]}) == sum(
        len(table) - num_full for table in tables
    )
    run(engine)
    assert model.num_tokens == num_prompt + 2 + 3 * 5, "each choice computes the last token of the prompt"
    for choice, request in enumerate(requests):
        assert request.sink.token_ids == generate(ScriptedModel(), prompt, params, choice=choice).token_ids


def test_choices_do_not_need_their_leader():
    engine, params = Engine(ScriptedModel(max_tokens=4)), SamplingParams(temperature=0.0, max_tokens=4)
    requests = choices(engine, PROMPT, 3, params)
    engine.step()
    engine.cancel(requests[0])
    run(engine)
    assert [request.sink.reason for request in requests] == ["cancelled", "length", "length"]
    assert requests[2].sink.token_ids == greedy_text(engine._model, PROMPT, 4)


def test_others_do_not_wait_for_a_leader():
    engine, params = Engine(ScriptedModel(max_tokens=8)), SamplingParams(temperature=0.0, max_tokens=4)
    requests = choices(engine, PROMPT[:10], 2, params)
    other = Request([3], params, Listener())
    engine.submit(other)
    engine.step()
    engine.step()
    assert other.num_output == 1
    run(engine)
    assert requests[1].sink.reason == "length"


def test_choices_of_different_prompts_are_refused():
    leader = Request(PROMPT, SamplingParams(), Listener())
    for prompt, terms in ((PROMPT[:3], None), (PROMPT, Terms(cache_salt="x"))):
        with pytest.raises(InvalidParams, match="choices of one prompt"):
            Request(prompt, SamplingParams(), Listener(), leader=leader, terms=terms)

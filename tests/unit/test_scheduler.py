"""Blocks and shares, without a model."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import Listener, ScriptedModel

from bitnet_inference.engine.batch import Batches, build_batch
from bitnet_inference.engine.blocks import BlockPool
from bitnet_inference.engine.events import Events
from bitnet_inference.engine.ints import Ints
from bitnet_inference.engine.pace import MAX_SLOWER
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.room import Chunk
from bitnet_inference.engine.scheduler import Scheduler
from bitnet_inference.engine.share import Share
from bitnet_inference.engine.terms import Terms

NUMBERS = count()


def scheduler(num_blocks=100, block_size=4, max_sequences=8, max_tokens=16, looks_ahead=False):
    model = ScriptedModel(
        block_size=block_size,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        looks_ahead=looks_ahead,
    )
    return Scheduler(BlockPool(num_blocks), Events(), model.capabilities, max_waiting=100)


def request(num_prompt, **terms):
    """Of which the cache has nothing."""
    return Request([next(NUMBERS)] * num_prompt, SamplingParams(), Listener(), terms=Terms(**terms))


def step(scheduler):
    """What a step gives to whom; everything given is computed, and who has caught up gets a new token."""
    shares = scheduler.schedule()
    for share in shares:
        share.request.num_computed += share.num_tokens
        if share.request.num_pending == 0:
            share.request.tokens.extend([1])
    return [(share.request, share.num_tokens) for share in shares]


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("asr"), st.integers(0, 11)), max_size=60))
def test_blocks_are_counted(num_blocks, actions):
    pool, references = BlockPool(num_blocks), [0] * num_blocks
    for action, number in actions:
        held = [block for block, count in enumerate(references) if count]
        if action == "a" and number <= pool.num_free:
            blocks = pool.allocate(number)
            assert len(set(blocks)) == number and not set(blocks) & set(held)
            for block in blocks:
                references[block] = 1
        elif held and action != "a":
            block = held[number % len(held)]
            (pool.share if action == "s" else pool.release)([block])
            references[block] += 1 if action == "s" else -1
        assert pool.num_free == references.count(0)


def test_blocks_are_not_freed_twice_nor_invented():
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.release(blocks)
    for action in (lambda: pool.release(blocks[:1]), lambda: pool.share(blocks[:1]), lambda: pool.allocate(3)):
        with pytest.raises(AssertionError):
            action()


def test_blocks_come_in_the_order_in_which_they_were_freed():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([2, 0])
    assert pool.allocate(3) == [3, 2, 0]


@given(st.lists(st.lists(st.integers(-5, 5), max_size=40), max_size=5), st.lists(st.integers(-5, 5)))
def test_ints_grow(parts, start):
    ints, expected = Ints(start), list(start)
    for part in parts:
        ints.extend(part)
        ints.append(len(part))
        expected += [*part, len(part)]
        assert ints.view.tolist() == expected == [ints[index] for index in range(ints.length)]
        assert len(ints) == len(expected)
    ints.cut(0)
    assert len(ints) == 0 and ints.view.tolist() == []


@given(st.lists(st.lists(st.sampled_from("tbgr"), min_size=3, max_size=3), max_size=30))
def test_a_batch_in_the_arrays_of_the_last_one_is_as_if_built_anew(steps):
    batches, requests = Batches(block_size=4), [request(number) for number in (1, 4, 6)]
    for number, each in enumerate(requests):
        each.num_computed = each.num_prompt - 1
        each.blocks.extend([10 * number, 10 * number + 1])
    for step in steps:
        for each, what in zip(requests, step, strict=True):
            _change(each, what)
        shares = [Share(each, 1) for each in requests if each.num_pending]
        if shares:
            built, expected = batches.build(shares), build_batch(shares, 4)
            for name in ("token_ids", "positions", "slots", "starts"):
                assert getattr(built, name).tolist() == getattr(expected, name).tolist()
            for row, share in enumerate(shares):
                num_needed = share.request.num_computed // 4 + 1
                assert (built.block_tables[row, :num_needed] == expected.block_tables[row, :num_needed]).all()


def _change(request, what):
    """From step to step a request gets a token ("t"), a block too ("b"), no turn ("g"), or other blocks ("r")."""
    if what == "g":
        request.num_computed = request.tokens.length
        return
    if what == "r":
        blocks = request.blocks.view.tolist()
        request.forget()
        request.blocks.extend([block + 100 for block in blocks])
    request.tokens.append(request.tokens.length)
    request.num_computed = request.tokens.length - 1
    if what == "b" or request.num_computed >= 4 * request.blocks.length:
        request.blocks.extend([request.blocks[request.blocks.length - 1] + 1])


def test_everybody_who_decodes_comes_before_the_prompts():
    queue, long, short = scheduler(max_tokens=16), request(40), request(3)
    queue.submit(long)
    assert step(queue) == [(long, 16)]
    queue.submit(short)
    assert step(queue) == [(long, 16)]
    assert step(queue) == [(long, 8), (short, 3)]
    another = request(30)
    queue.submit(another)
    assert step(queue) == [(long, 1), (short, 1), (another, 14)]
    queue.drop(long)
    assert step(queue) == [(short, 1), (another, 15)]
    assert step(queue) == [(short, 1), (another, 1)]


def test_prompts_share_what_the_pace_allows_while_others_decode():
    queue, stream, prompts = scheduler(num_blocks=1000, max_tokens=512), request(1), [request(20), request(300)]
    queue.submit(stream)
    assert step(queue) == [(stream, 1)]
    assert step(queue) == [(stream, 1)]
    for each in prompts:
        queue.submit(each)
    assert step(queue) == [(stream, 1), (prompts[0], 15)], "nothing is measured yet"
    queue.pace.note(1, [], 0.075 / (MAX_SLOWER - 1))  # so prompts may take 75 ms
    queue.pace.note(0, [Chunk(0, 100)], 0.100)
    assert step(queue) == [(stream, 1), (prompts[0], 5), (prompts[1], 74)]
    queue.drop(stream)
    queue.drop(prompts[0])
    assert step(queue) == [(prompts[1], 226)], "nobody waits for a token"


def test_who_has_just_begun_waits_once_for_the_prompts_that_came_with_it():
    queue, first, others = scheduler(num_blocks=1000, max_tokens=512), request(20), [request(30), request(600)]
    queue.submit(first)
    assert step(queue) == [(first, 20)]
    for each in others:
        queue.submit(each)
    assert step(queue) == [(first, 1), (others[0], 30), (others[1], 481)]
    assert step(queue) == [(first, 1), (others[0], 1), (others[1], 14)]


def test_long_prompts_come_in_chunks_after_the_running_ones():
    queue, short, long = scheduler(max_tokens=16), request(3), request(40)
    queue.submit(short)
    assert step(queue) == [(short, 3)]
    queue.submit(long)
    assert step(queue) == [(short, 1), (long, 15)]
    assert step(queue) == [(short, 1), (long, 15)]
    assert step(queue) == [(short, 1), (long, 10)]
    assert step(queue) == [(short, 1), (long, 1)]


def test_first_come_first_served():
    queue, requests = scheduler(max_tokens=10, max_sequences=2), [request(6) for _ in range(3)]
    for each in requests:
        queue.submit(each)
    assert step(queue) == [(requests[0], 6), (requests[1], 4)]
    assert step(queue) == [(requests[0], 1), (requests[1], 2)]
    queue.drop(requests[0])
    assert step(queue) == [(requests[1], 1), (requests[2], 6)]


def test_a_prompt_gives_way_to_one_of_higher_priority_that_finds_a_place():
    queue, long, urgent = scheduler(num_blocks=20), request(40), request(20, priority=1)
    queue.submit(long)
    assert step(queue) == [(long, 16)]
    queue.submit(urgent)
    assert step(queue) == [(urgent, 16)]
    assert step(queue) == [(urgent, 4), (long, 12)]
    huge = request(60, priority=2)
    queue.submit(huge)
    assert step(queue) == [(urgent, 1), (long, 12)], "there are no blocks for it"


def test_admission_waits_for_blocks_and_nobody_overtakes():
    queue, requests = scheduler(num_blocks=3), [request(8), request(8), request(1)]
    for each in requests:
        queue.submit(each)
    assert step(queue) == [(requests[0], 8)]
    assert queue.num_waiting == 2
    queue.drop(requests[0])
    assert step(queue) == [(requests[1], 8), (requests[2], 1)]


def test_the_last_admitted_gives_way_and_comes_back_first():
    queue, requests = scheduler(num_blocks=3), [request(4), request(4), request(4)]
    for each in requests:
        queue.submit(each)
    newcomer = request(1)
    queue.submit(newcomer)
    assert step(queue) == [(each, 4) for each in requests]
    assert step(queue) == [(requests[0], 1)]
    assert list(queue.waiting) == [requests[1], requests[2], newcomer]
    assert queue.pool.num_free == 1
    assert step(queue) == [(requests[0], 1)], "the newcomer would fit, but does not overtake"
    queue.drop(requests[0])
    assert step(queue) == [(requests[1], 1)], "the token it had got; what it had computed is copied"


def test_higher_priorities_come_first_and_within_one_who_came_first():
    queue, running = scheduler(max_sequences=1), request(1)
    queue.submit(running)
    assert step(queue) == [(running, 1)]
    requests = [request(1, priority=priority) for priority in (0, 2, -1, 0, 2)]
    for each in requests:
        queue.submit(each)
    assert step(queue) == [(running, 1)], "nobody is pushed out to make room"
    queue.drop(running)
    for index in (1, 4, 0, 3, 2):
        assert step(queue) == [(requests[index], 1)]
        queue.drop(requests[index])


def test_the_lowest_priority_gives_way_for_blocks():
    queue, low, high = scheduler(num_blocks=3), request(4), request(4, priority=1)
    queue.submit(low)
    assert step(queue) == [(low, 4)]
    queue.submit(high)
    assert step(queue) == [(low, 1), (high, 4)]
    assert step(queue) == [(high, 1)]
    assert queue.waiting == [low]


def test_dropping_gives_all_blocks_back():
    queue, requests = scheduler(num_blocks=10), [request(9), request(9)]
    for each in requests:
        queue.submit(each)
    step(queue)
    assert queue.pool.num_free == 4
    queue.cancel(requests[0])
    assert list(queue.drop_cancelled()) == [requests[0]]
    assert queue.pool.num_free == 7
    queue.drop(requests[1])
    assert queue.pool.num_free == 10 and not queue.has_work


def test_a_request_that_comes_and_goes_while_others_are_dropped():
    queue, requests = scheduler(), [request(1), request(1)]
    queue.submit(requests[0])
    queue.cancel(requests[0])
    dropped = queue.drop_cancelled()
    assert next(dropped) is requests[0]
    queue.submit(requests[1])
    queue.cancel(requests[1])
    assert list(dropped) == [requests[1]]
    assert not queue.has_work


def test_who_decodes_holds_the_next_block_of_many():
    """Only for models that look ahead, and up to the end of the context."""
    for looks_ahead, num_blocks, expected in ((True, 100, 2), (False, 100, 1), (True, 2, 1)):
        books = scheduler(num_blocks, looks_ahead=looks_ahead)
        one = request(3)
        one.max_context = 8
        books.submit(one)
        step(books)
        (share,) = books.schedule()  # position 3, the last of its block
        assert one.blocks.length == expected
        has_next = Batches(4).build([share]).has_next
        assert has_next == (expected == 2)
    books = scheduler(looks_ahead=True)
    one = request(7)
    one.max_context = 8
    books.submit(one)
    step(books)
    books.schedule()
    assert one.blocks.length == 2, "there is no position behind the last"

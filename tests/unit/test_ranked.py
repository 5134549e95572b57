"""What an LLM ranks before it is seen: the best of many choices, and beam searches, on the model in the package."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bitnet_inference import LLM, BeamParams, InvalidParams, PromptTooLong, QueueFull, SamplingParams, WordFilter
from bitnet_inference.engine.scheduler import MAX_WAITING
from bitnet_inference.in_flight import MAX_IN_FLIGHT

PROMPT = "Once upon a time there was a"
SAMPLED = SamplingParams(seed=3, max_tokens=12, temperature=1.3)
TALK = [{"role": "user", "content": "Tell me a story about a mole"}]


@pytest.fixture(scope="module")
def llm():
    with LLM.load("default", threads=1) as loaded:
        yield loaded


def mean(text):
    return math.fsum(token.logprob for token in text.logprobs) / len(text.logprobs)


def test_the_best_of_many_choices(llm):
    scored = SamplingParams(seed=3, max_tokens=12, temperature=1.3, logprobs=1)
    every = [stream.read() for stream in llm.stream_choices(PROMPT, 6, scored)]
    best = sorted(every, key=mean, reverse=True)[:2]
    found = llm.choices(PROMPT, 2, SAMPLED, best_of=6)
    assert [text.token_ids for text in found] == [text.token_ids for text in best]
    assert [text.token_ids for text in best] != [text.token_ids for text in every[:2]]
    assert all(text.logprobs is None for text in found), "nobody asked for them"
    assert [text.logprobs for text in llm.choices(PROMPT, 2, scored, best_of=6)] == [text.logprobs for text in best]
    assert [text.text for text in llm.choices(PROMPT, 6, SAMPLED)] == [text.text for text in every]


def test_equal_choices_stay_in_order_and_an_empty_one_comes_last(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)
    assert len({text.text for text in llm.choices(PROMPT, 3, greedy, best_of=4)}) == 1
    sometimes_empty = SamplingParams(seed=1, max_tokens=1, stop_token_ids=range(0, llm.config.vocab_size, 2))
    found = llm.choices(PROMPT, 8, sometimes_empty, best_of=8)
    assert all(text.end_logprobs is None for text in found), "nobody asked for them"
    lengths = [len(text.token_ids) for text in found]
    assert 0 < lengths.count(0) < 8 and not any(lengths[-lengths.count(0) :])


def test_answers_are_ranked_too(llm):
    first, second = llm.chat_choices(TALK, 2, SAMPLED, best_of=3)
    assert first.text != second.text and not first.text.startswith(" ")
    searched, same = llm.chat_beam_search([TALK, TALK], BeamParams(num_beams=2, max_tokens=5))
    assert searched[0].text == same[0].text == llm.chat_beam_search(TALK, BeamParams(num_beams=2, max_tokens=5))[0].text
    assert not searched[0].text.startswith(" ") and searched[0].score < 0


def test_beams_end_before_their_stop_strings(llm):
    plain = BeamParams(num_beams=4, num_choices=4, max_tokens=16)
    unstopped = [(text.text, text.score) for text in llm.beam_search(PROMPT, plain)]
    found = llm.beam_search(PROMPT, replace(plain, stop="no such text"))
    assert [(text.text, text.score) for text in found] == unstopped
    for stop in ([". He", "lived"], [".", " a"]):
        found = llm.beam_search(PROMPT, replace(plain, stop=stop))
        stopped = [text for text in found if text.finish_reason == "stop"]
        assert stopped and {text.stopped_by for text in stopped} <= set(stop)
        assert not any(each in text.text for text in found for each in stop)
        for text in stopped:  # the tokens of the stop string are its own, as in generate
            assert llm.tokenizer.decode(text.token_ids).startswith(f"{text.text}{text.stopped_by}")
            assert text.usage.num_output_tokens == len(text.token_ids)


@pytest.mark.parametrize("best_of", [None, 4])
def test_choices_of_many_prompts_are_what_each_gives(llm, best_of):
    prompts, params = [PROMPT, [5, 6, 7], "The fox"], [SAMPLED, SamplingParams(seed=1, max_tokens=3), SAMPLED]
    together = llm.choices(prompts, 3, params, best_of=best_of)
    alone = [llm.choices(*each, best_of=best_of) for each in zip(prompts, [3] * 3, params, strict=True)]
    assert [[text.text for text in texts] for texts in together] == [[text.text for text in texts] for texts in alone]
    answers = llm.chat_choices([TALK, TALK], 2, SAMPLED, best_of=best_of)
    assert [text.text for text in answers[0]] == [text.text for text in answers[1]]
    with pytest.raises(InvalidParams, match="2 params for 3 prompts"):
        llm.choices(prompts, 3, params[:2])
    with pytest.raises(PromptTooLong, match=r"^prompts\[1\]"):
        llm.choices([PROMPT, [5] * 5000], 3, SAMPLED)


def test_choices_of_many_prompts_leave_others_room(llm):
    others = [llm.stream(PROMPT, SAMPLED) for _ in range(MAX_WAITING - MAX_IN_FLIGHT)]
    texts = llm.choices([PROMPT] * 6, 128, SamplingParams(seed=1, max_tokens=1))
    assert [len(each) for each in texts] == [128] * 6
    assert all(stream.read().finish_reason for stream in others)


@pytest.mark.parametrize("best_of", [1, 2.0, "3", True])
def test_impossible_best_of(llm, best_of):
    with pytest.raises(InvalidParams, match="best_of is"):
        llm.choices(PROMPT, 2, SAMPLED, best_of=best_of)


def test_a_search_finds_likelier_texts_than_greedy_decoding(llm):
    params = BeamParams(num_beams=5, num_choices=3, max_tokens=10, length_penalty=0.0, ignore_eos=True)
    found = llm.beam_search(PROMPT, params)
    prompt = llm.tokenizer.encode(PROMPT)
    sums = [math.fsum(llm.score([*prompt, *text.token_ids])[len(prompt) :]) for text in found]
    assert [text.score for text in found] == pytest.approx(sums, rel=1e-5) == sorted(sums, reverse=True)
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert sums[0] >= math.fsum(llm.score([*prompt, *greedy.token_ids])[len(prompt) :])
    assert [text.text for text in found] == [llm.tokenizer.decode(text.token_ids) for text in found]
    assert found[0].usage.num_output_tokens == 10 and found[0].finish_reason == "length"


def test_many_prompts_at_a_time_give_what_each_gives(llm):
    params = BeamParams(num_beams=3, num_choices=2, max_tokens=6)
    prompts = [PROMPT, "The fox", [5, 6, 7]]
    together = llm.beam_search(prompts, params)
    alone = [llm.beam_search(prompt, params) for prompt in prompts]
    assert [[(text.text, text.score) for text in texts] for texts in together] == [
        [(text.text, text.score) for text in texts] for texts in alone
    ]


def test_a_full_queue_is_waited_for(llm, monkeypatch):
    submit, number = llm._worker.submit, 0

    def sometimes(request):
        nonlocal number
        number += 1
        if number in (2, 5):
            raise QueueFull("full")
        submit(request)

    monkeypatch.setattr(llm._worker, "submit", sometimes)
    params = BeamParams(num_beams=2, max_tokens=3)
    found = llm.beam_search([[number, 7] for number in range(4)], params)
    assert [texts[0].text for texts in found] == [llm.beam_search([number, 7], params)[0].text for number in range(4)]


def test_an_error_cancels_the_other_searches(llm):
    with pytest.raises(InvalidParams, match="the prompt holds token"):
        llm.beam_search([[1, 2], [1 << 20]], BeamParams(num_beams=2, max_tokens=None, ignore_eos=True))
    assert llm.beam_search([1, 2], BeamParams(num_beams=2, max_tokens=2))


def test_a_search_that_is_cut_off_has_no_text(llm):
    params = BeamParams(num_beams=4, num_choices=2, max_tokens=None, ignore_eos=True)
    found = llm.beam_search([1, 2], params, timeout_s=0.02)
    assert [(text.text, text.score, text.finish_reason) for text in found] == [("", None, "timeout")] * 2


def test_params_of_a_search(llm):
    with pytest.raises(InvalidParams, match="params must be BeamParams"):
        llm.beam_search(PROMPT, SAMPLED)


def test_filters_look_at_what_a_search_finds():
    params = BeamParams(num_beams=2, max_tokens=6, ignore_eos=True)
    with LLM.load("default", threads=1) as plain:
        word = plain.beam_search(PROMPT, params)[0].text.split()[0]
    with LLM.load("default", threads=1, filters=[WordFilter([word])]) as llm:
        (found,) = llm.beam_search(PROMPT, params)
    assert found.finish_reason == "filtered" and word not in found.text

"""The library's surface on the model that comes with the package, on native kernels."""

import asyncio

import numpy as np
import pytest

from bitnet_inference import LLM, SamplingParams, text_completion

ASK = [{"role": "user", "content": "Tell me a story about a brave fox called Mia"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    seen = []
    with LLM.load(threads=1, progress=lambda done, total: seen.append((done, total))) as loaded:
        assert seen and seen[-1][0] == seen[-1][1]
        yield loaded


def test_it_recommends_how_to_sample(llm):
    assert not llm.default_params.is_greedy and llm.tokenizer.templates


def test_batches_streams_and_single_requests_give_the_same_text(llm):
    alone = llm.chat(ASK, GREEDY)
    assert alone.text and alone.text == llm.tokenizer.decode(alone.token_ids)
    other = [{"role": "user", "content": "Hello"}]
    assert llm.chat([other, ASK, other], GREEDY)[1].token_ids == alone.token_ids
    assert "".join(piece.text for piece in llm.stream_chat(ASK, GREEDY)) == alone.text

    async def read():
        return "".join([piece.text async for piece in llm.stream_chat(ASK, GREEDY)])

    assert asyncio.run(read()) == alone.text


def test_a_beginning_from_the_cache_changes_no_bit(llm):
    params = SamplingParams(seed=5, max_tokens=70, ignore_eos=True, logprobs=3)
    first = llm.chat(ASK * 3, params, cache_salt="new")
    again = llm.chat(ASK * 3, params, cache_salt="new")
    assert first.usage.num_cached_tokens == 0 < again.usage.num_cached_tokens
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    turn = [*llm.encode_chat(ASK * 3), *first.token_ids, 5]
    cached, computed = (llm.generate(turn, params, cache_salt=salt) for salt in ("new", "another"))
    assert cached.usage.num_cached_tokens > again.usage.num_cached_tokens and computed.usage.num_cached_tokens == 0
    assert (cached.token_ids, cached.logprobs) == (computed.token_ids, computed.logprobs)
    choices = [stream.read() for stream in llm.stream_chat_choices(ASK * 3, 2, params, cache_salt="third")]
    assert choices[1].usage.num_cached_tokens == choices[1].usage.num_prompt_tokens - 1
    assert (choices[0].token_ids, choices[0].logprobs) == (first.token_ids, first.logprobs)


def test_seeds_repeat(llm):
    params = SamplingParams(seed=5, max_tokens=24)
    assert llm.chat(ASK, params).token_ids == llm.chat([ASK, ASK], params)[1].token_ids


def test_greedy_text_is_the_argmax_of_the_logits(llm):
    prompt = llm.encode_chat(ASK)
    answer = llm.generate(prompt, GREEDY).token_ids
    logits = llm.logits(prompt + answer)
    assert logits.shape == (len(prompt + answer), llm.config.vocab_size) and np.isfinite(logits).all()
    assert logits[len(prompt) - 1 : -1].argmax(axis=1).tolist() == answer


def test_scores_agree_with_logprobs(llm):
    (result,) = text_completion(llm, ["Once upon a time"], temperature=0, max_gen_len=8, logprobs=True, echo=True)
    ids = llm.tokenizer.encode("Once upon a time")
    answer = llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=8)).token_ids
    assert np.allclose(result["logprobs"], llm.score(ids + answer), atol=1e-6)


def test_stop_strings(llm):
    text = llm.chat(ASK, GREEDY).text
    stop = text[10:14]
    output = llm.chat(ASK, SamplingParams(temperature=0.0, max_tokens=24, stop=stop))
    assert output.text == text[: text.index(stop)] and output.stopped_by == stop

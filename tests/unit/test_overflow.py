"""Conversations and prompts that are too long, on the model that comes with the package."""

import pytest

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams, OutOfMemory, PromptTooLong
from bitnet_inference.llm import LLM
from bitnet_inference.text.word_filter import WordFilter

CONTEXT = 192
SYSTEM = {"role": "system", "content": "You tell stories."}
QUICK = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    with LLM.load("default", threads=1, max_cache_tokens=CONTEXT) as loaded:
        assert loaded.max_context == CONTEXT
        yield loaded


def turn(number):
    question = {"role": "user", "content": f"What did animal {number} do on day {number}?" + " And then?" * number}
    return [question, {"role": "assistant", "content": f"It found {number} apples."}]


TURNS = [message for number in range(12) for message in turn(number)]
LAST = {"role": "user", "content": "Tell me about the fox"}


def params(**options):
    return SamplingParams(**{"temperature": 0, "max_tokens": 8, "overflow": "keep_system"} | options)


@pytest.mark.parametrize("opening", [[], [SYSTEM], [SYSTEM, {"role": "developer", "content": "Be brief."}]])
@pytest.mark.parametrize("max_tokens", [8, 30, None])
def test_the_oldest_turns_are_left_out(llm, opening, max_tokens):
    wanted = params(max_tokens=max_tokens)
    room = min(max_tokens or CONTEXT, CONTEXT // 4)
    talk = [*opening, *TURNS, LAST]
    kept = next(
        short
        for start in range(0, len(TURNS) + 1, 2)
        if len(llm.encode_chat(short := [*opening, *TURNS[start:], LAST])) <= CONTEXT - room
    )
    assert [*opening, LAST] != kept != talk
    with llm.stream_chat(talk, wanted) as stream:
        assert stream.request.prompt.tolist() == llm.encode_chat(kept)
        output = stream.read()
    assert output.token_ids == llm.chat(kept, params(max_tokens=max_tokens, overflow="error")).token_ids
    usage = output.usage
    assert usage.num_prompt_tokens + usage.num_dropped_tokens == len(llm.encode_chat(talk))
    assert usage.num_context_tokens == usage.num_prompt_tokens + usage.num_output_tokens
    assert usage.max_context == CONTEXT and 0 < usage.context_fraction <= 1
    assert [each.token_ids for each in llm.chat([talk, kept], wanted)] == [output.token_ids] * 2
    choices = llm.stream_chat_choices(talk, 2, wanted)
    assert choices[0].read().token_ids == output.token_ids and choices[1].read().usage.num_dropped_tokens


def test_filters_look_once_at_turns_that_are_left_out_once_for_all_choices():
    class Counting(WordFilter):
        num_texts = 0

        def check_prompt(self, text):
            self.num_texts += 1

    counts = []
    for num_choices in (1, 6):
        looked = Counting(["no such word"])
        with LLM.load("default", threads=1, max_cache_tokens=CONTEXT, filters=[looked]) as filtered:
            texts = filtered.chat_choices([SYSTEM, *TURNS, LAST], num_choices, params())
            assert all(text.usage.num_dropped_tokens for text in texts)
        counts.append(looked.num_texts)
    assert counts == [len([SYSTEM, *TURNS, LAST])] * 2, "filters look at each message once"


def test_a_conversation_that_fits_is_whole(llm):
    usage = llm.chat([SYSTEM, *TURNS[:4], LAST], params()).usage
    assert usage.num_dropped_tokens == 0
    assert usage.num_prompt_tokens == len(llm.encode_chat([SYSTEM, *TURNS[:4], LAST]))


def test_a_turn_is_left_out_with_all_that_answers_it(llm):
    """Two answers in a row, and an answer in front of the first question."""
    long = {"role": "assistant", "content": "It found apples. " * 30}
    talk = [SYSTEM, long, {"role": "user", "content": "And?"}, long, long, LAST, long]
    talk[-1] = {"role": "assistant", "content": "Once"}
    with llm.stream_chat(talk, params()) as stream:
        assert stream.request.prompt.tolist() == llm.encode_chat([SYSTEM, LAST, talk[-1]])


def test_what_is_kept_may_be_too_long(llm):
    for talk in ([SYSTEM, *TURNS, {"role": "user", "content": "word " * 300}], [{**SYSTEM, "content": "word " * 300}]):
        with pytest.raises(PromptTooLong, match=r"system and last message have \d+ tokens, at most 191 fit: shorten"):
            llm.chat(talk, params())
    with pytest.raises(PromptTooLong, match="at most 192 fit"):
        llm.chat([{"role": "user", "content": "word " * 300}], params(max_tokens=0))


def test_a_last_message_needs_no_more_room_than_a_token(llm):
    words = next(n for n in range(200, 0, -1) if len(llm.encode_chat([user("fox " * n)])) < CONTEXT)
    output = llm.chat([*TURNS, user("fox " * words)], params(max_tokens=40, ignore_eos=True))
    assert output.finish_reason == "length" and 0 < output.usage.num_output_tokens < 40
    assert output.usage.num_dropped_tokens > 0 and output.usage.context_fraction == 1


def user(text):
    return {"role": "user", "content": text}


def test_plain_prompts_have_no_turns(llm):
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidParams, match=r'"keep_system", .*: use chat or stream_chat, or "truncate_left"'):
            call("Once upon a time", params())


def test_a_prompt_loses_its_oldest_tokens(llm):
    ids = llm.tokenizer.encode("The fox and the owl met a bear. " * 40)
    with pytest.raises(OutOfMemory):
        llm.generate(ids, QUICK)
    output = llm.generate(ids, params(overflow="truncate_left"))
    kept = [ids[0], *ids[-(CONTEXT - 8 - 1) :]]
    assert ids[0] == llm.tokenizer.bos_id and output.token_ids == llm.generate(kept, params(overflow="error")).token_ids
    assert output.usage.num_dropped_tokens == len(ids) - len(kept)
    talk = [user("The fox and the owl met a bear. " * 40)]
    assert llm.chat(talk, params(overflow="truncate_left")).usage.num_prompt_tokens == CONTEXT - 8


def test_a_text_goes_on_behind_the_context(llm):
    """Piece by piece, as fresh requests with what is kept; one stream for the reader, stop strings and all."""
    wanted = params(max_tokens=300, overflow="sliding", ignore_eos=True)
    stream = llm.stream("Once upon a time", wanted)
    assert "".join(piece.text for piece in stream) == stream.output.text
    whole, prompt = stream.output, llm.tokenizer.encode("Once upon a time")
    text, window = [], prompt
    while len(text) < 300:
        one = params(max_tokens=CONTEXT - len(window), overflow="error", ignore_eos=True)
        text += llm.generate(window, one).token_ids
        window = [*[*prompt, *text][:4], *text[-(CONTEXT // 2) :]]
    assert whole.token_ids == text[:300] and whole.text == llm.tokenizer.decode(text[:300])
    assert (whole.usage.num_slides, whole.finish_reason) == (2, "length")
    words = whole.text[-40:]
    stopped = llm.generate("Once upon a time", params(max_tokens=None, overflow="sliding", ignore_eos=True, stop=words))
    assert stopped.stopped_by == words and stopped.text == whole.text[: whole.text.index(words)]


def test_seeded_texts_slide_alike_alone_and_among_others(llm):
    wanted = params(
        temperature=1.0, seed=5, max_tokens=250, overflow="sliding", ignore_eos=True, repetition_penalty=1.1
    )
    alone = llm.generate("The owl", wanted)
    assert llm.generate(["The fox", "The owl", "A bear"], wanted)[1].token_ids == alone.token_ids
    assert alone.usage.num_slides == 1

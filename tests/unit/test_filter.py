"""Content filters: nothing of what they forbid is shown, however the text comes."""

from __future__ import annotations

import asyncio
import re
import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_llm import GREEDY, HI, says, scripted_llm, wait_until_idle
from text_samples import TURN, byte_level_json, sentencepiece_json, write_folder

from bitnet_inference import (
    LLM,
    EngineError,
    Filtered,
    InvalidParams,
    SamplingParams,
    Usage,
    Verdict,
    WordFilter,
    chat_completion,
    text_completion,
)
from bitnet_inference.engine.request import Finish, Request
from bitnet_inference.mailbox import Mailbox
from bitnet_inference.stream import Stream
from bitnet_inference.text.detokenize import Detokenizer
from bitnet_inference.text.filter import Filters
from bitnet_inference.text.pieces import Decoding
from bitnet_inference.text.tokenizer import Tokenizer


def shown(word_filter, parts):
    """What of these parts is shown after each, and the label."""
    search, counts, length = word_filter.start(), [], 0
    for index, part in enumerate(parts):
        length += len(part)
        verdict = search.push(part, index == len(parts) - 1)
        assert (counts or [0])[-1] <= verdict.num_clear <= length
        counts.append(verdict.num_clear)
        if verdict.label is not None:
            return counts, verdict.label
    assert counts[-1] == length
    return counts, None


def cut(text, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(
    text=st.text("abc c", max_size=30),
    words=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    patterns=st.lists(st.sampled_from(["ab+", "(?<=c)a", r"b\b", "c(?!a)", "^b", "[^a ]{3}"]), max_size=2),
    cuts=st.lists(st.integers(0, 30)),
    whole=st.booleans(),
)
def test_a_text_is_cut_where_the_first_match_begins_however_it_comes(text, words, patterns, cuts, whole):
    if not words and not patterns:
        return
    forbids = WordFilter(words, patterns, whole_words=whole, window=32)
    counts, label = shown(forbids, cut(text, cuts))
    starts = [match.start() for pattern in patterns if (match := re.search(pattern, text))]
    starts += [at for word in words for at in range(len(text)) if stands(word, text, at, whole)]
    if starts:
        assert (counts[-1], label) == (min(starts), "words")
        assert forbids.check_prompt(text) == "words"
    else:
        assert label is None and forbids.check_prompt(text) is None


def stands(word, text, at, whole):
    end = at + len(word)
    return text.startswith(word, at) and not (whole and (is_inside(text, at) or is_inside(text, end)))


def is_inside(text, at):
    return 0 < at < len(text) and " " not in text[at - 1 : at + 1]


def test_words_hold_back_no_more_than_they_must():
    forbids = WordFilter(["bad word", "badge"])
    parts = ["a b", "a", "n", " ba", "d", " wo", "w", " bad", "ge"]
    assert shown(forbids, parts) == ([2, 2, 5, 6, 6, 6, 13, 14, 14], "words")


def test_patterns_hold_back_their_window():
    forbids = WordFilter(patterns=[r"\d{4}"], window=4)
    assert shown(forbids, ["abcdef", "12", "3", "4"]) == ([3, 5, 6, 6], "words")
    assert shown(forbids, ["abcdef", "123"]) == ([3, 9], None)


@pytest.mark.parametrize(
    "words, options, text, found",
    [
        (["Straße"], {}, "in der STRASSE", 7),
        (["strasse"], {}, "die Straße", 4),
        (["gros"], {}, "ein groß", None),
        (["class"], {}, "classes", None),
        (["class"], {"whole_words": False}, "a subclass", 5),
        (["class"], {}, "the class.", 4),
        (["c++"], {}, "in c++ it", 3),
        (["Fox"], {"ignore_case": False}, "the fox", None),
        (["two words"], {}, "in two words.", 3),
        (["Æon"], {}, "æon", 0),
    ],
)
def test_what_counts_as_a_word(words, options, text, found):
    counts, label = shown(WordFilter(words, **options), list(text))
    assert (counts[-1] if label else None) == found


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "forbids nothing"),
        ({"words": "bad"}, "list of strings"),
        ({"words": ["a", ""]}, "not empty"),
        ({"words": [1]}, "list of strings"),
        ({"patterns": None}, "list of strings"),
        ({"patterns": ["("]}, "no regular expression"),
        ({"patterns": ["a*"]}, "matches the empty text"),
        ({"patterns": ["a"], "window": 0}, "window is 0"),
        ({"patterns": ["a"], "window": True}, "window is True"),
        ({"words": ["a"], "label": None}, "label is None: give some text"),
        ({"words": ["a"], "ignore_case": "no"}, "ignore_case is 'no': give True or False"),
    ],
)
def test_impossible_word_filters_are_refused(options, message):
    with pytest.raises(InvalidParams, match=message) as caught:
        WordFilter(**options)
    assert "\n" not in str(caught.value)


def test_a_list_in_a_file(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# a comment\n\nbad word\n/b[ao]d{2}/\n/\n", encoding="utf-8")
    forbids = WordFilter.from_file(path)
    assert [forbids.check_prompt(text) for text in ("a bad word", "bodd", "a / b", "# a comment", "bad")] == [
        "list.txt", "list.txt", "list.txt", None, None,
    ]  # fmt: skip
    assert WordFilter.from_file(path, label="mine", ignore_case=False).check_prompt("BAD WORD, bad word") == "mine"
    path.write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")  # as Windows' editors write it
    assert WordFilter.from_file(path).check_prompt("the first") == "list.txt"
    for content, message in ((b"\xff", "not UTF-8"), (b"", "forbids nothing"), (b"/(/", "no regular expression")):
        path.write_bytes(content)
        with pytest.raises(InvalidParams, match=rf"list\.txt.*{message}"):
            WordFilter.from_file(path)
    with pytest.raises(InvalidParams, match="cannot be read"):
        WordFilter.from_file(tmp_path / "none")


class Judge:
    """A classifier that is asked at the end of every sentence, with the text so far."""

    def __init__(self, judge):
        self.judge, self.texts = judge, []

    def check_prompt(self, text):
        return self.judge(text)

    def start(self):
        return Judged(self)


class Judged:
    def __init__(self, judge):
        self.judge, self.text, self.num_clear = judge, "", 0

    def push(self, text, is_last):
        self.text += text
        if is_last or text.endswith("."):
            self.judge.texts.append(self.text)
            label = self.judge.judge(self.text)
            if label is not None:
                return Verdict(self.num_clear, label)
            self.num_clear = len(self.text)
        return Verdict(self.num_clear)


class TestScreen:
    """Filters in a row."""

    def push(self, filters, *parts):
        screen = Filters(filters).start()
        texts = [screen.push(part, index == len(parts) - 1) for index, part in enumerate(parts) if screen.is_open]
        return texts, screen.label

    def test_each_sees_what_those_before_it_clear(self):
        judge = Judge(lambda text: "rude" if "fool" in text else None)
        texts, label = self.push([WordFilter(["bad"]), judge], "You. ", "fool", " bad", " more")
        assert (texts, label) == (["", "", "", ""], "rude")
        assert judge.texts == ["You. fool "]

    def test_the_rest_before_a_match_is_looked_at_by_all(self):
        judge = Judge(lambda text: None)
        assert self.push([WordFilter(["bad"]), judge], "One.", " two bad", "!") == (["One.", "", " two "], "words")
        assert judge.texts == ["One.", "One. two "]

    @pytest.mark.parametrize(
        ("verdict", "message"),
        [(Verdict(each), r"Wrong clears -?\d of 4 characters after 1") for each in (5, -1, 0)]
        + [(None, "Wrong returned NoneType: return a Verdict"), ((4, None), "Wrong returned tuple")]
        + [(Verdict(4.0), "returned Verdict.*: give a whole number"), (Verdict(1, 5), ", and a string or None")],
    )
    def test_impossible_verdicts_are_errors(self, verdict, message):
        class Wrong(Judge):
            def start(self):
                return self

            def push(self, text, is_last):
                return verdict if is_last else Verdict(1)

        with pytest.raises(EngineError, match=message):
            self.push([Wrong(None)], "abc", "d")

    @pytest.mark.parametrize("output", [None, Verdict(1), "text"])
    def test_who_starts_no_output_filter_is_told_so(self, output):
        class Wrong(Judge):
            def start(self):
                return output

        with pytest.raises(EngineError, match=rf"start\(\) of the filter Wrong returned {type(output).__name__}: "):
            self.push([Wrong(None)], "a")

    def test_numpys_small_numbers_do_not_wrap_around(self):
        class Small(Judge):
            def start(self):
                return self

            def push(self, text, is_last):
                return Verdict(np.uint8(250 if len(text) == 250 else 0))

        with pytest.raises(EngineError, match="Small clears 0 of 260 characters after 250"):
            self.push([Small(None)], "a" * 250, "b" * 10, "c")

    @pytest.mark.parametrize("label", [False, True, 5])
    def test_what_is_no_label_is_neither_one_nor_leave_to_ask(self, label):
        with pytest.raises(EngineError, match=f"the filter Judge says {label} of a prompt: return a label"):
            Filters([Judge(lambda text: label)]).check("text")

    @pytest.mark.parametrize("filters", [None, "words", [None], WordFilter(["x"]), [str], 3])
    def test_what_is_no_filter_is_refused(self, filters):
        with pytest.raises(InvalidParams, match="list of filters"):
            Filters(filters)


TOKENIZERS = {"bytes": byte_level_json, "sentencepiece": sentencepiece_json}
USAGE = Usage(1, 1, 0, 0, 0)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("text"), TOKENIZERS[request.param]()))


@given(data=st.data())
def test_no_token_shows_more_than_the_text(tokenizer, data):
    parts = st.sampled_from(["the ", "fox ", "met ", "owl", "🦊", "é", " hello", "x", "Grüße", "\ufffd"])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    words = data.draw(
        st.lists(st.sampled_from(["fox", "owl", "met owl", "🦊", "hello", "e", "é "]), min_size=1, max_size=2)
    )
    stop = data.draw(st.lists(st.sampled_from(["owl met", "ox m", "🦊🦊", "lox"]), max_size=2))
    ids = tokenizer.encode(text, add_special_tokens=False)[: data.draw(st.integers(0, 30))]
    forbids = WordFilter(words, whole_words=False)
    detokenizer = Detokenizer(tokenizer, stop)
    mailbox = Mailbox(detokenizer)
    for token_id in ids:
        if mailbox.token(token_id, None):
            break
    mailbox.finish(Finish("length"), USAGE)
    request = Request([1], SamplingParams(), mailbox)
    stream = Stream(mailbox, request, lambda request: None, False, Filters([forbids]).start())
    pieces, output = list(stream), stream.output
    whole = "".join(plain(tokenizer, ids, stop))
    assert output.text == whole[: shown(forbids, [whole])[0][0]] == "".join(piece.text for piece in pieces)
    assert output.token_ids == [token_id for piece in pieces for token_id in piece.token_ids]
    assert forbids.check_prompt(output.text) is None
    if output.finish_reason == "filtered":
        assert output.text.startswith(tokenizer.decode(output.token_ids).rstrip("\ufffd"))
    else:
        assert output.token_ids == ids[: len(output.token_ids)] and forbids.check_prompt(whole) is None
        assert stop or output.token_ids == ids


class Vocabulary:
    """Token n adds the n-th piece to a text."""

    def __init__(self, *pieces):
        self.pieces = pieces
        self.decoding = Decoding(byte_level=all(not isinstance(piece, str) for piece in pieces))

    def piece(self, token_id, skip_special_tokens, opening):
        return self.pieces[token_id]


class Full:
    """Ends a text after its first characters."""

    def __init__(self, num_clear, num_needed):
        self.num_clear, self.num_needed = num_clear, num_needed

    def check_prompt(self, text):
        return None

    def start(self):
        self.length = 0
        return self

    def push(self, text, is_last):
        self.length += len(text)
        return Verdict(min(self.length, self.num_clear), "full" if self.length >= self.num_needed else None)


@pytest.mark.parametrize(
    "pieces, full, text, num_tokens",
    [
        ((b"ab", b"cd", None, b"e"), Full(4, 4), "abcd", 2),  # a special token behind the end
        ((b"ab", b"cd\xf0\x9f", b"\xa6\x8a"), Full(4, 4), "abcd", 1),  # half a character behind it
        ((b"ab", b"cdst", b"x"), Full(4, 4), "abcd", 1),  # half a stop string
        ((b"ab", b"cdst", b"op"), Full(4, 4), "abcd", 1),
        (("abc", b"\xc3", "d"), Full(3, 4), "abc", 1),
        ((b"ab", b"cd"), Full(3, 4), "abc", 1),
        ((b"ab", None, b"cd"), Full(2, 4), "ab", 2),
        ((b"ab", b"cd"), Full(4, 9), "abcd", 2),
    ],
)
def test_tokens_behind_the_end_stay_hidden(pieces, full, text, num_tokens):
    mailbox = Mailbox(Detokenizer(Vocabulary(*pieces), ["stop"]))
    request, cancelled = Request([1], SamplingParams(), mailbox), []
    stream = Stream(mailbox, request, cancelled.append, False, Filters([full]).start())
    for token_id in range(len(pieces)):
        mailbox.token(token_id, None)
    mailbox.finish(Finish("cancelled"), USAGE)
    output = stream.read()
    assert (output.text, output.token_ids) == (text, list(range(num_tokens)))
    filtered = full.num_needed == 4
    assert (output.finish_reason, output.stopped_by) == (("filtered", "full") if filtered else ("cancelled", None))
    assert cancelled == [request] * filtered


def plain(tokenizer, ids, stop):
    detokenizer = Detokenizer(tokenizer, stop)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(*filters):
        loaded, model = scripted_llm(write_folder(tmp_path))
        loaded.close()
        made.append(LLM(model, loaded.tokenizer, filters=filters))
        made[-1].model = model
        return made[-1]

    yield make
    for each in made:
        each.close()


LONG = SamplingParams(temperature=0.0, max_tokens=60, logprobs=1)


class TestAnswers:
    def test_they_end_before_what_is_forbidden_and_say_so(self, make):
        llm = make(WordFilter(["small owl"], label="animals"))
        says(llm, "The brave fox met a small owl near the river.")
        for output in (llm.generate("x", LONG), llm.chat(HI, LONG), llm.stream_choices("x", 2, LONG)[1].read()):
            assert output.text == "The brave fox met a "
            assert (output.finish_reason, output.stopped_by) == ("filtered", "animals")
            assert output.text.startswith(llm.tokenizer.decode(output.token_ids))
            assert len(output.logprobs) == len(output.token_ids) > 3
            assert output.usage.num_output_tokens > len(output.token_ids)
        wait_until_idle(llm)

    def test_streams_show_nothing_of_it(self, make):
        llm = make(WordFilter(["owl near"]))
        says(llm, "a small owl near the river")
        stream = llm.stream("x", LONG)
        assert "".join(piece.text for piece in stream) == "a small " == stream.output.text
        assert stream.finish_reason == "filtered" and list(stream) == []

        async def read():
            stream = llm.stream("x", LONG)
            return "".join([piece.text async for piece in stream]), stream.finish_reason

        async def read_in_bulk():
            stream = llm.stream("x", LONG)
            return "".join([piece.text async for piece in stream.in_bulk()]), stream.finish_reason

        assert asyncio.run(read()) == asyncio.run(read_in_bulk()) == ("a small ", "filtered")

    def test_a_match_may_be_complete_with_the_end_only(self, make):
        llm = make(WordFilter(["owl"]))
        says(llm, "a small owl")
        assert (llm.generate("x", GREEDY).text, llm.generate("x", GREEDY).finish_reason) == ("a small ", "filtered")
        says(llm, "a small ow")
        assert (llm.generate("x", GREEDY).text, llm.generate("x", GREEDY).finish_reason) == ("a small ow", "stop")

    def test_a_match_ends_its_request_and_no_other(self, make):
        llm = make(WordFilter(["owl"]))
        texts = {11: "the owl " * 9, 12: "the fox " * 9}
        scripts = {key: llm.tokenizer.encode(text, add_special_tokens=False) for key, text in texts.items()}

        def change(history, logits):
            script = scripts[history[1]]
            logits[:] = 0
            logits[(script * 99)[len(history) - 2]] = 50

        llm.model.change_logits = change
        endless = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        bad, good = llm.generate([[5, 11], [5, 12]], endless)
        assert (bad.text, bad.finish_reason) == ("the ", "filtered")
        assert (len(good.token_ids), good.finish_reason) == (200, "length")

    @pytest.mark.parametrize("is_filtered", [True, False])
    def test_who_listens_to_the_engine_learns_it(self, make, is_filtered):
        llm = make(WordFilter(["owl"] if is_filtered else ["lynx"]))
        script = llm.tokenizer.encode("the owl ", add_special_tokens=False)
        llm.model.change_logits = lambda history, logits: logits.__setitem__(script[len(history) % len(script)], 50)
        endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, overflow="sliding")
        with llm.stream([5, 6], endless) as stream:
            for _ in stream:
                if not is_filtered:
                    stream.cancel()
        assert stream.request.finish.reason == stream.finish_reason == ("filtered" if is_filtered else "cancelled")

    def test_a_stop_string_before_it_counts(self, make):
        llm = make(WordFilter(["owl"]))
        says(llm, "a small owl")
        output = llm.generate("x", SamplingParams(temperature=0.0, stop="mall"))
        assert (output.text, output.finish_reason, output.stopped_by) == ("a s", "stop", "mall")

    def test_what_a_classifier_has_not_seen_is_not_shown(self, make):
        judge = Judge(lambda text: "violence" if "fight" in text else None)
        llm = make(judge)
        says(llm, "All is well. They fight. All is well.")
        stream = llm.stream_chat(HI, LONG)
        assert [piece.text for piece in stream] == ["All is well."]
        assert (stream.finish_reason, stream.output.stopped_by) == ("filtered", "violence")
        assert judge.texts == ["All is well.", "All is well. They fight."]

    def test_one_that_takes_its_time_does_not_hold_up_the_event_loop(self, make):
        asked, answer = threading.Event(), threading.Event()

        def wait(text):
            if text.startswith("Slow"):
                asked.set()
                assert answer.wait(30)

        llm = make(Judge(wait))
        says(llm, "Slow.")

        async def read():
            reading = asyncio.create_task(join(llm.stream("x", GREEDY)))
            await asyncio.to_thread(asked.wait, 30)
            answer.set()  # from the loop, which is free
            return await reading

        async def join(stream):
            return "".join([piece.text async for piece in stream])

        assert asyncio.run(read()) == "Slow."

    def test_a_filter_that_fails_ends_its_own_request(self, make):
        def fail(text):
            if "owl" in text:
                raise OSError("the classifier is away")

        llm = make(Judge(fail))
        says(llm, "The fox. An owl. A hen.")
        broken, sound = llm.stream("x", LONG), llm.stream("x", SamplingParams(temperature=0.0, max_tokens=3))
        texts = []
        for _ in range(2):
            with pytest.raises(OSError, match="is away"):
                texts += [piece.text for piece in broken]
        assert broken.output is None and texts == []
        assert sound.read().finish_reason == "length"
        wait_until_idle(llm)

    def test_who_interrupts_a_filter_sees_no_more(self, make):
        def interrupt(text):
            if "owl" in text:
                raise KeyboardInterrupt

        llm = make(Judge(interrupt))
        says(llm, "The fox. An owl. A hen.")
        stream = llm.stream("x", LONG)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        output = stream.read()
        assert (output.text, output.finish_reason) == ("The fox.", "cancelled")
        assert llm.tokenizer.decode(output.token_ids) == "The fox."

    def test_completions_tell(self, make):
        llm = make(WordFilter(["owl"], label="animals"))
        says(llm, "a small owl")
        assert text_completion(llm, ["x"], 0) == [{"generation": "a small", "filtered_by": "animals"}]
        (answer,) = chat_completion(llm, [HI], 0, logprobs=True)
        assert (answer["generation"]["content"], answer["filtered_by"]) == ("a small", "animals")
        assert "".join(answer["tokens"]) == "a small" and len(answer["logprobs"]) == len(answer["tokens"])


PART = {"type": "text"}


class TestPrompts:
    @pytest.fixture
    def llm(self, make):
        return make(WordFilter(["owl", "secret plan"], label="list"))

    def test_texts_and_ids(self, llm):
        ids = llm.tokenizer.encode("an owl")
        for prompt in ("an OWL", ids, ["a fox", "an owl"], [llm.tokenizer.encode("a fox"), ids]):
            with pytest.raises(Filtered, match="the prompt is refused by the filter 'list'"):
                llm.generate(prompt, GREEDY)
        for call in (llm.stream, lambda prompt: llm.stream_choices(prompt, 2)):
            with pytest.raises(Filtered):
                call("an owl")
        assert llm.model.num_forwards == 0
        assert llm.generate("a fox", GREEDY).token_ids
        with pytest.raises(InvalidParams):
            llm.generate([[1, "a"]])

    @pytest.mark.parametrize(
        "place, message",
        [
            ("content", {"role": "user", "content": "an owl"}),
            ("content", {"role": "system", "content": [PART | {"text": "a sec"}, PART | {"text": "ret plan"}]}),
            ("name", {"role": "user", "content": "x", "name": "Owl"}),
            ("tool_calls", {"role": "assistant", "tool_calls": [{"function": {"name": "owl"}}]}),
            ("role", {"role": "owl", "content": "x"}),
        ],
    )  # fmt: skip
    def test_all_of_a_message(self, llm, place, message):
        calls = [llm.chat, llm.stream_chat, llm.encode_chat]
        if place in ("content", "name"):  # it takes no other roles, and looks at the order
            calls.append(lambda talk: chat_completion(llm, [talk]))
        for call in calls:
            with pytest.raises(Filtered, match=rf"messages\[0\]\.{place} is refused"):
                call([message] if message["role"] == "user" else [message, *HI])

    def test_what_else_a_template_gets(self, llm):
        for options in ({"tools": [{"name": "owl"}]}, {"documents": [{"owl": 1}]}, {"variables": {"x": ["an owl"]}}):
            with pytest.raises(Filtered, match=f"^{next(iter(options))} is refused"):
                llm.chat(HI, GREEDY, **options)

    def test_names_of_roles_and_templates_are_nobodys_words(self, make):
        llm = make(WordFilter(["user", "assistant"]))
        says(llm, "Hello.", end=TURN)
        assert llm.chat(HI, GREEDY).text == "Hello."
        assert chat_completion(llm, [HI], 0) == [{"generation": {"role": "assistant", "content": "Hello."}}]

    def test_a_model_is_not_loaded_with_what_is_no_filter(self):
        with pytest.raises(InvalidParams, match="list of filters"):
            LLM.load(filters=["bad"])

import copy
import json
import pickle
import re
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import (
    BOS,
    EOS,
    TEMPLATE,
    TURN,
    around,
    byte_level_json,
    metaspace_json,
    sentencepiece_json,
    write_folder,
)
from tokenizers import models

from bitnet_inference.errors import BitNetError, FormatError, InvalidParams, NotFound, Unsupported
from bitnet_inference.text.chat import Chat
from bitnet_inference.text.tokenizer import HUGE_TEXT, LONG_TEXT, MAX_HUGE, Tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.from_folder(write_folder(tmp_path))


def test_ids_and_names(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (1, 2), 376)
    assert tokenizer.id_to_token(0) == BOS and tokenizer.token_to_id(TURN) == 2
    assert tokenizer.special == {BOS: 0, EOS: 1, TURN: 2}
    assert dict(tokenizer.named) == {"bos_token": BOS, "eos_token": EOS}


@pytest.mark.parametrize("again", [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy])
def test_copies_and_those_of_other_processes_do_the_same(tokenizer, again):
    text = f"Hello {BOS} world{TURN} " * (HUGE_TEXT // 10)
    ids = tokenizer.encode(text)
    other = again(tokenizer)
    assert other.encode(text) == ids and other.decode(ids) == tokenizer.decode(ids)
    assert other.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True) != ids
    assert (other.special, other.eos_ids, other.affixes) == (tokenizer.special, tokenizer.eos_ids, tokenizer.affixes)


def test_a_bos_goes_in_front_once(tokenizer):
    ids = tokenizer.encode("Hello world")
    assert ids[0] == 0 and 0 not in ids[1:]
    assert tokenizer.encode(BOS + "Hello world", parse_special=True) == ids
    assert tokenizer.encode("Hello world", add_special_tokens=False) == ids[1:]
    assert tokenizer.encode_prompt("Hello world") == tokenizer.encode_prompt(BOS + "Hello world") == ids
    assert tokenizer.encode("") == [0] and tokenizer.decode(ids) == "Hello world"


def test_special_tokens_in_a_text_are_text(tokenizer):
    text = f"say {TURN} and {BOS}"
    plain = tokenizer.encode(text)
    assert plain[0] == 0 and not {0, 1, 2} & set(plain[1:])
    assert tokenizer.decode(plain) == text
    assert [i for i in tokenizer.encode(text, parse_special=True) if i < 3] == [0, 2, 0]


def test_what_a_vocabulary_cannot_spell_is_the_unknown_token(tmp_path):
    state = json.loads(sentencepiece_json())
    state["model"]["byte_fallback"] = False
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state)))
    space, letter = (tokenizer.token_to_id(token) for token in ("▁", "o"))
    assert tokenizer.encode("o東o", add_special_tokens=False) == [space, letter, 0, letter]
    assert 2 not in tokenizer.encode("東</s>")


def test_what_a_unigram_vocabulary_cannot_spell_is_the_unknown_token(tmp_path):
    unigram = models.Unigram([("<unk>", 0.0), ("o", -1.0)], unk_id=0)
    state = json.loads(sentencepiece_json()) | {"model": json.loads(unigram.__getstate__())}
    state |= {"normalizer": None, "post_processor": None, "added_tokens": state["added_tokens"][:1]}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state)))
    assert tokenizer.special == {"<unk>": 0} and tokenizer.encode("o東o") == [1, 0, 1]


def test_a_long_text_has_the_ids_of_its_parts(tokenizer):
    part = f"say {TURN} and {BOS}\n"
    ids, count = tokenizer.encode(part, add_special_tokens=False), LONG_TEXT // len(part) + 1
    assert tokenizer.encode(part * count, add_special_tokens=False) == ids * count
    special = tokenizer.encode(part, parse_special=True)
    assert tokenizer.encode(part * count, parse_special=True) == special[:1] + special[1:] * count


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer):
    encoding = threading.Thread(target=tokenizer.encode, args=["Hello world, " * 60_000])
    both, own = time.process_time(), time.thread_time()
    encoding.start()
    while encoding.is_alive():
        pass
    # Without the lock half of the time is its own, a quarter where others are busy; with it what was before, 5 ms.
    assert time.thread_time() - own > (time.process_time() - both) / 10


def test_a_post_processor_without_its_special_tokens_is_refused_in_one_line(tmp_path, capfd):
    spec = json.loads(byte_level_json()) | {"post_processor": around(0, None) | {"special_tokens": {}}}
    with pytest.raises(Unsupported, match=f"has no special_tokens '{re.escape(BOS)}': correct it"):
        Tokenizer.from_folder(write_folder(tmp_path, json.dumps(spec)))
    assert capfd.readouterr().err == "", "the library panics aloud"


def test_a_post_processor_that_adds_what_no_token_is(tmp_path):
    processor = around(0, None)
    processor["special_tokens"][BOS]["ids"] = [376]
    spec = json.loads(byte_level_json()) | {"post_processor": processor}
    with pytest.raises(FormatError, match=r"tokenizer.json: post_processor: adds the id 376, which no token has"):
        Tokenizer.from_folder(write_folder(tmp_path, json.dumps(spec)))


@pytest.mark.parametrize("config", [{"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": None}, {}])
@pytest.mark.parametrize("processor, ids", [((0, None), [0, 40]), ((None, 1), [40, 1]), (None, [40])])
def test_the_post_processor_alone_says_what_goes_around_a_text(tmp_path, config, processor, ids):
    """As in Transformers 5: published embedding models have add_bos_token there, and an end in the post-processor."""
    spec = json.loads(byte_level_json()) | {"post_processor": processor and around(*processor)}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(spec), bos_token=BOS, eos_token=TURN, **config))
    assert tokenizer.encode(tokenizer.decode([40])) == ids
    assert tokenizer.encode_prompt(tokenizer.decode([40])) == [i for i in ids if i != 1]


def test_named_tokens_may_be_objects_and_stand_in_the_old_map(tmp_path):
    folder = write_folder(tmp_path, sentencepiece_json(), eos_token={"content": "</s>", "lstrip": False})
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))


@pytest.mark.parametrize(
    "listed, ids",
    [(5, (1, 2, 5)), ([5, 1, 9], (1, 2, 5, 9)), (None, (1, 2)), (-1, (1, 2)), ([375, 376, 1 << 40], (1, 2, 375))],
)
def test_every_end_token_counts(tmp_path, listed, ids):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, generation={"eos_token_id": listed}))
    assert tokenizer.eos_ids == ids


def test_what_the_configuration_names_is_special(tmp_path):
    state = json.loads(byte_level_json())
    for token in state["added_tokens"]:
        token["special"] = False
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state), bos_token=BOS, eos_token=EOS))
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(
    "config",
    [
        {"image_token": "<i>"},
        {"image_token": {"content": "<i>"}},
        {"extra_special_tokens": {"image_token": "<i>", "bos_token": "no", "x": 3}},
        {
            "model_specific_special_tokens": {"image_token": "<i>"},
            "extra_special_tokens": ["<j>"],
            "add_bos_token": True,
        },
    ],
)
def test_templates_know_the_models_own_names_of_tokens_as_in_transformers(tmp_path, config):
    folder = write_folder(tmp_path, chat_template="{{ bos_token }}{{ image_token }}", **config)
    assert Chat(Tokenizer.from_folder(folder)).render([{"role": "user", "content": "x"}]) == f"{BOS}<i>"


@pytest.mark.parametrize("special", [False, True])
def test_what_the_configuration_names_takes_in_the_spaces_that_it_should(tmp_path, special):
    state = json.loads(byte_level_json())
    state["added_tokens"][2] |= {"lstrip": True, "rstrip": True, "special": special}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state), mask_token=TURN))
    assert tokenizer.encode(f"a {TURN} b", parse_special=True) == tokenizer.encode(f"a{TURN}b", parse_special=True)
    assert tokenizer.special[TURN] == 2


@pytest.mark.parametrize("is_listed", [True, False])
def test_tokens_beside_the_vocabulary_are_read(tmp_path, is_listed):
    ids = {"[PAD]": 376, "<|new|>": 377, "ab": 378, "!": 3}  # the sample has 376 tokens, and "!" is one
    decoder = {str(each): {"content": text, "special": text[0] in "[<"} for text, each in ids.items()}
    more = {"added_tokens_decoder": decoder} if is_listed else {"additional_special_tokens": [{"content": "<|new|>"}]}
    folder = write_folder(tmp_path, pad_token="[PAD]", bos_token=BOS, eos_token=EOS, **more)
    (folder / "added_tokens.json").write_text(json.dumps({} if is_listed else ids))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special == {BOS: 0, EOS: 1, TURN: 2, "[PAD]": 376, "<|new|>": 377}
    assert tokenizer.encode("ab[PAD]<|new|>", parse_special=True) == [0, 378, 376, 377]


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("in_map", [True, False])
@pytest.mark.parametrize("token", [TURN, {"content": TURN, "lstrip": True}])
def test_special_tokens_without_a_role_may_be_words_of_the_vocabulary(tmp_path, key, in_map, token):
    state = json.loads(byte_level_json())
    del state["added_tokens"][2]
    more = {key: [token, BOS, "<|nowhere|>", ""]}
    folder = write_folder(tmp_path, json.dumps(state), bos_token=BOS, **({} if in_map else more))
    (folder / "special_tokens_map.json").write_text(json.dumps(more if in_map else {}))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special == {BOS: 0, EOS: 1, TURN: 2} and 2 in tokenizer.eos_ids
    space = [] if isinstance(token, dict) else tokenizer.encode(" ", add_special_tokens=False)
    assert tokenizer.encode(f" {TURN}", parse_special=True) == [0, *space, 2]
    assert tokenizer.decode([2]) == ""


@pytest.mark.parametrize("is_word", [True, False])
def test_tokens_beside_a_unigram_vocabulary_are_read(tmp_path, is_word):
    token_id, word_id = (1, 2) if is_word else (2, 1)
    words = ["<unk>", "<|new|>", "a"] if is_word else ["<unk>", "a"]
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[word, -1.0] for word in words], "byte_fallback": False}
    decoder = {str(token_id): {"content": "<|new|>", "special": True}}
    state = {"version": "1.0", "added_tokens": [], "model": model}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state), added_tokens_decoder=decoder))
    assert tokenizer.special == {"<|new|>": token_id}
    assert tokenizer.encode("a<|new|>a", parse_special=True) == [word_id, token_id, word_id]


def test_an_added_token_without_a_text_is_a_broken_file(tmp_path):
    state = json.loads(byte_level_json())
    state["added_tokens"][0]["content"] = None
    decoder = {"0": {"content": BOS, "special": True}}
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state), added_tokens_decoder=decoder))


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized", "special"])
@pytest.mark.parametrize("is_set", [True, False])
def test_flags_of_the_configuration_count_as_in_transformers(tmp_path, flag, is_set):
    state = json.loads(byte_level_json())
    token = state["added_tokens"][2] | {"normalized": False, flag: not is_set}
    state["added_tokens"][2] = token
    decoder = {"2": {name: value for name, value in token.items() if name != "id"} | {flag: is_set}}
    folder = write_folder(tmp_path, json.dumps(state), added_tokens_decoder=decoder)
    tokenizer = Tokenizer.from_folder(folder)
    (read,) = [each for each in json.loads(tokenizer.to_json())["added_tokens"] if each["id"] == 2]
    assert read == token | {flag: is_set}


@pytest.mark.parametrize("role", ["pad_token", "unk_token"])
def test_padding_may_be_an_ordinary_token(tmp_path, role):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, **{role: "!"}))
    assert tokenizer.decode(tokenizer.encode("Hello!")) == "Hello!"
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, **{role: TURN}))
    assert tokenizer.special_ids == {0, 1, 2}


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    state = json.loads(byte_level_json())
    state["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": BOS,
    }  # fmt: skip
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state)))
    assert tokenizer.decode(tokenizer.encode("Hello world, once more")) == "Hello world, once more"


@given(st.text(max_size=80))
def test_any_text_comes_back(text):
    assert ROUND_TRIP.decode(ROUND_TRIP.encode(text)) == text


@pytest.fixture(scope="module", autouse=True)
def _round_trip(tmp_path_factory):
    global ROUND_TRIP
    ROUND_TRIP = Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("round")))


# What Transformers 5.24 makes of the same files: the pieces of "a</s>b", and what its text without special tokens is.
@pytest.mark.parametrize("json_of", [sentencepiece_json, metaspace_json])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize(
    ("config", "pieces", "text"),
    [
        ({}, "▁a</s>b", "ab"),
        ({"legacy": False, "add_prefix_space": True}, "▁a</s>b", "ab"),
        ({"legacy": True}, "▁a</s>▁b", "a b"),
        ({"legacy": True, "add_prefix_space": False}, "a</s>b", "ab"),
    ],
)
def test_the_class_of_llama_2_decides_about_spaces(tmp_path, json_of, name, config, pieces, text):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json_of(), tokenizer_class=name, **config))
    ids = tokenizer.encode("a</s>b", add_special_tokens=False, parse_special=True)
    assert "".join(map(tokenizer.id_to_token, ids)) == pieces
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["CodeLlamaTokenizer", "CodeLlamaTokenizerFast"])
def test_the_class_of_code_llama_knows_nothing_of_legacy(tmp_path, name):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, sentencepiece_json(), tokenizer_class=name, legacy=True))
    ids = tokenizer.encode("a</s>b", add_special_tokens=False, parse_special=True)
    assert "".join(map(tokenizer.id_to_token, ids)) == "▁a</s>b"
    config = {"tokenizer_class": name, "add_prefix_space": False}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, sentencepiece_json(), **config))
    ids = tokenizer.encode(" a", add_special_tokens=False)
    assert (tokenizer.id_to_token(ids[0])[0], tokenizer.decode(ids)) == ("▁", "a")


def test_no_class_has_a_say_beside_mistral(tmp_path):
    """What Transformers 5.24 makes of the same files: tokenizer.json as it stands, spaces behind special tokens too."""
    folder = write_folder(tmp_path, sentencepiece_json(), tokenizer_class="LlamaTokenizer", legacy=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode(" a</s>b", add_special_tokens=False, parse_special=True)
    assert "".join(map(tokenizer.id_to_token, ids)) == "▁▁a</s>▁b"


def test_the_space_of_sentencepiece_is_added_once(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, sentencepiece_json(), bos_token="<s>"))
    whole = tokenizer.encode_pieces([("</s>the fox", False), (" met", False)])
    assert whole == [1, 2, *tokenizer.encode("the fox met", add_special_tokens=False)]


@pytest.mark.parametrize("ids", [[376], [-1], [1 << 70], ["1"], [None], [1.0], 5, None, b"ab", "ab"])
def test_ids_outside_the_vocabulary_are_refused(tokenizer, ids):
    with pytest.raises(InvalidParams, match="token id"):
        tokenizer.decode(ids)


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"], "half \ud800"])
def test_what_is_no_text_is_refused(tokenizer, text):
    with pytest.raises(InvalidParams, match="text"):
        tokenizer.encode(text)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_would_take_gigabytes_are_not_read(tmp_path, name):
    folder = write_folder(tmp_path)
    with (folder / name).open("wb") as file:
        file.truncate(41 << 20)
    with pytest.raises(FormatError, match="at most"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_link_that_leads_nowhere_is_not_a_missing_file(tmp_path, name):
    folder = write_folder(tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "blob that was not downloaded")
    with pytest.raises(FormatError, match="a link that leads nowhere"):
        Tokenizer.from_folder(folder)


def test_no_folder_and_no_file(tmp_path):
    with pytest.raises(NotFound, match="no such folder"):
        Tokenizer.from_folder(tmp_path / "absent")
    with pytest.raises(FormatError, match=r"tokenizer\.json: the file is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_tokenizer_names_its_file(tmp_path, share):
    whole = byte_level_json()
    with pytest.raises(FormatError, match=r"tokenizer\.json: .*broken tokenizer") as caught:
        Tokenizer.from_folder(write_folder(tmp_path, whole[: int(len(whole) * share)]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}},
        {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [], "post_processor": None},
        {"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}, "added_tokens": []},
        {"model": {"type": "Nonsense"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
        {"version": "9.9"},
    ],
)
def test_a_lying_tokenizer_is_refused(tmp_path, change):
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(write_folder(tmp_path, json.dumps(json.loads(byte_level_json()) | change)))


def with_step(**step):
    return {"normalizer": {"type": "Sequence", "normalizers": [step]}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (with_step(type="Replace", pattern={"Regex": "a" * 4097}, content=""), "a pattern has 4097 characters"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 16385, 0.0]]}}, "a token has 16385 characters"),
        (with_step(type="Precompiled", precompiled_charsmap="/////w=="), "a charsmap of 4 bytes claims more"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 64}] * 11}},
            "as long",
        ),
    ],
)
def test_what_the_library_would_not_survive_is_refused_before_it_sees_it(tmp_path, change, why):
    for escaped in (False, True):  # a name may hide
        text = json.dumps(json.loads(byte_level_json()) | change)
        text = text.replace('"Regex"', '"\\u0052egex"').replace("charsmap", "\\u0063harsmap") if escaped else text
        with pytest.raises(Unsupported, match=rf"tokenizer\.json: .*{why}"):
            Tokenizer.from_folder(write_folder(tmp_path, text))


def test_dropout_is_for_training(tmp_path):
    state = json.loads(byte_level_json())
    state["model"]["dropout"] = 0.9
    dropping = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state)))
    ids = [dropping.encode("Hello world, once more") for _ in range(9)]
    assert ids == [Tokenizer.from_folder(write_folder(tmp_path / "x")).encode("Hello world, once more")] * 9


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("tokenizer_config.json", "{", "this is not JSON (line 1, column 2: Expecting property"),
        ("tokenizer_config.json", "[]", "a JSON object was expected, not []"),
        ("tokenizer_config.json", "[" * 100_000, "the JSON is nested too deeply"),
        ("tokenizer_config.json", '{"eos_token": "a", "eos_token": "b"}', "the key 'eos_token' stands there"),
        ("tokenizer_config.json", '{"bos_token": {"content": "a", "content": "b"}}', "the key 'content' stands"),
        ("special_tokens_map.json", '{"eos_token": "a", "eos_token": "b"}', "the key 'eos_token' stands there twice"),
        ("generation_config.json", '{"top_k": 1, "top_k": 2}', "the key 'top_k' stands there twice"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token: must be a string"),
        ("tokenizer_config.json", '{"pad_token": "\\ud800"}', "pad_token: it has half a surrogate pair"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template: must be"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template: must be"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x", "template": 1}]}', "chat_template: template 'x'"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id: must be"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id: must be"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder: must be an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"9": {}}}', "added_tokens_decoder: token '9' must have"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": {"content": "x"}}}',
            "added_tokens_decoder: 'x' is",
        ),
        ("added_tokens.json", '{"<|new|>": 377}', "the token '<|new|>' has the id 377, which is not the next free"),
        ("added_tokens.json", '{"x": true}', "True is no id"),
        ("chat_template.jinja", b"\xff", "byte 0: is not UTF-8"),
        ("tokenizer_config.json", '{"a": 1}'.encode("utf-16"), "this is not UTF-8 at byte 0"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, message):
    folder = write_folder(tmp_path)
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FormatError) as caught:
        Tokenizer.from_folder(folder)
    assert f"{folder / file}: {message}" in str(caught.value) and "\n" not in str(caught.value)


def test_only_so_many_huge_texts_are_encoded_at_a_time(tokenizer):
    class Waits:
        """Stands for the library: does not return until it may."""

        def __init__(self):
            self.num_inside, self.most_inside = 0, 0
            self.entered, self.may_return, self.lock = threading.Semaphore(0), threading.Event(), threading.Lock()

        def encode_batch_fast(self, texts, add_special_tokens):
            with self.lock:
                self.num_inside += 1
                self.most_inside = max(self.most_inside, self.num_inside)
            self.entered.release()
            self.may_return.wait()
            with self.lock:
                self.num_inside -= 1
            return plain.encode_batch_fast([text[:LONG_TEXT] for text in texts], add_special_tokens=False)

        def encode(self, text, add_special_tokens):
            return plain.encode(text, add_special_tokens=False)

    plain, waits = tokenizer._rust, Waits()
    tokenizer._rust = waits
    threads = [threading.Thread(target=tokenizer.encode, args=("x" * HUGE_TEXT,)) for _ in range(4 * MAX_HUGE)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(MAX_HUGE):
            waits.entered.acquire()
        short = tokenizer.encode("short")
    finally:
        waits.may_return.set()
        for thread in threads:
            thread.join()
    assert plain.decode(short) == "short"
    assert waits.most_inside == MAX_HUGE and waits.num_inside == 0


def test_templates_come_from_the_configuration_and_from_files(tmp_path):
    folder = write_folder(tmp_path)
    assert Tokenizer.from_folder(folder).templates == {"default": TEMPLATE}
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.from_folder(folder).templates == {"default": "new", "tool_use": "tools"}
    (tmp_path / "named").mkdir()
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    for listed in (named, {"default": "a", "rag": "b"}):
        folder = write_folder(tmp_path / "named", chat_template=listed)
        assert Tokenizer.from_folder(folder).templates == {"default": "a", "rag": "b"}
    (folder / "chat_template.jinja").write_text("new")
    assert Tokenizer.from_folder(folder).templates == {"default": "new"}


@given(st.randoms(use_true_random=False))
def test_any_damage_is_harmless_or_our_error(damaged_folder, rng):
    characters = list(byte_level_json())
    for _ in range(rng.randint(1, 4)):
        characters[rng.randrange(len(characters))] = rng.choice('0{}[]",:a-')
    (damaged_folder / "tokenizer.json").write_text("".join(characters), encoding="utf-8")
    try:
        tokenizer = Tokenizer.from_folder(damaged_folder)
        tokenizer.decode(tokenizer.encode(f"Hello wörld 🦊 {TURN}"))
    except BitNetError as error:
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def damaged_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("damaged"))

"""Tokenizers from the metadata of GGUF files. sentencepiece.json has two small vocabularies, and the ids that the
sentencepiece library gives to some texts with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bitnet_inference.errors import FormatError, ModelError, Unsupported
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import corrections, notes

SAMPLES = json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))
BYTES = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]


def sentencepiece_metadata(sample, prefix):
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": sample["tokens"],
        "tokenizer.ggml.scores": np.array(sample["scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(sample["types"], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def bpe_metadata(**more):
    """The 256 bytes, two merges, and two control tokens at the end."""
    tokens = [*BYTES, "ab", "abc", "<|begin|>", "<|end|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - 2) + [3, 3], np.int32),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
    return {key: value for key, value in (metadata | more).items() if value is not None}


def words(tokenizer, text):
    """How a text is cut before any merge, bytes spelled as the vocabulary does."""
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("kind", SAMPLES)
def test_sentencepiece_gives_the_same_ids(kind):
    sample = SAMPLES[kind]
    tokenizer = Tokenizer.from_metadata("model.gguf", sentencepiece_metadata(sample, kind == "prefix"))
    for text, ids in sample["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,)


def test_control_tokens_in_a_text_are_text():
    tokenizer = Tokenizer.from_metadata("model.gguf", bpe_metadata())
    begin, end = tokenizer.special["<|begin|>"], tokenizer.special["<|end|>"]
    assert tokenizer.encode("abc") == [begin, tokenizer.token_to_id("abc")]
    assert not {begin, end} & set(tokenizer.encode("<|end|>", add_special_tokens=False))
    assert tokenizer.encode("<|end|>", add_special_tokens=False, parse_special=True) == [end]
    assert tokenizer.eos_ids == (end,)


def test_merges_of_a_small_file_do_not_fill_memory():
    tokens = ["<unk>", "<s>", "</s>", *("a" * length for length in range(1, 513))]
    sample = {"tokens": tokens, "scores": [0.0] * len(tokens), "types": [2, 3, 3] + [1] * 512}
    with pytest.raises(
        FormatError, match=r"model\.gguf: tokenizer\.ggml\.tokens: have more than 16777216 characters of"
    ):
        Tokenizer.from_metadata("model.gguf", sentencepiece_metadata(sample, True))


def test_begin_and_end_of_sentencepiece_need_no_name():
    metadata = sentencepiece_metadata(SAMPLES["prefix"], True)
    named = Tokenizer.from_metadata("model.gguf", dict(metadata))
    for role in ("bos", "eos", "unknown"):
        del metadata[f"tokenizer.ggml.{role}_token_id"]
    found = Tokenizer.from_metadata("model.gguf", metadata)
    assert (found.bos_id, found.eos_ids, found.encode("a")) == (1, (2,), named.encode("a"))
    metadata["tokenizer.ggml.token_type"][1] = 1
    assert Tokenizer.from_metadata("model.gguf", metadata).bos_id is None


@pytest.mark.parametrize("kind", [1, 4])
def test_ends_of_turns_are_control_tokens_though_the_file_forgot_to_say_so(kind):
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"][256:258] = "<|eot_id|>", "</s>"
    metadata |= {"tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": np.array([1] * 256 + [kind, 1, 3, 3])}
    tokenizer = Tokenizer.from_metadata("model.gguf", metadata)
    assert 256 in tokenizer.eos_ids and "</s>" not in tokenizer.special
    assert 256 not in tokenizer.encode("<|eot_id|>") and tokenizer.encode_prompt("<|eot_id|>")[-1] == 256
    metadata["tokenizer.ggml.tokens"][255] = "<|eot_id|>"  # told once
    assert notes(metadata) == ["not marked as control tokens, and taken for such: <|eot_id|>"]


@pytest.mark.parametrize("key", ["tokens", "token_type", "model"])
@pytest.mark.parametrize("value", [5, np.array([1, 2])])
def test_what_is_said_of_a_vocabulary_that_is_none(key, value):
    """Its reader refuses it; `bitnet inspect` and `bitnet convert` have more to say of the file."""
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["<|eot_id|>"], f"tokenizer.ggml.{key}": value}
    assert bool(notes(metadata)) == (key != "model")
    assert bool(corrections(metadata)) == (key == "token_type")


@pytest.mark.parametrize("role", ["padding", "unknown"])
def test_padding_may_be_an_ordinary_token(role):
    """0 is what converters write where there is none; in byte-level vocabularies it is "!"."""
    tokenizer = Tokenizer.from_metadata("model.gguf", bpe_metadata(**{f"tokenizer.ggml.{role}_token_id": 0}))
    ids = tokenizer.encode("abc!", add_special_tokens=False)
    assert ids[-1] == 0 and tokenizer.decode(ids) == "abc!" and set(tokenizer.special) == {"<|begin|>", "<|end|>"}


@pytest.mark.parametrize("is_named", [True, False])
def test_an_unknown_token_is_special_where_the_file_names_it(is_named):
    metadata = sentencepiece_metadata(SAMPLES["prefix"], True)
    metadata["tokenizer.ggml.unknown_token_id"] = 0 if is_named else -1
    special = {"<s>": 1, "</s>": 2} | ({"<unk>": 0} if is_named else {})
    assert Tokenizer.from_metadata("model.gguf", metadata).special == special


@pytest.mark.parametrize(
    "pre, merge, text, is_merged",
    [
        ("llama-bpe", "1 2", "12", True),
        ("qwen2", "1 2", "12", False),
        ("gpt-2", "1 2", "12", True),
        ("llama-bpe", "3 4", "1234", False),
        ("llama-bpe", "! a", "!ab", True),
        ("gpt-2", "! a", "!ab", False),
        ("llama-bpe", "' S", "'S", True),
        ("gpt-2", "' S", "'S", False),
        ("falcon", "3 4", "1234", False),
        ("falcon", "1 2", "1234", True),
        ("default", "3 4", "1234", False),
        (None, "3 4", "1234", False),
        ("smollm", "1 2", "12", False),
        ("starcoder", "a b", "ab", True),
        ("tekken", "b A", "abA", False),
        ("tekken", "1 2", "12", False),
        ("tekken", "! /", "!/", True),
        ("pixtral", "' S", "'S", True),
        ("llama3", "' S", "'S", True),
        ("falcon_e", "' S", "'S", True),
        ("midm-2.0", "' S", "'S", True),
        ("gpt-4o", "b A", "abA", False),
        ("gpt-4o", "t '", "it's", True),
        ("tekken", "t '", "it's", False),
        ("llama4", "3 4", "1234", False),
        ("seed-coder", "! \u010a", "!\n", False),
        ("minicpm5", "3 4", "1234", False),
        ("ufakzeka", "s a", "'sa", True),
        ("deepseek-r1-qwen", "s a", "'sa", False),
        ("qwen35", "1 2", "12", False),
        ("kormo", "1 2", "12", False),
        ("deepseek-llm", "\u010a \u010a", "\n\n", False),
        ("deepseek-llm", "1 2", "12", False),
        ("deepseek-coder", "! a", "!ab", False),
        ("deepseek-coder", "! ?", "!?", True),
        ("deepseek-v3", "! a", "!ab", True),
        ("deepseek-v3", "3 4", "1234", False),
        ("poro-chat", "1 2", "12", True),
        ("viking", "1 2", "12", False),
        ("trillion", "1 2", "12", True),
    ],
)
def test_words_are_cut_as_the_name_says(pre, merge, text, is_merged):
    tokens = [*BYTES, "".join(merge.split()), "<|begin|>", "<|end|>"]
    more = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": [merge], "tokenizer.ggml.tokens": tokens}
    more["tokenizer.ggml.token_type"] = np.array([1] * (len(tokens) - 2) + [3, 3], np.int32)
    more |= {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": len(tokens) - 1}
    tokenizer = Tokenizer.from_metadata("model.gguf", bpe_metadata(**more))
    assert ("".join(merge.split()) in words(tokenizer, text)) == is_merged
    assert "".join(words(tokenizer, text)) == text


def test_a_vocabulary_of_llama_3_without_a_name_for_its_words():
    tokens = [*BYTES, *(f"<|{index}|>" for index in range(128256 - 256))]
    types = np.array([1] * 256 + [3] * (128256 - 256), np.int32)
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["' S"]}
    tokens[256] = "'S"
    types[256] = 1
    metadata = bpe_metadata(**more, **{"tokenizer.ggml.pre": None, "tokenizer.ggml.bos_token_id": 128000})
    assert "'S" in words(Tokenizer.from_metadata("model.gguf", metadata), "'S")
    assert "llama-bpe is used" in notes(metadata)[0]


@pytest.mark.parametrize("pre, written", [("falcon_e", "llama-bpe"), ("gpt2", "gpt-2"), ("trillion", None), (5, None)])
def test_names_that_llama_cpp_does_not_know_are_put_right(pre, written):
    """By some names of those that cut texts alike it takes spaces away in front of full stops, and not by others."""
    assert corrections({"tokenizer.ggml.pre": pre}).get("tokenizer.ggml.pre") == written


def test_a_template_that_is_known_to_be_wrong_is_replaced():
    wrong = "{{bos_token}}Human: {{ messages[0].content }}\n\nBITNETAssistant: "
    metadata = bpe_metadata(**{"tokenizer.chat_template": wrong})
    assert "capitalize" in Tokenizer.from_metadata("model.gguf", metadata).templates["default"]
    assert "2B4T" in notes(metadata)[0]
    right = bpe_metadata(**{"tokenizer.chat_template": "{{ 1 }}"})
    assert Tokenizer.from_metadata("model.gguf", right).templates == {"default": "{{ 1 }}"} and not notes(right)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"tokenizer.ggml.model": "bert"}, '"bert" is not supported'),
        ({"tokenizer.ggml.model": None}, "has no tokenizer: convert"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, '"kimi-k2" is not supported'),
        ({"tokenizer.ggml.tokens": None}, "tokens"),
        ({"tokenizer.ggml.tokens": []}, "tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "no pair"),
        ({"tokenizer.ggml.merges": ["ab x"]}, "broken tokenizer"),
        ({"tokenizer.ggml.token_type": np.zeros(3, np.int32)}, "3 entries for"),
        ({"tokenizer.ggml.token_type": "x"}, "no list of numbers"),
        ({"tokenizer.ggml.add_bos_token": 1}, "neither true nor false"),
        ({"tokenizer.chat_template": 5}, "must be a string"),
        ({"tokenizer.chat_templates": 5}, "no list of names"),
    ],
)
def test_what_is_wrong_is_named(more, message):
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_metadata("model.gguf", bpe_metadata(**more))
    assert isinstance(caught.value, FormatError | Unsupported) and "model.gguf" in str(caught.value)

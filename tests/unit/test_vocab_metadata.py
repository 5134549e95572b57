"""Tokenizers as metadata of GGUF files, and back."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from test_text_vocab import SAMPLES, sentencepiece_metadata
from text_samples import (
    BOS,
    CORPUS,
    EOS,
    TURN,
    around,
    byte_level_json,
    metaspace_json,
    sentencepiece_json,
    write_folder,
)

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.gguf_file import read_gguf
from bitnet_inference.formats.gguf_writer import record, write_gguf
from bitnet_inference.model_folder import find_model
from bitnet_inference.text.patterns import GPT2, LLAMA3_PATTERN, PATTERNS
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import NFC
from bitnet_inference.text.vocab_metadata import end_ids, metadata_of

GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = (*CORPUS, "don't  WE'LL\n\n 1234567 ½ naïve 狐狸 🦊", "x<|eot_id|>y</s>", "  a  ", "\t`~^ +=<>|$", "")


def cut(*steps, **model):
    """The sample with another pre-tokenizer."""
    spec = json.loads(byte_level_json())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(steps)}
    spec["model"] |= model
    return json.dumps(spec)


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex=False):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    byte_level(use_regex=True),
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
)


def back(tokenizer: Tokenizer, metadata, path: Path) -> Tokenizer:
    """The tokenizer of the metadata, through a file."""
    with path.open("wb") as out:
        write_gguf(out, [record(key, value) for key, value in metadata.items()], {}, lambda name, put: 0)
    found = read_gguf(path).metadata
    assert list(found) == list(metadata)
    return Tokenizer.from_metadata(path, found)


def assert_equal(found: Tokenizer, tokenizer: Tokenizer) -> None:
    assert found.vocabulary() == tokenizer.vocabulary() and found.special == tokenizer.special
    assert (found.bos_id, found.affixes, found.templates) == (tokenizer.bos_id, tokenizer.affixes, tokenizer.templates)
    for text in TEXTS:
        for options in ({}, {"parse_special": True}, {"add_special_tokens": False}):
            ids = tokenizer.encode(text, **options)
            assert found.encode(text, **options) == ids
        assert found.decode(ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("folder", [find_model("default"), GOLDEN / "llama-bitlinear", GOLDEN / "bitnet-packed"])
def test_tokenizers_of_models(tmp_path, folder):
    tokenizer = Tokenizer.from_folder(folder)
    metadata = metadata_of(tokenizer, tokenizer.vocab_size + 3)
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{tokenizer.vocab_size + 2}]"
    assert metadata["tokenizer.ggml.token_type"][-3:].tolist() == [5, 5, 5]
    assert_equal(back(tokenizer, metadata, tmp_path / "x.gguf"), tokenizer)


@pytest.mark.parametrize(
    "steps, ignore_merges, name",
    [
        ((split(LLAMA3_PATTERN), byte_level()), True, "llama-bpe"),
        ((split(LLAMA3_PATTERN), byte_level()), False, "smaug-bpe"),
        ((split(PATTERNS["qwen2"][0]), byte_level()), False, "deepseek-r1-qwen"),
        ((byte_level(use_regex=True),), False, "gpt-2"),
        ((split(GPT2), byte_level()), False, "gpt-2"),
        ((split(PATTERNS["tekken"][0]), byte_level()), True, "tekken"),
        ((split(PATTERNS["gpt-4o"][0]), byte_level()), False, "gpt-4o"),
        # Without merges, for those of the sample cross their digits.
        (({"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)), False, "smollm"),
        ((*map(split, PATTERNS["deepseek-llm"][:-1]), {"type": "Digits", "individual_digits": True}, byte_level()),
         False, "deepseek-llm"),
        (FALCON, False, "falcon"),
    ],
)  # fmt: skip
def test_the_pre_tokenizer_is_known_by_its_patterns(tmp_path, steps, ignore_merges, name):
    merges = {"merges": []} if name in ("falcon", "smollm", "deepseek-llm") else {}
    write_folder(tmp_path, cut(*steps, ignore_merges=ignore_merges, **merges), bos_token=BOS, eos_token=EOS)
    tokenizer = Tokenizer.from_folder(tmp_path)
    metadata = metadata_of(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.pre"] == name
    assert_equal(back(tokenizer, metadata, tmp_path / "x.gguf"), tokenizer)


def test_the_tokenizers_of_qwen_compose_accents(tmp_path):
    spec = json.loads(cut(split(PATTERNS["qwen2"][0]), byte_level(), ignore_merges=False)) | {"normalizer": NFC}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(spec), bos_token=BOS, eos_token=EOS))
    metadata = metadata_of(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.ggml.pre"] == "qwen2"
    found = back(tokenizer, metadata, tmp_path / "x.gguf")
    assert_equal(found, tokenizer)
    assert found.encode("cafe\u0301") == found.encode("caf\u00e9") == tokenizer.encode("cafe\u0301")


@pytest.mark.parametrize("kind", SAMPLES)
def test_sentencepiece_vocabularies(tmp_path, kind):
    """Scores are ranks; the ids are those that the sentencepiece library gives."""
    source = sentencepiece_metadata(SAMPLES[kind], kind == "prefix")
    spec = Tokenizer.from_metadata("x", source).to_json()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, spec, **names))
    metadata = metadata_of(tokenizer, tokenizer.vocab_size)
    for key in ("tokens", "token_type", "bos_token_id", "unknown_token_id", "add_space_prefix"):
        assert np.array_equal(metadata[f"tokenizer.ggml.{key}"], source[f"tokenizer.ggml.{key}"])
    found = back(tokenizer, metadata, tmp_path / "x.gguf")
    assert_equal(found, tokenizer)
    for text, ids in SAMPLES[kind]["ids"].items():
        assert found.encode(text, add_special_tokens=False) == ids


def test_gemmas_runs_of_spaces(tmp_path):
    """They are added tokens and come from merges too, which SentencePiece has no scores for."""
    spec = json.loads(Tokenizer.from_metadata("x", sentencepiece_metadata(SAMPLES["plain"], False)).to_json())
    run = len(spec["model"]["vocab"])
    spec["model"]["vocab"]["▁▁"] = run
    spec["model"]["merges"].insert(0, ["▁", "▁"])
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": run, "content": "▁▁", "special": False})
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(spec), bos_token="<s>"))
    metadata = metadata_of(tokenizer, tokenizer.vocab_size)
    assert (metadata["tokenizer.ggml.tokens"][run], metadata["tokenizer.ggml.token_type"][run]) == ("  ", 4)
    found = back(tokenizer, metadata, tmp_path / "x.gguf")
    assert_equal(found, tokenizer)
    assert run in found.encode("the  fox") and found.decode(found.encode("the  fox")) == "the  fox"


def test_the_ways_to_one_token_may_stand_in_any_order(tmp_path):
    """As in Gemma's tokenizers that Transformers 5 has saved again."""
    spec = json.loads(Tokenizer.from_metadata("x", sentencepiece_metadata(SAMPLES["plain"], False)).to_json())
    merges = spec["model"]["merges"]
    ways = [[*group] for _, group in groupby(merges, "".join)]
    spec["model"]["merges"] = [pair for group in ways for pair in reversed(group)]
    assert spec["model"]["merges"] != merges
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(spec), bos_token="<s>"))
    found = back(tokenizer, metadata_of(tokenizer, tokenizer.vocab_size), tmp_path / "x.gguf")
    for text, ids in SAMPLES["plain"]["ids"].items():
        assert found.encode(text, add_special_tokens=False) == ids


def test_templates_and_the_tokens_around_a_text(tmp_path):
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    spec = changed(post_processor=around(None, 1))
    write_folder(tmp_path, spec, bos_token=BOS, eos_token=EOS, chat_template=templates)
    tokenizer = Tokenizer.from_folder(tmp_path)
    metadata = metadata_of(tokenizer, tokenizer.vocab_size)
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    found = back(tokenizer, metadata, tmp_path / "x.gguf")
    assert found.templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    assert found.affixes == ([], [tokenizer.special[EOS]])
    # <|eot_id|> ends a text by its name; two more have a key each, and a third has none.
    assert end_ids([tokenizer.special[TURN], 7, 8, 9], found) == (
        {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 8},
        [9],
    )


@pytest.mark.parametrize("template, message", [("{{ 1 }}", None), ("{{ eos_token }}", "other tokens around a text")])
def test_a_text_may_end_with_another_token_than_the_named_one(tmp_path, template, message):
    """As in embedding models of Qwen3; a template that writes the named one would write the other."""
    spec = changed(post_processor=around(None, 1))
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, spec, eos_token=TURN, chat_template=template))
    if message:
        with pytest.raises(Unsupported, match=message):
            metadata_of(tokenizer, tokenizer.vocab_size)
        return
    found = back(tokenizer, metadata_of(tokenizer, tokenizer.vocab_size), tmp_path / "x.gguf")
    assert_equal(found, tokenizer)
    assert found.affixes == ([], [1]) and set(tokenizer.eos_ids) <= set(found.eos_ids)


def changed(**more):
    return json.dumps(json.loads(cut(byte_level(use_regex=True))) | more)


def spaced():
    spec = json.loads(cut(byte_level(use_regex=True)))
    spec["added_tokens"][-1]["lstrip"] = True
    return json.dumps(spec)


@pytest.mark.parametrize(
    "spec, message",
    [
        (byte_level_json, "a pre-tokenizer other than llama-bpe"),
        (lambda: cut(split(GPT2), byte_level(), ignore_merges=True), "ignore_merges"),
        (lambda: cut({"type": "Whitespace"}, byte_level()), "the pre-tokenizer .*Whitespace"),
        (lambda: changed(normalizer={"type": "NFC"}), "has other tokens in a GGUF file"),
        (lambda: changed(normalizer={"type": "Lowercase"}), "has other tokens in a GGUF file"),
        (lambda: cut(*FALCON), "has other tokens in a GGUF file"),
        (spaced, "takes in spaces"),
        (sentencepiece_json, "merges in an order that SentencePiece's scores do not give"),
        (metaspace_json, "no place in a GGUF file"),
    ],
)
def test_what_a_gguf_file_cannot_say_is_refused(tmp_path, spec, message):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, spec(), bos_token=BOS, unk_token="<unk>"))
    with pytest.raises(Unsupported, match=message):
        metadata_of(tokenizer, tokenizer.vocab_size)


def test_added_tokens_that_the_model_has_no_rows_for_are_left_out(tmp_path):
    spec = json.loads(cut(byte_level(use_regex=True)))
    whole = Tokenizer.from_folder(write_folder(tmp_path / "whole", json.dumps(spec), bos_token=BOS))
    token = {**spec["added_tokens"][0], "id": whole.vocab_size, "content": "<image>"}
    more = json.dumps(spec | {"added_tokens": [*spec["added_tokens"], token]})
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path / "more", more, bos_token=BOS))
    assert tokenizer.added_beyond(whole.vocab_size) == ["<image>"] and not tokenizer.added_beyond(tokenizer.vocab_size)
    metadata = metadata_of(tokenizer, whole.vocab_size)
    assert_equal(back(tokenizer, metadata, tmp_path / "x.gguf"), whole)
    ends = Tokenizer.from_folder(write_folder(tmp_path / "ends", more, eos_token="<image>"))
    with pytest.raises(Unsupported, match="do not belong together"):
        metadata_of(ends, whole.vocab_size)


def test_a_model_with_fewer_tokens_than_its_tokenizer():
    with pytest.raises(Unsupported, match="the tokenizer has 3072 tokens, the model 3000"):
        metadata_of(Tokenizer.from_folder(find_model("default")), 3000)

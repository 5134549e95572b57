"""Models without a tokenizer: they take token ids, and say so where a text comes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bitnet_inference import (
    LLM,
    Grammar,
    SamplingParams,
    WordFilter,
    convert,
    generate_file,
    perplexity,
    text_completion,
)
from bitnet_inference.errors import Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.packed_writer import write_packed
from bitnet_inference.model_folder import load_text_files
from bitnet_inference.server.token_texts import spelt
from bitnet_inference.text.embedded import to_embedded
from bitnet_inference.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "bitnet-packed"
IDS = [3, 4, 5, 6]
GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=2)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "wordless"
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    return folder


def written(kind: str, folder: Path, tmp_path: Path) -> Path:
    if not kind:
        return folder
    target = tmp_path / "out" / f"model{kind}"
    target.parent.mkdir(parents=True)
    return convert(folder, target).path


@pytest.mark.parametrize("kind", ["", ".gguf", ".safetensors", ".onnx"])
def test_it_computes_what_the_model_with_a_tokenizer_computes(kind, folder, tmp_path):
    paths = [written(kind, source, tmp_path / source.name) for source in (GOLDEN, folder)]
    with LLM.load(paths[0]) as worded, LLM.load(paths[1]) as llm:
        assert llm.tokenizer.vocab_size == llm.config.vocab_size and not llm.tokenizer.has_words
        assert (llm.eos_ids, llm.config.bos_id) == ((377, 383), 376)  # as generation_config.json and config.json say
        one, other = worded.generate(IDS, GREEDY), llm.generate(IDS, GREEDY)
        assert (other.text, other.token_ids, other.finish_reason) == ("", one.token_ids, one.finish_reason)
        assert np.array_equal(llm.logits(IDS), worded.logits(IDS)) and llm.score(IDS) == worded.score(IDS)
        assert perplexity(llm, IDS).num_bytes is None
        assert [piece.text for piece in llm.stream(IDS, GREEDY) if piece.text] == []
        if kind != ".onnx":
            assert np.array_equal(llm.embed(IDS), worded.embed(IDS))


def test_a_packed_file_has_no_tokenizer_then(tmp_path):
    checkpoint, path = open_checkpoint(GOLDEN), tmp_path / "model.safetensors"
    files = to_embedded(load_text_files(checkpoint))
    write_packed(checkpoint, {"text.json": files["text.json"]}, path)
    with LLM.load(GOLDEN) as worded, LLM.load(path) as llm:
        assert not llm.tokenizer.has_words and llm.score(IDS) == worded.score(IDS)
        assert llm.default_params == worded.default_params
    texts = load_text_files(open_checkpoint(path))
    assert list(to_embedded(texts)) == ["text.json"]


@pytest.mark.parametrize("kind", ["", ".gguf", ".safetensors"])
def test_the_folder_says_what_it_recommends(kind, folder, tmp_path):
    with LLM.load(GOLDEN) as worded, LLM.load(written(kind, folder, tmp_path)) as llm:
        assert llm.default_params == worded.default_params


@pytest.mark.parametrize("kind", ["", ".gguf", ".safetensors"])
def test_what_needs_words_is_refused_in_a_line(kind, folder, tmp_path):
    path = written(kind, folder, tmp_path)
    with LLM.load(path) as llm:
        for ask in (
            lambda: llm.generate("Hello"),
            lambda: llm.chat([{"role": "user", "content": "Hello"}]),
            lambda: llm.generate(IDS, SamplingParams(stop=["x"])),
            lambda: llm.generate(IDS, SamplingParams(grammar=Grammar(regex="a+"))),
            lambda: llm.score(["Hello"]),
            lambda: perplexity(llm, "Hello"),
            lambda: text_completion(llm, ["Hello"]),
            lambda: llm.tokenizer.encode("Hello"),
        ):
            with pytest.raises(Unsupported, match=r": .*; without it, token ids alone are taken") as caught:
                ask()
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(Unsupported, match=r": .*; without it, token ids alone are taken"):
        LLM.load(path, filters=[WordFilter(["x"], label="rude")])


def test_answers_tell_the_ids_of_their_tokens(folder, tmp_path):
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"prompt": IDS}) + "\n")
    with LLM.load(folder) as llm:
        generate_file(llm, prompts, answers, SamplingParams(max_tokens=8, temperature=0))
        ids = llm.generate(IDS, GREEDY).token_ids
        answer = json.loads(answers.read_text())
        assert (answer["text"], answer["token_ids"], "logprobs" in answer) == ("", ids, False)
        assert [spelt(llm.tokenizer, each) for each in ids[:2]] == [f"token_id:{each}" for each in ids[:2]]


def test_one_that_llama_cpp_calls_none():
    metadata = {"tokenizer.ggml.model": "no_vocab"}
    assert Tokenizer.from_metadata("model.gguf", metadata, 7).vocab_size == 7
    with pytest.raises(Unsupported, match="has no tokenizer"):
        Tokenizer.from_metadata("model.gguf", metadata)


def test_drafts_have_no_words_either(folder):
    with LLM.load(GOLDEN) as worded, LLM.load(folder, drafts=str(folder)) as llm:
        assert llm.generate(IDS, GREEDY).token_ids == worded.generate(IDS, GREEDY).token_ids

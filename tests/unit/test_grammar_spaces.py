"""Structured output with tokenizers that write a mark for a space, as Llama 2's, Mistral's and Gemma's do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from test_llm import scripted_llm
from text_samples import metaspace_json, write_folder

from bitnet_inference import Grammar, SamplingParams

SPACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
MARKS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
FALLBACK = [{"type": "ByteFallback"}, {"type": "Fuse"}]
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
DECODERS = {
    "Llama 2": {"type": "Sequence", "decoders": [SPACE, *FALLBACK, STRIP]},
    "Gemma": {"type": "Sequence", "decoders": [SPACE, *FALLBACK]},
    "Replace": SPACE,
    "Metaspace": MARKS,
    "in a sequence": {"type": "Sequence", "decoders": [MARKS]},
    "with bytes": {"type": "Sequence", "decoders": [{**MARKS, "prepend_scheme": "first"}, *FALLBACK]},
    "without the first": {**MARKS, "prepend_scheme": "never"},
}


@pytest.fixture(params=DECODERS)
def llm(request, tmp_path):
    spec = json.loads(metaspace_json()) | {"decoder": DECODERS[request.param]}
    loaded, _ = scripted_llm(write_folder(tmp_path, json.dumps(spec), chat_template="{{ messages[0].content }}"))
    with loaded:
        yield loaded


@pytest.mark.parametrize("regex", ["the fox( and the fox){0,3}!", "( A|▁|é){3}x"])
def test_a_space_is_the_mark_of_this_tokenizer(llm, regex):
    """Metaspace was refused, but beside ByteFallback: there a mark was no space."""
    params = [SamplingParams(grammar=Grammar(regex=regex), max_tokens=100, seed=seed) for seed in range(4)]
    for output in llm.generate(["Hello"] * 4, params):
        assert output.finish_reason == "stop" and re.fullmatch(regex, output.text)


def test_tokens_like_those_of_bytes_are_text_where_the_decoder_says_so(llm):
    token = llm.tokenizer.token_to_id("<0x41>")
    params = SamplingParams(grammar=Grammar(regex="[AB]{3}"), max_tokens=20, seed=1, logit_bias={token: 100.0})
    output = llm.generate("Hello", params)
    assert re.fullmatch("[AB]{3}", output.text)
    assert (token in output.token_ids) == llm.tokenizer.decoding.byte_fallback


ANSWERS = ["( | x)yes", " ?[a ]{3}", " *no", "yes|no", "x ?: 12", " ( A|ü){2}", "(the fox )*x", "(.|\n)*"]


@pytest.mark.parametrize("regex", ANSWERS)
@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_an_answer_has_its_form_without_the_space_that_the_decoder_drops(llm, regex, kind):
    """Of " yes" the space was dropped."""
    grammar = Grammar(regex=regex) if kind == "regex" else Grammar(lark=f"start: /{regex}/")
    params = [SamplingParams(grammar=grammar, max_tokens=100, seed=seed) for seed in range(12)]
    for output in llm.chat([[{"role": "user", "content": "Hi"}]] * 12, params):
        assert output.finish_reason == "length" or re.fullmatch(regex, output.text), output


def test_an_answer_may_begin_with_the_token_that_brings_the_dropped_space(llm):
    """As it does without a form: models like Llama 2 write "▁t", and not "t"."""
    token = llm.tokenizer.token_to_id("▁t")
    params = SamplingParams(grammar=Grammar(choice=["the fox", "the owl"]), seed=1, logit_bias={token: 100.0})
    answer = llm.chat([{"role": "user", "content": "Hi"}], params)
    assert answer.text in ("the fox", "the owl") and answer.finish_reason == "stop"
    assert (answer.token_ids[0] == token) == llm.tokenizer.decoding.drops_space
    continued = llm.generate("Hi", params)
    assert continued.text in ("the fox", "the owl") and continued.token_ids[0] != token

"""An LLM on an ONNX file: its whole surface, and the same text whatever runs beside a request."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from onnx_samples import FLOAT, FLOAT16, GOLDEN, Kind, make_decoder, write_genai, write_model

from bitnet_inference import LLM, BeamParams, Grammar, SamplingParams
from bitnet_inference.errors import FormatError, InvalidParams, Unavailable, Unsupported

PROMPTS = ["the cat", "a", "once upon a time there was " * 6, "dog dog dog"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("onnx") / "model.onnx", make_decoder(Kind(has_hidden=True)))


@pytest.fixture(scope="module")
def llm(model):
    with LLM.load(model, threads=1) as llm:
        yield llm


def test_the_text_of_the_same_weights(llm):
    with LLM.load(GOLDEN, cache_dtype="float32", threads=1) as other:
        for prompt in PROMPTS:
            assert llm.generate(prompt, GREEDY).token_ids == other.generate(prompt, GREEDY).token_ids
            assert np.allclose(llm.score(prompt), other.score(prompt), atol=1e-4)
            assert np.allclose(llm.embed(prompt), other.embed(prompt), atol=1e-4)
        params = BeamParams(num_beams=3, max_tokens=6)
        assert llm.beam_search(PROMPTS[0], params)[0].token_ids == other.beam_search(PROMPTS[0], params)[0].token_ids
        assert llm.eos_ids == other.eos_ids
        assert llm.default_params == other.default_params


def test_many_at_a_time_give_the_texts_that_each_gives_alone(llm, model):
    sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [f"{prompt} {number}" for prompt in PROMPTS for number in range(3)]
    alone = [llm.generate(prompt, sampled).token_ids for prompt in prompts]
    assert [each.token_ids for each in llm.generate(prompts, sampled)] == alone
    with LLM.load(model, threads=1, max_cache_tokens=256) as small:  # so that requests give way to each other
        assert [each.token_ids for each in small.generate(prompts, sampled)] == alone


def test_a_beginning_that_was_computed_is_not_computed_again(llm):
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    first, second = (llm.generate(prompt, GREEDY) for _ in range(2))
    assert second.usage.num_cached_tokens >= 32
    assert second.token_ids == first.token_ids


def test_choices_share_a_prompt(llm):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
    streams = llm.stream_choices("the cat", 3, params)
    texts = ["".join(piece.text for piece in stream) for stream in streams]
    again = llm.stream_choices("the cat", 3, params)
    assert texts == ["".join(piece.text for piece in stream) for stream in again]
    assert len(set(texts)) > 1


def test_what_is_drafted_is_checked(model, llm):
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM.load(model, threads=1, drafts="lookup") as drafting:
        prompt = "dog dog dog dog dog dog dog dog"
        assert drafting.generate(prompt, params).token_ids == llm.generate(prompt, params).token_ids


def test_form_and_logprobs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, grammar=Grammar(regex="(yes|no)"))
    answer = llm.generate("the cat", params)
    assert answer.text in ("yes", "no")
    assert len(answer.logprobs) == len(answer.token_ids)


def test_logits_of_a_prompt_in_steps(llm):
    golden = np.load(GOLDEN / "golden.npz")
    assert np.allclose(llm.logits(golden["token_ids"].tolist()), golden["logits"], atol=1e-4)


def test_no_embeddings_where_the_graph_has_no_hidden_states(tmp_path):
    with LLM.load(write_model(tmp_path / "model.onnx", make_decoder()), threads=1) as llm:
        with pytest.raises(InvalidParams, match="hidden states"):
            llm.embed("the cat")
        assert llm.generate("the cat", GREEDY).finish_reason == "length"


@pytest.mark.parametrize("where", ["", "onnx"])
@pytest.mark.parametrize("name", ["model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx"])
def test_folders(tmp_path, where, name, llm):
    write_model(tmp_path / where / name, make_decoder(), words=False)
    for path in GOLDEN.glob("*.json"):
        if "safetensors" not in path.name:
            shutil.copy(path, tmp_path)
    for path in {tmp_path, tmp_path / where, tmp_path / where / name}:
        with LLM.load(path, threads=1) as found:
            assert found.generate("the cat", GREEDY).token_ids == llm.generate("the cat", GREEDY).token_ids


def test_a_folder_of_genai(tmp_path, llm):
    folder = write_genai(tmp_path, make_decoder(Kind(is_genai=True, has_positions=False)))
    with LLM.load(folder, threads=1) as found:
        assert found.generate("the cat", GREEDY).token_ids == llm.generate("the cat", GREEDY).token_ids
        assert (found.max_context, found.eos_ids) == (256, (377, 382, 383))  # one is tokenizer_config.json's
        assert (found.default_params.temperature, found.default_params.top_k) == (0.6, 20)


def test_other_weights_of_a_folder_go_first(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "both")
    write_model(tmp_path / "both" / "onnx" / "model.onnx", make_decoder(), words=False)
    with LLM.load(tmp_path / "both", threads=1) as llm:
        assert llm.embed("the cat").shape == (64,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cpu"}, 'device is "cpu"'),
        ({"device": "reference"}, 'device is "reference"'),
        ({"cache_dtype": "int8"}, 'cache_dtype is "int8", but an ONNX file runs with "float32"'),
        ({"head": "int8"}, 'head is "int8"'),
        ({"quantize": "int8"}, 'quantize is "int8"'),
        ({"embedding": "int8"}, 'embedding is "int8"'),
    ],
)
def test_options_that_the_graph_decides_are_refused(model, options, words):
    with pytest.raises(InvalidParams, match=words):
        LLM.load(model, **options)
    with LLM.load(model, device="onnx", cache_dtype="float32", threads=1):
        pass


def test_the_device_is_for_onnx_files():
    with pytest.raises(InvalidParams, match="no ONNX file"):
        LLM.load(device="onnx")
    with pytest.raises(InvalidParams, match="float16"):
        LLM.load(cache_dtype="float16")


@pytest.mark.parametrize(("cache", "width"), [(FLOAT, 4), (FLOAT16, 2)])
def test_what_a_token_of_the_cache_takes(tmp_path, cache, width):
    path = write_model(tmp_path / "model.onnx", make_decoder(Kind(cache=cache)))
    sizes = []
    for num_tokens in (256, 512):
        with LLM.load(path, threads=1, max_cache_tokens=num_tokens) as llm:
            sizes.append(llm.num_bytes)
    assert sizes[1] - sizes[0] == 256 * 2 * 2 * 2 * 16 * width  # layers, keys and values, heads, features


def test_without_the_runtime(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(Unavailable, match=r'pip install "bitnet-inference\[onnx\]"'):
        LLM.load(model)


def test_weights_cannot_be_taken_out(model, tmp_path):
    from bitnet_inference import convert
    from bitnet_inference.summary import plan_of

    for refused in (lambda: convert(model, tmp_path / "x.gguf"), lambda: plan_of(model)):
        with pytest.raises(Unsupported, match="cannot be taken out"):
            refused()


def test_nothing_to_say_how_long_it_goes_on(tmp_path):
    path = write_model(tmp_path / "model.onnx", make_decoder())
    (tmp_path / "config.json").unlink()
    with pytest.raises(FormatError, match="max_position_embeddings"):
        LLM.load(path)

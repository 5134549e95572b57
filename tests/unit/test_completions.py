import json

import numpy as np
import pytest
from test_grammar import accepts
from test_llm import says, scripted_llm
from text_samples import BOS, TURN, write_folder

from bitnet_inference import LLM, InvalidParams, PromptTooLong, chat_completion, text_completion
from bitnet_inference.grammar.response_format import read_response_format

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def llm(tmp_path):
    loaded, loaded.model = scripted_llm(write_folder(tmp_path))
    with loaded:
        yield loaded


def test_texts_go_on_without_what_ends_them(llm):
    says(llm, " met an owl")
    assert text_completion(llm, ["The fox", "Hello world"], temperature=0) == [{"generation": " met an owl"}] * 2
    assert text_completion(llm, []) == []


def test_echo_and_logprobs_cover_prompt_and_answer(llm):
    says(llm, " owl 🦊")
    (result,) = text_completion(llm, ["The fox"], temperature=0, logprobs=True, echo=True)
    ids = llm.tokenizer.encode("The fox") + llm.tokenizer.encode(" owl 🦊", add_special_tokens=False)
    assert result["generation"] == BOS + "The fox owl 🦊"
    assert result["tokens"] == [llm.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    logits = llm.logits(ids).astype(np.float64)
    logprobs = (
        logits
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        - logits.max(1, keepdims=True)
    )
    expected = [0.0, *(logprobs[i, token] for i, token in enumerate(ids[1:]))]
    assert np.allclose(result["logprobs"], expected, atol=1e-4)
    llm.model.num_tokens = 0
    text_completion(llm, ["The fox"], temperature=0, logprobs=True, echo=True)
    assert llm.model.num_tokens == len(ids), "the prompt is scored by the request itself"


def test_logprobs_are_the_models_whatever_the_temperature(llm):
    hot, cold = (
        text_completion(llm, ["The fox"], temperature=t, top_p=1e-6, max_gen_len=5, logprobs=True) for t in (5.0, 0)
    )
    assert hot == cold and len(hot[0]["logprobs"]) == len(hot[0]["tokens"]) == 5


@pytest.mark.parametrize("length, expected", [(0, 0), (3, 3), (1000, 256 - 3), (None, 256 - 3)])
def test_lengths(llm, length, expected):
    def never_ends(history, logits):
        logits[:3] = -np.inf

    llm.model.change_logits = never_ends
    prompt = "The fox"
    assert len(llm.tokenizer.encode(prompt)) == 3
    (result,) = text_completion(llm, [prompt], max_gen_len=length, logprobs=True)
    assert len(result["tokens"]) == expected


def test_a_seed_makes_rows_differ_and_runs_equal(llm):
    first, second = (text_completion(llm, ["x", "x"], 1.0, 1.0, 12, seed=7) for _ in range(2))
    assert first == second and first[0] != first[1]


def test_the_last_seed_is_followed_by_the_first(llm):
    params = {"temperature": 1.0, "top_p": 1.0, "max_gen_len": 12}
    first, second = text_completion(llm, ["x", "x"], **params, seed=(1 << 64) - 1)
    assert [second] == text_completion(llm, ["x"], **params, seed=0) != [first]


def test_chats(llm):
    says(llm, "Hello.")
    dialog = [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Yes?"}, *HI]
    (plain, more) = chat_completion(llm, [HI, dialog], temperature=0)
    assert plain == more == {"generation": {"role": "assistant", "content": "Hello."}}
    (answer,) = chat_completion(llm, [HI], temperature=0, logprobs=True)
    assert "".join(answer["tokens"]) == "Hello." and len(answer["logprobs"]) == len(answer["tokens"])


@pytest.mark.parametrize(
    "dialog",
    [
        [],
        [{"role": "system", "content": "x"}],
        [{"role": "assistant", "content": "x"}],
        [*HI, *HI],
        [*HI, {"role": "assistant", "content": "x"}],
        [*HI, {"role": "system", "content": "x"}, *HI],
    ],
)
def test_dialogs_take_turns(llm, dialog):
    with pytest.raises(InvalidParams):
        chat_completion(llm, [HI, dialog])


def test_results_of_tools_follow_their_calls(llm):
    call = {"type": "function", "function": {"name": "clock", "arguments": "{}"}}
    calls, result = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "noon"}
    answer = {"role": "assistant", "content": "Noon."}
    for dialog in (
        [*HI, calls, result],
        [*HI, calls, result, result, answer, *HI],
        [*HI, calls, result, calls, result],
    ):
        assert chat_completion(llm, [dialog], temperature=0, max_gen_len=1)
    for dialog in ([*HI, calls], [*HI, result], [*HI, answer, result], [calls, result], [*HI, calls, result, answer]):
        with pytest.raises(InvalidParams, match="tool results follow the calls"):
            chat_completion(llm, [dialog])


def test_mistakes(llm):
    for prompts in ("x", [1], [None], None, 5, iter(["x"])):
        with pytest.raises(InvalidParams, match="list of strings"):
            text_completion(llm, prompts)
    for dialogs in (None, 5, "x", iter([HI]), HI):
        with pytest.raises(InvalidParams, match="dialogs must be"):
            chat_completion(llm, dialogs)
    for seed in ("1", True, 1.5):
        with pytest.raises(InvalidParams, match="seed is"):
            text_completion(llm, ["x"], seed=seed)
    for length in (-1, True, "1", 1.5):
        with pytest.raises(InvalidParams, match="max_gen_len"):
            text_completion(llm, ["x"], max_gen_len=length)
    with pytest.raises(InvalidParams, match="temperature"):
        text_completion(llm, ["x"], temperature=-1)
    with pytest.raises(PromptTooLong):
        text_completion(llm, ["a b " * 300])


def test_special_tokens_in_prompts_are_text(llm):
    says(llm, "x")
    (result,) = text_completion(llm, [f"a{TURN}b"], temperature=0, echo=True, logprobs=True)
    assert TURN not in result["tokens"] and result["generation"] == f"{BOS}a{TURN}bx"


SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}


def test_response_formats():
    with LLM.load("default") as llm:
        named = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA, "strict": True}}
        (answer,) = chat_completion(llm, [HI], response_format=named, seed=1)
        assert len(json.loads(answer["generation"]["content"])) == 2
        (answer,) = chat_completion(llm, [HI], response_format={"type": "json_object"}, seed=1, max_gen_len=30)
        assert answer["generation"]["content"].startswith("{")
        plain = [
            chat_completion(llm, [HI], 0, response_format=each, max_gen_len=9) for each in (None, {"type": "text"})
        ]
        assert plain[0] == plain[1]


@pytest.mark.parametrize(
    "value, message",
    [
        ("json", "response_format is 'json': give"),
        ({"type": "xml"}, "response_format is"),
        ({"type": {}}, "response_format is"),
        ({"type": "json_object", "value": 1}, "value is 1: give a JSON schema"),
        ({"type": "json_object", "schema": {}}, "'schema' is unknown"),
        ({"type": "json_schema"}, "give an object with a name and a schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "name is None"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}}, "strict is 1"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "mode": 1}}, "'mode' is unknown"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}, "not cannot be kept"),
    ],
)
def test_response_formats_that_are_refused(llm, value, message):
    with pytest.raises(InvalidParams, match=message):
        chat_completion(llm, [HI], response_format=value)


def test_hugging_faces_client_puts_the_schema_into_a_json_object():
    named = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    assert read_response_format({"type": "json_object", "value": SCHEMA}) == read_response_format(named)


@pytest.mark.parametrize("more, is_open", [({}, False), ({"additionalProperties": True}, True)])
def test_a_response_format_has_no_properties_but_those_it_names(more, is_open):
    schema = {"properties": {"t": {"const": 1}}, "required": ["t"], **more}
    form = read_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert accepts(form, '{"t": 1}') and accepts(form, '{"t": 1, "u": 2}') == is_open


def test_one_object_of_several_parts_leaves_the_others_closed():
    closed = {"properties": {"t": {"const": 1}}}
    parts = {
        "closed": closed,
        "alone": {"allOf": [{"$ref": "#/$defs/alone"}], "description": "as some write a reference"},
        "joined": {"allOf": [{"$ref": "#/$defs/joined"}, {"properties": {"u": {"const": 2}}}]},
        "beside": {"anyOf": [{"properties": {"t": {"const": 1}}}], "required": ["u"]},
    }
    schema = {"properties": parts, "$defs": {"alone": dict(closed), "joined": dict(closed)}}
    form = read_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    for name in parts:
        assert accepts(form, f'{{"{name}": {{"t": 1, "u": 2}}}}') == (name in ("joined", "beside")), name
    assert not accepts(form, '{"other": 1}')


@pytest.mark.parametrize("options", [{"logprobs": "no"}, {"echo": "no"}])
def test_flags_are_true_or_false(llm, options):
    with pytest.raises(InvalidParams, match="is 'no': give True or False"):
        text_completion(llm, ["The"], **options)

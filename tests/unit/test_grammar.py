"""Structured output: what a Grammar refuses, and texts of the default model that fit one."""

from __future__ import annotations

import json
import re
import threading
from decimal import Decimal

import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_llm import scripted_llm
from text_samples import sentencepiece_json, write_folder

from bitnet_inference import LLM, Grammar, InvalidParams, SamplingParams
from bitnet_inference.grammar.closing import closed_schema
from bitnet_inference.grammar.endless import is_endless

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["fox", "owl", "bear"]},
        "friends": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "friends"],
    "additionalProperties": False,
}
BYTES = llguidance.LLTokenizer("byte")
SUMS = 'start: term (("+" | "-") term){0,3} "="\nterm: /[0-9]{1,3}/\n'
YES_OR_NUMBER = 'root ::= "yes" | num\nnum ::= [0-9]+ ("." [0-9]{1,3})?\n'


@pytest.fixture(scope="module")
def llm():
    with LLM.load("default") as loaded:
        yield loaded


def write(llm, grammar, **options):
    return llm.generate(
        "Once upon a time", SamplingParams(**{"seed": 1, "max_tokens": 200, "grammar": grammar} | options)
    )


def accepts(grammar, text):
    """Whether the grammar allows this text, whatever the vocabulary."""
    matcher, tokens = llguidance.LLMatcher(BYTES, grammar.source), BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def check_person(text):
    person = json.loads(text)
    assert list(person) == PERSON["required"]
    assert isinstance(person["name"], str) and len(person["name"]) <= 20
    assert isinstance(person["age"], int) and 1 <= person["age"] <= 99
    assert person["kind"] in ("fox", "owl", "bear")
    assert len(person["friends"]) <= 3 and all(re.fullmatch("[A-Z][a-z]{1,8}", each) for each in person["friends"])


def test_eight_seeded_requests_at_a_time_are_valid_and_as_if_alone(llm):
    grammar = Grammar(json_schema=PERSON)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=300, grammar=grammar) for seed in range(8)]
    outputs = llm.generate(["Tell me of an animal"] * 8, params)
    for output in outputs:
        assert output.finish_reason == "stop"
        check_person(output.text)
    assert len({output.text for output in outputs}) == 8
    again = llm.generate(["Tell me of an animal"] * 8, params)
    alone = [llm.generate("Tell me of an animal", each) for each in params]
    for output, second, lonely in zip(outputs, again, alone, strict=True):
        assert output.token_ids == second.token_ids == lonely.token_ids
        assert output.text == second.text == lonely.text


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
@pytest.mark.parametrize(
    "grammar, form",
    [
        ({"regex": "[A-Z][a-z]{2,6} and [a-z]{3}[!?]"}, "[A-Z][a-z]{2,6} and [a-z]{3}[!?]"),
        ({"regex": r"(é|ü|🦊){2}\n\\"}, r"(é|ü|🦊){2}\n\\"),
        ({"choice": ["the fox", "the owl", '.*"\\', "ü\n"]}, 'the fox|the owl|\\.\\*"\\\\|ü\n'),
        ({"lark": SUMS}, r"\d{1,3}([+-]\d{1,3}){0,3}="),
        ({"gbnf": YES_OR_NUMBER}, r"yes|\d+(\.\d{1,3})?"),
        ({"json_schema": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
         r"\[(true|false), ?(true|false)\]"),
        ({"json_schema": '{"const": "a \\"b\\""}'}, r'"a \\"b\\""'),
    ],
)  # fmt: skip
def test_the_text_has_the_form(llm, grammar, form, temperature):
    for seed in range(3):
        output = write(llm, Grammar(**grammar), temperature=temperature, seed=seed, max_tokens=100)
        if output.finish_reason == "stop":
            assert re.fullmatch(form, output.text)
        else:
            assert "gbnf" in grammar, "all others are short"


def test_any_json_object(llm):
    output = write(llm, Grammar(json_object=True), seed=3, logit_bias={llm.tokenizer.token_to_id("}"): 10})
    assert isinstance(json.loads(output.text), dict)


def test_every_choice_can_be_chosen(llm):
    words = ["fox", "<b>", ""]
    texts = {write(llm, Grammar(choice=words), temperature=100.0, seed=seed).text for seed in range(200)}
    assert texts == set(words)


def test_ends_come_where_the_form_is_complete_and_special_tokens_nowhere(llm):
    special = dict.fromkeys(llm.tokenizer.special_ids, 100.0)
    three = write(llm, Grammar(regex="[a-z]{3}"), logit_bias=special)
    assert re.fullmatch("[a-z]{3}", three.text)
    open_end = write(llm, Grammar(regex="[a-z]{3,}"), logit_bias=special)
    assert re.fullmatch("[a-z]{3,}", open_end.text) and open_end.stopped_by in llm.eos_ids
    anything = write(llm, Grammar(regex="(?s).*"), logit_bias=special, ignore_eos=True, max_tokens=9)
    assert anything.finish_reason == "length" and not llm.tokenizer.special_ids.intersection(anything.token_ids)


def test_stop_tokens_wait_for_the_form_and_stop_strings_do_not(llm):
    letter = llm.tokenizer.token_to_id("b")
    waits = write(llm, Grammar(regex="[ab]{3}[a-z]*"), stop_token_ids=[letter], logit_bias={letter: 100.0})
    assert re.fullmatch("[ab]{3}[a-z]*", waits.text) and waits.stopped_by == letter
    cut = write(llm, Grammar(json_schema=PERSON), stop='"age"')
    assert cut.stopped_by == '"age"' and cut.text.endswith((",", ", "))


def test_min_tokens_ban_the_end_while_the_form_allows_more(llm):
    params = {"min_tokens": 6, "temperature": 0.0, "max_tokens": 20}
    assert len(write(llm, Grammar(regex="(ab)*"), **params).token_ids) >= 6
    assert write(llm, Grammar(choice=["fox"]), **params).text == "fox"


def test_a_stream_and_a_chat_are_held_to_it_too(llm):
    params = SamplingParams(grammar=Grammar(choice=["fox", "owl"]), seed=1)
    pieces = [piece.text for piece in llm.stream("The", params)]
    assert "".join(pieces) in ("fox", "owl")
    assert llm.chat([{"role": "user", "content": "fox or owl?"}], params).text in ("fox", "owl")


def test_one_grammar_may_serve_many_threads(llm):
    texts, grammar = [], Grammar(regex="[a-z]{4} [0-9]{2}")
    threads = [threading.Thread(target=lambda: texts.append(write(llm, grammar).text)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 8 and len(set(texts)) == 1 and re.fullmatch("[a-z]{4} [0-9]{2}", texts[0])


def test_sentencepiece_vocabularies_work_too(tmp_path):
    loaded, _ = scripted_llm(write_folder(tmp_path, sentencepiece_json()))
    with loaded:
        params = SamplingParams(grammar=Grammar(regex="the fox( and the fox)*!"), max_tokens=100, seed=1)
        assert re.fullmatch("the fox( and the fox)*!?", loaded.generate("Hello", params).text)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "a grammar has nothing: give exactly one of json_schema, regex, lark, gbnf, choice, json_object"),
        ({"regex": "a", "choice": ["a"]}, "a grammar has regex and choice"),
        ({"json_object": 1}, "json_object is 1"),
        ({"regex": 3}, "regex is int: give a string"),
        ({"regex": ""}, "regex is empty"),
        ({"regex": "\ud800"}, "half a surrogate"),
        ({"regex": "x" * 100_000}, "regex has 100000 characters: give at most 65536"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, r"regex: look-around \(\(\?=b\).*\) is not supported"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a{1000000000}"}, "repeats too often"),
        ({"regex": "((a{1000}){1000}){1000}"}, "repeats too often"),
        ({"regex": "(" * 20_000 + "a" + ")" * 20_000}, "invalid regex"),
        ({"choice": []}, "give a list of strings"),
        ({"choice": "fox"}, "give a list of strings"),
        ({"choice": ["a", 1]}, "give a list of strings"),
        ({"choice": ["a"] * 1001}, "1001 strings: give at most 1000"),
        ({"lark": "start: nope"}, 'unknown name: "nope"'),
        ({"lark": "nonsense"}, "lark: "),
        ({"lark": 'start: word\nword[temperature=3]: /.*/'}, "cannot be kept"),
        ({"lark": 'start: %json {"type": "string", "x-guidance": {"lenient": true}}'}, "cannot be kept"),
        ({"lark": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000}, "20001 rules and groups: give at most 500"),
        ({"lark": 'start: "a"{1000000}'}, "repeats too often"),
        ({"lark": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(60)) + 'R60: "a"'}, "too big"),
        ({"lark": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'}, "4002 rules"),
        ({"gbnf": "foo"}, "gbnf is not supported"),
        ({"gbnf": 'a ::= "b"'}, "No 'root' rule"),
        ({"gbnf": "root ::= " + "(" * 400 + '"a"' + ")" * 400}, "gbnf is not supported"),
        ({"json_schema": 3}, "json_schema is int"),
        ({"json_schema": int}, r"json_schema is the class int: give its schema, as what model_json_schema\(\)"),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[" * 20_000}, "too deeply nested"),
        ({"json_schema": {"const": object()}}, "json_schema is no JSON"),
        ({"json_schema": False}, "json_schema is bool"),
        ({"json_schema": {"items": False, "minItems": 1, "type": "array"}}, "required item is unsatisfiable"),
        ({"json_schema": {"type": "strin"}}, "strin"),
        ({"json_schema": {"type": "string", "format": "phone"}}, "at /: the format 'phone' is not known here: "),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
        ({"json_schema": {"not": {}}}, "at /: not cannot be kept: leave it out"),
        ({"json_schema": {"nullable": "yes"}}, "at /: nullable is 'yes': give true or false"),
        ({"json_schema": {"properties": {"a": {"items": {"uniqueItems": True}}}}}, "at /properties/a/items: uni"),
        ({"json_schema": {"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}}, "the cases of oneOf are told apart"),
        ({"json_schema": {"oneOf": [{"$ref": "#/$defs/x"}, {"const": 1}], "$defs": {"x": {}}}}, "the cases of oneOf"),
        ({"json_schema": {"anyOf": [{}, {"if": {}, "then": {}}]}}, "at /anyOf/1: if cannot"),
        ({"json_schema": {"$defs": {"x": {"contains": {}}}}}, r"at /\$defs/x: contains cannot"),
        ({"json_schema": {"type": "string", "minLenght": 3}}, "'minLenght' is no keyword .* did you mean minLength"),
        ({"json_schema": {"x-guidance": {"lenient": True}}}, "x-guidance cannot be kept"),
        ({"json_schema": {"properties": {"a": {"pattern": "a(?!b)"}}}}, "at /properties/a: look-around"),
        ({"json_schema": {"pattern": "a{99999999}"}}, "at /: a part repeats too often"),
        ({"json_schema": {"properties": []}}, "properties is no object"),
        ({"json_schema": {"anyOf": {}}}, "anyOf is no list"),
        ({"json_schema": {"items": 3}}, "at /items: is 3: give a schema"),
        ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, "json_schema is too large"),
        ({"json_schema": {"anyOf": [{}] * 3000}}, "json_schema is too large"),
        ({"json_schema": {"enum": [f"word{i}" for i in range(20_000)]}}, "characters"),
        ({"json_schema": {"$ref": "#"}}, "no text ends that fits, because it requires itself: make a property"),
    ],
)  # fmt: skip
def test_what_is_impossible_is_refused_in_one_line(options, message):
    with pytest.raises(InvalidParams, match=message) as caught:
        Grammar(**options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "options, message",
    [
        ({"regex": "[a&&b]"}, "it allows no text"),
        ({"lark": "start: start"}, "it allows no text"),
        ({"lark": 'start: <|eot_id|> "a"'}, "no token of the vocabulary can follow"),
        ({"regex": "a?" * 5000}, "too many expressions"),
        ({"json_schema": {"type": "object", "properties": {f"k{i}": {} for i in range(1500)}}}, "2000"),
    ],
)
def test_what_shows_with_the_vocabulary_is_refused_before_the_engine_sees_it(llm, options, message):
    with pytest.raises(InvalidParams, match=message) as caught:
        llm.stream("Once", SamplingParams(grammar=Grammar(**options)))
    assert "\n" not in str(caught.value)


def test_a_grammar_whose_text_does_not_end_runs_to_its_last_token(llm):
    for options in (
        {"lark": 'start: "a" start'},
        {"lark": 'start: a{1000}\na: b{1000}\nb: "a"{1000}'},
        {"gbnf": "root ::= x root\nx ::= [a]*"},  # the library followed what must come for ever
        {"lark": "start: /a*/ start"},
    ):
        output = write(llm, Grammar(**options), max_tokens=20)
        assert output.finish_reason == "length" and set(output.text) == {"a"}, options


@pytest.mark.parametrize(
    "regex", ["(a|b)*a(a|b){100}", "(a+)+b", "(x+x+)+y", ".*a.{300}", "(a{100}){100}", r"\p{L}{1,500}"]
)
def test_regular_expressions_that_others_fear(llm, regex):
    output = write(llm, Grammar(regex=regex), max_tokens=20)
    assert output.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "schema, fits, fits_not",
    [
        ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, "null", "true"),
        ({"oneOf": [{"enum": ["a", "b"]}, {"const": "c"}]}, '"c"', '"d"'),
        ({"oneOf": [{"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in "ab"]},
         '{"k": "b"}', '{"k": "c"}'),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", '["a"]'),
        ({"additionalProperties": {"type": "integer"}, "propertyNames": {"type": "string"}}, '{"a": 1}', '{"a": ""}'),
        ({"properties": {"uniqueItems": {"const": 1}}}, '{"uniqueItems": 1}', '{"uniqueItems": 2}'),
        ({"type": "string", "nullable": True, "maxLength": 1}, "null", '"ab"'),
        ({"type": "string", "format": "path", "x-order": 1, "maxLength": 3}, '"a/b"', '"a/bc"'),
        ({"type": "string", "format": "starts_with", "pattern": "^ab"}, '"abc"', '"ba"'),
        ({"type": ["integer", "null"], "format": "int32"}, "7", '"7"'),
        ({"type": "string", "format": "uuid4"}, '"4c5bd4f3-9d76-4f9c-8b63-2f7a3e6d1c00"',
         '"4c5bd4f3-9d76-1f9c-8b63-2f7a3e6d1c00"'),
    ],
)  # fmt: skip
def test_what_a_schema_lets_through(schema, fits, fits_not):
    grammar = Grammar(json_schema=schema)
    assert accepts(grammar, fits) and not accepts(grammar, fits_not)


@settings(max_examples=50)
@given(
    ends=st.lists(st.integers(-8, 8), min_size=2, max_size=2, unique=True).map(sorted),
    is_open=st.tuples(st.booleans(), st.booleans()),
    form=st.sampled_from(["together", "joined", "draft 4"]),
)
@example([4, 6], (True, True), "together")
@example([0, 2], (True, False), "joined")
@example([-1, 0], (True, True), "draft 4")
def test_a_number_lies_between_its_bounds(ends, is_open, form):
    low, high = (Decimal(quarters) / 4 for quarters in ends)
    bounds = {"type": "number"}
    for end, exclusive, name in ((low, is_open[0], "Minimum"), (high, is_open[1], "Maximum")):
        if form == "draft 4":
            bounds |= {name.lower(): float(end), f"exclusive{name}": exclusive}
        else:
            bounds |= {f"exclusive{name}" if exclusive else name.lower(): float(end)}
    if form == "joined":
        bounds["allOf"] = [dict([bounds.popitem()])]
    grammar, middle = Grammar(json_schema=bounds), (low + high) / 2
    assert accepts(grammar, str(middle.normalize()))
    near = [end + Decimal(step) for end in (low, high) for step in ("-0.25", "-0.001", "0", "0.001", "0.25")]
    for text in [*map(str, near), *(f"{round(end)}" for end in near), "-0"]:
        number = Decimal(text)
        fits = low <= number <= high and (number, True) not in zip((low, high), is_open, strict=True)
        assert fits or not accepts(grammar, text), (bounds, text)


SELF = {"$ref": "#"}


def requires(properties, **others):
    return {"type": "object", "properties": properties, "required": list(properties), **others}


@pytest.mark.parametrize(
    "schema",
    [
        requires({"next": SELF}),
        requires({"a": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": requires({"b": {"$ref": "#/$defs/x"}})}}),
        requires({"a~/b": requires({"c": {"$ref": "#/properties/a~0~1b"}})}),
        {"type": ["object", "array"], "properties": {"a": SELF}, "required": ["a"], "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "null"}, SELF], "items": False, "minItems": 2},
        {"anyOf": [requires({"a": SELF}), {"type": "array", "items": SELF, "minItems": 2}]},
        {"allOf": [requires({"a": SELF})]},
        {"type": "object", "additionalProperties": SELF, "required": ["a"]},
        {"oneOf": [requires({"kind": {"const": kind}, "a": SELF}) for kind in ("b", "c")]},
        requires({"a": {"$ref": "#/$defs/x%20y"}}, **{"$defs": {"x y": requires({"b": {"$ref": "#/$defs/x%20y"}})}}),
    ],
)
def test_what_never_ends_is_refused(schema):
    with pytest.raises(InvalidParams, match="no text ends that fits"):
        Grammar(json_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {**requires({"next": SELF}), "required": []},
        {**requires({"next": SELF}), "type": ["object", "null"]},
        {"properties": {"a": SELF}, "required": ["a"]},
        requires({"next": {"anyOf": [SELF, {"type": "null"}]}}),
        requires({"a": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": requires({"b": {"const": {"$ref": "#"}}})}}),
        requires({"$ref": {"type": "string"}}),
        requires({"a": {"type": "null"}}, additionalProperties=SELF),
        {"type": "array", "items": SELF},
        {"type": "array", "prefixItems": [{"type": "null"}, SELF], "minItems": 1},
        {"enum": [{"$ref": "#"}]},
        *(
            {"enum": [{"$ref": "#/default"}], "default": unsound}
            for unsound in (
                {"anyOf": 5},
                {"allOf": {"a": 5}},
                {"type": "object", "properties": 5, "required": ["a"]},
                {"type": 5},
                {"type": None},
                {"type": "object", "required": [["a"], 5]},
                {"type": "object", "required": True},
                {"type": "array", "minItems": "1", "items": SELF},
                {"$ref": ["#"]},
            )
        ),
    ],
)
def test_what_can_end_is_taken(schema):
    assert Grammar(json_schema=schema).kind == "json_schema"


class Counted(dict):
    """A schema that counts how often it is looked at."""

    num_looks = 0

    def get(self, *arguments):
        Counted.num_looks += 1
        return super().get(*arguments)


@pytest.mark.parametrize("order", [1, -1])
def test_whether_a_text_ends_is_soon_known(order):
    num_links, depth = 100, 20  # of a chain of references, all of which stand below this many others
    whole = {"allOf": [Counted({"$ref": f"#/$defs/{link}"}) for link in range(num_links)]}
    for _ in range(depth):
        whole = Counted({"allOf": [whole]})
    links = [(str(link), Counted({"$ref": f"#/$defs/{link - 1}"} if link else {})) for link in range(num_links)]
    whole["$defs"] = dict(links[::order])
    whole["anyOf"] = [{"type": "null"}, *({"$ref": "#" + "/allOf/0" * above} for above in range(depth + 1))]
    Counted.num_looks = 0
    assert not is_endless(whole)
    assert Counted.num_looks < 40 * (num_links + depth) * depth


def test_keywords_that_are_null_count_as_left_out():
    """Typed clients write all that they know; null as a value, and as a type, is another matter."""
    pet = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"const": None}}}
    unsaid = dict.fromkeys(("$defs", "anyOf", "enum", "items", "multipleOf", "not", "pattern", "required"))
    written = {**pet, **unsaid, "properties": {name: {**unsaid, **part} for name, part in pet["properties"].items()}}
    assert Grammar(json_schema=written) == Grammar(json_schema=json.dumps(written)) == Grammar(json_schema=pet)
    assert closed_schema(written) == closed_schema(pet)
    for wrong in ({"type": None}, {"properties": {"a": None}}):
        with pytest.raises(InvalidParams, match="json_schema: at /"):
            Grammar(json_schema=wrong)


def test_a_schema_that_stands_in_very_many_places_is_soon_refused():
    whole = {}
    for _ in range(60):
        whole = {"properties": {"a": whole, "b": whole}}
    with pytest.raises(InvalidParams, match="too large"):
        Grammar(json_schema=whole)


def test_a_grammar_is_a_value():
    assert Grammar(choice=["a"]) == Grammar(choice=("a",)) != Grammar(choice=["b"])
    assert len({Grammar(json_schema=PERSON), Grammar(json_schema=json.dumps(PERSON))}) == 1
    with pytest.raises(InvalidParams, match="give a Grammar, as in Grammar"):
        SamplingParams(grammar={"regex": "a"})

"""Grammars that the library reads otherwise than they are meant: what is refused, and what is put in other words."""

from __future__ import annotations

import json
import re

import pytest
from test_grammar import accepts
from test_llm import scripted_llm
from text_samples import byte_level_json, sentencepiece_json, write_folder
from tokenizers import AddedToken, Tokenizer

from bitnet_inference import LLM, Grammar, InvalidParams, SamplingParams
from bitnet_inference.tools import read_tools


@pytest.fixture(scope="module")
def llm():
    with LLM.load("default", threads=1) as loaded:
        yield loaded


def write(llm, grammar, **options):
    return llm.generate("x", SamplingParams(grammar=grammar, **{"max_tokens": 60, "seed": 1, **options}))


PATTERNS = [{"pattern": f"^[^{char}]{{1,99}}z+[^z]{{1,99}}{char}"} for char in "abcdefghijklmnopq"]


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"enum": [1, -(2**63)]}, "at /: enum has a number beyond 2.53: give it as a string"),
        ({"const": {"id": [2**53 + 1]}}, "const has a number beyond"),
        ({"properties": {"id": {"minimum": 2**53 + 1}}}, "at /properties/id: minimum lies beyond"),
        ({"type": "integer", "exclusiveMaximum": -(2**63)}, "exclusiveMaximum lies beyond"),
        ({"type": "integer", "multipleOf": 2**31}, "multipleOf is not above 0, or has too many digits"),
        ({"type": "integer", "multipleOf": -7}, "multipleOf is not above 0"),
        ({"multipleOf": 10**5000}, "multipleOf"),
        ({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}, "the common multiple"),
        ({"$defs": {"x": {"multipleOf": 997}}, "$ref": "#/$defs/x", "multipleOf": 9.91}, "the common multiple"),
        ({"prefixItems": [{"multipleOf": 32_001 + each} for each in range(2)]}, "different multipleOf are too large"),
        ({"items": {"type": "string", "allOf": PATTERNS}}, "at /: 17 patterns are asked of one string: ask at most 16"),
        ({"$defs": {"x": {"allOf": PATTERNS[:9]}}, "allOf": [{"$ref": "#/$defs/x"}, *PATTERNS[9:]]}, "17 patterns"),
        ({"type": "object", "minProperties": 3, "required": ["a"]}, "could be one name several times"),
    ],
)
def test_what_the_library_would_not_keep_or_survive_is_refused(schema, message):
    with pytest.raises(InvalidParams, match=message):
        Grammar(json_schema=schema)


OPTIONAL = {"properties": {"a": {}, "b": {}}, "maxProperties": 1}
OVERLAPPING = {"oneOf": [{"type": "string"}, {"maxLength": 3}]}
TAGGED = [{"type": "object", "properties": {"t": {"const": 1}, "x": {"type": "integer"}}}, {"type": "null"}]


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"properties": {"a": {}, "b": {"items": {"type": "strin"}}}}, "at /properties/b/items: Invalid type: strin"),
        ({"anyOf": [{"type": "null"}, {"pattern": "(a"}]}, "at /anyOf/1: regex parse error"),
        ({"oneOf": [TAGGED[0], {"type": "array", "maxItems": -1}]}, "at /oneOf/1: Expected positive integer for 'max"),
        ({"oneOf": TAGGED, "$defs": {"x": OVERLAPPING}, "properties": {"y": {"$ref": "#/$defs/x"}}}, "at /.defs/x: "),
        ({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "strin"}}}, "at /.defs/x: Invalid type: strin"),
        ({"items": [{}, OPTIONAL], "additionalItems": {}}, "at /items/1: min/maxProperties only supported when all"),
        ({"items": [{}, {}], "additionalItems": OVERLAPPING}, "at /additionalItems: the cases of oneOf"),
        ({"properties": {"a/b": {"allOf": [{"const": 1}], "const": 2}}, "required": ["a/b"], "type": "object"},
         "at /properties/a/b/allOf/0: Unsatisfiable"),
        ({"anyOf": [{}, {}, {"pattern": "(a"}], "required": "a"}, "at /: Expected array for 'required'"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "at /properties/a: Pointer '/.defs/no' does not exist"),
        ({"properties": {"a": {"items": {}}, "c": {"type": "x"}, "b": {"$ref": "#/properties/a/items"}}}, "Invalid"),
    ],
)  # fmt: skip
def test_what_the_library_refuses_is_told_with_its_place(schema, message):
    with pytest.raises(InvalidParams, match=f"^grammar: json_schema: {message}"):
        Grammar(json_schema=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        {"type": "number", "maximum": 1e300, "minimum": 0},
        {"enum": [2**53, -(2**53)]},
        {"type": "integer", "multipleOf": 1000, "minimum": 1, "maximum": 10**6},
        {"type": "number", "multipleOf": 0.01, "minimum": 1, "maximum": 2},
        {"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 991}}},
        {"type": "string", "anyOf": [{"pattern": f"^{char}$"} for char in "abcdefghijklmnopqrst"]},
        {"type": "string", "allOf": [{"pattern": "^a{0,50}$"}] * 16},
        {"items": [{"multipleOf": 20_001}, {"multipleOf": 20.001}]},
    ],
)
def test_what_it_keeps_is_taken(llm, schema):
    output = write(llm, Grammar(json_schema=schema))
    if output.finish_reason == "stop":
        json.loads(output.text)


def test_a_name_that_a_schema_knows_is_not_spelt_in_escapes(llm):
    """Or another property of that name would come in, of any type."""
    wanted = llm.tokenizer.encode('{"\\u0061ge')[1:]

    def prefers(tokens, logits):
        if len(tokens) - 2 < len(wanted):
            logits[wanted[len(tokens) - 2]] += 1000

    grammar = Grammar(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}})
    assert "\\u" not in write(llm, grammar, temperature=0, processors=[prefers]).text


@pytest.mark.parametrize("format, day", [("time", ""), ("date-time", "2024-02-29T")])
@pytest.mark.parametrize("more", [{}, {"pattern": "Z$"}, {"allOf": [{"pattern": "Z$"}]}])
def test_a_minute_has_sixty_seconds(format, day, more):
    """Of 60 most readers, Python's and validators, say that it is no time."""
    grammar = Grammar(json_schema={"type": "string", "format": format, **more})
    assert accepts(grammar, f'"{day}07:10:59Z"') and accepts(grammar, f'"{day}23:59:00.5Z"')
    assert accepts(grammar, f'"{day}07:10:00+01:00"') is not bool(more)
    assert not accepts(grammar, f'"{day}07:10:60Z"') and not accepts(grammar, f'"{day}07:60:10Z"')


CALL = {"const": "<|pad|>"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": CALL}, "required": ["a"]}}


@pytest.mark.parametrize(
    "grammar, text",
    [
        (Grammar(choice=["x<|eot_id|>"]), "x<|eot_id|>"),
        (Grammar(regex=r"<\|eot_id\|>"), "<|eot_id|>"),
        (Grammar(json_schema={"type": "array", "prefixItems": [CALL], "items": False, "minItems": 1}), '["<|pad|>"]'),
        (
            read_tools([{"type": "function", "function": TOOL}], "required").grammar("hermes"),
            '<tool_call>\n{"name":"f","arguments":{"a":"<|pad|>"}}\n</tool_call>',
        ),
    ],
)
def test_what_spells_a_special_token_is_written_as_plain_text(llm, grammar, text):
    """The library wanted the token itself in its place, which is banned, and no other could follow."""
    output = write(llm, grammar, max_tokens=150)
    assert output.finish_reason == "stop" and output.text.replace(": ", ":").replace(", ", ",") == text


@pytest.mark.parametrize("tokenizer_json", [byte_level_json, sentencepiece_json])
def test_a_word_that_is_one_token_is_written_as_that(tmp_path, tokenizer_json):
    """Qwen's <tool_call>, which is text: the library takes what is added in <> for special, and banned it."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    spelt = ("<tool_call>", "</tool_call>", "<a b é>")
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in spelt])
    loaded, _ = scripted_llm(write_folder(tmp_path, tokenizer.to_str(), vocab_size=400))
    constant = [{"type": "function", "function": TOOL}]
    grammars = [read_tools(constant, "required").grammar("hermes"), Grammar(choice=["".join(spelt)])]
    grammars += [Grammar(regex="(?s)(<tool_call>|</tool_call>|<a b é>)*.?"), Grammar(lark='start: <tool_call> "<b>"')]
    with loaded:
        words = [loaded.tokenizer.token_to_id(word) for word in spelt]
        params = {"logit_bias": dict.fromkeys(words, 100.0), "temperature": 0, "max_tokens": 200}
        call, choice, free, named = [write(loaded, grammar, **params) for grammar in grammars]
    assert [each for each in call.token_ids if each in words] == words[:2] and call.finish_reason == "stop"
    assert choice.token_ids == words and choice.text == "".join(spelt)
    assert set(free.token_ids) <= set(words)
    assert named.token_ids[0] == words[0] and named.text == "<tool_call><b>"


def test_a_token_that_brings_a_space_is_not_taken_without_it(tmp_path):
    tokenizer = Tokenizer.from_str(sentencepiece_json())
    tokenizer.add_tokens([AddedToken("[x]", special=False, normalized=True)])
    loaded, _ = scripted_llm(write_folder(tmp_path, tokenizer.to_str(), vocab_size=400))
    with loaded:
        bias = {loaded.tokenizer.token_to_id("[x]"): 100.0}
        assert write(loaded, Grammar(regex=r"a\[x\]"), logit_bias=bias).text == "a[x]"
        assert write(loaded, Grammar(regex=r"a \[x\]"), logit_bias=bias).token_ids[-1] in bias


def test_control_characters_of_a_schema_are_written_in_escapes(llm):
    assert json.loads(write(llm, Grammar(json_schema={"const": "a\x01b\x7f"})).text) == "a\x01b\x7f"


def test_a_schema_in_a_grammar_is_read_as_elsewhere(llm):
    schema = '{"exclusiveMinimum": 1, "exclusiveMaximum": 1.5, "type": "number"}'
    grammar = Grammar(lark=f'start: "<" %json {schema} ">"')
    for seed in range(5):
        found = re.fullmatch(r"<(1\.\d+)>", write(llm, grammar, seed=seed).text)
        assert found is None or 1 < float(found[1]) < 1.5
    too_large = '%json {"enum": [-9223372036854775808]}'
    too_many = "start: " + " ".join(f'%json {{"multipleOf": {32_001 + each}}}' for each in range(2))
    broken = ("start: %json", "start: %json [1]", "start: %json {", f"start: {too_large}", f'start: "{too_large}')
    for lark in (*broken, too_many):
        with pytest.raises(InvalidParams, match=r"json"):
            Grammar(lark=lark)


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"  # of pydantic
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # of zod
CASES = {
    "a": {"type": "object", "properties": {"t": {"const": "a"}, "x": {"type": "integer"}}, "required": ["t"]},
    "b": {"type": "object", "properties": {"t": {"enum": ["b", "c"]}, "kids": {"items": {"$ref": "#/$defs/any"}}}},
    "any": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b", "title": "B"}]},
    "names": {"enum": ["r", "g"]},
    "short": {"type": "string", "maxLength": 2},
}


@pytest.mark.parametrize(
    "schema, fits, fits_not",
    [
        ({"$ref": "#/$defs/any"}, '{"t": "c", "kids": [{"t": "a", "x": 1}]}', '{"kids": []}'),  # without a tag: both
        ({"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}, "null", "1"),
        ({"oneOf": [{"const": 1}, {"const": 2}, {"$ref": "#/$defs/names"}, {"const": True}]}, "2", "3"),
        ({"items": [{"type": "boolean"}, {"const": 3}], "additionalItems": False, "minItems": 1}, "[true, 3]", "[3]"),
        ({"items": [{"type": "boolean"}], "additionalItems": {"type": "null"}}, "[true, null]", "[true, 3]"),
        ({"propertyNames": {"$ref": "#/$defs/names"}, "additionalProperties": {"const": 1}}, '{"g": 1}', '{"z": 1}'),
        ({"propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": {"const": 1}}, '{"a": 1}', '{"d": 1}'),
        ({"propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": {"const": 1}}, "{}", '{"a": 2}'),
        ({"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}}, '{"é\\n": 1}', '{"": 1}'),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/short", "title": "n"}}, '{"ab": 1}', '{"abc": 1}'),
        ({"type": "object", "propertyNames": {"format": "date"}}, '{"2024-12-31": 1}', '{"2024-02-30": 1}'),
        ({"type": "object", "propertyNames": {"format": "uuid"}, "minProperties": 1},
         '{"4c5bd4f3-9d76-4f9c-8b63-2f7a3e6d1c00": 1}', "{}"),
        ({"$ref": "/$defs/names"}, '"r"', '"z"'),
        ({"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}}, '{"b": 1}', '{"a": 1, "b": 1}'),
        ({"anyOf": [{"not": True}, {"const": 1}]}, "1", "2"),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "array", "minItems": 1.0, "maxItems": 1.0}, "[1]", "[]"),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 1.0}, '{"a": 1}', "{}"),
        ({"type": "string", "format": "date"}, '"0001-01-31"', '"0000-01-31"'),
        ({"type": "string", "format": "date"}, '"2000-02-29"', '"1900-02-29"'),
        ({"type": "string", "format": "date-time"}, '"2024-02-29T10:00:00Z"', '"2023-02-29T10:00:00Z"'),
        ({"type": "string", "format": "uuid4"}, '"4c5bd4f3-9d76-4f9c-8b63-2f7a3e6d1c00"',
         '"4c5bd4f3-9d76-4f9c-7b63-2f7a3e6d1c00"'),
        ({"type": "string", "pattern": DECIMAL + r"\d*\.?\d*$"}, '"-1.50"', '"-."'),
        ({"type": "string", "pattern": DECIMAL + r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"}, '"12.3"', '"12.34"'),
        ({"type": "string", "format": "email", "pattern": EMAIL}, '"a.b-c+d@e-f.g.org"', '"a..b@c.org"'),
        ({"type": "string", "pattern": EMAIL}, '"o\'b@c.org"', '".a@c.org"'),
        ({"type": "string", "pattern": EMAIL}, '"b@c.org"', '"b.@c.org"'),
        ({"type": "string", "format": "date-time"}, '"2024-01-31T10:00:00Z"', '"2024-01-31t10:00:00Z"'),
        ({"type": "string", "format": "time"}, '"10:00:00Z"', '"10:00:00z"'),
        ({"type": "string", "format": "date-time"}, '"2024-01-31T10:00:00.123456Z"', '"2024-01-31T10:00:00.1234567Z"'),
    ],
)  # fmt: skip
def test_words_that_the_library_does_not_know(schema, fits, fits_not):
    grammar = Grammar(json_schema={**schema, "$defs": CASES})
    assert accepts(grammar, fits) and not accepts(grammar, fits_not)


@pytest.mark.parametrize("draft", ["draft-04/schema#", "draft-07/schema#", "draft/2019-09/schema", "schema#"])
@pytest.mark.parametrize(
    "schema, fits, fits_not",
    [
        ({"items": [{"const": 0}, {"type": "integer"}], "additionalItems": False, "minItems": 2}, "[0, 3]", "[3]"),
        ({"items": [{"type": "string"}], "additionalItems": {"type": "null"}}, '["a", null]', "[null]"),
        ({"prefixItems": [{"type": "string"}], "items": False}, '["a"]', "[1]"),
        ({"const": 1}, "1", "2"),
    ],
)
def test_the_draft_that_a_schema_names_takes_nothing_from_it(draft, schema, fits, fits_not):
    """Tuples of zod and others, of any draft before 2020-12, held anything, or were refused."""
    grammar = Grammar(json_schema={"$schema": f"http://json-schema.org/{draft}", **schema})
    assert accepts(grammar, fits) and not accepts(grammar, fits_not)


NAMES = ["Größe", "Box[int]", "Box<string>", "two words", "ein%20Wort", "狐", "a~1b", 'q"|^`{}\\']


@pytest.mark.parametrize("name", NAMES)
def test_definitions_may_have_any_name(name):
    key = name.replace("%20", " ").replace("~1", "/")
    grammar = Grammar(json_schema={"items": {"$ref": f"#/$defs/{name}"}, "$defs": {key: {"const": 1}}})
    assert accepts(grammar, "[1]") and not accepts(grammar, "[2]")
    tool = {"name": "f", "parameters": {"properties": {"a": {"$ref": f"#/$defs/{name}"}}, "$defs": {key: {"const": 1}}}}
    call = read_tools([{"type": "function", "function": tool}], "required").grammar("llama")
    assert accepts(call, '{"name": "f", "parameters": {"a": 1}}')
    assert not accepts(call, '{"name": "f", "parameters": {"a": 2}}')


@pytest.mark.parametrize(
    "gbnf, form",
    [
        (r'root ::= "\u00e9" [\u0041-\u0043]', "é[A-C]"),
        (r"root ::= [\U0001F600-\U0001F603]", "[😀-😃]"),
        (r'root ::= "\u0022\u005c" [\u005d\u005e\u002d] "\\u0041"', r'"\\[\]^-]\\u0041'),
        ('root ::= start start0 # start\nstart ::= "start"\nstart0 ::= [start]', "start[start]"),
    ],
)
def test_grammars_of_llama_cpp(llm, gbnf, form):
    for seed in range(3):
        assert re.fullmatch(form, write(llm, Grammar(gbnf=gbnf), seed=seed).text)


@pytest.mark.parametrize(
    "gbnf, inside, outside",
    [
        ('root ::= word "s"\nword ::= [a-z]+', ["as", "sss"], ["a", "s"]),  # not a word that swallows every s
        ('root ::= (a ",")+ # of root\na ::= "x" | "x,y"', ["x,", "x,y,x,"], ["x,y"]),
        ('root ::= ("a"* | ("b"?)+)*', ["", "aba"], ["c"]),
        ("root ::= . .?", ["a", "a\n"], ["", "abc"]),
        ('root ::= Foo foo foo0\nFoo ::= "a"\nfoo ::= "b"\nfoo0 ::= "c"', ["abc"], ["aac", "bbc"]),
        ('root ::= fooBar foo-bar{2}\nfooBar ::= "a"\nfoo-bar ::= "b"', ["abb"], ["aaa", "ab"]),
        ('root ::= "a" root? "b"', ["ab", "aabb"], ["aab"]),
    ],
)
def test_rules_are_read_as_llama_cpp_reads_them(gbnf, inside, outside):
    grammar = Grammar(gbnf=gbnf)
    assert [text for text in inside + outside if accepts(grammar, text)] == inside


ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+  # of llama.cpp
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | string | ("true" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
string ::= "\"" ([^"\\] | "\\" ["\\/bfnrt])* "\"" ws
ws     ::= ([ \t\n] ws)?
"""


def test_a_run_of_spaces_leaves_what_comes_behind_it():
    """`ws` took the end of the line, so that no text of llama.cpp's grammar of sums ended."""
    grammar = Grammar(gbnf=ARITHMETIC)
    for text in ("1=2\n", "x +1 = (y\n) \n", "(a+1)*2=\t3\n\n4=4\n"):
        assert accepts(grammar, text) and not accepts(grammar, text + "=") and not accepts(grammar, text[:1])
    inside = Grammar(gbnf='root ::= a+\na ::= "k" ws ":" | "(" a ")"\nws ::= [ ]*')
    assert accepts(inside, "k  :(k:)k :") and not accepts(inside, "k")
    whole = Grammar(gbnf=JSON)
    assert accepts(whole, '{ "a": {"b" :"c\\\\n"},\n"e":null }\n') and not accepts(whole, '{"a"\n "b"}')
    regular = Grammar(gbnf='root ::= "a" ws " b" ws\nws ::= ([ ] ws)?')
    assert accepts(regular, "a  b ") and not accepts(regular, "ab")


def test_half_a_character_is_refused():
    with pytest.raises(InvalidParams, match=r"ud800 is no character"):
        Grammar(gbnf=r'root ::= "\ud800"')


@pytest.mark.parametrize(
    "characters, inside, outside",
    [
        ("[^a&&b]", "c", "a&b"),
        ("[a[b]", "a[b", "c]"),
        ("[[:alpha:]", "[:alph", "bq]"),
        ("[+--]", "+,-", "*."),
        ("[--9]", "-./5", ",:"),
        ("[%--z]", "%&,-z", "$.y"),
        ("[a~~]", "a~", "b"),
        (r"[\[a-c-]", "[-abc", "d\\"),
    ],
)
def test_characters_of_a_class_are_characters(characters, inside, outside):
    """The library reads some as operations on sets."""
    of_pattern = Grammar(json_schema={"type": "string", "pattern": f"^{characters}$"})
    of_gbnf = Grammar(gbnf=f"root ::= {characters}")
    for each in inside + outside:
        assert accepts(of_pattern, json.dumps(each)) == (each in inside), each
        assert accepts(of_gbnf, each) == (each in inside), each


@pytest.mark.parametrize("form", [{"regex": "[" * 60_000}, {"json_schema": {"pattern": "[a" * 30_000 + "\\"}}])
def test_classes_without_an_end_are_refused_at_once(form):
    with pytest.raises(InvalidParams):
        Grammar(**form)

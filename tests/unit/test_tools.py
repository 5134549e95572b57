"""Tool calls in OpenAI's shape, in the two formats that models write them in."""

from __future__ import annotations

import json
import math
import time

import pytest
from test_grammar import accepts

from bitnet_inference import LLM, Grammar, InvalidParams, SamplingParams, chat_completion
from bitnet_inference.server.replies import Reply
from bitnet_inference.tools import read_tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
BERLIN = {"city": "Bérlin", "days": 2}


def calls_in(text, style, choice=None):
    rest, calls = read_tools(TOOLS, choice).find_calls(text, style)
    return rest, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("opening", ["", "<|python_tag|>", "\n"])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_llama_writes_json_and_nothing_else(opening, key):
    text = opening + json.dumps({"name": "weather", key: BERLIN})
    assert calls_in(text, "llama") == ("", [("weather", BERLIN)])
    two = f'{text}; {{"name": "clock", "parameters": {{}}}}'
    assert calls_in(two, "llama") == ("", [("weather", BERLIN), ("clock", {})])


@pytest.mark.parametrize("opening", ["", " \n", "; ", "<|python_tag|>", "\n<|python_tag|>;"])
def test_nothing_of_a_call_is_shown_while_it_is_written(opening):
    reply = Reply("llama", read_tools(TOOLS, None))
    text = opening + '{"name": "clock", "parameters": {}}'
    assert "".join(map(reply.push, text)) == ""
    assert reply.end() == "" and [call["function"]["name"] for call in reply.calls] == ["clock"]


def test_hermes_writes_tags_with_text_around():
    text = f"Let me see.\n<tool_call>\n{json.dumps({'name': 'weather', 'arguments': BERLIN})}\n</tool_call>"
    assert calls_in(text, "hermes") == ("Let me see.", [("weather", BERLIN)])
    two = text + '\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert calls_in(two, "hermes") == ("Let me see.", [("weather", BERLIN), ("clock", {})])
    tagged = {"city": '<tool_call> is not "</tool_call>" \\'}
    text = f'"<tool_call>{json.dumps({"name": "weather", "arguments": tagged})}</tool_call>'
    assert calls_in(text, "hermes") == ('"', [("weather", tagged)])


def test_falcon_writes_a_list_between_its_tags():
    calls = [{"name": "weather", "arguments": BERLIN}, {"name": "clock", "arguments": {}}]
    for listed in (calls, [{"type": "function", "function": call} for call in calls]):
        text = f"Let me see.\n<tool_call>\n{json.dumps(listed, indent=2)}\n</tool_call>"
        assert calls_in(text, "hermes") == ("Let me see.", [("weather", BERLIN), ("clock", {})])
    for listed in ([], [*calls, {"name": "stranger", "arguments": {}}], [calls]):
        text = f"<tool_call>{json.dumps(listed)}</tool_call>"
        assert calls_in(text, "hermes") == (text, [])


@pytest.mark.parametrize("part", ["<tool_call>", '<tool_call>"', '<tool_call>"</tool_call>"'])
def test_a_text_of_many_tags_takes_no_time(part):
    """From each of them the whole rest was looked through, with the interpreter's lock."""
    start = time.thread_time()
    assert calls_in(part * 8000, "hermes") == (part * 8000, [])
    assert time.thread_time() - start < 3


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "9" * 5000])
def test_what_json_cannot_hold_is_no_call(number):
    text = f'{{"name": "clock", "parameters": {{"x": [{number}]}}}}'
    tagged = f"<tool_call>{text}</tool_call>"
    assert calls_in(text, "llama") == (text, []) and calls_in(tagged, "hermes") == (tagged, [])
    assert calls_in(text, "llama", "required") == calls_in(tagged, "hermes", "required") == ("", [])


def test_arguments_are_json_that_can_be_sent():
    text = r'{"name": "clock", "parameters": {"\udc00": "\ud800 \ud83e\udd8a é", "x": 123456789012345678901234567890}}'
    _, (call,) = read_tools(TOOLS, None).find_calls(text, "llama")
    arguments = call["function"]["arguments"]
    assert arguments.encode().decode() == r'{"\udc00": "\ud800 🦊 é", "x": 123456789012345678901234567890}'
    assert json.loads(arguments) == json.loads(text)["parameters"]


def test_a_call_has_openais_shape():
    _, (call,) = read_tools(TOOLS, None).find_calls('{"name": "clock", "parameters": {}}', "llama")
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "clock", "arguments": "{}"}


@pytest.mark.parametrize(
    "text",
    [
        "", "Hello", "{", "3", "[]", "{}", '{"name": "clock"}', '{"name": "stranger", "parameters": {}}',
        '{"name": "clock", "parameters": 3}', '{"name": ["clock"], "parameters": {}}', "[" * 20_000,
        '{"name": "clock", "parameters": {}} is a call', "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": "clock", "arguments": {}}',
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(text):
    for style in ("llama", "hermes"):
        if not (style == "llama" and "<tool" in text):
            assert calls_in(text, style) == (text, [])


@pytest.mark.parametrize("style", ["llama", "hermes"])
@pytest.mark.parametrize("choice, names", [("required", {"weather", "clock"}), ("weather", {"weather"})])
def test_a_forced_call_is_a_call(style, choice, names):
    named = {"type": "function", "function": {"name": choice}} if choice == "weather" else choice
    tools = read_tools(TOOLS, named)
    with LLM.load("default") as llm:
        params = [SamplingParams(seed=seed, temperature=1.0, grammar=tools.grammar(style)) for seed in range(4)]
        for output in llm.generate(["The weather"] * 4, params):
            assert output.finish_reason == "stop"
            _, (call,) = tools.find_calls(output.text, style)
            assert call["function"]["name"] in names
            if call["function"]["name"] == "weather":
                assert json.loads(call["function"]["arguments"]).keys() == {"city", "days"}


@pytest.mark.parametrize("num_others", [0, 1])
@pytest.mark.parametrize("style", ["llama", "hermes"])
@pytest.mark.parametrize(
    "parameters, fits, fits_not",
    [
        ({"properties": {"t": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"enum": ["a"]}}}, {"t": "a"}, {"t": "b"}),
        ({"allOf": [{"$ref": "#/definitions/X"}], "definitions": {"X": {"required": ["t"]}}}, {"t": 1}, {}),
        ({"properties": {"a": {"const": 1}, "b": {"$ref": "#/properties/a"}}}, {"a": 1, "b": 1}, {"b": 2}),
        (
            {"properties": {"x": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "additionalProperties": False},
            {"x": {"x": {"x": None}}},
            {"x": {"name": "f"}},
        ),
        ({"properties": {"$ref": {"const": {"$ref": "#"}}}}, {"$ref": {"$ref": "#"}}, {"$ref": {}}),
        (
            {"$id": "https://a.org/b", "properties": {"t": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"const": 1}}},
            {"t": 1},
            {"t": 2},
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/X"}, "additionalProperties": {}, "$defs": {"X": {"enum": ["t"]}}},
            {"t": 1},
            {"u": 1},
        ),
        ({"properties": {"t": {"exclusiveMinimum": 0, "maximum": 0.5}}}, {"t": 0.5}, {"t": 0}),
        ({"properties": {"t": {"const": 1}}}, {"t": 1}, {"t": 1, "u": 1}),
        ({"properties": {}}, {}, {"t": 1}),
        ({"properties": {"t": {"const": 1}}, "additionalProperties": {"type": "null"}}, {"u": None}, {"u": 1}),
        ({"properties": {"t": {"const": 1}}, "required": ["u"]}, {"t": 1, "u": 1}, {"t": 1}),
        ({"properties": {"t": {"items": {"properties": {"u": {}}}}}}, {"t": [{"u": 1}]}, {"t": [{"v": 1}]}),
        ({"properties": {"t": {}}, "required": ["t"], "minProperties": 2}, {"t": 1, "u": 1}, {"t": 1}),
        ({"properties": {"t": {}}, "anyOf": [{"properties": {"u": {}}, "required": ["u"]}]}, {"t": 1, "u": 1}, {}),
        ({"required": ["t"], "anyOf": [{"properties": {"u": {}}}]}, {"u": 1, "t": 1}, {}),
        ({"allOf": [{"properties": {each: {"const": 1}}} for each in "tu"]}, {"t": 1, "u": 1}, {"u": 2}),
        ({}, {"t": 1}, 498138.0),
        ({"type": ["object", "null"]}, {}, None),
        ({"anyOf": [{"type": "string"}, {"required": ["t"]}]}, {"t": 1}, "t"),
        (None, {}, {"t": 1}),
    ],
)
def test_arguments_keep_to_their_own_schema(style, parameters, fits, fits_not, num_others):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    grammar = read_tools([CLOCK, tool][1 - num_others :], "required").grammar(style)
    for arguments in (fits, fits_not):
        assert accepts(grammar, call_of("f", style, arguments)) == (arguments is fits)


BEYOND = {"type": "array", "uniqueItems": True, "items": {"maxLength": 1, "format": "e164", "not": {"const": "b"}}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_what_cannot_be_kept_is_left_out_unless_the_function_is_strict(choice):
    named = {"patternProperties": {"^(?!x)": {}, "^y$": {"type": "null"}}, "additionalProperties": False}
    schema = {"properties": {"t": BEYOND, "u": {"pattern": "^(?!a)b$"}, "v": named}}
    function = {"name": "f", "parameters": schema}
    grammar = read_tools([{"type": "function", "function": function}], choice).grammar("llama")
    loose: list[tuple[dict[str, object], bool]] = [
        ({"t": ["a", "a"], "u": "a", "v": {"x": 1, "y": None}}, True), ({"t": ["ab"]}, False), ({"v": {"y": 1}}, False),
    ]  # fmt: skip
    for arguments, fits in loose:
        assert accepts(grammar, call_of("f", "llama", arguments)) == fits
    strict = read_tools([{"type": "function", "function": {**function, "strict": True}}], choice)
    with pytest.raises(InvalidParams, match="at /properties/parameters/properties/v: look-around"):
        strict.grammar("llama")


ONE_OF_TWO = {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "oneOf": [{"required": [name]} for name in "ab"]}


@pytest.mark.parametrize(
    "schema, fits, fits_not",
    [
        (ONE_OF_TWO, {"a": 1, "b": 2}, {"a": 2}),
        (ONE_OF_TWO, {"b": 2}, {}),
        ({"properties": {"a": {"const": 1}, "b": {}}, "minProperties": 1, "maxProperties": 1}, {}, {"a": 2}),
        ({"required": ["a"], "minProperties": 3}, {"a": 1}, {}),
        ({"properties": {"a": {"$ref": "https://json.schemastore.org/x"}}}, {"a": 1}, {"b": 1}),
        ({"properties": {"a": {"$ref": "#x"}}, "$defs": {"x": {"$anchor": "x", "type": "null"}}}, {"a": 1}, {"b": 1}),
        ({"properties": {"a": {"optional": True, "type": "null"}}, "errorMessage": "no"}, {"a": None}, {"a": 1}),
    ],
)
def test_what_is_left_out_leaves_the_rest(schema, fits, fits_not):
    """Such a schema was refused, though the function is not strict."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    grammar = read_tools([tool], "required").grammar("llama")
    assert accepts(grammar, call_of("f", "llama", fits)) and not accepts(grammar, call_of("f", "llama", fits_not))
    strict = read_tools([{**tool, "function": {**tool["function"], "strict": True}}], "required")
    with pytest.raises(InvalidParams, match="function f: "):
        strict.grammar("llama")


@pytest.mark.parametrize("wrong", [{"properties": 3}, {"oneOf": 3}, {"items": [3]}, {"$defs": {"x": "y"}}])
def test_what_is_wrong_with_a_schema_is_told_of_functions_that_are_not_strict_too(wrong):
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": wrong}}], "required")
    with pytest.raises(InvalidParams, match="at /properties/parameters"):
        tools.grammar("llama")


@pytest.mark.parametrize("wrong", [{"not": {"const": 1}}, {"type": "strin"}])  # ours, and the library's
def test_what_is_wrong_with_one_function_of_many_is_told_by_its_name(wrong):
    functions = [{"name": name, "strict": True, "parameters": {"properties": {"x": {}}}} for name in "abc"]
    functions[1]["parameters"] = {"properties": {"y": wrong}}
    tools = read_tools([{"type": "function", "function": function} for function in functions], "auto")
    with pytest.raises(InvalidParams, match=r"^function b: .* at /properties/parameters/properties/y: "):
        tools.grammar("llama")


def call_of(name, style, arguments):
    key = "parameters" if style == "llama" else "arguments"
    call = json.dumps({"name": name, key: arguments})
    return call if style == "llama" else f"<tool_call>\n{call}\n</tool_call>"


STRICT = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"required": ["t"]}}}


@pytest.mark.parametrize("style, between", [("llama", "; "), ("hermes", "\n")])
def test_where_no_call_is_forced_strict_ones_keep_to_their_schema_and_all_else_is_free(style, between):
    tools = read_tools([CLOCK, STRICT], None)
    grammar, right = tools.grammar(style), call_of("f", style, {"t": 1})
    for text in ("", "Once <b>upon", "2 > 1 {", right, between.join([right, call_of("clock", style, {"x": 1})])):
        assert accepts(grammar, text)
    for text in (call_of("f", style, {}), call_of("stranger", style, {}), right[:-1], right + right[:-1]):
        assert not accepts(grammar, text)
    if style == "llama":
        for before in ("  ", "; ", ";", "<|python_tag|>", "\x1c", "\n"):
            wrong = before + call_of("f", style, {})
            assert tools.find_calls(wrong, style)[1] and not accepts(grammar, wrong)
        assert accepts(grammar, " <b>Once")
    else:
        assert accepts(grammar, f"See: {right} {right} so") and not accepts(grammar, f"See: {right[:-1]}")


@pytest.mark.parametrize("style, between", [("llama", "; "), ("hermes", "\n")])
def test_beside_calls_the_text_has_its_form(style, between):
    right, schema = call_of("clock", style, {}), {"properties": {"a": {"const": 1}}, "required": ["a"]}
    forms = {'{"a":1}': {"json_schema": schema}, "yes": {"choice": ["yes"]}, "up": {"gbnf": 'root ::= "u" "p"'}}
    for text, form in (forms | {"7": {"lark": "start: A b\nA: /7/\nb:"}}).items():
        grammar = read_tools([CLOCK], "auto").grammar(style, Grammar(**form))
        assert all(accepts(grammar, each) for each in (text, right, right + between + right))
        assert not any(accepts(grammar, each) for each in ("Hi", "{}", text + right, right + text))
    assert read_tools([CLOCK], "auto").grammar(style) is None


@pytest.mark.parametrize("style", ["llama", "hermes"])
def test_there_may_be_many_tools(style):
    parameters = {"properties": {f"field{number}": {"type": "string"} for number in range(20)}}
    tools = [{"type": "function", "function": {"name": f"f{each}", "parameters": parameters}} for each in range(40)]
    assert accepts(read_tools(tools, "required").grammar(style), call_of("f39", style, {}))


def test_chat_completion_calls_tools():
    with LLM.load("default") as llm:
        talk = [{"role": "user", "content": "Hi"}]
        (answer,) = chat_completion(llm, [talk], tools=TOOLS, tool_choice="required", seed=1)
        message = answer["generation"]
        assert message["role"] == "assistant" and message["content"] == "" and len(message["tool_calls"]) == 1
        with pytest.raises(InvalidParams, match="template knows none"):
            chat_completion(llm, [talk], tools=TOOLS, seed=1, max_gen_len=9)
        (plain,) = chat_completion(llm, [talk], tools=TOOLS, tool_choice="none", seed=1, max_gen_len=9)
        assert "tool_calls" not in plain["generation"]
        (cut,) = chat_completion(llm, [talk], tools=TOOLS, tool_choice="required", seed=1, max_gen_len=9)
        assert cut["generation"] == {"role": "assistant", "content": ""}


def test_a_forced_call_with_a_number_beyond_all_floats_is_there_as_it_is_written():
    """The form allows it, and the answer was empty."""
    schema = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "set", "parameters": schema}}
    talks = [[{"role": "user", "content": "Set it"}]] * 8
    with LLM.load("default") as llm:
        answers = chat_completion(llm, talks, 1.0, 1.0, seed=1, tools=[tool], tool_choice="required")
    calls = [call for answer in answers for call in answer["generation"]["tool_calls"]]
    assert any(math.isinf(json.loads(call["function"]["arguments"])["x"]) for call in calls)


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_among_some_of_the_functions(mode):
    tools = read_tools(TOOLS, allowed(mode, "clock"))
    assert (list(tools.functions), tools.forced) == (["clock"], mode == "required")
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    assert read_tools(strict, allowed(mode, "clock")).strict == {"clock"}


@pytest.mark.parametrize(
    "tools, choice, message",
    [
        (None, "auto", "there are no tools"),
        ([], "required", "there are no tools"),
        ("x", None, "tools must be a list"),
        ([{}], None, r"tools\[0\] must be"),
        ([{"type": "function", "function": {"name": "x", "parameters": 3}}], None, "give a JSON schema"),
        (
            [CLOCK, {"type": "function", "function": {"name": "x", "parameters": {"type": "string"}}}],
            None,
            r"tools\[1\]: parameters: type is 'string': arguments are an object: give 'object'",
        ),
        ([CLOCK, CLOCK], None, "tools: two have one name"),
        (TOOLS, "any", "tool_choice is 'any'"),
        (TOOLS, {"type": "function", "function": {"name": "stranger"}}, "with one of weather, clock"),
        (TOOLS, 3, "tool_choice is 3"),
        (TOOLS, {"type": "allowed_tools"}, "allowed_tools must be"),
        (TOOLS, allowed("auto"), "allowed_tools must be"),
        (TOOLS, allowed("none", "clock"), "allowed_tools must be"),
        (TOOLS, allowed("auto", "clock", "stranger"), "with some of weather, clock"),
    ],
)
def test_what_is_refused(tools, choice, message):
    with pytest.raises(InvalidParams, match=message):
        read_tools(tools, choice)
    assert read_tools(None, None) is None and read_tools(None, "none") is None


def test_a_list_of_tools_in_which_none_is_left_calls_none():
    assert read_tools([], "auto") is None

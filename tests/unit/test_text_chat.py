import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import BOS, EOS, TURN, sentencepiece_json, write_folder

from bitnet_inference.errors import BitNetError, FormatError, InvalidParams, Unsupported
from bitnet_inference.text.chat import Chat, Template
from bitnet_inference.text.messages import Marks
from bitnet_inference.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": " Hi "}]


def chat_of(path, **config):
    return Chat(Tokenizer.from_folder(write_folder(path, **config)))


@pytest.fixture
def chat(tmp_path):
    return chat_of(tmp_path)


def render(source, **variables):
    return Template(source, "t", max_seconds=0.5).render(variables)


def test_the_template_of_the_2b_model(chat):
    talk = [*HI, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    text = f"User: Hi{TURN}Assistant: Hello.{TURN}User: Bye{TURN}"
    assert chat.render(talk, add_generation_prompt=False) == text
    assert chat.render(talk) == text + "Assistant: "


def test_ids_are_those_of_the_whole_text_with_a_bos(chat):
    tokenizer = chat._tokenizer
    assert chat.encode(HI) == tokenizer.encode(BOS + f"User: Hi{TURN}Assistant: ", parse_special=True)


def test_a_template_that_writes_the_bos_gets_no_second_one(tmp_path):
    chat = chat_of(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert chat.render(HI) == f"{BOS} Hi {EOS}"
    assert chat.encode(HI).count(0) == 1


@pytest.mark.parametrize("place", ["content", "role"])
def test_special_tokens_of_users_are_plain_text(chat, place):
    text = f"a{TURN}b {BOS}{EOS} <|eot_<|eot_id|>id|>"
    ids = chat.encode([{"role": "user", "content": "x"} | {place: text}])
    assert [token_id for token_id in ids if token_id < 3] == [0, 2]
    assert text.lower() in chat._tokenizer.decode(ids).lower()


def test_parts_of_a_special_token_do_not_meet(chat):
    parts = [{"type": "text", "text": "<|eot"}, {"type": "text", "text": "_id|>"}]
    ids = chat.encode([{"role": "user", "content": parts}])
    assert [token_id for token_id in ids if token_id < 3] == [0, 2]


def test_marks_use_characters_that_nobody_wrote(chat):
    text = f"\U000f0000{TURN}\U000f0001"
    assert text in chat._tokenizer.decode(chat.encode([{"role": "user", "content": text}]))
    every = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    with pytest.raises(InvalidParams, match="private use"):
        chat.encode([{"role": "user", "content": every + TURN}])


def test_looking_for_such_characters_takes_one_look():
    text = "x" * 1_000_000 + "".join(map(chr, range(0xF0000, 0xF8000))) + TURN
    begin = time.monotonic()
    assert Marks([text], [TURN]).needed
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("text", [f"a{TURN}", f"{TURN}b", f"C:\\{TURN}\\", f"{TURN}{EOS}\\U000f0000\\udb80\\udc02"])
@pytest.mark.parametrize(
    "template, write",
    [
        ("{{ messages[0] }}", str),
        ("{{ messages[0] | tojson }}", lambda message: json.dumps(message, ensure_ascii=False)),
        ("{{ messages[0] | tojson(true) }}", json.dumps),
    ],
)
def test_special_tokens_are_plain_text_however_a_template_prints_them(tmp_path, text, template, write):
    message = {"role": "user", "content": text}
    ids = (chat := chat_of(tmp_path, chat_template=template)).encode([message])
    assert [token_id for token_id in ids if token_id < 3] == [0]
    assert chat._tokenizer.decode(ids) == write(message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools | tojson }}",
        "{{ messages[0].tool_calls[0].function.arguments }}",
        "{% for tool in tools %}{% for name, each in tool.function.parameters.properties.items() %}"
        "{% if name in tool.function.parameters.required %}{{ name ~ each.type }}{% endif %}{% endfor %}{% endfor %}",
    ],
)
def test_special_tokens_are_plain_text_as_names_too(tmp_path, template):
    names = {f"a{TURN}": {"type": "null"}, "b": {}}
    call = {"type": "function", "function": {"name": "f", "arguments": names}}
    schema = {"type": "object", "properties": names, "required": [f"a{TURN}"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    chat = chat_of(tmp_path, chat_template=template)
    ids = chat.encode([{"role": "assistant", "tool_calls": [call]}], tools=tools if "tools" in template else None)
    assert [token_id for token_id in ids if token_id < 3] == [0]
    assert f"a{TURN}" in chat._tokenizer.decode(ids)


def test_names_that_templates_look_up_stay_where_a_special_token_is_a_letter(tmp_path):
    template = "{% set call = messages[0].tool_calls[0].function %}{{ call.name ~ call.arguments.a }}"
    call = {"type": "function", "function": {"name": "b", "arguments": {"a": 1}}}
    chat = chat_of(tmp_path, chat_template=template, eos_token="a")
    ids = chat.encode([{"role": "assistant", "content": "a", "tool_calls": [call]}])
    assert chat._tokenizer.decode(ids) == "b1"


def test_a_call_is_printed_in_the_order_of_openai(tmp_path):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}
    chat = chat_of(tmp_path, chat_template="{{ messages[0].tool_calls | tojson }}")
    turned = dict(reversed(call.items())) | {"function": dict(reversed(call["function"].items()))}
    for each in (call, turned):
        assert chat.render([{"role": "assistant", "tool_calls": [each]}]) == json.dumps([call])


@pytest.mark.parametrize("depth, is_refused", [(150, False), (250, True), (900, True), (100_000, True)])
def test_values_that_are_nested_deeply_are_refused(tmp_path, depth, is_refused):
    chat = chat_of(tmp_path, chat_template="{{ tools | tojson(indent=1) }}{{ messages[0].tool_calls }}")
    value = TURN
    for _ in range(depth):
        value = {"a": value}
    call = {"type": "function", "function": {"name": "f", "arguments": value}}
    for inputs in ({"messages": HI, "tools": [value]}, {"messages": [{"role": "assistant", "tool_calls": [call]}]}):
        if is_refused:
            with pytest.raises(InvalidParams, match=r"^(tools|messages\[0\]\.tool_calls\[0\]) "):
                chat.encode(**inputs)
        else:
            assert TURN in chat._tokenizer.decode(chat.encode(**inputs))


@pytest.mark.parametrize("print_", ["string | tojson", "tojson(true) | tojson(true)"])
def test_special_tokens_are_plain_text_where_they_are_escaped_twice(tmp_path, print_):
    chat = chat_of(tmp_path, chat_template=f"{{{{ messages[0] | {print_} }}}}")
    ids = chat.encode([{"role": "user", "content": f"a{TURN}b{EOS}"}])
    assert [token_id for token_id in ids if token_id < 3] == [0]


@given(st.lists(st.sampled_from([TURN, BOS, EOS, "<|", "eot_id|>", "a", " ", "\U000f0000", "\n"])).map("".join))
def test_no_content_can_end_its_turn(shared_chat, content):
    ids = shared_chat.encode([{"role": "user", "content": content}])
    assert [token_id for token_id in ids if token_id < 3] == [0, 2]
    assert content.strip() in shared_chat._tokenizer.decode(ids)


@pytest.fixture(scope="module")
def shared_chat(tmp_path_factory):
    return chat_of(tmp_path_factory.mktemp("chat"))


def test_sentencepiece_gets_no_spaces_around_plain_pieces(tmp_path):
    template = "{{ bos_token }}[{{ messages[0].content }}]{{ eos_token }}"
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    chat = chat_of(tmp_path, tokenizer_json=sentencepiece_json(), **config)
    ids = chat.encode([{"role": "user", "content": "the</s>fox"}])
    assert ids[0] == 1 and ids[-1] == 2 and not {1, 2} & set(ids[1:-1])
    assert chat._tokenizer.decode(ids) == "[the</s>fox]"


def with_arguments(arguments):
    return {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


CALL = with_arguments('{"city": "Rome</s>"}')


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "empty"),
        ("Hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (None, "must be a list"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'"),
        ([{"content": "x"}], r"messages\[0\] has no 'role'"),
        ([{"role": "", "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]\.role"),
        ([*HI, {"role": "user", "content": 3}], r"messages\[1\]\.content must be a string"),
        ([{"role": "user", "content": None}], "has no 'content'"),
        ([{"role": "user", "content": "x", "images": []}], "unknown key 'images'"),
        ([{"role": "user", "content": "x", "annotations": []}], "unknown key 'annotations'"),
        ([{"role": "user", "content": "x", "type": "image"}], "unknown key 'type'"),
        ([{"role": "assistant", "content": "x", "refusal": "y"}], "unknown key 'refusal'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "role": "user"}]}], r"content\[0\] must be"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "x", "role": "user"}]}], r"content\[0\] must be"),
        ([{"role": "user", "content": [{"type": "image", "text": ""}]}], "only text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\]\.text"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "only the assistant's"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"type": "x"}]}], r"tool_calls\[0\] must be"),
        ([{"role": "assistant", "tool_calls": [with_arguments([1])]}], r"tool_calls\[0\]\.function\.arguments"),
        ([{"role": "assistant", "tool_calls": []}], "has no 'content'"),
    ],
)
def test_bad_messages_are_named(chat, messages, message):
    with pytest.raises(InvalidParams, match=message):
        chat.render(messages)


@pytest.mark.parametrize("text", ["[1]", '{"city": "Ro', "null", "[" * 99999])
def test_arguments_that_are_no_object_stay_as_they_were_written(tmp_path, text):
    """A client gives them back to the model that wrote them, with what is wrong."""
    chat = chat_of(tmp_path, chat_template="{{ messages[0].tool_calls[0].function.arguments }}")
    assert chat.render([{"role": "assistant", "tool_calls": [with_arguments(text)]}]) == text


def test_templates_that_look_into_arguments_refuse_what_is_no_object(tmp_path):
    chat = chat_of(tmp_path, chat_template="{{ messages[0].tool_calls[0].function.arguments.items() | list }}")
    with pytest.raises(InvalidParams, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments is no JSON object"):
        chat.render([{"role": "assistant", "tool_calls": [with_arguments('{"a":')]}])


def test_keys_without_a_value_are_left_out(tmp_path):
    chat = chat_of(tmp_path, chat_template="{{ messages[0] | tojson }}")
    assert json.loads(chat.render([{"role": "user", "content": "x", "name": None, "refusal": None}])) == {
        "role": "user",
        "content": "x",
    }


@pytest.mark.parametrize("more", [{"type": "text"}, {"cache_control": {"type": "ephemeral"}}])
def test_what_some_clients_say_beside_the_content_is_left_out(tmp_path, more):
    """lm-evaluation-harness 0.4.9 to 0.4.11 (local-chat-completions), and LiteLLM's cache_control_injection_points."""
    chat = chat_of(tmp_path, chat_template="{{ messages | tojson }}")
    assert json.loads(chat.render([each | more for each in HI])) == HI


ANSWER = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER | {"annotations": [], "parsed": {"a": 1}, "provider_specific_fields": {}, "reasoning_content": "Hm."},
        ANSWER | {"reasoning": "Hm.", "audio": None, "function_call": None, "refusal": None, "tool_calls": None},
        ANSWER | {"content": None, "refusal": "Hello."},
        ANSWER | {"content": [{"type": "text", "text": "Hel"}, {"type": "refusal", "refusal": "lo."}]},
        ANSWER | {"content": [{"type": "text", "text": "Hello.", "cache_control": {"type": "ephemeral"}}]},
        ANSWER | {"content": [{"type": "text", "text": "Hello.", "role": "assistant", "refusal": None}]},
        ANSWER | {"content": [{"type": "text", "text": "Hello.", "annotations": [], "logprobs": []}]},
    ],
)
def test_an_answer_can_be_given_back_as_clients_hold_it(tmp_path, answer):
    chat = chat_of(tmp_path, chat_template="{{ messages | tojson }}")
    assert json.loads(chat.render([*HI, answer, *HI])) == [*HI, ANSWER, *HI]


@pytest.mark.parametrize("role, shown", [("x", "system"), ("developer", "developer")])
def test_a_developer_is_the_system_where_the_template_knows_none(tmp_path, role, shown):
    template = f"{{{{ messages[0].role }}}}{{% if messages[0].role == '{role}' %}}{{% endif %}}"
    assert chat_of(tmp_path, chat_template=template).render([{"role": "developer", "content": "x"}, *HI]) == shown


def test_calls_and_their_results_reach_the_template(tmp_path):
    """Arguments as an object, whichever way they were given; special tokens in them are plain text."""
    chat = chat_of(tmp_path, chat_template="{{ messages | tojson }}")
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    talk += [{"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    _, calls, result = json.loads(chat.render(talk))
    function = {"name": "weather", "arguments": {"city": "Rome</s>"}}
    call = {"id": "call_1", "type": "function", "function": function}
    assert calls == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    assert chat.render([*HI, {"role": "assistant", "tool_calls": [call]}, result]) == chat.render(talk)
    assert 2 not in chat.encode(talk)[:-1]


def test_ids_of_calls_are_short_where_the_template_demands_it(tmp_path):
    """As Mistral's do: they refused ours in the next turn, and those of OpenAI."""
    demand = "{% if m.tool_call_id|length != 9 %}{{ raise_exception('9!') }}{% endif %}{{ m.tool_call_id }} "
    template = (
        f"{{{{ messages[1].tool_calls|map(attribute='id')|join }}}}:{{% for m in messages[2:] %}}{demand}{{% endfor %}}"
    )
    chat, ids = chat_of(tmp_path, chat_template=template), ["call_0123456789abcdef", "abc", "AbCdEfGh9"]
    talk = [*HI, {"role": "assistant", "tool_calls": [{**CALL, "id": each} for each in ids]}]
    talk += [{"role": "tool", "tool_call_id": each, "content": "sunny"} for each in ids]
    assert chat.render(talk) == "789abcdef000000abcAbCdEfGh9:789abcdef 000000abc AbCdEfGh9 "


def test_no_template(tmp_path):
    with pytest.raises(Unsupported, match=r"no chat template.*--raw"):
        chat_of(tmp_path, chat_template=None).render(HI)


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    chat = chat_of(tmp_path, chat_template=named)
    assert chat.render(HI) == "d"
    assert chat.render(HI, tools=[{"name": "add"}]) == "add"
    assert chat.render(HI, template="default", tools=[{"name": "add"}]) == "d"
    with pytest.raises(InvalidParams, match="no chat template 'x': choose one of default, tool_use"):
        chat.render(HI, template="x")


@pytest.mark.parametrize("option", ["tools", "documents"])
def test_what_a_template_knows_nothing_of_is_refused(tmp_path, option):
    chat = chat_of(tmp_path, chat_template="{{ messages[0].content }}")
    for call in (chat.render, chat.encode):
        with pytest.raises(InvalidParams, match=rf"^{option}: .* knows none: leave them out"):
            call(HI, **{option: [{"name": "add"}]})
    assert chat.render(HI, **{option: []}) == chat.render(HI)


def test_variables_reach_the_template(tmp_path):
    chat = chat_of(tmp_path, chat_template="{{ thinking }} {{ documents[0].text }}")
    assert chat.render(HI, variables={"thinking": True}, documents=[{"text": "d"}]) == "True d"
    with pytest.raises(InvalidParams, match="messages is no free variable"):
        chat.render(HI, variables={"messages": []})
    with pytest.raises(InvalidParams, match="plain JSON"):
        chat.render(HI, variables={"thinking": object()})
    with pytest.raises(InvalidParams, match="tools must be"):
        chat.render(HI, tools=[lambda: 0])
    with pytest.raises(InvalidParams, match="variables must be"):
        chat.render(HI, variables=[1])
    assert chat.render(HI, variables={"self": 1, "thinking": 2}, documents=[{"text": "d"}]) == "2 d"


def test_templates_get_what_transformers_gives_them():
    assert render("{% for x in xs %}\n  {% if x %}{{ x }}\n  {% endif %}\n{% endfor %}", xs=[1, 0, 2]) == "1\n2\n"
    assert render("{% for x in xs %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", xs=[1, 2]) == "1"
    assert render("{{ x | tojson }}", x={"é": "<&>'"}) == '{"é": "<&>\'"}'
    assert render("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": 2}) == '{\n  "a": 2,\n  "b": 1\n}'
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}") == "a1"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(b=2).b }}") == "22"
    assert render("{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ '%s!' % 'y' }}{{ '{}'.format(7) }}{{ no }}") == "a1Nonexxxy!7"


def test_loops_know_where_they_are():
    loop = "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}.{% else %},{% endif %}{% endfor %}"
    assert render(loop, xs=["a", "b"]) == "1/2,2/2."
    assert render("{% for k, v in x.items() %}{{ k }}{{ v }}{{ loop.revindex }}{% endfor %}", x={"a": 1}) == "a11"
    assert render("{% for x in xs if x > 1 %}{{ x }}{% else %}none{% endfor %}", xs=[1]) == "none"
    assert render("{% for x in xs recursive %}<{{ loop(x) }}>{% endfor %}", xs=[[[]], []]) == "<<>><>"
    assert render("{% for x in missing %}{% else %}none{% endfor %}") == "none"


def test_a_template_may_refuse(tmp_path):
    chat = chat_of(tmp_path, chat_template="{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(InvalidParams, match="refuses the messages: roles must alternate"):
        chat.render(HI)


GROW = "{%% set n = namespace(s='xx') %%}{%% for i in range(99) %%}{%% set n.s = %s %%}{%% endfor %%}{{ n.s %s }}"
TWICE = "{%% set n = namespace(x=1) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}"
LISTS, TUPLES = TWICE % "[n.x, n.x]", TWICE % "(n.x, n.x)"
HOSTILE = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'x'*10**9 }}",
    "{{ 10**10**9*10 }}{{ 9**(9**9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    GROW % ("n.s + n.s", ""),
    GROW % ("n.s ~ n.s", ""),
    GROW % ("n.s * 9", ""),
    GROW % ("n.s.replace('x', 'xxxx')", ""),
    GROW % ("n.s | replace('x', 'xxxx')", ""),
    GROW % ("'a'.join([n.s, n.s])", ""),
    GROW % ("[n.s, n.s] | join", ""),
    GROW % ("'%s%s' % (n.s, n.s)", ""),
    GROW % ("'{0}{0}'.format(n.s)", ""),
    GROW % ("[n.s, n.s]", ""),
    GROW % ("[n.s, n.s]", "| tojson"),
    GROW % ("[n.s, n.s]", "| string"),
    "{% set n = namespace(a=1, b=1) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}"
    "{% endfor %}{{ n.a == n.b }}",
    "{% set n = namespace(n=2) %}{% for i in range(99) %}{% set n.n = n.n * n.n %}{% endfor %}{{ n.n }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ '1'.zfill(999999999) }}",
    "{{ 'x\ny' | indent(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ [1] | batch(999999999, 'x') | list }}",
    "{{ [1] | slice(999999999) | list }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ 1 | round(999999999) }}",
    "{{ (1).to_bytes(999999999, 'big') }}",
    "{{ lipsum(n=999999999) }}",
    "{{ range(99999) | map('center', 99999) | list }}",
    "{{ range(99999) | map('string') | join('x' * 99999) }}",
    "{{ ('a' * 99999).translate({97: 'x' * 99999}) }}",
    "{{ ('a' * 9999999) | urlize }}",
    "{{ dict.fromkeys(range(99999), 'x' * 9999) | tojson }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(90) }}",
    "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "{% for i in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
    "{% filter upper %}{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfilter %}",
    "{% set a = 'x' * 9999999 %}" + "{% set a = a[1:] %}" * 99,
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{% set n = namespace(__x=1) %}",
    "{% set n = namespace() %}{% set n._x = 1 %}",
    "{% include 'x' %}",
    "{{ undefined.attribute }}",
    "{% if %}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% if 1 %}" * 900 + "{% endif %}" * 900,
    "{{ 1" + "|string" * 9999 + " }}",
    "x" * (1 << 19),
    "{{ strftime_now('%999999999Y') }}",
    LISTS + "{% if n.x is eq([n.x]) %}{% endif %}",
    LISTS + "{{ [n.x].count(n.x) }}",
    LISTS + "{{ [[n.x]] | select('eq', n.x) | first }}",
    LISTS + "{% for each in [n.x, [n.x]] %}{{ loop.changed(each) }}{% endfor %}",
    LISTS + "{{ raise_exception(n.x) }}",
    TUPLES + "{{ {}.get(n.x) }}",
    TUPLES + "{{ messages[0][n.x] }}",
    TUPLES + "{% set d = {n.x: 1} %}",
    TWICE % "{'a': n.x, 'b': n.x}" + "{{ n.x }}",
    TWICE % "dict(a=n.x, b=n.x)",
    TWICE % "dict.fromkeys([1, 2], n.x)",
    TWICE % "[1] | batch(3, n.x) | list",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [" + "i, " * 999 + "n.x] %}{% endfor %}",
    "{{ 1 }}" * 2049,
    "{% if 1 %}{% endif %}" * 1025,
]


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: source[:60])
def test_hostile_templates_end_quickly_in_one_line(source):
    start = time.monotonic()
    with pytest.raises(FormatError) as caught:
        render(source, messages=[1])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert time.monotonic() - start < 5


@given(st.text("{}%# 'x*|()~[]-+.0is", max_size=40))
def test_any_template_is_text_or_our_error(source):
    try:
        assert isinstance(render(source), str)
    except BitNetError as error:
        assert "\n" not in str(error)


def test_a_long_conversation_is_no_attack(chat):
    talk = [{"role": "user", "content": "word " * 2000}] * 400
    assert len(chat.render(talk)) > 400 * 9000


def test_threads_may_share_a_chat(chat):
    texts: dict[int, str] = {}

    def work(index):
        for _ in range(20):
            texts[index] = chat.render([{"role": "user", "content": f"n{index}"}])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert texts == {index: f"User: n{index}{TURN}Assistant: " for index in range(4)}

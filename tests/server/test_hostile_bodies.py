"""Bodies that mean harm, or nothing: refused in the API's shape, with a bounded message, and no defect."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgi import ask
from conftest import Running

import bitnet_inference
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, ServerOptions, make_app, make_front, schema
from bitnet_inference.server.bodies import parse
from bitnet_inference.server.message_schema import MessagesRequest
from bitnet_inference.server.schema import ChatRequest

BAD = {"type": "function", "function": {"name": "x", "strict": True, "parameters": {"not": {}}}}
STRICT = {"type": "function", "function": {"name": "x", "strict": True}}
TALK = [{"role": "user", "content": "Hi"}]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize")
RAW = {
    "nothing": b"",
    "half": b"{",
    "no object": b"[]",
    "null": b"null",
    "NaN": b'{"temperature": NaN}',
    "infinity": b'{"temperature": 1e999}',
    "twice": b'{"model": "a", "model": "b"}',
    "twice inside": b'{"messages": [{"role": "user", "role": "system", "content": ""}]}',
    "no UTF-8": b'{"model": "\xff"}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "deep": b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "not so deep": b'{"tools": ' + b"[" * 150 + b"]" * 150 + b"}",
    "huge number": b'{"seed": ' + b"9" * 100_000 + b"}",
    "large number": b'{"max_tokens": ' + b"9" * 300 + b"}",
    "long name": b'{"' + b"x" * 100_000 + b'": 1}',
    "long value": b'{"model": "'
    + b"x" * 100_000
    + b'", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
}


@pytest.fixture(scope="module")
def app(running: Running) -> Any:
    return make_front(running.served, ServerOptions(max_body_bytes=1 << 20)).app


def refusal(app: Any, path: str, body: Any, **options: Any) -> dict[str, Any]:
    """The error of an answer that must be one."""
    got = asyncio.run(ask(app, path, body, **options))
    assert 400 <= got.status < 500 and got.headers["content-type"] == "application/json"
    error: dict[str, Any] = got.json["error"]
    assert len(got.body) < 2000 and "\n" not in error["message"]
    assert ("param" in error) == (path != "/v1/messages")
    return error | {"status": got.status}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_a_body_that_is_wrong_is_refused(app: Any, path: str, raw: bytes) -> None:
    refusal(app, path, raw)


def test_a_body_has_a_type_and_a_limit(app: Any) -> None:
    assert (
        refusal(app, "/v1/completions", b"prompt=x", content_type="application/x-www-form-urlencoded")["status"] == 415
    )
    assert refusal(app, "/v1/completions", b"{}", content_type="")["status"] == 415
    large = refusal(app, "/v1/completions", b" " * (1 << 20) + b"{}")
    assert (large["status"], large["code"]) == (413, "body_too_large")


def test_a_method_that_is_wrong_is_told_with_the_right_one(running: Running) -> None:
    answer = httpx.get(f"{running.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "GET is not possible at '/v1/completions': use POST"
    answer = httpx.put(f"{running.url}/v1/models")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [], "model": "story"}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages"),
    ("/v1/chat/completions", {"messages": TALK, "functions": []}, "functions"),
    ("/v1/chat/completions", {"messages": TALK, "reasoning_effort": "low"}, "reasoning_effort"),
    ("/v1/chat/completions", {"messages": TALK, "top_logprobs": 2}, "top_logprobs"),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ("/v1/chat/completions", {"messages": TALK, "logit_bias": {"x": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": TALK, "logit_bias": {"99999": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": TALK, "logit_bias": {"5_0": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": TALK, "logit_bias": {" 5 ": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": TALK, "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": TALK, "temperature": 1e9}, "temperature"),
    ("/v1/chat/completions", {"messages": TALK, "response_format": {"type": "xml"}}, "response_format"),
    ("/v1/chat/completions", {"messages": TALK, "guided_regex": "(?=x)"}, "guided_regex"),
    ("/v1/chat/completions", {"messages": TALK, "guided_regex": "x", "guided_choice": ["y"]}, "guided_choice"),
    ("/v1/chat/completions", {"messages": TALK, "guided_regex": "[a&&b]"}, "guided_regex"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(?=x)"}}, "structured_outputs"),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "x"}, "guided_json": {}}, "structured_outputs"),
    ("/v1/chat/completions", {"messages": TALK, "tools": [{"type": "web"}]}, "tools"),
    ("/v1/chat/completions", {"messages": TALK, "tool_choice": "required"}, "tool_choice"),
    ("/v1/chat/completions", {"messages": TALK, "tool_choice": "required", "tools": [BAD]}, "tools"),
    ("/v1/chat/completions", {"messages": TALK, "tools": [STRICT, STRICT]}, "tools"),
    ("/v1/chat/completions", {"messages": TALK, "stream_options": {}}, "stream_options"),
    ("/v1/chat/completions", {"messages": TALK, "stop": [""]}, "stop"),
    ("/v1/chat/completions", {"messages": TALK, "min_tokens": 5, "max_tokens": 1}, "min_tokens"),
    ("/v1/chat/completions", {"messages": TALK, "n": 1.5}, "n"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [[]]}, "prompt"),
    ("/v1/completions", {"prompt": [99999]}, "prompt"),
    ("/v1/embeddings", {"input": [99999]}, "input"),
    ("/v1/embeddings", {"input": [[1], [99999]]}, "input"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("/v1/completions", {"prompt": "x", "n": 2, "best_of": 1}, "best_of"),
    ("/v1/completions", {"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
    ("/v1/completions", {"prompt": ["x"] * 1024, "n": 3}, "prompt"),
    ("/v1/completions", {"prompt": "x", "echo": True, "overflow": "truncate_left"}, "echo"),
    ("/v1/embeddings", {"input": [""]}, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 3}, "dimensions"),
    ("/v1/responses", {"input": "x", "reasoning": {"effort": "low"}}, "reasoning"),
    ("/v1/responses", {"input": "x", "background": True, "store": False}, "background"),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    ("/tokenize", {"prompt": "x", "messages": TALK}, "prompt"),
    ("/detokenize", {"tokens": [99999]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=[f"{path} {param}" for path, _, param in WRONG])
def test_a_refusal_names_the_field(app: Any, path: str, body: dict[str, Any], param: str) -> None:
    assert (refusal(app, path, body)["param"] or "").split(".")[0] == param


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
CLOCK = {"messages": TALK, "max_tokens": 1, "tools": [{"name": "clock", "input_schema": {}}]}
OTHER: dict[str, Any] = {
    "input": "x",
    "tools": [{"type": "function", "name": "clock"}],
    "tool_choice": {"type": "function", "name": "other"},
}
KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
    ("/v1/completions", {"prompt": [[]]}, "prompt.0: List should have at least 1 item"),
    ("/v1/completions", {"prompt": ["x"] * 2049}, "prompt: List should have at most 2048 items"),
    ("/v1/completions", {"prompt": ["x"] * 1025}, "prompt: more than 1024 texts to go on with: send fewer"),
    ("/v1/completions", {"prompt": 5}, "prompt: 'number' is not supported here: give one of 'text', 'list', 'token"),
    ("/v1/completions", {"prompt": "x", "stop": [5] * 2000}, "stop.0: Input should be a valid string"),
    ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(range(2000), "x")}, "2000 values in the body are"),
    ("/v1/completions", {"prompt": "x", "<x>": 5}, "<x> is not supported: leave it out"),
    ("/v1/completions", {"prompt": "x", "max_token": 5}, "max_token is not supported: did you mean max_tokens?"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 1, "stop_sequence": []}, "stop_sequence is not supported"),
    ("/v1/chat/completions", {"messages": TALK, "stop": 5}, "stop: 'number' is not supported here: give one of 'text'"),
    ("/v1/chat/completions", {"messages": TALK, "tool_choice": 5}, "tool_choice: 'number' is not supported"),
    ("/v1/chat/completions", {"messages": TALK, "store": True}, "store: only false is supported here: give that, or"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 'suffix: only "" is supported here: give that, or leave'),
    ("/v1/responses", {"input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary is not supported here"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, 'tools.0.type: only "function" is supported'),
    ("/v1/chat/completions", {"messages": TALK, "guided_json": 5}, "guided_json: 'number' is not supported"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot': give"),
    ("/tokenize", {"messages": [*TALK, {"role": "robot", "content": "x"}]}, "messages[1].role is 'robot': give one"),
    ("/v1/embeddings", {"input": ["x", ""]}, "input[1]: the prompt is empty: give some text"),
    ("/v1/embeddings", {"input": [True]}, "input.0: Input should be a valid string"),
    ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format: name is missing"),
    ("/v1/messages", CLOCK | {"tool_choice": {"type": "tool"}}, "tool_choice: name is missing: say which tool"),
    ("/v1/messages", CLOCK | {"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name is 'x': give one of"),
    ("/v1/responses", {"input": []}, "input is missing: give it"),
    ("/v1/responses", {"input": [5]}, "input.0: 'no object' is not supported here: give one of 'message', 'func"),
    ("/v1/responses", {"input": [{"type": "computer_call"}]}, "input.0: 'computer_call' is not supported here"),
    (
        "/v1/responses",
        {"input": IMAGE},
        "input.0.content.0: 'input_image' is not supported here: give one of 'input_text'",
    ),
    ("/v1/responses", {"input": "x", "tool_choice": "x"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    ("/v1/responses", OTHER, "tool_choice names 'other': give one of the tools: clock"),
    (
        "/v1/responses",
        OTHER | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER["tool_choice"]]}},
        "tool_choice names 'other': give one of the tools: clock",
    ),
    ("/v1/messages", CLOCK | {"tool_choice": {"type": "any"}, "tools": []}, "tool_choice is 'any', and there are no"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 1, "stop_sequences": [""]}, "stop_sequences has an empty"),
    ("/v1/chat/completions", {"messages": TALK, "guided_regex": "[a&&b]"}, "guided_regex: regex: it allows no text"),
    ("/v1/messages", {"messages": TALK, "max_tokens": 1, "system": 5}, "system: 'number' is not supported here"),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1},
        "messages.0.content.0: 'image' is not supported here: give one of 'text', 'tool_use', 'tool_result'",
    ),
]


@pytest.mark.parametrize(("path", "body", "message"), KINDS, ids=[message for _, _, message in KINDS])
def test_a_value_of_another_kind_is_told_as_what_it_is(app: Any, path: str, body: dict[str, Any], message: str) -> None:
    error = refusal(app, path, body)
    assert error["message"].startswith(message)
    if error.get("param"):
        assert message.startswith(error["param"])


def test_null_counts_as_left_out_inside_objects_too() -> None:
    chat = {"messages": TALK, "stream": True, "stream_options": {"include_usage": None}}
    options = parse(ChatRequest, json.dumps(chat).encode()).stream_options
    assert options and not options.include_usage
    result = {"type": "tool_result", "tool_use_id": "x", "content": None, "is_error": None}
    asked = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 1, "tool_choice": None}
    assert parse(MessagesRequest, json.dumps(asked).encode()).talk.messages[0]["content"] == ""
    parameters = {"type": "object", "properties": {"to": {"enum": ["Rome", None]}}}
    function = {"name": "go", "description": None, "parameters": parameters, "strict": None, "handler": None}
    call = {"id": "x", "type": None, "function": {"name": "go", "arguments": None, "parsed": None}, "custom": None}
    parts = [{"type": "text", "text": "Hi", "image_url": None}]
    talk = [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    tools = [{"type": "function", "function": function, "custom": None}]
    form = {"type": "json_object", "json_schema": None}
    body = {"messages": talk, "tools": tools, "response_format": form}
    read = parse(ChatRequest, json.dumps(body).encode())
    assert read.tools == [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    assert read.grammar == Grammar(json_object=True)


# Too long for the cache, which is smaller than the model's context; and for the context.
@pytest.mark.parametrize(("max_cache_tokens", "repeats"), [(64, 30), (4096, 300)])
def test_a_prompt_that_can_never_fit_is_the_clients_mistake(max_cache_tokens: int, repeats: int) -> None:
    served = ServedModels(Models(max_cache_tokens=max_cache_tokens, threads=1), {"story": "default"})
    with closing(served):
        app = make_app(served)
        text = "Once upon a time " * repeats
        talk = [{"role": "user", "content": text}]
        for path, body in [
            ("/v1/chat/completions", {"messages": talk}),
            ("/v1/completions", {"prompt": ["Once", text]}),
            ("/v1/embeddings", {"input": text}),
            ("/v1/responses", {"input": text}),
        ]:
            error = refusal(app, path, body)
            assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
            # LiteLLM, LangChain and CrewAI look for such words in the message.
            for words in ("context_length_exceeded", "prompt is too long", "this model's maximum context length is"):
                assert error["message"].count(words) == 1
        for path, field in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
            several = refusal(app, path, {field: ["Once", text]})
            assert several["param"] == field and several["message"].startswith(f"{field}[1]: the ")
        assert "prompt is too long" in refusal(app, "/v1/messages", {"messages": talk, "max_tokens": 1})["message"]


def test_a_wrong_request_loads_no_model(running: Running) -> None:
    class Refuses:
        """No model may be touched."""

        names = ("story",)

        def path(self, name: str) -> str:
            raise AssertionError("the body is refused before")

        async def in_thread(self, work: Any, *args: Any) -> Any:
            return work(*args)

    app: Any = make_app(Refuses())  # type: ignore[arg-type]
    assert refusal(app, "/v1/chat/completions", {"messages": TALK, "stop": [""]})["param"] == "stop"


@pytest.mark.parametrize("value", ["\ud800 x", 10**30, -(10**30)])
def test_half_a_surrogate_pair_and_a_huge_number_that_a_model_wrote_can_be_sent(value: Any) -> None:
    from bitnet_inference.server.sse import dumps

    assert json.loads(dumps({"arguments": value})) == {"arguments": value}


def test_a_model_that_cannot_be_loaded_is_told_by_its_name_not_by_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    paths = {
        "story": Path(bitnet_inference.__file__).parent / "default_model",
        "broken": tmp_path / "broken.gguf",
        "gone": tmp_path / "x",
        "linked": tmp_path / "link" / "broken.gguf",
        "distant": "me/distant",
    }
    (tmp_path / "link").symlink_to(tmp_path)
    with closing(ServedModels(Models(max_bytes=1 << 20), paths)) as small, Running(small) as server:
        for name, status in {"story": 503, "broken": 500, "gone": 404, "linked": 500, "distant": 404}.items():
            answer = httpx.post(f"{server.url}/v1/completions", json={"model": name, "prompt": "x"})
            message = answer.json()["error"]["message"]
            if name == "distant":  # whose name on the hub is no secret, and what has to be pulled
                assert message.endswith("bitnet pull me/distant")
                continue
            assert answer.status_code == status and message.startswith(name) and "/" not in message
    assert [record.exc_info for record in caplog.records] == [None, None]  # one line each, with the place
    assert all(f"/v1/completions failed: {tmp_path}" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[0].content.foo.bar }}", "fails with UndefinedError"),
        (None, "the model has no chat template"),
        (None, "of a server, ask for a text completion"),
    ],
)
def test_what_a_chat_template_cannot_do_is_the_clients_mistake(tmp_path: Path, template: str | None, why: str) -> None:
    """An error of the server clients would try again; and where its files are is none of their business."""
    shutil.copytree(Path(bitnet_inference.__file__).parent / "default_model", tmp_path / "model")
    settings = tmp_path / "model" / "tokenizer_config.json"
    given = json.loads(settings.read_text())
    settings.write_text(json.dumps({name: each for name, each in given.items() if name != "chat_template"}))
    place = tmp_path / "model" / "chat_template.jinja"
    place.unlink(missing_ok=True)
    if template is not None:
        place.write_text(template)
    with closing(ServedModels(Models(max_cache_tokens=256, threads=1), {"story": tmp_path / "model"})) as served:
        app = make_app(served)
        for path, body in {"chat/completions": {}, "messages": {"max_tokens": 1}, "messages/count_tokens": {}}.items():
            got = asyncio.run(ask(app, f"/v1/{path}", body | {"messages": TALK}))
            message = got.json["error"]["message"]
            assert got.status == 400 and why in message and message.startswith("story: ") and "/" not in message


def test_a_form_that_takes_its_time_is_in_the_way_of_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(value: Any) -> None:
        if value is not None:
            begun.set()
            assert may_end.wait(30), "the others have waited for this one"

    monkeypatch.setattr(schema, "read_response_format", slow)
    bodies = [{"messages": TALK, "response_format": {"type": "text"}}, {"messages": TALK}]
    first, second = (json.dumps(body).encode() for body in bodies)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(parse, ChatRequest, first)
        assert begun.wait(30)
        threads.submit(parse, ChatRequest, second).result(10)
        assert not waiting.done()
        may_end.set()
        assert waiting.result(10).grammar is None

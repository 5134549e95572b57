"""What Anthropic's Messages API may be asked, and the conversation that it means."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.closing import closed_schema
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.json_objects import without_nulls
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.once import once
from bitnet_inference.server.replies import Talk
from bitnet_inference.server.schema import Count, Each, Fields, Inner, Part, TextOrList, check_tools, salt_of, type_of
from bitnet_inference.text.messages import check_messages
from bitnet_inference.tools import Tools, read_tools


class CacheControl(Inner):
    """What is in the cache is found there by everybody's requests with the same beginning, marked or not."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Inner):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(Inner):
    """What another model has thought: it says nothing to this one."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""
    data: str = ""


class Caller(Inner):
    """Who has called: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(Inner):
    """A call that the assistant has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(Inner):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOrList[Each[TextBlock]] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None
    toolset_name: None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ThinkingBlock, Tag("<redacted_thinking>")],
    Discriminator(type_of),
]


class Turn(Inner):
    """A message of the conversation; the system's may stand between others, too."""

    role: Literal["user", "assistant", "system"]
    content: TextOrList[Each[Block]]


class ToolSpec(Inner):
    """A function that may be called."""

    type: Literal["custom"] | None = None  # in front: of a tool of Anthropic's own the type is what is wrong
    name: Annotated[str, Field(min_length=1)]
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # says when pieces of the input may be sent, which is when they are right


class ToolWish(Inner):
    """Which tools shall be called."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _says_which(self) -> ToolWish:
        if self.type == "tool" and self.name is None:
            raise ValueError("name is missing: say which tool")
        return self


class OutputFormat(Inner):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Inner):
    """How the answer shall look."""

    format: OutputFormat | None = None


class Metadata(Inner):
    """`user_id`: each has a cache of its own."""

    user_id: str | None = None


class Thinking(Inner):
    """No model here thinks apart from its answer, and a chat template that knows how is told to have none in it."""

    type: Literal["disabled"]


class CountRequest(Fields):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[Each[Turn], Field(min_length=1)]
    system: TextOrList[Each[TextBlock]] | None = None
    tools: Each[ToolSpec] | None = None
    tool_choice: ToolWish | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    thread: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> CountRequest:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise ValueError("output_format is the old name of output_config.format: give one")
        return self

    def check(self) -> None:
        """See Fields."""
        if self.thread is not None:  # the SDK's runner of tools knows by the details that it shall do without
            why = "thread is not supported: send the whole conversation each time"
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise Failure(400, why, param="thread", details=details)
        check_messages(self.talk.messages)
        check_tools(self.talk.tools, self.talk.shown_tools)

    def told_as(self, word: str) -> str:
        """See Fields; the form of the answer by the name under which it was given."""
        if word == "grammar":
            return "output_config" if self.output_format is None else "output_format"
        return super().told_as(word)

    @once
    def talk(self) -> Talk:
        """The conversation as the library knows it. Raises InvalidParams."""
        form = (self.output_config and self.output_config.format) or self.output_format
        return Talk(
            messages=[*self._system(), *(each for turn in self.messages for each in _messages(turn))],
            grammar=None if form is None else Grammar(json_schema=closed_schema(form.schema_)),
            shown_tools=[_tool(each) for each in self.tools or ()] or None,
            tools=self._callable(),
            no_thinking=self.thinking is not None,
        )

    def _system(self) -> Iterator[dict[str, Any]]:
        text = self.system if isinstance(self.system, str) else "".join(each.text for each in self.system or ())
        if text:
            yield {"role": "system", "content": text}

    def _callable(self) -> Tools | None:
        wish, tools = self.tool_choice or ToolWish(type="auto"), [_tool(each) for each in self.tools or ()]
        if self.tool_choice is None and not tools:
            return None
        if wish.type == "tool" and wish.name not in (known := [each.name for each in self.tools or ()]):
            raise InvalidParams(f"tool_choice.name is {wish.name!r:.80}: give one of the tools: {', '.join(known)}")
        if wish.type == "any" and not tools:
            raise InvalidParams("tool_choice is 'any', and there are no tools: give some")
        choice: Any = {"any": "required", "tool": {"type": "function", "function": {"name": wish.name}}}
        return read_tools(tools, choice.get(wish.type, wish.type))


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stream: bool = False
    stop_sequences: Each[str] | None = None
    temperature: Part | None = None
    top_k: Count | None = None
    top_p: Part | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    TOLD_AS: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences"}

    def check(self) -> None:
        """See Fields."""
        super().check()
        SamplingParams(**self.sampling())

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given."""
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "stop": self.stop_sequences}
        return {name: value for name, value in given.items() if value is not None} | {"max_tokens": self.max_tokens}

    @property
    def salt(self) -> str:
        """See Fields."""
        return salt_of(self.metadata.user_id if self.metadata else None)


def _tool(spec: ToolSpec) -> dict[str, Any]:
    function: dict[str, Any] = {"name": spec.name, "description": spec.description, "parameters": spec.input_schema}
    function["strict"] = spec.strict
    return {"type": "function", "function": without_nulls(function)}


def _messages(turn: Turn) -> Iterator[dict[str, Any]]:
    """The messages of a turn: results of tools are messages of their own, in front."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
    text = "".join(block.text for block in turn.content if isinstance(block, TextBlock))
    calls = [_call(block) for block in turn.content if isinstance(block, ToolUseBlock)]
    if calls:
        yield {"role": turn.role, "content": text, "tool_calls": calls}
    elif text or not any(isinstance(block, ToolResultBlock) for block in turn.content):
        yield {"role": turn.role, "content": text}


def _result(block: ToolResultBlock) -> str:
    given = block.content
    text = given if isinstance(given, str) else "".join(each.text for each in given)
    return f"Error: {text}" if block.is_error else text


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}

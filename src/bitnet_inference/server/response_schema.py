"""What OpenAI's Responses API may be asked, and the conversation that it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.grammar.response_format import read_response_format
from bitnet_inference.server.message_schema import Caller
from bitnet_inference.server.once import once
from bitnet_inference.server.schema import (
    Count,
    Each,
    Fields,
    Inner,
    NumTop,
    Part,
    StreamOptions,
    Temperature,
    TextOrList,
    check_tools,
    kind_of,
    salt_of,
    type_of,
)
from bitnet_inference.text.messages import check_messages
from bitnet_inference.tools import Tools, read_tools

LOGPROBS = "message.output_text.logprobs"
Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Inner):
    """A part of a message. Annotations, log-probabilities and what clients made of an earlier answer are left out."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Annotated[Any, Field(exclude=True)] = None


class RefusalPart(Inner):
    """What another model has said instead of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """It is shown to the model as any other text."""
        return self.refusal


MessagePart = Annotated[
    Annotated[TextPart, Tag("<input_text>")]
    | Annotated[TextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(type_of),
]


class MessageItem(Inner):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrList[Each[MessagePart]]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # says nothing to the model


class CallItem(Inner):
    """A call that the assistant has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: Caller | None = None
    parsed_arguments: Annotated[Any, Field(exclude=True)] = None


class CallOutputItem(Inner):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: TextOrList[Each[TextPart]]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: Caller | None = None


class ReferenceItem(Inner):
    """An item of a stored response, asked or answered, by its id."""

    type: Literal["item_reference"]
    id: str


class ReasoningItem(Inner):
    """What another model has thought: it says nothing to this one."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class FunctionTool(Inner):
    """A function that may be called."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class FunctionChoice(Inner):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedChoice(Inner):
    """Some of the functions, of which one must be called or may be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Each[FunctionChoice], Field(min_length=1)]


class TextForm(Inner):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> TextForm:
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if self.type == "json_schema" and value is None:
                raise ValueError(f"{name} is missing: give it")
        return self


class TextConfig(Inner):
    """How the answer shall look."""

    format: TextForm | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Inner):
    """No model here thinks apart from its answer, and a chat template that knows how is told to have none in it."""

    effort: Literal["none"] | None = None
    summary: None = None


def _kind_of_item(item: Any) -> str:
    has_no_type = isinstance(item, dict) and item.get("type") is None
    return "<message>" if has_no_type else type_of(item)


def _kind_of_choice(choice: Any) -> str:
    return type_of(choice) if isinstance(choice, dict | Inner) else kind_of(choice)


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<item_reference>")],
    Discriminator(_kind_of_item),
]
Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[FunctionChoice, Tag("<function>")]
    | Annotated[AllowedChoice, Tag("<allowed_tools>")],
    Discriminator(_kind_of_choice),
]


_ITEM: TypeAdapter[Item] = TypeAdapter(Item)


class InputTokensRequest(Fields):
    """POST /v1/responses/input_tokens."""

    TOLD_AS: ClassVar[Mapping[str, str]] = {"grammar": "text", "response_format": "text", "messages": "input"}
    PROMPT: ClassVar[str] = "input"

    input: TextOrList[Each[Item]] = Field(default=[])
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Each[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="after")
    def _has_input(self) -> InputTokensRequest:
        if not self.input and self.previous_response_id is None:
            raise ValueError("input is missing: give it")
        return self

    def check(self) -> None:
        """See Fields."""
        if self.messages or self.previous_response_id is None:
            check_messages(self.messages)
        SamplingParams(grammar=self.grammar)
        check_tools(self.callable_tools, self.nested_tools)

    def resolve(self, find: Callable[[str], Mapping[str, Any]]) -> None:
        """Put the items that references stand for, by their ids, in the place of these."""
        if not isinstance(self.input, str) and any(isinstance(item, ReferenceItem) for item in self.input):
            self.input = [
                _ITEM.validate_python(find(item.id)) if isinstance(item, ReferenceItem) else item for item in self.input
            ]
            del self.messages

    @once
    def messages(self) -> list[dict[str, Any]]:
        """The input as the library knows it, without instructions; references are empty until they are resolved."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return _messages(self.input)

    @once
    def grammar(self) -> Grammar | None:
        """The form that the text shall have. Raises InvalidParams."""
        form = self.text.format if self.text else None
        if form is None or form.type != "json_schema":
            return read_response_format(None if form is None else {"type": form.type})
        named = {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return read_response_format({"type": "json_schema", "json_schema": named})

    @once
    def nested_tools(self) -> list[dict[str, Any]]:
        """The tools in the shape that chat completions have."""
        return [
            {"type": "function", "function": each.model_dump(exclude={"type"}, exclude_none=True)}
            for each in self.tools or ()
        ]

    @once
    def callable_tools(self) -> Tools | None:
        """What may be called. Raises InvalidParams."""
        choice: Any = self.tool_choice
        if isinstance(choice, FunctionChoice):
            choice = self._nested_choice(choice)
        elif isinstance(choice, AllowedChoice):
            allowed = {"mode": choice.mode, "tools": [self._nested_choice(each) for each in choice.tools]}
            choice = {"type": choice.type, choice.type: allowed}
        return read_tools(self.nested_tools, None if choice == "auto" else choice)

    def _nested_choice(self, choice: FunctionChoice) -> dict[str, Any]:
        if self.tools and choice.name not in (known := [each.name for each in self.tools]):
            raise InvalidParams(f"tool_choice names {choice.name!r:.80}: give one of the tools: {', '.join(known)}")
        return {"type": "function", "function": {"name": choice.name}}


class ResponsesRequest(InputTokensRequest):
    """POST /v1/responses."""

    TOLD_AS: ClassVar[Mapping[str, str]] = {
        **InputTokensRequest.TOLD_AS,
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Part | None = None
    top_logprobs: NumTop | None = None
    include: Each[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    store: bool = True
    background: bool = False
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _can_be_kept(self) -> ResponsesRequest:
        if self.background and (self.stream or not self.store):
            raise ValueError("background is for answers that are stored and fetched later: set store, and no stream")
        if self.top_logprobs is not None and LOGPROBS not in (self.include or ()):
            raise ValueError(f'top_logprobs needs include: ["{LOGPROBS}"]')
        options = self.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats or not self.stream):
            raise ValueError("stream_options: a stream ends with its usage anyway: leave it out")
        return self

    def check(self) -> None:
        """See Fields."""
        super().check()
        SamplingParams(**self.sampling())

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given; with truncation "auto", the oldest turns give way."""
        given: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p}
        given["overflow"] = "keep_system" if self.truncation == "auto" else None
        given["logprobs"] = (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None
        given = {name: value for name, value in given.items() if value is not None}
        return given | {"max_tokens": self.max_output_tokens}

    @property
    def salt(self) -> str:
        """See Fields."""
        return salt_of(self.user, self.safety_identifier, self.prompt_cache_key)


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """Calls, and the text in front of them, are one message; a call that was cut is none, as in `said`."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ReasoningItem) or (isinstance(item, CallItem) and item.status == "incomplete"):
            continue
        if isinstance(item, CallItem):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif isinstance(item, ReferenceItem):
            messages.append({"role": "user", "content": ""})
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _text(item.content)})
        else:
            named = {} if item.name is None else {"name": item.name}
            messages.append({"role": "tool", "tool_call_id": item.call_id, **named, "content": _text(item.output)})
    return messages


def _text(content: str | Sequence[TextPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)

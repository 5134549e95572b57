"""What requests may say. A field that is not here is refused by name, and so is one that cannot be honoured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from bitnet_inference.engine.params import MAX_LOGPROBS, MAX_TEMPERATURE, Overflow, SamplingParams
from bitnet_inference.engine.scheduler import MAX_WAITING
from bitnet_inference.engine.terms import MAX_PRIORITY
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.closing import closed_schema
from bitnet_inference.grammar.grammar import Grammar, parsed_schema
from bitnet_inference.grammar.response_format import read_response_format
from bitnet_inference.json_objects import without_nulls
from bitnet_inference.server.once import once
from bitnet_inference.text.messages import ROLES, check_messages
from bitnet_inference.tools import Tools, read_tools

_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}
MAX_CHOICES = 128
MAX_PROMPTS = 2048  # as many texts as OpenAI takes for vectors

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
TopK = Annotated[int, Field(ge=-1, lt=1 << 31)]  # -1 is off, as in vLLM
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]
Part = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def kind_of(value: Any) -> str:
    """The kind of a JSON value, in <> as all tags of unions are: see field_of."""
    return {str: "<text>", list: "<list>", dict: "<object>", bool: "<boolean>"}.get(type(value), "<number>")


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return kind_of(value)
    return {int: "<token ids>", list: "<lists of token ids>"}.get(type(value[0]), "<list>")


def type_of(value: Any) -> str:
    """As kind_of, of an object that says its type itself."""
    return f"<{value.get('type')}>" if isinstance(value, dict) else f"<{getattr(value, 'type', 'no object')}>"


Other = TypeVar("Other")
# To say what is wrong with each of a million values takes seconds: the first one will do.
Each = Annotated[list[Other], Field(fail_fast=True)]

# A value is held against one branch of a union only, so that what is wrong with it can be said.
_Text = Annotated[str, Tag("<text>")]
TextOrList = Annotated[_Text | Annotated[Other, Tag("<list>")], Discriminator(kind_of)]
TextOrObject = Annotated[_Text | Annotated[Other, Tag("<object>")], Discriminator(kind_of)]
_Ids = Annotated[Each[TokenId], Field(min_length=1)]
_Lists = Annotated[Each[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
_Texts = Annotated[Each[str], Field(min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    _Text
    | Annotated[_Texts, Tag("<list>")]
    | Annotated[_Ids, Tag("<token ids>")]
    | Annotated[_Lists, Tag("<lists of token ids>")],
    Discriminator(_kind_of_prompt),
]


def _told(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is null in tools and their functions: a chat template would print it."""
    return [{name: without_nulls(each) for name, each in without_nulls(tool).items()} for tool in tools]


ToolList = Annotated[Each[dict[str, Any]], AfterValidator(_told)]


class Fields(BaseModel):
    """A body. Unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, ignored_types=(once,))
    # What the library calls differently in its messages: its word -> our field.
    TOLD_AS: ClassVar[Mapping[str, str]] = {}
    PROMPT: ClassVar[str] = "prompt"  # the field that the library calls so

    model: str = ""

    def told_as(self, word: str) -> str:
        """Our field, or a part of it, that a message of the library calls so."""
        return self.TOLD_AS.get(word, word)

    @property
    def salt(self) -> str:
        """Requests of one caller that may find each other's work in the cache have equal ones."""
        return ""

    @property
    def rank(self) -> int:
        """The priority that is asked for."""
        return 0

    @property
    def limit_s(self) -> float | None:
        """The seconds after which the answer shall end."""
        return None

    def check(self) -> None:
        """Raises InvalidParams for what can be seen to be wrong without a model."""


class Inner(BaseModel):
    """An object within a body. What is null counts as left out, as in a body: clients send back what they got."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return without_nulls(value)


class StreamOptions(Inner):
    """`include_usage`: one more event before the end says what the request has cost.

    With vLLM's `continuous_usage_stats` each event says what its choice has cost so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class StructuredOutputs(Inner):
    """The form of a text in vLLM's newer words: one of these, as in Grammar; `grammar` is GBNF."""

    json_: Annotated[TextOrObject[dict[str, Any]] | None, Field(alias="json")] = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Each[str] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("give exactly one of json, json_object, regex, choice, grammar")
        return self


class SamplingFields(Fields):
    """What chat and text requests have in common: OpenAI's fields, and SamplingParams' own as extensions."""

    # Fields of SamplingParams that are passed on under their own names.
    PASSED: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "min_tokens", "ignore_eos", "stop_token_ids", "overflow", "stop", "max_tokens",
    )  # fmt: skip

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: TextOrList[Each[str]] | None = None
    temperature: Temperature | None = None
    top_p: Part | None = None
    top_k: TopK | None = None
    min_p: Part | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Each[TokenId] | None = None
    overflow: Overflow | None = None
    response_format: dict[str, Any] | None = None
    guided_json: TextOrObject[dict[str, Any]] | None = None
    guided_regex: str | None = None
    guided_choice: Each[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # Accepted at the values that say what happens anyway; some clients of vLLM send them always.
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None
    return_tokens_as_token_ids: Literal[False] | None = None
    detokenize: Literal[True] | None = None
    bad_words: Annotated[list[str], Field(max_length=0)] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream, or leave them out")
        return self

    def check(self) -> None:
        """See Fields."""
        SamplingParams(**self.sampling(), grammar=self.grammar)

    @property
    def salt(self) -> str:
        """See Fields."""
        return salt_of(self.user, self.cache_salt)

    @property
    def rank(self) -> int:
        """See Fields."""
        return self.priority

    @property
    def limit_s(self) -> float | None:
        """See Fields."""
        return self.timeout_s

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given; logit_bias by whole numbers. Raises InvalidParams."""
        given = {name: getattr(self, name) for name in self.PASSED if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return given

    def told_as(self, word: str) -> str:
        """See Fields; a form may have been given in several."""
        return next(iter(self._forms), word) if word == "grammar" else super().told_as(word)

    @once
    def _forms(self) -> dict[str, Any]:
        guided = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        given = {name: getattr(self, name) for name in ("response_format", *guided) if getattr(self, name) is not None}
        if self.structured_outputs is not None:
            wished = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            given |= {f"structured_outputs.{name}": value for name, value in wished.items()}
        return given

    @once
    def grammar(self) -> Grammar | None:
        """The form that the text shall have. Raises InvalidParams."""
        given = self._forms
        if len(given) > 1:
            first, second, *_ = given
            raise InvalidParams(f"{second} and {first} exclude each other: give one")
        if given.keys() <= {"response_format"}:
            return read_response_format(self.response_format)
        ((name, value),) = given.items()
        kind = name.removeprefix("guided_").removeprefix("structured_outputs.")
        try:
            if kind == "json":
                return Grammar(json_schema=closed_schema(parsed_schema(value)))
            return Grammar(**{"gbnf" if kind == "grammar" else kind: value})
        except InvalidParams as error:
            raise InvalidParams(f"{name}: {error}") from None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    PROMPT: ClassVar[str] = "messages"
    TOLD_AS: ClassVar[Mapping[str, str]] = {"variables": "chat_template_kwargs"}

    messages: Annotated[Each[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    tools: ToolList | None = None
    tool_choice: TextOrObject[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted at the values that say what happens anyway.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Each[Literal["text"]] | None = None
    echo: Literal[False] | None = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None

    @model_validator(mode="after")
    def _limits_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs: set logprobs to true")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ValueError("max_tokens is the old name of max_completion_tokens, and says something else: give one")
        return self

    def check(self) -> None:
        """See Fields."""
        check_talk(self.messages)
        super().check()
        check_tools(self.callable_tools, self.tools)

    def sampling(self) -> dict[str, Any]:
        """See SamplingFields; without a limit an answer goes on to the end of the context."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super().sampling() | {"max_tokens": limit, "logprobs": logprobs}

    @property
    def salt(self) -> str:
        """See SamplingFields."""
        return salt_of(self.user, self.safety_identifier, self.prompt_cache_key, self.cache_salt)

    @once
    def callable_tools(self) -> Tools | None:
        """What may be called. Raises InvalidParams."""
        return read_tools(self.tools, self.tool_choice)


class TextRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool = False
    logprobs: NumTop | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _can_be_ranked(self) -> TextRequest:
        number = self.n or 1
        if self.best_of is not None and self.best_of < number:
            raise ValueError(f"best_of is {self.best_of}, n is {number}: give best_of at least n")
        if self.stream and self.best_of not in (None, number):
            raise ValueError("best_of: all must have ended before the best are known: leave it out, or stream")
        if self.echo and self.overflow not in (None, "error"):
            raise ValueError("echo shows all of the prompt, and overflow drops some of it: leave one out")
        if len(self.prompts) * (self.best_of or number) > MAX_WAITING:
            raise ValueError(f"prompt: more than {MAX_WAITING} texts to go on with: send fewer at a time")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or many."""
        return each_of(self.prompt)


def each_of(prompts: Prompts) -> list[str] | list[list[int]]:
    """One or many."""
    given: Any = prompts
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def check_talk(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidParams for messages that are none, and for roles that nobody has."""
    for index, message in enumerate(check_messages(messages)):
        if message["role"] not in ROLES:
            raise InvalidParams(f"messages[{index}].role is {message['role']!r:.80}: give one of {', '.join(ROLES)}")


def check_tools(chosen: Tools | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises InvalidParams for what is unknown in tools in OpenAI's shape, from which `chosen` has been read."""
    for index, tool in enumerate((tools or ()) if chosen else ()):
        function = tool["function"]
        for name in (*(set(tool) - {"type", "function"}), *(set(function) - _FUNCTION_KEYS)):
            raise InvalidParams(f"tools[{index}]: {name!r:.80} is not supported: leave it out")


def salt_of(*parts: str | None) -> str:
    """One salt of several; "" where there is none."""
    return "\0".join(part or "" for part in parts) if any(parts) else ""


def _token_id(text: str) -> int:
    if not re.fullmatch("[0-9]{1,10}", text):
        raise InvalidParams(f"logit_bias: {text!r:.40} is no token id: give whole numbers as keys")
    return int(text)

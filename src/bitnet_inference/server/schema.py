"""What requests may say. A field that is not here is refused by name, and so is one that cannot be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

MAX_CHOICES = 128


class StreamOptions(BaseModel):
    """`include_usage`: one more event before the end, which says what the request has cost."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class SamplingFields(BaseModel):
    """What chat and text requests have in common: OpenAI's fields, and SamplingParams' own as extensions."""

    model_config = ConfigDict(extra="forbid", strict=True)
    # Fields of SamplingParams that are passed on under their own names.
    PASSED: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "min_tokens", "ignore_eos", "stop_token_ids", "overflow",
    )  # fmt: skip

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    overflow: str | None = None
    user: str | None = None
    priority: int = 0

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for streams: set stream, or leave them out")
        return self

    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that were given; logit_bias by whole numbers."""
        given = {name: getattr(self, name) for name in self.PASSED if getattr(self, name) is not None}
        if self.stop is not None:
            given["stop"] = self.stop
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return given


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    # Accepted at the one value that is what happens anyway.
    store: Literal[False] | SkipJsonSchema[None] = None
    service_tier: Literal["auto", "default"] | SkipJsonSchema[None] = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _limits_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs: set logprobs to true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens is the old name of max_completion_tokens: give one of them")
        return self


class TextRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Literal[""] | SkipJsonSchema[None] = None


def _token_id(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"logit_bias: {text!r:.40} is no token id: give whole numbers as keys") from None


def field_of(place: tuple[Any, ...], problem: Mapping[str, Any]) -> tuple[str | None, str]:
    """The field that pydantic complains of, and one line about it."""
    names = [str(part) for part in place if part != "body"]
    field = ".".join(names) or None
    if problem["type"] == "extra_forbidden":
        return field, f"{field} is not supported: leave it out"
    if problem["type"] == "missing":
        return field, f"{field} is missing: give it"
    why = str(problem["msg"]).removeprefix("Value error, ")
    return field, f"{field}: {why}" if field else why

"""What goes wrong, with a status, in OpenAI's shape or in Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import Scope

from bitnet_inference.errors import (
    NO_THREADS,
    BitNetError,
    EngineError,
    Filtered,
    InvalidParams,
    NotFound,
    PromptTooLong,
    QueueFull,
    RequestError,
    Unsupported,
    is_no_thread,
)

MAX_MESSAGE, MAX_PARAM = 600, 100  # characters: errors quote requests, which may be huge
TOO_LONG = "context_length_exceeded"  # the code of a prompt that does not fit
# Some frameworks know by these words only that they shall shorten a conversation.
_TOO_LONG = f" ({TOO_LONG}: the prompt is too long, this model's maximum context length is exceeded)"
CLIENT_GONE = 499  # nginx's status for a client that has left


class Failure(Exception):
    """An answer that is an error: `status`, and what clients read. Long messages are cut."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """`details` are for Anthropic's clients."""
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        self.message += _TOO_LONG if code == TOO_LONG else ""
        super().__init__(self.message)
        self.status, self.param, self.code = status, param and param[:MAX_PARAM], code
        self.retry_after_s, self.details = retry_after_s, details

    @property
    def headers(self) -> dict[str, str]:
        """When to come again, and how to be let in."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @property
    def body(self) -> dict[str, Any]:
        """The answer's JSON, as OpenAI's API has it."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The answer's JSON, as Anthropic's API has it."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}}

    def body_for(self, scope: Scope) -> dict[str, Any]:
        """The answer's JSON in the shape of the API that is asked, by its path or by what Anthropic's clients send."""
        is_anthropic = f"{scope['path']}/".startswith("/v1/messages/")
        named = any(name == b"anthropic-version" for name, _ in scope["headers"])
        return self.anthropic_body if is_anthropic or named else self.body


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Kind(NamedTuple):
    error: type[BitNetError]
    status: int
    code: str | None


# The first that fits counts.
_KINDS = (
    _Kind(PromptTooLong, 400, TOO_LONG),
    _Kind(Filtered, 400, "content_filter"),
    _Kind(InvalidParams, 400, None),
    _Kind(RequestError, 400, None),
    _Kind(Unsupported, 400, "unsupported"),
    _Kind(NotFound, 404, "model_not_found"),
    _Kind(QueueFull, 429, "queue_full"),
    _Kind(EngineError, 503, "unavailable"),
    _Kind(BitNetError, 500, None),
)


def failure_of(error: Exception) -> Failure:
    """How an error is told to a client. What is no error of ours is told as nothing but a defect."""
    if isinstance(error, Failure):
        return error
    for kind in _KINDS:
        if isinstance(error, kind.error):
            retry_after_s = 1 if kind.status in (429, 503) else None
            return Failure(kind.status, str(error), code=kind.code, retry_after_s=retry_after_s)
    if is_no_thread(error):
        return Failure(503, NO_THREADS, code="unavailable", retry_after_s=1)
    return Failure(500, "the server has a defect: its log says more", code="internal_error")

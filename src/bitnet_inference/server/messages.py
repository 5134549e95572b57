"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from bitnet_inference.engine.request import Usage
from bitnet_inference.errors import InvalidParams
from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.choices import finished, output_of
from bitnet_inference.server.document import describe
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.message_schema import CountRequest, MessagesRequest
from bitnet_inference.server.replies import Reply, num_prompt_tokens, open_talk, reply_style
from bitnet_inference.server.sse import HOLE, dumps, event, template
from bitnet_inference.stream import Generation, Stream
from bitnet_inference.tools import ToolCall
from bitnet_inference.written_calls import CallPart

_REASONS = {"length": "max_tokens", "timeout": "max_tokens", "filtered": "refusal"}


def add_messages(app: FastAPI, answers: Answers) -> None:
    """The routes."""

    @app.post("/v1/messages", **describe(MessagesRequest, "Answer a conversation (Anthropic's API).", streams=True))
    async def messages(request: Request) -> Response:
        body = await answers.read(request, MessagesRequest)
        return await answers.answer(request, body, open_message, streams=body.stream)

    @app.post("/v1/messages/count_tokens", **describe(CountRequest, "How many tokens a conversation has."))
    async def count(request: Request) -> Response:
        return await answers.compute(request, await answers.read(request, CountRequest), _count)


class MessageAnswer:
    """The answer to one request, in Anthropic's shapes."""

    def __init__(self, asked: Asked, body: MessagesRequest, stream: Stream) -> None:
        wish = body.tool_choice
        one_call = wish is not None and wish.disable_parallel_tool_use
        self.streams, self._stream, self._reply = (
            [stream],
            stream,
            Reply(reply_style(asked.llm), body.talk.tools, one_call),
        )
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": asked.name,
        }

    def failed(self, failure: Failure) -> bytes:
        """See Answer."""
        return _event(failure.anthropic_body)

    async def finished(self) -> None:
        """See Answer."""
        await finished([self._stream])

    def whole(self) -> dict[str, Any]:
        """See Answer."""
        output = output_of(self._stream)
        self._reply.read(output.text)
        text, calls = self._reply.text, self._reply.calls
        content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        content += [_block(call) | {"input": json.loads(call["function"]["arguments"])} for call in calls]
        return self._head | {"content": content, **_end(output, self._reply), "usage": _usage(output.usage)}

    async def events(self) -> AsyncIterator[bytes]:
        """See Answer."""
        pieces = self._stream.in_bulk()
        piece = await anext(pieces, None)  # by then it is known what of the prompt was in the cache
        usage = _usage(self._stream.request.usage()) | {"output_tokens": 0}
        begun: dict[str, Any] = self._head | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event({"type": "message_start", "message": begun})
        is_open = False
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": HOLE}}
        before, behind = template(delta, "content_block_delta")
        while piece is not None:
            if text := self._reply.push(piece.text):
                yield (b"" if is_open else _start(0, {"type": "text", "text": ""})) + before + dumps(text) + behind
                is_open = True
            for part in self._reply.parts():
                yield _called(part.number, part)
            piece = await anext(pieces, None)
        if rest := self._reply.end():
            yield (b"" if is_open else _start(0, {"type": "text", "text": ""})) + before + dumps(rest) + behind
            is_open = True
        if is_open:
            yield _event({"type": "content_block_stop", "index": 0})
        for part in self._reply.parts():
            yield _called(part.number + int(is_open), part)
        if self._reply.cut is not None:
            yield _event({"type": "content_block_stop", "index": len(self._reply.calls)})
        output = output_of(self._stream)
        yield _event({"type": "message_delta", "delta": _end(output, self._reply), "usage": _usage(output.usage)})
        yield _event({"type": "message_stop"})


def open_message(asked: Asked, body: MessagesRequest) -> MessageAnswer:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    if body.messages[-1].role == "assistant":
        raise InvalidParams("messages: the last one is the assistant's, and no answer can go on with it: leave it out")
    talk = replace(body.talk, sampling=body.sampling())
    return MessageAnswer(asked, body, open_talk(asked.llm, talk, asked.terms)[0])


def _count(asked: Asked, body: CountRequest) -> dict[str, Any]:
    return {"input_tokens": num_prompt_tokens(asked.llm, body.talk)}


def _end(output: Generation, reply: Reply) -> dict[str, Any]:
    reason, stopped_by = _REASONS.get(output.finish_reason, "end_turn"), None
    if reply.is_called:
        reason = "tool_use"
    elif output.finish_reason == "stop" and isinstance(output.stopped_by, str):
        reason, stopped_by = "stop_sequence", output.stopped_by
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens of the prompt that were in the cache are counted apart."""
    cached = usage.num_cached_tokens
    return {
        "input_tokens": usage.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.num_output_tokens,
    }


def _block(call: ToolCall) -> dict[str, Any]:
    identity = call["id"].replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": identity, "name": call["function"]["name"], "input": {}}


def _called(index: int, part: CallPart) -> bytes:
    delta = {"type": "input_json_delta", "partial_json": part.piece["function"]["arguments"]}
    begun = _start(index, _block(part.piece)) if part.is_first else b""
    ended = b"" if part.whole is None else _event({"type": "content_block_stop", "index": index})
    return begun + _event({"type": "content_block_delta", "index": index, "delta": delta}) + ended


def _start(index: int, block: dict[str, Any]) -> bytes:
    return _event({"type": "content_block_start", "index": index, "content_block": block})


def _event(value: dict[str, Any]) -> bytes:
    return event(value, value["type"])

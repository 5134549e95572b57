"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.choices import RunningCosts, finish_reason, finished, output_of, parts, usage
from bitnet_inference.server.document import describe
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.replies import Reply, Talk, open_talk, reply_style
from bitnet_inference.server.schema import ChatRequest
from bitnet_inference.server.sse import DONE, HOLE, dumps, event, template
from bitnet_inference.server.token_texts import chat_logprobs
from bitnet_inference.stream import Piece, Stream


def add_chat(app: FastAPI, answers: Answers) -> None:
    """The route."""

    @app.post("/v1/chat/completions", **describe(ChatRequest, "Answer a conversation.", streams=True))
    async def chat(request: Request) -> Response:
        body = await answers.read(request, ChatRequest)
        return await answers.answer(request, body, open_chat, streams=body.stream)


class ChatAnswer:
    """The answer to one request: its streams, in OpenAI's shapes."""

    def __init__(self, asked: Asked, body: ChatRequest, streams: Sequence[Stream]) -> None:
        self._tokenizer, self.streams = asked.llm.tokenizer, streams
        self._costs = RunningCosts(streams, body.stream_options)
        style = reply_style(asked.llm)
        one_call = body.parallel_tool_calls is False
        self._replies = [Reply(style, body.callable_tools, one_call) for _ in streams]
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": asked.name,
            "system_fingerprint": asked.fingerprint,
        }
        self._chunk_head = self._head | {"object": "chat.completion.chunk"}

    def failed(self, failure: Failure) -> bytes:
        """See Answer."""
        return event(failure.body)

    async def finished(self) -> None:
        """See Answer."""
        await finished(self.streams)

    def whole(self) -> dict[str, Any]:
        """See Answer."""
        found = [output_of(stream) for stream in self.streams]
        return self._head | {"choices": [self._choice(index) for index in range(len(found))], "usage": usage(found)}

    async def events(self) -> AsyncIterator[bytes]:
        """See Answer."""
        texts = [self._template(index) for index in range(len(self.streams))]
        for index in range(len(self.streams)):
            yield self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
        async for part in parts(self.streams):
            self._costs.note(part)
            if part.piece is None:
                for chunk in self._last(part.index):
                    yield chunk
                continue
            text = self._replies[part.index].push(part.piece.text)
            if part.piece.logprobs is not None:
                yield self._scored(part.index, text, part.piece)
            elif text:
                before, behind = self._template(part.index) if self._costs.are_shown else texts[part.index]
                yield before + dumps(text) + behind
            if called := self._called(part.index):
                yield called
        if self._costs.are_wanted:
            cost = usage([output_of(stream) for stream in self.streams])
            yield event(self._chunk_head | {"choices": [], "usage": cost})
        yield DONE

    def _choice(self, index: int) -> dict[str, Any]:
        output = output_of(self.streams[index])
        reply = self._replies[index]
        reply.read(output.text)
        content = reply.text or (None if reply.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.calls:
            message["tool_calls"] = reply.calls
        entries = None if output.logprobs is None else self._logprobs(output.token_ids, output.logprobs)
        reason = "tool_calls" if reply.is_called else finish_reason(output)
        return {"index": index, "message": message, "logprobs": entries, "finish_reason": reason}

    def _template(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "delta": {"content": HOLE}, "logprobs": None, "finish_reason": None}
        return template(self._chunk_head | self._costs.field(index) | {"choices": [choice]})

    def _scored(self, index: int, text: str, piece: Piece) -> bytes:
        return self._chunk(index, {"content": text}, logprobs=self._logprobs(piece.token_ids, piece.logprobs or []))

    def _called(self, index: int) -> bytes:
        deltas = [
            {"index": part.number, **part.piece}
            if part.is_first
            else {"index": part.number, "function": {"arguments": part.piece["function"]["arguments"]}}
            for part in self._replies[index].parts()
        ]
        return self._chunk(index, {"tool_calls": deltas}) if deltas else b""

    def _last(self, index: int) -> Iterator[bytes]:
        reply = self._replies[index]
        if rest := reply.end():
            yield self._chunk(index, {"content": rest})
        if called := self._called(index):
            yield called
        yield self._chunk(index, {}, "tool_calls" if reply.is_called else finish_reason(output_of(self.streams[index])))

    def _chunk(self, index: int, delta: Mapping[str, Any], reason: str | None = None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event(self._chunk_head | self._costs.field(index) | {"choices": [choice]})

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": chat_logprobs(self._tokenizer, token_ids, entries), "refusal": None}


def open_chat(asked: Asked, body: ChatRequest) -> ChatAnswer:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    talk = Talk(
        messages=body.messages,
        sampling=body.sampling(),
        grammar=body.grammar,
        shown_tools=body.tools,
        tools=body.callable_tools,
        variables=body.chat_template_kwargs,
        no_thinking=body.reasoning_effort is not None,  # which can be "none" alone
        num_choices=body.n or 1,
    )
    return ChatAnswer(asked, body, open_talk(asked.llm, talk, asked.terms))

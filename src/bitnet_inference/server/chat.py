"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitnet_inference.completions import read_form
from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import TermOptions
from bitnet_inference.server.choices import Part, finish_reason, output_of, outputs, parts, usage
from bitnet_inference.server.schema import ChatRequest
from bitnet_inference.server.sse import DONE, event
from bitnet_inference.stream import Generation, Piece, Stream
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.tools import HeldText, ToolCall, Tools, call_style


@dataclass
class ChatAnswer:
    """The answer to one request: its streams, in OpenAI's shapes."""

    llm: LLM
    streams: Sequence[Stream]
    tools: Tools | None
    model: str
    wants_usage: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._style = call_style(self.llm.tokenizer.templates)
        self._held = [HeldText(self._style) for _ in self.streams]

    async def whole(self) -> dict[str, Any]:
        """All of it, when it is there."""
        found = await outputs(self.streams)
        choices = [self._choice(index, output) for index, output in enumerate(found)]
        return self._head("chat.completion") | {"choices": choices, "usage": usage(found)}

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece."""
        for index in range(len(self.streams)):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for part in parts(self.streams):
            for chunk in self._part(part):
                yield chunk
        if self.wants_usage:
            cost = usage([output_of(stream) for stream in self.streams])
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": cost})
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, index: int, output: Generation) -> dict[str, Any]:
        content, calls = (output.text, []) if self.tools is None else self.tools.find_calls(output.text, self._style)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        entries = None if output.logprobs is None else self._logprobs(output.token_ids, output.logprobs)
        reason = "tool_calls" if calls else finish_reason(output)
        return {"index": index, "message": message, "logprobs": entries, "finish_reason": reason}

    def _part(self, part: Part) -> list[bytes]:
        if part.piece is None:
            return self._last(part.index)
        text = part.piece.text if self.tools is None else self._held[part.index].push(part.piece.text)
        if not text and part.piece.logprobs is None:
            return []
        return [self._chunk(part.index, {"content": text}, piece=part.piece)]

    def _last(self, index: int) -> list[bytes]:
        reason, chunks = finish_reason(output_of(self.streams[index])), []
        held = self._held[index]
        calls: list[ToolCall] = []
        if self.tools is not None:
            _, calls = self.tools.find_calls(held.text, self._style)
        if calls:
            deltas = [{"index": number, **call} for number, call in enumerate(calls)]
            chunks.append(self._chunk(index, {"tool_calls": deltas}))
        elif rest := held.rest():
            chunks.append(self._chunk(index, {"content": rest}))
        return [*chunks, self._chunk(index, {}, "tool_calls" if calls else reason)]

    def _chunk(
        self, index: int, delta: Mapping[str, Any], reason: str | None = None, piece: Piece | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if piece is not None and piece.logprobs is not None:
            choice["logprobs"] = self._logprobs(piece.token_ids, piece.logprobs)
        return event(self._head("chat.completion.chunk") | {"choices": [choice]})

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokenizer = self.llm.tokenizer
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            top = [_entry(tokenizer, each, logprob) for each, logprob in entry.top]
            content.append(_entry(tokenizer, token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


def open_chat(llm: LLM, body: ChatRequest, model: str, terms: TermOptions) -> ChatAnswer:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    grammar, tools = read_form(call_style(llm.tokenizer.templates), body.response_format, body.tools, body.tool_choice)
    params = chat_params(llm.default_params, body)
    streams = llm.stream_chat_choices(
        body.messages,
        body.n or 1,
        replace(params, grammar=grammar),
        tools=body.tools if tools else None,
        **terms,
    )
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    return ChatAnswer(llm, streams, tools, model, wants_usage)


def chat_params(defaults: SamplingParams, body: ChatRequest) -> SamplingParams:
    """The model's own parameters, but for what the request says. Raises InvalidParams."""
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return replace(defaults, **body.sampling(), max_tokens=limit, logprobs=logprobs)


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.piece(token_id, skip_special_tokens=False)
    written = piece.encode() if isinstance(piece, str) else piece or b""
    return {"token": written.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(written)}

"""One answer of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bitnet_inference.server.answers import Asked
from bitnet_inference.server.choices import finished, output_of
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.replies import Reply, Talk, open_talk, reply_style
from bitnet_inference.server.response_items import (
    call_item,
    ended,
    input_items,
    message_item,
    response_head,
    said,
    text_part,
)
from bitnet_inference.server.response_schema import InputTokensRequest, ResponsesRequest
from bitnet_inference.server.sse import HOLE, dumps, event, template
from bitnet_inference.server.stored import StoredResponse
from bitnet_inference.server.token_texts import chat_logprobs
from bitnet_inference.stream import Piece, Stream
from bitnet_inference.written_calls import CallPart

Messages = Sequence[Mapping[str, Any]]


class ResponseAnswer:
    """The answer to one request. `keep` is called once with what is to be stored of it, in the event loop's thread."""

    def __init__(
        self,
        asked: Asked,
        body: ResponsesRequest,
        messages: Messages,
        stream: Stream,
        owner: str,
        keep: Callable[[StoredResponse], None],
    ) -> None:
        """`messages` are the conversation without instructions."""
        self._tokenizer, self._body, self._messages, self._owner = asked.llm.tokenizer, body, messages, owner
        self.streams, self._stream, self._keep = [stream], stream, keep
        one_call = body.parallel_tool_calls is False
        self._reply = Reply(reply_style(asked.llm), body.callable_tools, one_call)
        self._response = response_head(body, asked.name, int(time.time()), stream.request.params)
        self._message_id = self._response["id"].replace("resp_", "msg_", 1)
        self._input_items = list(input_items(body))  # once: those without an id get one
        self._number = 0

    def failed(self, failure: Failure) -> bytes:
        """See Answer."""
        return self._event("response.failed", response=self._now("failed", failure))

    def stored(self, status: str, failure: Failure | None = None) -> StoredResponse:
        """The response so far, in this state."""
        return self._stored(self._now(status, failure))

    def _now(self, status: str, failure: Failure | None = None) -> dict[str, Any]:
        error = {} if failure is None else {"error": {"code": "server_error", "message": failure.message}}
        return self._response | {"status": status} | error

    def _stored(self, response: dict[str, Any]) -> StoredResponse:
        messages = [*self._messages, *said(response["output"])]
        return StoredResponse(response, self._input_items, messages, self._owner)

    async def finished(self) -> None:
        """See Answer."""
        await finished([self._stream])
        await self._end(output_of(self._stream).text)

    def whole(self) -> dict[str, Any]:
        """See Answer."""
        return self._response

    async def events(self) -> AsyncIterator[bytes]:
        """See Answer."""
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)
        is_open, before, behind = False, *self._template()
        held: list[Piece] = []  # whose log-probabilities are told with the text; a call has none
        async for piece in self._stream.in_bulk():
            text = self._reply.push(piece.text)
            held += [] if piece.logprobs is None else [piece]
            for part in self._reply.parts():
                yield self._called(part.number, part)
            if not text:
                continue
            if not is_open:
                is_open = True
                yield self._opened()
            if not held:
                yield before + dumps(text) + behind + b"%d}\n\n" % self._number
                self._number += 1
            else:
                yield self._delta(text, held)
            held = []
        rest = self._reply.end()
        await self._end()
        for each in self._last(rest, is_open, held):
            yield each

    async def _end(self, unread: str | None = None) -> None:
        """Make the response whole, and keep it. Takes its time where it is long: in a thread."""
        response, kept = await asyncio.to_thread(self._make_whole, unread)
        self._response = response  # now, for the wait may be cancelled
        if kept is not None:
            self._keep(kept)

    def _make_whole(self, unread: str | None) -> tuple[dict[str, Any], StoredResponse | None]:
        """The response with its output, and what is to be stored of it."""
        if unread is not None:
            self._reply.read(unread)
        output = output_of(self._stream)
        text, calls, end = self._reply.text, self._reply.calls, ended(output)
        logprobs = chat_logprobs(self._tokenizer, output.token_ids, output.logprobs or []) if output.logprobs else []
        items = [call_item(call) for call in calls]
        if self._reply.cut is not None:
            items.append(call_item(self._reply.cut, "incomplete"))
        if text or not items:
            items.insert(0, message_item(self._message_id, [text_part(text, logprobs)], end["status"]))
        response = self._response | end | {"output": items}
        if end["status"] == "completed":
            response["completed_at"] = int(time.time())
        return response, self._stored(response) if self._body.store else None

    def _last(self, rest: str, is_open: bool, held: Sequence[Piece]) -> Iterator[bytes]:
        first = self._response["output"][0] if self._response["output"] else None
        if has_message := first is not None and first["type"] == "message":
            yield b"" if is_open else self._opened()
            yield self._delta(rest, held) if rest or held else b""
            yield from self._closed(first)
        for part in self._reply.parts():
            yield self._called(part.number + int(has_message), part)
        if self._reply.cut is not None:
            yield self._call_ended(len(self._reply.calls), self._response["output"][-1])
        yield self._event(f"response.{self._response['status']}", response=self._response)

    def _template(self) -> tuple[bytes, bytes]:
        """A delta's bytes before its text, and behind it up to its number."""
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        value = {"type": "response.output_text.delta", **place, "logprobs": [], "delta": HOLE, "sequence_number": 0}
        before, behind = template(value, value["type"])
        return before, behind.removesuffix(b"0}\n\n")

    def _delta(self, text: str, pieces: Sequence[Piece]) -> bytes:
        found = (chat_logprobs(self._tokenizer, each.token_ids, each.logprobs or ()) for each in pieces)
        logprobs = [entry for entries in found for entry in entries]
        return self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _opened(self) -> bytes:
        item = message_item(self._message_id, [], "in_progress")
        added = self._event("response.output_item.added", output_index=0, item=item)
        return added + self._text_event("response.content_part.added", part=text_part(""))

    def _closed(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        (part,) = item["content"]
        yield self._text_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._text_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def _called(self, index: int, part: CallPart) -> bytes:
        item, place = call_item(part.piece), {"output_index": index}
        arguments, told = item["arguments"], b""
        if part.is_first:
            begun = call_item(part.piece, "in_progress") | {"arguments": ""}
            told += self._event("response.output_item.added", **place, item=begun)
        place["item_id"] = item["id"]
        told += self._event("response.function_call_arguments.delta", **place, delta=arguments)
        return told if part.whole is None else told + self._call_ended(index, call_item(part.whole))

    def _call_ended(self, index: int, item: Mapping[str, Any]) -> bytes:
        named = {"item_id": item["id"], "name": item["name"], "arguments": item["arguments"]}
        done = self._event("response.function_call_arguments.done", output_index=index, **named)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        value = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return event(value, kind)


def open_response(
    asked: Asked, body: ResponsesRequest, *, previous: Messages, owner: str, keep: Callable[[StoredResponse], None]
) -> ResponseAnswer:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    messages = [*previous, *body.messages]
    talk = replace(talk_of(body, messages), sampling=body.sampling())
    return ResponseAnswer(asked, body, messages, open_talk(asked.llm, talk, asked.terms)[0], owner, keep)


def talk_of(body: InputTokensRequest, messages: Messages) -> Talk:
    """A conversation behind the instructions, which are not kept with it."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    return Talk(
        messages=[*system, *messages],
        grammar=body.grammar,
        shown_tools=body.nested_tools,
        tools=body.callable_tools,
        no_thinking=body.reasoning is not None and body.reasoning.effort is not None,
    )

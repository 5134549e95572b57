"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.errors import InvalidParams
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import TermOptions
from bitnet_inference.ranked import cancelling
from bitnet_inference.server.choices import Part, finish_reason, output_of, outputs, parts, usage
from bitnet_inference.server.schema import TextRequest
from bitnet_inference.server.sse import DONE, event
from bitnet_inference.stream import Generation, Stream

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass
class TextAnswer:
    """The answer to one request: `choices` streams for each prompt, in OpenAI's shapes."""

    llm: LLM
    streams: Sequence[Stream]
    prompts: Sequence[Sequence[int]]
    body: TextRequest
    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        """All of it, when it is there."""
        found = await outputs(self.streams)
        choices = [self._choice(index, output) for index, output in enumerate(found)]
        return self._head() | {"choices": choices, "usage": self._usage(found)}

    async def events(self) -> AsyncIterator[bytes]:
        """Piece by piece."""
        offsets = [0] * len(self.streams)
        for index in range(len(self.streams) if self.body.echo else 0):
            text = self._echoed(index)
            offsets[index] = len(text)
            yield self._chunk(index, text, None, None)
        async for part in parts(self.streams):
            yield self._part(part, offsets)
        if self.body.stream_options is not None and self.body.stream_options.include_usage:
            cost = self._usage([output_of(stream) for stream in self.streams])
            yield event(self._head() | {"choices": [], "usage": cost})
        yield DONE

    def _part(self, part: Part, offsets: list[int]) -> bytes:
        if part.piece is None:
            return self._chunk(part.index, "", finish_reason(output_of(self.streams[part.index])), None)
        entries = None
        if part.piece.logprobs is not None:
            entries = self._logprobs(part.piece.token_ids, part.piece.logprobs, offsets[part.index])
        offsets[part.index] += len(part.piece.text)
        return self._chunk(part.index, part.piece.text, None, entries)

    def _chunk(self, index: int, text: str, reason: str | None, entries: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": entries, "finish_reason": reason}
        return event(self._head() | {"choices": [choice]})

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _prompt(self, index: int) -> Sequence[int]:
        return self.prompts[index // (self.body.n or 1)]

    def _echoed(self, index: int) -> str:
        return self.llm.tokenizer.decode(self._prompt(index), skip_special_tokens=False)

    def _choice(self, index: int, output: Generation) -> dict[str, Any]:
        text, entries = output.text, None
        if output.logprobs is not None:
            ids, found = list(output.token_ids), list(output.logprobs)
            if self.body.echo:
                ids, found = [*self._prompt(index), *ids], [*(output.prompt_logprobs or []), *found]  # type: ignore[list-item]
            entries = self._logprobs(ids, found, 0)
        if self.body.echo:
            text = self._echoed(index) + text
        return {"index": index, "text": text, "logprobs": entries, "finish_reason": finish_reason(output)}

    def _logprobs(self, ids: Sequence[int], found: Sequence[TokenLogprobs | None], offset: int) -> dict[str, Any]:
        tokens = [self.llm.tokenizer.decode([each], skip_special_tokens=False) for each in ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        top = [None if entry is None else self._top(entry) for entry in found]
        logprobs = [None if entry is None else max(entry.logprob, -9999.0) for entry in found]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        for token_id, logprob in entry.top:  # of several that look alike, the likeliest
            best.setdefault(self.llm.tokenizer.decode([token_id], skip_special_tokens=False), max(logprob, -9999.0))
        return best

    def _usage(self, found: Sequence[Generation]) -> dict[str, Any]:
        number = self.body.n or 1
        each = [usage(found[start : start + number]) for start in range(0, len(found), number)]
        total = {
            name: sum(one[name] for one in each) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
        }
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
        return total | {"prompt_tokens_details": {"cached_tokens": cached}}


def open_text(llm: LLM, body: TextRequest, model: str, terms: TermOptions) -> TextAnswer:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    if body.best_of not in (None, body.n or 1):
        raise InvalidParams(f"best_of is {body.best_of}, n {body.n or 1}: only n choices are made: leave best_of out")
    params = replace(
        llm.default_params,
        **body.sampling(),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = [_encode(llm, prompt) for prompt in _prompts(body.prompt)]
    streams: list[Stream] = []
    with cancelling(streams):
        for prompt in prompts:
            streams += llm.stream_choices(prompt, body.n or 1, params, **terms)
    return TextAnswer(llm, streams, prompts, body, model)


def _prompts(given: Any) -> list[Any]:
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    if not given:
        raise InvalidParams("prompt is empty: give some text")
    return [given] if is_one else list(given)


def _encode(llm: LLM, prompt: Any) -> list[int]:
    if isinstance(prompt, str) and not prompt:
        raise InvalidParams("prompt is empty: give some text")
    return llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from bitnet_inference.errors import InvalidParams
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import encode_each, placed
from bitnet_inference.ranked import best_texts, cancelling
from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.choices import Part, RunningCosts, finish_reason, finished, output_of, parts, usage_of_all
from bitnet_inference.server.document import describe
from bitnet_inference.server.failures import Failure
from bitnet_inference.server.replies import sampling
from bitnet_inference.server.schema import TextRequest
from bitnet_inference.server.sse import DONE, HOLE, dumps, event, template
from bitnet_inference.server.token_texts import TextLogprobs
from bitnet_inference.stream import Generation, Stream

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def add_texts(app: FastAPI, answers: Answers) -> None:
    """The route."""

    @app.post("/v1/completions", **describe(TextRequest, "Continue texts.", streams=True))
    async def complete(request: Request) -> Response:
        body = await answers.read(request, TextRequest)
        return await answers.answer(request, body, open_text, streams=body.stream)


class Continued:
    """A prompt: its ids, and how many of them in front the tokenizer has added, which an echo does not show.

    Special tokens that a text spells count, as with OpenAI, vLLM and llama.cpp: who renders a conversation needs them.
    """

    def __init__(self, llm: LLM, prompt: str | list[int]) -> None:
        """Raises InvalidParams."""
        self._tokenizer, self.num_hidden = llm.tokenizer, 0
        self.ids = self._tokenizer.encode(prompt, parse_special=True) if isinstance(prompt, str) else prompt
        if not self.ids:  # an empty text is a prompt where the tokenizer begins it
            raise InvalidParams("prompt is empty: give some text")
        if isinstance(prompt, str):
            before = self._tokenizer.affixes[0]
            is_spelt = prompt.startswith(self._tokenizer.decode(before, skip_special_tokens=False))
            self.num_hidden = 0 if is_spelt or self.ids[: len(before)] != before else len(before)

    @property
    def text(self) -> str:
        """What an echo shows."""
        return self._tokenizer.decode(self.ids[self.num_hidden :], skip_special_tokens=False)


class TextAnswer:
    """The answer to one request: so many streams for each prompt, in OpenAI's shapes."""

    def __init__(self, asked: Asked, body: TextRequest, prompts: Sequence[Continued], streams: list[Stream]) -> None:
        self._tokenizer, self._body, self._prompts, self.streams = asked.llm.tokenizer, body, prompts, streams
        self._num_choices, self._num_texts = body.n or 1, body.best_of or body.n or 1
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.name,
            "system_fingerprint": asked.fingerprint,
        }
        self._costs = RunningCosts(streams, body.stream_options)

    def failed(self, failure: Failure) -> bytes:
        """See Answer."""
        return event(failure.body)

    async def finished(self) -> None:
        """See Answer."""
        await finished(self.streams)

    def whole(self) -> dict[str, Any]:
        """See Answer."""
        groups = self._groups()
        best = [
            group if self._num_texts == self._num_choices else best_texts(group, self._num_choices) for group in groups
        ]
        chosen = [(prompt, text) for prompt, texts in zip(self._prompts, best, strict=True) for text in texts]
        choices = [self._choice(index, prompt, text) for index, (prompt, text) in enumerate(chosen)]
        return self._head | {"choices": choices, "usage": usage_of_all(groups)}

    async def events(self) -> AsyncIterator[bytes]:
        """See Answer."""
        texts = [self._template(index) for index in range(len(self.streams))]
        scores = [TextLogprobs(self._tokenizer) for _ in self.streams]
        waiting = set(range(len(self.streams))) if self._body.echo else set()
        for index in sorted(waiting) if self._body.logprobs is None else ():
            waiting.remove(index)
            yield self._chunk(index, self._prompt(index).text, None)
        async for part in parts(self.streams):
            self._costs.note(part)
            if part.index in waiting:  # now its log-probabilities are there
                waiting.remove(part.index)
                yield self._scored_prompt(part.index, scores[part.index])
            if part.piece is not None and part.piece.logprobs is None:
                before, behind = self._template(part.index) if self._costs.are_shown else texts[part.index]
                yield before + dumps(part.piece.text) + behind
            else:
                yield self._part(part, scores[part.index])
        if self._costs.are_wanted:
            yield event(self._head | {"choices": [], "usage": usage_of_all(self._groups())})
        yield DONE

    def _groups(self) -> list[list[Generation]]:
        found = [output_of(stream) for stream in self.streams]
        return [found[start : start + self._num_texts] for start in range(0, len(found), self._num_texts)]

    def _template(self, index: int) -> tuple[bytes, bytes]:
        choice = {"index": index, "text": HOLE, "logprobs": None, "finish_reason": None}
        return template(self._head | self._costs.field(index) | {"choices": [choice]})

    def _part(self, part: Part, scores: TextLogprobs) -> bytes:
        if part.piece is None:
            output = output_of(self.streams[part.index])
            entries = self._of_end(scores, output) if self._body.logprobs is not None else None
            return self._chunk(part.index, "", entries, finish_reason(output))
        entries = scores.next(part.piece.token_ids, part.piece.logprobs or [])
        return self._chunk(part.index, part.piece.text, entries)

    def _prompt(self, index: int) -> Continued:
        return self._prompts[index // self._num_texts]

    def _scored_prompt(self, index: int, scores: TextLogprobs) -> bytes:
        prompt = self._prompt(index)
        found = self.streams[index].request.prompt_logprobs or []
        return self._chunk(index, prompt.text, scores.of_prompt(prompt.ids, prompt.num_hidden, found))

    def _chunk(self, index: int, text: str, entries: Any, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": entries, "finish_reason": reason}
        return event(self._head | self._costs.field(index) | {"choices": [choice]})

    def _choice(self, index: int, prompt: Continued, output: Generation) -> dict[str, Any]:
        text = prompt.text + output.text if self._body.echo else output.text
        entries = self._logprobs(prompt, output) if self._body.logprobs is not None else None
        return {"index": index, "text": text, "logprobs": entries, "finish_reason": finish_reason(output)}

    def _logprobs(self, prompt: Continued, output: Generation) -> dict[str, Any]:
        scores, parts = TextLogprobs(self._tokenizer), []
        if self._body.echo:
            parts.append(scores.of_prompt(prompt.ids, prompt.num_hidden, output.prompt_logprobs or []))
        parts.append(scores.next(output.token_ids, output.logprobs or []))
        if (of_end := self._of_end(scores, output)) is not None:
            parts.append(of_end)
        return {name: [each for part in parts for each in part[name]] for name in parts[0]}

    def _of_end(self, scores: TextLogprobs, output: Generation) -> dict[str, Any] | None:
        """An end token is no part of the text, but has its log-probability, as in OpenAI's API."""
        if output.end_logprobs is None or not isinstance(output.stopped_by, int):
            return None
        return scores.next([output.stopped_by], [output.end_logprobs])


def open_text(asked: Asked, body: TextRequest) -> TextAnswer:
    """Begin to answer. Raises InvalidParams and all else that is wrong with the request."""
    llm, number = asked.llm, body.best_of or body.n or 1
    ranks = number != (body.n or 1)
    given = {"max_tokens": DEFAULT_MAX_TOKENS} | body.sampling()
    given["logprobs"] = 0 if ranks and body.logprobs is None else body.logprobs
    given["prompt_logprobs"] = body.logprobs if body.echo else None
    params = sampling(llm.default_params, given, body.grammar)
    prompts = list(encode_each(body.prompts, lambda prompt: Continued(llm, prompt), "prompt"))
    streams: list[Stream] = []
    with cancelling(streams):
        for index, prompt in enumerate(prompts):
            with placed(index, len(prompts), "prompt"):
                streams += llm.stream_choices(prompt.ids, number, params, **asked.terms)
    return TextAnswer(asked, body, prompts, streams)

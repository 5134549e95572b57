"""From a request to its answer, whole or in events; the model stays for as long as that takes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from bitnet_inference.errors import BitNetError, FormatError, OutOfMemory
from bitnet_inference.llm import LLM
from bitnet_inference.prompts import TermOptions
from bitnet_inference.server.bodies import named, read_body, renamed
from bitnet_inference.server.connected import while_connected
from bitnet_inference.server.failures import TOO_LONG, Failure
from bitnet_inference.server.fingerprint import Fingerprints
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.journal import NOTES
from bitnet_inference.server.schema import Fields
from bitnet_inference.server.sse import EventResponse, dumps, json_response
from bitnet_inference.server.terms import terms_of
from bitnet_inference.stream import Stream

MAX_COMPUTING = 32  # that wait in threads for vectors at a time, so that some are left for others

Body = TypeVar("Body", bound=Fields)
Result = TypeVar("Result")


class Answer(Protocol):
    """What a request is answered with: in one piece, or in events."""

    @property
    def streams(self) -> Sequence[Stream]:
        """All of its choices. The answer ends soon when they are cancelled."""

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, up to the last one."""

    def failed(self, failure: Failure) -> bytes:
        """The event that ends it where something has gone wrong: it is too late to be a status."""

    async def finished(self) -> None:
        """Wait for all of it. Raises what has gone wrong."""

    def whole(self) -> dict[str, Any]:
        """The JSON object, once it has finished. Takes its time where it is long."""


Given = TypeVar("Given", bound=Answer)


@dataclass(frozen=True)
class Asked:
    """Whom a request asks, and on which terms: the model, the name that it is known by, what its bits depend on.

    `gone` is set when the client has left, for work that looks there.
    """

    llm: LLM
    name: str
    fingerprint: str
    terms: TermOptions
    gone: threading.Event


class Answers:
    """Answers requests with the models that a server offers."""

    def __init__(self, served: ServedModels) -> None:
        self.served, self._fingerprints = served, Fingerprints()
        self._computing = asyncio.Semaphore(MAX_COMPUTING)

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request; the model that it names is known. Raises Failure."""
        body = await read_body(self.served, request, kind)
        self.served.path(body.model)
        return body

    async def answer(
        self,
        request: Request,
        body: Body,
        begin: Callable[[Asked, Body], Answer],
        *,
        streams: bool,
    ) -> Response:
        """Begin an answer, in a thread, and send it: whole, or in events."""
        async with AsyncExitStack() as held:
            given = await self.open(held, request, body, begin)
            request.scope.get(NOTES, {}).update(streams=given.streams)
            if streams:
                return EventResponse(given.events(), held.pop_all(), given.failed)
            await while_connected(request.receive, given.finished())
            return json_response(await self.served.in_thread(lambda: dumps(given.whole())))

    async def open(
        self, held: AsyncExitStack, request: Request, body: Body, begin: Callable[[Asked, Body], Given]
    ) -> Given:
        """Begin an answer, which ends when `held` does, and so does the use of its model. Raises Failure."""
        terms = terms_of(request, body)
        llm = await self.used(held, request, body.model)
        given: Given = await self.served.in_thread(self._begin, llm, terms, body, begin, threading.Event())
        held.callback(_cancel, given)
        request.scope.get(NOTES, {}).update(model=body.model or self.served.names[0])
        return given

    async def used(self, held: AsyncExitStack, request: Request, model: str) -> LLM:
        """A model, for as long as `held` lasts. Its load may take minutes, and nobody waits whose client has left."""
        return await while_connected(request.receive, held.enter_async_context(self.served.use(model)))

    async def compute(self, request: Request, body: Body, work: Callable[[Asked, Body], Any]) -> Response:
        """Answer with what some work in a thread gives."""
        terms = terms_of(request, body)
        async with AsyncExitStack() as held:
            llm = await self.used(held, request, body.model)
            request.scope.get(NOTES, {}).update(model=body.model or self.served.names[0])
            gone = threading.Event()
            computed = self._computed(llm, terms, body, work, gone)
            try:
                return json_response(await while_connected(request.receive, computed))
            finally:
                gone.set()

    async def _computed(
        self, llm: LLM, terms: TermOptions, body: Body, work: Callable[[Asked, Body], Any], gone: threading.Event
    ) -> bytes:
        async with self._computing:
            return await self.served.in_thread(lambda: dumps(self._begin(llm, terms, body, work, gone)))

    def _begin(
        self, llm: LLM, terms: TermOptions, body: Body, begin: Callable[[Asked, Body], Result], gone: threading.Event
    ) -> Result:
        path, name = self.served.path(body.model), body.model or self.served.names[0]
        try:
            fingerprint = self._fingerprints.of(path, self.served.models)
            return begin(Asked(llm, name, fingerprint, terms, gone), body)
        except OutOfMemory as error:  # the model is loaded, so it is this prompt that can never fit
            raise Failure(400, renamed(str(error), body)[1], param=body.PROMPT, code=TOO_LONG) from error
        except FormatError as error:  # the model is loaded, so it is its chat template that fails with these messages
            raise self.served.told(Failure(400, str(error), param=body.PROMPT), body.model) from error
        except BitNetError as error:
            raise self.served.told(named(error, body), body.model) from error


def _cancel(answer: Answer) -> None:
    for stream in answer.streams:
        stream.cancel()

"""The application: which path is answered by what."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bitnet_inference.config import installed_version
from bitnet_inference.errors import BitNetError
from bitnet_inference.server.chat import open_chat
from bitnet_inference.server.failures import CLIENT_GONE, Failure, failure_of
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.journal import NOTES
from bitnet_inference.server.metrics import ServerMetrics, add_metrics
from bitnet_inference.server.schema import ChatRequest, SamplingFields, TextRequest, field_of
from bitnet_inference.server.sse import event_response, json_response
from bitnet_inference.server.terms import terms_of
from bitnet_inference.server.texts import open_text
from bitnet_inference.stream import Stream

LOG = logging.getLogger("bitnet.server")

Result = TypeVar("Result")


class Answer(Protocol):
    """What a request is answered with: in one piece, or in events."""

    streams: Sequence[Stream]

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, up to the last one."""

    async def whole(self) -> dict[str, Any]:
        """The JSON object."""


def make_app(served: ServedModels, metrics: ServerMetrics | None = None) -> FastAPI:
    """OpenAI's API over these models, and what `metrics` tell of them."""
    app = FastAPI(title="bitnet-inference", version=installed_version(), docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    for kind in (BitNetError, Failure, Exception):
        app.add_exception_handler(kind, _fail)
    started = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(served, request, body, open_chat)

    @app.post("/v1/completions")
    async def complete(body: TextRequest, request: Request) -> Response:
        return await _answer(served, request, body, open_text)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(name, started) for name in served.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        served.path(name)
        return json_response(_model(name, started))

    @app.get("/health")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @app.get("/ready")  # the gate says no before it closes
    async def ready() -> Response:
        return json_response({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": installed_version()})

    if metrics is not None:
        add_metrics(app, metrics)
    return app


async def _answer(
    served: ServedModels, request: Request, body: SamplingFields, begin: Callable[..., Answer]
) -> Response:
    """Open a request and answer it. The model stays for as long as that takes."""
    async with AsyncExitStack() as held:
        llm = await held.enter_async_context(served.use(body.model))
        name = body.model or served.names[0]
        answer = await served.in_thread(begin, llm, body, name, terms_of(request, body.user, body.priority))
        request.scope.get(NOTES, {}).update(model=name, streams=answer.streams)
        if body.stream:
            return event_response(answer.events(), held.pop_all())
        return json_response(await while_connected(request, answer.whole()))


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which ends with the client's connection."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Failure(CLIENT_GONE, "the client has left")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "bitnet-inference"}


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field, why = field_of(tuple(first["loc"]), first)
    return _failed(Failure(400, why, param=field))


async def _refuse_path(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _failed(Failure(error.status_code, str(error.detail)))


async def _fail(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    if failure.status == 500:
        LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _failed(failure)


def _failed(failure: Failure) -> Response:
    return json_response(failure.body, failure.status, failure.headers)

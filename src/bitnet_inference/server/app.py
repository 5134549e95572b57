"""The application: all routes, and what goes wrong in them."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from bitnet_inference.config import installed_version
from bitnet_inference.errors import BitNetError, ModelError
from bitnet_inference.server.answers import Answers
from bitnet_inference.server.bodies import field_of
from bitnet_inference.server.chat import add_chat
from bitnet_inference.server.dashboard import add_stats
from bitnet_inference.server.document import describe, document
from bitnet_inference.server.embeddings import EmbeddingRequest, add_embeddings
from bitnet_inference.server.failures import Failure, failure_of
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.message_schema import CountRequest, MessagesRequest
from bitnet_inference.server.messages import add_messages
from bitnet_inference.server.metrics import ServerMetrics, add_metrics
from bitnet_inference.server.page import add_page
from bitnet_inference.server.response_routes import add_responses
from bitnet_inference.server.response_schema import InputTokensRequest, ResponsesRequest
from bitnet_inference.server.schema import ChatRequest, TextRequest
from bitnet_inference.server.sse import json_response
from bitnet_inference.server.stats import Watch
from bitnet_inference.server.texts import add_texts
from bitnet_inference.server.tokens import DetokenizeRequest, TokenizeRequest, add_tokens

LOG = logging.getLogger("bitnet.server")
BODIES = (
    ChatRequest, TextRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest, MessagesRequest, CountRequest,
    ResponsesRequest, InputTokensRequest,
)  # fmt: skip


def make_app(served: ServedModels, metrics: ServerMetrics | None = None, watch: Watch | None = None) -> FastAPI:
    """OpenAI's and Anthropic's APIs over these models, a page to chat on, what `metrics` tell and `watch` hears."""
    app = FastAPI(title="bitnet-inference", version=installed_version(), docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    for kind in (BitNetError, Failure, Exception):
        app.add_exception_handler(kind, _fail)
    answers = Answers(served)
    for add in (add_chat, add_texts, add_embeddings, add_tokens, add_messages, add_responses):
        add(app, answers)
    _add_models(app, served)
    add_page(app)
    if watch is not None:
        add_stats(app, served, watch)
    if metrics is not None:
        add_metrics(app, metrics)
    _add_heads(app)
    app.openapi = document(app, BODIES)  # type: ignore[method-assign]
    return app


def _add_models(app: FastAPI, served: ServedModels) -> None:
    started = int(time.time())

    @app.get("/v1/models", **describe(None, "The models that are served."))
    async def models() -> Response:
        found = await asyncio.to_thread(lambda: [_model(served, name, started) for name in served.names])
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
        return json_response({"object": "list", "data": found, "has_more": False, **ends})

    @app.get("/v1/models/{name:path}", **describe(None, "A model that is served."))
    async def model(name: str) -> Response:
        served.path(name)
        return json_response(await asyncio.to_thread(_model, served, name, started))

    @app.get(
        "/health",
        **describe(None, "Whether the server runs, and which models run on the CPU since their device failed."),
    )
    async def health() -> Response:
        failed = await asyncio.to_thread(_on_the_cpu, served)
        return json_response({"status": "degraded", "on_the_cpu": failed} if failed else {"status": "ok"})

    @app.get("/ready", **describe(None, "Whether the server takes requests."))  # the gate says no before it closes
    async def ready() -> Response:
        return json_response({"status": "ready"})

    @app.get("/version", **describe(None, "The version of this package."))
    async def version() -> Response:
        return json_response({"version": installed_version()})


def _add_heads(app: FastAPI) -> None:
    """HEAD for every GET, with which some look whether a server is there. The document is without them."""
    for route in [each for each in app.routes if isinstance(each, APIRoute) and each.methods == {"GET"}]:
        app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)


def _on_the_cpu(served: ServedModels) -> list[str]:
    return [name for name in served.names if (state := served.state(name)) and state.failure]


def _model(served: ServedModels, name: str, created: int) -> dict[str, Any]:
    state = served.state(name)
    longest = None if state is None else state.max_context
    known = {} if state is None else {"max_model_len": longest, "can_chat": state.can_chat}
    ours = {"id": name, "object": "model", "created": created, "owned_by": "bitnet-inference", **known}
    theirs = {"type": "model", "display_name": name, "created_at": _iso(created), "lifecycle": "active"}  # Anthropic's
    return ours | theirs | {"max_input_tokens": longest}


def _iso(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field, why = field_of(tuple(first["loc"])[1:], first)
    return _failed(request, Failure(400, why, param=field))


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    why, headers = str(error.detail), dict(error.headers or {})
    if why == "Not Found":  # the framework's words for a path that no route has
        path = request.scope["path"]
        is_right = path.startswith("/v1/") and not path.startswith("/v1/v1/")
        bases = "" if is_right else "OpenAI's clients need a base_url that ends with /v1, Anthropic's one without; "
        why = f"there is nothing at {path!r:.80}: {bases}/openapi.json has all paths"
    elif error.status_code == 405:
        headers["Allow"] = _methods(request)
        why = f"{request.method} is not possible at {request.scope['path']!r:.80}: use {headers['Allow']}"
    response = _failed(request, Failure(error.status_code, why))
    response.headers.update(headers)
    return response


def _methods(request: Request) -> str:
    """Of all routes at this path: the framework names those of the first."""
    here = [each for each in request.app.routes if each.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for each in here for method in each.methods}))


async def _fail(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    if failure.status == 500:
        cause = error.__cause__ if isinstance(error, Failure) else error
        if isinstance(cause, ModelError):  # of the model's files, which says what is wrong with them: no defect
            LOG.error("%s %s failed: %s", request.method, request.url.path, cause)
        else:
            LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _failed(request, failure)


def _failed(request: Request, failure: Failure) -> Response:
    return json_response(failure.body_for(request.scope), failure.status, failure.headers)

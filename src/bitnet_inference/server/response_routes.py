"""The routes of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from bitnet_inference.server.answers import Answers, Asked
from bitnet_inference.server.document import describe
from bitnet_inference.server.failures import Failure, failure_of
from bitnet_inference.server.gate import CALLER, PLACE
from bitnet_inference.server.replies import num_prompt_tokens
from bitnet_inference.server.response_schema import InputTokensRequest, ResponsesRequest
from bitnet_inference.server.responses import Messages, ResponseAnswer, open_response, talk_of
from bitnet_inference.server.sse import json_response
from bitnet_inference.server.stored import StoredResponses

Form = TypeVar("Form", bound=InputTokensRequest)
Begin = Callable[[Asked, ResponsesRequest], ResponseAnswer]

_PATH = "/v1/responses/{identity}"


def add_responses(app: FastAPI, answers: Answers) -> None:
    """The routes; all share what is stored."""
    kept = StoredResponses()

    @app.post("/v1/responses", **describe(ResponsesRequest, "Answer a conversation.", streams=True))
    async def create(request: Request) -> Response:
        body = await _read(answers, kept, request, ResponsesRequest)
        begin: Begin = partial(
            open_response, previous=_previous(kept, request, body), owner=_caller(request), keep=kept.keep
        )
        if body.background:
            return json_response(await _in_background(answers, kept, request, body, begin))
        return await answers.answer(request, body, begin, streams=body.stream)

    @app.post("/v1/responses/input_tokens", **describe(InputTokensRequest, "How many tokens an input has."))
    async def count(request: Request) -> Response:
        body = await _read(answers, kept, request, InputTokensRequest)
        return await answers.compute(request, body, partial(_count, previous=_previous(kept, request, body)))

    _add_stored(app, kept)


def _add_stored(app: FastAPI, kept: StoredResponses) -> None:
    @app.get(_PATH, **describe(None, "A response that is stored."))
    async def fetch(identity: str, request: Request) -> Response:
        for key, value in request.query_params.items():
            name = key.removesuffix("[]")  # which OpenAI's client puts behind the names of lists
            if name in ("include", "starting_after", "stream") and value.lower() != "false":
                why = f"{name:.80}: a stored response is given in one piece, as it was made: leave it out"
                raise Failure(400, why, param=name)
        return json_response(kept.find(_caller(request), identity).body)

    @app.delete(_PATH, **describe(None, "Forget a response."))
    async def delete(identity: str, request: Request) -> Response:
        kept.delete(_caller(request), identity)
        return json_response({"id": identity, "object": "response", "deleted": True})

    @app.post(_PATH + "/cancel", **describe(None, "End a response that is made in the background."))
    async def cancel(identity: str, request: Request) -> Response:
        found = kept.find(_caller(request), identity)
        if not found.body["background"]:
            raise Failure(400, "only responses in the background can be cancelled: close the connection of others")
        if found.task is not None:
            found.task.cancel()
            await asyncio.gather(found.task, return_exceptions=True)
        return json_response(kept.find(_caller(request), identity).body)

    @app.get(_PATH + "/input_items", **describe(None, "What a stored response was asked."))
    async def items(
        identity: str,
        request: Request,
        limit: int = Query(20, ge=1, le=100),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        return json_response(_page(list(kept.find(_caller(request), identity).input_items), limit, order, after))


async def _read(answers: Answers, kept: StoredResponses, request: Request, form: type[Form]) -> Form:
    """A request with what its references stand for. Raises Failure."""
    body = await answers.read(request, form)
    body.resolve(partial(kept.find_item, _caller(request)))
    return body


def _previous(kept: StoredResponses, request: Request, body: InputTokensRequest) -> Messages:
    """The conversation that a request goes on with. Raises Failure."""
    if body.previous_response_id is None:
        return []
    found = kept.find(_caller(request), body.previous_response_id, param="previous_response_id")
    if found.body["status"] not in ("completed", "incomplete"):
        why = f"previous_response_id: that response is {found.body['status']}: wait for it, or ask again"
        raise Failure(400, why, param="previous_response_id")
    return found.messages


async def _in_background(
    answers: Answers, kept: StoredResponses, request: Request, body: ResponsesRequest, begin: Begin
) -> dict[str, Any]:
    async with AsyncExitStack() as held:
        held.enter_context(kept.place(_caller(request)))
        if PLACE in request.scope:  # which is the caller's until the response has ended, not the request
            held.enter_context(request.scope[PLACE].pop_all())
        answer = await answers.open(held, request, body, begin)
        stored = answer.stored("in_progress")
        stored.task = asyncio.create_task(_finish(answer, held.pop_all(), kept))
    kept.keep(stored)
    return stored.body


def _caller(request: Request) -> str:
    caller: str = request.scope.get(CALLER, "")
    return caller


async def _finish(answer: ResponseAnswer, held: AsyncExitStack, kept: StoredResponses) -> None:
    try:
        async with held:
            await answer.finished()  # which keeps it
    except asyncio.CancelledError:
        kept.replace(answer.stored("cancelled"))
        raise
    except Exception as error:
        kept.replace(answer.stored("failed", failure_of(error)))


def _count(asked: Asked, body: InputTokensRequest, *, previous: Messages) -> dict[str, Any]:
    talk = talk_of(body, [*previous, *body.messages])
    return {"object": "response.input_tokens", "input_tokens": num_prompt_tokens(asked.llm, talk)}


def _page(found: list[Any], limit: int, order: str, after: str | None) -> dict[str, Any]:
    found = found if order == "asc" else found[::-1]
    if after is not None:
        places = [index for index, item in enumerate(found) if item["id"] == after]
        if not places:
            raise Failure(400, f"after: there is no item {after!r:.80} here", param="after")
        found = found[places[0] + 1 :]
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(found) > limit}

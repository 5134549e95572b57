"""The body of a request: JSON that says one thing and nothing that is unknown, or a refusal."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from bitnet_inference.errors import BitNetError, PromptTooLong
from bitnet_inference.json_objects import without_nulls
from bitnet_inference.server.failures import CLIENT_GONE, Failure, failure_of
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.schema import Fields

MAX_DEPTH = 100  # of lists and objects in each other
MAX_MISTAKES = 1000  # with more, to list them all takes longer than to read the body

Body = TypeVar("Body", bound=Fields)


async def read_body(served: ServedModels, request: Request, kind: type[Body]) -> Body:
    """What a request says, checked as far as that goes without a model. Raises Failure."""
    _check_headers(request)
    raw = await _received(request)
    return await served.in_thread(parse, kind, raw)


def parse(kind: type[Body], raw: bytes) -> Body:
    """A body of this kind. A field that is null counts as left out. Raises Failure, which names the field."""
    value = _loaded(raw)
    if not isinstance(value, dict):
        raise Failure(400, "the body must be a JSON object")
    try:
        body = kind.model_validate(without_nulls(value))
    except ValidationError as error:
        if error.error_count() > MAX_MISTAKES:
            raise Failure(400, f"{error.error_count()} values in the body are wrong: correct them") from None
        field, why = _mistake(kind, error.errors(include_url=False, include_input=False)[0])
        raise Failure(400, why, param=field) from None
    try:
        body.check()
    except BitNetError as error:
        raise named(error, body) from None
    return body


def _mistake(kind: type[Fields], problem: Mapping[str, Any]) -> tuple[str | None, str]:
    """The field that is wrong in a body of this kind, and one line about it."""
    place = tuple(problem["loc"])
    is_unknown = problem["type"] == "extra_forbidden" and len(place) == 1
    nearest = difflib.get_close_matches(str(place[0]), kind.model_fields, n=1, cutoff=0.8) if is_unknown else []
    field, why = field_of(place, problem)
    return field, f"{field} is not supported: did you mean {nearest[0]}?" if nearest else why


def field_of(place: tuple[Any, ...], problem: Mapping[str, Any]) -> tuple[str | None, str]:
    """The field that pydantic complains of, and one line about it."""
    is_unknown = problem["type"] == "extra_forbidden"  # and its name is what a client wrote, no tag
    names = [str(part) for part in place[: len(place) - is_unknown] if not str(part).startswith("<")]
    field = ".".join([*names, str(place[-1])] if is_unknown else names) or None
    if is_unknown:
        return field, f"{field} is not supported: leave it out"
    if problem["type"] == "none_required":
        return field, f"{field} is not supported here: leave it out"
    if problem["type"] == "literal_error" and " or " not in (only := problem["ctx"]["expected"]):
        shown = {"False": "false", "True": "true"}.get(only, only.replace("'", '"'))
        return field, f"{field}: only {shown} is supported here: give that, or leave it out"
    if problem["type"] == "missing":
        return field, f"{field} is missing: give it"
    if problem["type"] == "union_tag_invalid":
        found, known = (str(problem["ctx"][name]) for name in ("tag", "expected_tags"))
        wanted = known.replace("<", "").replace(">", "")
        return field, f"{field}: {found[1:-1]!r:.80} is not supported here: give one of {wanted}"
    why = str(problem["msg"]).removeprefix("Value error, ")
    if field is None:
        first = why.replace(":", " ").split(" ", 1)[0]
        return first, why
    return field, f"{field}: {why}"


def named(error: Exception, body: Fields) -> Failure:
    """How an error is told, with the field that its message begins with, if it does, or that has the prompt."""
    failure = failure_of(error)
    told, failure.message = renamed(failure.message, body)
    if isinstance(error, PromptTooLong) or failure.message.startswith("the prompt "):
        told = body.PROMPT
    field = told.partition(".")[0]
    if failure.status == 400 and failure.param is None and field in type(body).model_fields:
        failure.param = field
    return failure


def renamed(message: str, body: Fields) -> tuple[str, str]:
    """The word that a message of the library begins with as this body calls it, and the message with that."""
    word = message.replace("[", " ").replace(":", " ").replace(".", " ").split(" ", 1)[0]
    told = body.told_as(word)
    return told, told + message[len(word) :]


def _check_headers(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Failure(415, f"the Content-Type is {kind!r:.80}: send application/json")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Failure(415, f"the Content-Encoding is {coding!r:.80}: send the body as it is")


async def _received(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise Failure(CLIENT_GONE, "the client has left") from None


def _loaded(raw: bytes) -> Any:
    try:
        orjson.loads(raw)  # refuses NaN, half surrogate pairs, bytes that are no UTF-8
        value = json.loads(raw, object_pairs_hook=_object)  # keeps large integers
    except (ValueError, RecursionError) as error:
        raise Failure(400, f"the body is no JSON: {error}") from None
    check_depth(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        _refuse_twice([name for name, _ in pairs])
    return value


def _refuse_twice(names: list[str]) -> NoReturn:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise Failure(400, f"{name!r:.80} is given twice in one object: give it once", param=name)
        seen.add(name)
    raise AssertionError("no name stands twice")


def check_depth(value: Any) -> None:
    """Raises Failure for lists and objects that stand too deep in each other."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each for one in level for each in _inside(one) if isinstance(each, dict | list)]
        if not level:
            return
    raise Failure(400, f"the body is nested more than {MAX_DEPTH} deep: make it flatter")


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

"""The OpenAPI document: what /openapi.json tells of our routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAILURES = {
    "4XX": "What is wrong with the request: `param` names the field.",
    "503": "The server cannot answer now.",
}


def describe(kind: type[BaseModel] | None, summary: str, *, streams: bool = False) -> dict[str, Any]:
    """Options of a route that reads its body itself, a `kind`, and answers JSON, or where it `streams` events too."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    failure = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    responses |= {status: {"description": why, "content": failure} for status, why in _FAILURES.items()}
    extra: dict[str, Any] = {"responses": responses}
    if kind is not None:
        schema = {"$ref": _REF.format(model=kind.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "openapi_extra": extra, "response_class": Response, "response_model": None}


def document(app: FastAPI, kinds: Sequence[type[BaseModel]]) -> Callable[[], dict[str, Any]]:
    """In place of `app.openapi`: the document of all routes of an application, whose bodies are of these kinds."""
    plain = app.openapi

    def complete() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = plain()
            _, bodies = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
            made.setdefault("components", {})["schemas"] = {"Error": _ERROR} | bodies["$defs"]
            for operation in (each for path in made["paths"].values() for each in path.values()):
                operation["responses"].pop("422", None)  # FastAPI's own, which never comes
        assert app.openapi_schema is not None, "it has just been made"
        return app.openapi_schema

    return complete

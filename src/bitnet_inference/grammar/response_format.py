"""OpenAI's `response_format`, read as a Grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.closing import closed_schema
from bitnet_inference.grammar.grammar import Grammar

_FORMS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name", "schema"}}'
_KEYS = {"text": ("type",), "json_object": ("type", "value"), "json_schema": ("type", "json_schema")}


def read_response_format(value: object) -> Grammar | None:
    """The grammar of a response_format; None for plain text. Raises InvalidParams.

    A schema is kept to whether `strict` is set or not; objects have no other properties unless it says so. It may be
    the `value` of a json_object, too: so Hugging Face's client writes what it is given as a json_schema.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("type") not in tuple(_KEYS):
        raise InvalidParams(f"response_format is {value!r:.80}: give {_FORMS}")
    kind = value["type"]
    _refuse_unknown("response_format", value, _KEYS[kind])
    if kind == "json_schema":
        return Grammar(json_schema=closed_schema(_schema(value.get("json_schema"))))
    if (schema := value.get("value")) is not None:
        if not isinstance(schema, Mapping):
            raise InvalidParams(f"response_format: value is {schema!r:.80}: give a JSON schema")
        return Grammar(json_schema=closed_schema(schema))
    return Grammar(json_object=True) if kind == "json_object" else None


def _schema(named: object) -> Mapping[str, Any]:
    if not isinstance(named, Mapping) or not isinstance(named.get("schema"), Mapping):
        raise InvalidParams(f"response_format: json_schema is {named!r:.80}: give an object with a name and a schema")
    _refuse_unknown("response_format: json_schema", named, ("name", "description", "schema", "strict"))
    if not isinstance(named.get("name"), str):
        raise InvalidParams(f"response_format: json_schema: name is {named.get('name')!r:.80}: give a string")
    if not isinstance(named.get("strict"), bool | None):
        raise InvalidParams(f"response_format: json_schema: strict is {named['strict']!r:.80}: give true or false")
    schema: Mapping[str, Any] = named["schema"]
    return schema


def _refuse_unknown(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, each in value.items():
        if name not in known and each is not None:  # clients whose types have a field write it as null
            raise InvalidParams(f"{where}: {name!r:.80} is unknown: there are {', '.join(known)}")

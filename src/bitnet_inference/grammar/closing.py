"""JSON schemas whose objects have no properties but those that are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bitnet_inference.grammar.references import target
from bitnet_inference.grammar.schema import COMBINING, changed_schema, check_schema, parts_of, without_null_keywords

# With these beside its properties a schema says what else there may be.
_OPENING = frozenset(("additionalProperties", "const", "enum", "minProperties", "patternProperties"))
# Of what has some of these, other schemas tell more where it has some of those, too.
_OF_OBJECTS = _OPENING | {"properties", "required"}


def closed_schema(schema: Mapping[str, Any], place: str = "") -> Mapping[str, Any]:
    """Of a schema that is silent about properties it does not name: one without others, which small models make up.

    vLLM and llama.cpp read it so too. Where several parts tell of one object, these stay as they are. Raises
    InvalidParams as check_schema.
    """
    schema = without_null_keywords(schema)
    check_schema(schema, place)
    shared = _shared_parts(schema)

    def close(part: Mapping[str, Any]) -> Mapping[str, Any]:
        named, required = part.get("properties", {}), part.get("required", [])
        is_silent = "properties" in part and not part.keys() & _OPENING and isinstance(required, list)
        names_all = is_silent and all(isinstance(name, str) and name in named for name in required)
        return {**part, "additionalProperties": False} if names_all and id(part) not in shared else part

    closed: Mapping[str, Any] = changed_schema(schema, close)
    return closed


def _shared_parts(schema: Mapping[str, Any]) -> set[int]:
    """The identities of the parts beside which others tell of the same object."""
    waiting: list[Any] = [part for part in parts_of(schema) if _shares(part)]
    shared = set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in shared:
            shared.add(id(part))
            waiting += _same_value(schema, part)
    return shared


def _shares(part: Mapping[str, Any]) -> bool:
    """Whether several of its words, or of the schemas in it, tell of one object."""
    return len(part.get("allOf", ())) + len(part.keys() & COMBINING) + bool(part.keys() & _OF_OBJECTS) > 1


def _same_value(schema: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Any]:
    for name in ("allOf", "anyOf", "oneOf"):
        yield from part.get(name, ())
    if isinstance(ref := part.get("$ref"), str):
        yield target(schema, ref)

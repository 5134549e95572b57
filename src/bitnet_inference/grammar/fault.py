"""Where in a JSON schema stands what the library refuses: it names no place itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bitnet_inference.grammar.schema import changed_schema, inner_schemas

MAX_PARTS = 500  # of more it would take long to try
# Anything, as {} would, beside which the library looks at no other case of anyOf.
_EMPTY = {"type": ["array", "boolean", "null", "number", "object", "string"]}
_GIVEN_AS = {"anyOf": "oneOf", "prefixItems": "items", "items": "additionalItems"}  # what readable_schema renames


def fault_place(given: Any, readable: Mapping[str, Any], reason: Callable[[Mapping[str, Any]], str]) -> str | None:
    """The place, in the words of the given schema, of the innermost part that brings the refusal of a readable one.

    `reason` says why a schema is refused. None where it cannot be found.
    """
    parts, why = list(_parts("", given, readable)), reason(readable)
    if len(parts) > MAX_PARTS or "too large" in why:
        return None

    def reason_without(num_parts: int) -> str:
        emptied = {id(part) for _, part in parts[:num_parts]}
        return reason(changed_schema(readable, lambda part: _EMPTY if part and id(part) in emptied else part))

    low, high = 1, len(parts)  # so many parts may have to be emptied, those within others first
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if reason_without(middle) == why else (low, middle)
    leads_nowhere = "Pointer" in reason_without(low) and "Pointer" not in why  # to what has been emptied
    return None if leads_nowhere else parts[low - 1][0] or "/"


def _parts(place: str, given: Any, readable: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The places in the given schema of the parts of the readable one, each behind those within it."""
    known = dict(inner_schemas("", given))
    for name, inner in sorted(inner_schemas("", readable), key=_is_used_elsewhere, reverse=True):
        keyword, slash, rest = name.partition("/")
        told = name if name in known else f"{_GIVEN_AS.get(keyword, keyword)}{slash}{rest}"
        if isinstance(inner, Mapping) and isinstance(known.get(told), Mapping):
            yield from _parts(f"{place}/{told}", known[told], inner)
    yield place, readable


def _is_used_elsewhere(named: tuple[str, Any]) -> bool:
    """Definitions come first: what refers to a wrong one is right."""
    return named[0].startswith(("$defs/", "definitions/"))

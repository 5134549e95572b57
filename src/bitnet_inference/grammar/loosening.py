"""JSON schemas that need not be kept to the letter, as those of tools that are not strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_inference.grammar.readable import Unions
from bitnet_inference.grammar.references import is_pointer, local
from bitnet_inference.grammar.schema import (
    can_be_kept,
    changed_schema,
    has_known_format,
    is_impossible,
    is_known,
    is_number,
)


def loosened(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what cannot be kept token by token, and what is unknown; what is wrong otherwise stays.

    Cases of `oneOf` of which a text may fit several are those of `anyOf`.
    """
    try:
        unions = Unions(schema)
        loose: Mapping[str, Any] = changed_schema(schema, lambda part: _loosened(schema, unions, part))
    except RecursionError:  # check_schema says how deep it may be
        return schema
    return loose


def _loosened(root: Mapping[str, Any], unions: Unions, part: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {name: value for name, value in part.items() if is_known(name) and not is_impossible(root, part, name)}
    if isinstance(ref := kept.get("$ref"), str) and "$id" not in root and not is_pointer(local(ref)):
        del kept["$ref"]
    if "oneOf" in kept and not unions.are_apart(part):
        cases = kept.pop("oneOf")
        kept.setdefault("anyOf", cases)
    _loosen_names(kept)
    if isinstance(pattern := kept.get("pattern"), str) and not can_be_kept(pattern):
        del kept["pattern"]
    if not has_known_format(kept):
        del kept["format"]
    return kept


def _loosen_names(kept: dict[str, Any]) -> None:
    """Leave out what is asked of names and their number, where that cannot be kept."""
    named, listed, required = (kept.get(name) for name in ("patternProperties", "properties", "required"))
    if isinstance(named, Mapping) and not all(map(can_be_kept, named)):
        kept["patternProperties"] = {name: inner for name, inner in named.items() if can_be_kept(name)}
        kept.pop("additionalProperties", None)  # it does not tell of the names that the others allow
    needed = required if isinstance(required, list) else []
    if isinstance(listed, Mapping) and not all(name in needed for name in listed):
        kept.pop("minProperties", None)
        kept.pop("maxProperties", None)
    if is_number(least := kept.get("minProperties")) and least > len(needed) + 1:
        del kept["minProperties"]

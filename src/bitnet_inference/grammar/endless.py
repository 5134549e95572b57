"""Which JSON schemas fit no text that ends: what they require requires them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from bitnet_inference.grammar.references import references, target

Kind = TypeVar("Kind", dict[str, Any], list[Any], int)


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Whether a sound schema lets no text end."""
    targets = {ref: target(schema, ref) for ref in references(schema)}
    users: dict[str, list[str]] = {ref: [] for ref in targets}  # by the reference that stands in what they stand for
    for ref, part in targets.items():
        for inner in dict.fromkeys(references(part)):
            users[inner].append(ref)
    ending, waiting = set[str](), list(targets)
    while waiting:
        ref = waiting.pop()
        if ref not in ending and _ends(targets[ref], ending):
            ending.add(ref)
            waiting += users[ref]  # each of which may end now
    return not _ends(schema, ending)


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a text of this schema may end, if of all references these ones' may.

    Parts that nothing uses may be unsound, and say nothing here.
    """
    if not isinstance(schema, Mapping):
        return True
    ref, kinds = schema.get("$ref"), schema.get("type")
    if isinstance(ref, str) and ref not in ending:
        return False
    for name in ("anyOf", "oneOf"):
        if (cases := _sound(schema, name, list)) and not any(_ends(each, ending) for each in cases):
            return False
    if not all(_ends(each, ending) for each in _sound(schema, "allOf", list)):
        return False
    return any(_kind_ends(kind, schema, ending) for kind in (kinds if isinstance(kinds, list) else [kinds]))


def _kind_ends(kind: object, schema: Mapping[str, Any], ending: set[str]) -> bool:
    if kind == "object":
        properties, required = _sound(schema, "properties", dict), _sound(schema, "required", list)
        # Whether a pattern is that of a name, the library knows alone.
        other = None if schema.get("patternProperties") else schema.get("additionalProperties")
        return all(_ends(properties.get(name, other), ending) for name in required if isinstance(name, str))
    if kind == "array":
        least, first = _sound(schema, "minItems", int), _sound(schema, "prefixItems", list)
        needed = [*first[:least], *([schema.get("items")] if least > len(first) else ())]
        return all(_ends(each, ending) for each in needed)
    return True


def _sound(schema: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind:
    """What stands there; an empty one where that is of another kind."""
    value = schema.get(name)
    return value if isinstance(value, kind) else kind()

"""How many patterns a JSON schema asks of one string at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bitnet_inference.grammar.references import local, target

_CASES = ("anyOf", "oneOf")
_MAX_FOLLOWED = 64  # schemas in each other; the library gives up on fewer


def most_patterns(root: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]) -> int:
    """The most that one string has to match, as far as it is the same string's in these parts of a schema."""
    known: dict[int, int] = {}

    def count(part: Any, depth: int = 0) -> int:
        if not isinstance(part, Mapping) or depth > _MAX_FOLLOWED:
            return 0
        if id(part) not in known:
            known[id(part)] = 0  # for what refers to itself
            ref = part.get("$ref")
            both = [*part.get("allOf", ()), target(root, local(ref)) if isinstance(ref, str) else None]
            either = [max((count(each, depth + 1) for each in part.get(name, ())), default=0) for name in _CASES]
            known[id(part)] = ("pattern" in part) + sum(count(each, depth + 1) for each in both) + sum(either)
        return known[id(part)]

    return max(map(count, parts), default=0)

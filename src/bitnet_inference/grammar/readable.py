"""JSON schemas in words that the library reads rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from bitnet_inference.grammar.references import local, resolved, spelt
from bitnet_inference.grammar.regex import plain_classes, without_look_around
from bitnet_inference.grammar.schema import (
    HIGHEST,
    LOOSE_FORMATS,
    LOWEST,
    MAX_WHOLE,
    READ,
    UUID_OF_VERSION,
    changed_schema,
    has_known_format,
    is_never,
    is_number,
    listed_names,
    listed_values,
    names_pattern,
    parts_of,
)

_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_TINY = 1e-30  # less than anyone writes out; each of a bound's digits costs time, and some hundred are refused

# What Python's datetime can hold: seconds to 59 (a minute has a 60th at the end of a few days only), six digits behind
# them, and no year 0. The library (1.9.1) lets February have a 29th in each year.
_SECONDS = ("^[^:]*:[^:]*:[0-5]", r"^[^.]*(\.[0-9]{1,6}[^0-9].*)?$")
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAYS = (
    "^([1-9]|0[1-9]|00[1-9]|000[1-9])",
    f"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)",
)
_CAPITALS = "^[^tz]*$"  # T and Z, which is all that many readers know
_PATTERNS = {"date": _DAYS, "date-time": (*_DAYS, *_SECONDS, _CAPITALS), "time": (*_SECONDS, _CAPITALS)}
Constant = tuple[str, Any]  # a value, behind its kind: 1 is 1.0, and not true
_KINDS = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def readable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A checked schema in words that the library reads rightly."""
    unions = Unions(schema)
    readable: dict[str, Any] = changed_schema(schema, lambda part: _readable(schema, unions, part))
    return readable


def _readable(root: Mapping[str, Any], unions: Unions, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    readable = {keyword: value for keyword, value in schema.items() if keyword in READ}
    for keyword in (*LOWEST, *HIGHEST):
        if is_number(end := readable.get(keyword)):
            readable[keyword] = max(-MAX_WHOLE, min(MAX_WHOLE, end))
    for keyword in _COUNTS:  # 2.0 is 2 in JSON Schema
        if isinstance(count := readable.get(keyword), float) and count.is_integer():
            readable[keyword] = int(count)
    if isinstance(pattern := readable.get("pattern"), str):
        first, *more = without_look_around(pattern)
        readable["pattern"] = plain_classes(first)
        _add_patterns(readable, more)
    if isinstance(named := readable.get("patternProperties"), Mapping):
        readable["patternProperties"] = {plain_classes(name): inner for name, inner in named.items()}
    _read_tuple(readable)
    _read_names(root, schema, readable)
    unions.read(schema, readable)
    _read_format(readable)
    if isinstance(ref := readable.get("$ref"), str):
        readable["$ref"] = spelt(local(ref))
    if is_never(schema):
        readable["allOf"] = [*readable.get("allOf", ()), False]
    if schema.get("nullable") is True and isinstance(kind := readable.get("type"), str):  # as OpenAPI has it
        readable["type"] = [kind, "null"]
    # Of 1 < x < 1.5 the library (1.9.1) lets 1 through, and of 1.00000000000001 < x < 1.5 nothing that is wrong.
    for name, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        if name in schema:
            readable[name] = _moved_end(schema, name, inclusive, sign)
    return readable


def _read_format(readable: dict[str, Any]) -> None:
    form = readable.get("format")
    if not isinstance(form, str):
        return
    patterns = _PATTERNS.get(form, ())
    if found := UUID_OF_VERSION.fullmatch(form):
        readable["format"], patterns = "uuid", (f"^.{{14}}{found[1]}.{{4}}[89abAB]",)
    elif form in LOOSE_FORMATS or not has_known_format({"format": form}):
        del readable["format"]
    _add_patterns(readable, patterns)


def _add_patterns(readable: dict[str, Any], patterns: Sequence[str]) -> None:
    if patterns:
        readable["allOf"] = [*readable.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]


def _moved_end(schema: Mapping[str, Any], name: str, inclusive: str, sign: int) -> Any:
    """A whole number that is the end next to 0, further from it by the last of 15 digits, which no reader rounds."""
    end = schema.get(inclusive) if schema[name] is True else schema[name]  # True is what draft 4 says
    if isinstance(end, bool) or not isinstance(end, int | float) or end % 1 or not 0 <= sign * end < 1e14:
        return schema[name]
    num_places = 15 - len(str(abs(int(end))))
    return round(end + sign * 10.0**-num_places, num_places) if end else sign * _TINY


def _read_tuple(readable: dict[str, Any]) -> None:
    """As before draft 2020-12: a list of `items`, and `additionalItems` behind them."""
    more = readable.pop("additionalItems", None)
    if isinstance(readable.get("items"), list):
        readable["prefixItems"] = readable.pop("items")
        readable |= {} if more is None else {"items": more}


def _read_names(root: Mapping[str, Any], schema: Mapping[str, Any], readable: dict[str, Any]) -> None:
    """The names that `propertyNames` lists, or has a pattern for, are those of properties, and there are no others."""
    if (pattern := names_pattern(root, schema)) is not None:
        readable["patternProperties"] = {plain_classes(pattern): readable.get("additionalProperties", True)}
        readable["additionalProperties"] = False
    if (names := listed_names(root, schema)) is not None:
        named, other = readable.get("properties", {}), readable.get("additionalProperties", True)
        readable["properties"] = {name: named.get(name, other) for name in names}
        readable["additionalProperties"] = False


class Unions:
    """Cases of which a text fits one at most may as well be those of `anyOf`: the library follows no references.

    Where objects are told apart by a property, each must have it: without it a text could fit several.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._apart: set[int] = set()  # the identities of such unions
        self._required: dict[int, set[str]] = {}  # what their cases must have, by the cases' identities
        for part in parts_of(root):
            cases = part.get("oneOf", ())
            meant = [resolved(root, case) for case in cases] if isinstance(cases, list | tuple) else []
            if not meant or "anyOf" in part or not all(isinstance(case, Mapping) for case in meant):
                continue
            tag = _tag_name(root, meant) if all(case.get("type") == "object" for case in meant) else None
            if tag is not None:
                for case in meant:
                    self._required.setdefault(id(case), set()).add(tag)
            values, kinds = [_tags(root, case) for case in meant], [_kinds(root, case) for case in meant]
            if tag is not None or _are_apart(values) or _are_apart(kinds):
                self._apart.add(id(part))

    def are_apart(self, schema: Mapping[str, Any]) -> bool:
        """Whether a text fits one case of this schema's `oneOf` at most."""
        return id(schema) in self._apart

    def read(self, schema: Mapping[str, Any], readable: dict[str, Any]) -> None:
        """Put it so in a schema."""
        if self.are_apart(schema):
            readable["anyOf"] = readable.pop("oneOf")
        required = given if isinstance(given := readable.get("required"), list) else []
        if more := sorted(self._required.get(id(schema), set()).difference(required)):
            readable["required"] = [*required, *more]


def _tag_name(root: Mapping[str, Any], cases: Sequence[Mapping[str, Any]]) -> str | None:
    """The property that has other values in each case."""
    properties = [named if isinstance(named := case.get("properties"), Mapping) else {} for case in cases]
    shared = [name for name in properties[0] if all(name in named for named in properties)]
    return next((name for name in shared if _are_apart([_tags(root, named[name]) for named in properties])), None)


def _are_apart(sets: Sequence[set[Any]]) -> bool:
    return all(sets) and not any(one & other for one, other in combinations(sets, 2))


def _tags(root: Mapping[str, Any], schema: Any) -> set[Constant]:
    """All values that a schema allows; empty where these are not listed."""
    schema = resolved(root, schema)
    listed = (listed_values(schema) or []) if isinstance(schema, Mapping) else []
    is_plain = all(type(value) in _KINDS for value in listed)
    return {(_KINDS[type(value)], value) for value in listed} if is_plain else set()


def _kinds(root: Mapping[str, Any], schema: Mapping[str, Any]) -> set[str]:
    """The kinds of value that a schema allows; empty where it does not say."""
    if "type" not in schema:
        return {kind for kind, _ in _tags(root, schema)}
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}

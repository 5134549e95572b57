"""Which JSON schemas are refused before the library sees them, by the place of what it cannot keep."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NoReturn, TypeGuard

from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.regex import check_regex, plain_classes

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 2000  # three times as many in a chain overflow the library's stack
MAX_MULTIPLE = 1 << 15  # the digits of multipleOf: the library tells all remainders apart
MAX_VALUES = 1 << 16
MAX_WHOLE = 1 << 53  # the library rounds what is larger, and overflows its stack at -2^63
_TINY = 1e-30  # less than anyone writes out; each of a bound's digits costs time, and some hundred are refused

_SECONDS_TO_59 = "^[^:]*:[^:]*:[0-5]"

# Keywords whose value is a schema, a list of schemas, and a mapping from names to schemas.
_ONE = ("additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_VALUES = (
    "$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties",
    "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required", "type",
)  # fmt: skip
COMBINING = frozenset(("$ref", "anyOf", "oneOf"))  # beside other words they tell more of the same value
_LOWEST, _HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# What says nothing about the text, as all does that begins with x-; the last lines are other programs' words.
_NOTES = frozenset((
    "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly",
    "enumDescriptions", "enumNames", "externalDocs", "id", "markdownDescription", "propertyOrdering", "xml",
))  # fmt: skip
_READ = frozenset(("$id", "$schema", *_ONE, *_LISTS, *_NAMED, *_VALUES))
_KNOWN = _READ | _NOTES | {"nullable"}
# What a string is for, in the words of OpenAPI and pydantic: nothing that its characters show.
_LOOSE_FORMATS = ("base64", "base64url", "binary", "byte", "directory-path", "file-path", "password", "path")
_UUID_OF_VERSION = re.compile("uuid([1-8])")  # of pydantic
# Part of JSON Schema, and beyond what can be kept token by token.
_IMPOSSIBLE = frozenset((
    "$anchor", "$dynamicAnchor", "$dynamicRef", "additionalItems", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "x-guidance",
))  # fmt: skip


def check_schema(schema: Mapping[str, Any], place: str = "") -> None:
    """Raises InvalidParams for a schema that asks for what cannot be kept; names the place in it, behind its own."""
    start = place
    waiting: list[tuple[str, int, Any]] = [(place, 0, schema)]
    parts: list[Mapping[str, Any]] = []
    count = 0
    while waiting:
        place, depth, part = waiting.pop()
        count += 1
        if depth > MAX_DEPTH or count > MAX_SUBSCHEMAS:
            limits = f"at most {MAX_SUBSCHEMAS} schemas, at most {MAX_DEPTH} deep"
            raise InvalidParams(f"grammar: json_schema is too large: it may hold {limits}: make it smaller")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            _refuse(place, f"is {part!r:.40}", "give a schema, which is an object, or true or false")
        _check_keywords(place, part)
        _check_numbers(place, part)
        parts.append(part)
        waiting += [(f"{place}/{name}", depth + 1, inner) for name, inner in _parts(place, part)]
    multiples = {_digits(part["multipleOf"]) for part in parts if "multipleOf" in part}
    if math.lcm(*multiples) > MAX_MULTIPLE and any(map(_combines, parts)):
        _refuse(start, "the common multiple of its multipleOf is too large", "say it in one place, and of less digits")


def readable_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A checked schema in words that the library reads rightly."""
    readable: dict[str, Any] = changed_schema(schema, _readable)
    return readable


def changed_schema(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> Any:
    """A copy of a checked schema with `change` made to it and to each one inside; None leaves one as it is."""
    if isinstance(schema, bool) or (changed := change(schema)) is None:
        return schema
    copy = dict(changed)
    for keyword in copy:
        if keyword in _ONE:
            copy[keyword] = changed_schema(copy[keyword], change)
        elif keyword in _LISTS:
            copy[keyword] = [changed_schema(inner, change) for inner in copy[keyword]]
        elif keyword in _NAMED:
            copy[keyword] = {name: changed_schema(inner, change) for name, inner in copy[keyword].items()}
    return copy


def _readable(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    readable = {keyword: value for keyword, value in schema.items() if keyword in _READ}
    for keyword in (*_LOWEST, *_HIGHEST):
        if _is_number(end := readable.get(keyword)):
            readable[keyword] = max(-MAX_WHOLE, min(MAX_WHOLE, end))
    if isinstance(pattern := readable.get("pattern"), str):
        readable["pattern"] = plain_classes(pattern)
    if isinstance(named := readable.get("patternProperties"), Mapping):
        readable["patternProperties"] = {plain_classes(name): inner for name, inner in named.items()}
    _read_format(readable)
    if schema.get("nullable") is True and isinstance(kind := readable.get("type"), str):  # as OpenAPI has it
        readable["type"] = [kind, "null"]
    # Of 1 < x < 1.5 the library (1.9.1) lets 1 through, and of 1.00000000000001 < x < 1.5 nothing that is wrong.
    for name, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        if name in schema:
            readable[name] = _moved_end(schema, name, inclusive, sign)
    return readable


def _read_format(readable: dict[str, Any]) -> None:
    form = readable.get("format")
    pattern = ""
    if form in ("time", "date-time"):  # a minute has a 60th second at the end of a few days only
        pattern = _SECONDS_TO_59
    elif isinstance(form, str) and (found := _UUID_OF_VERSION.fullmatch(form)):
        readable["format"], pattern = "uuid", f"^.{{14}}{found[1]}"
    elif form in _LOOSE_FORMATS:
        del readable["format"]
    if pattern:
        readable["allOf"] = [*readable.get("allOf", ()), {"pattern": pattern}]


def _moved_end(schema: Mapping[str, Any], name: str, inclusive: str, sign: int) -> Any:
    """A whole number that is the end next to 0, further from it by the last of 15 digits, which no reader rounds."""
    end = schema.get(inclusive) if schema[name] is True else schema[name]  # True is what draft 4 says
    if isinstance(end, bool) or not isinstance(end, int | float) or end % 1 or not 0 <= sign * end < 1e14:
        return schema[name]
    num_places = 15 - len(str(abs(int(end))))
    return round(end + sign * 10.0**-num_places, num_places) if end else sign * _TINY


def _check_keywords(place: str, schema: Mapping[str, Any]) -> None:
    for keyword, value in schema.items():
        if _asks_nothing(keyword, value):
            continue
        if keyword == "nullable" and not isinstance(value, bool):
            _refuse(place, f"{keyword} is {value!r:.40}", "give true or false")
        if keyword in _IMPOSSIBLE:
            _refuse(place, f"{keyword} cannot be kept", "leave it out")
        if keyword not in _KNOWN and not str(keyword).startswith("x-"):
            nearest = difflib.get_close_matches(str(keyword), _KNOWN, n=1)
            cure = f"did you mean {nearest[0]}?" if nearest else "leave it out"
            _refuse(place, f"{keyword!r:.60} is no keyword that is known here", cure)
    for regex in [schema.get("pattern"), *_names(schema.get("patternProperties"))]:
        if isinstance(regex, str):
            check_regex(f"json_schema: at {place or '/'}", regex)


def _asks_nothing(keyword: str, value: object) -> bool:
    """As some writers of schemas do; of names in JSON all are strings."""
    if keyword == "propertyNames":
        return value in ({}, {"type": "string"}) or value is True
    return keyword == "uniqueItems" and value is False


def _check_numbers(place: str, schema: Mapping[str, Any]) -> None:
    for keyword in ("const", "enum"):
        if any(abs(number) > MAX_WHOLE for number in _whole_numbers(schema.get(keyword))):
            _refuse(place, f"{keyword} has a number beyond 2^53", "give it as a string")
    for keyword, sign in ((keyword, sign) for ends, sign in ((_LOWEST, 1), (_HIGHEST, -1)) for keyword in ends):
        if _is_number(end := schema.get(keyword)) and not sign * end <= MAX_WHOLE:
            _refuse(place, f"{keyword} lies beyond 2^53", "give a nearer one")
    step = schema.get("multipleOf")
    if _is_number(step) and (not 0 < step < 1e30 or _digits(step) > MAX_MULTIPLE):
        cure = f"give at most {MAX_MULTIPLE}, with any point"
        _refuse(place, "multipleOf is not above 0, or has too many digits", cure)
    least, required = schema.get("minProperties"), schema.get("required", ())
    if _is_number(least) and isinstance(required, Sequence) and least > len(required) + 1:
        why = "which could be one name several times"
        _refuse(place, f"minProperties is {least}, {why}", "give at most one more than are required")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(number: object) -> int:
    """A number without its point and the zeros at its ends."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))) if _is_number(number) else 1


def _whole_numbers(value: object) -> Iterator[int]:
    waiting = [value]
    for _ in range(MAX_VALUES):  # more, or a list in itself, is too long as a text, and refused then
        if not waiting:
            return
        each = waiting.pop()
        if isinstance(each, Mapping):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, int):
            yield each


def _combines(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas tell of one value."""
    others = schema.keys() & _READ - COMBINING - {"$id", "$schema", "$defs", "definitions"}
    return "allOf" in schema or bool(others and schema.keys() & COMBINING)


def _parts(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in _ONE:
        if keyword in schema:
            yield keyword, schema[keyword]
    for keyword in _LISTS:
        listed = schema.get(keyword, ())
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            _refuse(place, f"{keyword} is no list", "give a list of schemas")
        yield from ((f"{keyword}/{index}", inner) for index, inner in enumerate(listed))
    for keyword in _NAMED:
        named = schema.get(keyword, {})
        if not isinstance(named, Mapping):
            _refuse(place, f"{keyword} is no object", "give an object of schemas")
        yield from ((f"{keyword}/{name}", inner) for name, inner in named.items())


def _names(value: object) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _refuse(place: str, what: str, cure: str) -> NoReturn:
    raise InvalidParams(f"grammar: json_schema: at {place or '/'}: {what}: {cure}")

"""Which JSON schemas are refused before the library sees them, by the place of what it cannot keep."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import count
from typing import Any, NoReturn, TypeGuard

from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.references import resolved
from bitnet_inference.grammar.regex import check_regex, without_look_around
from bitnet_inference.grammar.together import most_patterns

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 2000  # three times as many in a chain overflow the library's stack
MAX_MULTIPLE = 1 << 15  # the digits of multipleOf, of all together: the library tells all remainders apart
MAX_PATTERNS = 16  # that one string has to match: with twice as many the library may think for ever
MAX_VALUES = 1 << 16
MAX_WHOLE = 1 << 53  # the library rounds what is larger, and overflows its stack at -2^63

# Keywords whose value is a schema, a list of schemas, and a mapping from names to schemas.
_ONE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "patternProperties", "properties")
_VALUES = (
    "$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maxProperties",
    "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "pattern", "required", "type",
)  # fmt: skip
COMBINING = frozenset(("$ref", "anyOf", "oneOf"))  # beside other words they tell more of the same value
LOWEST, HIGHEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
# What says nothing about the text, as all does that begins with x-; the last lines are other programs' words.
_NOTES = frozenset((
    "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default", "deprecated",
    "description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly",
    "enumDescriptions", "enumNames", "externalDocs", "id", "markdownDescription", "propertyOrdering", "xml",
))  # fmt: skip
# What a string is for, in the words of OpenAPI and pydantic: nothing that its characters show.
LOOSE_FORMATS = ("base64", "base64url", "binary", "byte", "directory-path", "file-path", "password", "path")
UUID_OF_VERSION = re.compile("uuid([1-8])")  # of pydantic
_FORMATS = (
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid",
)  # fmt: skip
_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
# Of days of the year, those that each year has: in a name one expression has to say it.
_FORMS_OF_NAMES = {
    "date": f"^{_YEAR}-((0[13578]|1[02])-31|(0[13-9]|1[0-2])-(29|30)|(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
# Not $schema: the library would read tuples, and `const`, as that draft has them, and not as they are put here.
READ = frozenset(("$id", *_ONE, *_LISTS, *_NAMED, *_VALUES))
_ALLOWED = READ | _NOTES | {"nullable"}
# Part of JSON Schema, and beyond what can be kept token by token.
_IMPOSSIBLE = frozenset((
    "$anchor", "$dynamicAnchor", "$dynamicRef", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "x-guidance",
))  # fmt: skip
_KNOWN = _ALLOWED | _IMPOSSIBLE


def check_schema(schema: Mapping[str, Any], place: str = "") -> None:
    """Raises InvalidParams for a schema that asks for what cannot be kept; names the place in it, behind its own."""
    start = place
    waiting: list[tuple[str, int, Any]] = [(place, 0, schema)]
    parts: list[Mapping[str, Any]] = []
    num_parts = 0
    while waiting:
        place, depth, part = waiting.pop()
        num_parts += 1
        if depth > MAX_DEPTH or num_parts > MAX_SUBSCHEMAS:
            limits = f"at most {MAX_SUBSCHEMAS} schemas, at most {MAX_DEPTH} deep"
            raise InvalidParams(f"grammar: json_schema is too large: it may hold {limits}: make it smaller")
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            _refuse(place, f"is {part!r:.40}", "give a schema, which is an object, or true or false")
        _check_keywords(schema, place, part)
        _check_numbers(place, part)
        parts.append(part)
        waiting += [(f"{place}/{name}", depth + 1, inner) for name, inner in inner_schemas(place, part)]
    if (num_patterns := most_patterns(schema, parts)) > MAX_PATTERNS:
        _refuse(start, f"{num_patterns} patterns are asked of one string", f"ask at most {MAX_PATTERNS} of it")
    multiples = check_multiples(start, parts)
    if math.lcm(*multiples) > MAX_MULTIPLE and any(map(_combines, parts)):
        _refuse(start, "the common multiple of its multipleOf is too large", "say it in one place, and of less digits")


def check_multiples(place: str, parts: Sequence[Mapping[str, Any]]) -> set[int]:
    """The digits of each `multipleOf` in these parts. Raises InvalidParams if they take the library too long.

    For ten of 32,000 it took eight seconds, in which no other grammar could begin, and for hundreds minutes.
    """
    multiples = {_digits(part["multipleOf"]) for part in parts if "multipleOf" in part}
    if sum(multiples) > MAX_MULTIPLE:
        cure = f"give fewer, or smaller ones: {MAX_MULTIPLE} in all, without points"
        _refuse(place, "its different multipleOf are too large together", cure)
    return multiples


def changed_schema(schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> Any:
    """A copy with `change` made to it and to each schema inside; None leaves one as it is. What is none stays."""
    if not isinstance(schema, Mapping) or (changed := change(schema)) is None:
        return schema
    copy = dict(changed)
    for keyword, value in copy.items():
        if keyword in (*_LISTS, "items") and isinstance(value, list | tuple):
            copy[keyword] = [changed_schema(inner, change) for inner in value]
        elif keyword in _ONE:
            copy[keyword] = changed_schema(value, change)
        elif keyword in _NAMED and isinstance(value, Mapping):
            copy[keyword] = {name: changed_schema(inner, change) for name, inner in value.items()}
    return copy


def without_null_keywords(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the keywords that are null, as typed clients write those that they leave out; `type` may be a slip."""
    kept, numbers = ("const", "default", "type"), count()

    def strip(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if next(numbers) >= MAX_SUBSCHEMAS:  # which check_schema refuses; parts in many places may be without number
            return None
        return {name: value for name, value in part.items() if value is not None or name in kept}

    try:
        stripped: Mapping[str, Any] = changed_schema(schema, strip)
    except RecursionError:  # check_schema says how deep it may be
        return schema
    return stripped


def parts_of(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A checked schema and all inside, but true and false."""
    parts: list[Mapping[str, Any]] = []

    def note(part: Mapping[str, Any]) -> Mapping[str, Any]:
        parts.append(part)
        return part

    changed_schema(schema, note)
    return parts


def _check_keywords(root: Mapping[str, Any], place: str, schema: Mapping[str, Any]) -> None:
    for keyword, value in schema.items():
        if keyword == "nullable" and not isinstance(value, bool):
            _refuse(place, f"{keyword} is {value!r:.40}", "give true or false")
        if is_impossible(root, schema, keyword):
            _refuse(place, f"{keyword} cannot be kept", "leave it out")
        if not is_known(keyword):
            nearest = difflib.get_close_matches(str(keyword), _ALLOWED, n=1)
            cure = f"did you mean {nearest[0]}?" if nearest else "leave it out"
            _refuse(place, f"{keyword!r:.60} is no keyword that is known here", cure)
    if not has_known_format(schema):
        cure = f"give a pattern for it, or one of {', '.join(_FORMATS)}"
        _refuse(place, f"the format {schema['format']!r:.60} is not known here", cure)
    pattern = schema.get("pattern")
    pattern = without_look_around(pattern)[0] if isinstance(pattern, str) else pattern
    for regex in [pattern, *_names(schema.get("patternProperties"))]:
        if isinstance(regex, str):
            check_regex(f"json_schema: at {place or '/'}", regex)


def is_known(keyword: object) -> bool:
    """Whether it is a keyword of JSON Schema, or a note."""
    return keyword in _KNOWN or str(keyword).startswith("x-")


def is_impossible(root: Mapping[str, Any], schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether a keyword of a schema cannot be kept token by token; some writers of schemas ask for nothing by it."""
    value = schema[keyword]
    if keyword == "propertyNames":  # of names in JSON all are strings
        asks_nothing = value in ({}, {"type": "string"}) or value is True
        return not asks_nothing and listed_names(root, schema) is None and names_pattern(root, schema) is None
    if keyword == "not":
        return schema is root or not is_never(schema)
    return keyword in _IMPOSSIBLE and not (keyword == "uniqueItems" and value is False)


def is_never(schema: Mapping[str, Any]) -> bool:
    """Whether nothing fits, in the words of zod: never."""
    return "not" in schema and (schema["not"] == {} or schema["not"] is True)


def has_known_format(schema: Mapping[str, Any]) -> bool:
    """Whether a string can have its format, if it has one; beside a pattern, which tells more, any may stand.

    That of a number, as OpenAPI's int32, says nothing here.
    """
    form, kinds = schema.get("format"), schema.get("type", "string")
    is_of_strings = "string" in kinds if isinstance(kinds, list) else kinds == "string"
    if not isinstance(form, str) or "pattern" in schema or not is_of_strings:
        return True
    return form in (*_FORMATS, *LOOSE_FORMATS) or UUID_OF_VERSION.fullmatch(form) is not None


def listed_names(root: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str] | None:
    """The names that `propertyNames` allows, where it lists them, and nothing else says what a name may be."""
    rule = resolved(root, schema.get("propertyNames"))
    if not isinstance(rule, Mapping) or schema.keys() & {"patternProperties", "minProperties"}:
        return None
    names = listed_values(rule)
    is_plain = rule.keys() <= {"const", "enum", "type"} | _NOTES and rule.get("type", "string") == "string"
    return names if is_plain and names is not None and all(isinstance(name, str) for name in names) else None


def names_pattern(root: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """What `propertyNames` asks of names, where one regular expression says it, and nothing else names properties."""
    rule = resolved(root, schema.get("propertyNames"))
    if not isinstance(rule, Mapping) or schema.keys() & {"patternProperties", "properties"}:
        return None
    asked = rule.keys() - {"type"} - _NOTES
    if rule.get("type", "string") != "string" or not asked:
        return None
    pattern = None
    if asked <= {"maxLength", "minLength"}:
        pattern = rf"^[\s\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    elif len(asked) == 1:
        pattern = rule["pattern"] if "pattern" in asked else _FORMS_OF_NAMES.get(str(rule.get("format")))
    return pattern if isinstance(pattern, str) and can_be_kept(pattern) else None


def can_be_kept(pattern: str) -> bool:
    """Whether a pattern asks for nothing that is refused."""
    try:
        check_regex("", without_look_around(pattern)[0])
    except InvalidParams:
        return False
    return True


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema allows, where it lists them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) else None


def _check_numbers(place: str, schema: Mapping[str, Any]) -> None:
    for keyword in ("const", "enum"):
        if any(abs(number) > MAX_WHOLE for number in _whole_numbers(schema.get(keyword))):
            _refuse(place, f"{keyword} has a number beyond 2^53", "give it as a string")
    for keyword, sign in ((keyword, sign) for ends, sign in ((LOWEST, 1), (HIGHEST, -1)) for keyword in ends):
        if is_number(end := schema.get(keyword)) and not sign * end <= MAX_WHOLE:
            _refuse(place, f"{keyword} lies beyond 2^53", "give a nearer one")
    step = schema.get("multipleOf")
    if is_number(step) and (not 0 < step < 1e30 or _digits(step) > MAX_MULTIPLE):
        cure = f"give at most {MAX_MULTIPLE}, with any point"
        _refuse(place, "multipleOf is not above 0, or has too many digits", cure)
    least, required = schema.get("minProperties"), schema.get("required", ())
    if is_number(least) and isinstance(required, Sequence) and least > len(required) + 1:
        why = "which could be one name several times"
        _refuse(place, f"minProperties is {least}, {why}", "give at most one more than are required")


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is one."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digits(number: object) -> int:
    """A number without its point and the zeros at its ends."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits))) if is_number(number) else 1


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
    others = schema.keys() & READ - COMBINING - {"$id", "$defs", "definitions"}
    return "allOf" in schema or bool(others and schema.keys() & COMBINING)


def inner_schemas(place: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas right within one at a place, by their names. Raises InvalidParams where there is something else."""
    is_tuple = isinstance(schema.get("items"), list)  # as before prefixItems
    for keyword in _ONE:
        if keyword in schema and not (is_tuple and keyword == "items"):
            yield keyword, schema[keyword]
    for keyword in (*_LISTS, *(["items"] if is_tuple else ())):
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

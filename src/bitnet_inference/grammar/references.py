"""What the references in a JSON schema stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

_OF_URIS = "#%/:?@!$&'()*+,;=~"  # beside letters and digits; %, as some of the name may be spelt so already
_REFERRING = {"$comment", "$ref", "default", "description", "title"}


def references(schema: Any) -> Iterator[str]:
    """All that stand in it, also where they are no keyword: those change nothing."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part


def local(ref: str) -> str:
    """A reference as it is meant: some clients write /$defs/X for #/$defs/X."""
    return f"#{ref}" if ref.startswith(("/$defs/", "/definitions/")) else ref


def is_pointer(ref: str) -> bool:
    """Whether it names a place in the schema it stands in."""
    return ref == "#" or ref.startswith("#/")


def spelt(ref: str) -> str:
    """A reference as URIs are spelt, which says the same: to name #/$defs/Größe or #/$defs/Box[int] is usual."""
    return quote(ref, safe=_OF_URIS)


def resolved(root: Any, schema: Any) -> Any:
    """A schema, or what it stands for where it is a reference with notes, of which a few may follow each other."""
    for _ in range(8):
        is_reference = isinstance(schema, Mapping) and schema.keys() <= _REFERRING
        if not is_reference or not isinstance(ref := schema.get("$ref"), str):
            break
        schema = target(root, local(ref))
    return schema


def target(schema: Any, ref: str) -> Any:
    """What a reference stands for; None where that is not in the schema."""
    if ref[:1] != "#":
        return None
    for name in unquote(ref[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, Mapping) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list | tuple) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema

"""JSON schemas that need not be kept to the letter, as those of tools that are not strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.regex import check_regex, plain_decimals
from bitnet_inference.grammar.schema import changed_schema, has_known_format, is_impossible


def loosened(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the keywords, formats and patterns that cannot be kept token by token; what is wrong otherwise stays.

    So do keywords about references, without which these would lead nowhere.
    """
    try:
        loose: Mapping[str, Any] = changed_schema(schema, lambda part: _loosened(schema, part))
    except RecursionError:  # check_schema says how deep it may be
        return schema
    return loose


def _loosened(root: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {
        keyword: value
        for keyword, value in part.items()
        if str(keyword).startswith("$") or not is_impossible(root, part, keyword)
    }
    if isinstance(pattern := kept.get("pattern"), str) and not _can_be_kept(pattern):
        del kept["pattern"]
    named = kept.get("patternProperties")
    if isinstance(named, Mapping) and not all(map(_can_be_kept, named)):
        kept["patternProperties"] = {name: inner for name, inner in named.items() if _can_be_kept(name)}
        kept.pop("additionalProperties", None)  # it does not tell of the names that the others allow
    if not has_known_format(kept):
        del kept["format"]
    return kept


def _can_be_kept(pattern: str) -> bool:
    try:
        check_regex("", plain_decimals(pattern))
    except InvalidParams:
        return False
    return True

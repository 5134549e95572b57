"""A JSON object from a stranger's bytes, without its nulls, how to show a piece of it, and to write one in a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError

_MAX_SHOWN = 60
_AGAIN = "download the file again"
# Characters that JSON may hold, and at which str.splitlines ends a line, with their escapes.
LINE_ENDS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}


def json_line(value: Any, ensure_ascii: bool = False) -> str:
    """A value in JSON, in one line for every reader."""
    return json.dumps(value, ensure_ascii=ensure_ascii).translate(LINE_ENDS)


def without_nulls(value: Any) -> Any:
    """An object without what is null in it, which counts as left out; anything else as it is."""
    is_object = isinstance(value, Mapping)
    return {key: each for key, each in value.items() if each is not None} if is_object else value


def shown(value: object) -> str:
    """A value for an error message: on one line, printable on any terminal, short."""
    text = repr(value)
    printable = text.encode("ascii", "backslashreplace").decode("ascii")
    return printable if len(printable) <= _MAX_SHOWN else printable[:_MAX_SHOWN] + "..."


def parse_object(data: bytes, path: Path, where: str, cure: str = _AGAIN) -> dict[str, Any]:
    """A JSON object from bytes; raises FormatError as `parse_json` does."""
    value = parse_json(data, path, where, cure)
    if not isinstance(value, dict):
        raise FormatError(path, where, f"a JSON object was expected, not {shown(value)}: {cure}")
    return value


def parse_json(data: bytes, path: Path, where: str, cure: str = _AGAIN) -> Any:
    """Any JSON from bytes; raises FormatError naming `path` and `where` for broken JSON and doubled keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise FormatError(path, where, f"the key {shown(twice)} stands there twice: keep one")
        return result

    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)  # of bytes it would guess an encoding
    except UnicodeDecodeError as error:
        raise FormatError(path, where, f"this is not UTF-8 at byte {error.start}: {cure}") from error
    except RecursionError as error:
        raise FormatError(path, where, f"the JSON is nested too deeply: {cure}") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise FormatError(path, where, f"this is not JSON ({place}): {cure}") from error
    except ValueError as error:
        raise FormatError(path, where, f"this is not JSON ({shown(str(error))}): {cure}") from error

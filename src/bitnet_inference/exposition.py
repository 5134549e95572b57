"""Reads Prometheus' text format, as far as a server's /metrics uses it: samples, no comments, no time stamps."""

from __future__ import annotations

import re
from typing import NamedTuple

from bitnet_inference.errors import InvalidParams

MAX_LINES = 200_000
MAX_LINE_CHARS = 4096
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.ASCII)
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)', re.ASCII)
_ESCAPE = re.compile(r"\\(.)")


class Sample(NamedTuple):
    """A number, what it is called, and its labels."""

    name: str
    labels: dict[str, str]
    value: float


def read_samples(text: str) -> list[Sample]:
    """All samples, in order. Raises InvalidParams for what is no such text, or too long."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        raise InvalidParams(
            f"the metrics have {len(lines)} lines, at most {MAX_LINES} are read: is this a bitnet server?"
        )
    return [
        _read(number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _read(number: int, line: str) -> Sample:
    match = _LINE.fullmatch(line.strip()) if len(line) <= MAX_LINE_CHARS else None
    try:
        if match is None:
            raise ValueError
        return Sample(match[1], _labels(match[2] or ""), float(match[3]))
    except ValueError:
        raise InvalidParams(f"line {number} of the metrics is {line!r:.80}: is this a bitnet server?") from None


def _labels(text: str) -> dict[str, str]:
    found, place = {}, 0
    while place < len(text):
        match = _LABEL.match(text, place)
        if match is None:
            raise ValueError
        found[match[1]] = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], match[2])
        place = match.end()
    return found

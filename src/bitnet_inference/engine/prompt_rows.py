"""Hands rows of a step's output to those who read prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.request import Request
from bitnet_inference.engine.sampler import MAX_LOGITS_BYTES
from bitnet_inference.model.contract import Output


class PromptRow(NamedTuple):
    """A row of an output that tells of a position of a request's prompt, which its reader waits for."""

    request: Request
    position: int
    row: int


def prompt_rows(request: Request, end: int) -> list[PromptRow]:
    """What a request's reader gets of an output, of which row end - 1 is that of the last token known and computed."""
    return [PromptRow(request, at, end - request.num_computed + at) for at in request.readable]


def show_prompts(output: Output, rows: Sequence[PromptRow], vocab_size: int) -> Iterator[tuple[Request, Exception]]:
    """Let all readers read; yields the requests whose reader has raised, and what.

    The head is read once for many rows, of all requests, but logits take bounded memory. Whoever gets a request from
    here ends it before going on.
    """
    step = max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
    logits = [row for row in rows if row.request.reads == "logits"]
    for start in range(0, len(logits), step):
        chunk = logits[start : start + step]
        yield from _read(chunk, output.full([row.row for row in chunk]))
    if hidden := [row for row in rows if row.request.reads == "hidden"]:
        yield from _read(hidden, output.hidden([row.row for row in hidden]))  # no more than the step has computed


def _read(rows: Sequence[PromptRow], values: NDArray[np.float32]) -> Iterator[tuple[Request, Exception]]:
    end = 0
    for request, group in groupby(rows, attrgetter("request")):
        first, *others = group
        start, end = end, end + 1 + len(others)
        if request.finish is None:  # it has not failed with an earlier chunk
            try:
                request.read_rows(first.position, values[start:end])
            except Exception as error:
                yield request, error

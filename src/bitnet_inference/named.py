"""Logits processors and strategies under names, so that requests which only hold text can ask for them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bitnet_inference.engine.params import Processor, SamplingParams, Strategy
from bitnet_inference.errors import InvalidParams


class Named:
    """Callables of one LLM by their names."""

    def __init__(self) -> None:
        self._processors: dict[str, Processor] = {}
        self._strategies: dict[str, Strategy] = {}

    def add_processor(self, name: str, processor: Processor) -> None:
        """Raises InvalidParams for what is no name, no callable, or there already."""
        _add(self._processors, "processor", name, processor)

    def add_strategy(self, name: str, strategy: Strategy) -> None:
        """As add_processor."""
        _add(self._strategies, "strategy", name, strategy)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """The same parameters without names; an unknown one raises InvalidParams, which tells the nearest."""
        if not isinstance(params, SamplingParams):
            raise InvalidParams(f"params is {params!r:.60}: give SamplingParams, or None for the model's own")
        if not any(isinstance(each, str) for each in (*params.processors, params.strategy)):
            return params
        processors = [_find(self._processors, "processor", each) for each in params.processors]
        strategy = params.strategy and _find(self._strategies, "strategy", params.strategy)
        return replace(params, processors=processors, strategy=strategy)


def _add(known: dict[str, Any], kind: str, name: object, called: object) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidParams(f"the name of a {kind} is {name!r:.60}: give a string")
    if not callable(called):
        raise InvalidParams(f"the {kind} {name!r} is {called!r:.60}: give a callable of (tokens, logits)")
    if name in known:
        raise InvalidParams(f"there is a {kind} {name!r} already: choose another name")
    known[name] = called


def _find(known: dict[str, Any], kind: str, given: str | Callable[..., Any]) -> Any:
    if not isinstance(given, str):
        return given
    if given not in known:
        nearest = difflib.get_close_matches(given, known, n=1)
        there = f"there are {', '.join(known)}" if known else f"none is registered (LLM.register_{kind})"
        raise InvalidParams(f"unknown {kind} {given!r:.60}: " + (f"did you mean {nearest[0]}?" if nearest else there))
    return known[given]

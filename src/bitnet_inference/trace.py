"""Listens to an engine and writes what it did when, as a trace for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from bitnet_inference.config import checked_count
from bitnet_inference.engine.events import (
    PHASES,
    Event,
    Finished,
    Phase,
    Preempted,
    Queued,
    Replaced,
    Scheduled,
    Stepped,
    Token,
)
from bitnet_inference.model.plan import StepTime
from bitnet_inference.output_files import refuse_unwritable, write_whole

ENGINE, REQUESTS = 1, 2  # the two groups of tracks; a request's track has its number
REST = "(rest)"  # what is no step of a plan


class _Slice(NamedTuple):
    """What lasted from `begin` to `end` seconds on a track."""

    group: int
    track: int
    name: str
    begin: float
    end: float
    details: Mapping[str, Any]


class _Step(NamedTuple):
    event: Stepped  # without its plan_times
    verbs: dict[tuple[Phase, str], float]  # their sums


class Trace:
    """A listener that keeps the newest `max_kept` steps, and as many phases of requests, and writes them into a file.

    Used in a `with` block around the LLM, it writes the file at the block's end, whatever the block raises. `table` has
    the sums of all steps, those that are not kept any more among them.
    """

    def __init__(self, file: str | Path, *, max_kept: int = 10_000) -> None:
        """Raises InvalidParams where the file cannot be written."""
        max_kept = checked_count("max_kept", max_kept, 1 << 31)
        self.file = Path(file)
        refuse_unwritable(self.file)
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque(maxlen=max_kept)
        self._phases: deque[_Slice] = deque(maxlen=max_kept)  # of requests
        self._open: dict[int, tuple[str, float]] = {}  # the phase of each request under way, and since when
        self._has_token: set[int] = set()
        self._totals: dict[tuple[Phase, str], float] = {}

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._steps:  # an LLM that could not be loaded has nothing to show
            self.write()

    def __call__(self, event: Event) -> None:
        """Hear an event of an engine."""
        with self._lock:
            match event:
                case Token():
                    if event.index == 0:
                        self._has_token.add(event.request)
                        self._enter(event.request, "output", event.time)
                case Stepped():
                    self._hear_step(event)
                case Queued():
                    self._open[event.request] = ("queued", event.time)
                case Scheduled():
                    self._enter(event.request, "output" if event.request in self._has_token else "prompt", event.time)
                case Preempted():
                    self._enter(event.request, "preempted", event.time)
                case Finished():
                    self._hear_end(event)
                case Replaced():
                    pass  # its requests were preempted, which has been told

    def write(self) -> None:
        """Write what has been heard until now; requests under way end there. Raises InvalidParams."""
        with self._lock:
            steps, slices, now = list(self._steps), list(self._phases), monotonic()
            slices += [_slice(number, *phase, now, {}) for number, phase in self._open.items()]
        write_whole(self.file, json.dumps({"traceEvents": _records(steps, slices), "displayTimeUnit": "ms"}) + "\n")

    def table(self) -> list[tuple[str, ...]]:
        """Times and shares of all steps, by verb of the plan and phase of a step, under a row of titles."""
        with self._lock:
            found = sorted(self._totals.items(), key=lambda item: -item[1])
        total = sum(seconds for _, seconds in found)
        rows = [
            (verb, f"{1000 * seconds:.1f}", f"{100 * seconds / total:.1f}%", phase)
            for (phase, verb), seconds in found
            if seconds >= 0.00005  # what would be shown as 0.0
        ]
        return [("", "ms", "share", "phase of a step"), *rows]

    def _enter(self, request: int, phase: str, time: float) -> None:
        self._close(request, time, {})
        self._open[request] = (phase, time)

    def _close(self, request: int, time: float, details: Mapping[str, Any]) -> None:
        self._phases.append(_slice(request, *self._open[request], time, details))

    def _hear_end(self, event: Finished) -> None:
        usage = event.usage
        details = {
            "finish": event.finish.reason,
            "prompt tokens": usage.num_prompt_tokens,
            "cached tokens": usage.num_cached_tokens,
            "output tokens": usage.num_output_tokens,
        }
        self._close(event.request, event.time, details)
        del self._open[event.request]
        self._has_token.discard(event.request)

    def _hear_step(self, event: Stepped) -> None:
        verbs = _by_verb(event.plan_times)
        self._steps.append(_Step(replace(event, plan_times=()), verbs))
        rests = {(phase, REST): event.seconds[phase] - _sum_of(verbs, phase) for phase in PHASES}
        for key, seconds in (verbs | rests).items():
            self._totals[key] = self._totals.get(key, 0.0) + seconds


def _by_verb(times: Iterable[StepTime]) -> dict[tuple[Phase, str], float]:
    """Seconds by phase and verb, in order of first use: the body runs in "forward", the other plans in "sample"."""
    verbs: dict[tuple[Phase, str], float] = {}
    for plan, verb, seconds in times:
        key: tuple[Phase, str] = ("forward" if plan == "body" else "sample", verb)
        verbs[key] = verbs.get(key, 0.0) + seconds
    return verbs


def _sum_of(verbs: Mapping[tuple[Phase, str], float], phase: Phase) -> float:
    return sum(seconds for (of, _), seconds in verbs.items() if of == phase)


def _slice(request: int, phase: str, begin: float, end: float, details: Mapping[str, Any]) -> _Slice:
    return _Slice(REQUESTS, request, phase, begin, end, details)


def _records(steps: list[_Step], slices: list[_Slice]) -> list[dict[str, Any]]:
    """Chrome's trace events: names of tracks, then slices and counters by time."""
    slices = [*slices, *(each for step in steps for each in _slices(step))]
    origin = min([*(each.begin for each in slices), *(step.event.time for step in steps)], default=0.0)
    records = [_slice_record(each, origin) for each in slices]
    records += [record for step in steps for record in _counters(step.event, origin)]
    return [*_names({each.track for each in slices if each.group == REQUESTS}), *sorted(records, key=lambda r: r["ts"])]


def _slices(step: _Step) -> Iterator[_Slice]:
    """A step, its phases in order, and in them the verbs, each summed up: where they stand says nothing."""
    event, begin = step.event, step.event.time
    if not event.num_tokens:
        return
    details = {
        "decoding sequences": event.num_decoding,
        "prompts": event.num_prompts,
        "prompt tokens": event.num_prompt_tokens,
        "draft tokens": event.num_draft_tokens,
        "right draft tokens": event.num_right_draft_tokens,
        "new tokens": event.num_new_tokens,
    }
    yield _Slice(ENGINE, 1, "step", begin, begin + sum(event.seconds[phase] for phase in PHASES), details)
    for phase in PHASES:
        end = begin + event.seconds[phase]
        if end > begin:
            yield _Slice(ENGINE, 1, phase, begin, end, {})
        at = begin
        for (_, verb), seconds in ((key, seconds) for key, seconds in step.verbs.items() if key[0] == phase):
            yield _Slice(ENGINE, 1, verb, at, min(at + seconds, end), {})
            at = min(at + seconds, end)
        begin = end


def _slice_record(each: _Slice, origin: float) -> dict[str, Any]:
    begin, end = _nanoseconds(each.begin - origin), _nanoseconds(each.end - origin)
    where = {"ph": "X", "pid": each.group, "tid": each.track, "ts": begin / 1000, "dur": (end - begin) / 1000}
    return {"name": each.name, **where, "args": each.details}


def _counters(event: Stepped, origin: float) -> Iterator[dict[str, Any]]:
    """As the step has left them."""
    end = _nanoseconds(event.time + sum(event.seconds.values()) - origin)
    values = {
        "cache blocks": {"used": event.num_blocks - event.num_free_blocks},
        "requests": {"running": event.num_running, "waiting": event.num_waiting},
    }
    for name, numbers in values.items():
        yield {"name": name, "ph": "C", "pid": ENGINE, "ts": end / 1000, "args": numbers}


def _names(requests: Iterable[int]) -> Iterator[dict[str, Any]]:
    for group, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"name": "process_name", "ph": "M", "pid": group, "args": {"name": name}}
    yield {"name": "thread_name", "ph": "M", "pid": ENGINE, "tid": 1, "args": {"name": "steps"}}
    for number in sorted(requests):
        name = f"request {number}"
        yield {"name": "thread_name", "ph": "M", "pid": REQUESTS, "tid": number, "args": {"name": name}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

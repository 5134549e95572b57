"""Listens to an engine and counts: totals and distributions, as a server's metrics want them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import Any

from bitnet_inference.engine.events import Event, Finished, Preempted, Queued, Replaced, Scheduled, Stepped, Token

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
REQUEST_TOKENS = tuple(4**power for power in range(11))
TOTALS = (
    "requests", "prompt_tokens", "cached_tokens", "output_tokens", "new_tokens", "computed_tokens", "preemptions",
    "steps", "draft_tokens", "right_draft_tokens", "device_failures",
)  # fmt: skip


class Histogram:
    """How many values were at most each of `bounds`, which ascend; their number and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.count, self.sum = bounds, 0, 0.0
        self._counts = [0] * (len(bounds) + 1)  # the last is of those beyond all bounds

    def add(self, value: float) -> None:
        """One value more."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def as_json(self) -> dict[str, Any]:
        """`at_most`: by bound, how many values were not larger; `count` and `sum` of all."""
        at_most = dict(zip(map(str, self.bounds), accumulate(self._counts), strict=False))
        return {"at_most": at_most, "count": self.count, "sum": self.sum}


class Counts:
    """A listener that counts; `as_json` tells, from any thread, what it has heard.

    What it holds does not grow but with the requests under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._last_step: Stepped | None = None
        self._queued: dict[int, float] = {}  # requests without a token, and since when
        self._last_token: dict[int, float] = {}
        self._histograms = {
            "queue_s": Histogram(SECONDS),
            "first_token_s": Histogram(SECONDS),
            "token_gap_s": Histogram(SECONDS),
            "output_token_s": Histogram(SECONDS),
            "request_s": Histogram(SECONDS),
            "request_prompt_tokens": Histogram(REQUEST_TOKENS),
            "request_output_tokens": Histogram(REQUEST_TOKENS),
            "step_s": Histogram(SECONDS),
            "step_tokens": Histogram(TOKENS),
        }

    def __call__(self, event: Event) -> None:
        """Hear an event of an engine."""
        with self._lock:
            match event:
                case Token():
                    self._hear_token(event)
                case Stepped():
                    self._hear_step(event)
                case Queued():
                    self._totals["requests"] += 1
                    self._queued[event.request] = event.time
                case Scheduled():
                    pass  # a request's Usage tells how long it waited
                case Preempted():
                    self._totals["preemptions"] += 1
                case Finished():
                    self._hear_end(event)
                case Replaced():
                    self._totals["device_failures"] += 1

    def __repr__(self) -> str:
        requests, tokens = self._totals["requests"], self._totals["new_tokens"]
        return f"<Counts {requests} requests, {sum(self._finished.values())} ended, {tokens} new tokens>"

    def as_json(self) -> dict[str, Any]:
        """Plain numbers.

        `finished`: requests by the reason of their Finish.
        `total`: "requests" that were queued, "prompt_tokens", "cached_tokens" (of these) and "output_tokens" of those
        that ended, "new_tokens" of all, as they come, "computed_tokens", of prompts too, "preemptions", "steps",
        "draft_tokens" that were tried, and "right_draft_tokens" among these, "device_failures" after which another
        model took the place of the first.
        `now`, as the last step left it: "waiting" and "running" requests, "blocks" of the cache, "blocks_used".
        Histograms: "queue_s" (from submission to the first step), "first_token_s" (from submission to the first token),
        "token_gap_s" (between tokens of a request), "step_s", and "step_tokens", computed in a step. Of requests that
        ended: "request_s" (from submission), "request_prompt_tokens", "request_output_tokens", and "output_token_s",
        the mean time of a token after the first.
        """
        with self._lock:
            return {
                "finished": dict(self._finished),
                "total": {name: self._totals[name] for name in TOTALS},
                "now": _now(self._last_step),
                **{name: histogram.as_json() for name, histogram in self._histograms.items()},
            }

    def _hear_token(self, event: Token) -> None:
        queued, last = self._queued.pop(event.request, None), self._last_token.get(event.request)
        if queued is not None:
            self._histograms["first_token_s"].add(event.time - queued)
        if last is not None:
            self._histograms["token_gap_s"].add(event.time - last)
        self._last_token[event.request] = event.time

    def _hear_step(self, event: Stepped) -> None:
        self._last_step = event
        if event.num_tokens:
            self._totals["steps"] += 1
            self._totals["new_tokens"] += event.num_new_tokens
            self._totals["computed_tokens"] += event.num_tokens
            self._totals["draft_tokens"] += event.num_draft_tokens
            self._totals["right_draft_tokens"] += event.num_right_draft_tokens
            self._histograms["step_tokens"].add(event.num_tokens)
            self._histograms["step_s"].add(sum(event.seconds.values()))

    def _hear_end(self, event: Finished) -> None:
        usage = event.usage
        self._queued.pop(event.request, None)
        self._last_token.pop(event.request, None)
        self._finished[event.finish.reason] += 1
        self._totals["prompt_tokens"] += usage.num_prompt_tokens
        self._totals["cached_tokens"] += usage.num_cached_tokens
        self._totals["output_tokens"] += usage.num_output_tokens
        values = {
            "queue_s": usage.queued_s,
            "request_s": usage.queued_s + usage.prompt_s + usage.output_s,
            "request_prompt_tokens": usage.num_prompt_tokens,
            "request_output_tokens": usage.num_output_tokens,
        }
        if usage.num_output_tokens > 1:
            values["output_token_s"] = usage.output_s / (usage.num_output_tokens - 1)
        for name, value in values.items():
            self._histograms[name].add(value)


def _now(step: Stepped | None) -> dict[str, int]:
    if step is None:
        return {"waiting": 0, "running": 0, "blocks": 0, "blocks_used": 0}
    return {
        "waiting": step.num_waiting,
        "running": step.num_running,
        "blocks": step.num_blocks,
        "blocks_used": step.num_blocks - step.num_free_blocks,
    }

"""GET /metrics: what the server and its engines have done, for Prometheus. The one door to prometheus_client.

Everything is read when somebody asks: a token costs nothing but its Counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import Response

from bitnet_inference.config import installed_version
from bitnet_inference.models import ModelState
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.stats import Watch
from bitnet_inference.server.traffic import Traffic

# Counts.as_json()["total"] -> what it is called, and what it is
TOTALS = {
    "requests": ("bitnet_requests", "Requests that an engine has taken."),
    "prompt_tokens": ("bitnet_prompt_tokens", "Prompt tokens of requests that ended."),
    "cached_tokens": ("bitnet_prefix_hit_tokens", "Prompt tokens that the cache had already, of requests that ended."),
    "new_tokens": ("bitnet_generated_tokens", "Tokens that were generated, told as they come."),
    "computed_tokens": ("bitnet_computed_tokens", "Tokens that went through the model: prompts, output and drafts."),
    "preemptions": ("bitnet_preemptions", "Requests that gave their cache blocks back and were computed again."),
    "steps": ("bitnet_steps", "Steps of the engine."),
    "draft_tokens": ("bitnet_draft_tokens", "Tokens that were guessed ahead and tried."),
    "right_draft_tokens": ("bitnet_accepted_draft_tokens", "Guessed tokens that were right."),
    "device_failures": ("bitnet_device_failures", "Devices that failed, so that the model was loaded for the CPU."),
}
NOW = {
    "running": ("bitnet_requests_running", "Requests that hold cache blocks."),
    "waiting": ("bitnet_requests_waiting", "Requests that wait for cache blocks, or for their turn."),
    "blocks": ("bitnet_cache_blocks", "Blocks of the KV cache."),
    "blocks_used": ("bitnet_cache_blocks_used", "Blocks of the KV cache that requests hold."),
}
HISTOGRAMS = {
    "queue_s": ("bitnet_queue_seconds", "From submission to the first step."),
    "token_gap_s": ("bitnet_token_gap_seconds", "Between two tokens of a request."),
    "step_s": ("bitnet_step_seconds", "Duration of an engine's step."),
    "step_tokens": ("bitnet_step_tokens", "Tokens computed in a step."),
}
# These are named by OpenTelemetry's conventions for generative AI.
GEN_AI = {
    "first_token_s": ("gen_ai_server_time_to_first_token_seconds", "From submission to the first token."),
    "output_token_s": (
        "gen_ai_server_time_per_output_token_seconds",
        "Mean of a request's tokens after the first.",
    ),
    "request_s": ("gen_ai_server_request_duration_seconds", "From submission to the end of a request."),
}
TOKEN_USAGE = ("gen_ai_client_token_usage", "Tokens of a request, by gen_ai_token_type input or output.")
MODEL, GEN_AI_MODEL = "model", "gen_ai_request_model"


class ServerMetrics(NamedTuple):
    """What /metrics tells of. `num_lost_lines` of the log are told where there is a log."""

    served: ServedModels
    watch: Watch
    traffic: Traffic
    num_lost_lines: Callable[[], int] | None = None


def add_metrics(app: FastAPI, metrics: ServerMetrics) -> None:
    """Answer /metrics: Prometheus' text, or OpenMetrics where the Accept header asks for it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Reader(metrics))
    ProcessCollector(registry=registry)

    @app.get("/metrics", include_in_schema=False)
    async def tell(request: Request) -> Response:
        encode, kind = _encoder(request.headers.get("accept", ""))
        # Not in the threads of `served`: they may all wait for a model that is being loaded.
        return Response(await asyncio.to_thread(encode, registry), headers={"Content-Type": kind})


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # its way to say that a version is none
        return choose_encoder("")


class _Reader(Collector):
    """Reads all numbers when it is asked."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        served, watch, traffic, num_lost_lines = self._metrics
        names = {path: each[0] for path, each in served.names_by_path().items()}
        states = {names[each.path]: each for each in served.models.loaded() if each.path in names}
        told = {names[path]: each.as_json() for path, each in watch.counts().items() if path in names}
        yield _gauge("bitnet_build_info", "The version of the server.", ["version"], [([installed_version()], 1)])
        yield from _of_models(list(names.values()), states, served.models.max_bytes)
        yield from _of_engines(told, states)
        yield from _of_traffic(traffic)
        if num_lost_lines is not None:
            yield _counter("bitnet_log_lines_lost", "Lines that could not be written.", [], [([], num_lost_lines())])


def _of_models(names: list[str], states: Mapping[str, ModelState], max_bytes: int) -> Iterator[Metric]:
    ready = {name: state for name, state in states.items() if not state.is_loading}
    used = sum(state.num_bytes for state in states.values())
    yield _gauge("bitnet_models_loaded", "How many models are loaded.", [], [([], len(ready))])
    yield _gauge("bitnet_memory_max_bytes", "What models may take together.", [], [([], max_bytes)])
    yield _gauge("bitnet_memory_used_bytes", "What models take together.", [], [([], used)])
    loaded = [([name], float(name in ready)) for name in names]
    yield _gauge("bitnet_model_loaded", "1 for a model that is loaded, 0 for one that is not.", [MODEL], loaded)
    sizes = [([name], state.num_bytes) for name, state in states.items()]
    yield _gauge("bitnet_model_bytes", "What a model takes: weights and KV cache.", [MODEL], sizes)
    times = [([name], state.load_s) for name, state in ready.items()]
    yield _gauge("bitnet_model_load_seconds", "How long a model took to load.", [MODEL], times)


def _of_engines(told: Mapping[str, Any], states: Mapping[str, ModelState]) -> Iterator[Metric]:
    for key, (name, what) in TOTALS.items():
        yield _counter(name, what, [MODEL], [([model], each["total"][key]) for model, each in told.items()])
    present = {model: each["now"] for model, each in told.items() if model in states}  # one that is gone has none
    for key, (name, what) in NOW.items():
        yield _gauge(name, what, [MODEL], [([model], now[key]) for model, now in present.items()])
    ends = [([model, reason], count) for model, each in told.items() for reason, count in each["finished"].items()]
    yield _counter("bitnet_requests_finished", "Requests that ended, by reason.", [MODEL, "finish_reason"], ends)
    for label, table in ((MODEL, HISTOGRAMS), (GEN_AI_MODEL, GEN_AI)):
        for key, (name, what) in table.items():
            yield _histogram(name, what, [label], [([model], each[key]) for model, each in told.items()])
    types = {"input": "request_prompt_tokens", "output": "request_output_tokens"}
    usage = [([model, kind], each[key]) for model, each in told.items() for kind, key in types.items()]
    yield _histogram(*TOKEN_USAGE, [GEN_AI_MODEL, "gen_ai_token_type"], usage)


def _of_traffic(traffic: Traffic) -> Iterator[Metric]:
    yield _gauge("http_server_active_requests", "HTTP requests under way.", [], [([], traffic.num_running)])
    labels = ["http_request_method", "http_route", "http_response_status_code"]
    told = [([method, route, str(status)], each) for (method, route, status), each in traffic.as_json()]
    seconds = [(key, each["seconds"]) for key, each in told]
    yield _histogram("http_server_request_duration_seconds", "HTTP requests, to the last byte.", labels, seconds)
    for way, name in (("bytes_in", "bitnet_http_request_bytes"), ("bytes_out", "bitnet_http_response_bytes")):
        yield _counter(name, "Bytes of HTTP bodies.", labels, [(key, each[way]) for key, each in told])


Rows = Iterable[tuple[list[str], float]]  # the values of the labels, and the number


def _gauge(name: str, what: str, labels: list[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, what, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(name: str, what: str, labels: list[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, what, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _histogram(name: str, what: str, labels: list[str], rows: Iterable[tuple[list[str], Any]]) -> Metric:
    family = HistogramMetricFamily(name, what, labels=labels)
    for values, told in rows:
        buckets = [(str(float(bound)), float(count)) for bound, count in told["at_most"].items()]
        family.add_metric(values, [*buckets, ("+Inf", float(told["count"]))], told["sum"])
    return family

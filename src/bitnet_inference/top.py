"""What a running server does now, from its /metrics: rates, quantiles and errors, for `bitnet top`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from bitnet_inference.errors import BitNetError, EngineError, InvalidParams
from bitnet_inference.exposition import read_samples

MAX_BYTES = 16 << 20
TIMEOUT_S = 5.0
LABELS = ("model", "gen_ai_request_model")

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Reading:
    """All numbers of /metrics at `time`, in seconds of time.monotonic(), by name and sorted labels."""

    time: float
    values: Mapping[Key, float]

    def get(self, name: str, **labels: str) -> float | None:
        """A number; None where there is none."""
        return self.values.get((name, tuple(sorted(labels.items()))))


@dataclass(frozen=True)
class ModelRow:
    """A model. None is what is not known: of a model that is not loaded, or because nothing has happened.

    Rates are those between the last two readings; quantiles, `hit_rate` and `num_errors` those of the window.
    """

    name: str
    is_loaded: bool
    num_bytes: float | None
    tokens_per_s: float | None
    computed_per_s: float | None
    num_running: float | None
    num_waiting: float | None
    first_token_s: tuple[float | None, float | None]  # p50 and p95
    gap_s: tuple[float | None, float | None]
    cache_use: float | None  # 0 to 1
    hit_rate: float | None  # 0 to 1, of prompt tokens
    num_errors: float


@dataclass(frozen=True)
class Overview:
    """All of a server. `failures`: "401 POST /v1/completions" -> how often in the window."""

    version: str
    num_http: float
    resident_bytes: float | None
    used_bytes: float
    max_bytes: float
    models: list[ModelRow]
    failures: dict[str, float]


class _NoRedirects(HTTPRedirectHandler):
    """A key is for the server that was named, and for no other."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse."""


def read_server(url: str, api_key: str | None = None) -> Reading:
    """Ask a server for its metrics. Raises InvalidParams, and EngineError where it is not there."""
    if not url.startswith(("http://", "https://")):
        raise InvalidParams(f"{url!r} is no address: give one as http://127.0.0.1:8000")
    address = url.rstrip("/").removesuffix("/v1") + "/metrics"
    text = _fetch(address, {"Authorization": f"Bearer {api_key}"} if api_key else {})
    if len(text) > MAX_BYTES:
        raise InvalidParams(f"{address} has more than {MAX_BYTES} bytes: is this a bitnet server?")
    found = {
        (name, tuple(sorted(labels.items()))): value
        for name, labels, value in read_samples(text.decode("utf-8", "replace"))
    }
    if not any(name == "bitnet_build_info" for name, _ in found):
        raise InvalidParams(f"{address} has no metrics of bitnet: give the address of `bitnet serve`")
    return Reading(time.monotonic(), found)


def _fetch(address: str, headers: dict[str, str]) -> bytes:
    try:
        with build_opener(_NoRedirects()).open(Request(address, headers=headers), timeout=TIMEOUT_S) as answer:
            return bytes(answer.read(MAX_BYTES + 1))
    except HTTPError as error:
        error.close()
        raise _refusal(address, error.code) from None
    except UnicodeEncodeError:
        raise InvalidParams("the API key has letters that no header can hold: copy it again") from None
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise EngineError(f"{address} does not answer ({why}): start `bitnet serve`, or give its address") from None


def _refusal(address: str, status: int) -> BitNetError:
    if status in (401, 403):
        return InvalidParams(f"{address} answers {status}: give a key of this server with --api-key, or BITNET_API_KEY")
    return EngineError(f"{address} answers {status}: give the address of `bitnet serve`")


def overview(now: Reading, before: Reading | None = None, since: Reading | None = None) -> Overview:
    """What a server does. Rates need the reading `before`; the window begins with `since`, or when the server did.

    Raises InvalidParams for metrics that are not bitnet's.
    """
    try:
        return _overview(now, before, since)
    except (KeyError, ValueError):  # labels that are not there, bounds that are no numbers
        raise InvalidParams("these metrics are not those of bitnet: give the address of `bitnet serve`") from None


def _overview(now: Reading, before: Reading | None, since: Reading | None) -> Overview:
    names = [dict(labels)["model"] for name, labels in now.values if name == "bitnet_model_loaded"]
    version = next(dict(labels)["version"] for name, labels in now.values if name == "bitnet_build_info")
    return Overview(
        version=version,
        num_http=now.get("http_server_active_requests") or 0.0,
        resident_bytes=now.get("process_resident_memory_bytes"),
        used_bytes=now.get("bitnet_memory_used_bytes") or 0.0,
        max_bytes=now.get("bitnet_memory_max_bytes") or 0.0,
        models=[_row(name, now, before, since) for name in sorted(names)],
        failures=_failures(now, since),
    )


def _row(name: str, now: Reading, before: Reading | None, since: Reading | None) -> ModelRow:
    blocks, used = now.get("bitnet_cache_blocks", model=name), now.get("bitnet_cache_blocks_used", model=name)
    hits = _grown("bitnet_prefix_hit_tokens_total", now, since, model=name)
    prompts = _grown("bitnet_prompt_tokens_total", now, since, model=name)
    return ModelRow(
        name=name,
        is_loaded=bool(now.get("bitnet_model_loaded", model=name)),
        num_bytes=now.get("bitnet_model_bytes", model=name),
        tokens_per_s=_rate("bitnet_generated_tokens_total", now, before, name),
        computed_per_s=_rate("bitnet_computed_tokens_total", now, before, name),
        num_running=now.get("bitnet_requests_running", model=name),
        num_waiting=now.get("bitnet_requests_waiting", model=name),
        first_token_s=_quantiles("gen_ai_server_time_to_first_token_seconds", now, since, name),
        gap_s=_quantiles("bitnet_token_gap_seconds", now, since, name),
        cache_use=None if used is None or not blocks else used / blocks,
        hit_rate=hits / prompts if prompts else None,
        num_errors=_grown("bitnet_requests_finished_total", now, since, model=name, finish_reason="error"),
    )


def _grown(metric: str, now: Reading, since: Reading | None, **labels: str) -> float:
    """By how much a counter has grown; from zero where the server has begun anew."""
    value, old = now.get(metric, **labels) or 0.0, since.get(metric, **labels) if since else None
    return value - old if old is not None and old <= value else value


def _rate(metric: str, now: Reading, before: Reading | None, model: str) -> float | None:
    if before is None or now.time <= before.time or now.get(metric, model=model) is None:
        return None
    return _grown(metric, now, before, model=model) / (now.time - before.time)


def _quantiles(metric: str, now: Reading, since: Reading | None, model: str) -> tuple[float | None, float | None]:
    buckets: list[tuple[float, float]] = []
    for name, labels in now.values:
        given = dict(labels)
        if name == f"{metric}_bucket" and model in (given.get(label) for label in LABELS):
            buckets.append((float(given["le"]), _grown(name, now, since, **given)))
    return quantile(sorted(buckets), 0.5), quantile(sorted(buckets), 0.95)


def quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """Of a histogram: bounds, which ascend to infinity, and how many values are at most so large. None of no values.

    Within a bucket values are taken to be spread evenly; those beyond all bounds are told as the last bound.
    """
    if not buckets or not buckets[-1][1]:
        return None
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and bound != float("inf"):
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        if bound != float("inf"):
            low, below = bound, count
    return low


def _failures(now: Reading, since: Reading | None) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, labels in now.values:
        if name == "http_server_request_duration_seconds_count":
            given = dict(labels)
            status = given["http_response_status_code"]
            if status >= "400" and (count := _grown(name, now, since, **given)):
                found[f"{status} {given['http_request_method']} {given['http_route']}"] += count
    return dict(sorted(found.items(), key=lambda item: -item[1]))

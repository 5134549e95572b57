"""Reading /metrics, and what `bitnet top` makes of two readings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily

from bitnet_inference.errors import BitNetError, InvalidParams
from bitnet_inference.exposition import MAX_LINES, read_samples
from bitnet_inference.top import Reading, overview, quantile, read_server

INFINITY = float("inf")


def reading(time: float, text: str) -> Reading:
    return Reading(time, {(name, tuple(sorted(labels.items()))): value for name, labels, value in read_samples(text)})


def server(tokens: int, errors: int = 0, fast: int = 0, slow: int = 0, unauthorized: int = 0) -> str:
    times = "gen_ai_server_time_to_first_token_seconds_bucket"
    return f"""
        bitnet_build_info{{version="1"}} 1
        bitnet_model_loaded{{model="m"}} 1
        bitnet_model_loaded{{model="other"}} 0
        bitnet_generated_tokens_total{{model="m"}} {tokens}
        bitnet_requests_finished_total{{model="m",finish_reason="error"}} {errors}
        bitnet_cache_blocks{{model="m"}} 8
        bitnet_cache_blocks_used{{model="m"}} 2
        {times}{{gen_ai_request_model="m",le="1.0"}} {fast}
        {times}{{gen_ai_request_model="m",le="2.0"}} {fast + slow}
        {times}{{gen_ai_request_model="m",le="+Inf"}} {fast + slow}
        http_server_request_duration_seconds_count{{http_request_method="GET",http_route="/x",http_response_status_code="401"}} {unauthorized}
    """  # noqa: E501


@settings(max_examples=40)
@given(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False))
def test_what_prometheus_writes_is_read(label: str, value: float) -> None:
    class One:
        def collect(self) -> list[CounterMetricFamily]:
            family = CounterMetricFamily("some", "what\nit is", labels=["a", "b"])
            family.add_metric([label, "x"], value)
            return [family]

    registry = CollectorRegistry(auto_describe=False)
    registry.register(One())  # type: ignore[arg-type]
    assert read_samples(generate_latest(registry).decode()) == [("some_total", {"a": label, "b": "x"}, value)]


@given(st.text())
def test_anything_is_read_or_refused(text: str) -> None:
    try:
        read_samples(text)
    except InvalidParams:
        pass


@pytest.mark.parametrize("text", ["<html>", 'a{b="c} 1', 'a{b="c" d="e"} 1', "a one", "a 1 2 3", "a" * 5000 + " 1"])
def test_other_texts_are_refused_by_line(text: str) -> None:
    with pytest.raises(InvalidParams, match="line 2 of the metrics"):
        read_samples(f"ok 1\n{text}")


def test_a_text_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidParams, match=str(MAX_LINES)):
        read_samples("a 1\n" * (MAX_LINES + 1))


def test_a_quantile_lies_in_its_bucket() -> None:
    buckets = [(1.0, 10.0), (2.0, 30.0), (4.0, 40.0), (INFINITY, 40.0)]
    assert [quantile(buckets, share) for share in (0.25, 0.5, 1.0)] == [1.0, 1.5, 4.0]
    assert quantile([(1.0, 0.0), (INFINITY, 3.0)], 0.5) == 1.0, "beyond all bounds"
    assert quantile([(1.0, 0.0), (INFINITY, 0.0)], 0.5) is None and quantile([], 0.5) is None


def test_rates_and_errors_are_those_of_the_time_between() -> None:
    since, before = reading(0.0, server(0, errors=5, fast=100, unauthorized=1)), reading(8.0, server(100))
    shown = overview(reading(10.0, server(130, errors=7, fast=100, slow=10, unauthorized=4)), before, since)
    row, other = shown.models
    assert row.tokens_per_s == 15 and row.num_errors == 2 and row.cache_use == 0.25
    assert row.first_token_s[0] is not None and 1 < row.first_token_s[0] < 2, "only the slow ones are new"
    assert shown.failures == {"401 GET /x": 3}
    assert not other.is_loaded and other.tokens_per_s is None and other.first_token_s == (None, None)


def test_a_server_that_began_anew_has_no_negative_rates() -> None:
    row = overview(reading(10.0, server(30)), reading(8.0, server(100)), reading(0.0, server(50))).models[0]
    assert row.tokens_per_s == 15
    assert math.isfinite(row.num_errors) and row.num_errors == 0


def test_labels_that_are_missing_are_refused() -> None:
    with pytest.raises(InvalidParams, match="not those of bitnet"):
        overview(reading(0.0, "bitnet_build_info 1"))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "localhost:8000", "http://127.0.0.1:1", "http://[", "http://a b/"]
)
def test_no_server_is_one_of_our_errors(url: str) -> None:
    with pytest.raises(BitNetError, match=r"bitnet serve|give one as"):
        read_server(url)

"""/metrics of a running server: what Prometheus reads, and what it costs in labels."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest
import yaml
from conftest import Running
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from bitnet_inference.models import Models
from bitnet_inference.server import Journal, ServedModels, Watch
from bitnet_inference.server.traffic import Metered, Traffic

DEPLOY = Path(__file__).parents[2] / "deploy"
TALK = [{"role": "user", "content": "Tell me a story about a brave fox called Mia. " * 4}]
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx2.Client]:
    watch, journal = Watch(), Journal(tmp_path / "log")
    journal.num_lost = 3
    served = ServedModels(
        Models(max_cache_tokens=1024, threads=1, listener=watch.listener), {"story": "default", "x": "no"}
    )
    with (
        closing(served),
        Running(served, journal=journal, watch=watch) as server,
        httpx2.Client(base_url=server.url) as each,
    ):
        yield each


def talk(client: httpx2.Client, **options: object) -> dict[str, dict[str, int]]:
    answer = client.post("/v1/chat/completions", json={"messages": TALK, "max_tokens": 12, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def samples(client: httpx2.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """All numbers, by name and values of the labels in order of their names."""
    text = client.get("/metrics").text
    found = {}
    for family in read_text(text):
        for sample in family.samples:
            found[sample.name, tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def test_metrics_tell_what_clients_were_told(client: httpx2.Client) -> None:
    usages = [talk(client)["usage"] for _ in range(2)]
    found = samples(client)
    prompts, outputs = (sum(each[key] for each in usages) for key in ("prompt_tokens", "completion_tokens"))
    assert found["gen_ai_client_token_usage_sum", ("story", "input")] == prompts
    assert found["gen_ai_client_token_usage_sum", ("story", "output")] == outputs
    assert found["bitnet_generated_tokens_total", ("story",)] >= outputs  # an end token is not delivered
    assert (
        found["bitnet_prefix_hit_tokens_total", ("story",)] == usages[1]["prompt_tokens_details"]["cached_tokens"] > 0
    )
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert found[f"gen_ai_server_{name}_seconds_count", ("story",)] == 2
        assert found[f"gen_ai_server_{name}_seconds_bucket", ("story", "+Inf")] == 2
    assert found["bitnet_requests_finished_total", ("length", "story")] == 2
    assert found["bitnet_model_loaded", ("story",)] == 1 and found["bitnet_model_load_seconds", ("story",)] > 0
    assert 0 <= found["bitnet_cache_blocks_used", ("story",)] < found["bitnet_cache_blocks", ("story",)]
    assert found["bitnet_memory_used_bytes", ()] == found["bitnet_model_bytes", ("story",)]
    assert found["bitnet_log_lines_lost_total", ()] == 3


def test_strangers_make_no_labels(client: httpx2.Client) -> None:
    for number in range(5):
        client.get(f"/nothing/{number}")
        client.request("PROPFIND", f"/v1/models/{number}")
        client.get(f"/v1/models/{number}")
        client.post("/v1/chat/completions", json={"messages": TALK, "model": f"stranger {number}"})
    told = {
        key: value for key, value in samples(client).items() if key[0] == "http_server_request_duration_seconds_count"
    }
    assert told == {
        ("http_server_request_duration_seconds_count", ("GET", "404", "other")): 5,
        ("http_server_request_duration_seconds_count", ("other", "405", "/v1/models/{name:path}")): 5,
        ("http_server_request_duration_seconds_count", ("GET", "404", "/v1/models/{name:path}")): 5,
        ("http_server_request_duration_seconds_count", ("POST", "404", "/v1/chat/completions")): 5,
    }
    assert "stranger" not in client.get("/metrics").text


def test_bytes_of_bodies(client: httpx2.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 3})
    found, key = samples(client), ("POST", "200", "/v1/completions")
    assert found["bitnet_http_request_bytes_total", key] == len(answer.request.content)
    assert found["bitnet_http_response_bytes_total", key] == len(answer.content)
    assert found["http_server_active_requests", ()] == 1, "the scrape itself"


def test_requests_are_under_way_until_they_end_or_fail() -> None:
    traffic, seen = Traffic(), []

    async def fail(*_: object) -> None:
        seen.append(traffic.num_running)
        raise ConnectionResetError

    scope = {"type": "http", "method": "GET", "path": "/x"}
    with pytest.raises(ConnectionResetError):
        asyncio.run(Metered(fail, traffic, ())(scope, fail, fail))  # type: ignore[arg-type]
    ((kind, told),) = traffic.as_json()
    assert seen == [1] and traffic.num_running == 0
    assert kind == ("GET", "other", 499) and told["seconds"]["count"] == 1


def test_openmetrics_is_spoken_to_who_asks(client: httpx2.Client) -> None:
    talk(client)
    answer = client.get("/metrics", headers=OPENMETRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert "bitnet_generated_tokens" in {family.name for family in read_openmetrics(answer.text)}
    assert client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=new", "text/plain;version=1.x, */*"])
def test_a_version_that_is_none_is_nothing_asked_for(client: httpx2.Client, accept: str) -> None:
    answer = client.get("/metrics", headers={"Accept": accept})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_before_the_first_load_there_are_no_engines(client: httpx2.Client) -> None:
    found = samples(client)
    assert found["bitnet_models_loaded", ()] == 0 and found["bitnet_model_loaded", ("story",)] == 0
    assert not [name for name, _ in found if name.startswith(("gen_ai", "bitnet_requests"))]


def test_the_dashboard_and_the_alerts_ask_for_what_there_is(client: httpx2.Client) -> None:
    talk(client)
    told = {name for name, _ in samples(client)}
    names, text = re.compile(r"\b(?:bitnet|gen_ai|http|process)_\w+"), client.get("/metrics").text
    labels = set(re.findall(r"[{,](\w+)=", text))
    dashboard = json.loads((DEPLOY / "grafana/dashboards/bitnet.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    queries += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(queries) > 20
    asked = {name for query in queries for name in names.findall(query)}
    assert asked - told - labels == set()
    shown = {each["name"] for each in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(queries))) - {"__rate_interval"} <= shown


def test_the_documented_metrics_are_those_that_there_are(client: httpx2.Client) -> None:
    talk(client)
    client.get("/health")
    families = {family.name for family in read_text(client.get("/metrics").text)}
    documented = set(
        re.findall(
            r"^\| `((?:bitnet|gen_ai|http)_\w+)`", (DEPLOY.parent / "docs/monitoring.md").read_text(), re.MULTILINE
        )
    )
    told = {name for name in families if name.startswith(("bitnet_", "gen_ai_", "http_"))}
    assert {name.removesuffix("_total") for name in documented} == told

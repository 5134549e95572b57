"""Spans of requests to a running server, in the SDK's memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest
from conftest import Running
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from typer.testing import CliRunner

from bitnet_inference.cli import app
from bitnet_inference.engine.events import Finished, Preempted, Queued, Scheduled, Token
from bitnet_inference.engine.request import Finish, Usage
from bitnet_inference.errors import InvalidParams
from bitnet_inference.models import Models
from bitnet_inference.server import ServedModels, Watch
from bitnet_inference.server.traces import MAX_PHASES, MAX_UNCLAIMED, Tracing, open_tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TALK = {
    "messages": [{"role": "user", "content": "Tell me a story about a brave fox"}],
    "max_tokens": 6,
    "ignore_eos": True,
}


class Traced(Running):
    """A server whose spans end in `exporter`."""

    def __init__(self) -> None:
        self.exporter, watch = InMemorySpanExporter(), Watch()
        self.tracing = Tracing(SimpleSpanProcessor(self.exporter))
        models = Models(max_cache_tokens=1024, threads=1, listener=self.tracing.beside(watch.listener))
        served = ServedModels(models, {"story": "default"})
        super().__init__(served, watch=watch, tracing=self.tracing)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.served.close()

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """The one of HTTP, and those below it."""
        found = self.exporter.get_finished_spans()
        (root,) = [span for span in found if span.kind is SpanKind.SERVER]
        below = [span for span in found if span is not root]
        assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in below)
        return root, below


@pytest.fixture
def server() -> Iterator[Traced]:
    with Traced() as each:
        yield each


def test_a_request_is_a_span_with_its_phases_below_that_of_the_client(server: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=TALK, headers=headers)
    assert answer.status_code == 200, answer.text
    root, below = server.spans()
    usage, told = answer.json()["usage"], dict(root.attributes or {})
    assert root.name == "POST /v1/chat/completions" and root.resource.attributes["service.name"] == "bitnet"
    assert format(root.context.trace_id, "032x") == TRACE and format(root.parent.span_id, "016x") == PARENT  # type: ignore[union-attr]
    assert told["http.route"] == "/v1/chat/completions" and told["http.response.status_code"] == 200
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", "story")
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 6
    assert told["gen_ai.response.finish_reasons"] == ("length",)
    assert told["bitnet.steps"] == 6, "one with the prompt, and one for each further token"
    assert [span.name for span in below] == ["queue", "prompt", "output"], "and none for a token"
    times = [time for span in below for time in (span.start_time, span.end_time)]
    assert times == sorted(times) and root.start_time <= times[0] and times[-1] <= root.end_time  # type: ignore[operator]


def test_choices_share_a_prompt_which_counts_once(server: Traced) -> None:
    answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "Once", "n": 3, "max_tokens": 4})
    root, below = server.spans()
    told, usage = dict(root.attributes or {}), answer.json()["usage"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.operation.name"] == "text_completion"
    assert {span.attributes["bitnet.choice"] for span in below} == {0, 1, 2}  # type: ignore[index]


def test_a_client_that_leaves_ends_its_span_when_the_text_has_ended() -> None:
    body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with Traced() as server, httpx2.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        next(stream.iter_bytes())
    root, _ = server.spans()  # the end of the server is that of all requests
    assert dict(root.attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)


def test_refused_and_watching_requests(server: Traced) -> None:
    for path in ("/health", "/metrics"):
        httpx2.get(f"{server.url}{path}")
    httpx2.get(f"{server.url}/v1/models/none", headers={"traceparent": "00-nonsense-01"})
    root, below = server.spans()
    assert root.name == "GET /v1/models/{name:path}" and root.parent is None and not below
    assert (
        root.status.status_code is StatusCode.UNSET and dict(root.attributes or {})["http.response.status_code"] == 404
    )


def test_a_text_that_is_often_preempted_has_few_spans() -> None:
    tracing = Tracing(SimpleSpanProcessor(InMemorySpanExporter()))
    hear = tracing.beside(lambda path: lambda event: None)(None)  # type: ignore[arg-type]
    hear(Queued(1, 1.0, 3))
    for number in range(100):
        hear(Scheduled(1, 2.0 + number, 0))
        hear(Token(1, 2.25 + number, 0))
        hear(Preempted(1, 2.5 + number))
    life = tracing._lives[1]
    assert len(life.phases) == MAX_PHASES and life.num_preemptions == 100


def test_texts_that_nobody_asks_about_are_forgotten() -> None:
    tracing = Tracing(SimpleSpanProcessor(InMemorySpanExporter()))
    hear = tracing.beside(lambda path: lambda event: None)(None)  # type: ignore[arg-type]
    for number in range(MAX_UNCLAIMED + 5):
        hear(Queued(number, 1.0, 3))
        hear(Finished(number, 2.0, Finish("stop"), Usage(3, 1, 0.1, 0.1, 0.1)))
    assert len(tracing._lives) == len(tracing._unclaimed) == MAX_UNCLAIMED


def test_without_the_option_the_sdk_is_not_imported() -> None:
    code = "import sys, bitnet_inference.server; print('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_without_the_extra_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bitnet_inference.server.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)  # as if it were not installed
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--otlp-endpoint", "http://127.0.0.1:9"])
    assert done.exit_code == 2 and 'pip install "bitnet-inference[otel]"' in done.output


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(InvalidParams, match="http://localhost:4318"):
        open_tracing("localhost:4317")

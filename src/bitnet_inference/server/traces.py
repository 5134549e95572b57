"""A span for each HTTP request, and one below it for each phase of its texts. The one door to OpenTelemetry.

Importing this raises Unavailable where the extra "otel" is not installed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitnet_inference.config import installed_version
from bitnet_inference.engine.events import (
    EngineListener,
    Event,
    Finished,
    Preempted,
    Queued,
    Replaced,
    Scheduled,
    Stepped,
    Token,
)
from bitnet_inference.errors import InvalidParams, Unavailable
from bitnet_inference.server.failures import CLIENT_GONE
from bitnet_inference.server.journal import NOTES
from bitnet_inference.server.traffic import method_of, template_of

try:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise Unavailable("otel", str(error), 'pip install "bitnet-inference[otel]"') from None

UNTRACED = ("/health", "/ready", "/metrics", "/stats")  # asked every few seconds
MAX_PHASES = 16  # of a text; preempted more often, its last one stands for the rest
MAX_TEXTS = 16  # of a request, whose phases are told
MAX_UNCLAIMED = 10_000  # texts that have ended, and that no HTTP request has asked about
# By the end of the route: OpenTelemetry's names of operations.
OPERATIONS = {"chat/completions": "chat", "completions": "text_completion", "messages": "chat", "responses": "chat"}


class _Phase(NamedTuple):
    """Seconds of time.monotonic()."""

    name: str
    begin: float
    end: float


@dataclass
class _Life:
    """What the engine has told of a text."""

    phase: str
    since: float
    phases: list[_Phase] = field(default_factory=list)
    first_step: int | None = None  # of its present turn
    num_steps: int = 0
    num_preemptions: int = 0
    has_token: bool = False
    end: Finished | None = None

    def enter(self, phase: str, now: float) -> None:
        """From now on it is this phase."""
        if len(self.phases) < MAX_PHASES:
            self.phases.append(_Phase(self.phase, self.since, now))
            self.phase, self.since = phase, now

    def stop(self, step: int) -> None:
        """Its turn is over: it has taken part in all steps before this one."""
        if self.first_step is not None:
            self.num_steps += step - self.first_step
        self.first_step = None


@dataclass
class _Call:
    """An HTTP request that is over, and the texts that it waits for."""

    span: Span
    end_ns: int
    operation: str
    model: str
    numbers: list[int]
    firsts: set[int]  # of the choices of each prompt, which is counted once


class Tracing:
    """Makes spans and gives them to `processor`. All methods may be called from any thread. Close it."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("bitnet_inference", installed_version())
        self._lock = threading.Lock()
        self._lives: dict[int, _Life] = {}  # by Request.number
        self._calls: dict[int, _Call] = {}
        self._unclaimed: dict[int, None] = {}  # the oldest comes first
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def beside(self, listener: Callable[[Path], EngineListener]) -> Callable[[Path], EngineListener]:
        """What Models shall take for a listener, so that this one and we are told."""

        def listener_of(path: Path) -> EngineListener:
            told, ours = listener(path), _Ear(self).hear

            def listen(event: Event) -> None:
                told(event)
                ours(event)

            return listen

        return listener_of

    def change(self, event: Queued | Scheduled | Preempted | Token, step: int) -> None:
        """A text enters another phase, in this step of its engine."""
        with self._lock:
            if isinstance(event, Queued):
                self._lives[event.request] = _Life("queue", event.time)
            elif (life := self._lives.get(event.request)) is None:
                pass
            elif isinstance(event, Scheduled):
                life.first_step = step
                life.enter("output" if life.has_token else "prompt", event.time)
            elif isinstance(event, Preempted):
                life.stop(step)
                life.num_preemptions += 1
                life.enter("preempted", event.time)
            else:
                life.has_token = True
                life.enter("output", event.time)

    def finish(self, event: Finished, step: int) -> None:
        """A text has ended, in this step of its engine."""
        with self._lock:
            if (life := self._lives.get(event.request)) is None:
                return
            was_computed = event.finish.reason in ("stop", "length", "error")
            life.stop(step + was_computed)
            life.enter("", event.time)
            life.end = event
            call = self._calls.get(event.request)
            if call is None:
                self._unclaimed[event.request] = None
                if len(self._unclaimed) > MAX_UNCLAIMED:
                    oldest = next(iter(self._unclaimed))
                    del self._unclaimed[oldest], self._lives[oldest]
            lives = None if call is None else self._take(call)
        if call is not None and lives is not None:
            self._tell(call, lives)

    def close_call(self, span: Span, operation: str, notes: dict[str, Any]) -> None:
        """An HTTP request is over. Its span ends there, and is told when all of its texts have ended."""
        end_ns, requests = time.time_ns(), [stream.request for stream in notes.get("streams", ())]
        firsts = {request.number for request in requests if not request.choice}
        with self._lock:
            numbers = [request.number for request in requests if request.number in self._lives]
            call = _Call(span, end_ns, operation, notes.get("model", ""), numbers, firsts)
            for number in numbers:
                self._calls[number] = call
                self._unclaimed.pop(number, None)
            lives = self._take(call)
        if lives is not None:
            self._tell(call, lives)

    def close(self) -> None:
        """Send what is left, for as long as the exporter takes before it gives up."""
        self._provider.shutdown()

    def _take(self, call: _Call) -> list[_Life] | None:
        """The texts of a request, if all have ended: nothing is kept of them."""
        if any(self._lives[number].end is None for number in call.numbers):
            return None
        for number in call.numbers:
            del self._calls[number]
        return [self._lives.pop(number) for number in call.numbers]

    def _tell(self, call: _Call, lives: list[_Life]) -> None:
        context = set_span_in_context(call.span)
        for index, life in enumerate(lives[:MAX_TEXTS]):
            for phase in life.phases:
                begin, end = self._ns(phase.begin), self._ns(phase.end)
                choice = {"bitnet.choice": index}
                self.tracer.start_span(phase.name, context, attributes=choice, start_time=begin).end(end)
        if lives:
            call.span.set_attributes(_cost(call, lives))
        call.span.end(call.end_ns)

    def _ns(self, seconds: float) -> int:
        return round(seconds * 1e9) + self._epoch_ns


class _Ear:
    """Hears one engine, and counts its steps."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing, self._step = tracing, 0

    def hear(self, event: Event) -> None:
        """A token costs nothing, but for the first one of a text."""
        match event:
            case Stepped():
                self._step += event.num_tokens > 0
            case Finished():
                self._tracing.finish(event, self._step)
            case Token(index=index) if index:
                pass
            case Replaced():
                pass  # its requests were preempted, which has been told
            case _:
                self._tracing.change(event, self._step)


class Traced:
    """An ASGI application around another one: each request has a span, below that of its client (W3C traceparent)."""

    def __init__(self, app: ASGIApp, tracing: Tracing, routes: Sequence[BaseRoute]) -> None:
        self._app, self._tracing, self._routes = app, tracing, routes
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        sent = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracing.tracer.start_span("HTTP", self._propagator.extract(sent), SpanKind.SERVER)
        notes = scope.setdefault(NOTES, {})
        status = CLIENT_GONE

        async def sending(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            route = template_of(scope, self._routes)
            _describe(span, method_of(scope), route, status)
            operation = next((name for end, name in OPERATIONS.items() if route.endswith(f"/{end}")), "")
            self._tracing.close_call(span, operation, notes)


def open_tracing(endpoint: str) -> Tracing:
    """Spans are sent to an OpenTelemetry collector, by OTLP over HTTP, in a thread. Raises Unavailable, InvalidParams.

    One that cannot be reached holds up nobody: spans are then lost. What else the variables OTEL_* say holds: headers,
    timeouts, the sampler, OTEL_SERVICE_NAME.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise Unavailable("otel", str(error), 'pip install "bitnet-inference[otel]"') from None
    if not re.match(r"https?://[^/\s]", endpoint):
        raise InvalidParams(f"the OTLP endpoint is {endpoint!r}: give an address as http://localhost:4318")
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))


def _resource() -> Resource:
    found = Resource.create({"service.version": installed_version()})
    is_named = not str(found.attributes["service.name"]).startswith("unknown_service")
    return found if is_named else found.merge(Resource({"service.name": "bitnet"}))


def _describe(span: Span, method: str, route: str, status: int) -> None:
    span.update_name(f"{method} {route}")
    span.set_attributes({"http.request.method": method, "http.route": route, "http.response.status_code": status})
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))


def _cost(call: _Call, lives: list[_Life]) -> dict[str, Any]:
    ends = [life.end for life in lives if life.end is not None]
    firsts = [end.usage for end in ends if end.request in call.firsts]
    return {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "bitnet",
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": sum(usage.num_prompt_tokens for usage in firsts),
        "gen_ai.usage.cache_read.input_tokens": sum(usage.num_cached_tokens for usage in firsts),
        "gen_ai.usage.output_tokens": sum(end.usage.num_output_tokens for end in ends),
        "gen_ai.response.finish_reasons": [end.finish.reason for end in ends],
        "bitnet.steps": sum(life.num_steps for life in lives),
        "bitnet.preemptions": sum(life.num_preemptions for life in lives),
    }

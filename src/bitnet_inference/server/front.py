"""The whole of what answers a connection: the application, and in front of it what every request passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from bitnet_inference.server.app import make_app
from bitnet_inference.server.gate import Gate
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.journal import Journal, Journaled
from bitnet_inference.server.metrics import ServerMetrics
from bitnet_inference.server.options import ServerOptions
from bitnet_inference.server.stats import Watch
from bitnet_inference.server.traffic import Metered, Traffic

if TYPE_CHECKING:  # OpenTelemetry is loaded where somebody wants it
    from bitnet_inference.server.traces import Tracing


class Front(NamedTuple):
    """What to run, and the gate in it, which knows how to close."""

    app: ASGIApp
    gate: Gate


class Slashless:
    """An ASGI application around another one to which a slash behind a path says nothing.

    By itself it sends clients elsewhere, to its own address, which those behind a proxy may not have.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def make_front(
    served: ServedModels,
    options: ServerOptions,
    journal: Journal | None = None,
    watch: Watch | None = None,
    tracing: Tracing | None = None,
) -> Front:
    """The API over these models on these terms; each request has an id, and with a journal leaves a line there.

    /metrics tell what `watch` hears of the models. With `tracing`, each request that comes in is a span.
    """
    traffic = Traffic()
    num_lost_lines = None if journal is None else lambda: journal.num_lost
    api = make_app(served, ServerMetrics(served, watch or Watch(), traffic, num_lost_lines), watch)
    traced: ASGIApp = api
    if tracing is not None:
        from bitnet_inference.server.traces import Traced

        traced = Traced(api, tracing, api.routes)
    gate = Gate(traced, options)
    app: ASGIApp = gate
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", "Retry-After"],
            allow_private_network=True,  # browsers ask for it where a page of the web speaks to one's own machine
        )
    return Front(Slashless(Metered(Journaled(app, journal), traffic, api.routes)), gate)

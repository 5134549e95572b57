"""The whole of what answers a connection: the application, and in front of it what every request passes."""

from __future__ import annotations

from typing import NamedTuple

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from bitnet_inference.server.app import make_app
from bitnet_inference.server.gate import Gate
from bitnet_inference.server.hosts import ServedModels
from bitnet_inference.server.journal import Journal, Journaled
from bitnet_inference.server.options import ServerOptions


class Front(NamedTuple):
    """What to run, and the gate in it, which knows how to close."""

    app: ASGIApp
    gate: Gate


def make_front(served: ServedModels, options: ServerOptions, journal: Journal | None = None) -> Front:
    """The API over these models on these terms; with a journal, each request leaves a line there."""
    gate = Gate(make_app(served), options)
    app: ASGIApp = gate
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return Front(app if journal is None else Journaled(app, journal), gate)

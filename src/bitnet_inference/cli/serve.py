"""`bitnet serve`: models behind OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.options import DRAFTS, FILTERING, LOADING, progress_bar, values_of, with_options, word_filters
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.models import Models
    from bitnet_inference.server import Journal, Listening
    from bitnet_inference.server.traces import Tracing


def _option(kind: Any, name: str, help: str, metavar: str | None = None) -> Any:
    variable = f"BITNET_{name.upper().replace('-', '_')}"
    return Annotated[kind | None, typer.Option(f"--{name}", envvar=variable, help=help, metavar=metavar)]


# Where it listens.
LISTENING: Mapping[str, Any] = {
    "host": _option(str, "host", "Where to listen: 127.0.0.1 if not given, 0.0.0.0 for all networks."),
    "port": _option(int, "port", "The port: 8000 if not given."),
    "certificate": _option(Path, "tls-certificate", "A PEM file: serve HTTPS.", "FILE"),
    "private_key": _option(Path, "tls-key", "Its private key.", "FILE"),
    "trusted_proxies": _option(list[str], "trusted-proxy", "Whose X-Forwarded-For is believed.", "ADDRESS"),
}
# How it treats its callers.
TREATING: Mapping[str, Any] = {
    "requests_per_minute": _option(int, "requests-per-minute", "Of each key, or of each address without keys.", "N"),
    "max_running": _option(int, "max-running", "So many requests of a key at a time.", "N"),
    "cors_origins": _option(list[str], "cors-origin", 'A web page that may use the API, or "*".', "ORIGIN"),
    "max_body_bytes": _option(int, "max-body-bytes", "Larger requests are refused: 4 MB if not given.", "N"),
    "max_connections": _option(int, "max-connections", "More are closed at once: 20,000 if not given.", "N"),
    "header_timeout_s": _option(float, "header-timeout", "So long headers may take: 10 if not given.", "SECONDS"),
    "body_timeout_s": _option(float, "body-timeout", "So long a part of a body may take: 30 if not given.", "SECONDS"),
    "reader_timeout_s": _option(
        float, "reader-timeout", "Who takes nothing of an answer for so long is dropped: 300 if not given.", "SECONDS"
    ),
    "request_timeout_s": _option(float, "request-timeout", "An answer that takes longer ends there.", "SECONDS"),
    "max_priority": _option(int, "max-priority", "The highest that requests may ask for: 0 if not given.", "N"),
    "drain_timeout_s": _option(float, "drain-timeout", "What requests have after SIGTERM: 30 if not given.", "SECONDS"),
    "shutdown_delay_s": _option(
        float, "shutdown-delay", "So long new ones are served while /ready says no: 0 if not given.", "SECONDS"
    ),
}
# Who may come in.
KEYS: Mapping[str, Any] = {
    "api_key": _option(list[str], "api-key", "Who sends this key may come in; or sha256:HEX of it.", "KEY"),
    "api_key_file": _option(Path, "api-key-file", "Keys, a line each: NAME KEY, or NAME sha256:HEX.", "FILE"),
}
# Room for models, and where lines go.
ROOM: Mapping[str, Any] = {
    "max_bytes": _option(
        int, "max-bytes", "For all models and caches: three quarters of what is free if not given.", "N"
    ),
    "max_cache_tokens": _option(int, "max-cache-tokens", "Each model's cache and context: 8192 if not given.", "N"),
}
_OF_MODELS = {name: kind for name, kind in {**ROOM, **LOADING, **DRAFTS}.items() if name != "model"}
_MODELS = typer.Argument(
    metavar="MODEL",
    envvar="BITNET_MODELS",
    help="What to serve: a name or path, or NAME=PATH. Default: the model in the package.",
)
_OTLP = typer.Option(
    envvar=["BITNET_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
    metavar="URL",
    help="Send traces to this OpenTelemetry collector.",
)


@with_options(LISTENING, KEYS, TREATING, _OF_MODELS, FILTERING)
def serve(
    ctx: typer.Context,
    models: Annotated[list[str] | None, _MODELS] = None,
    log_file: Annotated[Path | None, typer.Option(help="Where lines about requests go, not to stderr.")] = None,
    no_log: Annotated[bool, typer.Option("--no-log", help="No line for each request.")] = False,
    otlp_endpoint: Annotated[str | None, _OTLP] = None,
) -> None:
    """Serve models over HTTP, as OpenAI's API does.

    Metrics for Prometheus are at /metrics. The first model is loaded at once, others when they are asked for; they give
    way to each other where not all fit. Every option can stand in the environment: --api-key is BITNET_API_KEY, and
    so on.
    """
    from bitnet_inference.models import Models
    from bitnet_inference.server import (
        Listening,
        ServedModels,
        ServerOptions,
        Watch,
        bind,
        listen,
        make_front,
        make_server,
        read_keys,
    )

    listening = Listening(**values_of(ctx, LISTENING))
    keys = read_keys(ctx.params["api_key"] or (), ctx.params["api_key_file"])
    options = ServerOptions(keys=keys, **values_of(ctx, TREATING))
    paths, journal, watch = named(models or ["default"]), _journal(log_file, no_log), Watch()
    with ExitStack() as stack:
        sockets = bind(listening)
        for each in sockets:
            stack.callback(each.close)
        listening = replace(listening, port=sockets[0].getsockname()[1])
        tracing = stack.enter_context(closing(_tracing(otlp_endpoint))) if otlp_endpoint else None
        listener = tracing.beside(watch.listener) if tracing else watch.listener
        with progress_bar() as progress:
            held = Models(progress=progress, listener=listener, filters=word_filters(ctx), **values_of(ctx, _OF_MODELS))
            served = stack.enter_context(closing(ServedModels(held, paths)))
            held.preload(next(iter(paths.values())))
        front = make_front(served, options, journal, watch, tracing)
        server = make_server(front, listening, options, served.close)
        listen(sockets)  # what is told now is so
        _tell(held, list(paths), listening, is_open=not keys)
        server.run(sockets)


def _journal(log_file: Path | None, no_log: bool) -> Journal | None:
    from bitnet_inference.server import Journal

    if no_log and log_file is not None:
        raise InvalidParams("--no-log leaves no lines for --log-file: give one of them")
    if log_file == Path("-"):
        raise InvalidParams("--log-file is '-': leave it out, and lines go to stderr")
    return None if no_log else Journal(log_file)


def _tell(held: Models, names: Sequence[str], listening: Listening, is_open: bool) -> None:
    (first,) = held.loaded()
    typer.echo(f"{names[0]} runs on {first.device}: {first.why_there}", err=True)
    typer.echo(f"serving {', '.join(names)} at {listening.url}/v1, a page at {listening.url}", err=True)
    if is_open and not listening.is_private:
        typer.echo("warning: whoever reaches this address may use it: give --api-key to change that", err=True)


def _tracing(endpoint: str) -> Tracing:
    from bitnet_inference.server.traces import open_tracing  # OpenTelemetry is loaded where somebody wants it

    return open_tracing(endpoint)


def named(models: Sequence[str]) -> dict[str, str]:
    """The models by the names that clients know them by, from a name, a path, or NAME=PATH each."""
    from bitnet_inference.model_folder import find_model

    paths: dict[str, str] = {}
    for text in models:
        name, sign, path = text.partition("=")
        if not sign or os.path.exists(text):  # folders of training runs are called lr=0.1
            name, path = Path(text).name or text, text
        if not name.isprintable():  # as of bytes that are no UTF-8: answers, logs and metrics have it
            raise InvalidParams(f"{text!r} has no name that clients could give: give NAME=PATH")
        if not name or not path:
            raise InvalidParams(f"{text!r} is no model: give a name, a path, or NAME=PATH")
        if name in paths:
            raise InvalidParams(f"two models are called {name!r}: give NAME=PATH")
        find_model(path)
        paths[name] = path
    return paths

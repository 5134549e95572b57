"""`bitnet serve`: models behind OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitnet_inference.errors import InvalidParams


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help='Models to serve: PATH, or NAME=PATH. Default: "default".'),
    ] = None,
    host: Annotated[str, typer.Option(envvar="BITNET_HOST", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="BITNET_PORT", help="The port.")] = 8000,
) -> None:
    """Serve models over HTTP, as OpenAI's API does."""
    from bitnet_inference.models import Models
    from bitnet_inference.server import ServedModels, make_app
    from bitnet_inference.server import serve as run_server

    paths = dict(map(_named, models or ["default"]))
    with Models() as held:
        served = ServedModels(held, paths)
        for path in paths.values():
            held.preload(path)
        typer.echo(f"serving {', '.join(paths)} at http://{host}:{port}/v1", err=True)
        run_server(make_app(served), host=host, port=port)


def _named(text: str) -> tuple[str, str]:
    name, sign, path = text.partition("=")
    if not sign:
        return Path(text).name or text, text
    if not name or not path:
        raise InvalidParams(f"{text!r} is no model: give PATH, or NAME=PATH")
    return name, path

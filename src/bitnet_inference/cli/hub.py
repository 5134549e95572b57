"""`bitnet pull`, `list`, `show` and `rm`: models by name."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bitnet_inference.amounts import told_bytes
from bitnet_inference.cli.options import json_text, progress_bar
from bitnet_inference.cli.reports import print_lines, print_table
from bitnet_inference.errors import InvalidParams, NotFound, one_line

NAME_HELP = "A name that bitnet show lists, owner/repository or owner/repository/FILE, each with @REVISION or without."


def pull(name: Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP)]) -> None:
    """Fetch a model from the Hugging Face Hub.

    It goes into the folder that Hugging Face's own tools share, and every file is checked by its hash. What was cut
    goes on when it is pulled again. HF_ENDPOINT chooses a mirror, HF_TOKEN opens private and gated models, and
    HF_HUB_CACHE chooses the folder.
    """
    from bitnet_inference.hub.pull import pull as pull_model

    with progress_bar("pulling", in_bytes=True) as progress:
        pulled = pull_model(name, progress=progress)
    typer.echo(f"{pulled.path}")
    typer.echo(f"[{pulled.repository}@{pulled.commit}, {told_bytes(pulled.num_bytes)}]", err=True)


def list_models(
    gguf_folder: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Also GGUF files there: llama.cpp's, LM Studio's, Ollama's. May be repeated."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what cannot be opened, and why.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List the models that are here, whichever tool has fetched them.

    Each can be named as the first column says, or by its path; files of --gguf-folder by their paths alone. Of several
    folders, those count that are there.
    """
    from bitnet_inference.installed import installed_models

    folders = [each for each in gguf_folder or () if each.is_dir()] or gguf_folder or []
    found = [each for each in installed_models(folders) if everything or not each.problem]
    for folder in gguf_folder or ():
        if folder not in folders:
            typer.echo(f"[{folder}: there is no such folder]", err=True)
    if as_json:
        typer.echo(json_text([asdict(each) | {"path": str(each.path)} for each in found]))
        return
    if not found:
        typer.echo("No models are here: bitnet show lists names, bitnet pull NAME fetches one.", err=True)
        return
    rows = [(each.name, each.format, told_bytes(each.num_bytes), each.revision, str(each.path)) for each in found]
    print_table([("name", "format", "weights", "revision", "path"), *rows])
    for each in found:
        if each.problem:
            typer.echo(f"{one_line(each.name)}: {each.problem}", err=True)


def show(name: Annotated[str | None, typer.Argument(metavar="NAME", help=NAME_HELP)] = None) -> None:
    """Tell what is known of a model by name, or list the names.

    Also what of it is here. Asks no network.
    """
    from bitnet_inference.installed import known_models, show_model

    if name is None:
        print_table([("name", "size", "here", "what"), *known_models()])
    else:
        print_lines(show_model(name))


def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
) -> None:
    """Remove a model that was pulled.

    All of its repository goes, or with @REVISION one commit of it.
    """
    from bitnet_inference.hub.local import check_removable
    from bitnet_inference.hub.local import remove as remove_model
    from bitnet_inference.hub.names import parse

    repository = parse(name).repository
    check_removable(name)
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidParams(f"nobody is here to be asked whether {repository} shall go: add --yes")
        if not typer.confirm(f"Remove what was pulled of {repository}?", err=True):
            return
    typer.echo(f"[{told_bytes(remove_model(name))} are free]", err=True)


def offer_to_pull(model: str | None) -> None:
    """Where a model has a name and is not here, ask whether to pull it; nobody is asked without a terminal."""
    if model is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    from bitnet_inference.hub.names import is_name, parse
    from bitnet_inference.model_folder import find_model

    try:
        find_model(model)
    except NotFound:
        if not is_name(model):
            return
        entry = parse(model).entry
        size = f", about {told_bytes(1e6 * entry.size_mb)}" if entry and entry.size_mb else ""
        if typer.confirm(f"{model} is not here. Pull it from the Hugging Face Hub{size}?", err=True):
            pull(model)

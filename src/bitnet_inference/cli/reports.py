"""`bitnet inspect` and `bitnet bench`: what a model is and how fast it is here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bitnet_inference.cli.options import EXIT_MISTAKE, LOADING, MODEL_HELP, loading_options, progress_bar, with_options
from bitnet_inference.errors import InvalidParams


def inspect(
    path: Annotated[str, typer.Argument(help=MODEL_HELP)] = "default",
    plan: Annotated[
        bool, typer.Option("--plan", help="Also the recorded computation, before and after fusion.")
    ] = False,
) -> None:
    """Tell what a model is.

    Its shapes, its share of ternary weights, what it takes in memory, its words, and everything that is wrong with it.
    """
    from bitnet_inference.llm import find_model
    from bitnet_inference.summary import plan_of, summarize

    folder = find_model(path)
    summary = summarize(folder)
    for title, lines in summary.groups.items():
        typer.echo(title)
        _print_lines(lines)
    if plan:
        typer.echo(f"\n{plan_of(folder)}")
    for problem in summary.problems:
        typer.echo(f"bitnet: {problem}", err=True)
    if summary.problems:
        raise typer.Exit(EXIT_MISTAKE)


@with_options(LOADING)
def bench(
    ctx: typer.Context,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there too.")
    ] = None,
) -> None:
    """Measure a model's speed.

    How fast it loads, reads prompts and writes, as medians, and the most memory that it takes.
    """
    from bitnet_inference.bench import measure
    from bitnet_inference.config import EngineConfig
    from bitnet_inference.llm import find_model

    model, options = loading_options(ctx)
    with progress_bar() as progress:
        result = measure(find_model(model), EngineConfig.from_env(**options), progress=progress)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidParams(f"{json_file} cannot be written: {error.strerror}") from None
    _print_lines(result.lines())


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    for name, value in lines:
        typer.echo(f"  {name:<14} {value}")

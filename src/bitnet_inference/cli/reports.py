"""`bitnet inspect`, `bench` and `doctor`: what a model is, how fast it is, and whether this machine computes right."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bitnet_inference.cli.options import EXIT_MISTAKE, LOADING, MODEL_HELP, loading_options, progress_bar, with_options

EXIT_WRONG = 1


def inspect(
    path: Annotated[str, typer.Argument(help=MODEL_HELP)] = "default",
    plan: Annotated[
        bool, typer.Option("--plan", help="Also the recorded computation, before and after fusion.")
    ] = False,
) -> None:
    """Tell what a model is.

    Its shapes, its share of ternary weights, what it takes in memory, its words, and everything that is wrong with it.
    """
    from bitnet_inference.model_folder import find_model
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
    """Measure a model's speed beside what the machine allows.

    Prompts of 128 and 512 tokens, decoding behind no and 2048 tokens, 1 to 16 sequences at a time, loading, and the
    most memory that it takes. Medians; samples that other processes disturb are taken again. Takes about a minute for
    two billion parameters.
    """
    from bitnet_inference.bench import measure
    from bitnet_inference.config import EngineConfig
    from bitnet_inference.model_folder import find_model
    from bitnet_inference.output_files import refuse_unwritable, write_whole

    if json_file is not None:
        refuse_unwritable(json_file)
    model, options = loading_options(ctx)
    with progress_bar() as progress:
        result = measure(find_model(model), EngineConfig.from_env(**options), progress=progress)
    if json_file is not None:
        write_whole(json_file, json.dumps(result.as_json(), indent=2) + "\n")
    _print_lines(result.lines())
    typer.echo()
    print_table(result.table())


def doctor() -> None:
    """Check this machine.

    Which instruction set is used and why, every kernel against the plain one, the default model's numbers to the bit,
    memory, and threads. A wrong result is a line on stderr, and exit code 1.
    """
    from bitnet_inference.doctor import diagnose

    diagnosis = diagnose()
    for title, lines in diagnosis.groups.items():
        typer.echo(title)
        _print_lines(lines)
    for problem in diagnosis.problems:
        typer.echo(f"bitnet: {problem}", err=True)
    if diagnosis.problems:
        raise typer.Exit(EXIT_WRONG)


def _print_lines(lines: Iterable[tuple[str, str]]) -> None:
    for name, value in lines:
        typer.echo(f"  {name:<16} {value}")


def print_table(rows: Sequence[tuple[str, ...]], to_stderr: bool = False) -> None:
    """Columns under a row of titles: the first and the last to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *numbers, last in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
        typer.echo("  ".join((f"  {first:<{widths[0]}}", *cells, last)).rstrip(), err=to_stderr)

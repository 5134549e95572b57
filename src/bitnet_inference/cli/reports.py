"""`bitnet inspect`, `bench`, `eval` and `doctor`: what a model is, how fast and how good, and whether all is right."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.options import (
    CACHE,
    EXIT_MISTAKE,
    LOADING,
    MODEL_HELP,
    load_llm,
    loading_options,
    progress_bar,
    with_options,
)
from bitnet_inference.config import read_text
from bitnet_inference.errors import one_line

if TYPE_CHECKING:
    from bitnet_inference.bench_engine import Load

EXIT_WRONG = 1
_STDOUT = Path("-")
_JSON = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help='Write the numbers there too; "-" prints them, and nothing else.'),
]


def inspect(
    path: Annotated[str, typer.Argument(help=MODEL_HELP)] = "default",
    plan: Annotated[
        bool, typer.Option("--plan", help="Also the recorded computation, before and after fusion.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Also compare a packed file with the hashes in it; reads all of it.")
    ] = False,
) -> None:
    """Tell what a model is.

    Its shapes, its share of ternary weights, what it takes in memory, its words, and everything that is wrong with it.
    """
    from bitnet_inference.model_folder import find_model
    from bitnet_inference.summary import changed_tensors, plan_of, summarize

    folder = find_model(path)
    summary = summarize(folder)
    for title, lines in summary.groups.items():
        typer.echo(title)
        print_lines(lines)
    if plan:
        typer.echo(f"\n{plan_of(folder)}")
    problems = summary.problems + (changed_tensors(folder) if verify else [])
    for problem in problems:
        typer.echo(f"bitnet: {problem}", err=True)
    if problems:
        raise typer.Exit(EXIT_MISTAKE)


@with_options(LOADING)
def bench(
    ctx: typer.Context,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="N,N", help="Measure the engine instead, with so many streams at a time, as in 1,2,4,8,16."
        ),
    ] = None,
    json_file: _JSON = None,
) -> None:
    """Measure a model's speed beside what the machine allows.

    Prompts of 128 and 512 tokens, decoding behind no and 2048 tokens, 1 to 16 sequences at a time, loading, and the
    most memory that it takes. Medians; samples that other processes disturb are taken again. Takes about a minute for
    two billion parameters.

    With --concurrency, the engine under load instead: each stream sends its next request when the last has ended, with
    64 to 128 random tokens of prompt and as many of answer, or as the context has room for. Tokens a second beside the
    same work on the model alone, and in milliseconds, median and 95th percentile, the time to the first token and the
    gaps between tokens, as the reader gets them; "overhead" is the share of the time in which the model does not
    compute. Takes several minutes for two billion parameters.
    """
    from bitnet_inference.bench import measure
    from bitnet_inference.bench_engine import measure_engine
    from bitnet_inference.config import EngineConfig
    from bitnet_inference.model_folder import find_model

    _check_json(json_file)
    load = None if concurrency is None else _load(concurrency)
    model, options = loading_options(ctx)
    path, config = find_model(model), EngineConfig.from_env(**options)
    with progress_bar() as progress:
        result = measure_engine(path, config, load, progress) if load else measure(path, config, progress=progress)
    if json_file != _STDOUT:
        print_lines(result.lines())
        typer.echo()
        print_table(result.table())
    _write_json(json_file, result.as_json())


def _load(concurrency: str) -> Load:
    from bitnet_inference.bench_engine import Load
    from bitnet_inference.errors import InvalidParams

    try:
        return Load(streams=tuple(map(int, concurrency.split(","))))
    except ValueError:
        cure = "give numbers of streams, as in 1,2,4"
        raise InvalidParams(f"--concurrency is {concurrency!r}: {cure}") from None


@with_options({name: kind for name, kind in LOADING.items() if name != "model"}, CACHE)
def evaluate(
    ctx: typer.Context,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text, in UTF-8.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "default",
    window: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens that are seen at a time. Default: the context, at most 2048."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens from one window to the next. Default: half of it.")
    ] = None,
    json_file: _JSON = None,
) -> None:
    """Measure how well a model predicts a text.

    Its perplexity a token, and bits a byte, which compare models whose tokens differ.
    """
    from bitnet_inference.evaluate import perplexity

    _check_json(json_file)
    words = read_text(text)
    with load_llm(ctx) as llm, progress_bar("scoring") as progress:
        result = perplexity(llm, words, window=window, stride=stride, progress=progress)
    if json_file != _STDOUT:
        print_lines(
            [
                ("perplexity", f"{result.perplexity:.4f}"),
                ("bits a byte", f"{result.bits_per_byte or 0:.4f}"),
                ("scored", f"{result.num_tokens} tokens, {result.num_bytes} bytes"),
                ("windows", f"{result.window} tokens, {result.stride} apart"),
                ("speed", f"{result.num_tokens / max(result.seconds, 1e-9):.1f} tokens/s"),
            ]
        )
    _write_json(json_file, asdict(result))


def _check_json(file: Path | None) -> None:
    from bitnet_inference.output_files import refuse_unwritable

    if file not in (None, _STDOUT):
        refuse_unwritable(file)


def _write_json(file: Path | None, numbers: dict[str, Any]) -> None:
    """Write the numbers where they shall go, at the end: what was measured for minutes is shown even if this fails."""
    from bitnet_inference.output_files import write_whole

    text = json.dumps(_in_json(numbers), indent=2)
    if file == _STDOUT:
        typer.echo(text)
    elif file is not None:
        write_whole(file, text + "\n")


def _in_json(value: Any) -> Any:
    """A copy with null for what is infinite, which JSON cannot say, as the perplexity of a broken model."""
    if isinstance(value, dict):
        return {key: _in_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def doctor() -> None:
    """Check this machine.

    Which instruction set is used and why, every kernel against the plain one, the default model's numbers to the bit,
    memory, threads, and which backends can be used or why not. A wrong result is a line on stderr, and exit code 1.
    """
    from bitnet_inference.doctor import diagnose

    diagnosis = diagnose()
    for title, lines in diagnosis.groups.items():
        typer.echo(title)
        print_lines(lines)
    for problem in diagnosis.problems:
        typer.echo(f"bitnet: {problem}", err=True)
    if diagnosis.problems:
        raise typer.Exit(EXIT_WRONG)


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """A title and a value each."""
    for name, value in lines:
        typer.echo(f"  {name:<16} {one_line(value)}")


def print_table(rows: Sequence[tuple[str, ...]], to_stderr: bool = False) -> None:
    """Columns under a row of titles: the first and the last to the left, numbers to the right."""
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *numbers, last in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:-1], strict=True)]
        typer.echo("  ".join((f"  {first:<{widths[0]}}", *cells, last)).rstrip(), err=to_stderr)

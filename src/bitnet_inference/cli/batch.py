"""`bitnet batch`: a file of prompts into a file of answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.form import FORM, grammar_option
from bitnet_inference.cli.options import (
    CACHE,
    DRAFTS,
    FILTERING,
    LOADING,
    SAMPLING,
    check_sampling,
    load_llm,
    loading_options,
    progress_bar,
    sampling_params,
    values_of,
    with_options,
)
from bitnet_inference.cli.serve import named
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.batch_files import BatchFiles, BatchResult

EXIT_SOME_FAILED = 1


@with_options(LOADING, CACHE, DRAFTS, FILTERING, SAMPLING, FORM)
def batch(
    ctx: typer.Context,
    prompts: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="The prompts, one JSON object a line.")],
    answers: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where the answers go, or go on.")],
    keep_errors: Annotated[
        bool, typer.Option("--keep-errors", help="Leave failed prompts as they are; else they are tried again.")
    ] = False,
) -> None:
    """Answer a file of prompts into another file.

    A line is {"prompt": "..."}, which is continued as it is, or {"messages": [{"role": "user", "content": "..."}]},
    which are answered; "id" is passed on, "n" asks for several texts, and "params" are sampling options of this
    prompt alone, as in {"max_tokens": 20}. Answers are written as they end, with the "line" that they answer. A
    prompt that fails is a line with "error", and the exit code is then 1.

    Or all lines are of OpenAI's Batch API, {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions",
    "body": {...}}: the answers are as in its output files, and their bodies as from "bitnet serve". The bodies say
    how to sample, and --model NAME=PATH gives the model the name that they call it by.

    After Ctrl-C, or when the process was killed, the same command goes on with what has no answer. With --seed, line n
    draws with that seed + n - 1, so the texts are those of a run that was not interrupted.
    """
    from bitnet_inference.prompt_file import is_openai_batch

    if "-" in (str(prompts), str(answers)):
        raise InvalidParams("prompts and answers are in files, which are read again: give their names instead of -")
    if is_openai_batch(prompts):
        result, failures = _answer_requests(ctx, prompts, answers, not keep_errors), "response.body.error"
    else:
        result, failures = _answer_prompts(ctx, prompts, answers, not keep_errors), "error"
    typer.echo(_summary(result), err=True)
    if result.num_errors:
        typer.echo(f'[what failed says why under "{failures}" in {answers}]', err=True)
        raise typer.Exit(EXIT_SOME_FAILED)


def _answer_prompts(ctx: typer.Context, prompts: Path, answers: Path, retry_errors: bool) -> BatchResult:
    from bitnet_inference.offline import BatchRun

    grammar = grammar_option(ctx)
    check_sampling(ctx)
    with (
        BatchRun(prompts, answers, retry_errors=retry_errors) as run,
        _told(run, answers),
        load_llm(ctx) as llm,
        progress_bar("answering") as progress,
    ):
        return run.run(llm, replace(sampling_params(ctx, llm), grammar=grammar), progress=progress)


def _answer_requests(ctx: typer.Context, requests: Path, answers: Path, retry_errors: bool) -> BatchResult:
    """As a server does, to which the lines are sent one by one, but for the network."""
    for name in values_of(ctx, (*SAMPLING, *FORM)):
        option = next(each.opts[0] for each in ctx.command.params if each.name == name)
        raise InvalidParams(f"{option} is for other lines: those of OpenAI's Batch API say it in their bodies")
    from bitnet_inference.models import OneModel
    from bitnet_inference.server.batch import RequestRun
    from bitnet_inference.server.hosts import ServedModels

    model, options = loading_options(ctx)
    names = named([model])
    (path,) = names.values()
    with (
        RequestRun(requests, answers, retry_errors=retry_errors) as run,
        _told(run, answers),
        load_llm(ctx, path) as llm,
        progress_bar("answering") as progress,
    ):
        held = OneModel(path, llm, max_cache_tokens=ctx.params["max_cache_tokens"], **options)
        with closing(ServedModels(held, names)) as served:
            return run.run(served, llm, progress=progress)


@contextmanager
def _told(run: BatchFiles[Any], answers: Path) -> Iterator[None]:
    """Who interrupts it hears how far it has come."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C or SIGTERM
        done = f"{run.num_done} of {run.num_prompts} prompts are answered in {answers}"
        typer.echo(f"bitnet: stopped: {done}: the same command goes on from there", err=True)
        raise


def _summary(result: BatchResult) -> str:
    before = f", {result.num_before} of them done before" if result.num_before else ""
    return (
        f"[{result.num_prompts} prompts{before}; {result.num_errors} failed; {result.num_prompt_tokens} tokens in, "
        f"{result.num_output_tokens} out, {result.num_output_tokens / max(result.wall_s, 1e-9):.1f} tokens/s]"
    )

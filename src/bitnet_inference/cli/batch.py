"""`bitnet batch`: a file of prompts into a file of answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    progress_bar,
    sampling_params,
    with_options,
)
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.batch_files import BatchResult

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

    After Ctrl-C, or when the process was killed, the same command goes on with what has no answer. With --seed, line n
    draws with that seed + n - 1, so the texts are those of a run that was not interrupted.
    """
    from bitnet_inference.offline import BatchRun

    if "-" in (str(prompts), str(answers)):
        raise InvalidParams("prompts and answers are in files, which are read again: give their names instead of -")
    grammar = grammar_option(ctx)
    check_sampling(ctx)
    with BatchRun(prompts, answers, retry_errors=not keep_errors) as run:
        try:
            with load_llm(ctx) as llm, progress_bar("answering") as progress:
                result = run.run(llm, replace(sampling_params(ctx, llm), grammar=grammar), progress=progress)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C or SIGTERM
            done = f"{run.num_done} of {run.num_prompts} prompts are answered in {answers}"
            typer.echo(f"bitnet: stopped: {done}: the same command goes on from there", err=True)
            raise
    typer.echo(_summary(result), err=True)
    if result.num_errors:
        typer.echo(f'[what failed says why under "error" in {answers}]', err=True)
        raise typer.Exit(EXIT_SOME_FAILED)


def _summary(result: BatchResult) -> str:
    before = f", {result.num_before} of them done before" if result.num_before else ""
    return (
        f"[{result.num_prompts} prompts{before}; {result.num_errors} failed; {result.num_prompt_tokens} tokens in, "
        f"{result.num_output_tokens} out, {result.num_output_tokens / max(result.wall_s, 1e-9):.1f} tokens/s]"
    )

"""The options that several commands share, and what they stand for."""

from __future__ import annotations

import functools
import inspect as introspection
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.config import from_utf8
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.engine.params import SamplingParams
    from bitnet_inference.llm import LLM
    from bitnet_inference.prompts import TalkOptions
    from bitnet_inference.text.word_filter import WordFilter

EXIT_MISTAKE = 2


def _layers(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else text


MODEL_HELP = "A folder or a file, the name of a model that was pulled, or 'default' for the one in the package."
# Options that several commands have: name, type and how it is shown. All default to None, "not given".
LOADING: Mapping[str, Any] = {
    "model": Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help=f"{MODEL_HELP} Default: 'default'.")
    ],
    "threads": Annotated[
        int | None,
        typer.Option(metavar="N", help="CPU threads. Default: BITNET_THREADS, or one a physical core."),
    ],
    "device": Annotated[
        str | None,
        typer.Option(
            help='"auto" (the default), "cuda", "mlx", "cpu", "coreml", "onnx" (for ONNX files), or "reference" (slow).'
        ),
    ],
    "gpu_layers": Annotated[
        Any,
        typer.Option(
            metavar="N", parser=_layers, help='So many layers on the GPU, others on the CPU; "auto" for what fits.'
        ),
    ],
    "gpus": Annotated[
        int | None, typer.Option(metavar="N", help="NVIDIA GPUs that have a part of the model each. Default: 1.")
    ],
    "cache_dtype": Annotated[
        str | None, typer.Option(help='Numbers in the KV cache: "bfloat16" (the default), "float32" or "int8".')
    ],
    "quantize": Annotated[
        str | None,
        typer.Option(
            help='What dense matrices of the layers become: "none" (the default), "int8", or "ternary" (if trained so).'
        ),
    ],
    "head": Annotated[
        str | None,
        typer.Option(
            help='The head: "exact" (the default), "unscreened" (exact, in less memory, slower), or rounded to "int8" '
            'or "int6".'
        ),
    ],
    "embedding": Annotated[
        str | None,
        typer.Option(help='The table of embeddings: "exact" (the default), or rounded to "int8" (on the CPU).'),
    ],
    "fallback": Annotated[
        str | None,
        typer.Option(help='"cpu" goes on there where the device fails; "none" (the default) ends what it was doing.'),
    ],
}
CACHE: Mapping[str, Any] = {
    "max_cache_tokens": Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="So many tokens the KV cache holds, in whole blocks: no context is longer. Default: what fits.",
        ),
    ],
}
DRAFTS: Mapping[str, Any] = {
    "drafts": Annotated[
        str | None,
        typer.Option(
            metavar="WHO",
            help='Who guesses tokens ahead to save time: "lookup" (in the text itself), a smaller model, "none", or '
            '"auto" (the default: "lookup" where that changes no bit).',
        ),
    ],
}
FILTERING: Mapping[str, Any] = {
    "filter": Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Forbid the words in this file, one a line; /.../ is a pattern. May be repeated."
        ),
    ],
}
TEMPLATE: Mapping[str, Any] = {
    "chat_template_kwargs": Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Variables for the chat template: {"enable_thinking": false} for Qwen3.'),
    ],
}
SAMPLING: Mapping[str, Any] = {
    "temperature": Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", metavar="X", help="0 takes the likeliest token always, 1 draws as the model says."
        ),
    ],
    "top_k": Annotated[
        int | None, typer.Option(metavar="K", help="Draw among the K likeliest tokens; 0 and -1 are off.")
    ],
    "top_p": Annotated[
        float | None, typer.Option(metavar="P", help="Draw among the likeliest that make up P together; 1 is off.")
    ],
    "min_p": Annotated[
        float | None, typer.Option(metavar="P", help="Only tokens at least P times as likely as the best; 0 is off.")
    ],
    "repetition_penalty": Annotated[
        float | None, typer.Option(metavar="X", help="Above 1, tokens seen so far become less likely; 1 is off.")
    ],
    "presence_penalty": Annotated[
        float | None, typer.Option(metavar="X", help="Taken once from the logits of tokens said before; 0 is off.")
    ],
    "frequency_penalty": Annotated[
        float | None, typer.Option(metavar="X", help="Taken from a token's logit each time it was said; 0 is off.")
    ],
    "logit_bias": Annotated[
        list[str] | None, typer.Option(metavar="ID=X", help="Add X to the logit of a token id. May be repeated.")
    ],
    "seed": Annotated[int | None, typer.Option(metavar="N", help="Equal seeds give equal text. Default: a new one.")],
    "stop": Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text. May be repeated.")],
    "stop_token_ids": Annotated[
        list[int] | None, typer.Option("--stop-token", metavar="ID", help="End at this token id. May be repeated.")
    ],
    "max_tokens": Annotated[int | None, typer.Option("--max-tokens", "-n", metavar="N", help="At most N tokens.")],
    "min_tokens": Annotated[int | None, typer.Option(metavar="N", help="No end before N tokens are out.")],
    "overflow": Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help='What gives way where the context is full: "truncate_left" (the oldest of the prompt), "keep_system" '
            '(the oldest turns), "sliding" (the oldest of prompt and answer, which goes on), or "error" '
            "(nothing; the default of run and batch).",
        ),
    ],
    "ignore_eos": Annotated[bool | None, typer.Option("--ignore-eos", help="Go on behind the model's end tokens.")],
}


def with_options(*tables: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of these tables as well. It finds their values in its context."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        own = introspection.signature(command, eval_str=True).parameters
        more = {name: kind for table in tables for name, kind in table.items()}
        keyword = introspection.Parameter.KEYWORD_ONLY
        extra = [introspection.Parameter(name, keyword, default=None, annotation=kind) for name, kind in more.items()]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**{name: values[name] for name in own})

        shown = introspection.Signature([*(each.replace(kind=keyword) for each in own.values()), *extra])
        run.__dict__.update(__signature__=shown)
        run.__annotations__ = {each.name: each.annotation for each in shown.parameters.values()}
        return run

    return add


def values_of(ctx: typer.Context, names: Iterable[str]) -> dict[str, Any]:
    """Those of these options that the command has and that were given."""
    return {name: ctx.params[name] for name in names if ctx.params.get(name) not in (None, [], ())}


def loading_options(ctx: typer.Context) -> tuple[str, dict[str, Any]]:
    """The model's path, and the other options of LOADING that were given."""
    given = values_of(ctx, LOADING)
    return given.pop("model", "default"), given


def load_llm(ctx: typer.Context, model: str | None = None, **more: Any) -> LLM:
    """The model that the options of LOADING name, with those of CACHE, DRAFTS and FILTERING where a command has them.

    `model` stands for what they call it; `more` goes to LLM.load.
    """
    from bitnet_inference.llm import LLM

    named, options = loading_options(ctx)
    options |= values_of(ctx, (*CACHE, *DRAFTS))
    options["filters"] = word_filters(ctx)
    with progress_bar() as progress:
        llm = LLM.load(model or named, progress=progress, **options, **more)
    print_notes(llm.notes)
    return llm


def word_filters(ctx: typer.Context) -> list[WordFilter]:
    """The filters in the files that the option of FILTERING names, where a command has it."""
    from bitnet_inference.text.word_filter import WordFilter

    return list(map(WordFilter.from_file, ctx.params.get("filter") or []))


def print_notes(notes: Iterable[str]) -> None:
    """What a user should know, a line each, on stderr."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)


@contextmanager
def progress_bar(
    title: str = "loading", *, in_bytes: bool = False
) -> Iterator[Callable[[int, int | None], None] | None]:
    """A bar on stderr, where that is a terminal; one that counts bytes tells their speed too."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), *((DownloadColumn(), TransferSpeedColumn()) if in_bytes else ()))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def json_text(value: Any) -> str:
    """A value in JSON that stdout can hold: where that is not UTF-8, in ASCII."""
    from bitnet_inference.json_objects import json_line

    return json_line(value, ensure_ascii="utf" not in (sys.stdout.encoding or "").lower())


def argument(what: str, text: str) -> str:
    """A text of the command line, whose bytes are UTF-8 whatever the locale says. Raises InvalidParams."""
    return from_utf8(what, os.fsencode(text))


def template_variables(ctx: typer.Context) -> dict[str, Any]:
    """What the option of TEMPLATE says. Raises InvalidParams."""
    text = ctx.params["chat_template_kwargs"]
    if text is None:
        return {}
    try:
        given = json.loads(argument("--chat-template-kwargs", text))
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        cure = 'give a JSON object, as {"enable_thinking": false}'
        raise InvalidParams(f"--chat-template-kwargs is {text!r:.60}: {cure}")
    return given


def talk_options(llm: LLM, variables: Mapping[str, Any]) -> TalkOptions:
    """With which of its options this model answers a conversation. Raises InvalidParams."""
    from bitnet_inference.prompts import known_variables

    if not variables:
        return {}
    return {"variables": known_variables(llm.tokenizer.templates, variables, "--chat-template-kwargs")}


def sampling_params(ctx: typer.Context, llm: LLM) -> SamplingParams:
    """The model's own parameters, but for the options that were given."""
    return replace(llm.default_params, **_given_sampling(ctx))


def check_sampling(ctx: typer.Context, **more: Any) -> None:
    """Refuse what no model takes, before one is fetched or loaded."""
    from bitnet_inference.engine.params import SamplingParams

    # Whether min_tokens fits shows with the model's own max_tokens.
    SamplingParams(**{"max_tokens": None, **_given_sampling(ctx), **more})


def _given_sampling(ctx: typer.Context) -> dict[str, Any]:
    given = values_of(ctx, SAMPLING)
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    if "stop" in given:
        given["stop"] = [argument("--stop", text) for text in given["stop"]]
    return given


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidParams(f"--logit-bias is {text!r}: give a token id and a number, as in 42=-1.5") from None

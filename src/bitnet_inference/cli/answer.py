"""`bitnet run`: one prompt, one answer; and how an answer is printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.beams import BEAMS, CHOICES, beam_params, wanted_choices
from bitnet_inference.cli.form import FORM, grammar_option
from bitnet_inference.cli.hub import offer_to_pull
from bitnet_inference.cli.options import (
    CACHE,
    DRAFTS,
    FILTERING,
    LOADING,
    SAMPLING,
    TEMPLATE,
    argument,
    check_sampling,
    json_text,
    load_llm,
    sampling_params,
    talk_options,
    template_variables,
    with_options,
)
from bitnet_inference.cli.profile import profiling
from bitnet_inference.config import from_utf8
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.engine.beam import BeamParams
    from bitnet_inference.engine.params import SamplingParams
    from bitnet_inference.engine.request import Usage
    from bitnet_inference.llm import LLM
    from bitnet_inference.prompts import TalkOptions
    from bitnet_inference.stream import Generation, Stream

Talk = list[dict[str, str]]  # messages


@with_options(LOADING, CACHE, DRAFTS, FILTERING, SAMPLING, TEMPLATE, FORM, BEAMS, CHOICES)
def run(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help='The prompt; "-", or none and piped input, reads it.')] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the assistant shall be like.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result at its end, as one JSON object; several on a line each.")
    ] = False,
    logprobs: Annotated[int | None, typer.Option(metavar="N", help="With --json: the N likeliest tokens too.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tell where the time went, and write a trace there.")
    ] = None,
) -> None:
    """Answer one prompt.

    The text goes to stdout as it is written, a line about speed to stderr. A model with a chat template answers, any
    other continues the prompt. Sampling options that are not given are those that the model's generation_config.json
    recommends; without one, the likeliest token is taken always.
    """
    if logprobs is not None and not as_json:
        raise InvalidParams("--logprobs are shown with --json only: add it")
    if prompt is not None and ctx.params["model"] is None and _is_model(prompt):
        raise InvalidParams(f'{prompt} is a model, and no prompt: bitnet run --model {prompt} "your prompt"')
    text, grammar, search = _read_prompt(prompt), grammar_option(ctx), beam_params(ctx)
    choices, variables = wanted_choices(ctx), template_variables(ctx)
    check_sampling(ctx, logprobs=logprobs)
    offer_to_pull(ctx.params["model"])
    with profiling(profile) as more, load_llm(ctx, **more) as llm:
        talk, options = _talk(text, system, variables, raw or not llm.tokenizer.templates), talk_options(llm, variables)
        if search is not None:
            _print_whole(_search(llm, text, talk, search, options), as_json)
            return
        params = replace(sampling_params(ctx, llm), logprobs=logprobs, grammar=grammar)
        if choices is not None:
            for output in _choose(llm, text, talk, params, options, *choices):
                _print_whole(output, as_json)
            return
        stream = llm.stream(text, params) if talk is None else llm.stream_chat(talk, params, **options)
        if as_json:
            typer.echo(json_text(asdict(stream.read())))
        else:
            _print_speed(print_answer(stream))


def _is_model(prompt: str) -> bool:
    """Whether it names a model, as behind Ollama's `run`."""
    from bitnet_inference.hub.names import is_in_registry

    is_folder = os.path.isfile(os.path.join(prompt, "config.json"))
    return is_folder or (prompt.endswith(".gguf") and os.path.isfile(prompt)) or is_in_registry(prompt)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise InvalidParams('there is no prompt: write bitnet run "your prompt"')
    is_piped = prompt is None or prompt == "-"
    if is_piped:
        text = from_utf8("the prompt", sys.stdin.buffer.read().removesuffix(b"\n"))
    else:
        text = argument("the prompt", prompt or "")
    if not text:
        raise InvalidParams("the prompt is empty: give some text")
    return text


def system_messages(system: str | None) -> Talk:
    """What a talk begins with."""
    return [] if system is None else [{"role": "system", "content": argument("--system", system)}]


def _talk(text: str, system: str | None, variables: Mapping[str, Any], plain: bool) -> Talk | None:
    """The conversation to answer; None where the text is to be continued as it is. Raises InvalidParams."""
    if plain and system is not None:
        raise InvalidParams("--system needs a chat template: leave --raw out, or write it into the prompt")
    if plain and variables:
        raise InvalidParams("--chat-template-kwargs needs a chat template: leave it out, or --raw")
    return None if plain else [*system_messages(system), {"role": "user", "content": text}]


def _search(llm: LLM, text: str, talk: Talk | None, params: BeamParams, options: TalkOptions) -> Generation:
    return (llm.beam_search(text, params) if talk is None else llm.chat_beam_search(talk, params, **options))[0]


def _choose(
    llm: LLM,
    text: str,
    talk: Talk | None,
    params: SamplingParams,
    options: TalkOptions,
    number: int,
    best_of: int | None,
) -> list[Generation]:
    if talk is None:
        return llm.choices(text, number, params, best_of=best_of)
    return llm.chat_choices(talk, number, params, best_of=best_of, **options)


def _print_whole(output: Generation, as_json: bool) -> None:
    if as_json:
        typer.echo(json_text(asdict(output)))
    else:
        _print_rest(output, output.text)
        _print_speed(output)


def _print_rest(output: Generation, rest: str) -> None:
    """What has not been printed of a text yet, and what its filter says."""
    typer.echo(rest, nl=not output.text.endswith("\n"))
    if output.finish_reason == "filtered":
        typer.echo(f"[ended by the filter {output.stopped_by!r}]", err=True)


def print_answer(stream: Stream, stops_on_interrupt: bool = False) -> Generation:
    """Print an answer as it comes; Ctrl-C ends it, and where it `stops_on_interrupt`, nothing but it."""
    shown = ""
    try:
        for piece in stream:
            shown += piece.text
            typer.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        if not stops_on_interrupt:
            raise
    output = stream.read()  # what was on its way when the answer was stopped
    _print_rest(output, output.text[len(shown) :])
    return output


def context_note(usage: Usage) -> str:
    """What was left out to make room, with a semicolon behind it; empty where nothing was."""
    gone = [f"{usage.num_dropped_tokens} of the prompt left out"] if usage.num_dropped_tokens else []
    gone += ["slid once" if usage.num_slides == 1 else f"slid {usage.num_slides} times"] if usage.num_slides else []
    used = f"context: {usage.num_context_tokens} of {usage.max_context} tokens"
    return ", ".join([used, *gone]) + "; " if gone else ""


def _print_speed(output: Generation) -> None:
    usage = output.usage
    prompt_speed = (usage.num_prompt_tokens - usage.num_cached_tokens) / max(usage.prompt_s, 1e-9)
    output_speed = usage.num_output_tokens / max(usage.output_s, 1e-9)
    typer.echo(
        f"[prompt: {usage.num_prompt_tokens} tokens, {prompt_speed:.1f} tokens/s; "
        f"answer: {usage.num_output_tokens} tokens, {output_speed:.1f} tokens/s; "
        f"{context_note(usage)}{output.finish_reason}]",
        err=True,
    )

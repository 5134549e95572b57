"""The command `bitnet`: parse, call one library function, print. What is heavy is imported where it is needed."""

from __future__ import annotations

import functools
import inspect as introspection
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from bitnet_inference.errors import BitNetError, InvalidParams, RequestError, Unsupported

if TYPE_CHECKING:
    from bitnet_inference.engine.params import SamplingParams
    from bitnet_inference.llm import LLM
    from bitnet_inference.stream import Generation, Stream

EXIT_MISTAKE, EXIT_INTERRUPTED = 2, 130
CHAT_HELP = """Write a message, and Enter sends it; Alt+Enter begins a new line.
/reset  forget the conversation
/help   this help
/exit   leave; Ctrl-D too. Ctrl-C stops an answer."""

_MODEL_HELP = 'A model folder, or "default" for the one that comes with the package.'
# Options that several commands have: name, type and how it is shown. All default to None, "not given".
_LOADING: Mapping[str, Any] = {
    "model": Annotated[str | None, typer.Option("--model", "-m", metavar="PATH", help=_MODEL_HELP)],
    "threads": Annotated[int | None, typer.Option(metavar="N", help="CPU threads. Default: one a physical core.")],
    "device": Annotated[str | None, typer.Option(help='"cpu", "reference" (plain NumPy, slow), or "auto".')],
    "cache_dtype": Annotated[str | None, typer.Option(help='Numbers in the KV cache: "bfloat16" or "float32".')],
}
_SAMPLING: Mapping[str, Any] = {
    "temperature": Annotated[
        float | None,
        typer.Option(
            "--temperature", "-t", metavar="X", help="0 takes the likeliest token always, 1 draws as the model says."
        ),
    ],
    "top_k": Annotated[int | None, typer.Option(metavar="K", help="Draw among the K likeliest tokens; 0 is off.")],
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
    "ignore_eos": Annotated[bool | None, typer.Option("--ignore-eos", help="Go on behind the model's end tokens.")],
}


class _Commands(TyperGroup):
    """Mistakes of users become one line and exit code 2, Ctrl-C becomes exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BitNetError as error:
            typer.echo(f"bitnet: {error}", err=True)
            raise typer.Exit(EXIT_MISTAKE) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


def main() -> None:
    """The entry point of the command."""
    app(prog_name="bitnet")


def _with(*tables: Mapping[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
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


def _print_version(wanted: bool) -> None:
    if wanted:
        from bitnet_inference import __version__

        typer.echo(f"bitnet {__version__}")
        raise typer.Exit


@app.callback()
def bitnet(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run language models whose weights are -1, 0 and +1.

    Try: bitnet run "Tell me a story about a brave fox called Mia"
    """


@app.command()
@_with(_LOADING, _SAMPLING)
def run(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help='The prompt; "-", or none and piped input, reads it.')] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the assistant shall be like.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result at its end, as one JSON object.")] = False,
    logprobs: Annotated[int | None, typer.Option(metavar="N", help="With --json: the N likeliest tokens too.")] = None,
) -> None:
    """Answer one prompt.

    The text goes to stdout as it is written, a line about speed to stderr. A model with a chat template answers, any
    other continues the prompt. Sampling options that are not given are those that the model's generation_config.json
    recommends; without one, the likeliest token is taken always.
    """
    if logprobs is not None and not as_json:
        raise InvalidParams("--logprobs are shown with --json only: add it")
    text = _read_prompt(prompt)
    with _load(ctx) as llm:
        params = replace(_sampling(ctx, llm), logprobs=logprobs)
        stream = _open(llm, text, system, params, raw or not llm.tokenizer.templates)
        if as_json:
            typer.echo(json.dumps(asdict(stream.read()), ensure_ascii=False))
        else:
            _print_speed(_print_answer(stream))


@app.command()
@_with(_LOADING, _SAMPLING)
def chat(
    ctx: typer.Context,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the assistant shall be like.")] = None,
) -> None:
    """Hold a conversation.

    The model must have a chat template. /help tells more; Ctrl-C stops an answer and not the program. Where input is
    no terminal, every line is a message.
    """
    with _load(ctx) as llm:
        if not llm.tokenizer.templates:
            raise Unsupported("the model has no chat template: use bitnet run, which continues a plain prompt")
        params, talk = _sampling(ctx, llm), _system_messages(system)
        for line in _messages():
            if line.startswith("/"):
                if _obey(line, talk):
                    return
            elif line.strip():
                _answer(llm, talk, line, params)


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help=_MODEL_HELP)] = "default",
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


@app.command()
@_with(_LOADING)
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

    model, options = _loading(ctx)
    with _progress() as progress:
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


def _loading(ctx: typer.Context) -> tuple[str, dict[str, Any]]:
    given = {name: ctx.params[name] for name in _LOADING if ctx.params[name] is not None}
    return given.pop("model", "default"), given


def _load(ctx: typer.Context) -> LLM:
    from bitnet_inference.llm import LLM

    model, options = _loading(ctx)
    with _progress() as progress:
        return LLM.load(model, progress=progress, **options)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _sampling(ctx: typer.Context, llm: LLM) -> SamplingParams:
    """The model's own parameters, but for the options that were given."""
    given = {name: ctx.params[name] for name in _SAMPLING if ctx.params[name] not in (None, [], ())}
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    return replace(llm.default_params, **given)


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidParams(f"--logit-bias is {text!r}: give a token id and a number, as in 42=-1.5") from None


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise InvalidParams('there is no prompt: write bitnet run "your prompt"')
    if prompt is None or prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidParams(f"the prompt is not UTF-8 at byte {error.start}: convert it") from None
    if not prompt:
        raise InvalidParams("the prompt is empty: give some text")
    return prompt


def _system_messages(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _open(llm: LLM, text: str, system: str | None, params: SamplingParams, plain: bool) -> Stream:
    if not plain:
        return llm.stream_chat([*_system_messages(system), {"role": "user", "content": text}], params)
    if system is not None:
        raise InvalidParams("--system needs a chat template: leave --raw out, or write it into the prompt")
    return llm.stream(text, params)


def _print_answer(stream: Stream, stops_on_interrupt: bool = False) -> Generation:
    shown = ""
    try:
        for piece in stream:
            shown += piece.text
            typer.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        if not stops_on_interrupt:
            raise
    output = stream.read()  # what was on its way when the answer was stopped
    rest = output.text[len(shown) :]
    typer.echo(rest, nl=not output.text.endswith("\n"))
    return output


def _print_speed(output: Generation) -> None:
    usage = output.usage
    prompt_speed = usage.num_prompt_tokens / max(usage.prompt_s, 1e-9)
    output_speed = usage.num_output_tokens / max(usage.output_s, 1e-9)
    typer.echo(
        f"[prompt: {usage.num_prompt_tokens} tokens, {prompt_speed:.1f} tokens/s; "
        f"answer: {usage.num_output_tokens} tokens, {output_speed:.1f} tokens/s; {output.finish_reason}]",
        err=True,
    )


def _messages() -> Iterator[str]:
    """What the user writes, message by message."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    session = _terminal()
    typer.echo("/help tells what you can do.", err=True)
    while True:
        try:
            yield session.prompt("> ", multiline=True)
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _terminal() -> Any:
    """A line editor with history, in which Enter sends and Alt+Enter begins a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("enter")(lambda event: event.current_buffer.validate_and_handle())
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(key_bindings=keys)
    return session


def _obey(line: str, talk: list[dict[str, str]]) -> bool:
    """Do what a line with a slash says; True for leaving."""
    word = line.strip()
    if word == "/reset":
        talk[:] = [message for message in talk if message["role"] == "system"]
    elif word == "/help":
        typer.echo(CHAT_HELP, err=True)
    elif word != "/exit":
        typer.echo(f"bitnet: {word} is no command: /help lists them", err=True)
    return word == "/exit"


def _answer(llm: LLM, talk: list[dict[str, str]], line: str, params: SamplingParams) -> None:
    """Add the user's message and the answer to the talk; a message that cannot be answered is taken back."""
    talk.append({"role": "user", "content": line})
    try:
        output = _print_answer(llm.stream_chat(talk, params), stops_on_interrupt=True)
    except RequestError as error:
        talk.pop()
        typer.echo(f"bitnet: {error} (/reset begins anew)", err=True)
    else:
        talk.append({"role": "assistant", "content": output.text})

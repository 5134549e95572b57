"""`bitnet chat`: a conversation on a terminal, or of lines that are piped in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import typer

from bitnet_inference.cli.answer import context_note, print_answer, system_messages
from bitnet_inference.cli.hub import offer_to_pull
from bitnet_inference.cli.options import (
    CACHE,
    DRAFTS,
    FILTERING,
    LOADING,
    SAMPLING,
    TEMPLATE,
    check_sampling,
    load_llm,
    sampling_params,
    talk_options,
    template_variables,
    with_options,
)
from bitnet_inference.config import from_utf8
from bitnet_inference.errors import RequestError, Unsupported

if TYPE_CHECKING:
    from bitnet_inference.engine.params import SamplingParams
    from bitnet_inference.llm import LLM
    from bitnet_inference.prompts import TalkOptions

CHAT_HELP = """Write a message, and Enter sends it; Alt+Enter begins a new line.
/reset  forget the conversation
/help   this help
/exit   leave; Ctrl-D too. Ctrl-C stops an answer."""


@with_options(LOADING, CACHE, DRAFTS, FILTERING, SAMPLING, TEMPLATE)
def chat(
    ctx: typer.Context,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the assistant shall be like.")] = None,
) -> None:
    """Hold a conversation.

    The model must have a chat template. /help tells more; Ctrl-C stops an answer and not the program. Where input is
    no terminal, every line is a message. When the context is full, the oldest turns are left out ("keep_system"),
    unless --overflow says otherwise.
    """
    check_sampling(ctx)
    variables = template_variables(ctx)
    offer_to_pull(ctx.params["model"])
    with load_llm(ctx) as llm:
        llm.tokenizer.check_words()
        if not llm.tokenizer.templates:
            raise Unsupported("the model has no chat template: use bitnet run, which continues a plain prompt")
        options = talk_options(llm, variables)
        params, talk = sampling_params(ctx, llm), system_messages(system)
        params.check(llm.config.vocab_size)  # no message could be answered
        if ctx.params["overflow"] is None:
            params = replace(params, overflow="keep_system")
        for line in _messages():
            if line.startswith("/"):
                if _obey(line, talk):
                    return
            elif line.strip():
                _answer(llm, talk, line, params, **options)


def _messages() -> Iterator[str]:
    """What the user writes, message by message."""
    if not sys.stdin.isatty():
        yield from (from_utf8("the message", line.rstrip(b"\r\n")) for line in sys.stdin.buffer)
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
    session: PromptSession[str] = PromptSession(key_bindings=keys, enable_suspend=True)
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


def _answer(
    llm: LLM, talk: list[dict[str, str]], line: str, params: SamplingParams, **options: Unpack[TalkOptions]
) -> None:
    """Add the user's message and the answer to the talk; a message that cannot be answered is taken back."""
    talk.append({"role": "user", "content": line})
    try:
        output = print_answer(llm.stream_chat(talk, params, **options), stops_on_interrupt=True)
    except RequestError as error:
        talk.pop()
        typer.echo(f"bitnet: {error} (/reset begins anew)", err=True)
    else:
        talk.append({"role": "assistant", "content": output.text})
        if note := context_note(output.usage):
            typer.echo(f"[{note}{output.finish_reason}]", err=True)

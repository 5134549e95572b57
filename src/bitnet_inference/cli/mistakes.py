"""What is said of a command line that cannot be read: one line, with the place and the cure."""

from __future__ import annotations

import difflib
import re
from typing import Any

import typer

UsageError: Any = typer.BadParameter.__base__  # of its kinds typer exports only some

# What other engines call an option.
_OURS = {
    "--context-length": "--max-cache-tokens",
    "--ctx-size": "--max-cache-tokens",
    "--max-model-len": "--max-cache-tokens",
    "--max-new-tokens": "--max-tokens",
    "--n-gpu-layers": "--gpu-layers",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system",
    "--temp": "--temperature",
    "--tensor-parallel-size": "--gpus",
    "-c": "--max-cache-tokens",
}
# Where words are left over: the prompt without its quotes, or a model in front of it, as Ollama has it.
_QUOTES = {
    "chat": "the model is an option: bitnet chat --model NAME",
    "run": 'put the prompt in quotes; the model is an option: bitnet run --model NAME "the prompt"',
}
_WANTED = {"float": "give a number", "int": "give a whole number"}


def told(error: Any) -> str:
    """The line about a UsageError, which is raised again where it tells the whole help."""
    if "\n" in error.format_message():
        raise error
    ctx, option = error.ctx, getattr(error, "option_name", None)
    cure = f"{ctx.command_path if ctx else 'bitnet'} --help lists what there is"
    if ctx and "unexpected extra argument" in error.format_message():
        cure = _QUOTES.get(ctx.command.name, cure)
    if ctx and option:
        names = [name for each in ctx.command.params for name in each.opts if name.startswith("--")]
        option = option.replace("_", "-")
        ours = _OURS.get(option, option)
        near = [ours] if ours in names else difflib.get_close_matches(option, names, n=1, cutoff=0.75)
        cure = f"did you mean {near[0]}?" if near else cure
    message = " ".join(error.format_message().split()).partition(" (Possible options")[0].rstrip(".")
    if found := re.match(r"Invalid value for (.+?['\)]): ", message):
        place, message = found[1].replace("'", ""), message[found.end() :]
        if hasattr(error.__cause__, "errors"):  # pydantic's, which knows the value
            fault = error.__cause__.errors()[0]
            wanted = _WANTED.get(fault["type"].split("_")[0], fault["msg"][:1].lower() + fault["msg"][1:])
            return f"{place} is {str(fault['input'])!r:.60}: {wanted}"
        message = f"{place}: {message}"
    return f"{message[:1].lower()}{message[1:]}: {cure}"

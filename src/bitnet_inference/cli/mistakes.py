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
_WANTED = {"bool": "give true or false", "float": "give a number", "int": "give a whole number"}


def told(error: Any, command: str | None = None) -> str:
    """The line about a UsageError of this command, which is raised again where it tells the whole help."""
    if "\n" in error.format_message():
        raise error
    if error.ctx is None:  # the parser of options knows no command
        cure = _help(f"bitnet {command}" if command else "bitnet")
    else:
        cure = _cure(error.ctx, error.format_message(), getattr(error, "option_name", None))
    message = " ".join(error.format_message().split()).partition(" (Possible options")[0].rstrip(".")
    if found := re.match(r"Invalid value for (.+?['\)]): ", message):
        place, message = _variable(error) or found[1].replace("'", ""), message[found.end() :]
        if hasattr(error.__cause__, "errors"):  # pydantic's, which knows the value
            fault = error.__cause__.errors()[0]
            wanted = _WANTED.get(fault["type"].split("_")[0], fault["msg"][:1].lower() + fault["msg"][1:])
            return f"{place} is {str(fault['input'])!r:.60}: {wanted}"
        message = f"{place}: {message}"
    return f"{message[:1].lower()}{message[1:]}: {cure}"


def _cure(ctx: Any, message: str, option: str | None) -> str:
    path, names = ctx.command_path, [name for each in ctx.command.params for name in each.opts if name[:2] == "--"]
    if "unexpected extra argument" in message and "--model" in names:  # with Ollama the model stands there
        if ctx.command.name == "run":
            return f'put the prompt in quotes; the model is an option: {path} --model NAME "the prompt"'
        return f"the model is an option: {path} --model NAME"
    if option in ("-m", "--model") and "--model" not in names:
        return f"the model is no option here: {path} NAME"
    name = (option or "").replace("_", "-")
    ours = _OURS.get(name, name)
    near = [ours] if ours in names else difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else _help(path)


def _help(path: str) -> str:
    return f"{path} --help lists what there is"


def _variable(error: Any) -> str | None:
    """The variable of the environment in which a wrong value stands; None where it stands on the command line."""
    if error.ctx is None or error.ctx.get_parameter_source(error.param.name).name != "ENVIRONMENT":
        return None
    return str(error.param.envvar or f"{error.ctx.auto_envvar_prefix}_{error.param.name.upper()}")

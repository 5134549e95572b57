"""The command `bitnet`: parse, call one library function, print. The one door to typer, rich and prompt_toolkit."""

from bitnet_inference.cli.commands import app, main

__all__ = ["app", "main"]

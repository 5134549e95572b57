"""The commands of `bitnet`, and what their mistakes look like. What is heavy is imported where it is needed."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from bitnet_inference.cli.answer import run
from bitnet_inference.cli.batch import batch
from bitnet_inference.cli.conversation import chat
from bitnet_inference.cli.convert import convert
from bitnet_inference.cli.hub import list_models, pull, remove, show
from bitnet_inference.cli.mistakes import UsageError, told
from bitnet_inference.cli.options import EXIT_MISTAKE
from bitnet_inference.cli.reports import bench, doctor, evaluate, inspect
from bitnet_inference.cli.serve import serve
from bitnet_inference.cli.top import top
from bitnet_inference.errors import NO_THREADS, BitNetError, is_no_thread

EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    """Mistakes of users become one line and exit code 2, Ctrl-C becomes exit code 130."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Parse and run the command; its help is written in here too."""
        try:
            return super().main(*args, **options)
        except OSError as error:
            cure = "give a shorter one" if error.errno == errno.ENAMETOOLONG else "free space, or check the device"
            with suppress(OSError):  # that may be what fails
                typer.echo(f"bitnet: input or output fails ({error}): {cure}", err=True)
            sys.stdout = _nowhere("w")  # what is left in the old one cannot be written
            sys.exit(EXIT_MISTAKE)
        except RuntimeError as error:
            if not is_no_thread(error):
                raise
            typer.echo(f"bitnet: {NO_THREADS}", err=True)
            sys.exit(EXIT_MISTAKE)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse what stands before the command."""
        try:
            return super().make_context(*args, **options)
        except UsageError as error:
            _end(told(error))

    def invoke(self, ctx: Any) -> Any:
        """Parse what stands behind the command, and run it."""
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _end(told(error, ctx.invoked_subcommand))
        except BitNetError as error:
            _end(str(error))
        except (KeyboardInterrupt, typer.Abort):  # the latter at a question
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _end(why: str) -> NoReturn:
    typer.echo(f"bitnet: {why}", err=True)
    raise typer.Exit(EXIT_MISTAKE) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def main() -> None:
    """The entry point of the command."""
    _prepare_streams()
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # else whoever started us has it ignored
        signal.signal(signal.SIGTERM, _terminate)
        if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else nohup wants it ignored
            signal.signal(signal.SIGHUP, _hang_up)
    app(prog_name="bitnet")


def _terminate(number: int, frame: Any) -> NoReturn:
    """End by way of all `finally`, so that no half-written file stays; a second signal ends everything at once."""
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def _hang_up(number: int, frame: Any) -> None:
    """The terminal has gone: end as with SIGTERM, whoever handles that now. Shell and system both tell it: once."""
    signal.signal(number, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def _prepare_streams() -> None:
    """Where a stream was closed by whoever started us (`<&-`), nothing can be read or is shown.

    Where it cannot hold all characters, as in Latin-1, the others are shown as Python and JSON write them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere(mode))
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _nowhere(mode: str) -> Any:
    return open(os.devnull, mode, encoding="utf-8")  # open until the process ends


def _print_version(wanted: bool) -> None:
    if wanted:
        from bitnet_inference import __version__

        typer.echo(f"bitnet {__version__}")
        raise typer.Exit


@app.callback()
def bitnet(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run language models whose weights are -1, 0 and +1.

    Try: bitnet run "Tell me a story about a brave fox called Mia"

    In the environment, BITNET_THREADS sets the number of threads and BITNET_ISA the instruction set; "bitnet doctor"
    lists those of this machine.
    """


for command in (run, chat, serve, top, pull, show, batch, inspect, convert, bench, doctor):
    # A server's options can all stand in the environment: in containers and services they have to.
    app.command(context_settings={"auto_envvar_prefix": "BITNET"} if command is serve else None)(command)
app.command("list")(list_models)
app.command("rm")(remove)
app.command("eval")(evaluate)

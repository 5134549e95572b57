"""`bitnet top`: what a running server does, in the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from bitnet_inference.amounts import told_bytes
from bitnet_inference.errors import BitNetError

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from bitnet_inference.top import ModelRow, Overview, Reading

WINDOW_S = 60.0
MAX_SHOWN = 5  # kinds of failures
MAX_WIDTH = 1000  # no table is wider
TITLES = (
    "model",
    "tok/s",
    "computed/s",
    "run",
    "wait",
    "first token p50/p95",
    "gap p50/p95",
    "cache",
    "hits",
    "memory",
    "errors",
)
# Columns of two tables where one has no room: rates and requests, times and memory.
HALVES = (0, 1, 2, 3, 4, 10), (0, 5, 6, 7, 8, 9)


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="The address of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="BITNET_API_KEY",
            help="A key of the server, where it wants one: the first that is no hash.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table, of an interval and of all times, and exit.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two readings.")] = 2.0,
) -> None:
    """Show what a running server does.

    Tokens a second, requests, times, cache, memory and errors. Where output is no terminal, a table an interval.
    """
    from rich.console import Console

    console, key = Console(), _first_plain(api_key or ())
    if once or not console.is_terminal or console.is_dumb_terminal:  # where no picture can be drawn over another one
        if not console.is_terminal:
            console.width = MAX_WIDTH  # a file has no width, and a script wants all columns
        _print(console, url, key, interval, once)
    else:
        _watch(console, url, key, interval)


def _first_plain(keys: Sequence[str]) -> str | None:
    """`bitnet serve` takes several keys, and hashes in place of them, from the same variable."""
    return next((each for each in keys if not each.startswith("sha256:")), None)


def _print(console: Console, url: str, api_key: str | None, interval: float, once: bool) -> None:
    from bitnet_inference.top import overview, read_server

    before = read_server(url, api_key)
    while True:
        time.sleep(interval)
        now = read_server(url, api_key)
        console.print(_picture(overview(now, before), console))
        if once:
            return
        before = now


def _watch(console: Console, url: str, api_key: str | None, interval: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from bitnet_inference.top import overview, read_server

    readings: deque[Reading] = deque([read_server(url, api_key)])
    with Live(_picture(overview(readings[0]), console), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    now = read_server(url, api_key)
                except BitNetError as error:  # it may come back
                    live.update(Text(str(error), style="red"), refresh=True)
                    continue
                live.update(_picture(overview(now, readings[-1], readings[0]), console), refresh=True)
                readings.append(now)
                while readings[0].time < now.time - WINDOW_S:
                    readings.popleft()
        except KeyboardInterrupt:
            return


def _picture(shown: Overview, console: Console) -> Group:
    from rich.console import Group
    from rich.text import Text

    rows = [_cells(row) for row in shown.models]
    whole = _table(range(len(TITLES)), rows)
    is_wide = console.measure(whole, options=console.options.update(width=MAX_WIDTH)).maximum <= console.width
    tables = [whole] if is_wide else [_table(columns, rows) for columns in HALVES]
    memory = f"models {_size(shown.used_bytes)} of {_size(shown.max_bytes)}, process {_size(shown.resident_bytes)}"
    head = f"bitnet {_plain(shown.version)}   HTTP requests under way: {shown.num_http:.0f}   memory: {memory}"
    failures = [f"{count:.0f} x {_plain(what)}" for what, count in list(shown.failures.items())[:MAX_SHOWN]]
    return Group(Text(head), *tables, Text("HTTP errors: " + (", ".join(failures) or "none")))


def _table(columns: Sequence[int], rows: Sequence[Sequence[str]]) -> Table:
    """A line for each model; the name is folded where it has no room."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_name = column == 0
        table.add_column(TITLES[column], justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for cells in rows:
        table.add_row(*(Text(cells[column]) for column in columns))
    return table


def _cells(row: ModelRow) -> list[str]:
    return [
        _plain(row.name) + ("" if row.is_loaded else " (not loaded)"),
        _count(row.tokens_per_s, 1),
        _count(row.computed_per_s, 1),
        _count(row.num_running),
        _count(row.num_waiting),
        "/".join(map(_duration, row.first_token_s)),
        "/".join(map(_duration, row.gap_s)),
        _share(row.cache_use),
        _share(row.hit_rate),
        _size(row.num_bytes),
        _count(row.num_errors),
    ]


def _plain(text: str) -> str:
    """What a server says shall not write on the terminal as it pleases."""
    return "".join(char if char.isprintable() else "?" for char in text)[:60]


def _count(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f}s" if seconds >= 1 else f"{1000 * seconds:.3g}ms"


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else told_bytes(num_bytes)

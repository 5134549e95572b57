"""What `bitnet top` shows, and what it asks with; tests/server/test_top.py has it beside a server."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bitnet_inference import cli
from bitnet_inference.cli.top import TITLES, _picture
from bitnet_inference.errors import EngineError
from bitnet_inference.top import ModelRow, Overview

ROW = ModelRow(
    name="bitnet-2b",
    is_loaded=True,
    num_bytes=1.234e9,
    tokens_per_s=1234.5,
    computed_per_s=12345.6,
    num_running=123,
    num_waiting=1000,
    first_token_s=(0.123, 12.34),
    gap_s=(0.0234, 0.123),
    cache_use=1.0,
    hit_rate=0.5,
    num_errors=17,
)
CELLS = [
    "bitnet-2b",
    "1234.5",
    "12345.6",
    "123",
    "1000",
    "123ms/12.34s",
    "23.4ms/123ms",
    "100%",
    "50%",
    "1.23 GB",
    "17",
]


@pytest.mark.parametrize(("width", "num_tables"), [(200, 1), (80, 2)])
def test_every_number_is_readable_at_every_width(width: int, num_tables: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(_picture(Overview("1.0", 3, 1e9, 1e9, 2e9, [ROW], {}), console))
    text = console.export_text()
    assert text.count("bitnet-2b") == text.count("model ") == num_tables
    assert [each for each in (*TITLES, *CELLS) if each not in text] == []
    assert max(map(len, text.splitlines())) <= width and "…" not in text


@pytest.mark.parametrize(
    ("variable", "key"),
    [("one", "one"), (f"sha256:{'a' * 64} two three", "two"), (f"sha256:{'a' * 64}", None), (None, None)],
)
def test_the_key_is_one_of_those_that_the_server_takes(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, key: str | None
) -> None:
    asked: list[str | None] = []

    def read_server(url: str, api_key: str | None) -> None:
        asked.append(api_key)
        raise EngineError("it has gone")

    monkeypatch.setattr("bitnet_inference.top.read_server", read_server)
    result = CliRunner().invoke(cli.app, ["top", "--once"], env={"BITNET_API_KEY": variable})
    assert result.exit_code == 2 and asked == [key], result.output

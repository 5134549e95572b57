"""Every example in docs/ runs, and what README.md and docs/ show is one of them, with its output."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from bitnet_inference.hub.names import parse

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def source(path: Path) -> str:
    """An example without its docstring."""
    return path.read_text(encoding="utf-8").partition("\n\n")[2]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path))
    printed = capsys.readouterr().out
    assert printed
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if source(path) in text and (shown := re.search(r"```text\n(.*?)```", text, re.DOTALL)):
            assert shown[1] == printed


def test_what_the_pages_show_is_an_example() -> None:
    sources = list(map(source, EXAMPLES))
    blocks = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
    assert len(blocks) >= 2
    for block in blocks:
        assert block in sources


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.stem)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folders = "benchmarks|deploy|docs|kernels|scripts|src|tests|training"
    named = [ROOT / path for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", text)]
    linked = [page.parent / link for link in re.findall(r"\]\((?!http)([^)#\s]+)", text)]
    assert [path for path in [*named, *linked] if not path.exists()] == []


def test_the_models_that_commands_name_are_known() -> None:
    command = r"(?:bitnet(?:-inference)? (?:pull|serve|rm|chat -m|chat --model)|BITNET_MODELS=\"?) ?([a-z][\w-]+)\s"
    names = {name for page in PAGES for name in re.findall(command, page.read_text(encoding="utf-8"))}
    for name in names - {"default"}:
        assert parse(name).entry is not None
    assert len(names) > 1

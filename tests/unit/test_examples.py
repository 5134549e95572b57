"""Every example in docs/ runs, and what the README shows is one of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path))
    assert capsys.readouterr().out


def test_the_readme_shows_examples() -> None:
    readme = (ROOT / "README.md").read_text()
    sources = [path.read_text().partition("\n\n")[2] for path in EXAMPLES]
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert blocks
    for block in blocks:
        assert block in sources

"""benchmarks/formats.py: files by others are read right, and ours by others. Needs the extra "peers"."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FORMATS = Path(__file__).parents[2] / "benchmarks" / "formats.py"


def test_the_tables_of_a_ternary_and_of_a_dense_llama():
    """Every file has the reference's numbers and text; llama.cpp is as near as its rounding lets it, token by token."""
    command = [sys.executable, FORMATS, "llama-bitlinear", "llama-f16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    ours, theirs = done.stdout.split("\n\n")[:2]
    cells = re.findall(r"(\de-\d\d) ([=~!])", ours)
    assert len(cells) == ours.count("e-") and "!" not in {text for _, text in cells}
    assert max(float(error) for error, _ in cells) < 1e-4
    cells = re.findall(r"(\d\.\de-\d\d) (=)", theirs)
    assert len(cells) == theirs.count("e-") > 30 and max(float(error) for error, _ in cells) < 0.08
    assert "texts" not in theirs and not re.search("crashes|does not load", theirs)


def test_how_long_a_model_takes_to_open():
    command = [sys.executable, FORMATS, "--open", Path(__file__).parents[1] / "golden" / "llama-f16", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title, _, row = done.stdout.splitlines()
    assert len(title.split("|")) == len(row.split("|")) == 8 and row.startswith("| llama-f16 |")

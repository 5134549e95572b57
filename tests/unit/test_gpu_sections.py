"""benchmarks/gpu.py: a section that fails, or does not end, costs nothing but itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu import command, run


@pytest.mark.parametrize(
    ("program", "limit_s", "failed"),
    [
        ("", 60, None),
        ("raise SystemExit(3)", 60, "exit status 3"),
        ("while True: pass", 0, "not done within 0 s"),
    ],
)
def test_a_section_says_how_it_ended_and_keeps_its_numbers(tmp_path, program, limit_s, failed):
    file = tmp_path / "numbers"
    file.write_text('{"products": {"tiny": {"us": 2.5}}}')
    numbers = run([sys.executable, "-S", "-c", program], file, limit_s)
    assert numbers.get("failed") == failed
    assert numbers["products"] == {"tiny": {"us": 2.5}} and numbers["s"] >= 0


def test_a_reason_that_a_section_gives_comes_before_its_status(tmp_path):
    file = tmp_path / "numbers"
    file.write_text('{"failed": "RuntimeError: CUDA error"}')
    assert run([sys.executable, "-S", "-c", "raise SystemExit(1)"], file, 60)["failed"] == "RuntimeError: CUDA error"


def test_a_missing_pytest_is_told_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu.find_spec", lambda name: None)
    found = run(command("checks", tmp_path, tmp_path / "none"), tmp_path / "none", 60)
    assert found["failed"] == 'pytest is not installed: pip install ".[cuda,test]"'

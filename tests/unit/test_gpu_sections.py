"""benchmarks/gpu.py: a section that fails, or does not end, costs nothing but itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from agreement import is_off
from gpu import check, run, stop


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


def test_a_section_that_is_stopped_may_tell_how_far_it_came():
    program = "try:\n    print(1, flush=True)\n    while True: pass\nexcept KeyboardInterrupt: print(2)"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        stop(process)
        assert process.stdout.read() == b"2\n"


@pytest.mark.parametrize(
    ("rms", "num_others", "is_wrong"), [(0.03, 0, False), (0.031, 0, True), (0.0, 1, True), (float("nan"), 0, True)]
)
def test_what_does_not_agree(rms, num_others, is_wrong):
    assert is_off(rms, num_others) == is_wrong


def test_a_reason_that_a_section_gives_comes_before_its_status(tmp_path):
    file = tmp_path / "numbers"
    file.write_text('{"failed": "RuntimeError: CUDA error"}')
    assert run([sys.executable, "-S", "-c", "raise SystemExit(1)"], file, 60)["failed"] == "RuntimeError: CUDA error"


def test_a_missing_pytest_is_told_with_its_cure(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu.find_spec", lambda name: None)
    assert check(tmp_path, 60)["failed"] == 'pytest is not installed: pip install ".[cuda,test]"'


def test_each_file_of_tests_says_how_it_ended(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "tests" / "backends"
    folder.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    for name, wanted in (("cuda_good", 2), ("cuda_bad", 3)):
        (folder / f"test_{name}.py").write_text(f"def test(): assert 1 + 1 == {wanted}")
    monkeypatch.setattr("gpu.ROOT", tmp_path)
    assert check(tmp_path, 60)["failed"] == "test_cuda_bad.py: exit status 1"
    shown = capsys.readouterr().out
    assert "assert (1 + 1) == 3" in shown and "1 passed" in shown

"""benchmarks/engine.py: which sections there are, and that each gives numbers on the small model."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from bitnet_inference.errors import InvalidParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import engine
import engine_drafts
import engine_loads
import engine_streams


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Everything as short as it can be."""
    for where, name, value in (
        (engine_streams, "LONG_PROMPT", 24),
        (engine_streams, "SHARED", 64),
        (engine_streams, "NUM_CALM", 12),
        (engine_loads, "LENGTH", 3),
        (engine_loads, "NUM_SHORT", 12),
        (engine_loads, "NUM_IN_FLIGHT", 4),
        (engine_loads, "NUM_COMPARED", 3),
        (engine_drafts, "ANSWER", 4),
    ):
        monkeypatch.setattr(where, name, value)


def test_sections_give_tables_and_numbers(tmp_path, capsys):
    file = tmp_path / "numbers.json"
    engine._run(Namespace(folder="default", section=None, threads=1, samples=1, json=file))
    numbers = json.loads(file.read_text())
    assert set(numbers) == {"model", "isa", "threads", *engine.SECTIONS}
    for name in engine.SECTIONS:
        rows = numbers[name]["rows"].values()
        assert rows and len({tuple(row) for row in rows}) == 1 and "kept" in numbers[name]["samples"]
    (short,) = numbers["short"]["rows"].values()
    assert short["finished"] == 12 and short["same"] == 3
    assert numbers["prefix"]["rows"]["64 shared"]["second / first"] > 0
    assert set(numbers["batch"]["rows"]) >= {"8 greedy", "16 top_p 0.95"}
    assert "tokens a step" in capsys.readouterr().out


def test_a_table_has_a_column_a_number():
    lines = engine.table("title", {"one": {"ms": 1.0, "ratio": 0.98765}, "other": {"ms": 1234.5, "ratio": 2.0}})
    assert lines == ["title      ms    ratio", "one         1   0.9877", "other   1,234        2"]


def test_sections_that_do_not_exist():
    assert engine.choose(None) == list(engine.SECTIONS) and engine.choose("batch,gap,batch") == ["batch", "gap"]
    for names in ("gaps", "gap,x", ","):
        with pytest.raises(InvalidParams, match="choose of gap"):
            engine.choose(names)
    with pytest.raises(InvalidParams, match="at least 1"):
        engine._run(Namespace(folder="default", section="gap", threads=1, samples=0, json=None))

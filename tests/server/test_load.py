"""benchmarks/serving.py in short: many streams, mixed traffic and faults. Each raises where an answer is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from serving_client import Answer  # noqa: E402
from serving_faults import faults  # noqa: E402
from serving_harm import HARMS  # noqa: E402
from serving_load import Wrong, load, refuse_wrong  # noqa: E402
from serving_soak import SHARES, soak  # noqa: E402

EVENTS = [
    b'{"id":"a","choices":[{"index":0,"text":"He","finish_reason":null}]}',
    b'{"id":"a","choices":[{"index":0,"text":"y","finish_reason":null}]}',
    b'{"id":"a","choices":[{"index":0,"text":"","finish_reason":"stop"}]}',
    b"[DONE]",
]


def answer(*events: bytes, status: int = 200, error: str = "") -> Answer:
    return Answer(0.0, status, events=[(0.0, each) for each in events], error=error)


def test_an_answer_that_is_whole_and_right_is_not_refused() -> None:
    refuse_wrong([answer(*EVENTS)], [["Hey"]])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (answer(*EVENTS[1:]), "a wrong answer: .'y'."),
        (answer(*EVENTS[:-1]), "not .DONE"),
        (answer(*EVENTS[:2], EVENTS[3]), "have ended, of 1"),
        (answer(*EVENTS[:2], EVENTS[2].replace(b'"a"', b'"b"'), EVENTS[3]), "ids differ"),
        (answer(*EVENTS[:1], b'{"id":"a","error":{"message":"no"}}', *EVENTS[1:]), "an error"),
        (answer(status=500), "status 500"),
        (answer(*EVENTS, error="connection lost"), "connection lost"),
    ],
)
def test_what_is_wrong_is_seen(wrong: Answer, why: str) -> None:
    with pytest.raises(Wrong, match=why):
        refuse_wrong([wrong], [["Hey"]])


def test_answers_of_one_id_are_seen() -> None:
    with pytest.raises(Wrong, match="2 answers have 1 ids"):
        refuse_wrong([answer(*EVENTS)] * 2, [["Hey"]] * 2)


def test_many_streams_at_a_time() -> None:
    rows = load("default", 1, count=300, num_tokens=4)
    assert list(rows) == ["300 at once, library", "300 at once"] and rows["300 at once"]["right"] == 300


def test_mixed_traffic() -> None:
    row = soak("default", 1, minutes=0.01, rate=200, num_tokens=4)["soak"]
    assert row["requests"] == sum(row[kind] for kind in SHARES) > 50


def test_faults() -> None:
    elsewhere = ("long bodies", "full disk")  # test_operations.py, and quicker
    rows = faults("default", 1, seconds=0.05, share=0.02, num_tokens=20, but=elsewhere)
    assert list(rows) == [*(name for name in HARMS if name not in elsewhere), "kill -9"]
    assert rows["idle connections"]["number"] == 200 and rows["long heads"]["number"] == 1


def test_a_section_that_is_not_there() -> None:
    told = subprocess.run([sys.executable, BENCHMARKS / "serving.py", "--section", "x"], capture_output=True, text=True)
    assert told.returncode == 2 and told.stderr.splitlines() == [
        "serving.py: --section has 'x': choose of load, throughput, soak, faults"
    ]

"""What Counts and Trace make of the events of an engine."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from scripted import Listener, ScriptedModel, run

from bitnet_inference import trace as traces
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import Finished, Preempted, Queued, Scheduled, Stepped, Token
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.errors import InvalidParams
from bitnet_inference.model.plan import StepTime
from bitnet_inference.telemetry import Counts, Histogram
from bitnet_inference.trace import Trace

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SECONDS = {"schedule": 0.5, "draft": 0.0, "forward": 4.0, "sample": 2.0, "deliver": 0.25}


def stepped(time, **changes):
    values = {
        "num_decoding": 0, "num_prompts": 1, "num_prompt_tokens": 3, "num_draft_tokens": 0,
        "num_right_draft_tokens": 0, "num_new_tokens": 1,
        "num_waiting": 0, "num_running": 1, "num_blocks": 10, "num_free_blocks": 8, "seconds": SECONDS,
        "plan_times": (),
    }  # fmt: skip
    return Stepped(time=time, **values | changes)


LIFE = [
    Queued(7, 100.0, 3),
    Scheduled(7, 101.0, 0),
    Token(7, 105.0, 0),
    stepped(101.0),
    Preempted(7, 108.0),
    stepped(108.0, num_running=0, num_waiting=1, num_free_blocks=10, num_prompts=0, num_prompt_tokens=0),
    Scheduled(7, 115.0, 3),
    Token(7, 118.0, 1),
    Finished(7, 119.0, Finish("stop", token_id=2), Usage(3, 2, 1.0, 4.0, 14.0, num_cached_tokens=1)),
    stepped(115.0, num_running=0, num_decoding=1, num_free_blocks=10, num_draft_tokens=4, num_right_draft_tokens=3),
]


def crowd(listener):
    """An engine with so little room that requests wait and are preempted."""
    engine = Engine(ScriptedModel(num_blocks=6, block_size=4, max_tokens=5, max_sequences=3), listener=listener)
    for number in range(5):
        engine.submit(Request([number] * (3 + number), GREEDY, Listener()))
    run(engine)
    return engine


def read(file):
    """The trace's slices by track, its counters and the names of its tracks; everything is in order of time."""
    records = json.loads(file.read_text())["traceEvents"]
    timed = [record for record in records if record["ph"] != "M"]
    assert [record["ts"] for record in timed] == sorted(record["ts"] for record in timed) and timed[0]["ts"] == 0
    slices = {}
    for record in timed:
        if record["ph"] == "X":
            slices.setdefault((record["pid"], record["tid"]), []).append(record)
    names = {(each["pid"], each.get("tid")): each["args"]["name"] for each in records if each["ph"] == "M"}
    return slices, [record for record in timed if record["ph"] == "C"], names


def end(record):
    return round(record["ts"] + record["dur"], 3)


def test_a_histogram_counts_what_is_at_most_each_bound():
    histogram = Histogram((1, 2, 4))
    for value in (0.5, 1, 2, 3, 100):
        histogram.add(value)
    assert histogram.as_json() == {"at_most": {"1": 2, "2": 3, "4": 4}, "count": 5, "sum": 106.5}


def test_counts_of_a_life():
    counts = Counts()
    for event in LIFE:
        counts(event)
    told = json.loads(json.dumps(counts.as_json()))
    assert told["finished"] == {"stop": 1}
    assert told["total"] == {
        "requests": 1, "prompt_tokens": 3, "cached_tokens": 1, "output_tokens": 2, "new_tokens": 2,
        "computed_tokens": 11, "preemptions": 1, "steps": 2, "draft_tokens": 4, "right_draft_tokens": 3,
        "device_failures": 0,
    }  # fmt: skip
    assert told["now"] == {"waiting": 0, "running": 0, "blocks": 10, "blocks_used": 0}
    sums = {
        "queue_s": 1.0, "first_token_s": 5.0, "token_gap_s": 13.0, "step_s": 13.5, "step_tokens": 11, "request_s": 19.0,
        "output_token_s": 14.0, "request_prompt_tokens": 3, "request_output_tokens": 2,
    }  # fmt: skip
    assert {name: told[name]["sum"] for name in sums} == sums
    assert told["first_token_s"]["at_most"]["5.0"] == 1 and told["first_token_s"]["at_most"]["2.5"] == 0


def test_counts_agree_with_the_requests_and_forget_them():
    counts = Counts()
    engine = crowd(counts)
    told = counts.as_json()
    assert told["finished"] == {"length": 5} and told["total"]["output_tokens"] == 40
    assert told["total"]["prompt_tokens"] == 3 + 4 + 5 + 6 + 7 and told["total"]["preemptions"] > 0
    assert told["now"] == {"waiting": 0, "running": 0, "blocks": engine.num_free_blocks, "blocks_used": 0}
    assert (told["first_token_s"]["count"], told["token_gap_s"]["count"]) == (5, 35)
    assert told["step_tokens"]["count"] == told["step_s"]["count"] == told["total"]["steps"]
    assert not counts._queued and not counts._last_token


def test_before_the_first_step_everything_is_zero():
    told = Counts().as_json()
    assert not any(told["total"].values()) and not any(told["now"].values()) and told["finished"] == {}


def test_a_trace_of_a_life(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    for event in LIFE:
        trace(event)
    trace.write()
    slices, counters, names = read(tmp_path / "trace.json")
    assert names[1, None] == "engine" and names[1, 1] == "steps" and names[2, 7] == "request 7"
    phases = [(each["name"], each["ts"] / 1e6, each["dur"] / 1e6) for each in slices[2, 7]]
    assert phases == [
        ("queued", 0, 1), ("prompt", 1, 4), ("output", 5, 3), ("preempted", 8, 7), ("output", 15, 4),
    ]  # fmt: skip
    assert slices[2, 7][-1]["args"] == {"finish": "stop", "prompt tokens": 3, "cached tokens": 1, "output tokens": 2}
    steps = [each for each in slices[1, 1] if each["name"] == "step"]
    assert [(each["ts"] / 1e6, each["dur"] / 1e6) for each in steps] == [(1, 6.75), (15, 6.75)], "of those with tokens"
    assert steps[0]["args"]["prompt tokens"] == 3
    assert [each["args"] for each in counters if each["name"] == "cache blocks"] == [{"used": n} for n in (2, 0, 0)]
    assert [each["args"]["waiting"] for each in counters if each["name"] == "requests"] == [0, 1, 0]


def test_steps_of_the_plan_are_summed_by_verb_inside_their_phase(tmp_path):
    trace = Trace(tmp_path / "trace.json")
    times = [("body", "ternary", 1.0), ("body", "attend", 0.5), ("body", "ternary", 2.0), ("head", "dense", 0.25)]
    trace(stepped(10.0, plan_times=tuple(StepTime(*time) for time in times)))
    trace(stepped(20.0))
    trace.write()
    slices, _, _ = read(tmp_path / "trace.json")
    first = [(each["name"], each["ts"] / 1e6, each["dur"] / 1e6) for each in slices[1, 1]][:8]
    assert first == [
        ("step", 0, 6.75), ("schedule", 0, 0.5), ("forward", 0.5, 4), ("ternary", 0.5, 3), ("attend", 3.5, 0.5),
        ("sample", 4.5, 2), ("dense", 4.5, 0.25), ("deliver", 6.5, 0.25),
    ]  # fmt: skip
    assert trace.table() == [
        ("", "ms", "share", "phase of a step"),
        ("(rest)", "4500.0", "33.3%", "forward"),
        ("(rest)", "3750.0", "27.8%", "sample"),
        ("ternary", "3000.0", "22.2%", "forward"),
        ("(rest)", "1000.0", "7.4%", "schedule"),
        ("attend", "500.0", "3.7%", "forward"),
        ("(rest)", "500.0", "3.7%", "deliver"),
        ("dense", "250.0", "1.9%", "sample"),
    ]


def test_slices_of_a_crowd_nest(tmp_path):
    with Trace(tmp_path / "trace.json") as trace:
        crowd(trace)
    slices, _, names = read(tmp_path / "trace.json")
    assert len(slices) == len(names) - 2 == 6, "a track for the steps, and one for each request"
    for (group, _), track in slices.items():
        if group == 2:
            assert all(end(a) == b["ts"] for a, b in pairwise(track)), "phases follow each other"
            assert [each["args"].get("finish") for each in track][-1] == "length"
        around = []
        for each in track:
            while around and end(around[-1]) <= each["ts"]:
                around.pop()
            assert each["dur"] >= 0 and (not around or end(each) <= end(around[-1]))
            around.append(each)


def test_who_is_under_way_when_it_is_written_is_shown_until_then(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "monotonic", lambda: 104.0)
    trace = Trace(tmp_path / "trace.json")
    for event in LIFE[:2]:
        trace(event)
    trace.write()
    slices, _, _ = read(tmp_path / "trace.json")
    assert [(each["name"], each["dur"] / 1e6) for each in slices[2, 7]] == [("queued", 1), ("prompt", 3)]


def test_a_trace_keeps_the_newest_and_sums_all(tmp_path):
    with Trace(tmp_path / "trace.json", max_kept=3) as trace:
        for time in range(0, 1000, 10):
            trace(stepped(float(time)))
            trace(Queued(time, float(time), 1))
            trace(Finished(time, float(time), Finish("cancelled"), Usage(1, 0, 0.0, 0.0, 0.0)))
    slices, _, _ = read(tmp_path / "trace.json")
    assert sorted(slices) == [(1, 1), (2, 970), (2, 980), (2, 990)]
    assert [each["name"] for each in slices[1, 1]].count("step") == 3
    assert ("(rest)", "400000.0", "59.3%", "forward") in trace.table()
    assert not trace._open and not trace._has_token


def test_an_empty_trace_is_a_trace(tmp_path):
    with Trace(tmp_path / "trace.json") as trace:
        pass
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(trace.table()) == 1


def test_a_block_that_fails_leaves_what_it_has_or_nothing(tmp_path):
    for name, heard in (("some", [stepped(1.0)]), ("none", [])):
        with pytest.raises(RuntimeError), Trace(tmp_path / name) as trace:
            for event in heard:
                trace(event)
            raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["some"]


@pytest.mark.parametrize("name, cure", [("", "may write"), ("absent/trace.json", "make it")])
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path, name, cure):
    with pytest.raises(InvalidParams, match=cure):
        Trace(tmp_path / name)


@pytest.mark.parametrize("max_kept", [0, 1.5, "3", None, 10**30])
def test_at_least_something_is_kept(tmp_path, max_kept):
    with pytest.raises(InvalidParams, match="max_kept is"):
        Trace(tmp_path / "trace.json", max_kept=max_kept)

"""benchmarks/peers.py without the peers: which pairs of samples count, and what is said where a peer is absent."""

from __future__ import annotations

import sys
from itertools import chain, repeat
from pathlib import Path

import pytest

from bitnet_inference.bench import Workload
from bitnet_inference.errors import InvalidParams

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peers
import turns
from turns import Pair, Row, Sample, Timing, longest, rows_of, take_pairs, take_sample

QUIET, LOUD = 0.01, 0.4


def taken(ours, theirs, count=3):
    return take_pairs(iter(ours).__next__, iter(theirs).__next__, count)


def test_a_ratio_is_the_median_over_pairs_and_not_of_the_medians():
    ours = [Sample(speed, QUIET) for speed in (10, 30, 20)]
    theirs = [Sample(speed, QUIET) for speed in (5, 10, 20)]
    found = taken(ours, theirs)
    assert (found.ratio, found.tokens_s) == (2, 10)
    assert found.num_discarded == 0 and not found.is_disturbed


def test_a_pair_with_a_disturbed_sample_is_taken_again():
    ours = [Sample(10, LOUD), *repeat(Sample(20, QUIET), 4)]
    theirs = [Sample(10, QUIET), Sample(1, LOUD), *repeat(Sample(10, QUIET), 3)]
    found = taken(ours, theirs)
    assert found.ratio == 2 and found.num_discarded == 2 and not found.is_disturbed


def test_where_others_never_rest_the_least_disturbed_pairs_are_marked():
    loud = [Sample(10, LOUD + i / 100) for i in range(7)]
    found = taken(chain(loud, repeat(Sample(30, QUIET))), repeat(Sample(10, QUIET)))
    assert found.is_disturbed and found.num_discarded == 6
    assert [pair.disturbance for pair in found.pairs] == [QUIET, QUIET, LOUD]


def test_a_pair_is_as_disturbed_as_its_worse_sample():
    assert Pair(Sample(1, QUIET), Sample(1, LOUD)).disturbance == LOUD


def test_only_what_the_engines_did_not_use_is_a_disturbance(monkeypatch):
    busy = iter([100.0, 103.0])
    monkeypatch.setattr(turns, "REST_S", 0)
    monkeypatch.setattr(turns, "machine_busy_s", lambda: next(busy))
    monkeypatch.setattr(turns.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(turns.time, "perf_counter", iter([10.0, 12.0]).__next__)
    monkeypatch.setattr(turns.time, "process_time", iter([0.5, 0.6]).__next__)
    sample = take_sample(lambda: Timing(seconds=0.5, cpu_s=2.5), num_tokens=8)
    assert sample.tokens_s == 16 and sample.disturbance == pytest.approx((3 - 2.5 - 0.1) / 4)


def test_the_rows_of_a_workload():
    workload = Workload(prompts=(8,), contexts=(0, 40), batches=(4,), num_decoded=3, num_batch_steps=5)
    rows = rows_of(workload)
    assert [str(row) for row in rows] == ["prompt of 8", "decoding at 0", "decoding at 40", "batch of 4"]
    assert [row.num_tokens for row in rows] == [8, 3, 3, 20] and longest(workload) == 43


def test_a_row_is_prepared_by_what_it_needs():
    calls = []

    class Engine:
        def prompt(self, length):
            calls.append(length)

        def decode(self, *counts):
            calls.append(counts)

    for row in (Row(prompt=8), Row(context=40, num_steps=3), Row(count=4, num_steps=5)):
        row.prepare(Engine())
        row.run(Engine())
    assert calls == [8, 8, 40, (40, 2, 1), (40, 3, 1), (0, 2, 4), (0, 5, 4)]


def test_peers_that_are_not_installed_are_named(monkeypatch, capsys):
    monkeypatch.setattr(peers, "is_installed", lambda name: name == "llama.cpp")
    assert peers.choose(None) == ["llama.cpp"]
    assert 'transformers is left out, as it is not installed: pip install ".[peers]"' in capsys.readouterr().out
    with pytest.raises(InvalidParams, match="transformers, which is not installed"):
        peers.choose(["transformers"])


def test_rows_that_stayed_disturbed_are_explained():
    quiet, loud = (taken(repeat(Sample(20, share)), repeat(Sample(10, share))) for share in (QUIET, LOUD))
    row = Row(prompt=8)
    assert peers.notes([peers.Result(row, {"a": quiet})]) == ["3 pairs kept, 0 discarded because other processes ran"]
    kept, star = peers.notes([peers.Result(row, {"a": quiet, "b": loud})])
    assert kept.startswith("6 pairs kept, 6 discarded") and star.startswith("* others took 5%")

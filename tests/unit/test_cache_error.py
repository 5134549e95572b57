"""benchmarks/cache_error.py compares what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bitnet_inference.llm import LLM
from bitnet_inference.model_folder import find_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_errors_of_caches(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cache_error

    path = find_model("default")
    ids = cache_error.own_text(path, 100, threads=1)
    assert len(ids) == 100  # more than one chunk, and a part of one
    errors = cache_error.compare(path, ids, threads=1)
    assert errors["float32"].cells()[:3] == ["0.000%", "0.00%", "100.00%"]
    with LLM.load(path, cache_dtype="float32", threads=1) as llm:
        exact, scores = llm.logits(ids).astype(np.float64), llm.score(ids)
    with LLM.load(path, cache_dtype="int8", threads=1) as llm:
        int8 = llm.logits(ids).astype(np.float64)
    assert np.mean(errors["float32"].losses) == pytest.approx(-np.mean(scores[1:]), rel=1e-5)
    found = errors["int8"]
    assert found.squares == pytest.approx(np.mean((int8 - exact) ** 2, axis=1))
    assert found.num_same == (int8.argmax(axis=1) == exact.argmax(axis=1)).sum() > 80
    spread = exact - exact.mean(axis=1, keepdims=True)
    whole = 100 * np.sqrt(np.mean((int8 - exact) ** 2) / np.mean(spread**2))
    assert found.cells()[0] == f"{whole:.3f}%" and 0 < whole < 15
    assert len(cache_error.table(errors).splitlines()) == 5

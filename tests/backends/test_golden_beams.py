"""Beam search against Transformers' own on the same checkpoints (tests/golden/searches.py): texts and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from devices import has
from scripted import Listener, run

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.beam import BeamParams
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.engine import Engine
from bitnet_inference.formats import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/beams.json"))


def params(case: dict[str, Any], max_tokens: int) -> BeamParams:
    """Our words for Transformers' options."""
    options = {name: value for name, value in case.items() if name not in ("texts", "ends", "min_new_tokens")}
    options |= {"min_tokens": case.get("min_new_tokens", 0), "stop_token_ids": case["ends"], "ignore_eos": True}
    return BeamParams(num_choices=case["num_beams"], max_tokens=max_tokens, **options)


@pytest.mark.parametrize("device", ["cpu", *(["mlx"] if has("mlx") else [])])
@pytest.mark.parametrize("name", NAMES)
def test_it_finds_what_transformers_finds(name, device):
    golden = json.loads((GOLDEN / name / "beams.json").read_text())
    model = load_model(open_checkpoint(GOLDEN / name), EngineConfig(device=device, cache_dtype="float32", threads=1))
    engine = Engine(model)
    searches = []
    for case in golden["cases"]:  # all at once: they share steps and the prompt
        owners = [Listener() for _ in case["texts"]]
        searches.append(Beams(golden["prompt"], params(case, golden["max_tokens"]), owners))
        engine.submit(searches[-1].head)
    run(engine)
    assert len(searches) >= 50
    for case, beams in zip(golden["cases"], searches, strict=True):
        found = [text.token_ids + ([] if text.end_id is None else [text.end_id]) for text in beams.best]
        assert found == [token_ids for token_ids, _ in case["texts"]], case
        assert [text.score for text in beams.best] == pytest.approx(
            [score for _, score in case["texts"]], rel=1e-4, abs=1e-5
        )
    model.close()

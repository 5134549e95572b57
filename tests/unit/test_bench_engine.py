"""The engine under load: what is asked of it, what is counted, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scripted import ScriptedModel

from bitnet_inference.bare_batch import BareBatch, TimedModel
from bitnet_inference.bench_engine import Load, UnderLoad, UnderTest, measure_engine
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import InvalidParams, OutOfMemory
from bitnet_inference.model_folder import find_model
from bitnet_inference.text.tokenizer import Tokenizer

TINY = Load(streams=(1, 3), shortest=3, longest=6, num_samples=1, min_sample_s=0)


def test_streams_are_measured_beside_the_bare_model():
    result = measure_engine(find_model("default"), EngineConfig(threads=1), TINY)
    assert list(result.concurrency) == [1, 3]
    for found in result.concurrency.values():
        assert min(found.tokens_s, found.bare_tokens_s, found.of_bare) > 0 and 0 < found.overhead < 1
        assert 0 < found.first_token_s[0] <= found.first_token_s[1]
    titles, *rows = result.table()
    assert [row[0] for row in rows] == ["1 at a time", "3 at a time"] and {len(row) for row in rows} == {len(titles)}
    assert "kept" in dict(result.lines())["samples"]
    numbers = result.as_json()
    assert set(numbers["concurrency"]) == {"1", "3"} and numbers["threads"] == 1
    assert set(numbers["concurrency"]["3"]) == {
        "tokens_s", "bare_tokens_s", "of_bare", "overhead",
        "first_token_p50_ms", "first_token_p95_ms", "gap_p50_ms", "gap_p95_ms",
    }  # fmt: skip


def test_lengths_are_cut_to_a_short_context_and_that_is_told(tmp_path):
    folder = tmp_path / "short"
    shutil.copytree(find_model("default"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 9}))
    result = measure_engine(folder, EngineConfig(threads=1), Load(streams=(1,), num_samples=1, min_sample_s=0))
    assert dict(result.lines())["requests"] == "4 to 4 tokens of prompt, as many of answer, cut to fit into the context"
    assert (result.as_json()["shortest"], result.as_json()["longest"]) == (4, 4)
    assert Load().fitting(200) == Load(longest=100) and Load().fitting(256) == Load()


def test_milliseconds_and_percent_are_shown():
    found = UnderLoad(
        tokens_s=90, bare_tokens_s=100, of_bare=0.9, overhead=0.05, first_token_s=(0.5, 1), gap_s=(0.01, 0.02)
    )
    assert found.cells == ("90.0", "100.0", "90%", "500.0", "1000.0", "10.0", "20.0", "5.0%")
    assert found.as_json()["gap_p95_ms"] == 20


@pytest.fixture
def tokenizer():
    return Tokenizer.from_folder(find_model("default"))


def test_all_streams_get_as_many_tokens(tokenizer):
    model = ScriptedModel(vocab_size=200, num_blocks=60)
    with UnderTest(model, tokenizer, Load(streams=(3,), shortest=3, longest=6, num_pairs=2)) as under_test:
        run = under_test.run(3)
    assert len(run.first_s) == 3 * 4 and len(run.first_s) + len(run.gaps_s) == 3 * 2 * (3 + 6)
    assert 0 < run.model_s < run.seconds and run.tokens_s == pytest.approx(54 / run.seconds)


def test_the_error_of_a_request_is_raised(tokenizer):
    model = ScriptedModel(vocab_size=200, num_blocks=60)
    model.change_logits = lambda history, logits: logits.fill(np.nan)
    with UnderTest(model, tokenizer, TINY) as under_test, pytest.raises(Exception, match="NaN"):
        under_test.run(1)


def test_a_bare_batch_computes_what_an_engine_does_in_blocks_of_its_own():
    """The scripted model checks slots, positions and tables, and that the cache holds each sequence's own tokens."""
    seen = []
    model = ScriptedModel(num_blocks=20, max_tokens=12)
    timed = TimedModel(model, num_more=15)
    timed.reserve(5)
    model.before_forward = lambda batch: seen.append((batch.token_ids.tolist(), int(batch.block_tables.min())))
    prompts = np.arange(15, dtype=np.int32).reshape(3, 5)
    BareBatch(timed, first_block=5, num_blocks=15).run(prompts, 4)
    assert [len(tokens) for tokens, _ in seen] == [10, 5, 3, 3, 3] and min(first for _, first in seen) == 5
    assert timed.num_forwards == 5 and timed.seconds > 0
    history = list(range(5))
    for tokens, _ in seen[2:]:
        history.append(int(np.argmax(model.logits_after(history))))
        assert tokens[0] == history[-1]


@pytest.mark.parametrize(
    "wrong",
    [{"streams": ()}, {"streams": (0,)}, {"streams": (2, 2)}, {"streams": (5000,)}, {"shortest": 9, "longest": 8},
     {"shortest": 0}, {"num_pairs": 0}, {"num_samples": 0}],
)  # fmt: skip
def test_an_impossible_load(wrong):
    with pytest.raises(InvalidParams):
        Load(**wrong)


def test_a_load_that_does_not_fit_the_model(tokenizer):
    with pytest.raises(InvalidParams, match="nothing fits: the context has 1 tokens"):
        Load().fitting(1)
    with pytest.raises(InvalidParams, match="at most 8"):
        UnderTest(ScriptedModel(), tokenizer, Load(streams=(9,)))
    with pytest.raises(OutOfMemory, match="3 streams twice"):
        UnderTest(ScriptedModel(num_blocks=17), tokenizer, TINY)

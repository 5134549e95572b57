from pathlib import Path

import pytest
from scripted import ScriptedModel

from bitnet_inference.backends import load_model
from bitnet_inference.bench import Runner, Workload, measure, num_multiply_adds
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import InvalidParams, NotFound
from bitnet_inference.formats import open_checkpoint

TINY = Path(__file__).parents[1] / "golden" / "bitnet-packed"
QUICK = Workload(
    prompts=(8, 16, 100_000),
    contexts=(0, 4, 100_000),
    batches=(1, 3, 100_000),
    num_decoded=4,
    num_batch_steps=2,
    num_samples=1,
    min_sample_s=0,
)


def test_everything_that_fits_is_measured_beside_a_limit():
    seen = []
    result = measure(TINY, EngineConfig(threads=1), QUICK, lambda done, total: seen.append((done, total)))
    assert (list(result.prompt), list(result.decode), list(result.batch)) == ([8, 16], [0, 4], [1, 3])
    for speed in (*result.prompt.values(), *result.decode.values(), *result.batch.values()):
        assert min(speed.tokens_s, speed.limit, speed.of_limit) > 0 and speed.limited_by in ("memory", "arithmetic")
    assert result.config.threads == 1 and result.config.device == "cpu"
    assert result.load_s > 0 and result.peak_bytes > 10 << 20
    assert seen[-1][0] == seen[-1][1] > 0
    titles, *rows = result.table()
    assert [row[0] for row in rows] == [
        "prompt of 8", "prompt of 16", "decoding at 0", "decoding at 4", "batch of 1", "batch of 3",
    ]  # fmt: skip
    assert {len(row) for row in rows} == {len(titles)}
    assert "kept" in dict(result.lines())["samples"]


def test_the_shape_of_the_json():
    result = measure(TINY, EngineConfig(threads=1), QUICK).as_json()
    assert set(result["prompt"]) == {"8", "16"} and set(result["decode"]) == {"0", "4"}
    assert result["batch"]["3"] > 0 and result["load_s"] > 0 and result["peak_rss_mb"] > 10
    assert set(result["limits"]) == {"bandwidth_gb_s", "int8_gmac_s"} and min(result["limits"].values()) > 0


def test_decoding_lets_a_device_look_ahead_but_behind_the_last_step():
    model, seen = ScriptedModel(looks_ahead=True), []
    model.before_forward = seen.append
    runner = Runner(model, Workload(prompts=(8,), contexts=(0,), batches=(3,), num_decoded=9, num_batch_steps=9))
    for count in (1, 3):
        runner.decode(0, 9, count)
        assert [batch.has_next for batch in seen] == [True] * 8 + [False]
        assert all(int(batch.positions[0]) + 1 < batch.block_tables.shape[1] * 4 for batch in seen[:-1])
        seen.clear()


def test_the_reference_has_no_limits():
    few = Workload(prompts=(4,), contexts=(), batches=(), num_samples=1, min_sample_s=0)
    result = measure(TINY, EngineConfig(device="reference"), few)
    assert result.prompt[4].tokens_s > 0 and result.table()[1][2:] == ("", "", "")
    assert result.bandwidth == result.int8_peak == 0 and "limits" not in dict(result.lines())


def test_what_a_step_reads_and_computes():
    checkpoint = open_checkpoint(TINY)
    config = checkpoint.config
    model = load_model(checkpoint, EngineConfig(threads=1, ternary_format="u2"))
    every, last = num_multiply_adds(config)
    head = config.vocab_size * config.hidden_size
    body = every + last - head
    queries = config.num_heads * config.head_dim
    assert last == head + config.hidden_size * (queries + 3 * config.intermediate_size)
    weights = model.bytes_read([])
    assert body / 4 + 2 * head <= weights < 1.5 * body / 4 + 2 * head  # the rest is padding to 32 rows
    a_token = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert model.bytes_read([0, 9]) - weights == 11 * a_token
    model.close()


def test_what_cannot_be_measured():
    with pytest.raises(InvalidParams, match="nothing fits"):
        measure(TINY, workload=Workload(prompts=(100_000,), contexts=(100_000,)))
    for wrong in ({"num_samples": 0}, {"prompts": (0,)}, {"contexts": (-1,)}):
        with pytest.raises(InvalidParams, match="at least"):
            Workload(**wrong)
    with pytest.raises(NotFound):
        measure(TINY / "absent")

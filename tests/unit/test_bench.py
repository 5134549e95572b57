from pathlib import Path

import pytest

from bitnet_inference.bench import measure
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import InvalidParams, NotFound

TINY = Path(__file__).parents[1] / "golden" / "bitnet-packed"


def test_everything_is_measured():
    seen = []
    result = measure(
        TINY,
        EngineConfig(threads=1),
        prompt_lengths=(16, 8, 100_000),
        num_decoded=4,
        num_repeats=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [length for length, _ in result.prompt_speeds] == [8, 16]
    assert min(result.load_s, result.decode_speed, *(speed for _, speed in result.prompt_speeds)) > 0
    assert result.threads == 1 and result.device == "cpu" and result.peak_bytes > 10 << 20
    assert seen[-1][0] == seen[-1][1] > 0
    assert [name for name, _ in result.lines()][-2:] == ["generation", "peak memory"]


def test_what_cannot_be_measured():
    with pytest.raises(InvalidParams, match="no prompt fits"):
        measure(TINY, prompt_lengths=(100_000,))
    with pytest.raises(InvalidParams, match="at least 1"):
        measure(TINY, num_repeats=0)
    with pytest.raises(NotFound):
        measure(TINY / "absent")

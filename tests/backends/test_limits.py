"""The machine's limits can be measured on every path; how fast it is is not for a test to say."""

from __future__ import annotations

import pytest

from bitnet_inference import native


@pytest.mark.parametrize("threads", [1, 2, 3, 64])  # with 64 most have no processor while it is measured
def test_reading_has_a_speed(threads: int) -> None:
    limits = native.Limits(1 << 20, threads)
    assert limits.read_bandwidth() > 0
    assert limits.read_bandwidth() > 0


@pytest.mark.parametrize("isa", native.isas())
def test_every_path_has_a_peak(isa: str) -> None:
    assert native.Limits(1, 2).int8_peak(isa) > 0


def test_what_cannot_be_measured_is_refused() -> None:
    for num_bytes, threads in ((0, 1), (1, 0), (1, 1025)):
        with pytest.raises(ValueError, match="at least 1 byte"):
            native.Limits(num_bytes, threads)
    with pytest.raises(ValueError, match="instruction set"):
        native.Limits(1, 1).int8_peak("z80")

"""How amounts are told to people."""

import pytest

from bitnet_inference.amounts import told_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1500, "1.5 kB"), (2e6, "2.0 MB"), (1.239e9, "1.24 GB")],
)
def test_every_size_can_be_read(num_bytes, text):
    assert told_bytes(num_bytes) == text

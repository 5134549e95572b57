"""Dense matrices of several dtypes that one product computes: each by its values, which float32 holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from devices import has
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.backends import load_model
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import ChangedCheckpoint, Dense, Ternary
from bitnet_inference.formats.floats import FloatName, to_bfloat16, to_float32
from bitnet_inference.model.contract import Batch

GOLDEN = Path(__file__).parents[1] / "golden"
NUM_TOKENS = 40
DTYPES: dict[str, FloatName] = {"q": "float16", "k": "bfloat16", "gate": "bfloat16", "down": "float16"}
Floats = NDArray[np.float32]


class Mixed(ChangedCheckpoint):
    """A dense golden checkpoint, some of whose matrices are in 16 bits; or the same values, all in float32."""

    def __init__(self, as_they_are: bool) -> None:
        super().__init__(open_checkpoint(GOLDEN / "llama-f32"))
        self._as_they_are = as_they_are

    def dtype(self, name: str) -> FloatName:
        return DTYPES.get(name.rpartition(".")[2], "float32") if self._as_they_are else "float32"

    def matrix(self, name: str) -> Dense | Ternary:
        matrix = self.original.matrix(name)
        assert isinstance(matrix, Dense) and matrix.dtype == "float32"
        dtype = DTYPES.get(name.rpartition(".")[2], "float32")
        data = to_bfloat16(matrix.data) if dtype == "bfloat16" else matrix.data.astype(dtype)
        return Dense(data, dtype) if self._as_they_are else Dense(to_float32(data, dtype), "float32")


def logits(as_they_are: bool, **options: object) -> Floats:
    model = load_model(Mixed(as_they_are), EngineConfig(threads=2, **options))
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, NUM_TOKENS, np.int32)
    positions, size = np.arange(NUM_TOKENS, dtype=np.int32), model.capabilities.block_size
    table = np.arange(-(-NUM_TOKENS // size), dtype=np.int32)[None]
    model.reserve(table.size)
    found = model.forward(Batch(ids, positions, positions, np.array([0, NUM_TOKENS], np.int32), table))
    return found.full(range(NUM_TOKENS))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("isa", native.isas())
def test_mixed_dtypes_give_the_bits_of_their_values_in_float32(isa: str, quantize: str) -> None:
    expected = logits(False, isa="generic", quantize=quantize)
    assert logits(True, isa=isa, quantize=quantize).tobytes() == expected.tobytes()


@pytest.mark.parametrize("device", ["reference", *(["mlx"] if has("mlx") else [])])
def test_other_devices_agree(device: str) -> None:
    found, expected = logits(True, device=device, cache_dtype="float32"), logits(False, cache_dtype="float32")
    assert np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()) < 1e-4


@pytest.mark.parametrize("as_they_are", [True, False])
def test_memory_is_known_before(as_they_are: bool) -> None:
    config = EngineConfig(device="cpu", threads=1).resolve()
    taken = load_model(Mixed(as_they_are), config).num_bytes
    assert taken <= estimate_bytes(Mixed(as_they_are), config, 0) <= taken * 1.02

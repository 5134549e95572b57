"""What the system refuses, memory or threads, is one of our errors."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest

from bitnet_inference import native
from bitnet_inference.backends import load_model
from bitnet_inference.backends.cpu import CpuModel
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import OutOfMemory, Unavailable
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch
from bitnet_inference.model_folder import find_model


class Refusing:
    """Raises the same error, whatever is asked of it."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def _refuse(self, *arguments: Any) -> NoReturn:
        raise self._error

    reserve = run = __call__ = _refuse


def load() -> CpuModel:
    model = load_model(open_checkpoint(find_model("default")), EngineConfig(threads=2))
    assert isinstance(model, CpuModel)
    return model


def test_no_memory_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "TernaryWeight", Refusing(MemoryError))
    with pytest.raises(OutOfMemory, match=r"default_model: memory ran out while loading 6 million parameters: free"):
        load()


def test_no_memory_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    monkeypatch.setattr(model, "_cache", Refusing(MemoryError))
    monkeypatch.setattr(native, "promised_bytes", lambda but: 0)  # takes caches of its own only
    with pytest.raises(OutOfMemory, match="cache of 3 blocks"):
        model.reserve(3)


def test_no_memory_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load()
    model.reserve(1)
    monkeypatch.setattr(model, "_executor", Refusing(MemoryError))
    at = np.zeros(1, np.int32)
    with pytest.raises(OutOfMemory, match="a step of 1 tokens finds no memory"):
        model.forward(Batch(at, at, at, np.array([0, 1], np.int32), np.zeros((1, 1), np.int32)))


def test_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "Executor", Refusing(RuntimeError))
    with pytest.raises(Unavailable, match="does not give this process 2 threads: lower `threads`"):
        load()

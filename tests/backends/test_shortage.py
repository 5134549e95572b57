"""What the system refuses, memory or threads, is one of our errors."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import numpy as np
import pytest

from bitnet_inference import LLM, Grammar, SamplingParams, convert, native
from bitnet_inference.backends import load_model
from bitnet_inference.backends.cpu import CpuModel
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import EngineError, OutOfMemory, Unavailable
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch
from bitnet_inference.model_folder import find_model
from bitnet_inference.server.failures import failure_of
from bitnet_inference.text.tokenizer import Tokenizer


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


def allow(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """As a system does whose limit of processes leaves so many."""
    left, start = [None] * num_threads, threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_weights_are_packed_by_as_many_threads_as_there_are(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    expected = load().num_bytes
    allow(monkeypatch, num_threads)
    assert load().num_bytes == expected


def test_compressed_files_are_read_without_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    path = convert("default", tmp_path / "model.safetensors", compressed=True).path
    with monkeypatch.context() as limits:
        allow(limits, 0)
        model = load_model(open_checkpoint(path), EngineConfig(threads=2))
    assert model.num_bytes == load().num_bytes


def test_no_thread_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 0)
    with pytest.raises(EngineError, match=r"gives this process no more threads: lower `threads`, or .*ulimit -u"):
        LLM.load(threads=1)


def test_forms_are_kept_to_without_a_thread_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(grammar=Grammar(regex="(fox|owl){1,5}"), seed=1, max_tokens=12)
    with LLM.load() as llm, LLM.load() as short:
        expected = llm.generate("The", params)
        allow(monkeypatch, 0)
        assert [short.generate("The", params).text for _ in range(2)] == [expected.text] * 2


def test_no_threads_for_the_library_that_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_folder(find_model("default"))

    class Library:
        def encode_batch_fast(self, *_: Any, **__: Any) -> NoReturn:  # what a panic of it says
            raise RuntimeError(
                "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError }"
            )

    monkeypatch.setattr(tokenizer, "_rust", Library())
    with pytest.raises(EngineError, match="the tokenizers library its threads: raise the limit"):
        tokenizer.encode("long " * 10_000)


def test_a_server_without_threads_is_to_be_asked_again() -> None:
    failure = failure_of(RuntimeError("can't start new thread"))
    assert failure.status == 503 and "ulimit -u" in failure.message
    assert failure_of(RuntimeError("another")).status == 500

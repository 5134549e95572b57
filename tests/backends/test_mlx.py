"""The MLX backend on MLX's processor: steps of every kind, whole models, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from scripted import Listener, run

from bitnet_inference import LLM, SamplingParams
from bitnet_inference.backends import load_model
from bitnet_inference.backends.mlx import MlxModel
from bitnet_inference.backends.mlx_batch import decoding
from bitnet_inference.backends.mlx_cache import MlxCache
from bitnet_inference.backends.reference import ReferenceModel
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.request import Request
from bitnet_inference.errors import InvalidParams, KernelError, OutOfMemory, Stopped, Unavailable
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model
from bitnet_inference.model_folder import find_model

GOLDEN = Path(__file__).parents[1] / "golden"
ALWAYS = 3e-2  # where a rounding to int8 falls the other way
Floats = NDArray[np.float32]


class Talk:
    """Sequences that advance by turns on one model, in blocks that lie in no order."""

    def __init__(self, model: Model, num_sequences: int = 3, num_blocks: int = 4) -> None:
        self.model, vocab, size = model, model.config.vocab_size, num_blocks * model.capabilities.block_size
        rng = np.random.default_rng(5)
        self.ids = rng.integers(0, vocab, (num_sequences, size), np.int32)
        self.tables = rng.permutation(num_sequences * num_blocks).reshape(num_sequences, -1).astype(np.int32)
        self.done = [0] * num_sequences
        model.reserve(num_sequences * num_blocks)

    def step(self, *counts: int) -> Floats:
        """So many tokens of each sequence: their logits."""
        size = self.model.capabilities.block_size
        parts = [np.arange(done, done + count, dtype=np.int32) for done, count in zip(self.done, counts, strict=True)]
        slots = [table[at // size] * size + at % size for table, at in zip(self.tables, parts, strict=True)]
        ids = np.concatenate([row[at] for row, at in zip(self.ids, parts, strict=True)])
        starts = np.cumsum([0, *counts], dtype=np.int32)
        batch = Batch(ids, np.concatenate(parts), np.concatenate(slots), starts, self.tables)
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]
        output = self.model.forward(batch)
        for array in (batch.token_ids, batch.slots, batch.positions):
            array[:] = -1  # the engine writes the next batch into the same arrays
        return output.full(range(len(ids)))


def load(path: Path, device: str, **options: Any) -> Model:
    """MLX rounds what the cache holds, but not what that is multiplied by: the reference beside it does as much."""
    model = load_model(open_checkpoint(path), EngineConfig(device=device, **options))
    if isinstance(model, ReferenceModel):
        model.attention_dtype = "float32"
    return model


STEPS = [(5, 1, 19), (1, 1, 1), (1, 1, 1), (7, 7, 3), (1, 0, 2), (1, 1, 1), (14, 20, 1), (1, 1, 1)]


def talk(name: str, device: str, **options: Any) -> list[Floats]:
    model = load(GOLDEN / name, device, threads=1, **options)
    talking = Talk(model)
    found = [talking.step(*counts) for counts in STEPS]
    model.close()
    return found


def distance(found: Floats, expected: Floats) -> float:
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize("name", ["llama-f32", "llama-f16", "gemma3-bf16", "qwen2-bf16", "qwen3-bf16"])
def test_steps_of_all_kinds_are_those_of_the_reference(name: str) -> None:
    found, expected = (talk(name, device, cache_dtype="float32") for device in ("mlx", "reference"))
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < 1e-5


@pytest.mark.parametrize("options", [{"cache_dtype": "int8"}, {"cache_dtype": "bfloat16"}, {"quantize": "int8"}])
@pytest.mark.parametrize("name", ["gemma3-bf16", "llama3-bf16"])
def test_what_rounds_rounds_as_the_reference_does(name: str, options: dict[str, str]) -> None:
    found, expected = (np.concatenate(talk(name, device, **options)) for device in ("mlx", "reference"))
    exact = np.concatenate(talk(name, "reference", cache_dtype="float32"))
    assert distance(found, expected) < min(ALWAYS, distance(expected, exact) / 2)


def test_steps_that_were_compiled_are_the_others() -> None:
    """MLX calls the C++ compiler where there is one, and keeps what it makes in the folder for temporary files."""
    name, found = "bitnet-packed", []
    for compiled in (False, True):
        config = EngineConfig(device="mlx", cache_dtype="float32").resolve()
        talking = Talk(MlxModel(open_checkpoint(GOLDEN / name), config, lambda done, total: None, compiled))
        found.append(np.concatenate([talking.step(*counts) for counts in STEPS[:3]]))
    assert distance(*found) < ALWAYS


def test_shapes_of_decoding_repeat() -> None:
    """So that few steps are compiled, however many requests come and go and however long they get."""
    cache = MlxCache("bfloat16", 1, 1, 16)
    shapes = set()
    for count in range(1, 257):
        for position in range(0, 4096, 37):
            at = np.full(count, position, np.int32)
            batch = Batch(at, at, at, np.arange(count + 1, dtype=np.int32), np.zeros((count, 300), np.int32))
            if arrays := decoding(batch, cache):
                shapes.add(arrays[3].shape)
    assert len(shapes) < 50


def test_nobody_reads_what_is_not_theirs() -> None:
    """Slots that no token of a sequence stands in may hold anything."""
    found = []
    for fill in (0.0, np.nan):
        model: Any = load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx"))
        talking = Talk(model)
        for (array,) in model._cache.layers:
            array[:-1] = fill  # the last is the one that is zero
        found.append(np.concatenate([talking.step(*counts) for counts in STEPS]))
    assert np.array_equal(*found)


def test_copies_are_made_in_order() -> None:
    found = []
    for device in ("mlx", "reference"):
        model = load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device=device, cache_dtype="float32"))
        talking = Talk(model)
        talking.step(20, 33, 5)
        a, b, c = talking.tables[:, 0].tolist()
        model.copy_blocks([(a, b), (b, c), (int(talking.tables[1, 1]), a)])
        found.append(talking.step(1, 3, 1))
    assert distance(*found) < 1e-5


def test_the_cache_is_written_in_place() -> None:
    model = load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx", cache_dtype="float32"))
    talking = Talk(model)
    model.reserve((16 << 20) // model.capabilities.block_bytes)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for counts in STEPS:
        talking.step(*counts)
    model.copy_blocks([(0, 1)])
    assert mx.get_peak_memory() - before < 2 << 20  # a layer of the cache takes 8 MB
    model.close()
    assert mx.get_active_memory() < before - (16 << 20)


class Refusing:
    """Does what it stands for so many times, then raises this error."""

    def __init__(self, does: Any, times: int, error: Exception) -> None:
        self._does, self._left, self._error = does, times, error

    def __call__(self, *arguments: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise self._error
        self._does(*arguments)


@pytest.mark.parametrize("times", [0, 1], ids=["writing", "computing"])
@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (RuntimeError("[malloc] Unable to allocate 7 bytes."), OutOfMemory),
        (MemoryError(), OutOfMemory),
        (RuntimeError("[metal] Caused\nGPU Timeout Error"), KernelError),
    ],
)
def test_a_step_that_fails_leaves_the_cache_as_it_was(
    error: Exception, ours: type[Exception], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for fails in (False, True):
        talking = Talk(load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx")))
        talking.step(9, 3, 20)
        if fails:
            with monkeypatch.context() as patch, pytest.raises(ours, match=r"^a step of 3 tokens [ -~]*$"):
                patch.setattr(mx, "async_eval", Refusing(mx.async_eval, times, error))
                talking.step(1, 1, 1)
            talking.done = [9, 3, 20]
        found.append(talking.step(1, 1, 1))
    assert np.array_equal(*found)


# models


def test_the_default_model_is_that_of_the_reference() -> None:
    """A prompt at once, then token by token; the likeliest token is the same where it leads by more than the error."""
    ids = np.random.default_rng(3).integers(3, 3000, 40).astype(np.int32)
    logits: dict[str, Floats] = {}
    for device in ("reference", "mlx"):
        model = load(find_model("default"), device, threads=2)
        talking = Talk(model, 1)
        talking.ids[0, :40] = ids
        logits[device] = np.concatenate([talking.step(count) for count in (30, *[1] * 10)])
        model.close()
    found, expected = logits["mlx"], logits["reference"]
    error = np.abs(found - expected).max(axis=1)
    second, first = np.sort(expected, axis=1)[:, -2:].T
    clear = first - second > 2 * error
    assert distance(found, expected) < ALWAYS
    assert clear.sum() > 30
    assert np.array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


def texts(device: str, together: bool) -> list[list[int]]:
    model = load(GOLDEN / "llama-f32", device, max_batch_tokens=32)
    engine, listeners = Engine(model), [Listener() for _ in range(5)]
    for length, listener in zip((3, 40, 17, 1, 25), listeners, strict=True):
        prompt = np.random.default_rng(length).integers(0, 384, length).tolist()
        engine.submit(Request(prompt, SamplingParams(max_tokens=20, temperature=0), listener))
        if not together:
            run(engine)
    run(engine)
    model.close()
    return [listener.token_ids for listener in listeners]


def test_the_engine_gives_the_same_texts_as_on_the_reference() -> None:
    assert texts("mlx", True) == texts("mlx", False) == texts("reference", True)


def test_a_text_of_the_default_model() -> None:
    """In the thread of an LLM, with another size of cache than the one that was loaded in."""
    params, found = SamplingParams(max_tokens=8, temperature=0), []
    for device in ("reference", "mlx"):
        with LLM.load(device=device, max_cache_tokens=512) as llm:
            found.append(llm.generate("Once upon a time", params).text)
    assert found[0] == found[1]


# what is said


@pytest.fixture
def without_mlx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in sys.modules if name.startswith("bitnet_inference.backends.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    yield


@pytest.mark.usefixtures("without_mlx")
def test_without_mlx_it_says_what_to_install() -> None:
    with pytest.raises(Unavailable, match=r"'mlx' is not available: .*: pip install \"bitnet-inference\[mlx\]\"$"):
        load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx"))


@pytest.mark.parametrize("head", ["int8", "int6"])
def test_a_rounded_head_is_refused(head: str) -> None:
    with pytest.raises(InvalidParams, match=f'head is "{head}", but device "mlx" rounds no head: choose "exact"'):
        load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx", head=head))


def test_too_large_a_cache_is_refused() -> None:
    model = load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx"))
    with pytest.raises(OutOfMemory, match=r"a cache of 1073741824 blocks .* lower the context"):
        model.reserve(1 << 30)


def test_a_closed_model_says_so() -> None:
    model = load_model(open_checkpoint(GOLDEN / "llama-f32"), EngineConfig(device="mlx"))
    talking = Talk(model)
    talking.step(1, 1, 1)
    model.close()
    for call in (lambda: talking.step(1, 1, 1), lambda: model.reserve(1), lambda: model.copy_blocks([(0, 1)])):
        with pytest.raises(Stopped, match="closed"):
            call()


@pytest.mark.parametrize("name", ["bitnet-packed", "gemma3-bf16"])
def test_memory_is_what_was_estimated(name: str) -> None:
    config = EngineConfig(device="mlx").resolve()
    checkpoint = open_checkpoint(GOLDEN / name)
    seen: list[tuple[int, int]] = []
    model = load_model(checkpoint, config, lambda done, total: seen.append((done, total)))
    model.reserve(8)
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    estimate = estimate_bytes(checkpoint, config, 8 * model.capabilities.block_size)
    assert estimate == pytest.approx(model.num_bytes, rel=0.2)


@pytest.mark.parametrize("bits, group_size, dtype", [(2, 64, mx.bfloat16), (4, 64, mx.float16), (6, 32, mx.float32)])
def test_what_mlx_has_quantised_is_read_as_it_reads_it(tmp_path, bits, group_size, dtype):
    """A folder as mlx_lm writes it, of the golden Llama."""
    source = GOLDEN / "llama-f32"
    arrays, values = {}, {}
    for file in sorted(source.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():
            values[name] = arrays[name] = array
            if array.ndim == 2 and array.shape[1] % group_size == 0:
                words, scales, biases = mx.quantize(array.astype(dtype), group_size, bits)
                module = name.removesuffix(".weight")
                arrays |= {name: words, f"{module}.scales": scales, f"{module}.biases": biases}
                exact = scales.astype(mx.float32), biases.astype(mx.float32)
                values[name] = mx.dequantize(words, *exact, group_size, bits)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays, {"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    said = {"quantization": {"group_size": group_size, "bits": bits, "mode": "affine"}}
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.check() == []
    for name, module in (("embed", "model.embed_tokens"), ("layers.1.up", "model.layers.1.mlp.up_proj")):
        assert np.array_equal(checkpoint.matrix(name).data, np.array(values[f"{module}.weight"]))

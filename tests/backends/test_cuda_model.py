"""Whole models on the CUDA backend, its kernels interpreted on the processor, beside the reference and Transformers."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from subprocess import CalledProcessError

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.compiler.errors import CompilationError  # noqa: E402
from triton.errors import TritonError  # noqa: E402
from triton.runtime.errors import PTXASError  # noqa: E402

from bitnet_inference import LLM, SamplingParams  # noqa: E402
from bitnet_inference.backends import load_model  # noqa: E402
from bitnet_inference.backends.cuda_attention import scratch_bytes  # noqa: E402
from bitnet_inference.backends.cuda_device import Gpu, start_triton  # noqa: E402
from bitnet_inference.backends.cuda_steps import MIN_STREAK  # noqa: E402
from bitnet_inference.backends.sizes import estimate_bytes  # noqa: E402
from bitnet_inference.config import EngineConfig  # noqa: E402
from bitnet_inference.errors import BackendError, InvalidParams, KernelError, OutOfMemory, Stopped, Unavailable  # noqa: E402
from bitnet_inference.formats import open_checkpoint  # noqa: E402
from bitnet_inference.model.contract import Batch, Model, Output  # noqa: E402
from bitnet_inference.model_folder import find_model, load_tokenizer  # noqa: E402

GOLDEN = Path(__file__).parent.parent / "golden"
# Other writings of a model that is among the others: what they turn into is the same.
TWICE = ("bitnet-masters", "bitnet-unpacked", "llama-autobitlinear", "llama-masters-f32", "llama-rms-norm")
NAMES = sorted({path.parent.name for path in GOLDEN.glob("*/golden.npz")}.difference(TWICE))
# The golden seeds keep every int8 code away from a tie, so that only rounding is left, of factors of dense products and
# of attention to 16 bits. 3% holds where codes flip too.
NO_FLIP, ALWAYS = 1e-3, 3e-2
NUM_BLOCKS = 12
FEW = 12  # tokens: the interpreter is slow


def load(name: str, device: str = "cuda", **options) -> Model:
    """A golden model with some cache."""
    config = EngineConfig(device=device, threads=1, **options)
    model = load_model(open_checkpoint(GOLDEN / name), config)
    model.reserve(NUM_BLOCKS)
    return model


def golden(name: str, array: str) -> np.ndarray:
    return np.load(GOLDEN / name / "golden.npz")[array]


class Sequence:
    """Tokens that a model gets piece by piece, in blocks of their own."""

    def __init__(self, token_ids: np.ndarray, blocks: list[int]) -> None:
        self.token_ids, self.blocks, self.num_computed = token_ids, np.array(blocks, np.int32), 0

    def take(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.arange(self.num_computed, self.num_computed + count, dtype=np.int32)
        self.num_computed += count
        return self.token_ids[at].astype(np.int32), at, self.blocks[at // 16] * 16 + at % 16


def forward(model: Model, pieces: list[tuple[Sequence, int]]) -> Output:
    """One forward of the next tokens of each sequence."""
    arrays = [sequence.take(count) for sequence, count in pieces]
    starts = np.cumsum([0, *(count for _, count in pieces)], dtype=np.int32)
    tables = np.zeros((len(pieces), max(len(sequence.blocks) for sequence, _ in pieces)), np.int32)
    for row, (sequence, _) in zip(tables, pieces, strict=True):
        row[: len(sequence.blocks)] = sequence.blocks
    token_ids, positions, slots = map(np.concatenate, zip(*arrays, strict=True))
    return model.forward(Batch(token_ids, positions, slots, starts, tables))


def relative_rms(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))


def assert_like(found: np.ndarray, expected: np.ndarray, bound: float = ALWAYS) -> None:
    """Close, and the same token is the best wherever it leads by more than the error."""
    assert relative_rms(found, expected) < bound
    best = np.sort(expected, axis=1)
    clear = best[:, -1] - best[:, -2] > 2 * np.abs(found - expected).max()
    assert np.array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_hidden_states(name):
    model = load(name, cache_dtype="float32")
    output = forward(model, [(Sequence(golden(name, "token_ids"), [3]), FEW)])
    assert_like(output.full(range(FEW)), golden(name, "logits")[:FEW], NO_FLIP)
    assert relative_rms(output.hidden(range(FEW)), golden(name, "hidden")[-1][:FEW]) < NO_FLIP
    model.close()


@pytest.mark.parametrize(
    ("name", "cache_dtype"), [("llama3-bf16", "bfloat16"), ("bitnet-packed", "int8"), ("gemma3-bf16", "float32")]
)
def test_prompts_in_pieces_and_decoding_among_other_sequences(name, cache_dtype):
    """Both backends take the same steps: pieces of prompts, single tokens, and both at once."""
    ids = golden(name, "token_ids")
    steps = [[(0, 9), (1, 3)], [(0, 1), (1, 1)], [(1, 13)], [(2, 2), (0, 1)], [(1, 1), (2, 1), (0, 1)]]
    found, expected = [], []
    for device, logits in (("cuda", found), ("reference", expected)):
        model = load(name, device, cache_dtype=cache_dtype)
        sequences = [Sequence(ids[::-1], [5, 0]), Sequence(ids, [2, 7]), Sequence(ids[5:], [11, 4])]
        for step in steps:
            output = forward(model, [(sequences[which], count) for which, count in step])
            ends = np.cumsum([count for _, count in step]) - 1
            logits.append(output.full(ends))
            best, scores = output.top(ends.tolist(), 1)
            assert np.array_equal(best[:, 0], logits[-1].argmax(axis=1))
            assert np.allclose(scores[:, 0], logits[-1].max(axis=1), rtol=1e-4)
        model.close()
    assert_like(np.concatenate(found), np.concatenate(expected))


def test_rows_that_are_asked_for_in_any_order():
    name = "bitnet-packed"
    model = load(name)
    output = forward(model, [(Sequence(golden(name, "token_ids"), [0]), FEW)])
    everything = output.full(range(FEW))
    for rows in ([7], [3, 4, 5], [9, 2, 2, 11], []):
        assert np.allclose(output.full(rows), everything[rows], rtol=1e-4, atol=1e-4)
        assert len(output.hidden(rows)) == len(rows)
    for k in (1, 3, 70):
        best, scores = output.top([4, 10], k)
        expected = np.argsort(-everything[[4, 10]], axis=1, kind="stable")[:, :k]
        assert np.array_equal(best, expected) and best.dtype == np.int32
        assert np.allclose(scores, np.take_along_axis(everything[[4, 10]], expected, axis=1), rtol=1e-4)
    model.close()


def test_more_rows_than_the_head_takes_at_a_time(monkeypatch):
    name = "bitnet-packed"
    monkeypatch.setattr("bitnet_inference.backends.cuda_head.HEAD_ROWS", 5)
    model = load(name, cache_dtype="float32")
    output = forward(model, [(Sequence(golden(name, "token_ids"), [0]), FEW)])
    assert_like(output.full(range(FEW)), golden(name, "logits")[:FEW], NO_FLIP)
    assert np.array_equal(output.top(range(FEW), 1)[0][:, 0], golden(name, "logits")[:FEW].argmax(axis=1))
    model.close()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bitnet-packed", {"head": "int8"}),
        ("llama3-bf16", {"head": "int8"}),
        ("llama3-bf16", {"quantize": "int8"}),
        ("llama-f32", {"quantize": "int8", "head": "int8"}),
        ("llama-partial", {"quantize": "int8"}),
    ],
)
def test_rounded_matrices(name, options):
    """A rounded head is the CPU backend's to compare with: the reference has none."""
    logits = []
    for device in ("cuda", "cpu"):
        model = load(name, device, cache_dtype="float32", **options)
        logits.append(forward(model, [(Sequence(golden(name, "token_ids"), [0]), FEW)]).full(range(FEW)))
        model.close()
    assert_like(*logits)
    assert relative_rms(logits[0], golden(name, "logits")[:FEW]) > NO_FLIP, "nothing was rounded"


def test_copied_blocks_hold_what_was_computed():
    name = "bitnet-packed"
    model = load(name)
    ids = golden(name, "token_ids")
    first = Sequence(ids, [0, 1])
    forward(model, [(first, 17)])
    model.copy_blocks([(0, 8), (1, 9), (9, 2)])
    second = Sequence(ids, [8, 2])
    second.num_computed = 17
    expected = forward(model, [(first, 1)]).full([0])
    assert np.array_equal(forward(model, [(second, 1)]).full([0]), expected)
    model.close()


def test_a_closed_model_says_so():
    model = load("bitnet-packed")
    output = forward(model, [(Sequence(golden("bitnet-packed", "token_ids"), [0]), 3)])
    model.close()
    model.close()
    for call in (lambda: output.full([0]), lambda: output.top([0], 1), lambda: model.reserve(1)):
        with pytest.raises(Stopped, match="load it again"):
            call()


def test_a_cache_that_does_not_fit_is_refused():
    model = load("bitnet-packed")
    with pytest.raises(OutOfMemory, match="lower the context"):
        model.reserve(1 << 40)
    model.reserve(1)
    model.close()


def uncompiled() -> CompilationError:
    """As Triton raises it where a function that a kernel calls does not compile."""
    place = ast.parse("f(1)").body[0]
    error = CompilationError("f(1)", place)
    error.__cause__ = CompilationError("x.to(1)", place, "AttributeError('no x')")
    return error


def test_what_fails_is_told_in_a_line():
    gpu = Gpu("cuda")
    for raised, expected, words in (
        (
            RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA"),
            KernelError,
            "access: start",
        ),
        (TritonError("out of resources"), KernelError, 'failed: out of resources: .* choose device="cpu"$'),
        (uncompiled(), KernelError, r"failed: AttributeError\('no x'\): start"),
        (PTXASError("error\n`ptxas` stderr:\nline 5: syntax"), KernelError, "stderr: line 5: syntax: start"),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory, "lower max_cache_tokens"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), OutOfMemory, "lower max_cache_tokens"),
    ):
        with pytest.raises(expected, match=words), gpu.working():
            raise raised


def test_the_cache_leaves_room_for_what_attention_takes(monkeypatch):
    monkeypatch.setattr(Gpu, "free_bytes", 1 << 30)
    model = load_model(open_checkpoint(GOLDEN / "bitnet-packed"), EngineConfig(device="cuda", max_batch_tokens=64))
    sizes = model.config
    room = int(0.9 * (1 << 30)) - scratch_bytes(64, sizes.num_heads, sizes.head_dim)
    assert 0 < model.capabilities.available_bytes == room
    model.close()


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="what is broken is captured before")
def test_a_step_that_fails_ends_its_requests():
    config = EngineConfig(device="cuda", threads=1)
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    model = load_model(checkpoint, config)
    with LLM(model, load_tokenizer(checkpoint), max_cache_tokens=256) as llm:
        model._hidden = model._hidden[:1]
        with pytest.raises(BackendError, match=r"^(cpu|cuda:0) failed: "):
            llm.generate("Once upon", SamplingParams(max_tokens=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_backend_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(Unavailable, match=r"backend 'cuda:1' is not available: .*PyTorch has.*nvidia-smi"):
        Gpu("cuda:1")


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (CalledProcessError(1, ["gcc", "main.c"]), "install gcc and Python's headers"),
        (FileNotFoundError(2, "No such file or directory", "/sbin/ldconfig"), "install gcc and Python's headers"),
        (AssertionError("libcuda.so cannot found!\nrun ldconfig"), "install gcc and Python's headers"),
        (RuntimeError("Failed to find C compiler."), "install gcc and Python's headers"),
        (PermissionError(13, "Permission denied", "/.triton"), "set TRITON_CACHE_DIR to a folder that can be written"),
    ],
)
def test_where_triton_does_not_start_the_backend_says_what_to_do(monkeypatch, error, cure):
    def fail(driver):
        raise error

    monkeypatch.setattr(type(triton.runtime.driver), "active", property(fail))
    with pytest.raises(Unavailable, match=f"Triton does not start: .*: {cure}"):
        start_triton("cuda")


def test_without_pytorch_the_backend_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitnet_inference.backends.cuda", None)  # as if an import in it failed
    with pytest.raises(Unavailable, match=r'pip install "bitnet-inference\[cuda\]"'):
        load("bitnet-packed")


def test_impossible_options_are_refused():
    for options, words in (
        ({"head": "int6"}, 'choose "int8" or "exact"'),
        ({"ternary_format": "t5"}, "leave it out"),
    ):
        with pytest.raises(InvalidParams, match=words):
            load("bitnet-packed", **options)
    with pytest.raises(InvalidParams, match="is ternary"):
        load("llama-ternary-head", head="int8")
    for device in ("cuda:", "cuda:x", "cuda:-1", "cuda 1", "gpu"):
        with pytest.raises(InvalidParams, match="device is "):
            EngineConfig(device=device)


def test_the_estimate_is_near_what_is_taken():
    checkpoint = open_checkpoint(find_model("default"))
    config = EngineConfig(device="cuda", head="int8", threads=1).resolve()
    model = load_model(checkpoint, config)
    model.reserve(NUM_BLOCKS)
    assert estimate_bytes(checkpoint, config, NUM_BLOCKS * 16) == pytest.approx(model.num_bytes, rel=0.05)
    model.close()


def test_an_llm_says_what_the_reference_says():
    name, found = GOLDEN / "llama3-bf16", []  # whose steps take least
    for device in ("cuda", "reference"):
        with LLM.load(name, device=device, cache_dtype="float32", max_cache_tokens=256) as llm:
            # As many as it takes until a step is queued ahead.
            params = SamplingParams(temperature=0, max_tokens=MIN_STREAK + 2, ignore_eos=True)
            text = llm.generate("one", params).text
            assert device != "cuda" or llm._engine._model._steps.num_ahead
            for _ in llm.stream("one", SamplingParams(temperature=1, top_k=5, seed=1, max_tokens=100)):
                break  # cancels
            found.append((text, llm.embed("two three")))
    assert found[0][0] == found[1][0] and np.allclose(found[0][1], found[1][1], atol=1e-3)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="takes a minute; the test above has one such step")
def test_steps_that_were_queued_ahead_say_the_same():
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    model, tokenizer = load("bitnet-packed"), load_tokenizer(checkpoint)
    with LLM(model, tokenizer, max_cache_tokens=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        found = llm.generate("one", params).token_ids
        assert model._steps.num_ahead > 20
    model = load("bitnet-packed")
    prompt = tokenizer.encode_prompt("one")
    sequence = Sequence(np.array([*prompt, *found]), list(range(NUM_BLOCKS)))
    rows = [forward(model, [(sequence, count)]).top([count - 1], 1)[0] for count in (len(prompt), *[1] * 39)]
    assert [int(row[0, 0]) for row in rows] == found and model._steps.num_ahead == 0
    model.close()

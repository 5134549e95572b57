"""Core ML packages that we write, computed operation by operation in NumPy beside the reference; and the backend on it.

What Core ML itself makes of them only a Mac can say.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mil_interpreter import Function, Package
from numpy.typing import NDArray
from test_groups import Grouped

from bitnet_inference import LLM, SamplingParams, convert
from bitnet_inference.backends import coreml_library, load_model, reference
from bitnet_inference.backends.coreml import MAX_STATES, CoreMLModel
from bitnet_inference.backends.coreml_library import coremltools
from bitnet_inference.backends.onnx_check import relative_rms
from bitnet_inference.config import EngineConfig
from bitnet_inference.conversion.coreml_files import write_coreml_package
from bitnet_inference.conversion.coreml_verbs import Scaled, Verbs, mask_rows
from bitnet_inference.errors import InvalidParams, KernelError, Stopped, Unavailable, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.model.contract import Batch
from bitnet_inference.model_folder import find_model, load_text_files
from bitnet_inference.summary import plan_of, summarize

GOLDEN = Path(__file__).parents[1] / "golden"
# Sub-norms and relu2; windows, GELU, scaled embeddings and norms after; norms of heads; norms before every projection;
# dense and ternary layers in one; a ternary head; stretched rotations; biases behind dense and ternary products.
NAMES = ("bitnet-packed", "gemma3-bf16", "qwen3-bitlinear", "llama-rms-norm-bitlinear", "llama-partial",
         "llama-ternary-head", "llama3-bf16", "qwen2-bf16", "qwen2-bitlinear")  # fmt: skip
CONTEXT, FIRST = 32, 20  # tokens of a state, and of the prompt that is computed at once
NO_FLIP = 1e-5
HALF = 0.04  # roundings to float16 flip codes of rows this short; a state in float16 alone makes 0.02 of it
Floats = NDArray[np.float32]


def golden(name: str) -> Any:
    return np.load(GOLDEN / name / "golden.npz")


def write(checkpoint: Checkpoint, path: Path, context: int = CONTEXT, **options: Any) -> Path:
    write_coreml_package(checkpoint, load_text_files(checkpoint), path, context=context, **options)
    return path


def computed(package: Package, ids: NDArray[np.int32], first: int = FIRST) -> Floats:
    """Logits of all tokens: the first of them at once, behind them padding that must not count, then one by one."""
    states, prompt = package.states(), np.full((1, CONTEXT), 7, np.int32)
    prompt[0, :first] = ids[:first]
    whole = package.run("prompt", {"input_ids": prompt, "position": np.array([0], np.int32)}, states)
    found = [whole["logits"][0, :first]]
    for at in range(first, len(ids)):
        inputs = {"input_ids": ids[None, at : at + 1], "position": np.array([at], np.int32)}
        found.append(package.run("main", inputs, states)["logits"][0])
    return np.concatenate(found).astype(np.float32)


def batch_of(ids: NDArray[np.int32], past: int, table: NDArray[np.int32], size: int) -> Batch:
    at = np.arange(past, past + len(ids), dtype=np.int32)
    slots = table[at // size] * size + at % size
    return Batch(ids, at, slots, np.array([0, len(ids)], np.int32), table[None])


def reference_logits(checkpoint: Checkpoint, ids: NDArray[np.int32]) -> Floats:
    model = load_model(checkpoint, EngineConfig(device="reference", cache_dtype="float32"))
    model.reserve(8)
    found = model.forward(batch_of(ids, 0, np.arange(8, dtype=np.int32), model.capabilities.block_size))
    return found.full(range(len(ids)))


@pytest.mark.parametrize("name", NAMES)
def test_the_program_in_float32_is_what_the_reference_computes(tmp_path, name):
    """But for its states, which are float16 in Core ML, and are kept in float32 here."""
    checkpoint, found = open_checkpoint(GOLDEN / name), golden(name)
    ids = found["token_ids"].astype(np.int32)
    path = write(checkpoint, tmp_path / "x.mlpackage", compute="float32")
    logits = computed(Package(path, {np.float16: np.float32}), ids)
    assert relative_rms(logits, reference_logits(checkpoint, ids)) < NO_FLIP


@pytest.mark.parametrize("name", [*NAMES[:3], "qwen2-bf16"])
def test_the_program_in_float16(tmp_path, name):
    checkpoint, found = open_checkpoint(GOLDEN / name), golden(name)
    ids = found["token_ids"].astype(np.int32)
    logits = computed(Package(write(checkpoint, tmp_path / "x.mlpackage")), ids)
    is_dense = not checkpoint.is_ternary("layers.0.q")
    assert relative_rms(logits, found["logits"]) < (0.005 if is_dense else HALF)
    best, second = np.sort(found["logits"], axis=1)[:, -1:-3:-1].T
    clear = best - second > 4 * HALF * found["logits"].std()
    assert clear.sum() >= 10 and np.array_equal(logits.argmax(axis=1)[clear], found["logits"].argmax(axis=1)[clear])


def test_small_packages(tmp_path):
    """Dense matrices in 8 bits, embeddings too."""
    checkpoint, found = open_checkpoint(GOLDEN / "llama-partial"), golden("llama-partial")
    path = write(checkpoint, tmp_path / "x.mlpackage", small=True)
    assert relative_rms(computed(Package(path), found["token_ids"].astype(np.int32)), found["logits"]) < 0.08
    weights, sizes = CoreMLCheckpoint(path).program.weights, checkpoint.config
    assert weights[8] >= sizes.vocab_size * sizes.hidden_size > 50 * weights[16]


def test_scales_for_groups_of_columns(tmp_path):
    checkpoint = Grouped(str(find_model("default")), 64)
    checkpoint.config = replace(checkpoint.config, num_layers=1)
    path = write(checkpoint, tmp_path / "x.mlpackage", compute="float32")
    ids = np.arange(5, 26, dtype=np.int32)
    logits, expected = computed(Package(path, {np.float16: np.float32}), ids), reference_logits(checkpoint, ids)
    errors = list(map(relative_rms, logits, expected))  # sums are taken in another order, which may flip a code
    assert min(errors) < NO_FLIP and max(errors) < 0.03
    with pytest.raises(Unsupported, match=r"160 columns, in groups of .* write X.onnx"):
        write(Grouped("bitnet-packed", 64), tmp_path / "y.mlpackage")
    assert [each.name for each in tmp_path.iterdir()] == ["x.mlpackage"]


# Verbs


def evaluated(make: Any, half: bool, **inputs: Floats) -> Floats:
    """What a function of verbs and inputs gives."""
    library = coremltools()
    mil, builder = library.converters.mil.mil, library.converters.mil.Builder
    kind = mil.types.fp16 if half else mil.types.fp32
    given = {name: builder.placeholder(shape=(1, *x.shape), dtype=kind) for name, x in inputs.items()}
    with mil.Function(given, opset_version=library.target.iOS18) as function:
        verbs = Verbs(builder, half)
        function.set_outputs([make(verbs, **function.inputs)])
    dtype = np.float16 if half else np.float32
    found = Function(function).run({name: x[None].astype(dtype) for name, x in inputs.items()}, {})
    (result,) = found.values()
    return result[0].astype(np.float32)


@pytest.mark.parametrize("width", [16, 300, 6912])
def test_a_product_is_its_definition_to_the_bit(width):
    """In float32. In float16 the codes are those of rows in float16, and what is off is one rounding of the sum."""
    rng = np.random.default_rng(width)
    x, weight = rng.standard_normal((9, width), np.float32), rng.integers(-1, 2, (40, width), np.int8)
    x[3], x[4, : width // 2] = 0, 1e-6

    def product(verbs: Verbs, x: Any) -> Any:
        codes = verbs.quantised(Scaled(x))
        sums = verbs.product(codes.rows, weight.astype(verbs.dtype))
        return verbs.mul(sums, verbs.mul(codes.inverse, verbs.number(0.75)))

    assert np.array_equal(evaluated(product, half=False, x=x), reference.bit_linear(x, weight, 0.75))
    found = evaluated(product, half=True, x=x)
    assert relative_rms(found, reference.bit_linear(x, weight, 0.75)) < 0.01
    assert not found[3].any()


def test_the_largest_sums_fit_into_float16():
    """Sums of codes of 6,912 columns are up to 877,824, where float16 ends at 65,504: they are taken in 128ths."""
    x, weight = np.full((1, 6912), 3.0, np.float32), np.ones((16, 6912), np.int8)

    def product(verbs: Verbs, x: Any) -> Any:
        codes = verbs.quantised(Scaled(x))
        return verbs.mul(verbs.product(codes.rows, weight.astype(verbs.dtype)), codes.inverse)

    assert np.allclose(evaluated(product, half=True, x=x), 3 * 6912, rtol=2e-3)


@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 60.0, 2e4])
def test_gates_before_a_norm_fit_into_float16(activation, size):
    """Their product alone would be infinite: 60 ** 3 is 216,000."""
    rng = np.random.default_rng(1)
    x, up = (np.float16(size * rng.standard_normal((5, 64)).clip(-2, 2)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(64).astype(np.float32)

    def gated(verbs: Verbs, x: Any, up: Any) -> Any:
        gate = verbs.gate(x, up, activation, is_normed=True)
        return verbs.plain(verbs.norm(gate, weight.astype(verbs.dtype), 1e-5))

    with np.errstate(over="ignore"):  # exp, for what is far below 0
        expected = reference.rms_norm(reference.gated(x, up, activation), weight, 1e-5)
    assert relative_rms(evaluated(gated, half=False, x=x, up=up), expected) < NO_FLIP
    found = evaluated(gated, half=True, x=x, up=up)
    if size < 1:  # the eps is far larger than the squares: next to nothing comes out
        assert np.abs(found - expected).max() < 1 / 256
    else:
        assert relative_rms(found, expected) < 0.005


def test_who_sees_whom():
    for window in (0, 3):
        rows = mask_rows(4, 10, window)
        for position in (0, 5, 6):
            seen = rows[:, 9 - position : 19 - position] == 0
            places, columns = position + np.arange(4)[:, None], np.arange(10)
            assert np.array_equal(seen, (columns <= places) & (columns > places - (window or 10)))


# What is in a package


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("coreml") / "x.mlpackage"
    convert(GOLDEN / "bitnet-packed", path, context=96)
    return path


def test_what_stands_in_a_package(package):
    spec = coremltools().utils.load_spec(str(package))
    assert spec.specificationVersion == 9 and spec.description.defaultFunctionName == "main"
    program = CoreMLCheckpoint(package).program
    main, prompt = (program.functions[name] for name in ("main", "prompt"))
    ports = {name: str(port) for each in (main.inputs, main.states, main.outputs) for name, port in each.items()}
    assert ports == {
        "input_ids": "int32 [1, 1]", "position": "int32 [1]",
        "keys": "float16 [2, 2, 96, 16]", "values": "float16 [2, 2, 96, 16]",
        "logits": "float16 [1, 1, 384]", "new_keys": "float16 [2, 2, 1, 16]", "new_values": "float16 [2, 2, 1, 16]",
    }  # fmt: skip
    assert (
        str(prompt.inputs["input_ids"]) == "int32 [1, 64]" and str(prompt.outputs["logits"]) == "float16 [1, 64, 384]"
    )
    for function in (main, prompt):
        counted = {name: function.operations[name] for name in ("constexpr_lut_to_dense", "linear", "round", "gather")}
        assert counted == {"constexpr_lut_to_dense": 14, "linear": 15, "round": 8, "gather": 1}
    ternary = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160)
    vectors = 2 * (3 * 64 + 160) + 64
    assert program.weights == Counter({2: ternary, 16: 384 * 64 + vectors})
    stored = (package / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    tables = 2 * (65 * 191 + 2 * 96 * 8)  # masks of both functions, and rotations
    assert stored < ternary // 4 + 2 * (384 * 64 + vectors) + tables + 24_000  # weights stand there once


def test_what_inspect_tells(package):
    summary = summarize(package)
    lines = dict(summary.groups["model"])
    assert not summary.problems
    assert lines["weights"].startswith("0.09 million of 2 bits, 0.03 million of 16 bits; ")
    assert lines["context"] == "96 tokens, prompts 64 at a time"
    assert lines["operations"].endswith("kinds for a token") and lines["note"].endswith("macOS 15 or newer")
    assert dict(summary.groups["memory"])["state"].endswith("(float16) for 96 tokens")
    with pytest.raises(Unsupported, match="cannot be taken out"):
        plan_of(package)


def test_a_package_of_before_is_replaced_and_nothing_else_is(tmp_path, package):
    target = tmp_path / "x.mlpackage"
    shutil.copytree(package, target)
    (target / "mine.txt").write_text("")
    written = convert(GOLDEN / "llama3-bf16", target)
    assert not (target / "mine.txt").exists() and open_checkpoint(target).config.family == "llama"
    assert written.num_bytes == open_checkpoint(target).num_bytes
    assert written.notes == ()
    other = tmp_path / "y.mlpackage"
    other.mkdir()
    (other / "mine.txt").write_text("")
    (tmp_path / "z.mlpackage").write_text("")
    for taken in (other, tmp_path / "z.mlpackage"):
        with pytest.raises(InvalidParams, match="no Core ML package"):
            convert(GOLDEN / "bitnet-packed", taken)
    with pytest.raises(Unsupported, match="cannot be taken out"):
        convert(package, tmp_path / "x.gguf")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.mlpackage", "y.mlpackage", "z.mlpackage"]


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # of the library's folder
@pytest.mark.parametrize("most", [1 << 10, 1 << 15])
def test_a_disk_that_is_full(tmp_path, package, most):
    target = shutil.copytree(package, tmp_path / "x.mlpackage")
    before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(InvalidParams, match=r"x\.mlpackage cannot be written: .*: free space"):
            convert(GOLDEN / "bitnet-packed", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()  # now, and not in another test
    assert {file: file.read_bytes() for file in target.rglob("*") if file.is_file()} == before
    assert os.listdir(tmp_path) == ["x.mlpackage"]


@pytest.mark.parametrize(
    ("target", "options", "why"),
    [
        ("x.gguf", {"compute": "float32"}, "only Core ML packages"),
        ("x.onnx", {"context": 64}, "only Core ML packages"),
        ("x.mlpackage", {"compute": "bfloat16"}, "choose one of float16, float32"),
        ("x.mlpackage", {"context": 257}, "256 positions"),
        ("x.mlpackage", {"context": 1}, "from 2 to 256"),
        ("x.mlpackage", {"compressed": True}, "only packed files"),
        ("x.mlpackage", {"kind": "f16"}, "only GGUF files"),
    ],
)
def test_options_that_don_t_fit(tmp_path, target, options, why):
    with pytest.raises(InvalidParams, match=why):
        convert(GOLDEN / "bitnet-packed", tmp_path / target, **options)
    assert not list(tmp_path.iterdir())


def test_models_of_embeddings_are_refused(tmp_path):
    checkpoint = open_checkpoint(GOLDEN / "qwen3-embedding")
    checkpoint.config = replace(checkpoint.config, pooling="mean")
    with pytest.raises(Unsupported, match="embeddings"):
        write(checkpoint, tmp_path / "x.mlpackage")


def test_nothing_is_printed():
    """Not that coremltools lacks its compiled parts here, nor what it thinks of other libraries."""
    code = "from bitnet_inference.backends.coreml_library import coremltools; coremltools()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# The backend


@cache
def read(path: str) -> Package:
    return Package(Path(path))


class OnNumPy:
    """What stands for coremltools' CompiledMLModel, which computes on macOS only."""

    def __init__(self, path: str, function_name: str) -> None:
        self._package, self._name = read(path), function_name

    def make_state(self) -> Any:
        return State(self._package.states())

    def predict(self, inputs: dict[str, Any], state: Any) -> dict[str, Any]:
        return self._package.run(self._name, inputs, state.arrays)


class State:
    """What stands for its MLState."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def write_state(self, name: str, value: Any) -> None:
        assert value.shape == self.arrays[name].shape and value.dtype == self.arrays[name].dtype
        self.arrays[name] = value


@pytest.fixture
def mac(monkeypatch):
    """A Mac whose Core ML computes in NumPy."""
    monkeypatch.setattr(coreml_library.platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(coremltools().models, "CompiledMLModel", OnNumPy)
    monkeypatch.setattr(coremltools().utils, "compile_model", lambda path, target: path)


def test_here_it_says_why_not_and_what_to_do(package, monkeypatch):
    monkeypatch.setattr(coreml_library.platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    with pytest.raises(Unavailable, match=r"macOS 15 or newer, and this is .*: copy packages to such a Mac, or run"):
        LLM.load(package)
    monkeypatch.setattr(coreml_library.platform, "mac_ver", lambda: ("14.7", ("", "", ""), "arm64"))
    with pytest.raises(Unavailable, match=r"this is macOS 14\.7"):
        LLM.load(package)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cpu"}, 'a Core ML package runs with "coreml" only'),
        ({"cache_dtype": "bfloat16"}, 'runs with "float16" only'),
        ({"quantize": "int8"}, 'runs with "none" only'),
        ({"embedding": "int8"}, 'runs with "exact" only'),
    ],
)
def test_options_that_a_package_does_not_have(package, options, why):
    with pytest.raises(InvalidParams, match=why):
        LLM.load(package, **options)
    with pytest.raises(InvalidParams, match="is no Core ML package"):
        LLM.load("default", device="coreml")


def stepwise(model: CoreMLModel, ids: NDArray[np.int32], table: NDArray[np.int32], cuts: list[int]) -> Floats:
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        output = model.forward(batch_of(ids[begin:end], begin, table, model.capabilities.block_size))
        found.append(output.full(range(end - begin)))
    return np.concatenate(found)


@pytest.mark.parametrize("cuts", [[], [5, 75, 79]])
def test_the_logits_of_a_package(package, mac, cuts):
    """Behind 32 tokens of 96 there is no more room for 64 at once."""
    ids = np.random.default_rng(5).integers(0, 384, 90, dtype=np.int32)
    model = load_model(open_checkpoint(package), EngineConfig())
    assert isinstance(model, CoreMLModel)
    model.reserve(8)
    found = stepwise(model, ids, np.arange(8, dtype=np.int32)[::-1], cuts)
    assert relative_rms(found, reference_logits(open_checkpoint(GOLDEN / "bitnet-packed"), ids)) < HALF
    model.close()
    with pytest.raises(Stopped, match="closed"):
        stepwise(model, ids[:3], np.arange(1, dtype=np.int32), [])


def test_states_are_taken_and_given_back(package, mac):
    """More sequences than states, blocks that change hands, copies, and tokens that are taken back."""
    rng, model = np.random.default_rng(6), load_model(open_checkpoint(package), EngineConfig())
    model.reserve(32)
    texts = rng.integers(0, 384, (MAX_STATES + 1, 38), dtype=np.int32)
    tables = np.arange(3 * len(texts), dtype=np.int32).reshape(-1, 3)
    alone = []
    for ids in texts:  # all in the same blocks, each with its last tokens taken back once
        alone.append(stepwise(model, ids, tables[0], [35, 36, 37]))
        assert np.array_equal(stepwise_from(model, ids, tables[0], 36), alone[-1][36:])
    model.reserve(32)
    for ids, table in zip(texts, tables, strict=True):
        stepwise(model, ids[:35], table, [])
    for at in range(35, 38):
        size = model.capabilities.block_size
        places = np.full(len(texts), at, np.int32)
        slots = tables[:, at // size] * size + at % size
        starts = np.arange(len(texts) + 1, dtype=np.int32)
        logits = model.forward(Batch(texts[:, at].copy(), places, slots, starts, tables)).full(range(len(texts)))
        assert np.array_equal(logits, [each[at] for each in alone])
    for target in ([30, 31, 0], tables[-1]):  # which nobody has, and which a state has
        copied = np.array(target, np.int32)
        model.copy_blocks([(int(tables[0, 0]), int(copied[0])), (int(tables[0, 1]), int(copied[1]))])
        assert np.array_equal(stepwise_from(model, texts[0], copied, 36), alone[0][36:])
    model.close()


def stepwise_from(model: CoreMLModel, ids: NDArray[np.int32], table: NDArray[np.int32], begin: int) -> Floats:
    rows = [model.forward(batch_of(ids[at : at + 1], at, table, 32)).full([0]) for at in range(begin, len(ids))]
    return np.concatenate(rows)


def test_a_run_that_fails_ends_in_an_error_of_ours(package, mac, monkeypatch):
    model = load_model(open_checkpoint(package), EngineConfig())
    model.reserve(4)
    ids, table = np.arange(12, dtype=np.int32), np.arange(2, dtype=np.int32)
    first = stepwise(model, ids, table, [8])
    works = OnNumPy.predict
    monkeypatch.setattr(OnNumPy, "predict", lambda *_, **__: 1 / 0)
    with pytest.raises(KernelError, match="division by zero"):
        stepwise(model, ids, table, [8])
    monkeypatch.setattr(OnNumPy, "predict", works)
    assert np.array_equal(stepwise(model, ids, table, [8]), first)
    model.close()


def test_a_program_that_core_ml_refuses(package, mac, monkeypatch):
    monkeypatch.setattr(coremltools().utils, "compile_model", lambda path, target: 1 / 0)
    with pytest.raises(Unsupported, match=r"Core ML refuses it \(division by zero\): convert it again"):
        LLM.load(package)


def test_an_llm_on_a_package(package, mac):
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM.load(package) as llm:
        prompts = [f"the {word} " * 9 for word in ("cat", "dog")]
        first = llm.generate(prompts, greedy)
        assert [len(each.token_ids) for each in first] == [6] * 2
        again = llm.generate(prompts[0], greedy)
        assert again.usage.num_cached_tokens >= 32 and len(again.token_ids) == 6
        with pytest.raises(InvalidParams, match="hidden states"):
            llm.embed("a")

"""Which device a model runs on, and why not another: on this machine, and on machines that are made up."""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bitnet_inference import LLM, SamplingParams
from bitnet_inference.backends import Choice, decided, load_model
from bitnet_inference.backends.automatic import SCRATCH_BYTES
from bitnet_inference.backends.reference import ReferenceModel
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.backends.table import BACKENDS, overview
from bitnet_inference.config import DEVICES, EngineConfig
from bitnet_inference.errors import BackendError, InvalidParams, OutOfMemory, Unavailable
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.held import made_on
from bitnet_inference.model.contract import Model
from bitnet_inference.model_folder import find_model

CHECKPOINT = open_checkpoint(find_model("default"))
LAYERS = CHECKPOINT.config.num_layers
GPU = "Some GPU"
TOKENS = 512
INSTALL = 'pip install "bitnet-inference[cuda]"'
DRIVER = "see nvidia-smi; update NVIDIA's driver, or install a PyTorch for its CUDA version (see pytorch.org)"
Machine = Callable[..., None]


def torch_of(count: int, capability: tuple[int, int], free: int, cuda: str | None, warning: str) -> ModuleType:
    """As much of PyTorch as tells of GPUs."""

    def is_available() -> bool:
        if warning:
            warnings.warn(warning, stacklevel=1)
        return count > 0

    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    torch.version = SimpleNamespace(cuda=cuda)  # type: ignore[attr-defined]
    torch.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        is_available=is_available,
        device_count=lambda: count,
        get_device_name=lambda index: GPU,
        get_device_capability=lambda index: capability,
        mem_get_info=lambda index: (free, 1 << 40),
    )
    return torch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this a machine with NVIDIA's driver, and what else is said."""

    def make(
        *,
        driver: bool = True,
        missing: str = "",
        count: int = 1,
        capability: tuple[int, int] = (9, 0),
        free: int = 1 << 36,
        cuda: str | None = "12.8",
        warning: str = "",
        system: str = "Linux",
        macos: str = "15.1",
        compiler: bool = True,
    ) -> None:
        def start(name: str) -> None:
            if not compiler:
                raise Unavailable(name, "Triton does not start: no C compiler", "install gcc")

        def library(name: str) -> None:
            if not driver:
                raise OSError(f"{name}: cannot open shared object file")

        real = importlib.util.find_spec
        found = lambda name: None if name == missing else ModuleSpec(name, None) if name in OURS else real(name)  # noqa: E731
        for room in ("cuda_check", "table"):
            monkeypatch.setattr(f"bitnet_inference.backends.{room}.find_spec", found)
        monkeypatch.setattr(ctypes, "CDLL", library)
        for library_name, module in (
            ("torch", torch_of(count, capability, free, cuda, warning)),
            ("triton", ModuleType("triton")),
        ):
            monkeypatch.setitem(sys.modules, library_name, module)
        device = SimpleNamespace(start_triton=start)
        monkeypatch.setitem(sys.modules, "bitnet_inference.backends.cuda_device", device)  # type: ignore[arg-type]
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos if system == "Darwin" else "", ("", "", ""), ""))
        monkeypatch.setattr(platform, "machine", lambda: "arm64" if system == "Darwin" else "x86_64")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return make


OURS = ("torch", "triton", "mlx", "coremltools", "onnxruntime")


def choose(**options: object) -> Choice:
    return decided(CHECKPOINT, EngineConfig(**options), TOKENS)  # type: ignore[arg-type]


def size_on_gpu(num_layers: int = LAYERS) -> int:
    config = EngineConfig(device="cuda").resolve()
    return estimate_bytes(
        CHECKPOINT, config, TOKENS, range(LAYERS - num_layers, LAYERS) if num_layers < LAYERS else None
    )


@pytest.mark.parametrize(
    ("options", "why", "install"),
    [
        ({"driver": False}, "no NVIDIA driver was found", ""),
        ({"missing": "torch"}, "torch is not installed", INSTALL),
        ({"missing": "triton"}, "triton is not installed", INSTALL),
        ({"cuda": None}, "this PyTorch is built without CUDA", "pip install --force-reinstall torch"),
        ({"count": 0}, "PyTorch finds no NVIDIA GPU", ""),
        ({"count": 0, "warning": "the driver\nis too old"}, "the driver is too old", DRIVER),
        ({"capability": (7, 5)}, f"{GPU} has compute capability 7.5, at least 8.0 is needed", ""),
    ],
)
def test_why_no_nvidia_gpu_is_used(machine: Machine, options: dict[str, object], why: str, install: str) -> None:
    machine(**options)
    choice = choose()
    assert choice.config.device == "cpu"
    assert choice.why == (f"{why}: {install}" if install else why)
    assert choice.note == (f"the GPU is not used: {why}: {install}" if install else "")
    needs = f"where there is one of compute capability 8.0 or newer, install its driver, then {INSTALL}"
    assert dict(overview())["cuda"].endswith(f"not usable: {why}: {install or needs}")
    with pytest.raises(Unavailable) as caught:
        choose(device="cuda")
    assert (caught.value.why, caught.value.install) == (why, install or 'choose device="cpu"')
    with pytest.raises(Unavailable) as caught:
        choose(gpu_layers=1)  # a number was asked for
    assert caught.value.install == (install or "leave gpu_layers out")


def test_a_gpu_without_a_compiler_for_its_kernels_is_not_usable(machine: Machine) -> None:
    machine()
    assert "NVIDIA GPUs: usable, Some GPU" in dict(overview())["cuda"]
    machine(compiler=False)
    assert dict(overview())["cuda"].endswith("not usable: Triton does not start: no C compiler: install gcc")
    with pytest.raises(Unavailable, match=r"Triton does not start: .*: install gcc"):
        choose(device="cuda")


def test_a_gpu_that_holds_the_model_is_taken(machine: Machine) -> None:
    machine(free=size_on_gpu() + SCRATCH_BYTES)
    choice = choose()
    assert choice.config.device == "cuda" and choice.config.cache_dtype == "bfloat16" and not choice.note
    assert choice.why.startswith(f"{GPU} has 541.2 MB free, the model takes 4.3 MB")


@pytest.mark.parametrize("error", [OutOfMemory("the cache finds no room"), BackendError("it failed")])
def test_a_model_that_is_loaded_and_has_no_room_for_a_cache_is_closed(error: Exception) -> None:
    made: list[Model] = []

    def make(model: Model, fallback: object) -> Model:
        made.append(model)
        model.reserve(1)
        if len(made) == 1:
            raise error
        return model

    tiny = open_checkpoint(Path(__file__).parents[1] / "golden" / "bitnet-packed")
    model, choice = made_on(Choice(EngineConfig(device="reference").resolve(), "", is_open=True), tiny, None, make)
    first, second = made
    assert isinstance(first, ReferenceModel) and not first.cache.size
    assert model is second and choice.config.device == "cpu"
    second.close()


class Full:
    """A CudaModel, on a GPU whose memory somebody else has taken meanwhile."""

    def __init__(self, *arguments: object) -> None:
        raise OutOfMemory("the memory of cuda:0 ran out")


@pytest.mark.parametrize("model", [None, Full])  # None: it cannot be imported
def test_one_that_fails_at_once_gives_way_to_the_cpu_where_nobody_asked_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, model: type | None
) -> None:
    machine()
    monkeypatch.delenv("BITNET_ISA", raising=False)  # which the CPU alone has, so that it would be chosen at once
    module = model and SimpleNamespace(CudaModel=model)
    monkeypatch.setitem(sys.modules, "bitnet_inference.backends.cuda", module)  # type: ignore[arg-type]
    with LLM.load("default", max_cache_tokens=TOKENS) as llm:
        assert llm.device == "cpu" and llm.generate("Once", SamplingParams(max_tokens=2)).usage.num_output_tokens == 2
        assert any(note.startswith("on the CPU: cuda failed while the model was loaded") for note in llm.notes)
    with pytest.raises((BackendError, OutOfMemory)):
        LLM.load("default", device="cuda")


def test_one_that_does_not_is_told_of(machine: Machine) -> None:
    machine(free=size_on_gpu() + SCRATCH_BYTES - 1)
    choice = choose()
    assert choice.config.device == "cpu"
    assert choice.note.endswith('with a cache of 512 tokens: gpu_layers="auto" puts a part of it on the GPU')


@pytest.mark.parametrize(
    "options", [{"head": "int6"}, {"isa": "generic"}, {"ternary_format": "u2"}, {"embedding": "int8"}]
)
def test_options_of_the_cpu_alone_choose_it(machine: Machine, options: dict[str, str]) -> None:
    machine()
    choice = choose(**options)
    assert choice.config.device == "cpu" and "which the CPU alone has" in choice.why


@pytest.mark.parametrize("device", ["cuda", "mlx", "onnx", "coreml", "reference"])
def test_how_the_cpu_packs_is_no_option_of_others(device: str) -> None:
    with pytest.raises(InvalidParams, match=f'ternary_format is "t5", .* but device is "{device}": leave it out'):
        EngineConfig(device=device, ternary_format="t5").resolve()


def test_interpreted_kernels_are_for_those_who_ask(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(driver=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose().config.device == "cpu"
    assert choose(device="cuda").config.device == "cuda"


def test_a_gpu_by_its_number(machine: Machine) -> None:
    machine(count=2)
    assert choose(device="cuda:1").config.device == "cuda:1"
    with pytest.raises(Unavailable, match="'cuda:2' is not available: there are 2 GPUs, numbered from 0"):
        choose(device="cuda:2")
    for device in ("cuda:", "cuda:x", "cpu:0", "cuda:-1", "gpu"):
        with pytest.raises(InvalidParams, match="device is"):
            EngineConfig(device=device)


def test_as_many_layers_as_fit(machine: Machine) -> None:
    for count in range(1, LAYERS + 1):
        machine(free=size_on_gpu(count) + SCRATCH_BYTES)
        config = choose(gpu_layers="auto").config
        assert config.device == "cuda" and config.gpu_layers == (count if count < LAYERS else None)
    machine(free=size_on_gpu(1) + SCRATCH_BYTES - 1)
    choice = choose(gpu_layers="auto")
    assert choice.config.device == "cpu" and choice.config.gpu_layers is None
    assert "a layer and the head take" in choice.note
    with pytest.raises(OutOfMemory, match='choose device="cpu"'):
        choose(gpu_layers="auto", device="cuda")


def test_a_number_of_layers_is_taken_at_its_word(machine: Machine) -> None:
    machine(free=SCRATCH_BYTES)
    assert choose(gpu_layers=2).config.gpu_layers == 2
    assert choose(gpu_layers=LAYERS + 9).config.gpu_layers is None, "all of them"
    for wrong in (0, -1, True, "all", 1.5):
        with pytest.raises(InvalidParams, match="gpu_layers is"):
            EngineConfig(gpu_layers=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="gpu_layers are for NVIDIA GPUs"):
        EngineConfig(gpu_layers=1, device="cpu")


def test_macs(machine: Machine) -> None:
    machine(driver=False, system="Darwin")
    assert choose().config.device == "mlx"
    assert choose(head="int8").config.device == "cpu"
    machine(driver=False, system="Darwin", missing="mlx")
    choice = choose()
    assert choice.config.device == "cpu"
    assert choice.note == 'the GPU is not used: mlx is not installed: pip install "bitnet-inference[mlx]"'


@pytest.mark.parametrize(("name", "library"), [("mlx", "mlx"), ("onnx", "onnxruntime"), ("coreml", "coremltools")])
def test_each_extra_is_named_where_it_lacks(machine: Machine, name: str, library: str) -> None:
    machine(system="Darwin")
    assert "usable, " in dict(overview())[name] and "not usable" not in dict(overview())[name]
    machine(system="Darwin", missing=library)
    assert dict(overview())[name].endswith(f'{library} is not installed: pip install "bitnet-inference[{name}]"')


@pytest.mark.parametrize(("system", "macos", "here"), [("Linux", "", "Linux"), ("Darwin", "14.7", "macOS 14.7")])
def test_core_ml_wants_a_new_mac(machine: Machine, system: str, macos: str, here: str) -> None:
    machine(system=system, macos=macos)
    about = dict(overview())["coreml"]
    assert f"not usable: programs with a state run on macOS 15 or newer, and this is {here}: copy packages" in about


def test_every_device_is_in_the_table() -> None:
    assert ("auto", *BACKENDS) == DEVICES
    assert [name for name, _ in overview()] == list(BACKENDS)
    assert "usable, " in dict(overview())["cpu"]


def test_a_model_runs_where_it_was_decided() -> None:
    model = load_model(CHECKPOINT, EngineConfig(device="auto", threads=1, isa="generic"))
    assert type(model).__name__ == "CpuModel"
    model.close()


def test_what_the_package_and_the_help_import_is_light(tmp_path: Path) -> None:
    heavy = ("torch", "triton", "mlx", "coremltools", "onnxruntime", "numpy")
    shown = "import sys; print([name for name in sys.argv[1:] if name in sys.modules])"
    code = f"import bitnet_inference, bitnet_inference.cli; {shown}"
    result = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    code = f"import bitnet_inference; bitnet_inference.LLM.load('default', threads=1).close(); {shown}"
    result = subprocess.run([sys.executable, "-c", code, *heavy[:5]], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("name", "value"), [("BITNET_THREADS", "0"), ("BITNET_THREADS", "two"), ("BITNET_ISA", "vax")])
def test_a_wrong_variable_is_named_where_it_counts(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidParams, match=f"^{name} is"):
        EngineConfig.from_env()
    given = EngineConfig.from_env(threads=2, isa="generic")
    assert (given.threads, given.isa) == (2, "generic")

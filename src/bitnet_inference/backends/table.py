"""The table of backends: what each is, and why it cannot be used here. Nothing heavy is imported before it must be."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import NamedTuple

from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends.coreml_library import require_macos
from bitnet_inference.backends.cuda_check import INSTALL, find_device
from bitnet_inference.config import EngineConfig, is_interpreted
from bitnet_inference.errors import Unavailable


class Backend(NamedTuple):
    """`what` computes; `find` gives a few words on what was found, and raises Unavailable with the reason.

    `needs`: what can be done where that names no cure.
    """

    what: str
    find: Callable[[EngineConfig], str]
    needs: str = ""


def is_apple_silicon() -> bool:
    """Whether this is a Mac whose GPU shares the memory of the processor."""
    return platform.system() == "Darwin" and platform.machine() == "arm64"


def _cuda(config: EngineConfig) -> str:
    device = find_device(config.device_index)
    if not is_interpreted():
        from bitnet_inference.backends.cuda_device import start_triton

        start_triton("cuda")
    return f"{device.name}, {told_bytes(device.free_bytes)} of {told_bytes(device.total_bytes)} free"


def _mlx(config: EngineConfig) -> str:
    _require("mlx", "mlx")
    return "the GPU of this Mac" if is_apple_silicon() else "without Metal, on the processor: slow"


def _coreml(config: EngineConfig) -> str:
    require_macos()
    _require("coreml", "coremltools")
    return "for its packages"


def _cpu(config: EngineConfig) -> str:
    from bitnet_inference import native

    return f"{native.isas()[0]} kernels"


def _onnx(config: EngineConfig) -> str:
    _require("onnx", "onnxruntime")
    return "for ONNX files"


def _reference(config: EngineConfig) -> str:
    return "slow, the specification, asked for by name"


def _require(name: str, library: str) -> None:
    if find_spec(library) is None:
        raise Unavailable(name, f"{library} is not installed", f'pip install "bitnet-inference[{name}]"')


BACKENDS: Mapping[str, Backend] = {
    "cuda": Backend(
        "NVIDIA GPUs",
        _cuda,
        f"where there is one of compute capability 8.0 or newer, install its driver, then {INSTALL}",
    ),
    "mlx": Backend("Apple GPUs", _mlx),
    "cpu": Backend("native kernels", _cpu),
    "coreml": Backend("Apple's Core ML", _coreml),
    "onnx": Backend("ONNX Runtime", _onnx),
    "reference": Backend("NumPy", _reference),
}


def overview() -> list[tuple[str, str]]:
    """Each backend with what was found, or why it cannot be used and what to install."""
    return [(name, f"{backend.what}: {_verdict(backend)}") for name, backend in BACKENDS.items()]


def _verdict(backend: Backend) -> str:
    try:
        return f"usable, {backend.find(EngineConfig())}"
    except Unavailable as error:
        return f"not usable: {error.why}: {error.install or backend.needs}"

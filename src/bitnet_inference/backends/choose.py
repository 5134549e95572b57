"""Which backend runs a model, and why one cannot."""

from __future__ import annotations

from dataclasses import replace

from bitnet_inference.config import GRAPH_DEVICES, EngineConfig
from bitnet_inference.errors import InvalidParams, OutOfMemory, Unavailable
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.ternarized import quantized
from bitnet_inference.model.contract import Model
from bitnet_inference.model.loader import Progress, require_sound


def load_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress | None = None) -> Model:
    """A model ready to run on `config.device`.

    `progress` is called with the weights read so far and in all. Raises FormatError where the checkpoint is not sound,
    Unavailable where this machine cannot run the device, InvalidParams for options that don't fit it, OutOfMemory.
    """
    config = resolved(checkpoint, config)
    require_sound(checkpoint)
    checkpoint = quantized(checkpoint, config.quantize)
    report = progress or (lambda done, total: None)
    if isinstance(checkpoint, OnnxCheckpoint):
        from bitnet_inference.backends.onnx import OnnxModel

        return OnnxModel(checkpoint, config, report)
    if isinstance(checkpoint, CoreMLCheckpoint):
        from bitnet_inference.backends.coreml import CoreMLModel

        return CoreMLModel(checkpoint, config, report)
    if config.device == "reference":
        from bitnet_inference.backends.reference import ReferenceModel

        return ReferenceModel(checkpoint, config, report)
    if config.device == "mlx":
        try:
            from bitnet_inference.backends.mlx import MlxModel
        except ImportError as error:
            why = f"the package mlx cannot be used ({error})"
            raise Unavailable("mlx", why, 'pip install "bitnet-inference[mlx]"') from error
        return MlxModel(checkpoint, config, report)
    try:
        return (_cuda_model if config.on_gpu else _cpu_model)(checkpoint, config, report)
    except MemoryError as error:
        size = f"{checkpoint.num_parameters / 1e6:.0f} million parameters"
        what = f"{checkpoint.path}: memory ran out while loading {size}"
        raise OutOfMemory(f"{what}: free memory, or choose a smaller model") from error


def _cpu_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    from bitnet_inference.backends.cpu import CpuModel

    return CpuModel(checkpoint, config, progress)


def _cuda_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    try:
        from bitnet_inference.backends.cuda import CudaModel
    except ImportError as error:  # of PyTorch or Triton
        why = f"it needs PyTorch and Triton ({error})"
        raise Unavailable(config.device, why, 'pip install "bitnet-inference[cuda]"') from error
    return CudaModel(checkpoint, config, progress)


def resolved(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    """The same with every "auto" decided for this machine and this model.

    Raises Unavailable, and InvalidParams for options that the model cannot be run with.
    """
    if isinstance(checkpoint, OnnxCheckpoint):
        return _fixed(config, "an ONNX file", "onnx", checkpoint.decoder.cache_dtype)
    if isinstance(checkpoint, CoreMLCheckpoint):
        return _fixed(config, "a Core ML package", "coreml", "float16")
    if config.device in GRAPH_DEVICES:
        kind = "ONNX file" if config.device == "onnx" else "Core ML package"
        raise InvalidParams(f'device is "{config.device}", but {checkpoint.path} is no {kind}: leave the device out')
    return config.resolve()


def _fixed(config: EngineConfig, what: str, device: str, cache_dtype: str) -> EngineConfig:
    """For what computes by itself; raises InvalidParams for options that say otherwise."""
    for name, given, fixed in (
        ("device", config.device, device),
        ("cache_dtype", config.cache_dtype, cache_dtype),
        ("quantize", config.quantize, "none"),
        ("head", config.head, "exact"),
    ):
        if given not in ("auto", fixed):
            raise InvalidParams(f'{name} is "{given}", but {what} runs with "{fixed}" only: leave it out')
    return replace(config, device=device, cache_dtype=cache_dtype).resolve()

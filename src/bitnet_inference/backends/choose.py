"""Which backend runs a model, and why one cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from bitnet_inference.backends.automatic import Choice, choose
from bitnet_inference.config import GRAPH_DEVICES, EngineConfig
from bitnet_inference.errors import InvalidParams, OutOfMemory, Unavailable
from bitnet_inference.formats.checkpoint import Checkpoint, require_sound
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.formats.ternarized import quantized
from bitnet_inference.model.contract import Model
from bitnet_inference.model.loader import Progress

Loader = Callable[[Checkpoint, EngineConfig, Progress], Model]


def load_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress | None = None) -> Model:
    """A model ready to run on `config.device`.

    `progress` is called with the weights read so far and in all. Raises FormatError where the checkpoint is not sound,
    Unavailable where this machine cannot run the device, InvalidParams for options that don't fit it, OutOfMemory.
    """
    config = resolved(checkpoint, config)
    require_sound(checkpoint)
    checkpoint = quantized(checkpoint, config.quantize)
    if config.backend not in _LOADERS:
        raise Unavailable(config.backend, "this version cannot compute on it: choose another device")
    return _LOADERS[config.backend](checkpoint, config, progress or (lambda done, total: None))


def resolved(checkpoint: Checkpoint, config: EngineConfig) -> EngineConfig:
    """The same with every "auto" decided for this machine and this model; see decided."""
    return decided(checkpoint, config).config


def decided(checkpoint: Checkpoint, config: EngineConfig, num_cache_tokens: int | None = None) -> Choice:
    """On what a model runs, with a cache of so many tokens, and why.

    Raises Unavailable, InvalidParams for options that the model cannot be run with, and OutOfMemory.
    """
    if isinstance(checkpoint, OnnxCheckpoint):
        return _fixed(config, "an ONNX file", "onnx", checkpoint.decoder.cache_dtype)
    if isinstance(checkpoint, CoreMLCheckpoint):
        return _fixed(config, "a Core ML package", "coreml", "float16")
    if config.device in GRAPH_DEVICES:
        kind = "ONNX file" if config.device == "onnx" else "Core ML package"
        raise InvalidParams(f'device is "{config.device}", but {checkpoint.path} is no {kind}: leave the device out')
    return choose(checkpoint, config, num_cache_tokens)


def _fixed(config: EngineConfig, what: str, device: str, cache_dtype: str) -> Choice:
    """For what computes by itself; raises InvalidParams for options that say otherwise."""
    for name, given, fixed in (
        ("device", config.device, device),
        ("cache_dtype", config.cache_dtype, cache_dtype),
        ("quantize", config.quantize, "none"),
        ("head", config.head, "exact"),
        ("embedding", config.embedding, "exact"),
        ("gpu_layers", config.gpu_layers or "none", "none"),
        ("fallback", config.fallback, "none"),
    ):
        if given not in ("auto", fixed):
            raise InvalidParams(f'{name} is "{given}", but {what} runs with "{fixed}" only: leave it out')
    return Choice(replace(config, device=device, cache_dtype=cache_dtype).resolve(), f"it is {what}")


def load_fallback(checkpoint: Checkpoint, config: EngineConfig) -> Callable[[], Model] | None:
    """What loads the model that goes on where the one of this resolved configuration fails; None where none shall."""
    return None if config.fallback == "none" else lambda: load_model(checkpoint, config.on_cpu())


def _onnx(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    from bitnet_inference.backends.onnx import OnnxModel

    assert isinstance(checkpoint, OnnxCheckpoint)
    return OnnxModel(checkpoint, config, progress)


def _coreml(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    from bitnet_inference.backends.coreml import CoreMLModel

    assert isinstance(checkpoint, CoreMLCheckpoint)
    return CoreMLModel(checkpoint, config, progress)


def _reference(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    from bitnet_inference.backends.reference import ReferenceModel

    return ReferenceModel(checkpoint, config, progress)


def _mlx(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    try:
        from bitnet_inference.backends.mlx import MlxModel
    except ImportError as error:
        why = f"the package mlx cannot be used ({error})"
        raise Unavailable("mlx", why, 'pip install "bitnet-inference[mlx]"') from error
    return MlxModel(checkpoint, config, progress)


def _cuda(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    if config.gpus > 1:
        from bitnet_inference.backends.cuda_shards import ShardedModel

        return ShardedModel(checkpoint, config, progress)
    from bitnet_inference.backends.cpu import CpuModel
    from bitnet_inference.backends.split import load_stages

    try:
        from bitnet_inference.backends.cuda import CudaModel
    except ImportError as error:  # of PyTorch or Triton, or of what they are made of
        why = f"it needs PyTorch and Triton ({error})"
        raise Unavailable(config.device, why, 'pip install "bitnet-inference[cuda]"') from error
    if config.gpu_layers is None:
        return CudaModel(checkpoint, config, progress)
    total = checkpoint.config.num_layers
    cut = total - int(config.gpu_layers)
    first, last = (
        _part_of(progress, checkpoint.num_parameters, *each) for each in ((0, cut / total), (cut / total, 1))
    )
    return load_stages(
        lambda: CpuModel(checkpoint, config.on_cpu().resolve(), first, range(cut)),
        lambda: CudaModel(checkpoint, config, last, range(cut, total)),
    )


def _part_of(progress: Progress, whole: int, begin: float, end: float) -> Progress:
    return lambda done, total: progress(int(whole * (begin + (end - begin) * done / total)), whole)


def _cpu(checkpoint: Checkpoint, config: EngineConfig, progress: Progress) -> Model:
    from bitnet_inference.backends.cpu import CpuModel

    try:
        return CpuModel(checkpoint, config, progress)
    except MemoryError as error:
        size = f"{checkpoint.num_parameters / 1e6:.0f} million parameters"
        what = f"{checkpoint.path}: memory ran out while loading {size}"
        raise OutOfMemory(f"{what}: free memory, or choose a smaller model") from error


_LOADERS: Mapping[str, Loader] = {
    "cuda": _cuda,
    "mlx": _mlx,
    "cpu": _cpu,
    "coreml": _coreml,
    "onnx": _onnx,
    "reference": _reference,
}

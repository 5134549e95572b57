"""Which backend runs a model, and why one cannot."""

from __future__ import annotations

from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import OutOfMemory
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.ternarized import quantized
from bitnet_inference.model.contract import Model
from bitnet_inference.model.loader import Progress, require_sound


def load_model(checkpoint: Checkpoint, config: EngineConfig, progress: Progress | None = None) -> Model:
    """A model ready to run on `config.device`.

    `progress` is called with the weights read so far and in all. Raises FormatError where the checkpoint is not sound,
    Unavailable where this machine cannot run the device, InvalidParams for options that don't fit it, OutOfMemory.
    """
    config = config.resolve()
    require_sound(checkpoint)
    checkpoint = quantized(checkpoint, config.quantize)
    report = progress or (lambda done, total: None)
    if config.device == "reference":
        from bitnet_inference.backends.reference import ReferenceModel

        return ReferenceModel(checkpoint, config, report)
    from bitnet_inference.backends.cpu import CpuModel

    try:
        return CpuModel(checkpoint, config, report)
    except MemoryError as error:
        size = f"{checkpoint.num_parameters / 1e6:.0f} million parameters"
        what = f"{checkpoint.path}: memory ran out while loading {size}"
        raise OutOfMemory(f"{what}: free memory, or choose a smaller model") from error

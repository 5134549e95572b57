"""On which device a model runs where nobody has said it, how many of its layers, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends.cuda_check import CudaDevice, find_device
from bitnet_inference.backends.sizes import estimate_bytes
from bitnet_inference.backends.table import BACKENDS, is_apple_silicon
from bitnet_inference.config import EngineConfig, is_interpreted
from bitnet_inference.errors import BackendError, InvalidParams, OutOfMemory, Unavailable
from bitnet_inference.formats.checkpoint import Checkpoint

SCRATCH_BYTES = 512 << 20  # of a GPU, for the values of a step, captured graphs and libraries
USUAL_CACHE_TOKENS = 4096  # must fit beside the model where nobody says how many


class Choice(NamedTuple):
    """Where a model runs: `config` has no "auto" left. `why` in a few words; `note` is what its user should know.

    `is_open`: nobody has asked for this device.
    """

    config: EngineConfig
    why: str
    note: str = ""
    is_open: bool = False

    @property
    def device(self) -> str:
        """Where it computes, and how many layers on the first of two devices."""
        count = self.config.gpu_layers
        return self.config.device if count is None else f"{self.config.device} (the last {count}) and cpu"

    def instead(self, error: BackendError | OutOfMemory) -> Choice | None:
        """The CPU, where the device raises this before it has computed anything; None where it was asked for."""
        if not self.is_open or self.config.device == "cpu":
            return None
        why = f"{self.config.device} failed while the model was loaded: {error}"
        return _cpu(self.config, why, f"on the CPU: {why}")


def choose(checkpoint: Checkpoint, config: EngineConfig, num_cache_tokens: int | None = None) -> Choice:
    """The best device that works here and holds the model and a cache of so many tokens.

    A device that is asked for is taken. Raises Unavailable, InvalidParams for a GPU where only the CPU can, and
    OutOfMemory where not even a layer fits beside the head on the GPU that was asked for.
    """
    num_cache_tokens = num_cache_tokens or min(checkpoint.config.max_positions, USUAL_CACHE_TOKENS)
    if checkpoint.config.experts is not None and config.device != "reference":
        return _of_experts(checkpoint, config)
    if config.device == "auto":
        return _automatic(checkpoint, config, num_cache_tokens)._replace(is_open=not isinstance(config.gpu_layers, int))
    try:
        if config.gpu_layers is not None:
            return _shared(checkpoint, config, find_device(config.device_index), num_cache_tokens)
        found = BACKENDS[config.backend].find(config)
    except Unavailable as error:
        raise Unavailable(config.device, error.why, error.install or 'choose device="cpu"') from None
    return Choice(config.resolve(), f"asked for; {found}")


def _of_experts(checkpoint: Checkpoint, config: EngineConfig) -> Choice:
    if config.device not in ("auto", "cpu") or config.gpu_layers is not None:
        name, value = ("device", config.device) if config.gpu_layers is None else ("gpu_layers", config.gpu_layers)
        why = f'{name} is "{value}", but {checkpoint.path} has experts, which "cpu" and "reference" compute'
        raise InvalidParams(f"{why}: leave it out")
    return _cpu(config, "asked for" if config.device == "cpu" else "it has experts, which the CPU computes")


def _automatic(checkpoint: Checkpoint, config: EngineConfig, num_cache_tokens: int) -> Choice:
    if alone := _of_the_cpu_alone(config):
        return _cpu(config, alone)
    try:
        device = _usable_gpu()
    except Unavailable as error:
        if isinstance(config.gpu_layers, int):
            raise Unavailable("cuda", error.why, error.install or "leave gpu_layers out") from None
        return _without_cuda(config, error)
    on_gpu = replace(config, device="cuda")
    if config.gpu_layers is not None:
        try:
            return _shared(checkpoint, on_gpu, device, num_cache_tokens)
        except OutOfMemory as error:
            return _cpu(config, str(error), f"on the CPU: {error}")
    needed = estimate_bytes(checkpoint, on_gpu.resolve(), num_cache_tokens)
    if needed <= device.free_bytes - SCRATCH_BYTES:
        return Choice(on_gpu.resolve(), f"{_about(device)}, the model takes {told_bytes(needed)}")
    why = f"{_about(device)}, the model takes {told_bytes(needed)} with a cache of {num_cache_tokens} tokens"
    return _cpu(config, why, f'on the CPU: {why}: gpu_layers="auto" puts a part of it on the GPU')


def _usable_gpu() -> CudaDevice:
    if is_interpreted():
        raise Unavailable("cuda", "its kernels are interpreted (TRITON_INTERPRET)")
    return find_device()


def _without_cuda(config: EngineConfig, error: Unavailable) -> Choice:
    if is_apple_silicon():
        try:
            return Choice(replace(config, device="mlx").resolve(), BACKENDS["mlx"].find(config))
        except Unavailable as missing:
            error = missing
    why = error.why + (f": {error.install}" if error.install else "")
    return _cpu(config, why, f"the GPU is not used: {why}" if error.install else "")  # what is lacking can be had


def _cpu(config: EngineConfig, why: str, note: str = "") -> Choice:
    return Choice(config.on_cpu().resolve(), why, note)


def _of_the_cpu_alone(config: EngineConfig) -> str:
    """An option that the GPUs here do not have."""
    if config.gpu_layers is not None:
        return ""
    for name, value, is_special in (
        ("isa", config.isa, config.isa != "auto"),
        ("ternary_format", config.ternary_format, config.ternary_format != "auto"),
        ("embedding", config.embedding, config.embedding != "exact"),
        ("head", config.head, config.head == "int6" or (config.head == "int8" and is_apple_silicon())),
    ):
        if is_special:
            return f'{name} is "{value}", which the CPU alone has here'
    return ""


def _shared(checkpoint: Checkpoint, config: EngineConfig, device: CudaDevice, num_cache_tokens: int) -> Choice:
    """As many of the last layers as asked for, or as fit; where these are all, nothing is shared."""
    resolved, total = config.resolve(), checkpoint.config.num_layers
    stages = (range(start, total) for start in reversed(range(total)))
    sizes = [estimate_bytes(checkpoint, resolved, num_cache_tokens, layers) for layers in stages]
    if isinstance(config.gpu_layers, int):
        count = min(config.gpu_layers, total)
    else:
        count = sum(size <= device.free_bytes - SCRATCH_BYTES for size in sizes)
    if count == 0:
        needed = f"a layer and the head take {told_bytes(sizes[0])}"
        raise OutOfMemory(f'{_about(device)}, {needed} with a cache of {num_cache_tokens} tokens: choose device="cpu"')
    why = f"{_about(device)}, {count} of {total} layers and the head take {told_bytes(sizes[count - 1])}"
    return Choice(replace(resolved, gpu_layers=None if count == total else count), why)


def _about(device: CudaDevice) -> str:
    return f"{device.name} has {told_bytes(device.free_bytes)} free"

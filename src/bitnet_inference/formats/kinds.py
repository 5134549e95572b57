"""Which kind of model a path holds, by its bytes, and the reader for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bitnet_inference.errors import FormatError, InvalidParams, NotFound, Unsupported
from bitnet_inference.formats.checkpoint import Checkpoint, ModelConfig
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.coreml_package import MANIFEST
from bitnet_inference.formats.gguf import GgufCheckpoint
from bitnet_inference.formats.gpu import FILES, GpuCheckpoint, is_gpu_folder
from bitnet_inference.formats.hf import HuggingFaceCheckpoint
from bitnet_inference.formats.json_files import MAX_FLOAT, MIN_FLOAT
from bitnet_inference.formats.meta import MetaCheckpoint
from bitnet_inference.formats.onnx import FILES as ONNX_FILES
from bitnet_inference.formats.onnx import OnnxCheckpoint, find_onnx
from bitnet_inference.formats.packed import PackedCheckpoint, is_packed
from bitnet_inference.formats.safetensors_files import INDEX, SINGLE
from bitnet_inference.own_files import require_fetched

_HUGGING_FACE = "a Hugging Face folder"
_GGUF = "a GGUF file"
_META = "a Meta checkpoint"
_PACKED = "a packed file"
_GPU = "a checkpoint of Microsoft's GPU code"
_ONNX = "an ONNX file"
_COREML = "a Core ML package"
_GRAPHS = (_ONNX, _COREML)  # which compute by themselves
_READERS: dict[str, Callable[[Path], Checkpoint]] = {
    _HUGGING_FACE: HuggingFaceCheckpoint,
    _GGUF: GgufCheckpoint,
    _META: MetaCheckpoint,
    _PACKED: PackedCheckpoint,
    _GPU: GpuCheckpoint,
    _ONNX: OnnxCheckpoint,
    _COREML: CoreMLCheckpoint,
}
# The file that gives a folder away, and what the folder then is; the first that is there counts.
_FOLDERS = (
    (MANIFEST, _COREML),
    ("config.json", _HUGGING_FACE),
    ("params.json", _META),
)
_MIN_ROPE_FACTOR = 1e-6
_WEIGHTS = (SINGLE, INDEX)  # a folder with these is read from them, whatever else it holds
_MAGICS = ((b"GGUF", _GGUF), (b"PK\x03\x04", "a PyTorch file"), (b"\x08", _ONNX))


def open_checkpoint(path: str | Path, *, arm_i2_s: bool = False) -> Checkpoint:
    """Open the model under a path, reading no weights.

    `arm_i2_s`: see GgufCheckpoint. Raises NotFound where there is nothing, Unsupported for a kind that is not read,
    naming it, FormatError for what is no model at all or breaks its format, and InvalidParams for `arm_i2_s` where
    nothing is I2_S.
    """
    path = Path(path)
    is_folder = os.path.isdir(path)
    if is_folder and (folder := _onnx_folder(path)):
        kind, path = _ONNX, folder
    else:
        kind = _kind_of_folder(path) if is_folder else _kind_of_file(path)
    if kind not in _READERS:
        raise Unsupported(f"{path}: {kind} is not supported: use {', '.join(_READERS)}")
    if arm_i2_s and kind != _GGUF:
        raise InvalidParams(f"{path} is {kind}: only GGUF files have I2_S weights: leave arm_i2_s out")
    checkpoint = GgufCheckpoint(path, arm=True) if arm_i2_s else _READERS[kind](path)
    if kind not in _GRAPHS:  # which have rotations of their own
        _check_rotations(path, checkpoint.config)
        _check_numbers(path, checkpoint.config)
    return checkpoint


def _check_rotations(path: Path, config: ModelConfig) -> None:
    """Raises FormatError for bases and factors that make rotary frequencies larger than kernels take."""
    bases = [config.rope_theta, *([config.local.rope_theta] if config.local else [])]
    scaling = config.rope_scaling
    factors = (scaling.factors or (scaling.factor,)) if scaling else ()
    if min(bases) < 1:
        raise FormatError(path, "rope_theta", f"{min(bases):g} is below 1: correct it")
    if factors and min(factors) < _MIN_ROPE_FACTOR:
        raise FormatError(
            path, "rope_scaling", f"a factor of {min(factors):g} is below {_MIN_ROPE_FACTOR:g}: correct it"
        )


def _check_numbers(path: Path, config: ModelConfig) -> None:
    """Raises FormatError where what follows from several numbers of a file has no place in float32."""
    found = {"scores are multiplied by": config.score_scale, "embeddings are multiplied by": config.embed_scale}
    for what, value in (found | {"the epsilon of norms is": config.norm_eps}).items():
        if not MIN_FLOAT < value < MAX_FLOAT:
            raise FormatError(path, "", f"{what} {value:g}, which is no number of float32: correct the configuration")


def kind_of(checkpoint: Checkpoint) -> str:
    """What a checkpoint was read from, as in "a GGUF file"; empty where it was read from nothing."""
    return next((kind for kind, reader in _READERS.items() if reader is type(checkpoint)), "")


def refuse_graph(checkpoint: Checkpoint) -> None:
    """Raises Unsupported for an ONNX file and a Core ML package, where single weights are needed."""
    if kind_of(checkpoint) in _GRAPHS:
        checkpoint.matrix("")


def _onnx_folder(path: Path) -> Path | None:
    """Where the ONNX file of a folder lies that holds no other weights."""
    names = (*_WEIGHTS, *(name for name, kind in _FOLDERS if kind != _HUGGING_FACE))
    others = is_gpu_folder(path) or any(os.path.lexists(path / name) for name in names)
    return None if others else find_onnx(path)


def _kind_of_folder(path: Path) -> str:
    if is_gpu_folder(path):  # before the others: a config.json may stand beside the weights
        return _GPU
    for name, kind in _FOLDERS:
        if os.path.exists(path / name) or (kind == _HUGGING_FACE and os.path.islink(path / name)):  # to nowhere
            return kind
    if os.path.exists(path / "adapter_config.json"):
        raise Unsupported(f"{path}: is an adapter, and no model: merge it into its model, and give that")
    if any(path.glob("*.safetensors")):
        raise FormatError(path, "config.json", "is missing beside the weights: download it too")
    if files := sorted(path.glob("*.gguf")):
        raise FormatError(path, "", f"holds GGUF files: give one of them, such as {files[0].name}")
    if any(path.glob("consolidated.*.pth")):
        raise FormatError(path, "params.json", "is missing beside the weights: download it too")
    if files := sorted(path.glob("*.onnx")):
        raise FormatError(
            path, "", f"holds none of {', '.join(ONNX_FILES)}: give one of its files, such as {files[0].name}"
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise FormatError(path, "", "cannot be read: check its permissions")
    raise FormatError(path, "", f"holds no model (none of {', '.join(name for name, _ in _FOLDERS)}): give its folder")


def _kind_of_file(path: Path) -> str:
    if os.path.exists(path) and not os.path.isfile(path):
        raise FormatError(path, "", "is neither a file nor a folder: give the path of a model")
    require_fetched(path)
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file or folder: check the path") from error
    except (OSError, ValueError) as error:
        raise FormatError(path, "", f"cannot be read ({type(error).__name__}): check its permissions") from error
    if path.suffix == ".safetensors":
        if is_packed(path):
            return _PACKED
        raise FormatError(path, "", "is a part of a model: give the folder that holds it and its config.json")
    if path.name in FILES:
        raise FormatError(path, "", "is a part of a model: give the folder that holds it")
    if path.name.startswith("pytorch_model") and path.suffix == ".bin":
        raise FormatError(path, "", "is a part of a model: give the folder that holds it and its config.json")
    if path.suffix == ".pth":
        raise FormatError(path, "", "is a part of a model: give the folder that holds it and its params.json")
    if path.suffix == ".onnx":
        return _ONNX  # whatever it begins with, its reader knows better what is wrong
    for magic, kind in _MAGICS:
        if start.startswith(magic):
            return kind
    raise FormatError(path, "", "is no model file that is known: give a folder with config.json")

"""The weights of a Hugging Face folder: safetensors files, or else what torch.save wrote, of which no code is run."""

from __future__ import annotations

from pathlib import Path

from bitnet_inference.formats.safetensors_files import SAFETENSORS, Layout, TensorFiles, open_tensors
from bitnet_inference.formats.torch_files import read_torch_file

_TORCH = Layout("pytorch_model.bin", "pytorch_model.bin.index.json", lambda path: read_torch_file(path).items())
_ZIP = b"PK\x03\x04"  # files of older versions are nothing but a pickle


def open_weights(folder: Path) -> tuple[TensorFiles, str]:
    """The tensors of a folder, and what kind of files they are in; raises as open_tensors."""
    if not SAFETENSORS.is_in(folder) and _TORCH.is_in(folder) and not _is_pickle(folder / _TORCH.single):
        return open_tensors(folder, _TORCH), "files of torch.save"
    return open_tensors(folder), "safetensors files"


def _is_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP)) != _ZIP
    except OSError:  # its reader says what is wrong
        return False

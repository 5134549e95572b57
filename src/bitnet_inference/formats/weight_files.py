"""The weights of a Hugging Face folder: safetensors files, or else what torch.save wrote, of which no code is run."""

from __future__ import annotations

import os
from pathlib import Path

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.json_files import file_size
from bitnet_inference.formats.safetensors_files import SAFETENSORS, Layout, TensorFiles, inside, open_tensors
from bitnet_inference.formats.torch_files import read_torch_file

_TORCH = Layout("pytorch_model.bin", "pytorch_model.bin.index.json", lambda path: read_torch_file(path).items())
_ZIP = b"PK\x03\x04"  # files of older versions are nothing but a pickle


def open_weights(folder: Path) -> tuple[TensorFiles, str]:
    """The tensors of a folder, and what kind of files they are in; raises as open_tensors."""
    if SAFETENSORS.is_in(folder):
        return open_tensors(folder), "safetensors files"
    if not _TORCH.is_in(folder) and any(folder.glob("pytorch_model-*.bin")):
        raise FormatError(folder, _TORCH.index, "is missing beside the weights: download it too")
    if _TORCH.is_in(folder) and not _is_pickle(folder):
        return open_tensors(folder, _TORCH), "files of torch.save"
    return open_tensors(folder), "safetensors files"  # which says what is there instead


def _is_pickle(folder: Path) -> bool:
    """Whether the one file is no zip file; raises FormatError for a link out of the folder and what is no file."""
    if not os.path.lexists(folder / _TORCH.single):
        return False
    path = inside(folder, _TORCH.single)
    file_size(path)  # to open a pipe is to wait
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP)) not in (_ZIP, b"")
    except OSError:  # its reader says what is wrong
        return False

"""Which NVIDIA GPU there is, and why none can be used."""

from __future__ import annotations

import ctypes
import sys
import warnings
from importlib.util import find_spec
from typing import Any, NamedTuple

from bitnet_inference.config import available_bytes, is_interpreted
from bitnet_inference.errors import Unavailable, said

LEAST_CAPABILITY = (8, 0)  # Ampere: bfloat16 and the integer products that the kernels are written for
INSTALL = 'pip install "bitnet-inference[cuda]"'
_DRIVER = "see nvidia-smi; update NVIDIA's driver, or install a PyTorch for its CUDA version (see pytorch.org)"


class CudaDevice(NamedTuple):
    """A GPU that can be used. `free_bytes` of its memory nobody has taken."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def find_device(index: int = 0) -> CudaDevice:
    """The GPU of this number. Raises Unavailable; PyTorch is imported only where NVIDIA's driver is.

    Where kernels are interpreted, the processor stands for it.
    """
    if is_interpreted():
        import_torch()
        return CudaDevice("Triton's interpreter", LEAST_CAPABILITY, available_bytes(), available_bytes())
    if not has_driver():
        raise Unavailable("cuda", "no NVIDIA driver was found")
    torch = import_torch()
    count = _count(torch)
    if index >= count:
        raise Unavailable("cuda", f"there are {count} GPUs, numbered from 0, and none is {index}")
    try:
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        raise Unavailable("cuda", f"GPU {index} does not answer: {said(error)}") from error
    if capability < LEAST_CAPABILITY:
        least, found = ("{}.{}".format(*each) for each in (LEAST_CAPABILITY, capability))
        raise Unavailable("cuda", f"{name} has compute capability {found}, at least {least} is needed")
    return CudaDevice(name, capability, free_bytes, total_bytes)


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed: asked of the system, because importing PyTorch takes seconds."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def import_torch() -> Any:
    """PyTorch, where Triton is too. Raises Unavailable."""
    for library in ("torch", "triton"):
        if find_spec(library) is None:
            raise Unavailable("cuda", f"{library} is not installed", INSTALL)
    try:
        import torch
        import triton  # noqa: F401  # whether it can be, is the question
    except (ImportError, OSError) as error:  # a library of the system that they need
        raise Unavailable("cuda", f"torch or triton cannot be imported: {said(error)}", INSTALL) from error
    return torch


def _count(torch: Any) -> int:
    """How many GPUs PyTorch sees. Raises Unavailable where there are none."""
    if torch.version.cuda is None:
        raise Unavailable("cuda", "this PyTorch is built without CUDA", "pip install --force-reinstall torch")
    with warnings.catch_warnings(record=True) as warned:  # that the driver is too old, is a warning
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        why, cure = (said(warned[0].message), _DRIVER) if warned else ("PyTorch finds no NVIDIA GPU", "")
        raise Unavailable("cuda", why, cure)
    return count

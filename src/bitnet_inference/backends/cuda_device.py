"""The GPU that the name of a device stands for, its stream, and what is said when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EROFS
from subprocess import CalledProcessError
from threading import RLock

import torch
import triton
from triton.errors import TritonError

from bitnet_inference.config import available_bytes
from bitnet_inference.errors import KernelError, OutOfMemory, Unavailable, said

MIN_CAPABILITY = (8, 0)
CAPTURING = RLock()  # PyTorch captures one graph at a time in a process, and frees no memory meanwhile
_MAX_SHOWN = 200


class Gpu:
    """A GPU and a stream of its own, on which all of a model's work runs in order.

    Under Triton's interpreter (TRITON_INTERPRET=1) it is the processor: then `is_real` is False, and nothing runs
    beside Python.
    """

    def __init__(self, name: str) -> None:
        """`name`: "cuda" or "cuda:N". Raises Unavailable."""
        self.is_real = not triton.knobs.runtime.interpret
        self.device = _find(name) if self.is_real else torch.device("cpu")
        if self.is_real:
            start_triton(name)
        self.stream = torch.cuda.Stream(self.device) if self.is_real else None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within it, work is queued on the stream; what PyTorch and Triton raise becomes OutOfMemory or KernelError."""
        try:
            if self.stream is None:
                yield
                return
            with torch.cuda.stream(self.stream):
                yield
        except (RuntimeError, TritonError) as error:
            # Graphs and modules take memory without PyTorch's allocator.
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                cure = "free memory on it, lower max_cache_tokens, or choose a smaller model"
                raise OutOfMemory(f"the memory of {self.device} ran out: {cure}") from error
            cure = 'start the process again, or choose device="cpu"'
            raise KernelError(f"{self.device} failed: {shown(error)}: {cure}") from error

    @property
    def free_bytes(self) -> int:
        """Memory that nobody uses."""
        if not self.is_real:
            return available_bytes()
        with CAPTURING:
            torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that is copied from and to the GPU without waiting."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_real)

    def event(self) -> torch.cuda.Event | None:
        """What can be recorded on the stream and waited for; None where nothing runs beside Python."""
        return torch.cuda.Event() if self.is_real else None

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def free(self) -> None:
        """Give memory that nobody uses any more back to the system."""
        if self.is_real:
            self.wait()
            with CAPTURING:
                torch.cuda.empty_cache()


def start_triton(name: str) -> None:
    """Have Triton build its launcher, unless it is in its cache: that takes a C compiler. Raises Unavailable."""
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, AssertionError, CalledProcessError) as error:
        why = said(error, _MAX_SHOWN).rstrip(". ")
        cure = "install gcc and Python's headers (python3-dev)"
        if isinstance(error, OSError) and error.errno in (EACCES, EROFS):
            cure = "set TRITON_CACHE_DIR to a folder that can be written"
        cure += ', or choose device="cpu"'
        raise Unavailable(name, f"Triton does not start: {why}", cure) from error


def _find(name: str) -> torch.device:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, one too old, or a PyTorch without CUDA
        built = "has no CUDA" if torch.version.cuda is None else f"has CUDA {torch.version.cuda}"
        cure = 'see nvidia-smi, and install a PyTorch for its CUDA version, or choose device="cpu"'
        raise Unavailable(name, f"{shown(error)} (this PyTorch {built})", cure) from error
    index, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        raise Unavailable(name, f"there are {count} GPUs, counted from 0", "choose one of these")
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        found = f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}"
        raise Unavailable(name, f"{found}, {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is needed", 'choose device="cpu"')
    return torch.device("cuda", index)


def shown(error: BaseException) -> str:
    """What a library says, in a line: Triton's reason, or what else begins the message."""
    while isinstance(error.__cause__, TritonError):  # the kernel does not compile because a function of it does not
        error = error.__cause__
    reason = getattr(error, "error_message", None)  # without the source that Triton shows before it
    lines = [" ".join(reason.split())] if reason else str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_MAX_SHOWN].rstrip(". ")

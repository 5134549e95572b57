"""Kernels that start while the one before them still runs, where a GPU can (compute capability 9.0 and higher).

They are placed on its processors, where `wait_for_last` has them wait until all that it writes can be seen. Fetching
their weights into the second cache before that was tried on an H200, and is 4% slower.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)


@lru_cache
def early(device: torch.device) -> dict[str, Any]:
    """What a launch on a device says to start early: the constant EARLY of the kernel, which has to wait then."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def wait_for_last(EARLY: tl.constexpr) -> None:
    """Wait for the kernel before this one, and let the next begin: nothing may be read that a kernel writes before."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()

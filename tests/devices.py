"""Which devices can be tried: their packages are in the extra "devices"."""

from __future__ import annotations

import os
from importlib.util import find_spec

# Tests, and the packages that they stand on.
NEEDS = {"test_coreml*": ("coremltools",), "test_cuda*": ("torch", "triton"), "test_mlx*": ("mlx",)}


def has(*packages: str) -> bool:
    """Whether tests that need these packages run: all do where CI runs."""
    return "CI" in os.environ or all(map(find_spec, packages))

"""What CUDA kernels are compiled for: each file of kernels lists what known models launch, for scripts/check-cuda."""

from __future__ import annotations

from typing import Any, NamedTuple

# Products of 2B-4T and of the model in this package (rows, columns), and numbers of tokens: every kind of program.
SHAPES = ((3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912), (512, 256), (256, 256), (1536, 256), (256, 768))
TOKENS = (1, 16, 32, 64, 512, 4096)


class Variant(NamedTuple):
    """One specialisation of a Triton kernel, as `triton.compile` and those who read its machine code want it.

    `signature` has the type of every argument that is no constant: "*fp32" or "i32"; with ":16" behind it ("*fp32:16")
    its address or value is a multiple of 16. `constants` are all others but EARLY (cuda_early), which every capability
    has its own value of. `instructions` are families of SASS, such as "IMMA", one of which its code
    must have on every device; none: whatever comes. `capabilities` are those that launch it; none: all.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    instructions: tuple[str, ...] = ()
    capabilities: tuple[int, ...] = ()

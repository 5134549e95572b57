"""What a card can do: how fast it copies, and how fast it multiplies int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gpu_clock import seconds_each

COPY_BYTES = 1 << 30  # far more than any card's cache
SIDE = 8192  # of the matrices that are multiplied


@dataclass(frozen=True)
class Card:
    """`bandwidth`: bytes read and written a second by a copy; `int8_peak`: multiply-adds a second."""

    device: torch.device
    bandwidth: float
    int8_peak: float


def measure_card(device: torch.device) -> Card:
    """Both limits, measured now. Without a card they are those of a small problem on the CPU."""
    small = device.type != "cuda"
    source = torch.empty((1 << 20) if small else COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_each([lambda: target.copy_(source)], device)
    side = 256 if small else SIDE
    a = torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device)
    b = torch.randint(-1, 2, (side, side), dtype=torch.int8, device=device).t()  # columns contiguous, as cuBLAS wants
    product_s = seconds_each([lambda: torch._int_mm(a, b)], device)
    return Card(device, 2 * source.numel() / copy_s, side**3 / product_s)


def describe(card: Card) -> list[tuple[str, str]]:
    """Names and values."""
    speeds = f"{card.bandwidth / 1e9:.0f} GB/s copied (read and written), "
    speeds += f"{card.int8_peak / 1e12:.0f} trillion int8 multiply-adds/s"
    if card.device.type != "cuda":
        return [("card", "none: Triton's interpreter, whose times say nothing"), ("limits", speeds)]
    about = torch.cuda.get_device_properties(card.device)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    name = f"{about.name}, compute capability {about.major}.{about.minor}, {about.total_memory / 1e9:.0f} GB"
    return [("card", name), ("with", versions), ("limits", speeds)]

"""Products of codes on a GPU, tried before a model is put there: a GPU that computes others is not used."""

from __future__ import annotations

import numpy as np
import torch

from bitnet_inference.backends.cuda_products import TernaryWeight, ternary
from bitnet_inference.backends.reference import bit_linear
from bitnet_inference.errors import KernelError
from bitnet_inference.formats.checkpoint import Ternary
from bitnet_inference.ternary import quantize_rows

_SHAPE = (96, 640)
_NUM_TOKENS = (1, 40)  # few, which one kernel multiplies, and many, which another one does
_SCALE = 0.75


def check_products(device: torch.device) -> None:
    """Raises KernelError where a ternary product is not the reference's, to the bit."""
    random = np.random.default_rng(0)
    codes = random.integers(-1, 2, _SHAPE, np.int8)
    weight = TernaryWeight([Ternary(codes, "codes", _SHAPE, _SCALE)], device)
    for count in _NUM_TOKENS:
        x = random.normal(size=(count, _SHAPE[1])).astype(np.float32)
        quantised, scales = (torch.from_numpy(each).to(device) for each in quantize_rows(x))
        output = torch.empty(count, _SHAPE[0], device=device)
        ternary(weight, quantised, scales, output, None)
        if not np.array_equal(output.cpu().numpy(), bit_linear(x, codes, _SCALE)):
            why = f"{device} computes wrong products of {count} tokens"
            raise KernelError(f'{why}: report it with your versions of torch and triton, and choose device="cpu"')

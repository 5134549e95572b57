"""Products on a GPU, tried before a model is put there: a GPU that computes others is not used."""

from __future__ import annotations

import numpy as np
import torch

from bitnet_inference.backends.cuda_dense import dense
from bitnet_inference.backends.cuda_products import TernaryWeight, ternary
from bitnet_inference.backends.cuda_weights import DenseWeight
from bitnet_inference.backends.reference import bit_linear, dense_matrix
from bitnet_inference.errors import KernelError
from bitnet_inference.formats.checkpoint import Dense, Ternary
from bitnet_inference.ternary import quantize_rows

_SHAPE = (96, 640)
_NUM_TOKENS = (1, 40)  # few, which one kernel multiplies, and many, which another one does
_SCALE = 0.75
_MAX_ERROR = 1e-4  # of dense products, relative RMS


def check_products(device: torch.device) -> None:
    """Raises KernelError where a ternary product is not the reference's, to the bit, or a dense one not close to it.

    Dense ones, because Triton has compiled sums of several products in a loop to wrong code for compute capability 10.
    """
    random = np.random.default_rng(0)
    codes = random.integers(-1, 2, _SHAPE, np.int8)
    weight = TernaryWeight([Ternary(codes, "codes", _SHAPE, _SCALE)], device)
    bits = (random.normal(size=_SHAPE).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    matrix = Dense(bits, "bfloat16")
    floats = DenseWeight([matrix], device)
    for count in _NUM_TOKENS:
        x = random.normal(size=(count, _SHAPE[1])).astype(np.float32)
        quantised, scales = (torch.from_numpy(each).to(device) for each in quantize_rows(x))
        output = torch.empty(count, _SHAPE[0], device=device)
        ternary(weight, quantised, scales, output, None)
        if not np.array_equal(output.cpu().numpy(), bit_linear(x, codes, _SCALE)):
            raise _wrong(device, f"products of {count} tokens")
        dense(floats, torch.from_numpy(x).to(device), output, None)
        exact = x.astype(np.float64) @ dense_matrix(matrix).T
        if not np.square(output.cpu().numpy() - exact).mean() < _MAX_ERROR**2 * np.square(exact).mean():
            raise _wrong(device, f"dense products of {count} tokens")


def _wrong(device: torch.device, what: str) -> KernelError:
    cure = 'report it with your versions of torch and triton, and choose device="cpu"'
    return KernelError(f"{device} computes wrong {what}: {cure}")

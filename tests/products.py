"""Programs of one product, for the tests of the native kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native

INPUT, OUTPUT = 1, 2
Floats = NDArray[np.float32]


def product(weight: native.TernaryWeight, isa: str, x: Floats, threads: int = 1, residual: bool = False) -> Floats:
    """Of x, [tokens, columns or more], by the weight; with residual, x holds [tokens, columns + rows]."""
    columns, rows, stride = weight.columns, weight.rows, x.shape[1]
    codes = (0, -(-columns // 80) * 80)
    program = native.Program(codes[1] // 4 + 32)
    program.rows_to_codes((INPUT, 0, stride, 0, columns), None, 0, None, 0.0, codes)
    behind = (INPUT, 0, stride, columns, rows) if residual else None
    program.ternary(weight, codes, (OUTPUT, 0, rows, 0, rows), behind)
    output = np.full((len(x), rows), np.nan, np.float32)
    native.Executor(isa, threads).run(program, None, x, output)
    return output

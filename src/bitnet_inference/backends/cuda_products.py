"""Integer products on CUDA: int8 activations with packed ternary or int8 weights, exact in int32, equal to the reference.

The tensor cores multiply weights as their first matrix and the tokens' codes as their second, so that few tokens waste
little. A lane of a ternary tile has words of 16 weights; seven instructions make four int8 registers of such a word, and
these are operands as they stand. On an H200 (4.8 TB/s over 132 processors at 1.8 GHz: 5 words a cycle) they take 28% of the
cycles in which an instruction can be issued while the words come from memory.

A row's result does not depend on how many rows are computed with it: sums are exact, and what follows is one expression.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from bitnet_inference.backends.cuda_dense import dense, embed
from bitnet_inference.backends.cuda_weights import DenseWeight, Int8Weight, TernaryWeight

__all__ = ["DenseWeight", "Int8Weight", "TernaryWeight", "dense", "embed", "int8", "ternary"]

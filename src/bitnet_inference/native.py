"""The one door to the compiled extension: kernels for the backend, packing for the loader, sampling for the engine."""

from __future__ import annotations

from bitnet_inference._native import (
    BLOCK_TOKENS,
    MAX_HEAD_COLUMNS,
    Arena,
    Cache,
    DenseWeight,
    Executor,
    Int8Table,
    Limits,
    Program,
    QuantisedHead,
    RowSampler,
    SamplingRule,
    Screen,
    TernaryWeight,
    decodes_t5,
    has_invalid,
    isas,
    quarters,
    sampling_noise,
    ternarize,
)

__all__ = [
    "BLOCK_TOKENS",
    "MAX_HEAD_COLUMNS",
    "Arena",
    "Cache",
    "DenseWeight",
    "Executor",
    "Int8Table",
    "Limits",
    "Program",
    "QuantisedHead",
    "RowSampler",
    "SamplingRule",
    "Screen",
    "TernaryWeight",
    "decodes_t5",
    "has_invalid",
    "isas",
    "quarters",
    "sampling_noise",
    "ternarize",
]

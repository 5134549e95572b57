"""The one door to the compiled extension: kernels for the backend, packing for the loader, sampling for the engine."""

from __future__ import annotations

from bitnet_inference.errors import Unavailable

try:
    from bitnet_inference._native import (
        BLOCK_TOKENS,
        MAX_HEAD_COLUMNS,
        UNDECIDED,
        Arena,
        Background,
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
        promised_bytes,
        quarters,
        sampling_noise,
        ternarize,
    )
except ImportError as error:
    why = f"its compiled kernels cannot be loaded ({error})"
    raise Unavailable("cpu", why, "run pip install . in the checkout, or install the package again") from None

__all__ = [
    "BLOCK_TOKENS",
    "MAX_HEAD_COLUMNS",
    "UNDECIDED",
    "Arena",
    "Background",
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
    "promised_bytes",
    "quarters",
    "sampling_noise",
    "ternarize",
]

"""Rotary frequencies, computed in decimal arithmetic so that every machine gets the same bits."""

from __future__ import annotations

from decimal import Decimal, localcontext
from math import pi

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.checkpoint import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, local: bool = False) -> NDArray[np.float32]:
    """theta^(-2j / D) for j < D / 2, scaled as the configuration says: float32 [D / 2]; D features of a head turn.

    `local`: those of local layers, which have a base of their own and are not scaled. Where only these turn, the others
    do so by 0.
    """
    dim = config.num_rotated
    if not local and config.plain_global:
        return np.zeros(dim // 2, np.float32)
    with localcontext() as context:
        context.prec = 25
        theta = Decimal(config.local.rope_theta if config.local and local else config.rope_theta)
        plain = [float(theta ** (Decimal(-2 * j) / dim)) for j in range(dim // 2)]
    if local:
        return np.array(plain, np.float32)
    if config.rope_scaling is not None and config.rope_scaling.kind == "factors":
        return np.array([f / factor for f, factor in zip(plain, config.rope_scaling.factors, strict=True)], np.float32)
    return np.array([_scaled(f, config.rope_scaling) for f in plain], dtype=np.float32)


def _scaled(frequency: float, scaling: RopeScaling | None) -> float:
    """The "llama3" rule, as in Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * pi / frequency
    if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_positions / scaling.low_freq_factor:
        return frequency / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency

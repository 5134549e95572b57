"""YaRN (arXiv 2309.00071, as in Transformers' modeling_rope_utils): long waves are stretched, and scores sharpened."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

# Why longrope, which has other factors for long texts than for short ones, is refused where texts can be long.
LONG_TEXTS = "longrope turns keys again once a text is longer than those of the first training, which is not supported"


def yarn_factors(
    factor: float,
    original_max_positions: int,
    theta: float,
    head_dim: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """What each of head_dim / 2 rotary frequencies is divided by.

    Waves that turn more than `beta_fast` times within the original context stay as they are, those that turn less than
    `beta_slow` times are divided by `factor`; between them it changes evenly with the index.
    """
    low, high = (_index(turns, original_max_positions, theta, head_dim) for turns in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001
    stretched = (min(max((index - low) / span, 0.0), 1.0) for index in range(head_dim // 2))
    return tuple(1 / (part / factor + (1 - part)) for part in stretched)


def usual_original(factors: tuple[float, ...], factor: float, theta: float, head_dim: int, longest: int) -> int | None:
    """For how many positions a model was trained first whose frequencies are divided so by yarn with its usual numbers.

    None where they are divided otherwise. Several numbers may divide alike; one that models have is as good as another.
    """
    usual = (longest, round(longest / factor), *(1 << power for power in range(4, 21)))
    found = (each for each in usual if each and yarn_factors(factor, each, theta, head_dim) == factors)
    return next(found, None)


def yarn_attention(factor: float, mscale: float = 1.0, mscale_all: float = 0.0) -> float:
    """What cosine and sine are multiplied by: 0.1 ln(factor) + 1, or the ratio of two such."""
    return _sharpness(factor, mscale) / _sharpness(factor, mscale_all) if mscale_all else _sharpness(factor, 1.0)


def sharpened(sharpness: float, head_dim: int, scalar: float | None = None) -> float | None:
    """What scores are multiplied by, `scalar` ** -0.5 where there is one; None for the usual head_dim ** -0.5.

    What sharpens q and k alike sharpens their product twice.
    """
    if scalar is None and sharpness == 1.0:
        return None
    return float(sharpness * sharpness * (head_dim if scalar is None else scalar) ** -0.5)


def _sharpness(factor: float, by: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * by * _ln(factor) + 1.0


def _index(turns: float, original_max_positions: int, theta: float, head_dim: int) -> float:
    """At which index a wave turns so many times within the original context."""
    return head_dim * _ln(original_max_positions / (turns * 2 * math.pi)) / (2 * _ln(theta))


def _ln(x: float) -> float:
    """The natural logarithm, the same on every machine."""
    with localcontext() as context:
        context.prec = 25
        return float(Decimal(x).ln())

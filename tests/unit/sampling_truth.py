"""Sampling in plain NumPy and Python: what kernels/sampling.cpp must compute, token for token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

WEIGHT_OF_BEST = 1 << 40
_POLYNOMIAL = (1.5403530393381608e-04, 1.3333558146428443e-03, 9.6181291076284769e-03, 5.5504108664821576e-02)
_POLYNOMIAL += (2.4022650695910072e-01, 6.9314718055994529e-01, 1.0)
_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))


def exp_of_minus(d: NDArray[np.float32]) -> NDArray[np.float32]:
    """exp(-d) for d >= 0, every operation rounded to float32."""
    y = np.minimum(d, np.float32(64)) * np.float32(1.44269504)
    whole = (y + np.float32(12582912)) - np.float32(12582912)
    p = np.full_like(y, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * (whole - y) + np.float32(coefficient)
    return np.ldexp(p, -whole.astype(np.int32))


def weights(logits: NDArray[np.float32], temperature: float) -> list[int]:
    """round(2^40 * exp((logit - best) / temperature)), halves to even."""
    scale = np.float32(1.0 / temperature)
    relative = exp_of_minus((logits.max() - logits) * scale)
    return np.rint(relative.astype(np.float64) * WEIGHT_OF_BEST).astype(np.int64).tolist()


def noise(seed: int, choice: int, position: int) -> int:
    """64 bits of Philox4x32-10."""
    c = [position & 0xFFFFFFFF, position >> 32, choice & 0xFFFFFFFF, choice >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [right >> 32 ^ c[1] ^ k[0], right & 0xFFFFFFFF, left >> 32 ^ c[3] ^ k[1], left & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[1] << 32 | c[0]


def threefry(counter: Sequence[Words], key: Sequence[Words]) -> list[Words]:
    """Four words of Threefry4x32-13, of many counters at once."""
    keys = [*key, np.uint32(0x1BD11BDA) ^ key[0] ^ key[1] ^ key[2] ^ key[3]]
    x = [word + keys[i] for i, word in enumerate(counter)]
    for turn in range(13):
        pairs = [(0, 1), (2, 3)] if turn % 2 == 0 else [(0, 3), (2, 1)]
        for (a, b), rotation in zip(pairs, _ROTATIONS[turn % 8], strict=True):
            x[a] = x[a] + x[b]
            x[b] = (x[b] << np.uint32(rotation) | x[b] >> np.uint32(32 - rotation)) ^ x[a]
        if turn % 4 == 3:
            time = turn // 4 + 1
            x = [word + keys[(time + i) % 5] + np.uint32(time * (i == 3)) for i, word in enumerate(x)]
    return x


def words(bits: int, things: NDArray[np.int64], of: int) -> Words:
    """32 bits each in the draw with these bits: of tokens (0), of blocks of 64 for their first (1) or its place (2)."""
    counter = np.zeros((4, len(things)), np.uint32)
    counter[0], counter[1] = things // 64 * 16 + things % 16, of
    key = np.zeros((4, len(things)), np.uint32)
    key[0], key[1] = bits & 0xFFFFFFFF, bits >> 32
    return np.choose(things // 16 % 4, threefry(counter, key))


def exponentials(bits: int, things: NDArray[np.int64], of: int) -> NDArray[np.float64]:
    """The variable of each thing, as its word tells."""
    return -np.log1p(-(words(bits, things, of) + 0.5) / 2**32)


def gumbels(bits: int, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """The noise of each token in the draw with these bits."""
    blocks, places = np.divmod(tokens, 64)
    is_first = words(bits, blocks, 2) >> np.uint32(26) == places
    return -np.log(exponentials(bits, blocks, 1) / 64 + np.where(is_first, 0.0, exponentials(bits, tokens, 0)))


def edited(
    logits: NDArray[np.float32],
    tokens: Sequence[int],
    num_prompt: int,
    *,
    bias: Mapping[int, float],
    banned: Sequence[int],
    repetition: float,
    presence: float,
    frequency: float,
) -> NDArray[np.float32]:
    """The logits after bias, bans and penalties."""
    x = logits.copy()
    for token, value in bias.items():
        x[token] += np.float32(value)
    x[list(banned)] = -np.inf
    for token in set(tokens):
        x[token] = x[token] * np.float32(repetition) if x[token] < 0 else x[token] / np.float32(repetition)
        count = list(tokens[num_prompt:]).count(token)
        if count:
            x[token] = x[token] - np.float32(frequency) * np.float32(count)
            x[token] = x[token] - np.float32(presence)
    return x


def kept(logits: NDArray[np.float32], *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that the filters leave, best first."""
    mass = weights(logits, temperature)
    order = [i for i in np.argsort(-logits, kind="stable").tolist() if logits[i] > -np.inf]
    order = order[: top_k or None]
    if top_p < 1:
        allowed, before, end = int(top_p * float(sum(mass[i] for i in order))), 0, 0
        while end < len(order) and before <= allowed:
            before, end = before + mass[order[end]], end + 1
        order = order[:end]
    if min_p > 0.5 / WEIGHT_OF_BEST:
        bar = np.float32(float(logits.max()) + float(np.log(min_p)) * temperature)
        order = [i for i in order if logits[i] >= bar]
    return order


def sample(
    logits: NDArray[np.float32], *, temperature: float, bits: int, top_k: int, top_p: float, min_p: float
) -> int:
    """The token that wins with the noise of these 64 bits."""
    if temperature < 1e-5:
        return int(np.argmax(logits))
    scale = np.float32(1.0 / temperature)
    ids = kept(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    behind = ((logits.max() - logits[ids]) * scale).astype(np.float64)
    return ids[int(np.argmax(gumbels(bits, np.array(ids)) - behind))]

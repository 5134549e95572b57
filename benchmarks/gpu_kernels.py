"""Each kernel of the CUDA backend alone, beside what the card can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from engine_streams import Numbers, Rows
from gpu_card import Card
from gpu_clock import seconds_each

from bitnet_inference.backends import cuda_attention, cuda_products, cuda_rows
from bitnet_inference.backends.cuda_cache import BLOCK_TOKENS, Cache, DeviceBatch
from bitnet_inference.formats.checkpoint import Ternary

SHAPES = {"gate, up": (13824, 2560), "down": (2560, 6912), "q, k, v": (3840, 2560), "o": (2560, 2560)}
FEW, MANY = (1, 2, 4, 8), (64, 512, 4096)  # tokens
MIN_BYTES = 256 << 20  # what a timing reads: several times any card's cache
HEADS, KV_HEADS, HEAD_DIM = 20, 5, 128


def shapes(card: Card) -> Mapping[str, tuple[int, int]]:
    """Rows and columns of the products."""
    return SHAPES if card.device.type == "cuda" else {"tiny": (64, 128)}


def products(card: Card, shape: tuple[int, int]) -> Rows:
    """Ternary products: time, and what share of the card's copy bandwidth or of its int8 peak it reaches."""
    weights = _weights(card, shape)
    counts = (*FEW, *MANY) if card.device.type == "cuda" else (1, 16)
    return {f"{count} tokens": _product(card, weights, count) for count in counts}


def attention(card: Card) -> Rows:
    """Attention of a layer in decoding: time, and what share of the copy bandwidth the cache is read at."""
    cases = [(1, 512), (1, 2048), (1, 4000), (16, 2048), (64, 2048)] if card.device.type == "cuda" else [(2, 20)]
    return {f"{count} sequences at {context}": _attend(card, count, context) for count, context in cases}


def rows(card: Card) -> Rows:
    """Norm and quantisation of rows: time, and what share of the copy bandwidth they are read and written at."""
    cases = [(1, 2560), (1, 6912), (512, 2560), (4096, 6912)] if card.device.type == "cuda" else [(2, 64)]
    return {f"norm, quantize {count} x {width}": _row(card, count, width) for count, width in cases}


def _weights(card: Card, shape: tuple[int, int]) -> list[cuda_products.TernaryWeight]:
    """So many that the card's cache holds a small part of them."""
    random = np.random.default_rng(0)
    codes = random.integers(-1, 2, shape, np.int8)
    first = cuda_products.TernaryWeight([Ternary(codes, "codes", shape, 1.0)], card.device)
    copies = -(-MIN_BYTES // first.num_bytes) if card.device.type == "cuda" else 1
    rolled = (np.roll(codes, at, axis=1) for at in range(1, copies))
    return [first, *(cuda_products.TernaryWeight([Ternary(each, "codes", shape, 1.0)], card.device) for each in rolled)]


def _product(card: Card, weights: Sequence[cuda_products.TernaryWeight], num_tokens: int) -> Numbers:
    num_rows, columns = weights[0].rows, weights[0].columns
    codes = torch.randint(-127, 128, (num_tokens, columns), dtype=torch.int8, device=card.device)
    scales = torch.ones(num_tokens, device=card.device)
    output = torch.empty(num_tokens, num_rows, device=card.device)
    launches = [partial(cuda_products.ternary, weight, codes, scales, output, None) for weight in weights]
    seconds = seconds_each(launches, card.device)
    return {
        "us": seconds * 1e6,
        "% of bandwidth": 100 * weights[0].num_bytes / seconds / card.bandwidth,
        "% of int8 peak": 100 * num_rows * columns * num_tokens / seconds / card.int8_peak,
    }


def _attend(card: Card, num_sequences: int, context: int) -> Numbers:
    each = -(-context // BLOCK_TOKENS)
    num_layers = max(1, -(-MIN_BYTES // (num_sequences * context * 4 * KV_HEADS * HEAD_DIM)))
    num_layers = num_layers if card.device.type == "cuda" else 1
    cache = Cache("bfloat16", num_layers, KV_HEADS, HEAD_DIM, card.device)
    cache.reserve(num_sequences * each)
    whole = partial(torch.arange, dtype=torch.int32, device=card.device)
    tables = torch.randperm(num_sequences * each, device=card.device).to(torch.int32).view(num_sequences, each)
    last = torch.full((num_sequences,), context - 1, dtype=torch.int32, device=card.device)
    slots = tables[:, -1] * BLOCK_TOKENS + (context - 1) % BLOCK_TOKENS
    rows = whole(num_sequences)
    batch = DeviceBatch(rows, last, slots, whole(num_sequences + 1), tables, rows, 1, context)
    q = torch.randn(num_sequences, HEADS * HEAD_DIM, device=card.device)
    output, scale = torch.empty_like(q), HEAD_DIM**-0.5
    attend = partial(cuda_attention.attend, cache)
    launches = [partial(attend, layer, q, output, batch, scale, 0) for layer in range(num_layers)]
    seconds = seconds_each(launches, card.device)
    num_bytes = num_sequences * context * 2 * 2 * KV_HEADS * HEAD_DIM
    return {"us": seconds * 1e6, "% of bandwidth": 100 * num_bytes / seconds / card.bandwidth}


def _row(card: Card, count: int, width: int) -> Numbers:
    x, weight = torch.randn(count, width, device=card.device), torch.ones(width, device=card.device)
    codes = cuda_rows.Codes(
        torch.empty(count, width, dtype=torch.int8, device=card.device), torch.empty(count, device=card.device)
    )
    launch = partial(cuda_rows.rows, x, None, None, weight, 1e-5, codes)
    seconds = seconds_each([launch] * 20, card.device)
    return {"us": seconds * 1e6, "% of bandwidth": 100 * count * width * 5 / seconds / card.bandwidth}

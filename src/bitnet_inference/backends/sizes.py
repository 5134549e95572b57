"""What a model will take in memory, before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bitnet_inference.backends.cpu import MIN_SCREENED_WEIGHTS, ROUNDED_HEADS
from bitnet_inference.config import GRAPH_DEVICES, EngineConfig
from bitnet_inference.formats.checkpoint import Checkpoint, ModelConfig, expected_shapes, is_projection
from bitnet_inference.formats.ternarized import quantized


def estimate_bytes(checkpoint: Checkpoint, config: EngineConfig, num_cache_tokens: int) -> int:
    """Weights as the backend keeps them, and a KV cache of so many tokens: a little more or less. Nothing is read.

    Raises InvalidParams where there is nothing to quantize.
    """
    checkpoint = quantized(checkpoint, config.quantize)
    cache = num_cache_tokens * _bytes_a_token(checkpoint.config, config)
    if config.device in ("reference", *GRAPH_DEVICES):
        return checkpoint.num_bytes + cache
    if config.device == "mlx":
        return _mlx_bytes(checkpoint) + _dense_bytes(checkpoint, config) + cache
    return _ternary_bytes(checkpoint, config) + _dense_bytes(checkpoint, config) + cache


def _ternary_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Groups of 32 rows, and steps of 16 columns or blocks of 80, are whole; on a GPU tiles of 16 rows, 256 columns."""
    a_byte, columns = (5, 80) if config.ternary_format == "t5" else (4, 256 if config.on_gpu else 16)
    num_rows = 16 if config.on_gpu else 32
    padded = (
        -(-shape[0] // num_rows) * num_rows * -(-shape[1] // columns) * columns for shape in _ternary_shapes(checkpoint)
    )
    return sum(padded) // a_byte


def _mlx_bytes(checkpoint: Checkpoint) -> int:
    """Columns fill whole groups. Two floats belong to each, of which all layers share those that say nothing."""
    config, total = checkpoint.config, 0
    for name, shape in expected_shapes(config):
        if len(shape) == 2 and checkpoint.is_ternary(name):
            size = checkpoint.group_size(name)
            groups = shape[0] * -(-shape[1] // (size or 128))
            total += groups * (size or 128) // 4 + 4 * shape[0]
            total += 8 * groups // (1 if size or not is_projection(name) else config.num_layers)
    return total


def _ternary_shapes(checkpoint: Checkpoint) -> Iterator[tuple[int, ...]]:
    shapes = expected_shapes(checkpoint.config)
    return (shape for name, shape in shapes if len(shape) == 2 and checkpoint.is_ternary(name))


def _rounded_shapes(checkpoint: Checkpoint) -> Iterator[tuple[int, ...]]:
    shapes = expected_shapes(checkpoint.config)
    return (shape for name, shape in shapes if is_projection(name) and not checkpoint.is_ternary(name))


def _dense_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Floats are kept as wide as in the file; a large head has a screen beside it, a rounded one stands for it.

    On a GPU there is no screen, and a rounded head stands beside a table that embeddings are looked up in.
    """
    width = 4 if checkpoint.num_bytes > 3 * checkpoint.num_parameters else 2
    dense = width * (checkpoint.num_parameters - sum(map(math.prod, _ternary_shapes(checkpoint))))
    if config.quantize == "int8":
        dense -= (width - 1) * sum(map(math.prod, _rounded_shapes(checkpoint)))
    if config.device == "mlx" or checkpoint.is_ternary("embed" if checkpoint.config.tie_embeddings else "head"):
        return dense
    head = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    if config.head in ROUNDED_HEADS:
        is_kept = config.on_gpu and checkpoint.config.tie_embeddings
        return dense - (0 if is_kept else width * head) + head * ROUNDED_HEADS[config.head] // 8
    if config.on_gpu:
        return dense
    return dense + (head if config.head == "exact" and head >= MIN_SCREENED_WEIGHTS else 0)


def _bytes_a_token(sizes: ModelConfig, config: EngineConfig) -> int:
    heads = sizes.num_layers * sizes.num_kv_heads
    if config.device == "reference":
        return heads * 2 * sizes.head_dim * 4
    width = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}[config.cache_dtype]
    scale = 4 if config.cache_dtype == "int8" else 0
    is_padded = not (config.on_gpu or config.device in (*GRAPH_DEVICES, "mlx"))
    value_dim = -(-sizes.head_dim // 16) * 16 if is_padded else sizes.head_dim
    return heads * ((sizes.head_dim + value_dim) * width + 2 * scale)

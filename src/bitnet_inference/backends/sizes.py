"""What a model will take in memory, before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bitnet_inference.backends.cpu import MIN_SCREENED_WEIGHTS, ROUNDED_HEADS
from bitnet_inference.config import GRAPH_DEVICES, EngineConfig
from bitnet_inference.formats.checkpoint import Checkpoint, ModelConfig, is_projection
from bitnet_inference.formats.ternarized import quantized
from bitnet_inference.model.loader import stage_shapes

Shapes = dict[str, tuple[int, ...]]


def estimate_bytes(
    checkpoint: Checkpoint, config: EngineConfig, num_cache_tokens: int, layers: range | None = None
) -> int:
    """Weights as the backend keeps them, and a KV cache of so many tokens: a little more or less. Nothing is read.

    With `layers`, those of the stage with these layers alone (see loader.record). Raises InvalidParams where there is
    nothing to quantize.
    """
    checkpoint = quantized(checkpoint, config.quantize)
    sizes = checkpoint.config
    cache = num_cache_tokens * _bytes_a_token(sizes, config)
    if config.device in ("reference", *GRAPH_DEVICES):
        return checkpoint.num_bytes + cache
    shapes = dict(stage_shapes(sizes, layers))
    weights = _ternary_bytes(checkpoint, config, shapes) + _dense_bytes(checkpoint, config, shapes)
    return weights + cache * len(range(sizes.num_layers) if layers is None else layers) // sizes.num_layers


def _ternary_bytes(checkpoint: Checkpoint, config: EngineConfig, shapes: Shapes) -> int:
    """Groups of 32 rows, and steps of 16 columns or blocks of 80, are whole; on a GPU tiles of 16 times 256."""
    if config.device == "mlx":
        return _mlx_bytes(checkpoint, shapes)
    a_byte, rows, columns = 4, 32, 16
    if config.on_gpu:
        rows, columns = 16, 256
    elif config.ternary_format == "t5":
        a_byte, columns = 5, 80
    ternary = _ternary_shapes(checkpoint, shapes)
    return sum(-(-shape[0] // rows) * rows * -(-shape[1] // columns) * columns for shape in ternary) // a_byte


def _mlx_bytes(checkpoint: Checkpoint, shapes: Shapes) -> int:
    """Columns fill whole groups. Two floats belong to each, of which all layers share those that say nothing."""
    config, total = checkpoint.config, 0
    for name, shape in shapes.items():
        if len(shape) == 2 and checkpoint.is_ternary(name):
            size = checkpoint.group_size(name)
            groups = shape[0] * -(-shape[1] // (size or 128))
            total += groups * (size or 128) // 4 + 4 * shape[0]
            total += 8 * groups // (1 if size or not is_projection(name) else config.num_layers)
    return total


def _ternary_shapes(checkpoint: Checkpoint, shapes: Shapes) -> Iterator[tuple[int, ...]]:
    return (shape for name, shape in shapes.items() if len(shape) == 2 and checkpoint.is_ternary(name))


def _rounded_shapes(checkpoint: Checkpoint, shapes: Shapes) -> Iterator[tuple[int, ...]]:
    return (shape for name, shape in shapes.items() if is_projection(name) and not checkpoint.is_ternary(name))


def _dense_bytes(checkpoint: Checkpoint, config: EngineConfig, shapes: Shapes) -> int:
    """Floats are kept as wide as in the file; a large head has a screen beside it, a rounded one stands for it.

    On a GPU there is no screen, and a rounded head stands beside a table that embeddings are looked up in.
    """
    width = 4 if checkpoint.num_bytes > 3 * checkpoint.num_parameters else 2
    dense = width * (sum(map(math.prod, shapes.values())) - sum(map(math.prod, _ternary_shapes(checkpoint, shapes))))
    if config.quantize == "int8":
        dense -= (width - 1) * sum(map(math.prod, _rounded_shapes(checkpoint, shapes)))
    if config.embedding == "int8":
        dense += _rounded_table(checkpoint.config, width)
    return dense + (_beside_head(checkpoint, config, shapes, width) if "norm" in shapes else 0)


def _rounded_table(sizes: ModelConfig, width: int) -> int:
    """Codes and scales, without the floats, which only a tied head still needs."""
    floats = 0 if sizes.tie_embeddings else width * sizes.hidden_size
    return sizes.vocab_size * (sizes.hidden_size + 4 - floats)


def _beside_head(checkpoint: Checkpoint, config: EngineConfig, shapes: Shapes, width: int) -> int:
    if config.device == "mlx" or checkpoint.is_ternary("embed" if checkpoint.config.tie_embeddings else "head"):
        return 0
    head = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    if config.head in ROUNDED_HEADS:
        is_kept = config.on_gpu and checkpoint.config.tie_embeddings and "layers.0.q" in shapes
        return head * ROUNDED_HEADS[config.head] // 8 - (0 if is_kept else width * head)
    return head if config.head == "exact" and head >= MIN_SCREENED_WEIGHTS and not config.on_gpu else 0


def _bytes_a_token(sizes: ModelConfig, config: EngineConfig) -> int:
    heads = sizes.num_layers * sizes.num_kv_heads
    if config.device == "reference":
        return heads * 2 * sizes.head_dim * 4
    width = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}[config.cache_dtype]
    scale = 4 if config.cache_dtype == "int8" else 0
    if config.on_gpu:
        return heads * 2 * (sizes.head_dim * width + scale)
    value_dim = sizes.head_dim if config.device in (*GRAPH_DEVICES, "mlx") else -(-sizes.head_dim // 16) * 16
    return heads * ((sizes.head_dim + value_dim) * width + 2 * scale)

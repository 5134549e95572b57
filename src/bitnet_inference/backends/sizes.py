"""What a model will take in memory, before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bitnet_inference.backends.cpu import MIN_SCREENED_WEIGHTS, ROUNDED_HEADS
from bitnet_inference.backends.packing import code_bytes, is_coded, packing
from bitnet_inference.config import GRAPH_DEVICES, EngineConfig
from bitnet_inference.formats.checkpoint import Checkpoint, ModelConfig, is_projection
from bitnet_inference.formats.ternarized import quantized
from bitnet_inference.model.loader import Shapes, fused, num_weights, record, stage_shapes, weight_groups


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
    stacks = weight_groups(fused(record(sizes, layers), checkpoint))
    dense = [names for names in stacks if not checkpoint.is_ternary(names[0])]
    weights = _ternary_bytes(checkpoint, config, shapes) + _dense_bytes(checkpoint, config, shapes, dense)
    return weights + cache * len(range(sizes.num_layers) if layers is None else layers) // sizes.num_layers


def _ternary_bytes(checkpoint: Checkpoint, config: EngineConfig, shapes: Shapes) -> int:
    """As `code_bytes`; on a GPU tiles of 16 times 256 are whole."""
    if config.device == "mlx":
        return _mlx_bytes(checkpoint, shapes)
    ternary = {name: shape for name, shape in shapes.items() if len(shape) == 2 and checkpoint.is_ternary(name)}
    if config.on_gpu:
        return sum(-(-rows // 16) * 16 * -(-columns // 256) * 256 for rows, columns in ternary.values()) // 4
    kind = packing(checkpoint, config)
    return sum(code_bytes(checkpoint, name, shape, kind) for name, shape in ternary.items())


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


def _dense_bytes(
    checkpoint: Checkpoint, config: EngineConfig, shapes: Shapes, stacks: Iterable[tuple[str, ...]]
) -> int:
    """Floats are kept as matrices are read; a large head has a screen beside it, a rounded one stands for it.

    On a GPU there is no screen, and a rounded head stands beside a table that embeddings are looked up in.
    """
    dense = 0
    for names in stacks:
        if not is_projection(names[0]):
            dense += sum(_table_bytes(checkpoint, config, name, shapes[name]) for name in names)
            continue
        width = 1 if config.quantize == "int8" else _width(checkpoint, names)
        dense += width * num_weights(shapes, names)
    if config.embedding == "int8":
        dense += _rounded_table(checkpoint, config)
    return dense + (_beside_head(checkpoint, config, shapes) if "norm" in shapes else 0)


def _table_bytes(checkpoint: Checkpoint, config: EngineConfig, name: str, shape: tuple[int, ...]) -> int:
    """Of embeddings or a head as they are read: floats, or on the CPU codes where they are ternary themselves."""
    if _is_coded(checkpoint, config, name):
        return code_bytes(checkpoint, name, shape, "u2")
    return _width(checkpoint, [name]) * math.prod(shape)


def _is_coded(checkpoint: Checkpoint, config: EngineConfig, name: str) -> bool:
    return config.device == "cpu" and is_coded(checkpoint, name)


def _width(checkpoint: Checkpoint, names: Iterable[str]) -> int:
    """Bytes of a weight in a stack of dense matrices: where dtypes differ, all become float32."""
    return 2 if {*map(checkpoint.dtype, names)} in ({"bfloat16"}, {"float16"}) else 4


def _rounded_table(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Codes and scales, without the table as it was read, which only a tied head still needs."""
    sizes = checkpoint.config
    shape = (sizes.vocab_size, sizes.hidden_size)
    unread = 0 if sizes.tie_embeddings else _table_bytes(checkpoint, config, "embed", shape)
    return sizes.vocab_size * (sizes.hidden_size + 4) - unread


def _beside_head(checkpoint: Checkpoint, config: EngineConfig, shapes: Shapes) -> int:
    name = "embed" if checkpoint.config.tie_embeddings else "head"
    if config.device == "mlx" or checkpoint.is_ternary(name):
        return 0
    if config.head not in ROUNDED_HEADS and _is_coded(checkpoint, config, name):
        return 0
    head = math.prod(shapes[name])
    if config.head in ROUNDED_HEADS:
        is_kept = config.on_gpu and checkpoint.config.tie_embeddings and "layers.0.q" in shapes
        unread = 0 if is_kept else _table_bytes(checkpoint, config, name, shapes[name])
        return head * ROUNDED_HEADS[config.head] // 8 - unread
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

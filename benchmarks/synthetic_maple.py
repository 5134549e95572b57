"""GGUF files with the shape of DeepGrove's Maple and random weights: experts of -m, 0 and m, an m a row, in TQ2_0."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from synthetic_gguf import EMBED, share_of
from synthetic_weights import ATTENDED, GATED

from bitnet_inference.formats import ggml_blocks as ggml
from bitnet_inference.formats.checkpoint import ModelConfig, expected_shapes
from bitnet_inference.formats.gguf import tensor_name
from bitnet_inference.formats.gguf_writer import Put, record, write_gguf
from bitnet_inference.output_files import whole_file

_MIXED = 0.4  # what the outputs of eight experts are together, beside one
_POOL_BLOCKS, _CHUNK_ROWS = 1 << 18, 1 << 14


def write_maple(path: Path, config: ModelConfig, seed: int, peak: float) -> None:
    """Write the file, without words. The head holds the embeddings, as if it were tied: see synthesize.py on `peak`."""
    share = share_of(config, peak)
    added = EMBED * math.sqrt((1 / share**2 - 1) / (2 * config.num_layers))
    random, shapes = np.random.default_rng(seed), _shapes(config)
    codes = _pool(random)

    def encode(name: str, put: Put) -> int:
        shape = shapes[name]
        if len(shape) == 1:
            put(np.ones(shape, "<f4").view(np.uint8))
            return ggml.F32
        if "ffn_gate_inp" in name:
            put((random.standard_normal(shape, np.float32) / math.sqrt(shape[1])).view(np.uint8))
            return ggml.F32
        if name in ("token_embd.weight", "output.weight"):
            _put_table(put, shape, seed)
            return ggml.F16
        wanted = {"attn_output": added / ATTENDED, "ffn_down": added / GATED / _MIXED}
        scale = next((size for part, size in wanted.items() if part in name), 1.0) / math.sqrt(shape[-1] * 2 / 3)
        _put_blocks(put, codes, shape, scale, random)
        return ggml.TQ2_0

    with whole_file(path) as out:
        write_gguf(out, [record(key, value) for key, value in _metadata(config).items()], shapes, encode)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """By name, with the stacks of experts in the place of their matrices."""
    assert config.experts is not None
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in expected_shapes(config):
        if ".experts." not in name:
            shapes[tensor_name(name)] = shape
        elif ".experts.0." in name:
            shapes[tensor_name(name).replace(".0.weight", "_exps.weight")] = (config.experts.count, *shape)
    return shapes


def _metadata(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None and config.local is not None
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.intermediate_size,
        "expert_count": config.experts.count,
        "expert_used_count": config.experts.used,
        "rope.dimension_count": config.num_rotated,
        "rope.freq_base": config.rope_theta,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.sliding_window": config.local.window - 1,
        "attention.sliding_window_pattern": np.isin(range(config.num_layers), config.local.layers),
        "swiglu_clamp_exp": np.full(config.num_layers, 7, "<f4"),
    }
    own = {f"maple.{key}": value for key, value in sizes.items()}
    return {"general.architecture": "maple", **own, "tokenizer.ggml.model": "none"}


def _pool(random: np.random.Generator) -> NDArray[np.uint8]:
    """The codes of many random blocks, four a byte."""
    digits = np.arange(81)[:, None] // [1, 3, 9, 27] % 3
    fours = (digits << [0, 2, 4, 6]).sum(axis=1).astype(np.uint8)
    pool: NDArray[np.uint8] = fours[random.integers(0, 81, (_POOL_BLOCKS, 64), np.uint8)]
    return pool


def _put_blocks(
    put: Put, codes: NDArray[np.uint8], shape: tuple[int, ...], scale: float, random: np.random.Generator
) -> None:
    each, num_rows = shape[-1] // 256, math.prod(shape[:-1])
    for begin in range(0, num_rows, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, num_rows - begin)
        blocks = np.empty((count, each, 66), np.uint8)
        start = int(random.integers(0, _POOL_BLOCKS - count * each + 1))
        blocks[..., :64] = codes[start : start + count * each].reshape(count, each, 64)
        scales = (scale * random.uniform(0.8, 1.2, (count, 1))).astype("<f2")
        blocks[..., 64:] = np.repeat(scales, each, axis=1)[..., None].view(np.uint8)
        put(blocks)


def _put_table(put: Put, shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed + 1)  # so that both tables are the same
    for begin in range(0, shape[0], _CHUNK_ROWS):
        rows = random.standard_normal((min(_CHUNK_ROWS, shape[0] - begin), shape[1]), np.float32)
        put((EMBED * rows).astype("<f2").view(np.uint8))

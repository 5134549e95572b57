"""GGUF files with the shape of PrismML's Bonsai and random weights: -1 and +1 with a scale for 128 of them, in Q1_0."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from synthetic_weights import ATTENDED, GATED

from bitnet_inference.formats import ggml_blocks as ggml
from bitnet_inference.formats.checkpoint import ModelConfig, expected_shapes
from bitnet_inference.formats.gguf import tensor_name
from bitnet_inference.formats.gguf_metadata import describe
from bitnet_inference.formats.gguf_writer import Put, record, write_gguf
from bitnet_inference.output_files import whole_file

EMBED = 0.02
_CHUNK_BLOCKS = 1 << 16


def share_of(config: ModelConfig, peak: float) -> float:
    """What a token's embedding keeps of the last hidden state; raises ValueError for a peak beyond the shape's."""
    share = peak / math.sqrt(config.hidden_size)
    if not 0 < share < 1:
        raise ValueError(f"--peak {peak:g} is not between 0 and {math.sqrt(config.hidden_size):.1f}")
    return share


def write_bonsai(path: Path, config: ModelConfig, seed: int, peak: float) -> None:
    """Write the file, without words: token ids go in and out. Raises ValueError for a peak beyond the shape's."""
    share = share_of(config, peak)
    added = EMBED * math.sqrt((1 / share**2 - 1) / (2 * config.num_layers))  # by each half of a layer
    shapes = {tensor_name(name): shape for name, shape in expected_shapes(config)}
    random = np.random.default_rng(seed)

    def encode(name: str, put: Put) -> int:
        shape = shapes[name]
        if len(shape) == 1:
            put(np.ones(shape, "<f4").view(np.uint8))
            return ggml.F32
        wanted = {"token_embd": EMBED, "attn_output": added / ATTENDED, "ffn_down": added / GATED}
        scale = next((size for part, size in wanted.items() if part in name), 1.0)
        scale /= 1.0 if "token_embd" in name else math.sqrt(shape[1])
        num_blocks = math.prod(shape) // ggml.BLOCKS[ggml.Q1_0].num_values
        for begin in range(0, num_blocks, _CHUNK_BLOCKS):
            count = min(_CHUNK_BLOCKS, num_blocks - begin)
            blocks = random.integers(0, 256, (count, ggml.BLOCKS[ggml.Q1_0].num_bytes), np.uint8)
            scales = (scale * random.uniform(0.8, 1.2, (count, 1))).astype("<f2")
            blocks[:, :2] = scales.view(np.uint8)
            put(blocks)
        return ggml.Q1_0

    values = describe(path, config, path.stem) | {"tokenizer.ggml.model": "none"}
    with whole_file(path) as out:
        write_gguf(out, [record(key, value) for key, value in values.items()], shapes, encode)

"""Writes a BitNet checkpoint as GGUF: ternary matrices as TQ2_0, embedding and head (one table) as F16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes
from bitnet_inference.ternary import unpack_quarters

BLOCK = 256
NAMES = {
    "attn_norm": "attn_norm", "attn_sub_norm": "attn_sub_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
    "o": "attn_output", "mlp_norm": "ffn_norm", "mlp_sub_norm": "ffn_sub_norm", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down",
}  # fmt: skip


def write_gguf(checkpoint: Checkpoint, path: Path) -> None:
    """Write the file, without words: token ids go in and out. Raises ValueError for models of other shapes."""
    config = checkpoint.config
    if not (config.sub_norms and config.tie_embeddings):
        raise ValueError("llama.cpp's arch bitnet has sub-norms and a tied head: give a model that has them")
    if config.hidden_size % BLOCK or config.intermediate_size % BLOCK:
        raise ValueError(f"TQ2_0 has blocks of {BLOCK} columns: give a model whose widths are multiples")
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("no_vocab")
    for name, shape in expected_shapes(config):
        if len(shape) == 1:
            writer.add_tensor(f"{_name(name)}.weight", np.ascontiguousarray(checkpoint.vector(name), np.float32))
        elif name == "embed":
            writer.add_tensor("token_embd.weight", _float16(checkpoint.matrix(name)))
        else:
            packed = _tq2_0(checkpoint.matrix(name))
            writer.add_tensor(f"{_name(name)}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.TQ2_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    """ "layers.3.q" is "blk.3.attn_q"."""
    if name == "norm":
        return "output_norm"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{NAMES[part]}"


def _float16(matrix: Dense | Ternary) -> NDArray[np.float16]:
    assert isinstance(matrix, Dense) and matrix.dtype == "bfloat16"
    return (matrix.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float16)


def _tq2_0(matrix: Dense | Ternary) -> NDArray[np.uint8]:
    """Blocks of 256 columns: two halves of 32 bytes, byte m with columns m, m + 32, m + 64, m + 96; then the scale."""
    assert isinstance(matrix, Ternary)
    rows, columns = matrix.shape
    codes: NDArray[Any] = unpack_quarters(matrix.data, rows) if matrix.layout == "quarters" else matrix.data
    fields = (codes.view(np.int8) + 1).view(np.uint8).reshape(rows, columns // BLOCK, 2, 4, 32)
    packed = fields[:, :, :, 0] | fields[:, :, :, 1] << 2 | fields[:, :, :, 2] << 4 | fields[:, :, :, 3] << 6
    scale = np.array([matrix.scale], np.float16).view(np.uint8)
    scales = np.broadcast_to(scale, (rows, columns // BLOCK, 2))
    return np.concatenate([packed.reshape(rows, columns // BLOCK, 64), scales], axis=2).reshape(rows, -1)

"""GGUF files as the `gguf` library writes them, from the model that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, Ternary, expected_shapes
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.model_folder import find_model
from bitnet_inference.ternary import unpack

I2_S, Q1_0, Q2_0 = 36, 41, 42
NAMES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "attn_norm": "attn_norm", "mlp_norm": "ffn_norm",
    "attn_sub_norm": "attn_sub_norm", "mlp_sub_norm": "ffn_sub_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v",
    "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm",
}  # fmt: skip


def own_name(name: str) -> str:
    """The name in the file: "layers.3.q" is "blk.3.attn_q.weight"."""
    if not name.startswith("layers."):
        return f"{NAMES[name]}.weight"
    _, layer, part, *of = name.split(".")
    return f"blk.{layer}.{NAMES[part]}{'_norm_in' if of == ['norm'] else ''}.{'bias' if of == ['bias'] else 'weight'}"


def codes_of(matrix: Ternary) -> NDArray[np.int8]:
    """The codes of a matrix, int8 [out, in]."""
    return unpack(np.ascontiguousarray(matrix.data), matrix.layout, matrix.shape)


def i2_s_bytes(codes: NDArray[np.int8], scale: float, part: int = 32) -> NDArray[np.uint8]:
    """By hand: byte p of 32 holds the codes p, 32 + p, 64 + p, 96 + p, the first in the highest bits."""
    packed = bytearray()
    flat = (codes.reshape(-1) + 1).tolist()
    for start in range(0, len(flat), 4 * part):
        for p in range(start, start + part):
            packed.append(flat[p] << 6 | flat[p + part] << 4 | flat[p + 2 * part] << 2 | flat[p + 3 * part])
    return np.frombuffer(bytes(packed) + np.float32(scale).tobytes() + bytes(28), np.uint8)


def q2_0_bytes(codes: NDArray[np.int8], size: int = 64) -> NDArray[np.uint8]:
    """For 64 weights a scale in float16, here 1/64, 2/64, 3/64, 1/64, ..., and four codes a byte."""
    fours = (codes.reshape(-1, size // 4, 4) + 1).astype(np.uint8) << np.array([0, 2, 4, 6], np.uint8)
    scales = ((np.arange(len(fours)) % 3 + 1) / 64).astype(np.float16)
    return np.concatenate([scales.view(np.uint8).reshape(-1, 2), fours.sum(axis=2, dtype=np.uint8)], axis=1).reshape(-1)


def q1_0_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    """For 128 weights the scale 1/64, 2/64, 3/64, 1/64, ... in float16, and signs, eight a byte; that of 0 is -."""
    signs = np.packbits(values.reshape(-1, 128) > 0, axis=1, bitorder="little")
    scales = ((np.arange(len(signs)) % 3 + 1) / 64).astype(np.float16)
    return np.concatenate([scales.view(np.uint8).reshape(-1, 2), signs], axis=1).reshape(-1)


def add_words(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """The tokenizer of a folder as metadata."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    vocab, added = spec["model"]["vocab"], {token["content"]: token["id"] for token in spec["added_tokens"]}
    by_id = {token_id: token for token, token_id in (vocab | added).items()}
    tokens = [by_id[token_id] for token_id in range(len(by_id))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in added else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    writer.add_bos_token_id(added[config["bos_token"]])
    writer.add_eos_token_id(added[config["eos_token"]])
    writer.add_add_bos_token(True)
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])


def write_default(path: Path, projections: str = "TQ2_0", table: str = "BF16", arch: str = "bitnet-b1.58", **more: Any):
    """The default model as a GGUF file, see write_model."""
    return write_model(path, find_model("default"), arch, projections, table, **more)


def write_model(path: Path, folder: Path, arch: str, projections: str, table: str, norms: str = "F32", **more: Any):
    """The model of a folder: `projections` in "I2_S", "Q1_0", "Q2_0" or any type of the library, table and norms too.

    "Q2_0_128" is the older Q2_0 with 128 weights a block, under the same number.
    `more` are further metadata of the architecture, with "__" for dots; `drop` and `change` name tensors to leave out
    and to replace, `extra` has vectors by their own names; `per_file` cuts the model into files of that many tensors;
    `pre` names the pre-tokenizer, `alignment` is that of the tensors.
    """
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    drop, change, extra = more.pop("drop", ()), more.pop("change", {}), more.pop("extra", {})
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=more.pop("per_file", 0))
    if alignment := more.pop("alignment", 0):
        writer.add_custom_alignment(alignment)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_layers)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    add_words(writer, folder, more.pop("pre", "gpt-2"))
    for key, value in more.items():
        key = f"{arch}.{key.replace('__', '.')}"
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        kinds[type(value)](key, value)
    for name, shape in expected_shapes(config):
        if name in drop:
            continue
        values = checkpoint.vector(name) if len(shape) == 1 else checkpoint.matrix(name)
        kind = table if name in ("embed", "head") else norms if len(shape) == 1 else projections
        add_tensor(writer, own_name(name), change.get(name, values), kind)
    for name, values in extra.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return checkpoint


def add_tensor(writer: gguf.GGUFWriter, name: str, values: Any, kind: str) -> None:
    """A vector as F16 or F32, a matrix in that type."""
    if isinstance(values, np.ndarray):
        writer.add_tensor(name, np.ascontiguousarray(values, np.float16 if kind == "F16" else None))
        return
    if isinstance(values, Ternary) and kind in ("I2_S", "Q2_0", "Q2_0_128"):
        # The library does not know the type: it writes the bytes under a name for rows of bytes, corrected below.
        size = 128 if kind == "Q2_0_128" else 64
        in_blocks = kind != "I2_S" and not values.shape[1] % size
        data = q2_0_bytes(codes_of(values), size) if in_blocks else i2_s_bytes(codes_of(values), values.scale)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.I8)
        info = writer.tensors[-1][name]
        info.shape, info.dtype = values.shape, Q2_0 if in_blocks else I2_S
        return
    is_ternary = isinstance(values, Ternary)
    floats = codes_of(values) * np.float32(values.scale) if is_ternary else _floats(values)
    if kind == "Q1_0":
        writer.add_tensor(name, q1_0_bytes(floats), raw_dtype=gguf.GGMLQuantizationType.I8)
        writer.tensors[-1][name].shape, writer.tensors[-1][name].dtype = floats.shape, Q1_0
        return
    quantised = gguf.quants.quantize(floats, gguf.GGMLQuantizationType[kind])
    raw_dtype = None if kind in ("F16", "F32") else gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, quantised, raw_dtype=raw_dtype)


def _floats(matrix: Dense) -> NDArray[np.float32]:
    bits = matrix.data.view(np.uint16) if matrix.dtype == "bfloat16" else matrix.data
    return np.ascontiguousarray(to_float32(bits, matrix.dtype))

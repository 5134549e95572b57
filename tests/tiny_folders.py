"""Hugging Face folders of a few hundred bytes, to be changed by tests before they are written."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.ternary import pack_quarters

HIDDEN, INTERMEDIATE, VOCAB, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 8, 12, 10, 4, 2, 1
OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = {**OFFLINE, "quantization_mode": "online"}
BITLINEAR = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
LAYER = "model.layers.0."
PROJECTIONS = {
    "q": (LAYER + "self_attn.q_proj", (NUM_HEADS * HEAD_DIM, HIDDEN)),
    "k": (LAYER + "self_attn.k_proj", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
    "v": (LAYER + "self_attn.v_proj", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
    "o": (LAYER + "self_attn.o_proj", (HIDDEN, NUM_HEADS * HEAD_DIM)),
    "gate": (LAYER + "mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
    "up": (LAYER + "mlp.up_proj", (INTERMEDIATE, HIDDEN)),
    "down": (LAYER + "mlp.down_proj", (HIDDEN, INTERMEDIATE)),
}
Q = PROJECTIONS["q"][0]
DTYPES = {np.dtype(kind): name for kind, name in (
    ("u1", "U8"), ("i1", "I8"), ("f4", "F32"), ("f2", "F16"), ("f8", "F64"), ("u2", "BF16"), ("u4", "U32")
)}  # fmt: skip


def bfloat16(values: Any) -> NDArray[np.uint16]:
    """The bits of values that bfloat16 holds exactly."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def safetensors_bytes(tensors: dict[str, NDArray[Any]], padding: int = 0) -> bytes:
    """A safetensors file; arrays of uint16 are bfloat16. `padding` blanks after the header move the data."""
    header, data = {}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": DTYPES[array.dtype], "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    return file_bytes(json.dumps(header).encode() + b" " * padding, data)


def file_bytes(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header, whatever it says."""
    return len(header).to_bytes(8, "little") + header + data


@dataclass
class Folder:
    """A folder to be written: config.json and the tensors of one file."""

    config: dict[str, Any]
    tensors: dict[str, NDArray[Any]]

    def write(self, path: Path, padding: int = 0) -> Path:
        """Write it; returns the path."""
        (path / "config.json").write_text(json.dumps(self.config))
        (path / "model.safetensors").write_bytes(safetensors_bytes(self.tensors, padding))
        return path


def codes_of(shape: tuple[int, int], seed: int = 0) -> NDArray[np.int8]:
    """Ternary values."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.int8)


def floats_of(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    """Floats that bfloat16 and float16 hold exactly."""
    return np.random.default_rng(seed).integers(-64, 65, shape).astype(np.float32) / 32


def folder(family: str = "bitnet", quantization: dict[str, Any] | None = None, tied: bool = True) -> Folder:
    """A sound model of one layer: packed, with scale 1.5, or with float32 matrices where it is online or dense."""
    config = {
        "architectures": ["BitNetForCausalLM" if family == "bitnet" else "LlamaForCausalLM"],
        "model_type": family, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS, "vocab_size": VOCAB,
        "tie_word_embeddings": tied, "quantization_config": quantization,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": floats_of((VOCAB, HIDDEN)), "model.norm.weight": floats_of((HIDDEN,), 1)}
    if not tied:
        tensors["lm_head.weight"] = floats_of((VOCAB, HIDDEN), 2)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{LAYER}{norm}.weight"] = floats_of((HIDDEN,), 3)
    if family == "bitnet":
        tensors[f"{LAYER}self_attn.attn_sub_norm.weight"] = floats_of((NUM_HEADS * HEAD_DIM,), 4)
        tensors[f"{LAYER}mlp.ffn_sub_norm.weight"] = floats_of((INTERMEDIATE,), 5)
    for module, shape in PROJECTIONS.values():
        packed = quantization is not None and quantization.get("quantization_mode") != "online"
        tensors[f"{module}.weight"] = pack_quarters(codes_of(shape)) if packed else floats_of(shape)
        if packed:
            tensors[f"{module}.weight_scale"] = bfloat16([1.5])
    return Folder(config, tensors)


def sharded(path: Path, model: Folder, num_shards: int = 2) -> dict[str, Any]:
    """Write a model in shards with an index, which is returned."""
    path.mkdir(exist_ok=True)
    names = list(model.tensors)
    size = math.ceil(len(names) / num_shards)
    weight_map = {}
    for shard in range(num_shards):
        file, part = f"model-{shard}.safetensors", names[shard * size : (shard + 1) * size]
        (path / file).write_bytes(safetensors_bytes({name: model.tensors[name] for name in part}))
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(model.config))
    return index

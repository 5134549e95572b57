"""A Llama model as Meta's files, by torch.save: params.json, consolidated.NN.pth in two parts, tokenizer.model."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import torch
from format_models import Family, head_dim

_NUM_PARTS = 2
_NAMES = {
    "model.embed_tokens": ("tok_embeddings", 0), "model.norm": ("norm", -1), "lm_head": ("output", 0),
    "self_attn.q_proj": ("attention.wq", 0), "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0), "self_attn.o_proj": ("attention.wo", 1),
    "mlp.gate_proj": ("feed_forward.w1", 0), "mlp.down_proj": ("feed_forward.w2", 1),
    "mlp.up_proj": ("feed_forward.w3", 0), "input_layernorm": ("attention_norm", -1),
    "post_attention_layernorm": ("ffn_norm", -1),
}  # fmt: skip


def is_possible(family: Family) -> bool:
    """Whether Meta's files can say what the model is: dense, and its frequencies not scaled."""
    if family.spec.family != "llama" or family.spec.quantization:
        return False
    return bool(family.config.rope_parameters["rope_type"] == "default")


def write(family: Family, folder: Path) -> None:
    """Write the folder."""
    folder.mkdir()
    config = family.config
    params = {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "vocab_size": config.vocab_size, "norm_eps": config.rms_norm_eps,
        "multiple_of": config.intermediate_size, "ffn_dim_multiplier": 0.5,
        "rope_theta": config.rope_parameters["rope_theta"],
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(_NUM_PARTS)]
    for module, values, _ in family.weights():
        name, axis = _meta_name(module)
        if name.endswith(("wq", "wk")):
            heads = values.reshape(-1, 2, head_dim(family) // 2, values.shape[1])
            values = heads.swapaxes(1, 2).reshape(values.shape)
        pieces = np.split(values, _NUM_PARTS, axis) if axis >= 0 else [values] * _NUM_PARTS
        for part, piece in zip(parts, pieces, strict=True):
            part[f"{name}.weight"] = torch.from_numpy(piece.copy()).to(family.spec.dtype)
    for rank, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    (folder / "tokenizer.model").write_bytes(_ranks(family))


def _meta_name(module: str) -> tuple[str, int]:
    if module in _NAMES:
        return _NAMES[module]
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    name, axis = _NAMES[part]
    return f"layers.{layer}.{name}", axis


def _ranks(family: Family) -> bytes:
    spec = json.loads((family.folder / "tokenizer.json").read_text())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    tokens = sorted((number, token) for token, number in spec["model"]["vocab"].items() if token[0] in letters)
    lines = [bytes(letters[each] for each in token) for _, token in tokens if not token.startswith("<|")]
    return b"".join(base64.b64encode(line) + b" %d\n" % rank for rank, line in enumerate(lines))

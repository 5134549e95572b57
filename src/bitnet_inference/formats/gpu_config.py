"""The configuration of a checkpoint of Microsoft's GPU code, whose files hold nothing but tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.hf_config import read_config
from bitnet_inference.formats.hf_quantization import read_quantization
from bitnet_inference.formats.json_files import read_json
from bitnet_inference.formats.safetensors_files import Tensor, inside

# What the code has as constants: BitNet b1.58 2B-4T.
_KNOWN = ModelConfig(
    family="bitnet",
    vocab_size=128256,
    hidden_size=2560,
    intermediate_size=6912,
    num_layers=30,
    num_heads=20,
    num_kv_heads=5,
    head_dim=128,
    max_positions=4096,
    activation="relu2",
    norm_eps=1e-5,
    rope_theta=500000.0,
    sub_norms=True,
    bos_id=128000,
    eos_ids=(128001, 128009),
)


def gpu_config(folder: Path, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """That of the config.json beside the weights, as Hugging Face's repositories have it, or else 2B-4T's.

    The head is said to be one of its own. Raises FormatError where there is no config.json and the tensors are not of
    2B-4T's sizes, Unsupported for models that this code does not compute.
    """
    if not (folder / "config.json").exists():
        if not _is_known(tensors):
            why = "is missing, and the tensors are not of the sizes of BitNet b1.58 2B-4T: put the model's own there"
            raise FormatError(folder, "config.json", why)
        return _KNOWN
    fields = read_json(inside(folder, "config.json"))
    quantization = read_quantization(fields)
    config = read_config(fields, quantization)
    if config.family != "bitnet" or config.linear_norm:
        raise Unsupported(f"{folder}: checkpoints of Microsoft's GPU code hold BitNet models, config.json has another")
    return config


def _is_known(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the layers of 2B-4T, by the norms and the table of embeddings."""
    hidden, inner, last = _KNOWN.hidden_size, _KNOWN.intermediate_size, _KNOWN.num_layers - 1
    sizes = {
        "tok_embeddings.weight": (_KNOWN.vocab_size, hidden),
        f"layers.{last}.attention.attn_sub_norm.weight": (hidden,),
        f"layers.{last}.feed_forward.ffn_sub_norm.weight": (inner,),
    }
    has_more = any(name.startswith(f"layers.{last + 1}.") for name in tensors)
    return not has_more and all(name in tensors and tensors[name].shape == shape for name, shape in sizes.items())

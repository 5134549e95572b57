"""Turns a training checkpoint into a packed Hugging Face folder: config.json, generation_config.json,
model.safetensors.

Packing is that of transformers' integrations/bitnet.py: R = out / 4 packed rows; bits 2i and 2i+1 of packed row r hold
the code (ternary + 1) of row i * R + r. weight_scale multiplies (linear_class "autobitlinear"): bfloat16(mean|W|).
"""

import argparse
import json
from pathlib import Path

import torch
from model import Config, ternarize
from safetensors.torch import save
from tokenizer import BOS, EOS, PAD, TURN, special_ids
from tokenizers import Tokenizer
from torch import Tensor


def pack(ternary: Tensor) -> Tensor:
    """Ternary [out, in] in {-1, 0, 1}, out a multiple of 4, to bytes [out / 4, in]."""
    codes = (ternary + 1).to(torch.uint8).reshape(4, -1, ternary.shape[1])
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


def packed_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Master weights to the tensors of the file: projections packed with their scales, the rest in bfloat16."""
    tensors = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            ternary, scale = ternarize(weight)
            tensors[f"model.{name}"] = pack(ternary).contiguous()
            tensors[f"model.{name}_scale"] = scale.reshape(1).bfloat16()
        else:
            tensors[f"model.{name}"] = weight.bfloat16().contiguous()
    return tensors


def config_json(config: Config, special: dict[str, int]) -> dict[str, object]:
    """The config.json of a packed BitNetForCausalLM."""
    return {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "relu2",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": special[BOS],
        "eos_token_id": special[EOS],
        "pad_token_id": special[PAD],
        "quantization_config": {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
        },
    }


def generation_json(special: dict[str, int]) -> dict[str, object]:
    """Both ends stop a reply: the turn's in a conversation, the text's in a plain completion."""
    return {
        "bos_token_id": special[BOS],
        "eos_token_id": [special[EOS], special[TURN]],
        "pad_token_id": special[PAD],
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_new_tokens": 400,
    }


def export(checkpoint: Path, folder: Path) -> None:
    """Write the three files next to the tokenizer's."""
    state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = special_ids(tokenizer)
    packed = save(packed_tensors(state["weights"]), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(packed)
    config = config_json(Config(**state["config"]), special)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation_json(special), indent=2) + "\n")


def main() -> None:
    """Export one checkpoint and say how large the folder is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, help="holds the tokenizer; receives the model")
    options = parser.parse_args()
    export(options.checkpoint, options.folder)
    size = sum(path.stat().st_size for path in options.folder.iterdir() if path.is_file())
    print(f"{size / 1e6:.2f} MB in {options.folder}")


if __name__ == "__main__":
    main()

"""Write a checkpoint with the shape of a real model and random weights: `synthesize.py --shape bitnet-2b-4t DIR`.

The files are those of the real repositories (config.json, packed model.safetensors, tokenizer.json), so that
everything that reads a model reads these; Bonsai's are DIR/model.gguf, in Q1_0 and without words, and so is Maple's, in
TQ2_0. Norms and scales
keep activations near 1 in every layer. Random weights give flat logits; `--peak 8` makes the best logit stand about 8
standard deviations out, as it does in text: the head is the embedding table, so the share that a token's own
embedding keeps of the last hidden state sets how far its logit stands out, and the layers add as much as leaves it
that share. Such a model repeats its last token.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from synthetic_gguf import write_bonsai
from synthetic_maple import write_maple
from synthetic_weights import Recipe, write_safetensors
from synthetic_words import write_tokenizer

from bitnet_inference.formats.hf_config import read_config
from bitnet_inference.formats.hf_quantization import read_quantization
from bitnet_inference.formats.json_files import Fields

_BITNET: dict[str, Any] = {
    "architectures": ["BitNetForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_bitnet.BitNetConfig",
        "AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM",
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 4096,
    "model_type": "bitnet",
    "rms_norm_eps": 1e-05,
    "num_attention_heads": 20,
    "num_hidden_layers": 30,
    "num_key_value_heads": 5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "offline",
    },
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "bos_token_id": 510,
    "eos_token_id": 511,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_BONSAI: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}

_MAPLE: dict[str, Any] = {
    "architectures": ["MapleForCausalLM"],
    "model_type": "maple",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "sliding_window": 512,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}

SHAPES: dict[str, dict[str, Any]] = {
    "bitnet-2b-4t": _BITNET,
    "falcon3-1b": _LLAMA
    | {
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 131072,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000042.0,
        "tie_word_embeddings": False,
        "bos_token_id": 131070,
        "eos_token_id": 11,
        "quantization_config": {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]},
    },
    "llama-3.2-1b": _LLAMA
    | {
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "bonsai-1.7b": _BONSAI,
    "bonsai-8b": _BONSAI
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "maple-20b": _MAPLE,
    "tiny": _BITNET | _TINY,
}


def synthesize(shape: str, folder: Path, seed: int = 0, peak: float = 1.0) -> Path:
    """Write the checkpoint into a folder, which is made; returns the file of its weights.

    Raises OSError, and before anything is written ValueError for a wrong seed or a peak that the shape cannot have.
    """
    config = SHAPES[shape]
    fields = Fields(folder / "config.json", config)
    quantization = read_quantization(fields)
    if shape.startswith(("bonsai", "maple")):
        folder.mkdir(parents=True, exist_ok=True)
        write = write_maple if shape.startswith("maple") else write_bonsai
        write(folder / "model.gguf", read_config(fields, None), seed, peak)
        return folder / "model.gguf"
    recipe = Recipe(read_config(fields, quantization), quantization, seed, peak)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": [config["eos_token_id"]]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(folder, config["vocab_size"], config["bos_token_id"], config["eos_token_id"])
    unfinished = folder / "model.safetensors.part"
    write_safetensors(unfinished, recipe.tensors())
    os.replace(unfinished, folder / "model.safetensors")
    return folder / "model.safetensors"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=1.0, metavar="SIGMAS", help="how far the best logit stands out")
    arguments = parser.parse_args()
    start = time.perf_counter()
    try:
        size = synthesize(arguments.shape, arguments.folder, arguments.seed, arguments.peak).stat().st_size
    except (OSError, ValueError) as error:
        parser.exit(2, f"synthesize.py: {error}\n")
    print(f"{arguments.folder}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()

"""Tiny checkpoints that Transformers' own classes load, with the magnitudes of real ones."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitNetConfig,
    BitNetForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.bitnet import pack_weights

VOCAB_SIZE, BOS, EOS, EOT = 384, 376, 377, 383
PACKED = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
OLD = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}  # as Falcon's and Llama3-8B-1.58's files
PARTLY = ("lm_head", "model.layers.1.mlp", "layers.0.self_attn.k_proj")  # a name, a start, an end
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 3.8],
             "long_factor": [2.0] * 8, "original_max_position_embeddings": 256}  # fmt: skip
CLASSES = {
    "bitnet": (BitNetConfig, BitNetForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
}
BARE = {"qwen3": "Model", "gemma3": "TextModel"}
OLD_NAMES = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}


@dataclass(frozen=True)
class Spec:
    """One checkpoint: `config` goes to the family's configuration class, `quantization` into its config.json.

    `kept`: converted in no layer whose name starts so. `resaved`: written by Transformers' save_pretrained, in shards
    of that size. `unpacked`: the ternary matrices as floats (5.23 cannot save what it unpacked). `masters_of`: the
    weights are those of another checkpoint. `old_keys`: config.json as 4.x wrote it. `disguise`: how the files are
    changed when all has been computed, to what Transformers itself does not read.
    """

    name: str
    family: str
    dtype: torch.dtype = torch.bfloat16
    quantization: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ("lm_head",)
    resaved: str = ""
    unpacked: bool = False
    masters_of: str = ""
    old_keys: bool = False
    disguise: str = ""
    template: str = ""

    @property
    def online(self) -> bool:
        return bool(self.quantization) and self.quantization.get("quantization_mode") == "online"

    @property
    def divides(self) -> bool:
        return self.quantization.get("linear_class", "bitlinear") == "bitlinear"


GEMMA = {"hidden_size": 40, "intermediate_size": 104, "head_dim": 24, "num_key_value_heads": 1, "num_hidden_layers": 3,
         "sliding_window": 6, "query_pre_attn_scalar": 20, "pad_token_id": 0,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
ONLINE = {**PACKED, "quantization_mode": "online"}
SPECS = (
    Spec("bitnet-packed", "bitnet", quantization=PACKED, config={"tie_word_embeddings": True}, old_keys=True,
         template="tokenizer_config"),
    Spec("bitnet-masters", "bitnet", quantization=ONLINE, config={"tie_word_embeddings": True},
         masters_of="bitnet-packed"),
    Spec("bitnet-unpacked", "bitnet", quantization=PACKED, config={"tie_word_embeddings": True}, unpacked=True,
         masters_of="bitnet-packed"),
    Spec("bitnet-bitlinear", "bitnet", quantization={**PACKED, "linear_class": "bitlinear"}),
    Spec("llama-bitlinear", "llama", quantization=OLD, config={"head_dim": 32, "rope_theta": 1000042.0},
         resaved="64KB", template="jinja"),
    Spec("llama-autobitlinear", "llama", torch.float16, {**PACKED, "modules_to_not_convert": None}),
    Spec("llama-masters-f32", "llama", torch.float32, ONLINE, {"tie_word_embeddings": True}),
    Spec("llama-rms-norm", "llama", quantization={**PACKED, "use_rms_norm": True, "rms_norm_eps": 1e-5}),
    Spec("llama-rms-norm-bitlinear", "llama", quantization={"quant_method": "bitnet", "use_rms_norm": True}),
    Spec("llama-ternary-head", "llama", quantization={**OLD, "modules_to_not_convert": []}, kept=()),
    Spec("llama-partial", "llama", quantization={**OLD, "modules_to_not_convert": list(PARTLY)},
         kept=(*PARTLY[:2], "model.layers.0.self_attn.k_proj")),
    Spec("llama3-bf16", "llama", config={"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, resaved="1GB"),
    Spec("llama-f16", "llama", torch.float16, config={"rope_theta": 10000.0}, resaved="1GB", old_keys=True),
    Spec("llama-f32", "llama", torch.float32,
         config={"intermediate_size": 96, "rope_parameters": LINEAR_ROPE}, resaved="150KB"),
    Spec("bitnet-1bitllm", "bitnet", torch.float16, ONLINE,
         {"hidden_size": 48, "intermediate_size": 104, "num_key_value_heads": 4, "hidden_act": "silu",
          "rope_theta": 10000.0, "tie_word_embeddings": True}, disguise="1bitllm"),
    Spec("qwen3-bitlinear", "qwen3", quantization=OLD, config={"head_dim": 32, "rope_theta": 1000000.0}, resaved="1GB"),
    Spec("qwen3-bf16", "qwen3", config={"hidden_size": 48, "head_dim": 24, "tie_word_embeddings": True}),
    Spec("qwen3-embedding", "qwen3", quantization={**ONLINE, "use_rms_norm": True},
         config={"hidden_size": 48, "intermediate_size": 96, "head_dim": 16, "tie_word_embeddings": True},
         disguise="embedding"),
    Spec("gemma3-bf16", "gemma3", config=GEMMA),
    Spec("granite-bf16", "granite",
         config={"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
                 "attention_multiplier": 0.125, "head_dim": 16, "tie_word_embeddings": True}),
    Spec("minicpm-f32", "granite", torch.float32,
         config={"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5, "logits_scaling": 64 / 16,
                 "attention_multiplier": 16**-0.5, "rope_parameters": LONG_ROPE}, disguise="minicpm"),
    Spec("gemma3-embedding", "gemma3", quantization={**ONLINE, "use_rms_norm": True},
         config={**GEMMA, "sliding_window": 16, "intermediate_size": 80}, disguise="embedding"),
    Spec("qwen2-bitlinear", "qwen2", quantization=OLD, resaved="1GB"),
    Spec("qwen2-bf16", "qwen2",
         config={"rope_theta": 1000000.0, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    # Apart from the others: not every device and file has experts.
    *(Spec(f"experts/qwen3moe-{shares}", "qwen3moe", resaved="1GB",
           config={"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16,
                   "norm_topk_prob": shares == "of-best"}) for shares in ("of-best", "of-all")),
)  # fmt: skip


def configuration(spec: Spec) -> PreTrainedConfig:
    """The configuration object, without the quantisation."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "dtype": spec.dtype}
    return CLASSES[spec.family][0](**{**sizes, **heads, **ids, **spec.config})


def write(spec: Spec, folder: Path, attempt: int) -> None:
    """Write config.json, generation_config.json and the safetensors files of a checkpoint."""
    config = configuration(spec)
    tensors = _masters(spec, config, attempt)
    if spec.quantization:
        config.quantization_config = spec.quantization
        if not spec.online:
            tensors = _packed(spec, tensors)
    config.architectures = [CLASSES[spec.family][1].__name__]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if spec.unpacked:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype)
        kept = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    elif spec.resaved:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size=spec.resaved)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, EOT], "temperature": 0.6}) + "\n")
    if spec.old_keys:
        _use_old_keys(folder / "config.json", spec)


def _masters(spec: Spec, config: Any, attempt: int) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = CLASSES[spec.family][1](config)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    if spec.quantization and spec.quantization.get("use_rms_norm"):
        projections = [name for name in shapes if _is_converted(spec, name)]
        shapes |= {name.replace(".weight", ".rms_norm.weight"): shapes[name][1:] for name in projections}
    seed = zlib.crc32((spec.masters_of or spec.name).encode()) + attempt
    random = np.random.default_rng(seed)
    ternary = spec.quantization is not None
    return {
        name: torch.from_numpy(_values(random, name, shape, ternary)).to(spec.dtype) for name, shape in shapes.items()
    }


def _values(random: np.random.Generator, name: str, shape: tuple[int, ...], ternary: bool) -> np.ndarray:
    if name.endswith(".bias"):
        return random.normal(0, 3, shape).astype(np.float32)  # as large as those of k in real files
    if len(shape) == 1:
        middle = 0.1 if ternary and not name.endswith(("model.norm.weight", "q_norm.weight", "k_norm.weight")) else 1.0
        return (middle * random.lognormal(0, 0.3, shape)).astype(np.float32)
    if "_proj" not in name:
        return random.normal(0, 0.4, shape).astype(np.float32)
    if not ternary:
        return random.normal(0, 2 * shape[1] ** -0.5, shape).astype(np.float32)
    values = random.laplace(0, 1.5, shape)
    values[random.integers(shape[0])] *= 1e-34  # real files have dead rows and columns, which underflow in float16
    values[:, random.integers(shape[1])] *= 1e-34
    return values.astype(np.float32)


def _packed(spec: Spec, masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, master in masters.items():
        if not _is_converted(spec, name):
            tensors[name] = master
            continue
        weight = master.float()
        inverse = 1.0 / weight.abs().mean().clamp_(min=1e-5)  # transformers' WeightQuant
        tensors[name] = pack_weights((weight * inverse).round().clamp(-1, 1))
        scale = inverse if spec.divides else 1.0 / inverse
        tensors[name.replace(".weight", ".weight_scale")] = scale.reshape(1).to(spec.dtype)
    return tensors


def _is_converted(spec: Spec, name: str) -> bool:
    linear = "_proj.weight" in name or name == "lm_head.weight"
    return linear and not name.startswith(spec.kept or ("-",))


def disguise(spec: Spec, folder: Path) -> None:
    """Rename what a folder holds as other programs wrote it, and take away what they did not say."""
    if not spec.disguise:
        return
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    tensors = load_file(folder / "model.safetensors")
    if spec.disguise == "1bitllm":
        config |= {"architectures": ["BitnetForCausalLM"], "model_type": "llama", "input_bits": 8, "weight_bits": 1}
        for ours, theirs in OLD_NAMES.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    elif spec.disguise == "minicpm":
        config = _as_minicpm(config)
    else:
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", BARE[spec.family])]
        tensors = {
            name.removeprefix("model.").replace(".rms_norm.", ".norm."): tensor for name, tensor in tensors.items()
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _as_minicpm(config: dict[str, Any]) -> dict[str, Any]:
    """As OpenBMB writes it: the multipliers of Granite by other names, and what they follow from."""
    width, depth = config["hidden_size"], config["num_hidden_layers"]
    config |= {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm"}
    config |= {"scale_emb": config.pop("embedding_multiplier")}
    config |= {"scale_depth": config.pop("residual_multiplier") * depth**0.5}
    config |= {"dim_model_base": round(width / config.pop("logits_scaling"))}
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert config.pop("attention_multiplier") == (width // config["num_attention_heads"]) ** -0.5
    return config


def _use_old_keys(path: Path, spec: Spec) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "torch_dtype": config.pop("dtype")}
    if spec.family == "bitnet":
        classes = {"AutoConfig": "configuration_bitnet.BitNetConfig"}
        config["auto_map"] = classes | {"AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM"}
    path.write_text(json.dumps(config, indent=2) + "\n")

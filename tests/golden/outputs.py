"""What Transformers computes from a checkpoint, in float32: the numbers that ours are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import BOS, VOCAB_SIZE, Spec
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, WeightQuant, unpack_weights

NUM_TOKENS, NUM_PROMPT, NUM_GREEDY = 24, 8, 16
NUM_LAYER_ROWS = 8
LAYERS = {
    "layers.0.q": "model.layers.0.self_attn.q_proj",
    "layers.1.o": "model.layers.1.self_attn.o_proj",
    "layers.0.down": "model.layers.0.mlp.down_proj",
    "head": "lm_head",
}


class Tap:
    """Listens at the ternary layers of a model: their inputs, their codes, and how near a code came to a tie."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.closest_tie = 0.5
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, (AutoBitLinear, BitLinear)):
                module.register_forward_hook(lambda module, args, out, name=name: self._hear(name, module, args, out))

    def _hear(self, name: str, module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])
        x = x if module.rms_norm is None else module.rms_norm(x)
        scaled = x.double() * (127 / x.double().abs().amax(-1, keepdim=True).clamp(min=1e-5))
        away = (scaled - scaled.floor() - 0.5).abs().min().item()
        self.closest_tie = min(self.closest_tie, away)
        self.inputs[name], self.outputs[name] = x, output.reshape(-1, output.shape[-1])


def load(folder: Path, spec: Spec) -> torch.nn.Module:
    """The model in float32, its weights as they are in the file's own dtype."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=spec.dtype, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, BitLinear):
            module.dtype = torch.float32  # otherwise the integer sums are rounded to the file's dtype
        if isinstance(module, AutoBitLinear) and module.online_quant:
            # +-m is rounded to the masters' dtype, as in Transformers' own run of such a file.
            module.weight.data, module.online_quant = WeightQuant.apply(module.weight.data).float(), False
            module.weight_scale = torch.ones(1)
            module.golden_online = True
    torch.nn.Module.float(model)
    return model.eval()


def compute(folder: Path, spec: Spec) -> tuple[dict[str, np.ndarray], float]:
    """All golden arrays of a checkpoint, and the distance to a tie of the int8 code that came nearest to one."""
    model = load(folder, spec)
    tap = Tap(model)
    random = np.random.default_rng(len(spec.masters_of or spec.name))
    ids = [BOS, *random.integers(0, VOCAB_SIZE - 8, NUM_TOKENS - 1).tolist()]
    with torch.no_grad():
        result = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        arrays = {"token_ids": np.array(ids, np.int32), "logits": result.logits[0].numpy()}
        arrays["hidden"] = torch.stack([state[0] for state in result.hidden_states]).numpy()
        arrays["hidden"][-1] /= getattr(model.config, "logits_scaling", 1.0)  # which the engine's last norm does
        rotary = model.model.rotary_emb
        frequencies = rotary.inv_freq if hasattr(rotary, "inv_freq") else rotary.full_attention_inv_freq
        arrays["inv_freq"] = frequencies.float().numpy()
        for name, module_name in LAYERS.items():
            if module_name in tap.inputs:
                arrays |= _layer(name, model.get_submodule(module_name), tap, module_name)
        closest = tap.closest_tie
        arrays |= _greedy(model, ids[:NUM_PROMPT])
    return arrays, closest


def _layer(name: str, module: Any, tap: Tap, module_name: str) -> dict[str, np.ndarray]:
    x, y = tap.inputs[module_name][:NUM_LAYER_ROWS], tap.outputs[module_name][:NUM_LAYER_ROWS]
    scales = 127 / x.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
    codes = (x * scales).round().clamp(-128, 127)
    weight, multiplier = ternary_weight(module)
    sums = codes.double() @ weight.double().T
    found = {"x": x, "codes": codes.to(torch.int8), "scales": scales[:, 0], "sums": sums.to(torch.int32)}
    found |= {"y": y, "weight": weight.to(torch.int8), "m": multiplier.reshape(())}
    return {f"{name}.{key}": value.numpy() for key, value in found.items()}


def ternary_weight(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The values -1, 0, 1 of a ternary layer, and what multiplies the product."""
    if isinstance(module, BitLinear):
        return unpack_weights(module.weight, torch.float32), 1 / module.weight_scale
    if hasattr(module, "golden_online"):
        return module.weight.sign(), module.weight.abs().max()
    return module.weight, module.weight_scale


def _greedy(model: torch.nn.Module, prompt: list[int]) -> dict[str, np.ndarray]:
    ids, margins = list(prompt), []
    for _ in range(NUM_GREEDY):
        best = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        ids.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return {"greedy_ids": np.array(ids, np.int32), "greedy_margins": np.array(margins, np.float32)}

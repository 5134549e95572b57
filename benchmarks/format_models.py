"""Tiny models of every family, their folders, and what Transformers computes from them: the reference of formats.py.

The checkpoints are those of tests/golden, with rows as wide as the largest blocks of GGUF files.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.update(TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "golden"))

import models
import outputs
import torch
import words
from transformers.integrations.bitnet import AutoBitLinear, BitLinear

torch.set_grad_enabled(False)
torch.set_num_threads(1)
Floats = NDArray[np.float32]
NUM_TOKENS, NUM_GREEDY = 8, 12
_VOCAB = 640  # room for the 256 special tokens of Meta's vocabulary
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": _VOCAB}
# Nearer to a tie than this, an int8 code may flip by rounding alone, and the comparison would say nothing.
_MIN_TIE, _MAX_PROMPTS = 2e-5, 100
# GGUF files of Gemma 3 have one pattern of local layers, and scores divided by the root of head_dim.
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "num_hidden_layers": 6, "sliding_window": 6,
          "layer_types": [*["sliding_attention"] * 5, "full_attention"]}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    "llama-bitlinear": {"head_dim": 128},
    "qwen3-bitlinear": {"head_dim": 128},
    "qwen3-bf16": {"head_dim": 64},
    "qwen3-embedding": {"head_dim": 64},
    "gemma3-bf16": _GEMMA,
    "gemma3-embedding": _GEMMA,
}


@dataclass(frozen=True)
class Expected:
    """What a reference computes: logits [tokens, vocab] behind each of `ids`, and the tokens that it goes on with.

    `margins`: how far the best logit was before the next one, by the RMS of `logits`.
    """

    ids: list[int]
    logits: Floats
    greedy: list[int]
    margins: list[float]


class Rounded(torch.nn.Module):  # type: ignore[misc]
    """A ternary layer: rows rounded to int8 by their largest magnitude, times +-m and 0."""

    def __init__(self, weight: torch.Tensor, norm: Any, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.rms_norm, self.bias = torch.nn.Parameter(weight), norm, bias
        self.closest_tie = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]."""
        x = x if self.rms_norm is None else self.rms_norm(x)
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        scaled = x * scale
        self.closest_tie = min(self.closest_tie, float((scaled - scaled.floor() - 0.5).abs().min()))
        product = torch.nn.functional.linear(scaled.round().clamp(-128, 127), self.weight) / scale
        return product if self.bias is None else product + self.bias


class Family:
    """One tiny model: its folder, and a Transformers model in float32 of the same weights."""

    def __init__(self, spec: models.Spec, folder: Path) -> None:
        """Writes the folder."""
        self.spec = replace(spec, config={**spec.config, **_WIDE, **_CHANGES.get(spec.name, {})}, resaved="")
        self.folder = folder
        folder.mkdir(parents=True)
        models.write(self.spec, folder, 0)
        self.model = outputs.load(folder, self.spec)
        words.write(self.spec, folder)
        models.disguise(self.spec, folder)
        for name, module in [*self.model.named_modules()]:
            if isinstance(module, AutoBitLinear | BitLinear):
                codes, scale = outputs.ternary_weight(module)
                bias = None if module.bias is None else module.bias.float()
                self.model.set_submodule(name, Rounded(codes.float() * scale.float(), module.rms_norm, bias))

    @property
    def config(self) -> Any:
        """Transformers' own."""
        return self.model.config

    @property
    def is_tied(self) -> bool:
        """Whether the head is the table of embeddings."""
        return bool(self.config.tie_word_embeddings)

    def weights(self) -> Iterator[tuple[str, Floats, bool]]:
        """Every weight by the name of its module, and whether it is a ternary matrix; biases by NAME.bias."""
        for name, module in self.model.named_modules():
            weight = getattr(module, "weight", None)
            if weight is not None and not (name == "lm_head" and self.is_tied):
                yield name, weight.detach().float().numpy(), isinstance(module, Rounded)
            bias = getattr(module, "bias", None)
            if bias is not None:
                yield f"{name}.bias", bias.detach().float().numpy(), False

    def with_weights(self, weights: Mapping[str, tuple[Floats, bool]]) -> torch.nn.Module:
        """Another model with these weights; a matrix is ternary or dense as is said beside it."""
        model = copy.deepcopy(self.model)
        for name, (values, is_ternary) in weights.items():
            module, tensor = model.get_submodule(name), torch.from_numpy(values.copy())
            if is_ternary:
                model.set_submodule(name, Rounded(tensor, getattr(module, "rms_norm", None), _bias(module)))
            elif isinstance(module, Rounded):
                dense = torch.nn.Linear(*values.shape[::-1], bias=False)
                dense.weight.data, dense.bias = tensor, _bias(module)
                model.set_submodule(name, dense)
            else:
                module.weight.data = tensor
        if self.is_tied:
            model.lm_head.weight = model.get_input_embeddings().weight
        return model.eval()


def _bias(module: torch.nn.Module) -> torch.nn.Parameter | None:
    bias = getattr(module, "bias", None)
    return None if bias is None else torch.nn.Parameter(bias.detach())


def head_dim(family: Family) -> int:
    """How many features a head has."""
    return int(family.model.model.layers[0].self_attn.head_dim)


def families(root: Path, names: tuple[str, ...]) -> Iterator[Family]:
    """The models of these names, or all, one after the other."""
    for spec in models.SPECS:
        if spec.name in names or not names:
            yield Family(spec, root / spec.name)


def expected(model: torch.nn.Module) -> Expected:
    """Behind the first random prompt whose int8 codes all stay away from ties."""
    random = np.random.default_rng(0)
    rounded = [module for module in model.modules() if isinstance(module, Rounded)]
    best, found = -1.0, None
    for _ in range(_MAX_PROMPTS):
        for module in rounded:
            module.closest_tie = 0.5
        ids = random.integers(0, models.BOS, NUM_TOKENS).tolist()
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        if (closest := min((module.closest_tie for module in rounded), default=0.5)) > best:
            best, found = closest, (ids, logits)
        if best >= _MIN_TIE:
            break
    assert found is not None
    ids, logits = found
    greedy, margins = _greedy(model, ids)
    size = float(np.sqrt(np.square(logits).mean()))
    return Expected(ids, logits, greedy, [margin / size for margin in margins])


def _greedy(model: torch.nn.Module, ids: list[int]) -> tuple[list[int], list[float]]:
    known, margins = list(ids), []
    for _ in range(NUM_GREEDY):
        best = model(torch.tensor([known]), use_cache=False).logits[0, -1].topk(2)
        known.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return known[len(ids) :], margins

"""What MiniCPM and Granite multiply besides their weights, brought to what the decoder has.

x + s f(norm(x)) in every layer, with embeddings times e and logits divided by l, gives what x / s + f(norm(x / s))
gives with embeddings times e / s: RMSNorm takes any scale away, if its epsilon is divided by s^2. The last norm
divides by l, which embeddings of texts, of length 1, do not show. So only `embed_scale`, `norm_eps` and the vector
"norm" differ from a model without (Maximal Update Parametrization: Yang et al., arXiv:2203.03466; MiniCPM: Hu et al.,
arXiv:2404.06395).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.json_files import Fields

_LEAST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """What embeddings, and what attention and MLP add to the residual, are multiplied by, and logits divided.

    They are numbers of float32, as in GGUF files, so that a model has the same bits from every file.
    """

    embed: float = 1.0
    residual: float = 1.0
    logits: float = 1.0

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):  # what has no place in float32 is refused by `folded`
            for name, value in vars(self).items():
                object.__setattr__(self, name, float(np.float32(value)))

    def folded(self, path: Path, config: ModelConfig) -> ModelConfig:
        """The configuration of the model without them; raises FormatError where no model has such."""
        if self == Multipliers():
            return config
        for name, value in vars(self).items():
            if not _LEAST < value < 1 / _LEAST:
                raise FormatError(path, "", f"the multiplier of {name} is {value:g}, as in no model: correct it")
        return replace(config, embed_scale=self.embed / self.residual, norm_eps=config.norm_eps / self.residual**2)

    def vector(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """A vector of the model without them, from the one in the file."""
        with np.errstate(over="ignore"):  # weights that large make infinite logits in any model
            return values / np.float32(self.logits) if name == "norm" else values


def read_multipliers(fields: Fields, family: str, num_layers: int, hidden_size: int) -> Multipliers:
    """Those of a config.json. Raises FormatError for what is no number above 0, Unsupported for sparse attention."""
    if family == "granite":
        return Multipliers(
            embed=fields.positive("embedding_multiplier", 1.0),
            residual=fields.positive("residual_multiplier", 1.0),
            logits=fields.positive("logits_scaling", 1.0),
        )
    if family != "minicpm":
        return Multipliers()
    blocks = "attention to some blocks is not supported: remove it, and tokens see all before them"
    for key, why in (("sparse_config", blocks), ("num_experts", "experts are not supported: use another model")):
        if fields.values.get(key):
            raise Unsupported(f"{fields.path}: {key}: {why}")
    return Multipliers(
        embed=fields.positive("scale_emb", 1.0),
        residual=fields.positive("scale_depth", 1.0) / math.sqrt(num_layers),
        logits=hidden_size / fields.positive("dim_model_base", 1.0),
    )


def usual_multipliers(architecture: str, num_layers: int, hidden_size: int) -> Multipliers:
    """Those of a GGUF file that does not say them: of MiniCPM-2B, for which converters did not."""
    if architecture != "minicpm":
        return Multipliers()
    return Multipliers(embed=12.0, residual=1.4 / math.sqrt(num_layers), logits=hidden_size / 256)

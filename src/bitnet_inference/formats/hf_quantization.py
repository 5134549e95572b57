"""What `quantization_config` says of a Hugging Face model: which matrices are ternary, and how their scale is meant."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from bitnet_inference.errors import Unsupported
from bitnet_inference.formats.json_files import Fields, shown
from bitnet_inference.formats.mlx import is_mlx

_MAX_PATTERNS = 512
# What transformers takes as a regular expression; from a stranger only names and up to two ".*".
_PATTERN = re.compile(r"(?!(?:.*\.\*){3})(?:[\w.-]|(?<=\.)\*(?!\*))+")


@dataclass(frozen=True)
class Quantization:
    """BitNet quantisation as transformers' `BitNetQuantConfig` has it.

    divides: the stored weight_scale is 1 / m ("bitlinear"), else it is m ("autobitlinear").
    online: the matrices are master weights, to be ternarised; `by_rows` they are ternary with a scale for each row.
    norm: each ternary matrix has its own RMSNorm before it.
    """

    divides: bool
    online: bool
    norm: bool
    norm_eps: float
    skipped: tuple[str, ...] | None
    by_rows: bool = False

    def converts(self, module: str) -> bool:
        """Whether the linear layer of this name is ternary: without a list all but lm_head are, else all not listed.

        As transformers' `should_convert_module`: an entry skips a module whose name ends with it, or that it matches
        from the start to a boundary.
        """
        if self.skipped is None:
            return module != "lm_head"
        return not any(_skips(pattern, module) for pattern in self.skipped)


def masters(norm: bool, norm_eps: float, by_rows: bool) -> Quantization:
    """How weights are meant whose config.json says nothing: all projections ternary, by their mean magnitude if no row
    has a scale of its own."""
    return Quantization(divides=False, online=True, norm=norm, norm_eps=norm_eps, skipped=None, by_rows=by_rows)


def packed_beside_mlx(tensors: Collection[str]) -> Quantization | None:
    """How packed matrices are meant in an MLX model, whose config.json tells of the others alone: as BitNet 2B-4T's."""
    has_scales = any(name.endswith(".weight_scale") for name in tensors)
    return Quantization(divides=False, online=False, norm=False, norm_eps=1e-6, skipped=None) if has_scales else None


def read_quantization(config: Fields) -> Quantization | None:
    """The quantisation of a config.json; None for dense models and MLX's. Raises Unsupported for methods of others."""
    fields = config.section("quantization_config")
    if fields is None or ("quant_method" not in fields and is_mlx(config)):
        return None
    method = fields.text("quant_method", "")
    if method != "bitnet":
        why = f"quant_method {shown(method)}: only 'bitnet' and unquantised models are read"
        raise Unsupported(f"{config.path}: {why}: use the unquantised repository, or a GGUF file in Q8_0")
    linear_class = _one_of(fields, "linear_class", "bitlinear", "autobitlinear")
    mode = _one_of(fields, "quantization_mode", "offline", "online")
    return Quantization(
        divides=linear_class == "bitlinear",
        online=linear_class == "autobitlinear" and mode == "online",
        norm=fields.flag("use_rms_norm"),
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        skipped=_patterns(fields),
    )


def _one_of(fields: Fields, key: str, default: str, other: str) -> str:
    value = fields.text(key, default)
    if value not in (default, other):
        raise fields.wrong(key, f"is neither {default!r} nor {other!r}: correct it")
    return value


def _patterns(fields: Fields) -> tuple[str, ...] | None:
    patterns = fields.strings("modules_to_not_convert")
    if patterns is None:
        return None
    if len(patterns) > _MAX_PATTERNS:
        raise fields.wrong("modules_to_not_convert", f"has more than {_MAX_PATTERNS} entries: shorten it")
    for pattern in patterns:
        if len(pattern) > 200 or not _PATTERN.fullmatch(pattern):
            raise fields.wrong("modules_to_not_convert", f"holds {shown(pattern)}: write names of modules")
    return tuple(dict.fromkeys(patterns))


def _skips(pattern: str, module: str) -> bool:
    at_start = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module, re.ASCII)
    return at_start is not None or module.endswith(pattern)

"""How the CPU backend keeps ternary weights in memory."""

from __future__ import annotations

from collections.abc import Sequence

from bitnet_inference import native
from bitnet_inference.config import EngineConfig
from bitnet_inference.formats.checkpoint import Checkpoint, expected_shapes, is_projection

# A row of T5 ends with a whole block of 80 columns. Where it saves less than a tenth, it multiplies more than it saves.
_MAX_T5 = 0.9


def packing(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """The format of all ternary weights, see EngineConfig.ternary_format: a program has one order of codes."""
    shapes = {name: shape for name, shape in expected_shapes(checkpoint.config) if checkpoint.is_ternary(name)}
    if any(map(checkpoint.group_size, shapes)):
        return "u2"
    if config.ternary_format != "auto":
        return config.ternary_format
    u2, t5 = (sum(packed_bytes(shape, kind) for shape in shapes.values()) for kind in ("u2", "t5"))
    return "t5" if native.decodes_t5(config.isa) and t5 < _MAX_T5 * u2 else "u2"


def is_coded(checkpoint: Checkpoint, name: str) -> bool:
    """Whether embeddings or a head are dense, but known to consist of ternary codes and scales: so they are kept."""
    return not is_projection(name) and not checkpoint.is_ternary(name) and checkpoint.group_size(name) > 0


def code_bytes(checkpoint: Checkpoint, name: str, shape: Sequence[int], ternary_format: str) -> int:
    """Of a matrix of codes with its scales, in 16 bits; half of the codes where all turn out to be -1 or +1."""
    group_size = checkpoint.group_size(name)
    scales = 2 * shape[0] * -(-shape[1] // group_size) if group_size else 0
    return packed_bytes(shape, ternary_format) + scales


def packed_bytes(shape: Sequence[int], ternary_format: str) -> int:
    """Of a ternary matrix: groups of 32 rows, and steps of 16 columns or blocks of 80, are whole."""
    weights_a_byte, columns = (5, 80) if ternary_format == "t5" else (4, 16)
    return -(-shape[0] // 32) * 32 * -(-shape[1] // columns) * columns // weights_a_byte

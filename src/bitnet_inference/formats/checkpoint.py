"""What every checkpoint format turns into: a configuration and lazy tensors under canonical names.

Canonical names (N counts the layers from 0):

    embed  norm  head                                   head only where it is not tied to embed
    layers.N.{attn_norm,mlp_norm}                       vectors [hidden]
    layers.N.{attn_sub_norm,mlp_sub_norm}               vectors, where config.sub_norms
    layers.N.{attn_post_norm,mlp_post_norm}             vectors [hidden], where config.post_norms
    layers.N.{q_norm,k_norm}                            vectors [head_dim], where config.head_norms
    layers.N.{q,k,v,o,gate,up,down}                     matrices [out, in]
    layers.N.router                                     matrix [experts, hidden], where config.experts, and instead of
    layers.N.experts.E.{gate,up,down}                   gate, up and down those of each expert, counted from 0
    layers.N.{q,k,v}.bias                               vectors [out], where config.qkv_bias
    layers.N.{q,k,v,o,gate,up,down}.norm                vectors [in], where config.linear_norm
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.floats import FloatName

_MAX_LINES, _MAX_TOLD = 100, 3
GROUP_SIZES = (64, 128)  # columns that may share a scale
# "gelu" by its tanh form; "silu7" is silu of a gate of at most 7, for an `up` that is cut at -7 and 7.
Activation = Literal["relu2", "silu", "gelu", "silu7"]
Pooling = Literal["last", "mean"]
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
MLP_PROJECTIONS = ("gate", "up", "down")
_BIASED = ("q", "k", "v")
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched: "linear" uses `factor` alone, "llama3" all four.

    "factors" divides each by its own: head_dim / 2 numbers.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LocalLayers:
    """Layers whose tokens see the last `window` positions only, their own too, and turn by another base, unscaled."""

    layers: tuple[int, ...]
    window: int
    rope_theta: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Every layer has `count` MLPs of `intermediate_size`, of which each token goes through the `used` best.

    A router scores them. What they give is added up by shares: the softmax of all scores, or, where `renormalized`, of
    those of the best alone.
    """

    count: int
    used: int
    renormalized: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, whatever the file it came from. Sizes are counts of features, rows or tokens.

    `sub_norms`: norms before o and before down. `linear_norm`: a norm before every projection. `post_norms`: norms of
    what attention and MLP add to the residual. `head_norms`: norms of every head of q and k, before they are rotated.
    `qkv_bias`: vectors that are added to q, k and v, before these norms and before they are rotated.
    `embed_scale` multiplies embeddings, `attention_scale` scores. `pooling` is how the file says to embed a text.
    `experts`: there are several MLPs a layer. `rotary_dim`: so many first features of a head are rotated, None for all;
    `plain_global`: in layers with a window alone.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    activation: Activation
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    sub_norms: bool = False
    linear_norm: bool = False
    linear_norm_eps: float = 1e-6
    post_norms: bool = False
    head_norms: bool = False
    qkv_bias: bool = False
    embed_scale: float = 1.0
    attention_scale: float | None = None
    local: LocalLayers | None = None
    experts: Experts | None = None
    rotary_dim: int | None = None
    plain_global: bool = False
    pooling: Pooling | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def num_rotated(self) -> int:
        """How many features of a head are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def score_scale(self) -> float:
        """What the scores of attention are multiplied by: 1 / sqrt(head_dim) where the file says nothing else."""
        return 1.0 / math.sqrt(self.head_dim) if self.attention_scale is None else self.attention_scale

    def window_of(self, layer: int) -> int:
        """How many positions a token sees in this layer, where it is a local one; 0: all before it."""
        return self.local.window if self.local is not None and layer in self.local.layers else 0


@dataclass(frozen=True)
class Dense:
    """A matrix [out, in] in a float format. `data` is row-major; bfloat16 is kept as its uint16 bits."""

    data: NDArray[Any]
    dtype: FloatName


@dataclass(frozen=True)
class Ternary:
    """A ternary matrix [out, in] as the file packs it (`layout`: see ternary.py) and its multiplicative scale m.

    Each row may have one: float32 [out]. With a `group_size`, that many consecutive columns of a row share a scale:
    float32 [out, ceil(in / group_size)].
    """

    data: NDArray[Any]
    layout: ternary.Layout
    shape: tuple[int, int]
    scale: float | NDArray[np.float32]
    group_size: int = 0

    def problem(self, *, takes_rows: bool = False) -> str:
        """What is wrong with the scales and what to do; empty where they fit the matrix.

        A scale a row is wrong for a caller that does not say that it `takes_rows`.
        """
        if self.group_size not in (0, *GROUP_SIZES):
            return f"{self.group_size} columns share a scale: convert the model to groups of 64 or 128"
        if bool(self.group_size) != (isinstance(self.scale, np.ndarray) and self.scale.ndim > 1):
            return "one scale and scales for groups of columns are mixed up: convert the model again"
        if not isinstance(self.scale, np.ndarray):
            return ""
        if not (self.group_size or takes_rows):
            return 'its rows have a scale each, which only the devices "cpu" and "reference" take: choose one of them'
        groups = (-(-self.shape[1] // self.group_size),) if self.group_size else ()
        expected = (self.shape[0], *groups)
        if self.scale.shape != expected or self.scale.dtype != np.float32:
            found = f"{self.scale.dtype} {list(self.scale.shape)}"
            return f"scales are float32 {list(expected)}, not {found}: convert the model again"
        return "" if np.isfinite(self.scale).all() else "a scale is NaN or infinite: download the model again"


class Checkpoint(Protocol):
    """An opened model: cheap to open, tensors are read (memory-mapped) when asked for."""

    path: Path
    config: ModelConfig

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What a GGUF file says besides its tensors; empty for folders."""
        ...

    @property
    def num_parameters(self) -> int:
        """The weights of the model; a tied head counts once, scales do not count."""
        ...

    @property
    def num_bytes(self) -> int:
        """The size of the files that hold the weights."""
        ...

    def notes(self) -> list[str]:
        """How the files are meant, and what was ignored in them: a line each, for `bitnet inspect`."""
        ...

    def check(self) -> list[str]:
        """Everything wrong with the checkpoint, one line each; empty when it is sound."""
        ...

    def is_ternary(self, name: str) -> bool:
        """Whether `matrix` gives a Ternary for this canonical name; at most scales are read."""
        ...

    def group_size(self, name: str) -> int:
        """How many columns share a scale in the Ternary of this name, 0 for one scale. May read what tells it.

        Of a Dense too, where it consists of such codes and scales; 0 where that is not known.
        """
        ...

    def dtype(self, name: str) -> FloatName:
        """The dtype of the Dense that `matrix` gives for this canonical name; at most scales are read.

        Of a tensor that `check` finds missing or wrong, any.
        """
        ...

    def matrix(self, name: str) -> Dense | Ternary:
        """The matrix [out, in] under a canonical name. Raises KeyError, FormatError for broken files, Unsupported."""
        ...

    def release(self, name: str) -> None:
        """Let the system take back the memory of a matrix that was read and is no longer used; it can be read again."""
        ...

    def vector(self, name: str) -> NDArray[np.float32]:
        """The vector under a canonical name, in float32. Raises as `matrix` does."""
        ...


class ChangedCheckpoint:
    """A checkpoint that is the same as `original`, but for what a subclass reads otherwise."""

    def __init__(self, original: Checkpoint) -> None:
        self.original = original
        self.path: Path = original.path
        self.config: ModelConfig = original.config

    @property
    def metadata(self) -> Mapping[str, Any]:
        """See Checkpoint."""
        return self.original.metadata

    @property
    def num_parameters(self) -> int:
        """See Checkpoint."""
        return self.original.num_parameters

    @property
    def num_bytes(self) -> int:
        """See Checkpoint."""
        return self.original.num_bytes

    def notes(self) -> list[str]:
        """See Checkpoint."""
        return self.original.notes()

    def check(self) -> list[str]:
        """See Checkpoint."""
        return self.original.check()

    def is_ternary(self, name: str) -> bool:
        """See Checkpoint."""
        return self.original.is_ternary(name)

    def group_size(self, name: str) -> int:
        """See Checkpoint."""
        return self.original.group_size(name)

    def dtype(self, name: str) -> FloatName:
        """See Checkpoint."""
        return self.original.dtype(name)

    def matrix(self, name: str) -> Dense | Ternary:
        """See Checkpoint."""
        return self.original.matrix(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """See Checkpoint."""
        return self.original.vector(name)

    def release(self, name: str) -> None:
        """See Checkpoint."""
        self.original.release(name)


def is_projection(name: str) -> bool:
    """Whether a canonical name is that of a matrix of a layer."""
    return name.rpartition(".")[2] in PROJECTIONS


def bias_of(name: str) -> str:
    """The canonical name of what is added to the product with the matrix of a layer of this name."""
    return f"{name}.bias"


def without_expert(name: str) -> str:
    """A canonical name without the number of its expert, if it has one."""
    return _EXPERT.sub(".experts.", name)


def is_bias(name: str) -> bool:
    """Whether a canonical name is that of a bias."""
    return name.endswith(".bias")


def in_halves(name: str, rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """The rows of a matrix as the decoder rotates those of q and k: features j and j + head_dim / 2 of a head.

    The file has the neighbours 2j and 2j + 1 in their place. Rows of other matrices stay as they are.
    """
    if name.rpartition(".")[2] not in ("q", "k"):
        return rows
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return np.ascontiguousarray(heads.transpose(0, 2, 1, 3)).reshape(rows.shape)


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every canonical name that a model of this configuration has, with its shape."""
    hidden = config.hidden_size
    yield "embed", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"layers.{layer}.{name}", shape
    yield "norm", (hidden,)
    if not config.tie_embeddings:
        yield "head", (config.vocab_size, hidden)


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    outs_ins = (*attention, (inner, hidden), (inner, hidden), (hidden, inner))
    yield "attn_norm", (hidden,)
    yield "mlp_norm", (hidden,)
    if config.sub_norms:
        yield "attn_sub_norm", (queries,)
        yield "mlp_sub_norm", (inner,)
    if config.post_norms:
        yield "attn_post_norm", (hidden,)
        yield "mlp_post_norm", (hidden,)
    if config.head_norms:
        yield "q_norm", (config.head_dim,)
        yield "k_norm", (config.head_dim,)
    for name, shape in zip(PROJECTIONS, outs_ins, strict=True):
        if config.experts is not None and name in MLP_PROJECTIONS:
            continue
        yield name, shape
        if config.linear_norm:
            yield f"{name}.norm", (shape[1],)
        if config.qkv_bias and name in _BIASED:
            yield bias_of(name), (shape[0],)
    if config.experts is not None:
        yield "router", (config.experts.count, hidden)
        for expert in range(config.experts.count):
            for name, shape in zip(MLP_PROJECTIONS, outs_ins[-3:], strict=True):
                yield f"experts.{expert}.{name}", shape


def problem_lines(path: Path, problems: Iterable[object]) -> list[str]:
    """What is wrong with a file, a line each, but not more lines than a person reads."""
    lines = list(islice(map(str, problems), _MAX_LINES + 1))
    return lines if len(lines) <= _MAX_LINES else [*lines[:_MAX_LINES], f"{path}: and more"]


def require_sound(checkpoint: Checkpoint) -> None:
    """Raises FormatError where `check` finds anything wrong, one line with the first of it."""
    problems, path = checkpoint.check(), checkpoint.path
    if problems:
        first = "; ".join(each.removeprefix(f"{path}: ") for each in problems[:_MAX_TOLD])
        num_more = len(problems) - _MAX_TOLD
        raise FormatError(path, "", f"{first}; {num_more} more: bitnet inspect tells them" if num_more > 0 else first)

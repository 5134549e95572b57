"""Meta's Llama checkpoints: params.json and consolidated.NN.pth, a part of every matrix in each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.checkpoint import Dense, expected_shapes, in_halves, problem_lines
from bitnet_inference.formats.float_tensors import FLOATS, dtype_of, float_values
from bitnet_inference.formats.floats import FloatName
from bitnet_inference.formats.json_files import read_json, shown
from bitnet_inference.formats.meta_config import ignored_keys, read_params
from bitnet_inference.formats.meta_shards import open_shards
from bitnet_inference.formats.safetensors_files import inside
from bitnet_inference.own_files import has_pieces

_ROPE_TABLE = "rope.freqs"
_TOP = {"embed": "tok_embeddings", "norm": "norm", "head": "output"}
_IN_LAYER = {
    "attn_norm": "attention_norm", "mlp_norm": "ffn_norm",
    "q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "o": "attention.wo",
    "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
}  # fmt: skip


class MetaCheckpoint:
    """A folder with params.json and shards. Opening reads no weights; they are mapped when asked for.

    `metadata` is empty: the tokenizer is a file beside the weights.
    """

    def __init__(self, path: Path) -> None:
        """Raises FormatError for broken files and impossible configurations."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._params = read_json(inside(path, "params.json"))
        self._shards = open_shards(path)
        tied = not self._shards.parts(tensor_name("head"))
        self._has_pieces = has_pieces(path)
        num_rows = partial(self._shards.num_rows, tensor_name("embed"))
        self.config = read_params(self._params, num_rows, tied, self._has_pieces)
        self._shapes = dict(expected_shapes(self.config))

    @property
    def num_parameters(self) -> int:
        """The weights of the model."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def num_bytes(self) -> int:
        """The size of the shards."""
        return self._shards.num_bytes

    def notes(self) -> list[str]:
        """How the files are meant, and what was ignored in them: a line each, for `bitnet inspect`."""
        return list(self._notes())

    def check(self) -> list[str]:
        """Everything wrong with names, shapes, dtypes and norms, a line each; no matrix is read."""
        return problem_lines(self.path, self._problems())

    def is_ternary(self, name: str) -> bool:
        """False: these files hold dense weights."""
        return False

    def group_size(self, name: str) -> int:
        """0: dense weights have no scales."""
        return 0

    def dtype(self, name: str) -> FloatName:
        """The dtype of the Dense that `matrix` gives for this canonical name; nothing is read."""
        return dtype_of(next(iter(self._shards.parts(tensor_name(name))), None))

    def matrix(self, name: str) -> Dense:
        """The matrix under a canonical name. Raises KeyError for no such name, FormatError where the file is wrong."""
        shape = self._shapes[name]
        parts, axis = self._shards.sound_parts(tensor_name(name), shape)
        arrays = [part.array() for part in parts]
        data = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)
        return Dense(in_halves(name, data, self.config.head_dim), FLOATS[parts[0].dtype])

    def release(self, name: str) -> None:
        """Let the system take back the memory of a matrix that was read."""
        for part in self._shards.parts(tensor_name(name)):
            part.release()

    def vector(self, name: str) -> NDArray[np.float32]:
        """The norm vector under a canonical name. Raises KeyError and FormatError as `matrix` does."""
        (size,) = self._shapes[name]
        parts, _ = self._shards.sound_parts(tensor_name(name), (size,))
        return float_values(parts[0])

    def _problems(self) -> Iterator[Exception]:
        for name, shape in self._shapes.items():
            yield from self._shards.problems_of(tensor_name(name), shape)
        yield from self._shards.strangers({_ROPE_TABLE, *map(tensor_name, self._shapes)})

    def _notes(self) -> Iterator[str]:
        yield f"Meta checkpoint, shards: {self._shards.count}; dense weights, used as they are"
        scaling = self.config.rope_scaling
        which = "Llama 3.1, as use_scaled_rope says" if scaling else "the model that params.json looks like"
        yield f"{self.config.max_positions} positions are those of {which}"
        if scaling:
            said = "rope_scaling_factor" in self._params
            why = "as rope_scaling_factor says" if said else "as published models of this size were trained"
            yield f"rotary frequencies are scaled by {scaling.factor:g} from 8192 positions, {why}"
        names = "Llama 3.1, as use_scaled_rope says" if scaling else "Llama 3: use_scaled_rope is not set"
        if not self._has_pieces:
            yield f"special tokens beside a list of ranks are named as in {names}"
        if self.config.tie_embeddings:
            yield "there is no output.weight: the head is tied to the embeddings"
        if "rope_theta" not in self._params:
            yield f"rope_theta is missing: {self.config.rope_theta:g}"
        if self._shards.parts(_ROPE_TABLE):
            yield f"{_ROPE_TABLE} is ignored: rotary frequencies are computed"
        if keys := ignored_keys(self._params):
            yield f"ignored in params.json: {', '.join(map(shown, keys[:10]))}" + (", ..." if len(keys) > 10 else "")


def tensor_name(name: str) -> str:
    """The tensor of Meta's files that holds a canonical name: "layers.3.q" -> "layers.3.attention.wq.weight"."""
    if name in _TOP:
        return f"{_TOP[name]}.weight"
    _, layer, part = name.split(".")
    return f"layers.{layer}.{_IN_LAYER[part]}.weight"

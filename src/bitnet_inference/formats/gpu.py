"""Checkpoints of Microsoft's GPU code: model_state_int2.pt, or the same in floats."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import Dense, Ternary, expected_shapes, in_halves, is_projection, problem_lines
from bitnet_inference.formats.float_tensors import FLOATS, dtype_of, float_values, same_tables
from bitnet_inference.formats.floats import FloatName
from bitnet_inference.formats.gpu_config import gpu_config
from bitnet_inference.formats.gpu_int2 import TILE_COLUMNS, TILE_ROWS, runs_of, u2_of
from bitnet_inference.formats.json_files import file_size, shown, shown_some
from bitnet_inference.formats.safetensors_files import INDEX, SINGLE, Tensor, inside
from bitnet_inference.formats.ternarized import exact_ternary, ternarized
from bitnet_inference.formats.torch_files import read_torch_file

# The same model packed, dequantised, and as master weights; the first that is there is read.
FILES = ("model_state_int2.pt", "model_state_fp16.pt", "model_state.pt")
_AGAIN = "convert the model again"
_NAMES = {
    "embed": "tok_embeddings", "norm": "norm", "head": "output", "attn_norm": "attention_norm", "mlp_norm": "ffn_norm",
    "attn_sub_norm": "attention.attn_sub_norm", "mlp_sub_norm": "feed_forward.ffn_sub_norm",
}  # fmt: skip
# Matrices that are stacked in one tensor, whose scales stand in the same order.
_STACKS = {"attention.wqkv": ("q", "k", "v"), "attention.wo": ("o",), "feed_forward.w13": ("gate", "up"),
           "feed_forward.w2": ("down",)}  # fmt: skip
_NUM_SCALES = 4


def is_gpu_folder(path: Path) -> bool:
    """Whether a folder holds such a checkpoint, and no Hugging Face model beside it."""
    there = {name for name in (*FILES, SINGLE, INDEX) if os.path.lexists(path / name)}
    return bool(there) and there <= {*FILES}


class _Place(NamedTuple):
    """Where a projection stands: rows `begin` to `end` of the `num_rows` of `tensor`, one of `num_parts` matrices.

    Its scale is number `part` of `scales`.
    """

    tensor: str
    scales: str
    part: int
    begin: int
    end: int
    num_rows: int
    num_parts: int


class GpuCheckpoint:
    """A folder with one of FILES. Opening reads no weights; they are mapped when asked for.

    `metadata` is empty: the tokenizer is a file beside the weights.
    """

    def __init__(self, path: Path) -> None:
        """Raises FormatError for broken files and where the configuration is not known, Unsupported."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._file = inside(path, next(name for name in FILES if os.path.lexists(path / name)))
        self._tensors = read_torch_file(self._file)
        config = gpu_config(path, self._tensors)
        self.config = replace(config, tie_embeddings=self._is_tied())
        self._shapes = dict(expected_shapes(self.config))

    @property
    def num_parameters(self) -> int:
        """The weights of the model; a tied head counts once, scales do not count."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return file_size(self._file)

    def notes(self) -> list[str]:
        """How the file is meant, and what was ignored in it: a line each, for `bitnet inspect`."""
        lines = [f"checkpoint of Microsoft's GPU code, {self._file.name}; q, k and v have a scale each"]
        if not (self.path / "config.json").exists():
            lines.append("there is no config.json: the sizes are those of BitNet b1.58 2B-4T, and so is the rest")
        if self.config.tie_embeddings and "output.weight" in self._tensors:
            lines.append("output.weight is a copy of the embeddings, and not read")
        return lines

    def check(self) -> list[str]:
        """Everything wrong with names, shapes, dtypes, scales and norms, a line each; no matrix is read."""
        return problem_lines(self.path, self._problems())

    def is_ternary(self, name: str) -> bool:
        """Whether `matrix` gives a Ternary for this canonical name; nothing is read."""
        return is_projection(name)

    def group_size(self, name: str) -> int:
        """0: one scale a matrix."""
        return 0

    def dtype(self, name: str) -> FloatName:
        """The dtype of the Dense that `matrix` gives for this canonical name; nothing is read."""
        return dtype_of(self._tensors.get(_tensor_name(name)))

    def matrix(self, name: str) -> Dense | Ternary:
        """The matrix under a canonical name. Raises KeyError for no such name, FormatError where the file is wrong."""
        shape = self._shapes[name]
        tensor = self._sound(name)
        if not is_projection(name):
            return Dense(tensor.array(), FLOATS[tensor.dtype])
        place = self._place(name)
        if tensor.dtype != "I8":
            floats = Dense(self._rows(name, tensor.array()), FLOATS[tensor.dtype])
            return exact_ternary(floats) or ternarized(self._file, place.tensor, floats)
        try:
            runs = runs_of(tensor.array())
        except ValueError as error:
            raise FormatError(self._file, place.tensor, f"{error}: {_AGAIN}") from error
        scale = float(float_values(self._tensors[place.scales])[place.part])
        return Ternary(u2_of(self._rows(name, runs)), "u2", (shape[0], shape[1]), scale)

    def release(self, name: str) -> None:
        """Let the system take back the memory of a matrix that was read."""
        self._sound(name).release()

    def vector(self, name: str) -> NDArray[np.float32]:
        """The norm vector under a canonical name. Raises KeyError and FormatError as `matrix` does."""
        (_,) = self._shapes[name]
        return float_values(self._sound(name))

    def _is_tied(self) -> bool:
        """Whether the head is a copy of the embeddings."""
        embed, head = (self._tensors.get(_tensor_name(name)) for name in ("embed", "head"))
        return head is None if embed is None or head is None else same_tables(embed, head)

    def _place(self, name: str) -> _Place:
        tensor, stack = _tensor_name(name), _stack_of(name)
        at = name.rpartition(".")[0]
        ends = list(accumulate(self._shapes[f"{at}.{each}"][0] for each in stack))
        part = stack.index(name.rpartition(".")[2])
        return _Place(
            tensor, f"{tensor}_scale", part, ends[part] - self._shapes[name][0], ends[part], ends[-1], len(stack)
        )

    def _rows(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """The rows of one of the matrices that are stacked, in our order."""
        place = self._place(name)
        return in_halves(name, rows[place.begin : place.end], self.config.head_dim)

    def _sound(self, name: str) -> Tensor:
        for problem in self._problems_of(name):
            raise problem
        return self._tensors[_tensor_name(name)]

    def _problems(self) -> Iterator[FormatError]:
        known = {"output.weight"}
        for name in self._shapes:
            known |= {_tensor_name(name), *([self._place(name).scales] if is_projection(name) else [])}
            if _stack_of(name)[0] == name.rpartition(".")[2]:
                yield from self._problems_of(name)
        if extra := sorted(self._tensors.keys() - known):
            why = f"the model has no place for {len(extra)} tensors: {shown_some(extra)}"
            yield FormatError(self._file, "", f"{why}: {_AGAIN}")

    def _problems_of(self, name: str) -> Iterator[FormatError]:
        """Everything wrong with the tensor that holds a canonical name."""
        key, shape = _tensor_name(name), self._shapes[name]
        tensor = self._tensors.get(key)
        if tensor is None:
            yield FormatError(self._file, key, f"the tensor is missing: {_AGAIN}")
        elif is_projection(name):
            yield from self._problems_of_stack(self._place(name), tensor, shape[1])
        elif tensor.dtype not in FLOATS or tensor.shape != shape:
            yield _wrong(tensor, key, f"should be floats of the shape {shape}")
        elif len(shape) == 1 and not np.isfinite(float_values(tensor)).all():
            yield FormatError(self._file, key, f"a norm weight is NaN or infinite: {_AGAIN}")

    def _problems_of_stack(self, place: _Place, tensor: Tensor, num_columns: int) -> Iterator[FormatError]:
        is_packed = tensor.dtype == "I8"
        expected = (place.num_rows, num_columns // 4 if is_packed else num_columns)
        if is_packed and (place.num_rows % TILE_ROWS or num_columns % TILE_COLUMNS):
            yield _wrong(tensor, place.tensor, f"is no whole tiles of a matrix {place.num_rows} by {num_columns}")
        elif tensor.shape != expected:
            yield _wrong(tensor, place.tensor, f"should have the shape {expected}")
        if not is_packed:
            return
        scales = self._tensors.get(place.scales)
        if scales is None or scales.dtype not in FLOATS or scales.shape != (_NUM_SCALES,):
            yield FormatError(self._file, place.scales, f"there are not {_NUM_SCALES} floats as scales: {_AGAIN}")
        elif not all(0 < scale < np.inf for scale in float_values(scales)[: place.num_parts]):
            why = f"the first {place.num_parts} should be finite and above 0"
            yield FormatError(self._file, place.scales, f"{why}: {_AGAIN}")


def _tensor_name(name: str) -> str:
    """The tensor that holds a canonical name: "layers.3.k" -> "layers.3.attention.wqkv.weight"."""
    at, _, own = name.rpartition(".")
    known = _NAMES.get(own) or next(tensor for tensor, stack in _STACKS.items() if own in stack)
    return f"{at}.{known}.weight" if at else f"{known}.weight"


def _stack_of(name: str) -> tuple[str, ...]:
    """The last parts of the canonical names that share a tensor with this one."""
    own = name.rpartition(".")[2]
    return next((stack for stack in _STACKS.values() if own in stack), (own,))


def _wrong(tensor: Tensor, key: str, why: str) -> FormatError:
    return FormatError(tensor.path, key, f"{tensor.dtype} {shown(tensor.shape)} {why}: {_AGAIN}")

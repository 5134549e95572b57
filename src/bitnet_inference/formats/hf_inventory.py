"""What a Hugging Face folder should hold, against what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import is_projection
from bitnet_inference.formats.float_tensors import FLOATS, float_values
from bitnet_inference.formats.hf_names import Names, is_tolerated
from bitnet_inference.formats.hf_quantization import Quantization
from bitnet_inference.formats.json_files import shown, shown_some
from bitnet_inference.formats.mlx import BIASES, ROW_SCALES, SCALES, Affine, find_affine
from bitnet_inference.formats.safetensors_files import Tensor

_AGAIN = "download the model again"


@dataclass(frozen=True)
class Inventory:
    """The tensors of a folder by their own names, and the shapes that its configuration asks for by canonical name."""

    path: Path
    tensors: dict[str, Tensor]
    shapes: dict[str, tuple[int, ...]]
    quantization: Quantization | None
    names: Names

    @cached_property
    def affine(self) -> dict[str, Affine]:
        """The matrices that MLX has quantised, by canonical name."""
        modules = ((name, self.tensor_name(name).removesuffix(".weight"), shape) for name, shape in self.shapes.items())
        found = ((name, find_affine(self.tensors, module, shape)) for name, module, shape in modules)
        return {name: affine for name, affine in found if affine is not None}

    def is_ternary(self, name: str) -> bool:
        """Whether the matrix under a canonical name is ternary; of one that MLX has quantised, reads its scales."""
        can_be = name == "head" or is_projection(name)
        if name in self.affine:
            return is_projection(name) and self.affine[name].is_ternary
        return can_be and self.quantization is not None and self.quantization.converts(self.names.module(name))

    def tensor_name(self, name: str) -> str:
        """The tensor in the files that holds a canonical name."""
        tensor = self.names.tensor(name)
        if name == "embed" and tensor not in self.tensors and "head" not in self.shapes:
            return "lm_head.weight"  # a tied table may be saved under either name
        return tensor

    def scale_name(self, name: str) -> str:
        """The tensor in the files that holds the scale of a packed matrix."""
        return f"{self.names.module(name)}.weight_scale"

    def tensor(self, name: str) -> Tensor:
        """The tensor under a canonical name, found sound; raises the first of its problems."""
        for problem in self.problems_of(name):
            raise problem
        return self.tensors[self.tensor_name(name)]

    def scale(self, name: str) -> float:
        """The multiplicative scale m of a packed matrix that was found sound."""
        return float(self._multiplier(self.tensors[self.scale_name(name)]))

    def problems(self) -> Iterator[FormatError]:
        """Everything wrong; reads scales and norms, no matrices."""
        for name in self.shapes:
            yield from self.problems_of(name)
        expected = {self.tensor_name(name) for name in self.shapes}
        expected |= {self.scale_name(name) for name in self.shapes if self._has_scale(name)}
        for name, affine in self.affine.items():
            parts = (ROW_SCALES,) if affine.biases is None else (SCALES, BIASES)
            expected |= {self.tensor_name(name).removesuffix("weight") + part for part in parts}
        if "head" not in self.shapes:
            expected |= {f"lm_head.{part}" for part in ("weight", SCALES, BIASES, ROW_SCALES)}
        extra = [name for name in self.tensors if name not in expected and not is_tolerated(name)]
        if extra:
            why = f"config.json has no place for {len(extra)} tensors: {shown_some(extra)}"
            yield FormatError(self.path, "", f"{why}: use the config.json that belongs to them")

    def problems_of(self, name: str) -> Iterator[FormatError]:
        """Everything wrong with one canonical name: its tensor, its scale, its values if it is a vector."""
        shape, key = self.shapes[name], self.tensor_name(name)
        tensor = self.tensors.get(key)
        if tensor is None:
            cure = " (or set tie_word_embeddings)" if name == "head" else ""
            yield FormatError(self.path, key, f"the tensor is missing: {_AGAIN}{cure}")
            return
        if name in self.affine:
            if problem := self.affine[name].problem:
                yield FormatError(tensor.path, key, f"{problem}: {_AGAIN}")
        elif key.removesuffix("weight") + SCALES in self.tensors:
            yield FormatError(self.path, key.removesuffix("weight") + BIASES, f"the tensor is missing: {_AGAIN}")
        elif not self.is_ternary(name):
            yield from _problems_of_floats(key, tensor, shape)
        else:
            yield from self._problems_of_ternary(name, key, tensor)

    def _problems_of_ternary(self, name: str, key: str, tensor: Tensor) -> Iterator[FormatError]:
        num_rows, num_columns = self.shapes[name]
        if not self._has_scale(name):
            if tensor.dtype not in FLOATS:
                yield _wrong(key, tensor, 'has no master weights: set quantization_mode to "offline"')
            elif tensor.shape != (num_rows, num_columns):
                yield _wrong(key, tensor, f"should have the shape {(num_rows, num_columns)}: {_AGAIN}")
            return
        if tensor.dtype != "U8" and tensor.dtype not in (*FLOATS, "I8"):
            yield _wrong(key, tensor, f"should be packed, in U8: {_AGAIN}")
        expected = (-(-num_rows // 4) if tensor.dtype == "U8" else num_rows, num_columns)
        if tensor.shape != expected:
            yield _wrong(key, tensor, f"should have the shape {expected} for {num_rows} rows: {_AGAIN}")
        yield from self._problems_of_scale(self.scale_name(name))

    def _has_scale(self, name: str) -> bool:
        return self.is_ternary(name) and self.quantization is not None and not self.quantization.online

    def _problems_of_scale(self, key: str) -> Iterator[FormatError]:
        tensor = self.tensors.get(key)
        if tensor is None:
            why = 'the scale is missing: set quantization_mode to "online" if these are master weights'
            yield FormatError(self.path, key, why)
        elif tensor.dtype not in FLOATS or tensor.shape not in ((), (1,)):
            yield _wrong(key, tensor, f"should be one float: {_AGAIN}")
        elif not 0 < self._multiplier(tensor) < np.inf:
            value = float_values(tensor).item()
            yield FormatError(tensor.path, key, f"{value} is no scale, which is finite and above 0: {_AGAIN}")

    def _multiplier(self, tensor: Tensor) -> np.float32:
        value = np.float32(float_values(tensor).item())
        if self.quantization is None or not self.quantization.divides:
            return value
        with np.errstate(divide="ignore", over="ignore"):
            return np.float32(1) / value


def _problems_of_floats(key: str, tensor: Tensor, shape: tuple[int, ...]) -> Iterator[FormatError]:
    if tensor.dtype not in FLOATS:
        packed = "if it is packed, add the quantization_config that says so to config.json"
        cure = packed if tensor.dtype == "U8" else "use the model in one of these"
        yield _wrong(key, tensor, f"should be BF16, F16 or F32: {cure}")
    elif tensor.shape != shape:
        yield _wrong(key, tensor, f"should have the shape {shape}: {_AGAIN}")
    elif len(shape) == 1 and not np.isfinite(float_values(tensor)).all():
        what = "a bias" if key.endswith(".bias") else "a norm weight"
        yield FormatError(tensor.path, key, f"{what} is NaN or infinite: {_AGAIN}")


def _wrong(key: str, tensor: Tensor, why: str) -> FormatError:
    return FormatError(tensor.path, key, f"{tensor.dtype} {shown(tensor.shape)} {why}")

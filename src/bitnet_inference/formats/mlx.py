"""Matrices as MLX quantises them, `w = scale * code + bias` by groups of columns, in folders that `mlx_lm` writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.bit_fields import bit_fields
from bitnet_inference.formats.checkpoint import GROUP_SIZES, Dense, Ternary
from bitnet_inference.formats.float_tensors import FLOATS, float_values
from bitnet_inference.formats.floats import FloatName, to_bfloat16
from bitnet_inference.formats.json_files import Fields, shown
from bitnet_inference.formats.safetensors_files import Tensor

SCALES, BIASES, ROW_SCALES = "scales", "biases", "row_alpha"
_BITS, _GROUP_SIZES = (1, 2, 3, 4, 5, 6, 8), (32, 64, 128)
_CHUNK_VALUES = 1 << 20  # decoded at a time
_AGAIN = "download the model again"
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Affine:
    """A matrix of `shape` [out, in]: codes of some bits in words of 32, and scales and biases for groups of columns.

    Codes 0, 1, 2 with bias = -scale stand for a ternary matrix, and 0, 1 of 1 bit with bias = -scale / 2 for -1 and +1.
    Without biases a row has one scale, and its bias is -scale: so DeepGrove's own mlx_lm writes Maple.
    """

    words: Tensor
    scales: Tensor
    biases: Tensor | None
    shape: tuple[int, int]

    @cached_property
    def problem(self) -> str:
        """What is wrong with dtypes and shapes; empty where all fits."""
        if self.words.dtype != "U32" or self._bits not in _BITS or self.words.shape != (self.shape[0], self._num_words):
            return f"{self.words.dtype} {shown(self.words.shape)} holds no codes of {_BITS} bits for {self.shape}"
        if self.biases is None:
            fits = self._bits == 2 and self.scales.dtype in FLOATS and self.scales.shape == self.shape[:1]
            return "" if fits else f"{self.scales.dtype} {shown(self.scales.shape)} is no scale for each row"
        if self.scales.dtype not in FLOATS or self.biases.dtype != self.scales.dtype:
            return f"scales in {self.scales.dtype} and biases in {self.biases.dtype} are not floats of one dtype"
        groups = (self.shape[0], self.scales.shape[-1] if self.scales.shape else 0)
        if self.scales.shape != groups or self.biases.shape != groups or self.columns_a_group not in _GROUP_SIZES:
            told = f"{shown(self.scales.shape)} scales and {shown(self.biases.shape)} biases"
            return f"{told} are not for groups of {_GROUP_SIZES} columns of {self.shape}"
        return ""

    @property
    def kind(self) -> str:
        """How it is packed, in words."""
        if self.biases is None:
            return f"{self._bits} bits by rows"
        return f"{self._bits} bits in groups of {self.columns_a_group}"

    @cached_property
    def is_ternary(self) -> bool:
        """Whether scales and biases are those of a ternary matrix, in groups that kernels know; reads them."""
        return bool(self._unit) and (self.biases is None or self.columns_a_group in GROUP_SIZES)

    @cached_property
    def group_size(self) -> int:
        """How many columns share a scale of the Ternary, 0 where all of a row do; reads the scales."""
        if self.biases is None:
            return 0
        scales = float_values(self.scales)
        return 0 if scales[0, 0] > 0 and (scales == scales[0, 0]).all() else self.columns_a_group

    @property
    def dtype(self) -> FloatName:
        """Of the Dense: that of the scales where it holds the values exactly."""
        return FLOATS[self.scales.dtype] if self._unit else "float32"

    def ternary(self, name: str) -> Ternary:
        """Raises FormatError for scales that are not finite, Unsupported for weights of +2."""
        scales = float_values(self.scales) * np.float32(self._unit)
        if not np.isfinite(scales).all():
            raise FormatError(self.scales.path, name, f"a scale is NaN or infinite: {_AGAIN}")
        codes = np.empty(self.shape, np.int8)
        for rows in self._pieces():
            codes[rows] = self._codes(rows)
        if codes.max(initial=0) > 1:
            cure = "use the model in another format"
            raise Unsupported(f"{self.words.path}: {name}: holds weights of +2, so it is not ternary: {cure}")
        if self.biases is None:
            return Ternary(codes, "codes", self.shape, scales)
        if not self.group_size:
            return Ternary(codes, "codes", self.shape, float(scales[0, 0]))
        return Ternary(codes, "codes", self.shape, scales, self.group_size)

    def dense(self) -> Dense:
        """The values, in `dtype`."""
        values = np.empty(self.shape, {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}[self.dtype])
        scales = float_values(self.scales).reshape(self.shape[0], -1)
        biases = -scales if self.biases is None else float_values(self.biases)
        with np.errstate(all="ignore"):  # what is not finite stays so
            for rows in self._pieces():
                if self._unit:
                    floats = self._by_groups(self._codes(rows)) * (scales[rows] * np.float32(self._unit))[:, :, None]
                else:
                    floats = self._by_groups(self._fields(rows)) * scales[rows, :, None] + biases[rows, :, None]
                floats = floats.reshape(len(floats), -1)
                values[rows] = to_bfloat16(floats) if self.dtype == "bfloat16" else floats
        return Dense(values, self.dtype)

    def release(self) -> None:
        """Let the system take back the memory of what was read."""
        for each in (self.words, self.scales, self.biases):
            if each is not None:
                each.release()

    @property
    def _num_words(self) -> int:
        return self.words.shape[-1] if self.words.shape else 0

    @property
    def _bits(self) -> int:
        """Of a code; 0 where the words are not for so many columns."""
        bits, rest = divmod(32 * self._num_words, self.shape[1])
        return 0 if rest else bits

    @property
    def columns_a_group(self) -> int:
        """How many columns share a scale and a bias in the file; 0 where they don't come out even."""
        if self.biases is None:
            return self.shape[1]
        size, rest = divmod(self.shape[1], max(1, self.scales.shape[-1]))
        return 0 if rest else size

    @cached_property
    def _unit(self) -> float:
        """What a scale is multiplied by to be that of codes -1, 0 and 1; 0 where they are not meant."""
        unit = {1: 0.5, 2: 1.0}.get(self._bits, 0.0)
        if self.problem or not unit:
            return 0.0
        if self.biases is None:
            return unit
        are_meant = np.array_equal(float_values(self.biases), float_values(self.scales) * np.float32(-unit))
        return unit if are_meant else 0.0

    def _pieces(self) -> Iterator[slice]:
        step = max(1, _CHUNK_VALUES // self.shape[1])
        return (slice(begin, begin + step) for begin in range(0, self.shape[0], step))

    def _fields(self, rows: slice) -> NDArray[np.uint8]:
        words = np.ascontiguousarray(self.words.array()[rows])
        return bit_fields(words.view(np.uint8), self._bits)

    def _codes(self, rows: slice) -> NDArray[np.int8]:
        fields = self._fields(rows).view(np.int8)
        return fields - np.int8(1) if self._bits == 2 else fields * np.int8(2) - np.int8(1)

    def _by_groups(self, values: NDArray[np.uint8] | NDArray[np.int8]) -> Floats:
        return values.astype(np.float32).reshape(len(values), -1, self.columns_a_group)


def find_affine(tensors: Mapping[str, Tensor], module: str, shape: tuple[int, ...]) -> Affine | None:
    """The matrix of a module, where MLX has quantised it."""
    parts = (tensors.get(f"{module}.{part}") for part in ("weight", SCALES, BIASES, ROW_SCALES))
    words, scales, biases, row_scales = parts
    if words is None or len(shape) != 2:
        return None
    if row_scales is not None:
        return Affine(words, row_scales, None, (shape[0], shape[1]))
    if scales is None or biases is None:
        return None
    return Affine(words, scales, biases, (shape[0], shape[1]))


def is_mlx(config: Fields) -> bool:
    """Whether a config.json is one of MLX's quantised models. Raises Unsupported for modes without biases."""
    fields = config.section("quantization") or config.section("quantization_config")
    if fields is None or "quant_method" in fields or "group_size" not in fields:
        return False
    modes = [fields.text("mode", "affine")]
    modes += [each["mode"] for each in fields.values.values() if isinstance(each, dict) and "mode" in each]
    if other := next((mode for mode in modes if mode != "affine"), None):
        cure = "use the unquantised repository, or one in another format"
        raise Unsupported(f"{config.path}: MLX's quantization mode {shown(other)}: only 'affine' is read: {cure}")
    return True

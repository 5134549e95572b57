"""GGUF files of BitNet, Llama, MiniCPM, Qwen3 and others: ternary in I2_S, TQ1_0, TQ2_0, Q2_0 or Q1_0, or dense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.errors import FormatError, InvalidParams, Unsupported
from bitnet_inference.formats import ggml_blocks as ggml
from bitnet_inference.formats.checkpoint import (
    Dense,
    Ternary,
    expected_shapes,
    in_halves,
    is_bias,
    is_projection,
    problem_lines,
)
from bitnet_inference.formats.experts import refuse_norms_of_experts
from bitnet_inference.formats.floats import FloatName, rounded
from bitnet_inference.formats.gguf_config import (
    SHORT_FACTORS,
    is_longrope,
    is_misnamed,
    read_architecture,
    read_config,
    read_multipliers,
)
from bitnet_inference.formats.gguf_experts import with_each_expert
from bitnet_inference.formats.gguf_file import GgufTensor
from bitnet_inference.formats.gguf_metadata import ROPE_FACTORS
from bitnet_inference.formats.gguf_parts import read_whole
from bitnet_inference.formats.json_files import shown
from bitnet_inference.formats.sizes import MAX_HEAD_DIM
from bitnet_inference.ternary import Layout

_NAMES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output",
    "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "attn_sub_norm": "attn_sub_norm", "mlp_sub_norm": "ffn_sub_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm", "router": "ffn_gate_inp",
}  # fmt: skip
_FLOATS: dict[int, tuple[str, FloatName]] = {
    ggml.F32: ("<f4", "float32"),
    ggml.F16: ("<f2", "float16"),
    ggml.BF16: ("<u2", "bfloat16"),
}
_TERNARY_TYPES = (*ggml.TERNARY, ggml.I2_S)
_TERNARY_HEADS = (ggml.TQ1_0, ggml.TQ2_0, ggml.I2_S)  # Q1_0 and Q2_0 hold heads of any weights too
_LONG_FACTORS = "rope_factors_long.weight"  # of longrope, which are not used
_AGAIN = "download the file again"


class GgufCheckpoint:
    """A GGUF file. Opening reads its header only; tensors are mapped when asked for.

    `metadata` is what the file says besides its tensors, the tokenizer's vocabulary too; `records` the same as bytes.
    `is_arm`: I2_S weights are read in the order of ARM machines.
    """

    def __init__(self, path: Path, *, arm: bool = False) -> None:
        """`arm`: I2_S weights are in the order that some versions wrote on ARM machines; the file does not say so.

        Raises FormatError for broken files and impossible configurations, Unsupported for what is not done, and
        InvalidParams for `arm` where nothing is I2_S.
        """
        self.path, self.is_arm = path, arm
        file = read_whole(path)
        self.metadata, self.records, self.num_bytes = file.metadata, file.records, file.num_bytes
        self._version, self._tensors = file.version, file.tensors
        if arm and not any(tensor.type_id == ggml.I2_S for tensor in self._tensors.values()):
            raise InvalidParams(f"{path} has no I2_S weights: leave arm_i2_s out")
        self._kind = read_architecture(path, self.metadata)
        if (kind := str(self.metadata.get("general.type", "model"))) != "model":
            raise Unsupported(f"{path}: is {kind!r:.40}, and no model: give the model that it is for, merged with it")
        embed = self._tensors.get("token_embd.weight")
        if embed is None or len(embed.shape) != 2:
            raise FormatError(path, "token_embd.weight", f"the table of embeddings is missing: {_AGAIN}")
        tied = not self._kind.own_head or "output.weight" not in self._tensors
        rope_factors = self._rope_factors(ROPE_FACTORS)
        short_factors = self._rope_factors(SHORT_FACTORS) if is_longrope(self.metadata) else ()
        config = read_config(path, self.metadata, embed.shape[0], tied, rope_factors, short_factors)
        if tensor_name("layers.0.q.norm") in self._tensors:
            config = replace(config, linear_norm=True, linear_norm_eps=config.norm_eps)
        if self._kind.gemma:  # as transformers rounds it for such a table
            dtype: FloatName = "bfloat16" if embed.type_id == ggml.BF16 else "float32"
            config = replace(config, embed_scale=float(rounded(np.float32(math.sqrt(config.hidden_size)), dtype)))
        if config.experts is not None:
            self._tensors = with_each_expert(self._tensors, config.experts.count)
            refuse_norms_of_experts(path, config)
        self._multipliers = read_multipliers(path, self.metadata, config)
        self.config = self._multipliers.folded(path, config)
        self._shapes = dict(expected_shapes(self.config))
        self._one_scale = cache(self._find_one_scale)

    @property
    def num_parameters(self) -> int:
        """The weights of the model; a tied head counts once, scales do not count."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def check(self) -> list[str]:
        """Everything wrong with names, shapes, types and norms, a line each; no matrix is read."""
        return problem_lines(self.path, self._problems())

    def is_ternary(self, name: str) -> bool:
        """Whether `matrix` gives a Ternary for this canonical name; nothing is read."""
        tensor = self._tensors.get(tensor_name(name))
        if tensor is None or not is_projection(name):
            return tensor is not None and name == "head" and tensor.type_id in _TERNARY_HEADS
        return tensor.type_id in _TERNARY_TYPES or self._kind.name == "bitnet" or self.config.linear_norm

    def group_size(self, name: str) -> int:
        """How many columns share a scale, 0 for one scale a matrix; reads the scales."""
        tensor = self._tensors.get(tensor_name(name))
        if tensor is None or tensor.type_id not in ggml.TERNARY:
            return 0
        if self.is_ternary(name) and self._one_scale(name) is not None:
            return 0
        return min(ggml.BLOCKS[tensor.type_id].num_values, 128)

    def dtype(self, name: str) -> FloatName:
        """The dtype of the Dense that `matrix` gives for this canonical name; no matrix is read."""
        tensor = self._tensors.get(tensor_name(name))
        if tensor is None or self._factor(name) != 1:
            return "float32"
        return "float16" if tensor.type_id in ggml.TERNARY else _FLOATS.get(tensor.type_id, ("", "float32"))[1]

    def matrix(self, name: str) -> Dense | Ternary:
        """The matrix under a canonical name. Raises KeyError for no such name, FormatError where the file is wrong."""
        tensor = self._tensor(name)
        if not self.is_ternary(name):
            return self._dense(name, tensor)
        if tensor.type_id == ggml.I2_S:
            return self._from_i2_s(name, tensor)
        if tensor.type_id in ggml.TERNARY:
            return self._from_blocks(name, tensor)
        codes, scale = _as_ternary(name, tensor)
        return self._ternary(name, self._in_halves(name, codes), scale)

    def table_codes(self, name: str) -> Ternary | None:
        """What embeddings or a head in a ternary type consist of; None for others, with a weight of +2, or no number.

        Raises as `matrix`, whose floats say the same in more memory.
        """
        tensor = self._tensor(name)
        if self.is_ternary(name) or tensor.type_id not in ggml.TERNARY or self._factor(name) != 1:
            return None
        rows = tensor.raw().reshape(tensor.shape[0], -1)
        scales = ggml.block_scales(tensor.type_id, rows, tensor.shape)
        return self._grouped(name, tensor, rows, scales) if np.isfinite(scales).all() else None

    def release(self, name: str) -> None:
        """Let the system take back the memory of a matrix that was read."""
        self._tensors[tensor_name(name)].release()

    def vector(self, name: str) -> NDArray[np.float32]:
        """The norm weights or bias under a canonical name. Raises KeyError and FormatError as `matrix` does."""
        return self._multipliers.vector(name, self._values(self._tensor(name)))

    def notes(self) -> list[str]:
        """How the file is meant, and what was ignored in it: a line each, for `bitnet inspect`."""
        return list(self._notes())

    def _tensor(self, name: str) -> GgufTensor:
        """The tensor under a canonical name, found sound; raises the first of its problems."""
        for problem in self._problems_of(name):
            raise problem
        return self._tensors[tensor_name(name)]

    def _values(self, tensor: GgufTensor) -> NDArray[np.float32]:
        return ggml.decode(tensor.type_id, tensor.raw(), tensor.shape)

    def _dense(self, name: str, tensor: GgufTensor) -> Dense:
        factor = self._factor(name)
        if tensor.type_id in ggml.TERNARY and factor == 1:
            return Dense(ggml.decode_ternary(tensor.type_id, tensor.raw(), tensor.shape), "float16")
        if tensor.type_id not in _FLOATS or factor != 1:
            values = self._in_halves(name, self._values(tensor))
            return Dense(values if factor == 1 else values * np.float32(factor), "float32")
        form, dtype = _FLOATS[tensor.type_id]
        data: NDArray[Any] = tensor.raw().view(form).reshape(tensor.shape)
        return Dense(self._in_halves(name, data), dtype)

    def _from_i2_s(self, name: str, tensor: GgufTensor) -> Ternary:
        raw, columns = tensor.raw(), tensor.shape[1]
        if columns % ggml.BLOCKS[ggml.I2_S].num_values == 0 and not self.is_arm:
            rows = raw[: math.prod(tensor.shape) // 4].reshape(tensor.shape[0], -1)
            if (quarters := _quarters(tensor, self._in_halves(name, rows))) is not None:
                return self._ternary(name, quarters, ggml.i2_s_scale(raw))
        codes, scale = ggml.i2_s(raw, tensor.shape, self.is_arm)
        return self._ternary(name, self._in_halves(name, codes), scale)

    def _from_blocks(self, name: str, tensor: GgufTensor) -> Ternary:
        rows = self._in_halves(name, tensor.raw().reshape(tensor.shape[0], -1))
        scales, one = ggml.block_scales(tensor.type_id, rows, tensor.shape), self._one_scale(name)
        if not np.isfinite(scales).all():
            raise FormatError(self.path, tensor_name(name), f"a scale is NaN or infinite: {_AGAIN}")
        if isinstance(one, float) and one > 0 and scales.all() and (quarters := _quarters(tensor, rows)) is not None:
            return self._ternary(name, quarters, one)
        if one is None:
            found = self._grouped(name, tensor, rows, scales)
        elif one == "row":
            found = self._of_rows(name, tensor, rows, scales)
        elif (codes := _block_codes(tensor, rows, scales)) is not None:
            codes.reshape(*scales.shape, -1)[scales == 0] = 0
            found = self._ternary(name, -codes if one < 0 else codes, abs(one))
        else:
            found = None
        if found is None:
            raise Unsupported(
                f"{self.path}: {tensor_name(name)}: holds weights of +2, so it is not ternary: convert it to Q8_0"
            )
        return found

    def _grouped(
        self, name: str, tensor: GgufTensor, rows: NDArray[np.uint8], scales: NDArray[np.float32]
    ) -> Ternary | None:
        """With a scale for each block; None where a weight is +2."""
        layout: Layout = "signs" if tensor.type_id == ggml.Q1_0 else "codes"
        data = ggml.block_signs(rows, tensor.shape) if layout == "signs" else _block_codes(tensor, rows, scales)
        if data is None:
            return None
        group_size = self.group_size(name)
        repeats = ggml.BLOCKS[tensor.type_id].num_values // group_size
        groups = np.repeat(scales, repeats, axis=1) * np.float32(self._factor(name))
        return Ternary(data, layout, (tensor.shape[0], tensor.shape[1]), groups, group_size)

    def _of_rows(
        self, name: str, tensor: GgufTensor, rows: NDArray[np.uint8], scales: NDArray[np.float32]
    ) -> Ternary | None:
        """With a scale for each row; None where a weight is +2."""
        quarters = _quarters(tensor, rows) if scales.all() else None
        codes = _block_codes(tensor, rows, scales) if quarters is None else None
        if codes is not None:
            codes.reshape(*scales.shape, -1)[scales == 0] = 0
        layout: Layout = "codes" if quarters is None else "quarters"
        data, own = codes if quarters is None else quarters, _row_scales(scales) * np.float32(self._factor(name))
        return None if data is None else Ternary(data, layout, (tensor.shape[0], tensor.shape[1]), own)

    def _find_one_scale(self, name: str) -> float | Literal["row"] | None:
        """The scale that all blocks have but for those that are 0; None where there are several. Of models with experts
        "row" where those of each row are one.
        """
        tensor = self._tensors[tensor_name(name)]
        scales = ggml.block_scales(tensor.type_id, tensor.raw(), tensor.shape)
        used = scales[scales != 0]
        if not len(used):
            return 1.0
        if (used == used[0]).all():
            return float(used[0])
        if self.config.experts is None:
            return None
        own = _row_scales(scales)
        return "row" if ((scales == own[:, None]) | (scales == 0)).all() else None

    def _ternary(self, name: str, packed: NDArray[Any], scale: float) -> Ternary:
        """Codes int8, or quarters uint8."""
        scale = float(np.float32(scale) * np.float32(self._factor(name)))
        if not 0 < scale < math.inf:
            raise FormatError(
                self.path, tensor_name(name), f"{scale} is no scale, which is finite and above 0: {_AGAIN}"
            )
        num_rows, num_columns = self._shapes[name]
        return Ternary(packed, "codes" if packed.dtype == np.int8 else "quarters", (num_rows, num_columns), scale)

    def _factor(self, name: str) -> float:
        """What a tensor of its own multiplies the product by: some files have one a projection."""
        tensor = self._tensors.get(tensor_name(name, "scale"))
        return 1.0 if tensor is None or tensor.shape != (1,) else float(self._values(tensor)[0])

    def _in_halves(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        return in_halves(name, rows, self.config.head_dim) if self._kind.permuted else rows

    def _rope_factors(self, name: str) -> tuple[float, ...]:
        tensor = self._tensors.get(name)
        if tensor is None:
            return ()
        if tensor.type_id != ggml.F32 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_HEAD_DIM:
            raise FormatError(self.path, name, f"should be a vector of F32, at most {MAX_HEAD_DIM}: {_AGAIN}")
        return tuple(map(float, self._values(tensor)))

    def _problems(self) -> Iterator[FormatError]:
        for name in self._shapes:
            yield from self._problems_of(name)
        known = {tensor_name(name) for name in self._shapes}
        known |= {tensor_name(name, "scale") for name in self._shapes if is_projection(name)}
        known |= {ROPE_FACTORS, "output.weight"} | (
            {SHORT_FACTORS, _LONG_FACTORS} if is_longrope(self.metadata) else set()
        )
        extra = [name for name in self._tensors if name not in known]
        if extra:
            why = f"the architecture has no place for {len(extra)} tensors, such as {shown(extra[0])}"
            yield FormatError(self.path, "", f"{why}: use another model")

    def _problems_of(self, name: str) -> Iterator[FormatError]:
        own, shape = tensor_name(name), self._shapes[name]
        tensor, factor = self._tensors.get(own), self._tensors.get(tensor_name(name, "scale"))
        if tensor is None:
            yield FormatError(self.path, own, f"the tensor is missing: {_AGAIN}")
        elif tensor.shape != shape:
            found, expected = list(tensor.shape), list(shape)
            yield FormatError(self.path, own, f"has the shape {found}, not {expected}: {_AGAIN}")
        elif len(shape) == 1 and not np.isfinite(self._values(tensor)).all():
            what = "a bias" if is_bias(name) else "a norm weight"
            yield FormatError(self.path, own, f"{what} is NaN or infinite: {_AGAIN}")
        if factor is not None and (
            factor.shape != (1,) or factor.type_id != ggml.F32 or not np.isfinite(self._values(factor)).all()
        ):
            yield FormatError(self.path, tensor_name(name, "scale"), f"should be one finite F32: {_AGAIN}")

    def _notes(self) -> Iterator[str]:
        counts: dict[str, int] = {}
        for tensor in self._tensors.values():
            kind = ggml.BLOCKS[tensor.type_id].name
            counts[kind] = counts.get(kind, 0) + 1
        yield f"GGUF version {self._version}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        if (num_parts := self.metadata.get("split.count", 1)) > 1:
            yield f"the model is in {num_parts} files"
        if is_misnamed(self.metadata, self.config.vocab_size):
            yield 'the architecture "bitnet" with the vocabulary of Llama 3: relu2 is used, as in Microsoft\'s models'
        if not self._kind.own_head and "output.weight" in self._tensors:
            yield "the head is tied to the embeddings: output.weight is ignored"
        used = [self._tensors.get(tensor_name(name)) for name in self._shapes if self.is_ternary(name)]
        if any(tensor is not None and tensor.type_id not in _TERNARY_TYPES for tensor in used):
            yield "projections in types for any weights are used as ternary ones: codes and scale as their values show"
        if any(tensor.type_id == ggml.I2_S for tensor in self._tensors.values()):
            yield "I2_S in blocks of " + ("64 (ARM)" if self.is_arm else "128")


def _block_codes(tensor: GgufTensor, rows: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.int8] | None:
    """Codes int8; None where one is +2 in a block whose scale is not 0."""
    codes = ggml.block_codes(tensor.type_id, rows, tensor.shape)
    if codes.max(initial=0) > 1:
        codes.reshape(*scales.shape, -1)[scales == 0] = 0
    return None if codes.max(initial=0) > 1 else codes


def _row_scales(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each row the largest of its blocks, or where none is above 0 the lowest."""
    largest = scales.max(axis=1)
    found: NDArray[np.float32] = np.where(largest > 0, largest, scales.min(axis=1))
    return found


def _quarters(tensor: GgufTensor, rows: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
    """The quick way for TQ2_0 and I2_S; None where it does not go, or where a code is 3, which is looked at closely."""
    if len(rows) % 4 or tensor.type_id not in (ggml.TQ2_0, ggml.I2_S):
        return None
    return ggml.quarters(tensor.type_id, rows)


def tensor_name(name: str, kind: str = "weight") -> str:
    """The tensor of a file that holds a canonical name."""
    if not name.startswith("layers."):
        return f"{_NAMES[name]}.{kind}"
    _, layer, part, *of = name.split(".")
    if part == "experts":
        number, projection = of
        return f"blk.{layer}.{_NAMES[projection]}.{number}.{kind}"
    if is_bias(name):
        kind = "bias" if kind == "weight" else f"bias_{kind}"
    return f"blk.{layer}.{_NAMES[part]}{'_norm_in' if of == ['norm'] else ''}.{kind}"


def _as_ternary(name: str, tensor: GgufTensor) -> tuple[NDArray[np.int8], float]:
    """Codes and scale of a projection in floats: dequantised ones, whose values tell; else masters, by their mean."""
    weights = ggml.decode(tensor.type_id, tensor.raw(), tensor.shape)
    magnitudes = np.abs(weights)
    largest = float(magnitudes.max(initial=0))
    if not math.isfinite(largest):
        raise FormatError(tensor.path, tensor_name(name), f"a weight is NaN or infinite: {_AGAIN}")
    # Quantising +-m and 0 moves values by an eighth at most (Q4_0).
    is_used = magnitudes > np.float32(largest / 2)
    between = (magnitudes > np.float32(0.2 * largest)) & (magnitudes < np.float32(0.8 * largest))
    if largest and not between.any():
        return (np.sign(weights) * is_used).astype(np.int8), largest
    codes, scale = native.ternarize(np.ascontiguousarray(weights), "float32")
    return codes, float(scale)

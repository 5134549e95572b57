"""Hugging Face folders: the models of hf_families, packed, as master weights, dense, or as MLX quantises them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native, ternary
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import Dense, Ternary, bias_of, expected_shapes, is_projection, problem_lines
from bitnet_inference.formats.experts import refuse_norms_of_experts
from bitnet_inference.formats.float_tensors import FLOATS, dtype_of, float_values, same_tables
from bitnet_inference.formats.floats import FloatName, rounded, to_float32
from bitnet_inference.formats.hf_config import read_config
from bitnet_inference.formats.hf_experts import with_each_expert
from bitnet_inference.formats.hf_families import Family, find_family
from bitnet_inference.formats.hf_inventory import Inventory
from bitnet_inference.formats.hf_names import Names, find_names
from bitnet_inference.formats.hf_pooling import read_pooling
from bitnet_inference.formats.hf_quantization import Quantization, masters, packed_beside_mlx, read_quantization
from bitnet_inference.formats.json_files import read_json
from bitnet_inference.formats.mlx import SCALES, is_mlx
from bitnet_inference.formats.multipliers import read_multipliers
from bitnet_inference.formats.safetensors_files import Tensor, inside
from bitnet_inference.formats.ternarized import by_rows, ternarized
from bitnet_inference.formats.weight_files import open_weights


class HuggingFaceCheckpoint:
    """A folder with config.json and files of weights. Opening reads headers only; tensors are mapped when asked for.

    `generation` is what generation_config.json holds, as it stands there; its stop tokens are in `config.eos_ids` too.
    """

    def __init__(self, path: Path) -> None:
        """Raises FormatError for broken files and impossible configurations, Unsupported for what is not done."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self._fields = read_json(inside(path, "config.json"))
        self.generation, stops = _read_generation(path)
        self._family = find_family(self._fields)
        self._is_mlx = is_mlx(self._fields)
        quantization = read_quantization(self._fields)
        config = read_config(self._fields, quantization, stops)
        self._files, self._files_kind = open_weights(path)
        if config.experts is not None:
            each = with_each_expert(self._files.tensors, config.experts.count)
            self._files = replace(self._files, tensors=each)
        if self._is_mlx and quantization is None:
            quantization = packed_beside_mlx(self._files.tensors)
        names = find_names(self._files.tensors, self._family.renamed)
        self._quantization = _with_masters(quantization, self._family, names, config.norm_eps)
        if self._quantization is not None:
            eps = self._quantization.norm_eps
            config = replace(config, linear_norm=self._quantization.norm, linear_norm_eps=eps)
        refuse_norms_of_experts(path, config)
        self._multipliers = read_multipliers(self._fields, self._family.name, config.num_layers, config.hidden_size)
        self._head_ignored = False
        config = replace(
            config,
            tie_embeddings=self._is_tied(config.tie_embeddings, names),
            embed_scale=self._embed_scale(config.hidden_size, names),
            pooling=read_pooling(path) or ("mean" if names.norm == "norm" else None),
        )
        self.config = self._multipliers.folded(path, config)
        shapes = dict(expected_shapes(self.config))
        self._inventory = Inventory(path, self._files.tensors, shapes, self._quantization, names)
        self._refuse_mixtures()

    @property
    def num_parameters(self) -> int:
        """The weights of the model; a tied head counts once, scales do not count."""
        return sum(math.prod(shape) for shape in self._inventory.shapes.values())

    @property
    def num_bytes(self) -> int:
        """The size of the files that hold the weights."""
        return self._files.num_bytes

    def check(self) -> list[str]:
        """Everything wrong with names, shapes, dtypes, scales and norms, a line each; no matrix is read."""
        return problem_lines(self.path, self._inventory.problems())

    def is_ternary(self, name: str) -> bool:
        """Whether `matrix` gives a Ternary for this canonical name; reads scales of MLX's matrices."""
        return self._inventory.is_ternary(name)

    def group_size(self, name: str) -> int:
        """How many columns share a scale, as in some of MLX's matrices, whose scales it reads; else 0."""
        affine = self._inventory.affine.get(name)
        if affine is None or not affine.is_ternary:
            return 0
        return affine.group_size if self.is_ternary(name) else affine.columns_a_group

    def dtype(self, name: str) -> FloatName:
        """The dtype of the Dense that `matrix` gives for this canonical name; reads scales of MLX's matrices."""
        if affine := self._inventory.affine.get(name):
            return affine.dtype
        return dtype_of(self._files.tensors.get(self._inventory.tensor_name(name)))

    def matrix(self, name: str) -> Dense | Ternary:
        """The matrix under a canonical name. Raises KeyError for no such name, FormatError where the file is wrong."""
        num_rows, num_columns = self._inventory.shapes[name]
        tensor = self._inventory.tensor(name)
        if affine := self._inventory.affine.get(name):
            return affine.ternary(name) if self.is_ternary(name) else affine.dense()
        if self._quantization is None or not self.is_ternary(name):
            return Dense(tensor.array(), FLOATS[tensor.dtype])
        if self._quantization.online:
            read = by_rows if self._quantization.by_rows else ternarized
            return read(tensor.path, name, Dense(tensor.array(), FLOATS[tensor.dtype]))
        scale = self._inventory.scale(name)
        if tensor.dtype == "U8":
            return Ternary(_packed(name, tensor, num_rows), "quarters", (num_rows, num_columns), scale)
        return Ternary(_unpacked(name, tensor), "codes", (num_rows, num_columns), scale)

    def release(self, name: str) -> None:
        """Let the system take back the memory of a matrix that was read."""
        (self._inventory.affine.get(name) or self._inventory.tensor(name)).release()

    def vector(self, name: str) -> NDArray[np.float32]:
        """The norm weights or bias under a canonical name. Raises KeyError and FormatError as `matrix` does."""
        (_,) = self._inventory.shapes[name]
        values = self._multipliers.vector(name, float_values(self._inventory.tensor(name)))
        is_of_a_projection = name.endswith(".norm")
        return values + np.float32(1) if self._family.one_plus and not is_of_a_projection else values

    def notes(self) -> list[str]:
        """How the files are meant, and what was ignored in them: a line each, for `bitnet inspect`."""
        return list(self._notes())

    def _is_tied(self, said: bool, names: Names) -> bool:
        if "lm_head.weight" not in self._files.tensors:
            return said or self._family.masters or not names.prefix  # a bare model's head is used by nobody
        self._head_ignored = said and not _tables_differ(self._files.tensors, names)
        return self._head_ignored

    def _embed_scale(self, hidden_size: int, names: Names) -> float:
        """What embeddings are multiplied by: rounded to the dtype of the table, as transformers does."""
        if not self._family.scaled_embeddings:
            return 1.0
        module, tensors = names.module("embed"), self._files.tensors
        table = tensors.get(f"{module}.{SCALES}") or tensors.get(f"{module}.weight")
        return float(rounded(np.float32(math.sqrt(hidden_size)), dtype_of(table)))

    def _refuse_mixtures(self) -> None:
        head_ternary = self._quantization is not None and self._quantization.converts("lm_head")
        if head_ternary and "head" not in self._inventory.shapes:
            raise Unsupported(
                f"{self.path}: a ternary head tied to the embeddings: add lm_head to modules_to_not_convert"
            )
        if self._has_scaled_biases():
            why = "a bias beside packed weights of linear_class autobitlinear"
            raise Unsupported(f"{self.path}: {why}: use the master weights, or another model")
        if self.config.linear_norm:
            projections = filter(is_projection, self._inventory.shapes)
            if head_ternary or not all(map(self._inventory.is_ternary, projections)):
                raise Unsupported(
                    f"{self.path}: use_rms_norm: norms before lm_head, or not before all projections: use another model"
                )

    def _has_scaled_biases(self) -> bool:
        """Whether there are some that transformers multiplies by weight_scale, which other programs do not."""
        quantization, inventory = self._quantization, self._inventory
        if quantization is None or quantization.online or quantization.divides:
            return False
        biased = (name for name in inventory.shapes if bias_of(name) in inventory.shapes)
        return any(inventory.is_ternary(name) and name not in inventory.affine for name in biased)

    def _notes(self) -> Iterator[str]:
        yield f"Hugging Face folder, {self._files_kind}: {self._files.num_files}"
        if self._is_mlx:
            kinds = [affine.kind for affine in self._inventory.affine.values()]
            counts = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in sorted(set(kinds)))
            yield f"quantised by MLX: {counts or 'no matrix'}"
        if not self._is_mlx or self._quantization is not None:
            yield self._weights_note()
        if self.config.tie_embeddings:
            yield "the head is tied to the embeddings" + (": lm_head.weight is ignored" if self._head_ignored else "")
        elif self._fields.flag("tie_word_embeddings"):
            yield "the head is not tied, although config.json says so: the files hold a different one"
        if "auto_map" in self._fields:
            yield "auto_map names code to run: it is not run"

    def _weights_note(self) -> str:
        if self._quantization is None:
            return "dense weights (no quantization_config), used as they are"
        if self._quantization.by_rows:
            return "weights of -m, 0 and m, with an m for each row"
        if self._quantization.online:
            return "master weights, ternarised at load by their mean magnitude"
        meant = "divides (bitlinear" if self._quantization.divides else "multiplies (autobitlinear"
        section = self._fields.section("quantization_config")
        is_said = section is not None and "linear_class" in section
        default = "" if is_said else ", MLX's default" if self._is_mlx else ", transformers' default"
        return f"ternary weights; weight_scale {meant}{default})"


def _with_masters(quantization: Quantization | None, family: Family, names: Names, eps: float) -> Quantization | None:
    """The quantisation, also where only the architecture or the norms of projections tell of it."""
    has_norms = names.norm == "norm"  # as the models of BitNet-embeddings
    if quantization is None:
        is_said = has_norms or family.masters or family.row_scales
        return masters(has_norms, eps, family.row_scales) if is_said else None
    return replace(quantization, norm=True, norm_eps=eps) if has_norms else quantization


def _tables_differ(tensors: dict[str, Tensor], names: Names) -> bool:
    # transformers 5 unties a head that is stored with other values.
    embed, head = tensors.get(f"{names.module('embed')}.weight"), tensors["lm_head.weight"]
    return embed is not None and not same_tables(embed, head)


def _packed(name: str, tensor: Tensor, num_rows: int) -> NDArray[Any]:
    packed = tensor.array()
    if native.has_invalid(packed):
        try:
            ternary.unpack_quarters(packed, num_rows)
        except ValueError as error:
            raise FormatError(tensor.path, name, f"{error}: download the model again") from error
    return packed


def _unpacked(name: str, tensor: Tensor) -> NDArray[np.int8]:
    values = tensor.array() if tensor.dtype == "I8" else to_float32(tensor.array(), FLOATS[tensor.dtype])
    if not np.isin(values, (-1, 0, 1)).all():
        why = 'unpacked ternary weights are -1, 0, 1: set quantization_mode to "online" for master weights'
        raise FormatError(tensor.path, name, why)
    return values.astype(np.int8)


def _read_generation(path: Path) -> tuple[dict[str, Any], tuple[int, ...]]:
    if not (path / "generation_config.json").exists():
        return {}, ()
    fields = read_json(inside(path, "generation_config.json"))
    return fields.values, fields.ids("eos_token_id")

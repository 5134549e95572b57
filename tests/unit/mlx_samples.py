"""Folders as mlx_lm writes them, by hand, from the golden Llama in float32, or another golden folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tiny_folders import bfloat16, safetensors_bytes

from bitnet_inference.formats.float_tensors import FLOATS
from bitnet_inference.formats.floats import to_float32
from bitnet_inference.formats.safetensors_files import open_tensors

SOURCE = Path(__file__).parents[1] / "golden" / "llama-f32"
Arrays = dict[str, NDArray[Any]]
STORED = {"bfloat16": bfloat16, "float16": np.float16, "float32": np.float32}


def affine_parts(
    weights: NDArray[np.float32], bits: int, group_size: int, ternary: bool = False, **more: Any
) -> tuple[Arrays, NDArray[np.float32]]:
    """Words, scales and biases of a matrix, and the values that they stand for.

    Codes are the nearest to the weights, or with `ternary` any that stand for -1, 0 and 1, with `scales` in turns;
    `dtype` is that of scales and biases.
    """
    dtype, choice = more.get("dtype", "bfloat16"), more.get("scales", (0.25, 0.5, 0.75))
    groups = weights.reshape(len(weights), -1, group_size)
    if ternary:
        scales = np.resize(np.float32(choice), groups.shape[:2])
        biases = scales * np.float32(-1 if bits == 2 else -0.5)
        codes = np.random.default_rng(0).integers(0, 3 if bits == 2 else 2, groups.shape)
    else:  # powers of two and their multiples, which 16 bits hold
        scales = np.exp2(np.ceil(np.log2(np.ptp(groups, axis=2) / (2**bits - 1)))).astype(np.float32)
        biases = scales * np.floor(groups.min(axis=2) / scales).clip(-128, 0)
        codes = np.rint((groups - biases[:, :, None]) / scales[:, :, None]).clip(0, 2**bits - 1).astype(np.int64)
    single = codes.reshape(len(weights), -1, 1) >> np.arange(bits) & 1
    packed = np.packbits(single.reshape(len(weights), -1).astype(np.uint8), axis=1, bitorder="little")
    stored = STORED[dtype]
    parts = {"weight": packed.view(np.uint32), "scales": stored(scales), "biases": stored(biases)}
    values = codes.astype(np.float32) * scales[:, :, None] + biases[:, :, None]
    return parts, np.ascontiguousarray(values.reshape(weights.shape))


def mlx_folder(
    path: Path,
    bits: int,
    group_size: int,
    *,
    change: Callable[[Arrays], object] = lambda tensors: None,
    quantization: dict[str, Any] | None = None,
    source: Path = SOURCE,
    **kind: Any,
) -> Arrays:
    """Write a folder whose matrices are quantised where `group_size` divides their columns; see affine_parts.

    `change` has the tensors before they are written. Returns the values of all tensors.
    """
    path.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, path)
    tensors: Arrays = {}
    values: Arrays = {}
    for name, tensor in open_tensors(source).tensors.items():
        values[name] = to_float32(tensor.array(), FLOATS[tensor.dtype])
        if values[name].ndim == 1 or values[name].shape[1] % group_size:
            tensors[name] = values[name]
            continue
        parts, values[name] = affine_parts(values[name], bits, group_size, **kind)
        tensors |= {f"{name.removesuffix('weight')}{part}": array for part, array in parts.items()}
    change(tensors)
    (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = json.loads((path / "config.json").read_text())
    said = quantization or {"group_size": group_size, "bits": bits, "mode": "affine"}
    (path / "config.json").write_text(json.dumps(config | {"quantization": said, "quantization_config": said}))
    return values

"""Every device that works here beside the reference: `agreement.py [MODEL...] [--devices cpu,cuda,mlx,onnx]`.

A row is a model: the one in the package and the tiny ones of tests/golden, where none is named. A cell is the relative
root mean square of the errors of logits, all with a float32 cache, and "!" where that is more than 3%, or another token
is the best although the reference's leads by more than twice the largest error. onnx runs what `bitnet convert` writes.
Without an NVIDIA GPU, TRITON_INTERPRET=1 has Triton interpret the kernels of "cuda", slowly.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.conversion.convert import convert
from bitnet_inference.errors import BitNetError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch
from bitnet_inference.model_folder import find_model

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
NUM_TOKENS = 12
MAX_ERROR = 0.03
Floats = NDArray[np.float32]


def logits_of(path: Path, device: str, num_tokens: int = NUM_TOKENS) -> Floats:
    """The logits of some tokens: all but the last at once, and the last one by itself."""
    model = load_model(open_checkpoint(path), EngineConfig(device=device, cache_dtype="float32"))
    try:
        size = model.capabilities.block_size
        model.reserve(-(-num_tokens // size))
        at, table = np.arange(num_tokens, dtype=np.int32), np.arange(-(-num_tokens // size), dtype=np.int32)[None]
        ids = (17 + 7919 * at) % model.config.vocab_size
        parts = []
        for part in (slice(0, num_tokens - 1), slice(num_tokens - 1, num_tokens)):
            starts = np.array([0, len(at[part])], np.int32)
            parts.append(model.forward(Batch(ids[part], at[part], at[part], starts, table)).full(range(len(at[part]))))
        return np.concatenate(parts)
    finally:
        model.close()


def difference(logits: Floats, truth: Floats) -> tuple[float, int]:
    """Root mean square of the errors by that of the reference; how many clear best tokens are others."""
    error = logits - truth
    second, best = np.sort(truth, axis=1)[:, -2:].T
    is_clear = best - second > 2 * np.abs(error).max(axis=1)
    num_others = int((is_clear & (logits.argmax(axis=1) != truth.argmax(axis=1))).sum())
    return float(np.sqrt(np.square(error).mean() / np.square(truth).mean())), num_others


def is_off(error: float, num_others: int) -> bool:
    """Whether a device does not agree: what `difference` gives."""
    return num_others > 0 or not error <= MAX_ERROR


def models_here() -> list[Path]:
    """The model in the package, and a tiny one of every family."""
    return [find_model("default"), *sorted(path.parent for path in GOLDEN.glob("*/golden.npz"))]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", metavar="MODEL", nargs="*", type=Path)
    parser.add_argument("--devices", default="cpu,cuda,mlx,onnx")
    arguments = parser.parse_args()
    sys.exit(_print_table(arguments.models or models_here(), arguments.devices.split(",")))


def _print_table(models: Sequence[Path], devices: Sequence[str]) -> int:
    print("| model |", " | ".join(devices), "|\n|", "--- | " * (1 + len(devices)))
    num_wrong = 0
    for model in models:
        truth, cells = logits_of(model, "reference"), []
        for device in devices:
            try:
                error, others = difference(_on(model, device), truth)
                num_wrong += is_off(error, others)
                cells.append(f"{error:.1e}{' !' if is_off(error, others) else ''}")
            except BitNetError as failure:
                num_wrong += not isinstance(failure, Unsupported)
                cells.append(f"refused: {failure}" if isinstance(failure, Unsupported) else f"failed: {failure}")
        print("|", " | ".join([model.name, *cells]), "|", flush=True)
    return int(num_wrong > 0)


def _on(model: Path, device: str) -> Floats:
    if device != "onnx":
        return logits_of(model, device)
    with tempfile.TemporaryDirectory() as folder:
        return logits_of(convert(model, Path(folder, "model.onnx"), check=False).path, device)


if __name__ == "__main__":
    main()

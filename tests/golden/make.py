"""Write the golden checkpoints and what Transformers computes from them; `--check` compares with those that are here.

Needs the extra `golden` (torch, transformers, accelerate). scripts/golden runs this.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TQDM_DISABLE="1")

import models
import numpy as np
import outputs
import safetensors
import searches
import tokenizers
import torch
import transformers
import words
from safetensors.numpy import load_file

HERE = Path(__file__).parent
# A right implementation differs by some 1e-6 of a value of up to 127: codes that stay this far from a tie don't flip.
MIN_TIE, MAX_ATTEMPTS = 5e-5, 200


def make(spec: models.Spec, folder: Path) -> tuple[int, float]:
    """Write one checkpoint: the first seed with which no int8 code comes near a tie. Returns seed and distance."""
    for attempt in range(MAX_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        models.write(spec, folder, attempt)
        arrays, closest = outputs.compute(folder, spec)
        if closest >= MIN_TIE:
            words.write(spec, folder)
            models.disguise(spec, folder)
            np.savez_compressed(folder / "golden.npz", **arrays)
            if spec.name in searches.NAMES:
                searches.write(folder, spec)
            return attempt, closest
    raise SystemExit(f"{spec.name}: no seed of {MAX_ATTEMPTS} keeps the codes away from ties")


def make_all(root: Path, names: list[str]) -> None:
    """Write the checkpoints of these names, or every one, and manifest.json."""
    torch.set_num_threads(1)
    chosen = json.loads((HERE / "manifest.json").read_text())["checkpoints"] if names else {}
    for spec in (spec for spec in models.SPECS if not names or spec.name in names):
        attempt, closest = make(spec, root / spec.name)
        chosen[spec.name] = {"attempt": attempt, "closest_tie": float(f"{closest:.3g}")}
        print(f"{spec.name}: attempt {attempt}, closest tie {closest:.2g}", flush=True)
    libraries = (torch, transformers, safetensors, tokenizers, np)
    versions = {library.__name__: str(library.__version__) for library in libraries}
    (root / "manifest.json").write_text(json.dumps({"versions": versions, "checkpoints": chosen}, indent=2) + "\n")


def differences(new: Path, old: Path) -> list[str]:
    """What differs between two golden folders beyond rounding."""
    found = []
    for path in sorted(path for path in new.rglob("*") if path.is_file() and path.name != "manifest.json"):
        other = old / path.relative_to(new)
        if not other.exists():
            found.append(f"{path.relative_to(new)} is missing")
        elif path.suffix in (".npz", ".safetensors"):
            found += _array_differences(path, other)
        elif path.suffix == ".json":
            if not _alike(json.loads(path.read_bytes()), json.loads(other.read_bytes())):
                found.append(f"{path.relative_to(new)} differs")
        elif path.read_bytes() != other.read_bytes():
            found.append(f"{path.relative_to(new)} differs")
    return found


def _alike(new: Any, old: Any) -> bool:
    """Whether two values of JSON are the same, numbers up to rounding."""
    if isinstance(new, float) and isinstance(old, float):
        return math.isclose(new, old, rel_tol=1e-4)
    if isinstance(new, list) and isinstance(old, list):
        return len(new) == len(old) and all(map(_alike, new, old))
    if isinstance(new, dict) and isinstance(old, dict):
        return new.keys() == old.keys() and all(_alike(new[name], old[name]) for name in new)
    return bool(new == old)


def _array_differences(path: Path, other: Path) -> list[str]:
    load = np.load if path.suffix == ".npz" else _bits
    new, old = dict(load(path)), dict(load(other))
    if new.keys() != old.keys():
        return [f"{path.name}: {sorted(new.keys() ^ old.keys())} are in one only"]
    return [f"{path}: {name} differs" for name in new if not np.allclose(new[name], old[name], rtol=1e-4, atol=1e-5)]


def _bits(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except (KeyError, TypeError):  # NumPy has no bfloat16
        loaded = safetensors.safe_open(path, "pt")
        return {name: loaded.get_tensor(name).float().numpy() for name in loaded.keys()}  # noqa: SIM118


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write to a temporary folder and compare")
    parser.add_argument("names", nargs="*", help="only these checkpoints")
    arguments = parser.parse_args()
    if not arguments.check:
        make_all(HERE, arguments.names)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_all(Path(folder), arguments.names)
        found = differences(Path(folder), HERE)
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()

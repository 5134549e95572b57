"""What the bits of an answer depend on, in a word: the model's files, how it is run, and this version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from bitnet_inference.config import installed_version
from bitnet_inference.model_folder import find_model
from bitnet_inference.models import Models, OneModel, path_of

NUM_SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file: hashing gigabytes would take longer than loading them


class Fingerprints:
    """OpenAI's `system_fingerprint`: equal for equal requests to equal models, whose answers are equal to the bit.

    Of each file of a model, its name, size and 64 samples of 4 KiB count.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Path, str], str] = {}

    def of(self, path: str | Path, models: Models | OneModel) -> str:
        """That of a model that is loaded. Reads its files when it is asked for the first time."""
        found, numbers = find_model(path).resolve(), models.numbers(path_of(path))
        if (found, numbers) not in self._known:
            self._known[found, numbers] = _fingerprint(found, numbers)
        return self._known[found, numbers]


def _fingerprint(path: Path, numbers: str) -> str:
    digest = hashlib.sha256(f"{installed_version()} {numbers}".encode())
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        for sample in _samples(file):
            digest.update(sample)
    return f"fp_{digest.hexdigest()[:16]}"


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(index * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)

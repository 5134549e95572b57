"""What all files have in common whose weights nobody but their own runtime can take out."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from bitnet_inference.errors import Unsupported


class ClosedCheckpoint:
    """The part of a `Checkpoint` that would give weights. `_closed` names what they stay in."""

    path: Path
    _closed: str

    def check(self) -> list[str]:
        """Empty: what can be wrong was refused when it was opened."""
        return []

    def is_ternary(self, name: str) -> bool:
        """False: its runtime computes with the weights as it wants."""
        return False

    def group_size(self, name: str) -> int:
        """0, as there are no ternary matrices."""
        return 0

    def dtype(self, name: str) -> NoReturn:
        """As `matrix`."""
        self.matrix(name)

    def matrix(self, name: str) -> NoReturn:
        """Raises Unsupported: which tensor is which matrix nobody says."""
        raise Unsupported(f"{self.path}: the weights of {self._closed} cannot be taken out: use what it is made of")

    def vector(self, name: str) -> NoReturn:
        """As `matrix`."""
        self.matrix(name)

    def release(self, name: str) -> None:
        """Nothing is mapped."""

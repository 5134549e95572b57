"""A checkpoint of which a rank of a group sees its own rows of every matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, ModelConfig, Ternary
from bitnet_inference.model.loader import sound_matrix
from bitnet_inference.model.shards import Rows, rows


class ShardCheckpoint:
    """Another checkpoint, cut for one rank; `config` is the whole model's."""

    def __init__(self, checkpoint: Checkpoint, rank: int, num_ranks: int) -> None:
        self.path: Path = checkpoint.path
        self.config: ModelConfig = checkpoint.config
        self._checkpoint, self._rank, self._num_ranks = checkpoint, rank, num_ranks

    @property
    def metadata(self) -> Mapping[str, Any]:
        """That of the other."""
        return self._checkpoint.metadata

    @property
    def num_parameters(self) -> int:
        """As many as the other has."""
        return self._checkpoint.num_parameters

    @property
    def num_bytes(self) -> int:
        """The size of the other's files."""
        return self._checkpoint.num_bytes

    def notes(self) -> list[str]:
        """Those of the other."""
        return self._checkpoint.notes()

    def check(self) -> list[str]:
        """Everything wrong with the other."""
        return self._checkpoint.check()

    def is_ternary(self, name: str) -> bool:
        """As the other."""
        return self._checkpoint.is_ternary(name)

    def group_size(self, name: str) -> int:
        """As the other."""
        return self._checkpoint.group_size(name)

    def matrix(self, name: str) -> Dense | Ternary:
        """The rank's rows of the matrix under a canonical name; where the layout allows it, nothing else is read.

        Raises FormatError where a scale or a code is not sound.
        """
        matrix, part = sound_matrix(self._checkpoint, name), rows(self.config, name, self._num_ranks)[self._rank]
        if isinstance(matrix, Dense):
            return Dense(matrix.data[slice(*part)], matrix.dtype)
        try:
            return cut(matrix, part)
        except ValueError as error:
            raise FormatError(self.path, name, f"{error}: download the model again") from error

    def release(self, name: str) -> None:
        """As the other."""
        self._checkpoint.release(name)

    def vector(self, name: str) -> NDArray[np.float32]:
        """The whole vector under a canonical name: norms are done by every rank, on whole rows or on whole heads."""
        return self._checkpoint.vector(name)


def cut(matrix: Ternary, part: Rows) -> Ternary:
    """Rows of a ternary matrix, in its layout where that has whole groups of them, else as codes.

    Raises ValueError for codes that are none.
    """
    (begin, end), group = part, ternary.GROUP_ROWS
    data, layout, shape = matrix.data, matrix.layout, (end - begin, matrix.shape[1])
    if layout == "quarters":
        data, layout = _from_quarters(data.view(np.uint8), part), "codes"
    elif layout != "codes" and begin % group == 0 and (end % group == 0 or end == matrix.shape[0]):
        data = data[begin // group : -(-end // group)]
    else:
        data, layout = ternary.unpack(data, layout, matrix.shape)[begin:end], "codes"
    scale = matrix.scale[begin:end] if isinstance(matrix.scale, np.ndarray) else matrix.scale
    return Ternary(data, layout, shape, scale, matrix.group_size)


def _from_quarters(packed: NDArray[np.uint8], part: Rows) -> NDArray[np.int8]:
    pieces = []
    for quarter in range(4):
        begin, end = (min(max(row - quarter * len(packed), 0), len(packed)) for row in part)
        count = end - begin
        pieces.append(ternary.unpack_quarters(packed[begin:end], 4 * count)[quarter * count :][:count])
    return np.concatenate(pieces)

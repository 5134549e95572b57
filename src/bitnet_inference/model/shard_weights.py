"""A checkpoint of which a rank of a group sees its own rows of every matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import ChangedCheckpoint, Checkpoint, Dense, Ternary, is_bias
from bitnet_inference.model.loader import sound_matrix
from bitnet_inference.model.shards import Rows, rows


class ShardCheckpoint(ChangedCheckpoint):
    """Another checkpoint, cut for one rank; `config` is the whole model's, and norms are whole: every rank norms."""

    def __init__(self, original: Checkpoint, rank: int, num_ranks: int) -> None:
        super().__init__(original)
        self._rank, self._num_ranks = rank, num_ranks

    def matrix(self, name: str) -> Dense | Ternary:
        """The rank's rows of the matrix under a canonical name; where the layout allows it, nothing else is read.

        Raises FormatError where a scale or a code is not sound.
        """
        matrix = sound_matrix(self.original, name, takes_rows=True)
        part = rows(self.config, name, self._num_ranks)[self._rank]
        if isinstance(matrix, Dense):
            return Dense(matrix.data[slice(*part)], matrix.dtype)
        try:
            return cut(matrix, part)
        except ValueError as error:
            raise FormatError(self.path, name, f"{error}: download the model again") from error

    def vector(self, name: str) -> NDArray[np.float32]:
        """The vector under a canonical name; of a bias, that of the rank's rows."""
        vector = self.original.vector(name)
        return vector[slice(*rows(self.config, name, self._num_ranks)[self._rank])] if is_bias(name) else vector


def cut(matrix: Ternary, part: Rows) -> Ternary:
    """Rows of a ternary matrix, in its layout where that has whole groups of them, else as codes.

    Raises ValueError for codes that are none.
    """
    (begin, end), group = part, ternary.GROUP_ROWS
    data, layout, shape = matrix.data, matrix.layout, (end - begin, matrix.shape[1])
    if layout == "quarters":
        data, layout = _from_quarters(data.view(np.uint8), part), "codes"
    elif layout == "signs":
        data = data[begin:end]
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

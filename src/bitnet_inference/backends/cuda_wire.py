"""Messages between a model and the processes of its GPUs: words in JSON, and arrays as they lie in memory."""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import errors

Words = dict[str, Any]
Arrays = Sequence[NDArray[Any]]
_DTYPES = ("int32", "float32")
_MAX_WORDS_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")  # of the JSON
_BUFFER_BYTES = 1 << 20  # in the system, as far as it grants that
_JOINED_BYTES = 1 << 16  # what is larger is not copied to be sent


class Wire:
    """One end of a connection within this machine, for one thread that sends and one that receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    def fileno(self) -> int:
        """What the system calls it, to wait for it."""
        return self._connection.fileno()

    def send(self, words: Words, arrays: Arrays = ()) -> None:
        """Send a message; raises OSError where the other end is gone, or takes nothing for too long."""
        shapes = [[array.dtype.name, array.shape] for array in arrays]
        text = json.dumps([words, shapes]).encode()
        message = b"".join((_LENGTH.pack(len(text)), text))
        for array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            if len(data) > _JOINED_BYTES:
                self._connection.sendall(message)
                self._connection.sendall(data)
                message = b""
            else:
                message += data
        self._connection.sendall(message)

    def receive(self) -> tuple[Words, list[NDArray[Any]]]:
        """The next message; raises EOFError where there will be none, TimeoutError, and OSError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size).tobytes())
        assert length <= _MAX_WORDS_BYTES, "a message of ours is small"
        words, shapes = json.loads(self._read(length).tobytes())
        return words, [self._array(*each) for each in shapes]

    def close(self) -> None:
        """The other end finds that there will be no more."""
        self._connection.close()

    def _array(self, dtype: str, shape: list[int]) -> NDArray[Any]:
        assert dtype in _DTYPES, dtype
        return self._read(math.prod(shape) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def _read(self, count: int) -> NDArray[np.uint8]:
        data = np.empty(count, np.uint8)
        rest = data.data
        while rest:
            received = self._connection.recv_into(rest)
            if not received:
                raise EOFError
            rest = rest[received:]
        return data


def told(error: Exception, who: str) -> Words:
    """An error as words; one that is not ours becomes a BackendError of `who`."""
    if isinstance(error, errors.FormatError):
        given: tuple[str, ...] = (str(error.path), error.where, error.why)
    elif isinstance(error, errors.Unavailable):
        given = (error.name, error.why, error.install)
    elif isinstance(error, errors.BitNetError):
        given = (str(error),)
    else:
        return {"error": ["BackendError", f"{who} failed: {errors.said(f'{type(error).__name__}: {error}')}"]}
    return {"error": [type(error).__name__, *given]}


def error_of(words: Words) -> errors.BitNetError | None:
    """The error that `told` made these words of; None where they are none."""
    if "error" not in words:
        return None
    name, *given = words["error"]
    kind = getattr(errors, name)
    assert issubclass(kind, errors.BitNetError), name
    error: errors.BitNetError = kind(*given)
    return error

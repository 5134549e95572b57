"""Writes GGUF files, version 3: the metadata, then one tensor after the other, each made when it is its turn."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.ggml_blocks import num_bytes
from bitnet_inference.formats.gguf_file import ARRAY, DEFAULT_ALIGNMENT, MAGIC, STRING

Put = Callable[[NDArray[np.uint8]], None]
_VERSION = 3
_U32, _I32, _F32, _BOOL = 4, 5, 6, 7
_ARRAYS = {"<f4": 6, "<i4": 5, "|b1": _BOOL}


def write_gguf(
    out: BinaryIO,
    records: Collection[bytes | memoryview],
    shapes: Mapping[str, tuple[int, ...]],
    encode: Callable[[str, Put], int],
) -> None:
    """Write a file that can seek: metadata records (`record`), and tensors by name, with NumPy's shapes.

    `encode` makes one tensor after the other, in this order: it puts its bytes, in pieces or at once, and gives the
    type that it chose.
    """

    def put(piece: NDArray[np.uint8]) -> None:
        out.write(np.ascontiguousarray(piece).data)

    out.write(struct.pack("<4sIqq", MAGIC, _VERSION, len(shapes), len(records)))
    out.writelines(records)
    infos_at, infos = out.tell(), b""
    out.write(b"".join(_info(name, shape, 0, 0) for name, shape in shapes.items()))
    _pad(out)
    start = out.tell()
    for name, shape in shapes.items():
        begin = out.tell()
        type_id = encode(name, put)
        assert out.tell() - begin == num_bytes(type_id, shape), f"{name} was encoded to another size"
        _pad(out)
        infos += _info(name, shape, type_id, begin - start)
    out.seek(infos_at)  # what type each became is known only now
    out.write(infos)


def record(key: str, value: object) -> bytes:
    """A key and its value: text, a flag, a whole number from -2^31 to 2^32, a float (as float32), texts, or flags, or
    numbers in float32 or int32."""
    return _text(key) + _value(value)


def _value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Ii", _I32, value) if value < 0 else struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, np.ndarray):
        kind = _ARRAYS[value.dtype.str]
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + value.tobytes()
    assert isinstance(value, Sequence), f"{type(value).__name__} has no type in GGUF"
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))


def _text(text: str) -> bytes:
    encoded = text.encode(errors="replace")  # half a surrogate pair, in a name or a template, is no text
    return struct.pack("<Q", len(encoded)) + encoded


def _info(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    sizes = shape[::-1]
    return _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, type_id, offset)


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % DEFAULT_ALIGNMENT))

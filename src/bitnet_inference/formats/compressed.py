"""Tensors of our own file that are compressed (docs/packed_format.md): the one door to `zstandard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bitnet_inference.config import num_cores
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.json_files import parse_object, shown
from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.in_threads import in_threads

SUFFIX = ".zst"  # of the tensor that holds the bytes
CHUNK_BYTES = 1 << 20  # of a tensor in one frame, but for the last: it stays in the processor's cache
MAX_RATIO = 16  # a file of N bytes never makes anyone allocate more than 16 N
_DTYPES = {"U8": "u1", "F16": "<f2", "BF16": "<u2", "F32": "<f4"}
_LEVEL = 1  # higher ones find no more: the bytes of weights differ in how often they occur, and do not repeat
_ENTRY_BYTES = 512  # about what a compressed tensor takes more in the header
_MAX_THREADS = 8
_WHERE = "__metadata__.compressed"
_AGAIN = "convert the model again"
_COPY = "copy the file again"


@dataclass(frozen=True)
class Compressed:
    """A tensor in frames of zstd, one for each CHUNK_BYTES; `ends` are where they end in `stored`. As a Tensor else."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: Tensor
    ends: tuple[int, ...]

    @property
    def begin(self) -> int:
        """Where its bytes begin in the file."""
        return self.stored.begin

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor, decompressed."""
        return math.prod(self.shape) * np.dtype(_DTYPES[self.dtype]).itemsize

    def array(self) -> NDArray[Any]:
        """The tensor, decompressed on several threads. Raises FormatError where a frame is not what it should be."""
        dtype = np.dtype(_DTYPES[self.dtype])
        content, out = self.stored.array(), np.empty(self.num_bytes, np.uint8)

        def read(index: int) -> None:
            frame = content[self.ends[index - 1] if index else 0 : self.ends[index]]
            chunk = out[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].reshape(-1, dtype.itemsize)
            planes = self._decompress(frame, chunk.size).reshape(dtype.itemsize, -1)
            for place, plane in enumerate(planes):
                chunk[:, place] = plane

        _for_each(read, len(self.ends))
        self.release()
        return out.view(dtype).reshape(self.shape)

    def release(self) -> None:
        """Let the system take back the memory of the pages that were read; they can be read again."""
        self.stored.release()

    def _decompress(self, frame: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
        """What is in a frame, whose header is checked before anything is allocated."""
        try:
            says = zstandard.get_frame_parameters(frame.data)
            if says.content_size != size or says.window_size > CHUNK_BYTES or not says.has_checksum:
                raise self._wrong(
                    f"a frame is not one of {size} bytes, window and checksum within the bounds: {_AGAIN}"
                )
            content = zstandard.ZstdDecompressor().decompress(frame.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise self._wrong(f"the compressed bytes are damaged ({shown(str(error))}): {_COPY}") from None
        if len(content) != size:
            raise self._wrong(f"a frame holds {len(content)} bytes, not {size}: {_AGAIN}")
        return np.frombuffer(content, np.uint8)

    def _wrong(self, why: str) -> FormatError:
        return FormatError(self.stored.path, self.name, why)


def compress(data: NDArray[Any]) -> tuple[NDArray[np.uint8], tuple[int, ...]] | None:
    """The frames of an array on end, and where each ends; None where that saves too little, or more than is believed.

    The bytes of the items of a chunk are sorted by their place: exponents compress, and digits do not.
    """
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    frames = [b""] * -(-flat.size // CHUNK_BYTES)

    def write(index: int) -> None:
        chunk = flat[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].reshape(-1, data.itemsize)
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True)
        frames[index] = compressor.compress(np.ascontiguousarray(chunk.T).data)

    _for_each(write, len(frames))
    ends = np.cumsum([len(frame) for frame in frames]).tolist()
    if not ends or ends[-1] + _ENTRY_BYTES > flat.size * 15 // 16 or flat.size > MAX_RATIO * ends[-1]:
        return None
    return np.frombuffer(b"".join(frames), np.uint8), tuple(ends)


def open_compressed(path: Path, text: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Compressed]]:
    """The compressed tensors of a file, by name, none of them read. Raises FormatError where sizes do not fit."""
    entries = parse_object(text.encode("utf-8", "surrogatepass"), path, _WHERE, _AGAIN)
    for name, entry in entries.items():
        stored = tensors.get(name + SUFFIX)
        if stored is None or name in tensors or stored.dtype != "U8" or len(stored.shape) != 1:
            raise FormatError(path, shown(name), f"there is no {shown(name + SUFFIX)}, U8, in its place: {_AGAIN}")
        if why := _problem(entry, stored.shape[0]):
            raise FormatError(path, shown(name), f"{why}: {_AGAIN}")
        yield name, Compressed(name, entry["dtype"], tuple(entry["shape"]), stored, tuple(entry["ends"]))


def _problem(entry: Any, stored_bytes: int) -> str:
    """Why an entry of __metadata__ cannot be; empty where it can."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "ends"}:
        return f"has not exactly dtype, shape and ends in {_WHERE}"
    dtype, shape, ends = entry["dtype"], entry["shape"], entry["ends"]
    if not isinstance(dtype, str) or dtype not in _DTYPES or not _are_counts(shape) or len(shape) > 3:
        return f"{shown(dtype)} {shown(shape)} is no dtype and shape that can be compressed"
    num_bytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if num_bytes > MAX_RATIO * stored_bytes:
        return f"{stored_bytes} bytes would become {num_bytes}, more than {MAX_RATIO} times as many"
    if not _are_counts(ends) or len(ends) != -(-num_bytes // CHUNK_BYTES):
        return f"{num_bytes} bytes are not in frames of {CHUNK_BYTES}"
    if any(end <= begin for begin, end in zip([0, *ends], ends, strict=False)) or ends[-1] != stored_bytes:
        return "the frames do not lie one behind the other to the end"
    return ""


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list) and bool(values) and all(type(each) is int and 0 < each < 1 << 40 for each in values)
    )


def _for_each(work: Callable[[int], None], count: int) -> None:
    """Call it with every number below `count`; zstd and NumPy leave the interpreter to other threads."""
    for _ in in_threads(work, range(count), min(count, num_cores(), _MAX_THREADS)):
        pass

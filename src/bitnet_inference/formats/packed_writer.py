"""Writes our own file (docs/packed_format.md): a matrix at a time, whole or not at all, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native, ternary
from bitnet_inference.config import installed_version
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.formats.checkpoint import Checkpoint, Dense, Ternary, expected_shapes, require_sound
from bitnet_inference.formats.compressed import SUFFIX, compress
from bitnet_inference.formats.float_tensors import FLOATS
from bitnet_inference.formats.floats import FloatName, to_float32
from bitnet_inference.formats.json_files import MAX_JSON_BYTES
from bitnet_inference.formats.kinds import kind_of
from bitnet_inference.formats.packed import (
    ALIGNMENT,
    CONFIG_HASH,
    FILE,
    FORMAT,
    PADDING,
    SCREEN,
    PackedCheckpoint,
    scale_name,
    sha256_of,
)
from bitnet_inference.formats.packed_config import write_config
from bitnet_inference.formats.packed_experts import is_stack, written_together
from bitnet_inference.formats.packed_versions import VERSION
from bitnet_inference.formats.titles import source_of, title_of
from bitnet_inference.output_files import refuse_unwritable, whole_file

_ENTRY_BYTES = 512  # more than a tensor, its padding and their hashes take in the header
_WEIGHTS_A_BYTE = 1 << 14  # the end of a frame stands for a MiB of them, in 16 bytes of the header
_CHUNK_BYTES = 1 << 24


def write_packed(
    checkpoint: Checkpoint,
    files: Mapping[str, bytes],
    path: str | Path,
    *,
    compressed: bool = False,
    min_screened: int = 1 << 24,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a checkpoint and the text files that belong to it; what was at `path` is replaced.

    `compressed` files take less room, and longer to load: ternary matrices have 1.6 bits a weight where that is less,
    everything else is compressed where that saves something, and there is no screen.
    Dense heads of at least `min_screened` weights get the screen beside them that is otherwise made at every load.
    `progress` gets the weights written so far, and those in all.
    Raises InvalidParams where the file cannot be written, FormatError where the checkpoint is wrong.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise InvalidParams(f"{path}: a packed file is called NAME.safetensors: choose such a name")
    refuse_unwritable(path)
    require_sound(checkpoint)
    shapes, written, done = dict(expected_shapes(checkpoint.config)), written_together(checkpoint.config), 0
    config = write_config(checkpoint.config)
    said = {"format": FORMAT, "version": str(VERSION), "config": config, CONFIG_HASH: sha256_of(config)}
    said |= _provenance(checkpoint, compressed)
    room = sum(len(json.dumps(each)) for each in said.values()) + _ENTRY_BYTES * (2 * len(written) + len(files) + 8)
    if compressed:
        dense = (math.prod(shape) for name, shape in shapes.items() if not checkpoint.is_ternary(name))
        room += sum(dense) // _WEIGHTS_A_BYTE
    if room > MAX_JSON_BYTES - ALIGNMENT:
        raise InvalidParams(f"{path}: a header of {room} bytes would not be read again: such a model is not known")
    total = sum(map(math.prod, shapes.values()))
    with whole_file(path) as file:
        target = _Target(file, -(-(8 + room) // ALIGNMENT) * ALIGNMENT, compressed)
        for name, members in written.items():
            for tensor in _parts(checkpoint, name, members, shapes[members[0]], compressed):
                target.add_read(*tensor, len(members) if is_stack(name) else None)
            done += sum(math.prod(shapes[member]) for member in members)
            if progress is not None:
                progress(done, total)
        for name, dtype, data in [] if compressed else _screen(checkpoint, min_screened):
            target.add(name, dtype, data)
        for name, content in sorted(files.items()):
            target.add(FILE + name, "U8", np.frombuffer(content, np.uint8))
        target.finish(said)


class _Target:
    """The data of a file from byte `start` on, compressed where wanted; `finish` writes the header in front of it."""

    def __init__(self, file: BinaryIO, start: int, compressed: bool) -> None:
        self._file, self._start, self._end = file, start, 0
        self._is_compressed = compressed
        self._entries: dict[str, Any] = {}
        self._hashes: dict[str, str] = {}
        self._compressed: dict[str, Any] = {}
        file.seek(start)

    def add(self, name: str, dtype: str, data: NDArray[Any]) -> None:
        """Append a tensor. Those in t5 are dense already."""
        if self._is_compressed and not name.endswith(".t5") and (found := compress(data)):
            frames, ends = found
            self._compressed[name] = {"dtype": dtype, "shape": list(data.shape), "ends": list(ends)}
            name, dtype, data = name + SUFFIX, "U8", frames
        self._append(name, dtype, data.shape, iter([data]))

    def add_read(self, name: str, dtype: str, arrays: Iterator[NDArray[Any]], count: int | None) -> None:
        """Append the only array; or a stack of so many of one shape, never compressed, so that each can be read alone.

        The next one is read when one is written, and behind the last.
        """
        for first in arrays:
            if count is None:
                self.add(name, dtype, first)
            else:
                self._append(name, dtype, (count, *first.shape), chain([first], arrays))

    def _append(self, name: str, dtype: str, shape: tuple[int, ...], arrays: Iterator[NDArray[Any]]) -> None:
        begin, digest = self._end, hashlib.sha256()
        for array in arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for at in range(0, len(flat), _CHUNK_BYTES):
                chunk = flat[at : at + _CHUNK_BYTES]
                digest.update(chunk)
                self._file.write(chunk)
            self._end += len(flat)
        self._entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, self._end]}
        self._hashes[name] = digest.hexdigest()
        if missing := -self._end % ALIGNMENT:
            self._append(f"{PADDING}{len(self._entries)}", "U8", (missing,), iter([np.zeros(missing, np.uint8)]))

    def finish(self, said: dict[str, str]) -> None:
        """Write the header."""
        tables = {"sha256": self._hashes, "compressed": self._compressed}
        said |= {key: json.dumps(table, separators=(",", ":")) for key, table in tables.items()}
        header = {"__metadata__": said, **self._entries}
        text = json.dumps(header, separators=(",", ":")).encode()
        room = self._start - 8
        assert len(text) <= room, "the header is longer than the room that was left for it"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + text.ljust(room))


def _parts(
    checkpoint: Checkpoint, name: str, members: list[str], shape: tuple[int, ...], compressed: bool
) -> Iterator[tuple[str, str, Iterator[NDArray[Any]]]]:
    """The tensors of a weight, or of those of a stack: name, dtype, and what each is made of, to be read in turn."""
    if len(shape) == 1:
        yield name, "F32", iter([checkpoint.vector(name)])
        return
    group_size, *others = {checkpoint.group_size(member) for member in members} - {0} or {0}
    if others or len({checkpoint.is_ternary(member) for member in members}) > 1:
        why = "experts are not all ternary, or their groups of columns differ in size"
        raise FormatError(checkpoint.path, name, f"{why}: use the model as it is")
    if not checkpoint.is_ternary(members[0]):
        own, *more = {checkpoint.dtype(member) for member in members}
        dtype: FloatName = "float32" if more else own  # which holds all of them
        said = next(each for each, known in FLOATS.items() if known == dtype)
        yield name, said, _dense(checkpoint, members, dtype)
        return
    shapes = {"u2": ternary.u2_shape(*shape), "t5": ternary.t5_shape(*shape)}
    layout = "t5" if compressed and shapes["t5"] < shapes["u2"] else "u2"  # small ones can take more in whole blocks
    scales: list[NDArray[np.float32]] = []
    yield f"{name}.{layout}", "U8", _packed(checkpoint, members, layout, shapes[layout], scales)
    yield scale_name(name, group_size), "F32", _alike(scales)


def _dense(checkpoint: Checkpoint, names: list[str], dtype: FloatName) -> Iterator[NDArray[Any]]:
    for name in names:
        matrix = checkpoint.matrix(name)
        assert isinstance(matrix, Dense), f"{name} is not what it was said to be"
        yield matrix.data if matrix.dtype == dtype else to_float32(matrix.data, matrix.dtype)
        checkpoint.release(name)


def _packed(
    checkpoint: Checkpoint, names: list[str], layout: str, shape: tuple[int, ...], scales: list[NDArray[np.float32]]
) -> Iterator[NDArray[np.uint8]]:
    """The bytes of each; their scales are appended to `scales`."""
    for name in names:
        matrix = checkpoint.matrix(name)
        assert isinstance(matrix, Ternary), f"{name} is not what it was said to be"
        scale = np.asarray(matrix.scale, np.float32)
        if problem := matrix.problem(takes_rows=True) or (
            "" if np.isfinite(scale).all() else "a scale is NaN or infinite"
        ):
            raise FormatError(checkpoint.path, name, problem)
        packed = native.TernaryWeight(matrix.shape[1], [matrix.shape[0]], layout)
        data = np.ascontiguousarray(matrix.data).view(np.uint8)
        try:
            packed.pack(0, data.reshape(len(data), -1), matrix.layout, 1.0)
        except ValueError as error:
            raise FormatError(checkpoint.path, name, f"{error}: download the model again") from error
        scales.append(scale)
        array: NDArray[np.uint8] = packed.packed()
        yield array.reshape(shape)
        checkpoint.release(name)


def _alike(scales: Sequence[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """A scale a matrix, or for each row or group of columns, where one of them has such."""
    shape = max((scale.shape for scale in scales), key=len)
    for scale in scales:
        yield np.broadcast_to(scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim)), shape)


def _screen(checkpoint: Checkpoint, min_screened: int) -> Iterator[tuple[str, str, NDArray[Any]]]:
    config = checkpoint.config
    name = "embed" if config.tie_embeddings else "head"
    small = config.vocab_size * config.hidden_size < min_screened or config.hidden_size > native.MAX_HEAD_COLUMNS
    matrix = None if small or checkpoint.is_ternary(name) else checkpoint.matrix(name)
    if not isinstance(matrix, Dense):
        return
    data = matrix.data if matrix.dtype == "float32" else matrix.data.view(np.uint16)
    head = native.DenseWeight(np.require(data, requirements=["C", "A"]), matrix.dtype)
    executor = native.Executor("generic", 1)
    if head.as_codes(executor) is None:  # else they are its screen, and soon found again
        yield from zip(SCREEN, ("U8", "U8", "F32"), native.Screen(head, executor).parts(), strict=True)
    checkpoint.release(name)


def _provenance(checkpoint: Checkpoint, compressed: bool) -> dict[str, str]:
    """Where the file comes from. Who writes a packed file anew keeps what it says of its source."""
    found = {"source": source_of(checkpoint.path), "source_format": kind_of(checkpoint)}
    if isinstance(checkpoint, PackedCheckpoint):
        found = {key: value for key, value in checkpoint.said.items() if key in found}
    found = {"name": title_of(checkpoint), **found}
    said = {key: value.encode("utf-8", "replace").decode() for key, value in found.items() if value}
    said["command"] = f"bitnet convert IN OUT.safetensors{' --compress' if compressed else ''}"
    return said | {"writer": f"bitnet-inference {installed_version()}"}

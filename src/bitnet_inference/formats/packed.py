"""Our own file: a safetensors file whose ternary matrices lie as the kernels read them (docs/packed_format.md)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import ternary
from bitnet_inference.amounts import told_bytes
from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import GROUP_SIZES, Dense, Ternary, expected_shapes, problem_lines
from bitnet_inference.formats.compressed import SUFFIX, Compressed, open_compressed
from bitnet_inference.formats.experts import refuse_norms_of_experts
from bitnet_inference.formats.float_tensors import FLOATS
from bitnet_inference.formats.floats import FloatName, to_float32
from bitnet_inference.formats.json_files import parse_object, shown
from bitnet_inference.formats.packed_config import read_config
from bitnet_inference.formats.packed_experts import with_each_expert
from bitnet_inference.formats.packed_versions import VERSION, migrated, version_of
from bitnet_inference.formats.safetensors_files import Tensor, read_container

FORMAT = "bitnet-inference"
ALIGNMENT = 64
FILE, PADDING = "file.", "padding."  # how the names of what is no weight begin
CONFIG_HASH = "config_sha256"  # which older files do not have
PACKED: tuple[Literal["u2", "t5"], ...] = ("u2", "t5")  # the layouts that a ternary matrix may have
SCREEN = ("screen.high", "screen.low", "screen.numbers")
PROVENANCE = ("source", "source_format", "name", "command", "writer")
_Parts = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]
_AGAIN = "convert the model again"


def is_packed(path: Path) -> bool:
    """Whether a safetensors file is one of ours; raises FormatError for a broken one."""
    return read_container(path).metadata.get("format") == FORMAT


class PackedCheckpoint:
    """A file of ours. Opening reads its header only; tensors are mapped, or decompressed, when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises FormatError for broken files and impossible configurations, VersionError for newer ones."""
        self.path = path
        self.metadata: dict[str, Any] = {}  # of GGUF files only
        container = read_container(path)
        self._version = version_of(container.metadata, path)
        self._said, self._stored = migrated(container.metadata, path), container.tensors
        self.num_bytes = container.num_bytes
        self._compressed = dict(open_compressed(path, self._text("compressed"), self._stored))
        held = {name + SUFFIX for name in self._compressed}
        mapped = {name: tensor for name, tensor in self._stored.items() if name not in held}
        self.config = read_config(self._text("config"), path)
        refuse_norms_of_experts(path, self.config)
        if self.config.experts is not None:
            mapped = with_each_expert(mapped, self.config.experts.count)
        self._tensors: dict[str, Tensor | Compressed] = mapped | self._compressed
        self._shapes = dict(expected_shapes(self.config))

    @property
    def num_parameters(self) -> int:
        """The weights of the model; a tied head counts once, scales do not count."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    @property
    def said(self) -> Mapping[str, str]:
        """Where the file comes from, as it says: those of PROVENANCE that it has."""
        return {key: self._said[key] for key in PROVENANCE if isinstance(self._said.get(key), str)}

    def file(self, name: str, max_bytes: int) -> memoryview | None:
        """The text file of this name in the file; None where there is none. Raises FormatError for a larger one."""
        tensor = self._tensors.get(FILE + name)
        if tensor is not None and tensor.num_bytes > max_bytes:
            raise FormatError(self.path, name, f"is larger than {max_bytes} bytes: {_AGAIN}")
        return None if tensor is None else _bytes(tensor)

    def check(self) -> list[str]:
        """Everything wrong with names, shapes, dtypes, places, scales and norms, a line each; no matrix is read."""
        return problem_lines(self.path, self._problems())

    def verify(self) -> Iterator[str]:
        """Read the whole file; a line for the configuration, and each tensor, whose bytes are not those written."""
        hashes = parse_object(self._text("sha256").encode("utf-8", "surrogatepass"), self.path, "sha256", _AGAIN)
        found = sha256_of(self._text("config"))
        if self._said.get(CONFIG_HASH, found) != found:
            yield f"{self.path}: __metadata__.config: is not that of its SHA-256: copy the file again"
        for name, tensor in self._stored.items():
            if hashlib.sha256(_bytes(tensor)).hexdigest() != hashes.get(name):
                yield f"{self.path}: {shown(name)}: the bytes are not those of its SHA-256: copy the file again"
            tensor.release()

    def is_ternary(self, name: str) -> bool:
        """Whether `matrix` gives a Ternary for this canonical name; nothing is read."""
        return name != "embed" and any(f"{name}.{layout}" in self._tensors for layout in PACKED)

    def group_size(self, name: str) -> int:
        """How many columns share a scale, 0 for one scale a matrix; nothing is read."""
        return next((size for size in GROUP_SIZES if f"{name}.scale{size}" in self._tensors), 0)

    def dtype(self, name: str) -> FloatName:
        """The dtype of the Dense that `matrix` gives for this canonical name; nothing is read."""
        tensor = self._tensors.get(name)
        return FLOATS.get(tensor.dtype, "float32") if tensor else "float32"

    def matrix(self, name: str) -> Dense | Ternary:
        """The matrix under a canonical name. Raises KeyError for no such name, FormatError where the file is wrong.

        Whether all of its codes are ternary is seen by who unpacks it.
        """
        rows, columns = self._shapes[name]
        self._require_sound(name)
        if not self.is_ternary(name):
            tensor = self._tensors[name]
            return Dense(tensor.array(), FLOATS[tensor.dtype])
        group_size = self.group_size(name)
        scales = self._tensors[scale_name(name, group_size)].array()
        scale = scales if scales.ndim else float(scales)
        layout = self._layout(name)
        return Ternary(self._tensors[f"{name}.{layout}"].array(), layout, (rows, columns), scale, group_size)

    def screen(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]] | None:
        """The parts of the head's screen as native.Screen takes them; None where the file holds none.

        Raises FormatError where they are those of another head.
        """
        parts = self._screen_parts()
        if not parts:
            return None
        for problem in self._problems_of_parts(parts):
            raise problem
        high, low, numbers = (self._tensors[name].array() for name in SCREEN)
        return high, low, numbers

    def release_screen(self) -> None:
        """Let the system take back the memory of the screen's parts that were read."""
        for name in SCREEN:
            self._tensors[name].release()

    def release(self, name: str) -> None:
        """Let the system take back the memory of a matrix that was read."""
        self._tensors[f"{name}.{self._layout(name)}" if self.is_ternary(name) else name].release()

    def vector(self, name: str) -> NDArray[np.float32]:
        """The vector under a canonical name. Raises KeyError and FormatError as `matrix` does."""
        (_,) = self._shapes[name]
        self._require_sound(name)
        return to_float32(self._tensors[name].array(), "float32")

    def notes(self) -> list[str]:
        """How the file is meant: a line each, for `bitnet inspect`."""
        lines = [f"packed file, version {self._version}"]
        if self._version < VERSION:
            lines.append(f"version {VERSION} is the newest: `bitnet convert` writes it, and loses nothing")
        if self._compressed:
            sizes = (told_bytes(sum(size)) for size in zip(*map(_sizes, self._compressed.values()), strict=True))
            lines.append("{} tensors are compressed, from {} to {}".format(len(self._compressed), *sizes))
        return lines + [f"{key}: {shown(value)}" for key, value in self.said.items()]

    def _text(self, key: str) -> str:
        value = self._said.get(key)
        if not isinstance(value, str):
            raise FormatError(self.path, f"__metadata__.{key}", f"is missing, or no string: {_AGAIN}")
        return value

    def _layout(self, name: str) -> Literal["u2", "t5"]:
        return next(layout for layout in PACKED if f"{name}.{layout}" in self._tensors)

    def _require_sound(self, name: str) -> None:
        for problem in self._problems_of(name):
            raise problem

    def _problems(self) -> Iterator[FormatError]:
        for name, tensor in self._stored.items():
            if tensor.begin % ALIGNMENT and not name.startswith(PADDING):
                why = f"begins at byte {tensor.begin}, no multiple of {ALIGNMENT}: {_AGAIN}"
                yield FormatError(self.path, shown(name), why)
        known = {each for name in self._shapes for each in self._parts(name)} | self._screen_parts().keys()
        for name in self._shapes:
            yield from self._problems_of(name)
        yield from self._problems_of_parts(self._screen_parts())
        for name in self._tensors:
            if name not in known and not name.startswith((FILE, PADDING)):
                yield FormatError(self.path, shown(name), f"no tensor of this model has this name: {_AGAIN}")

    def _screen_parts(self) -> _Parts:
        """Nothing where the file holds no screen."""
        if not any(name in self._tensors for name in SCREEN):
            return {}
        tiles, steps = -(-self.config.vocab_size // 16), -(-self.config.hidden_size // 16)
        high, low, numbers = SCREEN
        codes = ("U8",)
        return {
            high: (codes, (tiles, 192 * steps)),
            low: (codes, (tiles, 64 * steps)),
            numbers: (("F32",), (5, 16 * tiles)),
        }

    def _parts(self, name: str) -> _Parts:
        """The tensors that hold a weight: the dtypes that they may have, and their shapes."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return {name: (("F32",), shape)}
        rows, columns = shape
        if not self.is_ternary(name):
            return {name: (tuple(FLOATS), shape)}
        group_size = self.group_size(name)
        scale = scale_name(name, group_size)
        is_of_rows = scale in self._tensors and len(self._tensors[scale].shape) == 1
        scales = (rows, -(-columns // group_size)) if group_size else (rows,) if is_of_rows else ()
        layout = self._layout(name)
        packed = {"u2": ternary.u2_shape, "t5": ternary.t5_shape}[layout](rows, columns)
        return {
            f"{name}.{layout}": (("U8",), packed),
            scale: (("F32",), scales),
        }

    def _problems_of(self, name: str) -> Iterator[FormatError]:
        return self._problems_of_parts(self._parts(name))

    def _problems_of_parts(self, parts: _Parts) -> Iterator[FormatError]:
        for part, (dtypes, shape) in parts.items():
            tensor = self._tensors.get(part)
            if tensor is None or (why := _problem(tensor, dtypes, shape)):
                yield FormatError(self.path, part, f"{why if tensor else 'is missing'}: {_AGAIN}")
                continue
            try:
                if len(shape) < 2 and not np.isfinite(tensor.array()).all():
                    yield FormatError(self.path, part, f"holds what is NaN or infinite: {_AGAIN}")
            except FormatError as error:  # of a compressed tensor
                yield error


def sha256_of(text: str) -> str:
    """That of a string of the header, in UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _bytes(tensor: Tensor | Compressed) -> memoryview:
    return tensor.array().reshape(-1).view(np.uint8).data


def _sizes(tensor: Compressed) -> tuple[int, int]:
    return tensor.num_bytes, tensor.stored.num_bytes


def _problem(tensor: Tensor | Compressed, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> str:
    if tensor.dtype not in dtypes or tensor.shape != shape:
        return f"is {tensor.dtype} {shown(list(tensor.shape))}, not {' or '.join(dtypes)} {shown(list(shape))}"
    return ""


def scale_name(name: str, group_size: int) -> str:
    """Under which the scales of a ternary matrix stand."""
    return f"{name}.scale{group_size or ''}"

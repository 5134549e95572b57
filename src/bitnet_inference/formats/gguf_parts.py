"""A GGUF model that was cut into several files: NAME-00001-of-00003.gguf and so on, each with tensors of its own."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.gguf_file import DEFAULT_ALIGNMENT, GgufFile, GgufTensor, alignment_of, read_gguf
from bitnet_inference.formats.json_files import shown
from bitnet_inference.own_files import require_own

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1024
_SPLIT = "split."  # keys about the parts
_AGAIN = "download all parts again"


def read_whole(path: Path) -> GgufFile:
    """Open a file, or all parts of a model when this is one of them. Raises as read_gguf does, and where parts differ.

    What the first part says counts for all.
    """
    file = read_gguf(_first_of(path))
    count = file.metadata.get("split.count", 1)
    if type(count) is int and count in (0, 1):
        return file if file.path == path else read_gguf(path)
    if type(count) is not int or not 1 < count <= _MAX_PARTS:
        raise FormatError(
            file.path, "split.count", f"{shown(count)} is no number of parts up to {_MAX_PARTS}: {_AGAIN}"
        )
    return _joined([_part(path, at, count, file) for at in range(count)])


def files_of(path: Path) -> list[Path]:
    """The file, and those beside it that are called as other parts of the same model."""
    name = _NAME.fullmatch(path.name)
    if name is None or int(name[3]) > _MAX_PARTS:
        return [path]
    others = (_beside(path, name, at) for at in range(int(name[3])))
    return [path, *(other for other in others if other != path and other.is_file())]


def _beside(path: Path, name: re.Match[str], at: int) -> Path:
    return path.with_name(f"{name[1]}-{at + 1:05}-of-{name[3]}.gguf")


def _first_of(path: Path) -> Path:
    """The first part where this is called as a later one and that is there; else the file itself."""
    name = _NAME.fullmatch(path.name)
    first = _beside(path, name, 0) if name else path
    if first == path or not first.is_file():
        return path
    require_own(path.parent, first)
    return first


def _part(path: Path, at: int, count: int, first: GgufFile) -> GgufFile:
    """One of the parts beside a path; `first` is the first one, which is asked for first, if it is there."""
    name = _NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        why = f"one of {count} parts is called NAME-00001-of-{count:05}.gguf: give it and the others their names back"
        raise FormatError(path, "split.count", why)
    own = _beside(path, name, at)
    if own != path:  # which was named, and may be a link
        require_own(path.parent, own)
    if not own.is_file():
        raise FormatError(own, "", f"this part of the model is missing: {_AGAIN}")
    part = first if own == first.path else read_part(own, alignment_of(first.path, first.metadata))
    said = [part.metadata.get(f"split.{key}") for key in ("no", "count")]
    if not all(map(_is, said, (at, count))):
        raise FormatError(own, "split.no", f"says part {shown(said[0])} of {shown(said[1])} from 0 on: {_AGAIN}")
    return part


def read_part(path: Path, alignment: int) -> GgufFile:
    """A part that need not say its alignment: gguf-py lays it out by the first part's, llama-gguf-split by the usual.

    With the larger of the two a part that has the smaller would begin later, and end behind the file.
    """
    small, large = sorted((alignment, DEFAULT_ALIGNMENT))
    try:
        return read_gguf(path, large)
    except FormatError as error:
        with suppress(FormatError):
            return read_gguf(path, small)
        raise error


def _joined(parts: list[GgufFile]) -> GgufFile:
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if twice := tensors.keys() & part.tensors.keys():
            raise FormatError(part.path, shown(min(twice)), f"the tensor stands in another part too: {_AGAIN}")
        tensors |= part.tensors
    first = parts[0]
    wanted: Any = first.metadata.get("split.tensors.count", len(tensors))
    if not _is(wanted, len(tensors)):
        raise FormatError(first.path, "split.tensors.count", f"is {shown(wanted)}, there are {len(tensors)}: {_AGAIN}")
    records = {key: record for key, record in first.records.items() if not key.startswith(_SPLIT)}
    return replace(first, tensors=tensors, records=records, num_bytes=sum(part.num_bytes for part in parts))


def _is(said: object, number: int) -> bool:
    """Whether a value of a file, which may be a whole array, is this number."""
    return type(said) is int and said == number

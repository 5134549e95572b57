"""Files of torch.save: a zip file with a pickle that describes the tensors, and their bytes beside it, to be mapped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.json_files import file_size, shown
from bitnet_inference.formats.mapped import map_file
from bitnet_inference.formats.pickles import MAX_PICKLE_BYTES, Function, Name, WrongArguments, read_pickle
from bitnet_inference.formats.safetensors_files import Tensor, is_countable
from bitnet_inference.formats.zip_files import Span, read_entries

_MAX_RANK = 8
_STORAGES = {"torch.BFloat16Storage": ("BF16", 2), "torch.HalfStorage": ("F16", 2), "torch.FloatStorage": ("F32", 4),
             "torch.CharStorage": ("I8", 1)}  # fmt: skip
_KEY = re.compile(r"[0-9]{1,10}")
_AGAIN = "download the file again"


@dataclass(frozen=True)
class _Storage:
    """The elements that tensors are parts of, in the entry data/KEY."""

    key: str
    dtype: str
    item_bytes: int
    num_items: int


@dataclass(frozen=True)
class _View:
    """A tensor: a run of elements of a storage, in rows."""

    storage: _Storage
    start: int
    shape: tuple[int, ...]


def read_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped; nothing of them is read, and no code is run.

    Raises FormatError for a file that torch.save has not written, is broken, or holds anything but contiguous tensors
    of bfloat16, float16, float32 and int8.
    """
    if not file_size(path):
        raise FormatError(path, "", f"the file is empty: {_AGAIN}")
    data = map_file(path)
    entries = _entries(path, data)
    views = read_pickle(path, _pickle(path, data, entries), _NAMES, _storage)
    return {name: _tensor(path, data, entries, name, view) for name, view in views.items()}


def _entries(path: Path, data: mmap) -> dict[str, Span]:
    """The entries without the name of the folder in which all of them lie."""
    entries = read_entries(path, data)
    roots = {name.partition("/")[0] for name in entries}
    if len(roots) != 1:
        raise FormatError(path, "", f"the entries of the zip file lie in {len(roots)} folders, not in one: {_AGAIN}")
    inner = {name.partition("/")[2]: span for name, span in entries.items()}
    if "byteorder" in inner and data[slice(*inner["byteorder"])][:10] != b"little":
        raise FormatError(path, "byteorder", "is not little: save the weights on another machine")
    return inner


def _pickle(path: Path, data: mmap, entries: Mapping[str, Span]) -> bytes:
    if "data.pkl" not in entries:
        raise FormatError(path, "data.pkl", f"is missing: {_AGAIN}")
    begin, end = entries["data.pkl"]
    return data[begin : min(end, begin + MAX_PICKLE_BYTES + 1)]


def _tensor(path: Path, data: mmap, entries: Mapping[str, Span], name: str, view: Any) -> Tensor:
    if not isinstance(view, _View):
        raise FormatError(path, shown(name), "is no tensor: save a dictionary of nothing but tensors")
    storage, entry = view.storage, entries.get(f"data/{view.storage.key}")
    if entry is None:
        raise FormatError(path, shown(name), f"data/{storage.key}, which holds its values, is missing: {_AGAIN}")
    if entry.end - entry.begin != storage.num_items * storage.item_bytes:
        why = f"data/{storage.key} has {entry.end - entry.begin} bytes, not {storage.num_items} {storage.dtype}"
        raise FormatError(path, shown(name), f"{why}: {_AGAIN}")
    begin = entry.begin + view.start * storage.item_bytes
    return Tensor(path, storage.dtype, view.shape, begin, begin + math.prod(view.shape) * storage.item_bytes, data)


def _storage(arguments: tuple[Any, ...]) -> _Storage:
    """("storage", type, key, device, number of elements)"""
    match arguments:
        case ("storage", Name(text), str(key), str(_), int(num_items)) if (
            text in _STORAGES and _KEY.fullmatch(key) and _are_counts((num_items,))
        ):
            return _Storage(key, *_STORAGES[text], num_items)
    raise WrongArguments(f"a persistent id is no storage of torch: {_AGAIN}")


def _view(arguments: tuple[Any, ...]) -> _View:
    """torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)"""
    match arguments:
        case (_Storage() as storage, int(start), tuple(shape), tuple(strides), bool(_), dict(hooks)) if not hooks:
            return _checked_view(storage, start, shape, strides)
    raise WrongArguments(f"a tensor is not described as torch.save does: {_AGAIN}")


def _checked_view(storage: _Storage, start: int, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> _View:
    is_sane = len(shape) == len(strides) <= _MAX_RANK and all(map(_are_counts, ((start,), shape, strides)))
    is_sane = is_sane and is_countable(shape)
    if not is_sane:
        raise WrongArguments(f"the offset, shape or strides of a tensor are none: {_AGAIN}")
    if not _is_contiguous(shape, strides):
        why = f"a tensor of shape {shown(shape)} has the strides {shown(strides)}"
        raise WrongArguments(f"{why}: call contiguous() before saving")
    if start + math.prod(shape) > storage.num_items:
        why = f"a tensor of shape {shown(shape)} at {start} does not lie within its {storage.num_items} elements"
        raise WrongArguments(f"{why}: {_AGAIN}")
    return _View(storage, start, shape)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return 0 in shape
        step *= size
    return True


def _are_counts(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _parameter(arguments: tuple[Any, ...]) -> _View:
    """torch._utils._rebuild_parameter(tensor, requires_grad, hooks)"""
    match arguments:
        case (_View() as view, bool(_), dict(hooks)) if not hooks:
            return view
    raise WrongArguments(f"a parameter is not described as torch.save does: {_AGAIN}")


def _dictionary(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """collections.OrderedDict()"""
    if arguments:
        raise WrongArguments(f"a dictionary is made from arguments: {_AGAIN}")
    return {}


_NAMES: dict[str, Function | None] = {
    "collections.OrderedDict": _dictionary,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_parameter": _parameter,
    **dict.fromkeys(_STORAGES),
}

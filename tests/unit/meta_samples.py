"""Meta checkpoints and files of torch.save, a few kilobytes each, written without torch, with any lie in them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tiny_folders import Folder

from bitnet_inference.errors import FormatError
from bitnet_inference.formats import open_checkpoint

STORAGES = {
    "i1": "CharStorage",
    "u2": "BFloat16Storage",
    "f2": "HalfStorage",
    "f4": "FloatStorage",
    "f8": "DoubleStorage",
}
REBUILD = ("torch._utils", "_rebuild_tensor_v2")
ORDERED = ("collections", "OrderedDict")


# Pickles, instruction by instruction


def name(module: str, attribute: str) -> bytes:
    """GLOBAL"""
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    """BINUNICODE"""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    """BININT1 or LONG1"""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def many(*values: bytes) -> bytes:
    """MARK ... TUPLE"""
    return b"(" + b"".join(values) + b"t"


def numbers(values: Iterable[int]) -> bytes:
    """A tuple of integers."""
    return many(*map(number, values))


def ordered() -> bytes:
    """An empty OrderedDict."""
    return name(*ORDERED) + b")R"


def storage(key: str, kind: str, num_items: int) -> bytes:
    """A persistent id of a storage."""
    return many(text("storage"), name("torch", kind), text(key), text("cpu"), number(num_items)) + b"Q"


def tensor(a_storage: bytes, shape: Iterable[int], strides: Iterable[int], start: int = 0) -> bytes:
    """A call of _rebuild_tensor_v2."""
    parts = (a_storage, number(start), numbers(shape), numbers(strides), b"\x89", ordered())
    return name(*REBUILD) + many(*parts) + b"R"


def parameter(a_tensor: bytes) -> bytes:
    """A call of _rebuild_parameter."""
    return name("torch._utils", "_rebuild_parameter") + many(a_tensor, b"\x88", ordered()) + b"R"


def pickled(*items: tuple[str, bytes]) -> bytes:
    """A dictionary of these items, with memos as pickle.dump makes them."""
    inner = b"".join(text(key) + value for key, value in items)
    return b"\x80\2" + ordered() + b"q\0(" + inner + b"u."


def strides_of(shape: tuple[int, ...]) -> list[int]:
    """Of a contiguous array, in elements."""
    return [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]


# The zip file


@dataclass
class Entry:
    """An entry, and what its headers say of it where that is not the truth."""

    name: str
    data: bytes
    method: int = 0
    flags: int = 0
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)


def zip_bytes(entries: Iterable[Entry], zip64: bool = True, wide: bool = False, **end: int) -> bytes:
    """A zip file as torch writes it: data at multiples of 64 bytes. `wide`: sizes and places in 64-bit fields."""
    data, directory, count = b"", b"", 0
    for entry in entries:
        start = len(data)
        data += _local_header(entry, start) + entry.data
        directory += _central_header(entry, start, wide)
        count += 1
    said = {"count": count, "size": len(directory), "begin": len(data)} | end
    place = len(data) + len(directory)
    data += directory
    if zip64:
        data += struct.pack(
            "<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, *(said[k] for k in ("count", "count", "size", "begin"))
        )
        data += struct.pack("<4sLQL", b"PK\6\7", 0, end.get("record", place), 1)
    small = (said["count"] & 0xFFFF,) * 2 + (said["size"] & 0xFFFFFFFF, said["begin"] & 0xFFFFFFFF)
    return data + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, *small, 0)


def _local_header(entry: Entry, start: int) -> bytes:
    own = entry.local.get("name", entry.name).encode()
    extra = b"\0" * (-(start + 30 + len(own)) % 64)
    method, flags = entry.local.get("method", entry.method), entry.local.get("flags", entry.flags)
    crc, size = zlib.crc32(entry.data), len(entry.data)
    signature = entry.local.get("signature", b"PK\3\4")
    return (
        struct.pack("<4s5H3L2H", signature, 0, flags, method, 0, 0, crc, size, size, len(own), len(extra)) + own + extra
    )


def _central_header(entry: Entry, start: int, wide: bool) -> bytes:
    size, start = entry.central.get("size", len(entry.data)), entry.central.get("start", start)
    packed, extra = entry.central.get("packed", size), b""
    if wide:
        extra = struct.pack("<2H", 7, 2) + b"??" + struct.pack("<2H3Q", 1, 24, size, packed, start)
        extra = extra[: entry.central.get("extra", len(extra))]
        size = packed = start = 0xFFFFFFFF
    sizes = (zlib.crc32(entry.data), packed, size, len(entry.name.encode()), len(extra), 0)
    fields = (0, 0, entry.flags, entry.method, 0, 0, *sizes, entry.central.get("disk", 0), 0, 0, start)
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields) + entry.name.encode() + extra


def torch_entries(pickle: bytes, storages: Iterable[bytes] = (), root: str = "archive") -> list[Entry]:
    """The entries of a file of torch.save: the storages have the keys 0, 1 and so on."""
    parts = [Entry(f"{root}/data.pkl", pickle), Entry(f"{root}/byteorder", b"little")]
    parts += [Entry(f"{root}/data/{key}", data) for key, data in enumerate(storages)]
    return [*parts, Entry(f"{root}/version", b"3\n")]


def torch_bytes(tensors: dict[str, NDArray[Any]]) -> bytes:
    """A file of torch.save with these tensors; arrays of uint16 are bfloat16."""
    items = []
    for key, (own, array) in enumerate(tensors.items()):
        kind = STORAGES[array.dtype.str[1:]]
        items.append((own, tensor(storage(str(key), kind, array.size), array.shape, strides_of(array.shape))))
    return zip_bytes(torch_entries(pickled(*items), [array.tobytes() for array in tensors.values()]))


# Models


class Sizes(NamedTuple):
    """Of the models here; the MLP has int(2 * 4 * 64 / 3) = 170 features, rounded up to a multiple of 32."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    inner: int = 192
    vocab: int = 560


SIZES = Sizes()
PARAMS = {
    "dim": SIZES.hidden, "n_layers": SIZES.layers, "n_heads": SIZES.heads, "n_kv_heads": SIZES.kv_heads,
    "vocab_size": SIZES.vocab, "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
# Meta's name, Hugging Face's, and the axis along which ranks cut it (-1: not at all).
LAYER_NAMES = {
    "attention.wq": ("self_attn.q_proj", 0), "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0), "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0), "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0), "attention_norm": ("input_layernorm", -1),
    "ffn_norm": ("post_attention_layernorm", -1),
}  # fmt: skip
TOP_NAMES = {"tok_embeddings": ("model.embed_tokens", 0), "output": ("lm_head", 0), "norm": ("model.norm", -1)}


def names_of_tensors() -> dict[str, tuple[str, int]]:
    """Every tensor by Meta's name: Hugging Face's name, and the axis of the cut."""
    names = {f"{meta}.weight": (f"{hf}.weight", axis) for meta, (hf, axis) in TOP_NAMES.items()}
    for layer in range(SIZES.layers):
        for meta, (hf, axis) in LAYER_NAMES.items():
            names[f"layers.{layer}.{meta}.weight"] = (f"model.layers.{layer}.{hf}.weight", axis)
    return names


def random_weights(dtype: str = "bfloat16") -> dict[str, NDArray[Any]]:
    """Weights of Hugging Face's names, in the order of its rows; bfloat16 as uint16."""
    s, rng = SIZES, np.random.default_rng(5)
    keys = s.kv_heads * s.hidden // s.heads
    shapes = {
        "embed_tokens": (s.vocab, s.hidden), "lm_head": (s.vocab, s.hidden), "k_proj": (keys, s.hidden),
        "v_proj": (keys, s.hidden), "gate_proj": (s.inner, s.hidden), "up_proj": (s.inner, s.hidden),
        "down_proj": (s.hidden, s.inner), "q_proj": (s.hidden, s.hidden), "o_proj": (s.hidden, s.hidden),
    }  # fmt: skip
    weights: dict[str, NDArray[Any]] = {}
    for hf, _ in names_of_tensors().values():
        shape = shapes.get(hf.split(".")[-2], (s.hidden,))
        values = rng.normal(1 if len(shape) == 1 else 0, 0.25, shape).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        weights[hf] = {"bfloat16": bits, "float32": values, "float16": values.astype(np.float16)}[dtype]
    return weights


def hf_folder(weights: dict[str, NDArray[Any]], scaled: bool = False) -> Folder:
    """The same model for Hugging Face's reader."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": SIZES.hidden,
        "intermediate_size": SIZES.inner, "num_hidden_layers": SIZES.layers, "num_attention_heads": SIZES.heads,
        "num_key_value_heads": SIZES.kv_heads, "vocab_size": SIZES.vocab, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "rope_scaling": {**scaling, "original_max_position_embeddings": 8192} if scaled else None,
    }  # fmt: skip
    return Folder(config, weights)


def meta_tensors(weights: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The weights under Meta's names, the rows of q and k in adjacent pairs."""
    tensors = {}
    for meta, (hf, _) in names_of_tensors().items():
        array = weights[hf]
        if hf.endswith(("q_proj.weight", "k_proj.weight")):
            half = SIZES.hidden // SIZES.heads // 2
            array = array.reshape(-1, 2, half, SIZES.hidden).swapaxes(1, 2).reshape(array.shape)
        tensors[meta] = np.ascontiguousarray(array)
    return tensors


def cut(tensors: dict[str, NDArray[Any]], num_shards: int, embed_axis: int = 0) -> list[dict[str, NDArray[Any]]]:
    """What each rank holds."""
    axes = {meta: axis for meta, (_, axis) in names_of_tensors().items()} | {"tok_embeddings.weight": embed_axis}
    shards: list[dict[str, NDArray[Any]]] = [{} for _ in range(num_shards)]
    for own, array in tensors.items():
        axis = axes.get(own, -1)
        parts = np.split(array, num_shards, axis) if axis >= 0 else [array] * num_shards
        for shard, part in zip(shards, parts, strict=True):
            shard[own] = np.ascontiguousarray(part)
    return shards


def write_meta(path: Path, shards: list[dict[str, NDArray[Any]]], params: dict[str, Any] | None = None) -> Path:
    """Write params.json and the shards; returns the path."""
    path.mkdir(exist_ok=True)
    (path / "params.json").write_text(json.dumps(PARAMS if params is None else params))
    for rank, tensors in enumerate(shards):
        (path / f"consolidated.{rank:02}.pth").write_bytes(torch_bytes(tensors))
    return path


# Ranks

WORDS = [
    "in", "er", " t", " th", " the", "he", "the", "an", "and", " a", " an", " and", "aa", "aaa", "aaaa", "  ", "ab",
    "abc", "bc", "é", "12", "123", "23", "\n\n", "ell", "ello", "hello", "lo", "el", "st", "st<",
]  # fmt: skip


def rank_lines(more: Iterable[bytes] = ()) -> list[bytes]:
    """The lines of a small tokenizer.model: all bytes, backwards, then words."""
    tokens = [*(bytes([byte]) for byte in reversed(range(256))), *(word.encode() for word in WORDS), *more]
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(dict.fromkeys(tokens))]


def write_ranks(path: Path, lines: Iterable[bytes] | None = None) -> Path:
    """Write tokenizer.model; returns the folder."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(b"\n".join(rank_lines() if lines is None else lines) + b"\n")
    if not (path / "params.json").exists():
        (path / "params.json").write_text("{}")
    return path


def headers(sound: bytes) -> list[int]:
    """Where a .pth or .pt file has its pickle and its directory."""
    return [*range(sound.index(b"data.pkl"), sound.index(b"byteorder")), *range(sound.index(b"PK\1\2"), len(sound))]


def read_or_refused(folder: Path) -> None:
    """A folder with a damaged file of tensors is read, or refused in a line."""
    try:
        checkpoint = open_checkpoint(folder)
        assert all("\n" not in line for line in checkpoint.check())
        for name in ("embed", "layers.0.q", "layers.1.down"):
            checkpoint.matrix(name)
    except FormatError as error:
        assert "\n" not in str(error)

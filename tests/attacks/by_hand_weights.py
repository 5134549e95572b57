"""Attacks on safetensors files, ours among them, on indexes of shards, and on Meta's checkpoints."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import readers
from plants import Attack, edited, in_header, patched, tensor_bytes
from readers import files_of

# Weights


def safetensors() -> Iterator[tuple[str, Attack]]:
    """By name."""
    file, norm, head = "model-2.safetensors", "model.norm.weight", "lm_head.weight"
    for length in (0, 1, 1 << 20, 1 << 30, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        yield f"a header of {length}", Attack("hf-shards", patched(file, 0, length.to_bytes(8, "little")))
    for offsets in (
        [1 << 63, (1 << 63) + 64],
        [(1 << 64) - 64, 0],
        [-64, 0],
        [0, 1 << 62],
        [64, 0],
        [0, 64],
        [1 << 62, (1 << 62) + 64],
    ):
        yield (
            f"offsets {offsets}",
            Attack("hf-shards", in_header(file, lambda h, o=offsets: h[norm].update(data_offsets=o))),
        )
    for shape in (
        [1 << 62, 4],
        [1 << 32, 1 << 32],
        [0],
        [16, 0, 1 << 62],
        [1] * 9,
        [-16],
        [2, 8],
        [],
        [16.0],
        [1 << 64],
        [True] * 16,
    ):
        yield f"the shape {shape}", Attack("hf-shards", in_header(file, lambda h, s=shape: h[norm].update(shape=s)))
    yield (
        "tables of nothing by a lot",
        Attack("bitnet-packed", in_header("model.safetensors", partial(_empty_tables, 1 << 62))),
    )
    yield (
        "tables of a lot by nothing",
        Attack("bitnet-packed", in_header("model.safetensors", partial(_empty_tables, 0))),
    )
    for count in (32_000, 60_000):
        names = in_header(file, lambda h, n=count: h.update({f"x{i}": _none(h) for i in range(n)}))
        yield f"{count} names", Attack("hf-shards", names)
    yield "a long name", Attack("hf-shards", in_header(file, lambda h: h.update({"x" * 1_000_000: _none(h)})))
    yield (
        "a name that writes on the terminal",
        Attack("hf-shards", in_header(file, lambda h: h.update({"\x1b[2J\n\r": _none(h)}))),
    )
    for bits, name in ((b"\0\0\xc0\x7f", "NaN"), (b"\0\0\x80\x7f", "inf"), (b"\0\0\x80\xff", "-inf")):
        yield f"a norm is {name}", Attack("hf-shards", tensor_bytes(file, norm, bits))
        yield f"the head is {name}", Attack("hf-shards", tensor_bytes(file, head, bits * 16), readers.run, True)
        scale = "model.layers.0.self_attn.q_proj.weight_scale"
        yield f"a scale is {name}", Attack("bitnet-packed", tensor_bytes("model.safetensors", scale, bits[2:]))
    for bits in (b"\0\0", b"\0\x80", b"\x80\xbf"):
        yield f"a scale is {bits!r}", Attack("bitnet-packed", tensor_bytes("model.safetensors", scale, bits))
    codes = "model.layers.0.mlp.down_proj.weight"
    yield "codes of 3", Attack("bitnet-packed", tensor_bytes("model.safetensors", codes, b"\xff" * 64), readers.run)
    embed = tensor_bytes("model.safetensors", "model.embed_tokens.weight", b"\xc0\x7f" * 64 * 384)
    yield "embeddings of NaN", Attack("bitnet-packed", embed, readers.run, True)
    for name, data in (
        ("layers.0.q.u2", b"\xff" * 256),
        ("layers.0.q.scale", b"\0\0\xc0\x7f"),
        ("norm", b"\0\0\x80\x7f"),
    ):
        yield f"packed {name}", Attack("packed", tensor_bytes("model.safetensors", name, data), readers.run)
    said = "__metadata__"
    for key, value in (("version", "2"), ("version", "9" * 9), ("version", "9" * 5000), ("version", "-1"), ("version",
    1), ("config", "{"),
                       ("config", "[" * 100_000), ("config", None), ("sha256", "[]")):  # fmt: skip
        plant = in_header("model.safetensors", lambda h, k=key, v=value: h[said].update({k: v}))
        yield f"packed, {key} {value!r:.20}", Attack("packed", plant, harmless=key == "sha256")
    for key, value in (
        ("num_layers", 10**9),
        ("vocab_size", 1 << 21),
        ("head_dim", 1 << 40),
        ("eos_ids", [10**9]),
        ("family", "\n"),
    ):
        yield (
            f"packed, {key} is {value!r}",
            Attack("packed", in_header("model.safetensors", partial(_packed_config, key, value))),
        )
    yield "packed, no config at all", Attack("packed", in_header("model.safetensors", lambda h: h.pop(said)))


def _none(header: Any) -> dict[str, Any]:
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__" and name[0] != "x")
    return {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


def _empty_tables(rows: int, header: Any) -> None:
    embed = header["model.embed_tokens.weight"]
    header["lm_head.weight"] = {
        **embed,
        "shape": [rows, 0 if rows else 1 << 62],
        "data_offsets": [embed["data_offsets"][0]] * 2,
    }
    others = sorted(
        entry["data_offsets"][0] for name, entry in header.items() if name not in ("__metadata__", "lm_head.weight")
    )
    begin = embed["data_offsets"][0]
    header["rest"] = {"dtype": "U8", "shape": [embed["data_offsets"][1] - begin], "data_offsets": embed["data_offsets"]}
    header["model.embed_tokens.weight"] = dict(header["lm_head.weight"])
    assert others


def _packed_config(key: str, value: Any, header: Any) -> None:
    config = json.loads(header["__metadata__"]["config"])
    header["__metadata__"]["config"] = json.dumps({**config, key: value})


def indexes() -> Iterator[tuple[str, Attack]]:
    """By name."""
    index = "model.safetensors.index.json"
    files = (
        "../x",
        "/etc/passwd",
        "/dev/zero",
        "a/b",
        "..",
        ".",
        "",
        "a\\b",
        "a\0b",
        "\n",
        "\ud800",
        "x" * 5000,
        "config.json",
        index,
        1,
    )
    for file in files:
        plant = edited(index, lambda i, f=file: i["weight_map"].update({"model.norm.weight": f}))
        yield f"a shard {file!r:.20}", Attack("hf-shards", plant)
    many = edited(index, lambda i: i["weight_map"].update({f"x{n}": f"model-{n}.safetensors" for n in range(50_000)}))
    yield "50000 shards", Attack("hf-shards", many)
    same = edited(index, lambda i: i["weight_map"].update({f"x{n}": "model-1.safetensors" for n in range(50_000)}))
    yield "50000 tensors", Attack("hf-shards", same)


# Meta's checkpoints


def pickles_and_zips() -> Iterator[tuple[str, Attack]]:
    """By name."""
    for name, pickle in _pickles():
        yield f"the pickle {name}", Attack("meta-shards", partial(_other_pickle, pickle))
    content = files_of("meta-shards")["consolidated.00.pth"]
    for signature, sizes in ((b"PK\5\6", (4, 6, 8, 10, 12, 16, 20)), (b"PK\1\2", (8, 10, 20, 24, 28, 30, 32, 34, 42)),
                             (b"PK\3\4", (6, 8, 26, 28)), (b"PK\6\6", (4, 16, 20, 24, 32, 40, 48)), (b"PK\6\7", (4, 8,
                             16))):  # fmt: skip
        at = content.find(signature)
        for offset in sizes if at >= 0 else ():
            for data in (b"\xff\xff", b"\xff\xff\xff\xff", b"\0\0", b"\1\0", b"\0\0\0\x80"):
                plant = patched("consolidated.00.pth", at + offset, data)
                yield f"{signature!r} + {offset} = {data!r}", Attack("meta-shards", plant, harmless=True)
    yield "a deflated bomb", Attack("meta-shards", _zip_bomb)
    yield "a megabyte of directory", Attack("meta-shards", _many_entries, harmless=True)


def _pickles() -> Iterator[tuple[str, bytes]]:
    text = b"X\2\0\0\0ls"
    yield "calls os.system", b"\x80\2cos\nsystem\n" + text + b"\x85R."
    yield "calls builtins.eval", b"\x80\2cbuiltins\neval\n" + text + b"\x85R."
    yield "names os.system by INST", b"\x80\2(" + text + b"ios\nsystem\n."
    yield "names os.system by OBJ", b"\x80\2(cos\nsystem\n" + text + b"o."
    yield "names os.system by STACK_GLOBAL", b"\x80\4\x8c\2os\x8c\6system\x93."
    yield "has NEWOBJ", b"\x80\2ccollections\nOrderedDict\n)\x81."
    yield "has NEWOBJ_EX", b"\x80\4ccollections\nOrderedDict\n)}\x92."
    yield "has BUILD of a dictionary", b"\x80\2}}X\5\0\0\0itemsN}b."
    yield "has extensions", b"\x80\2\x82\1."
    yield "has extensions of 4 bytes", b"\x80\2\x84\xff\xff\xff\x7f."
    yield "has a persistent id of text", b"\x80\2Pos.system\n."
    yield "calls a storage", b"\x80\2ctorch\nFloatStorage\n)R."
    yield "calls a name by a trick", b"\x80\2ctorch._utils\n_rebuild_tensor_v2\nq\0h\0h\0\x85R."
    yield "names __builtins__", b"\x80\2ctorch\n__builtins__\n."
    yield "names a dotted attribute", b"\x80\2ctorch._utils\n_rebuild_tensor_v2.__globals__\n."
    yield "is tuples in tuples", b"\x80\2)" + b"\x85" * 260_000 + b"."
    yield "is endless by its memo", b"\x80\2}q\0X\1\0\0\0ah\0s."
    yield "doubles and doubles", b"\x80\2)" + b"q\0h\0\x86" * 52_000 + b"."
    yield "keys by what doubles", b"\x80\2}(X\1\0\0\0a)" + b"q\0h\0\x86" * 5000 + b"u."
    yield "hashes what doubles", b"\x80\2})" + b"q\0h\0\x86" * 64 + b"Ns."
    yield "has marks only", b"\x80\2" + b"(" * 260_000 + b"."
    yield "has a number of 255 bytes", b"\x80\2}X\1\0\0\0a\x8a\xff" + b"\xff" * 255 + b"s."
    yield "has a text of 4 GB", b"\x80\2X\xff\xff\xff\xffa."
    yield "is of protocol 4", b"\x80\4\x95\xff\xff\xff\xff\xff\xff\xff\x7f}."
    yield "is a number", b"\x80\2K\1."
    yield "goes on behind its end", b"\x80\2}.}."
    yield "is nothing", b""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0%cX\3\0\0\0cpu%stQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"%s%s%s\x89}tR"
    big, minus, none = b"\x8a\x09" + b"\xff" * 8 + b"\0", b"J\xff\xff\xff\xff", b"K\0"
    for name, count, start, shape, strides in (
        ("a storage of 2^64", big, none, b"K\1\x85", b"K\1\x85"), ("a start of 2^64", b"K\1", big, b"K\1\x85",
        b"K\1\x85"),
        ("a start of -1", b"K\1", minus, b"K\1\x85", b"K\1\x85"), ("a shape of 2^64", b"K\1", none, big + b"\x85",
        b"K\1\x85"),
        ("a shape of -1", b"K\1", none, minus + b"\x85", b"K\1\x85"), ("strides of 0", b"K\1", none, b"M\xff\xff\x85",
        b"K\0\x85"),
        ("a shape of a shape", b"K\1", none, b")\x85", b"K\1\x85"), ("flags for numbers", b"\x88", none, b"\x88\x85",
        b"\x88\x85"),
        ("a shape of 60000", b"K\1", none, b"(" + b"K\1" * 60_000 + b"t", b"(" + b"K\1" * 60_000 + b"t"),
    ):  # fmt: skip
        yield f"has {name}", b"\x80\2}X\1\0\0\0a" + tensor % (b"0", count, start, shape, strides) + b"s."


def _other_pickle(pickle: bytes, root: Path) -> None:
    _rewritten(root, {"consolidated.00/data.pkl": pickle})


def _rewritten(root: Path, change: dict[str, bytes], method: int = 0) -> None:
    path = root / "consolidated.00.pth"
    with zipfile.ZipFile(path) as file:
        entries = {info.filename: file.read(info) for info in file.infolist()}
    top = next(iter(entries)).partition("/")[0]
    entries |= {f"{top}/{name.partition('/')[2]}": data for name, data in change.items()}
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in entries.items():
            file.writestr(name, data)


def _zip_bomb(root: Path) -> None:
    _rewritten(root, {"consolidated.00/data.pkl": bytes(50 << 20)}, 8)


def _many_entries(root: Path) -> None:
    _rewritten(root, {f"consolidated.00/x{number}": b"" for number in range(20_000)})

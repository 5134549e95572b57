"""Attacks that somebody thought of, each a name and what it does to a sound model; readers of a kind share theirs.

An attack is planted into a copy of a seed. It has to be refused, but for those of HARMLESS, which may open as well.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import readers
from mutate import _HOSTILE_TEMPLATES, _gguf_fields
from readers import files_of

Plant = Callable[[Path], object]


class Attack(NamedTuple):
    """What is done to a copy of `seed`, and how the result is looked at. `harmless`: it may open."""

    seed: str
    plant: Plant
    examine: Callable[[Path], object] = readers.open_only
    harmless: bool = False


def replaced(name: str, content: bytes | str) -> Plant:
    """Another content for a file."""

    def plant(root: Path) -> None:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)

    return plant


def edited(name: str, change: Callable[[Any], object]) -> Plant:
    """Another value in a JSON file."""

    def plant(root: Path) -> None:
        value = json.loads((root / name).read_text()) if (root / name).exists() else {}
        change(value)
        (root / name).write_text(json.dumps(value))

    return plant


def in_header(name: str, change: Callable[[Any], object]) -> Plant:
    """Another header of a safetensors file; the data stay where they are to it."""

    def plant(root: Path) -> None:
        content = (root / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64 + 56)
        (root / name).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return plant


def patched(name: str, at: int, data: bytes) -> Plant:
    """Other bytes at a place of a file."""

    def plant(root: Path) -> None:
        content = bytearray((root / name).read_bytes())
        content[at : at + len(data)] = data
        (root / name).write_bytes(content)

    return plant


def tensor_bytes(name: str, tensor: str, data: bytes) -> Plant:
    """Other first bytes of a tensor of a safetensors file."""

    def plant(root: Path) -> None:
        content = (root / name).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        begin = end + json.loads(content[8:end])[tensor]["data_offsets"][0]
        (root / name).write_bytes(content[:begin] + data + content[begin + len(data) :])

    return plant


def attacks() -> Iterator[tuple[str, Attack]]:
    """All of them, by name."""
    for number, (name, attack) in enumerate(_attacks()):
        yield f"{number:03} {attack.seed} {name}", attack


def _attacks() -> Iterator[tuple[str, Attack]]:
    yield from _odd_files()
    yield from _truncated()
    yield from _configs()
    yield from _safetensors()
    yield from _indexes()
    yield from _ggufs()
    yield from _pickles_and_zips()
    yield from _json_files()
    yield from _words()
    yield from _templates()


# Files that are none


def _odd_files() -> Iterator[tuple[str, Attack]]:
    seeds = ("hf-shards", "bitnet-packed", "gemma3-embedding", "meta-shards", "gguf-types", "packed")
    optional = ("chat_template.jinja", "special_tokens_map.json", "additional_chat_templates/a.jinja", "1_Pooling/config.json")
    for seed in seeds:
        names = [*files_of(seed), *(optional if len(files_of(seed)) > 1 and seed != "meta-shards" else ())]
        for name in names:
            for kind, make in (("a pipe", os.mkfifo), ("a folder", os.mkdir), ("empty", lambda path: path.touch())):
                text_or_none = kind == "empty" and name in optional
                yield f"{name} is {kind}", Attack(seed, partial(_instead, name, make), readers.everything, text_or_none)
            for target in ("/dev/zero", "/etc/hostname", name.rpartition("/")[2], "gone", ".."):
                single = len(files_of(seed)) == 1  # who gives a link to a file wants the file
                attack = Attack(seed, partial(_instead, name, partial(_link, target)), readers.everything)
                if not (single and target.startswith("/etc")):
                    yield f"{name} links to {target}", attack


def _instead(name: str, make: Callable[[Path], object], root: Path) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).unlink(missing_ok=True)
    make(root / name)


def _link(target: str, path: Path) -> None:
    path.symlink_to(target)


def _truncated() -> Iterator[tuple[str, Attack]]:
    """At the borders of a header, and at many places besides."""
    for seed in ("hf-shards", "meta-shards", "gguf-types", "gguf-groups", "packed"):
        for name, content in files_of(seed).items():
            size = len(content)
            places = {0, 1, 4, 7, 8, 9, 15, 16, 23, 24, 25, size // 2, size - 1, size - 8, size - 22, size - 23, size - 64}
            if name.endswith(".gguf"):
                numbers, keys, tensors = _gguf_fields(content)
                places |= {at for at, _ in numbers[:: max(1, len(numbers) // 60)]}
                places |= {end for _, end in (*keys, *tensors)}
            for place in sorted(place for place in places if 0 <= place < size):
                harmless = name in ("tokenizer.model", "tokenizer_config.json", "generation_config.json")
                of_words = name.startswith(("tokenizer", "generation"))
                examine = readers.words if of_words and place % 2 else readers.open_only
                yield f"{name} ends at {place}", Attack(seed, replaced(name, content[:place]), examine, harmless or of_words)


# Configurations

_NUMBERS = (10**9, 1 << 31, 1 << 63, 1 << 64, 10**400, -1, 0, 1.5, True, "2", [], {}, float("nan"), float("inf"), 1e300)


def _configs() -> Iterator[tuple[str, Attack]]:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "head_dim")  # fmt: skip
    for key in sizes:
        for value in _NUMBERS:
            sound = {"rope_theta": (10**9, 1 << 31, 1 << 63, 1 << 64, 1.5), "rms_norm_eps": (10**9, 1.5, 1 << 31, 1 << 63, 1 << 64)}
            harmless = any(value is each or value == each for each in sound.get(key, ()) if type(each) is type(value))
            yield f"{key} = {value!r:.20}", _config({key: value}, harmless)
    for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps", "vocab_size", "rope_theta"):
        for value in _NUMBERS:
            plant = edited("params.json", lambda params, key=key, value=value: params.update({key: value}))
            yield f"params {key} = {value!r:.20}", Attack("meta-shards", plant, harmless=True)
    for scaling in (
        {"rope_type": "yarn"}, {"rope_type": "linear", "factor": float("nan")}, {"rope_type": "linear", "factor": 0}, {"rope_type": []},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}, {"type": "dynamic", "factor": 2}, [], "linear",
        {"rope_type": "llama3", "factor": 1e-300, "low_freq_factor": 1, "high_freq_factor": 4}, {"full_attention": {}}, {"rope_theta": -1},
        {"rope_type": "linear", "factor": 1 << 2000}, {"rope_type": "llama3"}, {"partial_rotary_factor": 0.5},
    ):  # fmt: skip
        yield f"rope_scaling = {scaling!r:.60}", _config({"rope_scaling": scaling})
    huge = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 512, "num_attention_heads": 512,
            "num_key_value_heads": 512, "head_dim": 1024, "vocab_size": 1 << 21}  # fmt: skip
    yield "all sizes are the largest", _config(huge)
    yield "8 million positions", Attack(
        "hf-shards", edited("config.json", lambda c: c.update(max_position_embeddings=1 << 23)), readers.run, True
    )
    for ids in ([10**9], [-1], [True], ["1"], [1] * 100_000, 10**30, None, {}, [[1]], 1.5):
        for file in ("config.json", "generation_config.json"):
            plant = edited(file, lambda c, ids=ids: c.update(eos_token_id=ids, bos_token_id=ids))
            yield f"{file}: ids {ids!r:.20}", Attack("bitnet-packed", plant, readers.run, harmless=True)
    for value in (float("nan"), float("inf"), -1, 1e300, "hot", [], True, 10**400, 1 << 70):
        for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"):
            plant = edited("generation_config.json", lambda c, key=key, value=value: c.update({key: value}))
            yield f"{key} = {value!r:.20}", Attack("bitnet-packed", plant, readers.words, harmless=True)


def _config(change: dict[str, Any], harmless: bool = False) -> Attack:
    return Attack("hf-shards", edited("config.json", lambda config: config.update(change)), harmless=harmless)


# Weights


def _safetensors() -> Iterator[tuple[str, Attack]]:
    file, norm, head = "model-2.safetensors", "model.norm.weight", "lm_head.weight"
    for length in (0, 1, 1 << 20, 1 << 30, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        yield f"a header of {length}", Attack("hf-shards", patched(file, 0, length.to_bytes(8, "little")))
    for offsets in ([1 << 63, (1 << 63) + 64], [(1 << 64) - 64, 0], [-64, 0], [0, 1 << 62], [64, 0], [0, 64], [1 << 62, (1 << 62) + 64]):
        yield f"offsets {offsets}", Attack("hf-shards", in_header(file, lambda h, o=offsets: h[norm].update(data_offsets=o)))
    for shape in ([1 << 62, 4], [1 << 32, 1 << 32], [0], [16, 0, 1 << 62], [1] * 9, [-16], [2, 8], [], [16.0], [1 << 64], [True] * 16):
        yield f"the shape {shape}", Attack("hf-shards", in_header(file, lambda h, s=shape: h[norm].update(shape=s)))
    yield "tables of nothing by a lot", Attack("bitnet-packed", in_header("model.safetensors", partial(_empty_tables, 1 << 62)))
    yield "tables of a lot by nothing", Attack("bitnet-packed", in_header("model.safetensors", partial(_empty_tables, 0)))
    yield "100000 names", Attack("hf-shards", in_header(file, lambda h: h.update({f"x{i}": _none(h) for i in range(60_000)})))
    yield "a long name", Attack("hf-shards", in_header(file, lambda h: h.update({"x" * 1_000_000: _none(h)})))
    yield "a name that writes on the terminal", Attack("hf-shards", in_header(file, lambda h: h.update({"\x1b[2J\n\r": _none(h)})))
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
    for name, data in (("layers.0.q.u2", b"\xff" * 256), ("layers.0.q.scale", b"\0\0\xc0\x7f"), ("norm", b"\0\0\x80\x7f")):
        yield f"packed {name}", Attack("packed", tensor_bytes("model.safetensors", name, data), readers.run)
    said = "__metadata__"
    for key, value in (("version", "2"), ("version", "9" * 9), ("version", "9" * 5000), ("version", "-1"), ("version", 1), ("config", "{"),
                       ("config", "[" * 100_000), ("config", None), ("sha256", "[]")):  # fmt: skip
        plant = in_header("model.safetensors", lambda h, k=key, v=value: h[said].update({k: v}))
        yield f"packed, {key} {value!r:.20}", Attack("packed", plant, harmless=key == "sha256")
    for key, value in (("num_layers", 10**9), ("vocab_size", 1 << 21), ("head_dim", 1 << 40), ("eos_ids", [10**9]), ("family", "\n")):
        yield f"packed, {key} is {value!r}", Attack("packed", in_header("model.safetensors", partial(_packed_config, key, value)))
    yield "packed, no config at all", Attack("packed", in_header("model.safetensors", lambda h: h.pop(said)))


def _none(header: Any) -> dict[str, Any]:
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__" and name[0] != "x")
    return {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}


def _empty_tables(rows: int, header: Any) -> None:
    embed = header["model.embed_tokens.weight"]
    header["lm_head.weight"] = {**embed, "shape": [rows, 0 if rows else 1 << 62], "data_offsets": [embed["data_offsets"][0]] * 2}
    others = sorted(entry["data_offsets"][0] for name, entry in header.items() if name not in ("__metadata__", "lm_head.weight"))
    begin = embed["data_offsets"][0]
    header["rest"] = {"dtype": "U8", "shape": [embed["data_offsets"][1] - begin], "data_offsets": embed["data_offsets"]}
    header["model.embed_tokens.weight"] = dict(header["lm_head.weight"])
    assert others


def _packed_config(key: str, value: Any, header: Any) -> None:
    config = json.loads(header["__metadata__"]["config"])
    header["__metadata__"]["config"] = json.dumps({**config, key: value})


def _indexes() -> Iterator[tuple[str, Attack]]:
    index = "model.safetensors.index.json"
    files = ("../x", "/etc/passwd", "/dev/zero", "a/b", "..", ".", "", "a\\b", "a\0b", "\n", "\ud800", "x" * 5000, "config.json", index, 1)
    for file in files:
        plant = edited(index, lambda i, f=file: i["weight_map"].update({"model.norm.weight": f}))
        yield f"a shard {file!r:.20}", Attack("hf-shards", plant)
    many = edited(index, lambda i: i["weight_map"].update({f"x{n}": f"model-{n}.safetensors" for n in range(50_000)}))
    yield "50000 shards", Attack("hf-shards", many)
    same = edited(index, lambda i: i["weight_map"].update({f"x{n}": "model-1.safetensors" for n in range(50_000)}))
    yield "50000 tensors", Attack("hf-shards", same)


# GGUF


def _gguf_text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _key(key: str, kind: int, value: bytes) -> bytes:
    return _gguf_text(key.encode()) + struct.pack("<I", kind) + value


def _with_keys(*keys: bytes) -> Plant:
    """A file with these keys in front of its own; of two with one name the first is ours."""

    def plant(root: Path) -> None:
        content = (root / "model.gguf").read_bytes()
        _, own, tensors = _gguf_fields(content)
        names = {key[: 8 + int.from_bytes(key[:8], "little")] for key in keys}
        kept = [content[a:b] for a, b in own if not content[a:b].startswith(tuple(names))]
        head = content[:16] + struct.pack("<Q", len(keys) + len(kept)) + b"".join((*keys, *kept))
        head += content[tensors[0][0] : tensors[-1][1]]
        data = -(-tensors[-1][1] // 32) * 32
        (root / "model.gguf").write_bytes(head + bytes(-len(head) % 32) + content[data:])

    return plant


def _number(at: int, value: int, wide: int = 8) -> Plant:
    return patched("model.gguf", at, (value & (1 << 8 * wide) - 1).to_bytes(wide, "little"))


def _ggufs() -> Iterator[tuple[str, Attack]]:
    seed = "gguf-types"
    content = files_of(seed)["model.gguf"]
    _, keys, tensors = _gguf_fields(content)
    yield "big-endian", Attack(seed, patched("model.gguf", 4, b"\0\0\0\3"))
    for version in (0, 1, 4, 0xFFFFFFFF):
        yield f"version {version}", Attack(seed, _number(4, version, 4))
    for value in (1 << 60, 1 << 63, -1, 1 << 16, 1000, 0):
        yield f"{value} tensors", Attack(seed, _number(8, value))
        yield f"{value} keys", Attack(seed, _number(16, value))
    for value in (1 << 63, -1, 1 << 40, 1 << 20):
        yield f"a key of {value} bytes", Attack(seed, _number(keys[0][0], value))
        yield f"a tensor's name of {value} bytes", Attack(seed, _number(tensors[0][0], value))
    name_end = tensors[0][0] + 8 + int.from_bytes(content[tensors[0][0] : tensors[0][0] + 8], "little")
    for dims in (0, 5, 1 << 31, 0xFFFFFFFF):
        yield f"{dims} dimensions", Attack(seed, _number(name_end, dims, 4))
    for size in (0, 1 << 32, 1 << 62, 1 << 63, -1, -256):
        yield f"a dimension of {size}", Attack(seed, _number(name_end + 4, size))
        yield f"two dimensions of {size}", Attack(seed, patched("model.gguf", name_end + 4, struct.pack("<Q", size & (1 << 64) - 1) * 2))
    for kind in (4, 5, 15, 16, 38, 39, 99, 0xFFFFFFFF):
        yield f"type {kind}", Attack(seed, _number(name_end + 20, kind, 4))
    for offset in (1, 32, 1 << 62, 1 << 63, -1, -32):
        yield f"offset {offset}", Attack(seed, _number(name_end + 24, offset))
    for alignment in (0, 1, 3, 33, 1 << 20, 1 << 21, 1 << 31, 0xFFFFFFFF):
        yield f"alignment {alignment}", Attack(seed, _with_keys(_key("general.alignment", 4, struct.pack("<I", alignment))))
    nested = struct.pack("<IQ", 9, 1) * 10_000
    yield "arrays in arrays", Attack(seed, _with_keys(_key("x", 9, nested)))
    for kind in (0, 1, 6, 7, 8, 9, 10, 12, 13, 0xFFFFFFFF):
        for count in (1 << 60, (1 << 64) - 1, 1 << 61, 1 << 31):
            yield f"an array of {count} of {kind}", Attack(seed, _with_keys(_key("x", 9, struct.pack("<IQ", kind, count))))
    doubled = _key("x", 7, b"\1")
    yield "a key twice", Attack(seed, _with_keys(doubled, doubled))
    yield "a key that writes on the terminal", Attack(seed, _with_keys(_key("\x1b[2J\n", 13, b"")))
    sizes = ("llama.block_count", "llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv",
             "llama.context_length", "llama.feed_forward_length", "llama.rope.dimension_count", "llama.attention.key_length")  # fmt: skip
    for key in sizes:
        for value in (0, 1, 10**9, (1 << 63) - 1, -1):
            harmless = value == 1 and key in ("llama.context_length", "llama.block_count", "llama.attention.head_count_kv")
            yield f"{key} = {value}", Attack(seed, _with_keys(_key(key, 11, struct.pack("<q", value))), harmless=harmless)
        yield f"{key} is a list", Attack(seed, _with_keys(_key(key, 9, struct.pack("<IQI", 4, 1, 1))))
        yield f"{key} is a text", Attack(seed, _with_keys(_key(key, 8, _gguf_text(b"1"))))
    for value in (float("nan"), float("inf"), 0.0, -1.0, 1e-45):
        for key in ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"):
            yield f"{key} = {value}", Attack(seed, _with_keys(_key(key, 6, struct.pack("<f", value))))
    yield from _gguf_weights()
    yield from _gguf_words()


def _gguf_weights() -> Iterator[tuple[str, Attack]]:
    """Numbers that are none, in every type."""
    content = files_of("gguf-types")["model.gguf"]
    _, _, tensors = _gguf_fields(content)
    start = -(-tensors[-1][1] // 32) * 32
    for begin, end in tensors:
        name = content[begin + 8 : begin + 8 + content[begin]].decode()
        at = start + int.from_bytes(content[end - 8 : end], "little")
        for data in (b"\xff" * 256, b"\0" * 256, b"\0\x7c" * 128, b"\0\xfe" * 128):
            yield f"{name} begins with {data[:2]!r}", Attack("gguf-types", patched("model.gguf", at, data), readers.run, True)


def _gguf_words() -> Iterator[tuple[str, Attack]]:
    for seed in ("gguf-types", "gguf-groups"):
        for key in ("tokens", "scores", "token_type", "merges", "model", "pre", "bos_token_id", "eos_token_id", "add_bos_token",
                    "unknown_token_id", "add_space_prefix", "eot_token_id"):  # fmt: skip
            for what, kind, value in (
                ("a flag", 7, b"\1"), ("a number", 4, b"\xff" * 4), ("a negative one", 11, b"\xff" * 8), ("NaN", 6, b"\0\0\xc0\x7f"),
                ("a text", 8, _gguf_text(b"x")), ("no texts", 9, struct.pack("<IQ", 8, 0)), ("numbers", 9, struct.pack("<IQ3I", 4, 3, 1, 2, 3)),
                ("one text twice", 9, struct.pack("<IQ", 8, 2) + _gguf_text(b"a") * 2), ("NaNs", 9, struct.pack("<IQ", 6, 10) + b"\xff" * 40),
                ("texts of nothing", 9, struct.pack("<IQ", 8, 1000) + _gguf_text(b"") * 1000), ("a long text", 8, _gguf_text(b"x" * 70_000)),
                ("a flag of 2", 7, b"\2"), ("one long text", 9, struct.pack("<IQ", 8, 1) + _gguf_text("\u2581ab".encode() * 20_000)),
                ("halves of pairs", 9, struct.pack("<IQ", 8, 2) + _gguf_text(b"a ") + _gguf_text(b" ")),
            ):  # fmt: skip
                plant = _with_keys(_key(f"tokenizer.ggml.{key}", kind, value))
                yield f"{key} is {what}", Attack(seed, plant, readers.run, harmless=True)


# Meta's


def _pickles_and_zips() -> Iterator[tuple[str, Attack]]:
    for name, pickle in _pickles():
        yield f"the pickle {name}", Attack("meta-shards", partial(_other_pickle, pickle))
    content = files_of("meta-shards")["consolidated.00.pth"]
    for signature, sizes in ((b"PK\5\6", (4, 6, 8, 10, 12, 16, 20)), (b"PK\1\2", (8, 10, 20, 24, 28, 30, 32, 34, 42)),
                             (b"PK\3\4", (6, 8, 26, 28)), (b"PK\6\6", (4, 16, 20, 24, 32, 40, 48)), (b"PK\6\7", (4, 8, 16))):  # fmt: skip
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
    yield "is tuples in tuples", b"\x80\2)" + b"\x85" * 400_000 + b"."
    yield "is endless by its memo", b"\x80\2}q\0X\1\0\0\0ah\0s."
    yield "doubles and doubles", b"\x80\2)" + b"q\0h\0\x86" * 100_000 + b"."
    yield "keys by what doubles", b"\x80\2}(X\1\0\0\0a)" + b"q\0h\0\x86" * 5000 + b"u."
    yield "hashes what doubles", b"\x80\2})" + b"q\0h\0\x86" * 64 + b"Ns."
    yield "has marks only", b"\x80\2" + b"(" * 400_000 + b"."
    yield "has a number of 255 bytes", b"\x80\2}X\1\0\0\0a\x8a\xff" + b"\xff" * 255 + b"s."
    yield "has a text of 4 GB", b"\x80\2X\xff\xff\xff\xffa."
    yield "is of protocol 4", b"\x80\4\x95\xff\xff\xff\xff\xff\xff\xff\x7f}."
    yield "is a number", b"\x80\2K\1."
    yield "goes on behind its end", b"\x80\2}.}."
    yield "is nothing", b""
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0%cX\3\0\0\0cpu%stQ%s%s%s\x89}tR"
    big, minus, none = b"\x8a\x09" + b"\xff" * 8 + b"\0", b"J\xff\xff\xff\xff", b"K\0"
    for name, count, start, shape, strides in (
        ("a storage of 2^64", big, none, b"K\1\x85", b"K\1\x85"), ("a start of 2^64", b"K\1", big, b"K\1\x85", b"K\1\x85"),
        ("a start of -1", b"K\1", minus, b"K\1\x85", b"K\1\x85"), ("a shape of 2^64", b"K\1", none, big + b"\x85", b"K\1\x85"),
        ("a shape of -1", b"K\1", none, minus + b"\x85", b"K\1\x85"), ("strides of 0", b"K\1", none, b"M\xff\xff\x85", b"K\0\x85"),
        ("a shape of a shape", b"K\1", none, b")\x85", b"K\1\x85"), ("flags for numbers", b"\x88", none, b"\x88\x85", b"\x88\x85"),
        ("a shape of 100000", b"K\1", none, b"(" + b"K\1" * 100_000 + b"t", b"(" + b"K\1" * 100_000 + b"t"),
    ):  # fmt: skip
        yield f"has {name}", b"\x80\2}X\1\0\0\0a" + tensor % (b"0", count, start, shape, strides) + b"s."


def _other_pickle(pickle: bytes, root: Path) -> None:
    _rewritten(root, {"consolidated.00/data.pkl": pickle})


def _rewritten(root: Path, change: dict[str, bytes], method: int = 0) -> None:
    import zipfile

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


# Texts

_JSON = {
    "nothing": b"", "a list": b"[]", "deep lists": b"[" * 200_000, "deep objects": b'{"a":' * 200_000, "no UTF-8": b"\xff\xff{}", "nul": b"\0",
    "closed deep lists": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "half a pair": b'{"bos_token": "\\ud800"}',
    "a number of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}", "a byte order mark": b"\xef\xbb\xbf[]", "UTF-16": "{}x".encode("utf-16"),
}  # fmt: skip


def _json_files() -> Iterator[tuple[str, Attack]]:
    places = {"hf-shards": ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                            "model.safetensors.index.json"), "bitnet-packed": ("tokenizer.json",),
              "meta-shards": ("params.json",)}  # fmt: skip
    for seed, files in places.items():
        for file in files:
            for name, content in _JSON.items():
                harmless = name in ("half a pair", "closed deep lists")
                yield f"{file} is {name}", Attack(seed, replaced(file, content), readers.everything, harmless)
            yield f"{file} of a gigabyte", Attack(seed, partial(_sparse, file), readers.everything)
    keys = ("bos_token", "eos_token", "chat_template", "add_bos_token", "added_tokens_decoder", "pad_token")
    for key in keys:
        for value in (1, True, [], {}, [[]], {"content": 1}, "\ud800", "\0", "x" * 100_000, [{"name": 1, "template": "x"}], [{}], [None],
                      {"content": "\x1b[2J\n"}, "", [{"name": "x" * 5000, "template": "{{"}], [{"name": [], "template": ""}]):  # fmt: skip
            plant = edited("tokenizer_config.json", lambda c, k=key, v=value: c.update({k: v}))
            yield f"{key} = {value!r:.30}", Attack("bitnet-packed", plant, readers.words, harmless=True)


def _sparse(name: str, root: Path) -> None:
    with (root / name).open("ab") as file:
        file.truncate(1 << 30)


def _words() -> Iterator[tuple[str, Attack]]:
    def changed(name: str, change: Callable[[Any], object], examine: Any = readers.run) -> tuple[str, Attack]:
        return name, Attack("bitnet-packed", edited("tokenizer.json", change), examine, harmless=True)

    for regex in ("(a+)+$", "(?:a|a)*b", "(", "\\", "[", "(?<=a+)b", "a{1000000}", "(a{1000}){1000}", "\\p{X}", "(?R)", "", "(.*)*(.*)*x", "\\K"):
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        yield changed(f"the pattern {regex!r}", lambda t, s=split: t.update(pre_tokenizer=s), _long_text)
        replace = {"type": "Replace", "pattern": {"Regex": regex}, "content": "aa"}
        yield changed(f"a normaliser of {regex!r}", lambda t, r=replace: t.update(normalizer=r), _long_text)
    grows = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40}
    yield changed("a normaliser that doubles 40 times", lambda t: t.update(normalizer=grows), _long_text)
    for key in ("model", "pre_tokenizer", "decoder", "normalizer", "post_processor", "added_tokens", "version", "truncation", "padding"):
        for value in (None, [], {}, "x", 1, {"type": "x"}, [[]], [{}], {"type": "Sequence"}, {"type": "Sequence", "decoders": []}):
            yield changed(f"{key} = {value!r}", lambda t, k=key, v=value: t.update({k: v}))
    for number in (1 << 24, (1 << 24) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, -1, 383, 384, 1_000_000):
        yield changed(f"a token has the id {number}", lambda t, n=number: t["model"]["vocab"].update({"Hello": n, "H": n}))
        yield changed(f"an added token has the id {number}", lambda t, n=number: t["added_tokens"][0].update(id=n))
    for text in ("", "\0", " ", "\n", "a", "\ud800", "x" * 100_000, "Hello"):
        yield changed(f"an added token {text[:9]!r}", lambda t, x=text: t["added_tokens"][0].update(content=x))
    for merge in (["a"], ["a", "zz"], ["a", "b", "c"], [], "a", "a b c", ["", ""], [["a", "b"]], [1, 2], None):
        yield changed(f"a merge {merge!r}", lambda t, m=merge: t["model"]["merges"].append(m))
    yield changed("a prefix for parts of words", lambda t: t["model"].update(continuing_subword_prefix="####"))
    yield changed("an end of words", lambda t: t["model"].update(end_of_word_suffix="####"))
    for dropout in (0.5, 1.0, -1, 2):
        yield changed(f"a dropout of {dropout}", lambda t, d=dropout: t["model"].update(dropout=d))
    for kind in ("WordLevel", "WordPiece", "Unigram", "x"):
        yield changed(f"a model of the kind {kind}", lambda t, k=kind: t["model"].update(type=k))
    for size in (0, 1, 1 << 62):
        yield changed(f"cut off at {size}", lambda t, s=size: t.update(
            truncation={"max_length": s, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
            padding={"strategy": {"Fixed": s}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        ))  # fmt: skip
    for line in ("", "YQ== 5", "YQ== 99999999999999999999", "YQ== -1", "= 1", "YQ==", "YQ== 1 2", "\xff 1", "Y" * 4_000_000 + " 543"):
        content = files_of("meta-shards")["tokenizer.model"] + line.encode("latin-1") + b"\n"
        yield f"a rank {line[:20]!r}", Attack("meta-shards", replaced("tokenizer.model", content), readers.words)
    for data in (b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" + b"\xff" * 9 + b"\1", b"\x0a\0" * 600_000, b"\x08\1", b"\x0b", b"\xff" * 100, b"\x0a\2\x0a\xff",
                 b"\x0a\3\x0a\1\xff", b"\x0d\0\0\xc0\x7f", b"\0" * 1000):  # fmt: skip
        yield f"a message {data[:12]!r}", Attack("hf-shards", replaced("tokenizer.model", data), readers.words)


def _long_text(root: Path) -> None:
    """Have it cut a text that costs patterns the most."""
    from bitnet_inference.text.tokenizer import Tokenizer

    Tokenizer.from_folder(root).encode("a" * 40 + "!")


def _templates() -> Iterator[tuple[str, Attack]]:
    more = (
        "{% for i in range(10**6) %}{% for j in range(10**6) %}{% endfor %}{% endfor %}", "{{ range(10**12) | list }}", "x" * 300_000,
        "{{ ''.join(['a' * 10**7] * 10**3) }}", "{% set x = [] %}{% for i in range(99999) %}{% set x = x + [x] %}{% endfor %}{{ x }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "{{ " + "1+" * 20_000 + "1 }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000, "{{ messages[0].content.format.__globals__ }}", "{{ ('%c' * 10**8) % 1 }}",
        "{{ 'a' | replace('', 'a' * 10**6) | replace('', 'a' * 10**6) }}", "{{ 10 ** 10 ** 10 }}", "{{ 1 << 10**9 }}", "{{ 'é' * 2 ** 40 }}",
        "{{ 'x' | indent(10**9) }}", "{{ messages | tojson | urlize(10**9) }}", "{{ '\\ud800' }}", "{{ dict(a=1).items() | list * 10**9 }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{{ cycler.__init__.__globals__.os.system('ls') }}", "{{ ''.__class__ }}",
        "{{ self.__init__.__globals__ }}", "{{ messages.append(1) }}", "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a'.encode().fromhex('00') }}", "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!' | wordwrap(1) }}", "{{ '9' * 10**6 | int }}", "{{ ('9' * 100000) | int }}",
        "{{ 1e308 * 10 }}", "{{ messages | xmlattr }}", "{{ joiner('x')() * 10**9 }}", "{% raw %}{% endraw %}{{ 'a' | center(2**62) }}",
    )  # fmt: skip
    for number, source in enumerate((*_HOSTILE_TEMPLATES, *more)):
        name = f"template {number} {source[:50]!r}"
        yield name, Attack("bitnet-packed", replaced("chat_template.jinja", source), readers.words, harmless=True)


def found() -> Iterator[tuple[str, Attack]]:
    """What was found once: found/SEED+NAME/ holds the files that take the place of the seed's."""
    for folder in sorted((readers.HERE / "found").iterdir()):
        if folder.is_dir():
            files = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
            plants = [replaced(name, content) for name, content in files.items()]
            seed = folder.name.partition("+")[0]
            yield folder.name, Attack(seed, lambda root, plants=plants: [plant(root) for plant in plants], readers.run, True)


def sound() -> Iterator[tuple[str, Attack]]:
    """Every seed as it is."""
    for seed in sorted({reader.seed for reader in readers.READERS.values() if reader.examine is readers.everything}):
        yield f"{seed} as it is", Attack(seed, lambda root: None, readers.run, True)

"""Attacks on GGUF files: headers, weights, and the words in them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import readers
from mutate import gguf_fields
from plants import Attack, Plant, patched
from readers import files_of

# GGUF


def gguf_text(text: bytes) -> bytes:
    """A text with its length before it."""
    return struct.pack("<Q", len(text)) + text


def gguf_key(key: str, kind: int, value: bytes) -> bytes:
    """The record of a key."""
    return gguf_text(key.encode()) + struct.pack("<I", kind) + value


def with_keys(*keys: bytes, name: str = "model.gguf") -> Plant:
    """A file with these keys in front of its own; of two with one name the first is ours."""

    def plant(root: Path) -> None:
        content = (root / name).read_bytes()
        _, own, tensors = gguf_fields(content)
        names = {key[: 8 + int.from_bytes(key[:8], "little")] for key in keys}
        kept = [content[a:b] for a, b in own if not content[a:b].startswith(tuple(names))]
        head = content[:16] + struct.pack("<Q", len(keys) + len(kept)) + b"".join((*keys, *kept))
        head += content[tensors[0][0] : tensors[-1][1]]
        data = -(-tensors[-1][1] // 32) * 32
        (root / name).write_bytes(head + bytes(-len(head) % 32) + content[data:])

    return plant


def _number(at: int, value: int, wide: int = 8) -> Plant:
    return patched("model.gguf", at, (value & (1 << 8 * wide) - 1).to_bytes(wide, "little"))


def ggufs() -> Iterator[tuple[str, Attack]]:
    """By name."""
    seed = "gguf-types"
    content = files_of(seed)["model.gguf"]
    _, keys, tensors = gguf_fields(content)
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
        yield (
            f"two dimensions of {size}",
            Attack(seed, patched("model.gguf", name_end + 4, struct.pack("<Q", size & (1 << 64) - 1) * 2)),
        )
    for kind in (4, 5, 15, 16, 38, 39, 99, 0xFFFFFFFF):
        yield f"type {kind}", Attack(seed, _number(name_end + 20, kind, 4))
    for offset in (1, 32, 1 << 62, 1 << 63, -1, -32):
        yield f"offset {offset}", Attack(seed, _number(name_end + 24, offset))
    for alignment in (0, 1, 3, 33, 1 << 20, 1 << 21, 1 << 31, 0xFFFFFFFF):
        yield (
            f"alignment {alignment}",
            Attack(seed, with_keys(gguf_key("general.alignment", 4, struct.pack("<I", alignment)))),
        )
    nested = struct.pack("<IQ", 9, 1) * 10_000
    yield "arrays in arrays", Attack(seed, with_keys(gguf_key("x", 9, nested)))
    for kind in (0, 1, 6, 7, 8, 9, 10, 12, 13, 0xFFFFFFFF):
        for count in (1 << 60, (1 << 64) - 1, 1 << 61, 1 << 31):
            yield (
                f"an array of {count} of {kind}",
                Attack(seed, with_keys(gguf_key("x", 9, struct.pack("<IQ", kind, count)))),
            )
    doubled = gguf_key("x", 7, b"\1")
    yield "a key twice", Attack(seed, with_keys(doubled, doubled))
    yield "a key that writes on the terminal", Attack(seed, with_keys(gguf_key("\x1b[2J\n", 13, b"")))
    sizes = ("llama.block_count", "llama.embedding_length", "llama.attention.head_count",
    "llama.attention.head_count_kv",
             "llama.context_length", "llama.feed_forward_length", "llama.rope.dimension_count",
             "llama.attention.key_length")  # fmt: skip
    for key in sizes:
        for value in (0, 1, 10**9, (1 << 63) - 1, -1):
            harmless = value == 1 and key in (
                "llama.context_length",
                "llama.block_count",
                "llama.attention.head_count_kv",
            )
            yield (
                f"{key} = {value}",
                Attack(seed, with_keys(gguf_key(key, 11, struct.pack("<q", value))), harmless=harmless),
            )
        for_each_layer = with_keys(gguf_key(key, 9, struct.pack("<IQI", 4, 1, 1)))
        yield f"{key} is a list", Attack(seed, for_each_layer, harmless=key == "llama.attention.head_count_kv")
        yield f"{key} is a text", Attack(seed, with_keys(gguf_key(key, 8, gguf_text(b"1"))))
    for value in (float("nan"), float("inf"), 0.0, -1.0, 1e-45):
        for key in ("llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"):
            yield f"{key} = {value}", Attack(seed, with_keys(gguf_key(key, 6, struct.pack("<f", value))))
    yield from _gguf_parts()
    yield from _gguf_weights()
    yield from _gguf_words()


def _gguf_parts() -> Iterator[tuple[str, Attack]]:
    """What the parts of a model say of each other."""
    numbers = struct.pack("<IQ2I", 4, 2, 0, 1)
    for key in ("split.no", "split.count", "split.tensors.count"):
        for part in ("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"):
            for kind, value in (
                (9, numbers),
                (8, gguf_text(b"1")),
                (11, b"\xff" * 8),
                (6, b"\0\0\xc0\x7f"),
                (7, b"\1"),
            ):
                harmless = key == "split.tensors.count" and part != "model-00001-of-00002.gguf"
                plant = with_keys(gguf_key(key, kind, value), name=part)
                yield f"{part}: {key} of the kind {kind}", Attack("gguf-parts", plant, harmless=harmless)


def _gguf_weights() -> Iterator[tuple[str, Attack]]:
    """Numbers that are none, in every type."""
    content = files_of("gguf-types")["model.gguf"]
    _, _, tensors = gguf_fields(content)
    start = -(-tensors[-1][1] // 32) * 32
    for begin, end in tensors:
        name = content[begin + 8 : begin + 8 + content[begin]].decode()
        at = start + int.from_bytes(content[end - 8 : end], "little")
        for data in (b"\xff" * 256, b"\0" * 256, b"\0\x7c" * 128, b"\0\xfe" * 128):
            yield (
                f"{name} begins with {data[:2]!r}",
                Attack("gguf-types", patched("model.gguf", at, data), readers.run, True),
            )


def _gguf_words() -> Iterator[tuple[str, Attack]]:
    for seed in ("gguf-types", "gguf-groups"):
        for key in ("tokens", "scores", "token_type", "merges", "model", "pre", "bos_token_id", "eos_token_id",
        "add_bos_token",
                    "unknown_token_id", "add_space_prefix", "eot_token_id"):  # fmt: skip
            for what, kind, value in (
                ("a flag", 7, b"\1"), ("a number", 4, b"\xff" * 4), ("a negative one", 11, b"\xff" * 8), ("NaN", 6,
                b"\0\0\xc0\x7f"),
                ("a text", 8, gguf_text(b"x")), ("no texts", 9, struct.pack("<IQ", 8, 0)), ("numbers", 9,
                struct.pack("<IQ3I", 4, 3, 1, 2, 3)),
                ("one text twice", 9, struct.pack("<IQ", 8, 2) + gguf_text(b"a") * 2), ("NaNs", 9, struct.pack("<IQ",
                6, 10) + b"\xff" * 40),
                ("texts of nothing", 9, struct.pack("<IQ", 8, 1000) + gguf_text(b"") * 1000), ("a long text", 8,
                gguf_text(b"x" * 70_000)),
                ("a flag of 2", 7, b"\2"), ("one long text", 9, struct.pack("<IQ", 8,
                1) + gguf_text("\u2581ab".encode() * 20_000)),
                ("halves of pairs", 9, struct.pack("<IQ", 8, 2) + gguf_text(b"a ") + gguf_text(b" ")),
            ):  # fmt: skip
                plant = with_keys(gguf_key(f"tokenizer.ggml.{key}", kind, value))
                yield f"{key} is {what}", Attack(seed, plant, readers.run, harmless=True)

"""What an attack is, and how a copy of a sound model is changed into one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import readers

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

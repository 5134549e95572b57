"""Attacks on ONNX files that test_onnx_files.py has not: much of what is little, and names for two things."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import readers
from mutate_onnx import Field, parsed, written
from plants import Attack, edited

_GRAPH, _NODES, _INITIALIZERS, _INPUTS, _OUTPUTS = 7, 1, 5, 11, 12
_MANY = 20_000


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    return written([Field(number, 2 if isinstance(value, bytes) else 0, value) for number, value in fields])


def _changed(change: Callable[[list[Field], list[Field]], object]) -> Any:
    """Other fields of the model, or of its graph."""

    def plant(root: Path) -> None:
        model = parsed((root / "model.onnx").read_bytes())
        change(model, next(field.value for field in model if field.number == _GRAPH))
        (root / "model.onnx").write_bytes(written(model))

    return plant


def _many(number: int, message: Callable[[int], bytes], count: int = _MANY) -> Any:
    fields = [Field(number, 2, message(at)) for at in range(count)]
    return _changed(lambda model, graph: graph.extend(fields))


def _outside(at: int, location: bytes = b"model.onnx_data") -> bytes:
    """A tensor without elements whose bytes lie elsewhere."""
    return _message((1, 0), (2, 1), (8, b"t%d" % at), (14, 1), (13, _message((1, b"location"), (2, location))))


def _port(at: int) -> bytes:
    return _message((1, b"port%d" % at), (2, _message((1, _message((1, 1))))))


def onnx() -> Iterator[tuple[str, Attack]]:
    """By name."""
    yield "many empty nodes", Attack("onnx", _many(_NODES, lambda at: b"", 270_000))
    yield "many nodes", Attack("onnx", _many(_NODES, lambda at: _message((4, b"Op%d" % at))), harmless=True)
    yield "many tensors outside", Attack("onnx", _many(_INITIALIZERS, _outside), harmless=True)
    absent = _many(_INITIALIZERS, lambda at: _outside(at, b"absent%d" % at))
    yield "many tensors in files that are not there", Attack("onnx", absent)
    yield "many inputs", Attack("onnx", _many(_INPUTS, _port))
    yield "many outputs", Attack("onnx", _many(_OUTPUTS, _port), harmless=True)
    domains = [Field(8, 2, _message((1, b"\x1b[2J\n%d" % at), (2, 1 << 62))) for at in range(_MANY)]
    yield "many opsets", Attack("onnx", _changed(lambda model, graph: model.extend(domains)), harmless=True)
    for size in (0, 1 << 62, -1):
        numbers = [_message((1, name), (3, size)) for name in (b"K", b"N", b"bits")]
        node = _message(
            (4, b"MatMulNBits"), (7, b"com.microsoft"), (1, b"x"), (1, b"y"), *((5, each) for each in numbers)
        )
        plant = _changed(lambda model, graph, node=node: graph.append(Field(_NODES, 2, node)))
        yield f"packed weights of {size} by {size}", Attack("onnx", plant, harmless=True)
    yield from _genai()


def _genai() -> Iterator[tuple[str, Attack]]:
    """Names of onnxruntime-genai's configuration that are those of something else."""
    for part, change in (
        ("inputs", {"input_ids": "attention_mask"}), ("inputs", {"attention_mask": "input_ids"}),
        ("inputs", {"position_ids": "input_ids"}), ("inputs", {"past_value_names": "past.%d.k"}),
        ("inputs", {"past_key_names": "past.%d.v", "past_value_names": "past.%d.k"}),
        ("inputs", {"input_ids": "past.0.k"}),
        ("outputs", {"logits": "now.0.k"}), ("outputs", {"hidden_states": "scores"}), ("outputs", {"logits": ""}),
        ("outputs", {"hidden_states": "now.0.v"}), ("outputs", {"present_value_names": "now.%d.k"}),
        ("outputs", {"present_key_names": "now.%d.v", "present_value_names": "now.%d.k"}),
        ("outputs", {"present_key_names": "%d" * 9}), ("inputs", {"past_key_names": "%d" + "x" * 100_000}),
        ("inputs", {"input_ids": "\ud800"}), ("outputs", {"logits": "\x1b[2J\n"}),
    ):  # fmt: skip

        def swap(about: Any, part: str = part, change: dict[str, str] = change) -> None:
            about["model"]["decoder"].setdefault(part, {}).update(change)

        yield f"{part} {change!r:.60}", Attack("onnx-genai", edited("genai_config.json", swap), readers.run, True)
    for key, value, harmless in (
        ("filename", "genai_config.json", False), ("filename", "tokenizer.model", False), ("filename", "", False),
        ("filename", "x" * 300, False), ("num_key_value_heads", 512, False), ("head_size", 1, True),
    ):  # fmt: skip

        def reset(about: Any, key: str = key, value: object = value) -> None:
            about["model"]["decoder"][key] = value

        attack = Attack("onnx-genai", edited("genai_config.json", reset), readers.run, harmless)
        yield f"{key} = {value!r:.30}", attack

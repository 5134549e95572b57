"""Damage to ONNX files: to their fields, with lengths that fit again, or that lie."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from values import NUMBERS, TEXTS

# Which fields are messages, by the name of the message they stand in; the rest are numbers and bytes.
_SCHEMA: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 14: "entry", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 11: "port", 12: "port", 13: "port", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "tensor": {13: "entry"},
    "sparse": {1: "tensor", 2: "tensor"},
    "port": {2: "type"},
    "type": {1: "tensor_type"},
    "tensor_type": {2: "shape"},
    "shape": {1: "dim"},
    **{kind: {} for kind in ("opset", "entry", "dim", "training", "function")},
}
_FIELDS = (*range(1, 16), 20, 22, 23, 25, 31, 100, (1 << 29) - 1)
_WIDTHS = {1: 8, 5: 4}


@dataclass
class Field:
    """A field of a message: its number, its wire type, and its value: a number, bytes, or the fields of a message."""

    number: int
    wire: int
    value: Any


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Another file, of the fields of this one. Raises ValueError and IndexError where it has none."""
    fields = parsed(content)
    if not fields:
        raise ValueError("empty")
    if rng.random() < 0.1:
        return written(fields, rng)
    _change(fields, rng)
    return written(fields)


def parsed(data: bytes, kind: str = "model") -> list[Field]:
    """The fields of a message. Raises ValueError and IndexError where there are none."""
    fields, at = [], 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            fields.append(Field(number, wire, value))
            continue
        if wire == 2:
            width, at = _varint(data, at)
        elif wire in _WIDTHS:
            width = _WIDTHS[wire]
        else:
            raise ValueError(wire)
        part, at = data[at : at + width], at + width
        if at > len(data):
            raise IndexError(at)
        inner = _SCHEMA[kind].get(number) if wire == 2 else None
        fields.append(Field(number, wire, part if inner is None else parsed(part, inner)))
    return fields


def written(fields: list[Field], rng: random.Random | None = None) -> bytes:
    """The bytes of a message; with `rng` one length in it lies."""
    liar = rng.choice([field for field in _all(fields) if field.wire == 2]) if rng else None
    return _written(fields, liar, rng)


def _written(fields: list[Field], liar: Field | None, rng: random.Random | None) -> bytes:
    out = bytearray()
    for field in fields:
        out += _number(field.number << 3 | field.wire)
        if field.wire == 0:
            out += _number(field.value & (1 << 64) - 1)
            continue
        part = field.value if isinstance(field.value, bytes) else _written(field.value, liar, rng)
        if field.wire == 2:
            lie = rng.choice((-1, 1, 7, 1 << 20, 1 << 31, 1 << 62)) if rng and field is liar else 0
            out += _number(max(0, len(part) + lie))
        out += part
    return bytes(out)


def _change(fields: list[Field], rng: random.Random) -> None:
    """One field of the tree is left out, doubled, moved, replaced, or has another number, type or value."""
    owners = [fields, *(field.value for field in _all(fields) if isinstance(field.value, list))]
    owner = rng.choice([each for each in owners if each])
    field, way = rng.choice(owner), rng.randrange(9)
    at = next(index for index, each in enumerate(owner) if each is field)
    if way == 0:
        del owner[at]
    elif way == 1:
        owner[at:at] = [field] * rng.choice((1, 1, 2, 9, 1000))
    elif way == 2:
        owner[at] = deepcopy(rng.choice(_all(fields)))
    elif way == 3:
        field.number = rng.choice(_FIELDS)
    elif way == 4:
        rng.choice(owners).insert(0, deepcopy(field))
    elif way == 5 and isinstance(field.value, list):
        for _ in range(rng.choice((1, 8, 9, 40, 400))):
            owner[at] = field = Field(field.number, 2, [field])
    elif way == 6 and isinstance(field.value, list):
        owner[at] = Field(field.number, 2, rng.randbytes(rng.choice((0, 1, 2, 20))))
    else:
        _revalue(rng.choice(_leaves(fields)), rng)


def _revalue(field: Field, rng: random.Random) -> None:
    if isinstance(field.value, int):
        near = rng.random() < 0.4
        field.value = field.value + rng.choice((-1, 1, 2, 8)) if near else rng.choice(NUMBERS)
    elif rng.random() < 0.1:
        field.wire, field.value = 0, rng.choice(NUMBERS)
    elif rng.random() < 0.6:
        field.value = rng.choice((*TEXTS, *map(str, NUMBERS))).encode("utf-8", "surrogatepass")
    else:
        field.value = field.value[: rng.randrange(len(field.value) + 1)] + rng.randbytes(rng.choice((0, 1, 4, 16)))
    if field.wire in _WIDTHS:
        field.wire = 2


def _all(fields: list[Field]) -> list[Field]:
    found = []
    for field in fields:
        found.append(field)
        if isinstance(field.value, list):
            found += _all(field.value)
    return found


def _leaves(fields: list[Field]) -> list[Field]:
    return [field for field in _all(fields) if not isinstance(field.value, list)] or [Field(1, 0, 0)]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError("too long")


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])

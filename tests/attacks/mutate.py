"""Damage that keeps most of a file's form, so that it comes past the first checks: by the kind of file, from a seed.

The same number gives the same damage in every run.
"""

from __future__ import annotations

import json
import pickletools
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import mutate_onnx
from values import FLOATS, NUMBERS, TEXTS

TEMPLATES = (
    "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**10 }}", "{{ 'a' ~ messages }}", "{{ [1] * 10**9 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}", "{{ 2 ** 10 ** 9 }}",
    "{% include 'x' %}",
    "{{ '%1000000000d' % 1 }}", "{{ '{:>1000000000}'.format(1) }}", "{{ messages | tojson(indent=10**8) }}", "{% if %}",
    "{{ messages | map(attribute='content.__class__') | list }}", "{{ raise_exception('no\nway') }}",
    "{% import 'os' as os %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ messages | batch(10**9, 'x') | list }}", "{{ 'a' | center(10**9) }}", "{{ strftime_now('%9999999d') }}",
    "{{ x.y }}",
    "{{ messages | groupby('role') }}", "{{ messages | sort(attribute='content') }}", "{{ cycler('a').__init__ }}",
    "{% call(x) f() %}{% endcall %}", "{% block a %}{{ self.a() }}{% endblock %}", "{{ joiner }}", "{{ loop }}",
    "{% extends 'x' %}",
    "{% filter upper %}{{ 'a' * 10**8 }}{% endfilter %}", "{{ (1, 2) | sum(start=[]) }}",
    "{{ 'a,' * 9999 | replace('a', 'b' * 9999) }}",
)  # fmt: skip
_PIECES = (
    b"\x80\2", b"cos\nsystem\n", b"cbuiltins\neval\n", b"X\2\0\0\0ls", b"\x85R", b"(", b")", b"t", b"}", b"]", b"a",
    b"e", b"u",
    b"s", b"b", b"R", b"Q", b"q\0", b"h\0", b"r\xff\xff\xff\xff", b"j\xff\xff\xff\xff", b"\x8a\xff" + b"\xff" * 255,
    b"\x8a\0",
    b"\x8b\xff\xff\xff\x7f", b"0", b"1", b"2", b"\x81", b"\x82\1", b"\x83\1\0", b"\x84\1\0\0\0", b"\x92", b"\x93",
    b"\x94",
    b"(cos\nsystem\no", b"(ios\nsystem\n", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f", b"N", b"\x88", b"\x89", b"K\1",
    b"M\xff\xff",
    b"J\xff\xff\xff\xff", b"G\x7f\xf8\0\0\0\0\0\0", b"Pabc\n", b".", b"\x8e" + b"\xff" * 8, b"B\xff\xff\xff\x7f",
    b"\x85" * 1000,
    b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n", b"\x97", b"\x98",
)  # fmt: skip


def damaged(name: str, content: bytes, rng: random.Random) -> bytes:
    """The content of a file of this name, damaged in one to three places."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        ways = [_bytes, *_WAYS.get(name.rpartition(".")[2], ())]
        weights = [1, *(3 for _ in ways[1:])]
        content = rng.choices(ways, weights)[0](content, rng)
    return content


def _bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.choice((rng.randrange(len(content) + 1), min(len(content), int(rng.expovariate(1 / 60)))))
    way = rng.randrange(7)
    if way == 0 and content:
        at = min(at, len(content) - 1)
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if way == 1:
        wide = rng.choice((1, 2, 4, 8))
        return content[:at] + _number(rng, wide) + content[at + wide :]
    if way == 2:
        return content[:at]
    if way == 3:
        return content[:at] + content[at + rng.choice((1, 2, 8, 100, 5000)) :]
    if way == 4:
        piece = content[at : at + rng.choice((1, 8, 60, 1000))]
        return content[:at] + piece * rng.choice((2, 3, 100)) + content[at:]
    if way == 5:
        return content[:at] + rng.randbytes(rng.choice((1, 2, 4, 16, 64))) + content[at + rng.choice((0, 4, 16)) :]
    other = rng.randrange(len(content) + 1)
    piece = content[other : other + rng.choice((4, 40, 400))]
    return content[:at] + piece + content[at + len(piece) :]


def _number(rng: random.Random, wide: int) -> bytes:
    if wide >= 4 and rng.random() < 0.2:
        with_form = "<f" if wide == 4 else "<d"
        value = rng.choice(FLOATS)
        return struct.pack(with_form, value if wide == 8 or abs(value) < 3.4e38 or value != value else float("inf"))
    return (rng.choice(NUMBERS) & (1 << 8 * wide) - 1).to_bytes(wide, "little")


# JSON


class _Twice(dict[str, Any]):
    """An object that is written with its first key twice."""


def _json(content: bytes, rng: random.Random) -> bytes:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return _bytes(content, rng)
    return _written(_changed(tree, rng)).encode("utf-8", "surrogatepass")


def _written(tree: Any) -> str:
    text = json.dumps(tree, ensure_ascii=False)
    return (
        text.replace('"\\u0000twice": 0', '"a": 1, "a": 2')
        .replace('"\\u0000huge"', "1e400")
        .replace('"\\u0000long"', "9" * 5000)
    )


def _changed(tree: Any, rng: random.Random) -> Any:
    places = list(_places(tree))
    if not places:
        return _value(rng, tree)
    owner, key = rng.choice(places)
    way = rng.randrange(8)
    if way == 0:
        del owner[key]
    elif way == 1 and isinstance(owner, dict):
        owner[rng.choice((*TEXTS, *owner))] = owner.pop(key)
    elif way == 2:
        other, other_key = rng.choice(places)
        owner[key] = json.loads(json.dumps(other[other_key]))
    elif way == 3 and isinstance(owner, dict):
        owner[rng.choice(("\0twice", *TEXTS))] = 0
    elif way == 4:
        owner[key] = [owner[key]] if rng.random() < 0.5 else {"a": owner[key]}
    elif way == 5 and isinstance(owner, list):
        owner[key:key] = [owner[key]] * rng.choice((1, 2, 1000))
    else:
        owner[key] = _value(rng, owner[key])
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    waiting = [tree]
    while waiting and len(waiting) < 20000:
        node = waiting.pop()
        for key, value in (
            list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else ()
        ):
            yield node, key
            if isinstance(value, (dict, list)):
                waiting.append(value)


def _value(rng: random.Random, old: Any) -> Any:
    kind = rng.randrange(8)
    if kind == 0 and isinstance(old, int):
        return old + rng.choice((-1, 1, 2, 8, -8)) if rng.random() < 0.5 else old * rng.choice((2, 4, -1))
    if kind == 1 and isinstance(old, str):
        at = rng.randrange(len(old) + 1)
        return old[:at] + rng.choice(TEXTS) + old[at:]
    if kind == 2:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"a": {}}, "\0huge", "\0long"))
    if kind == 3:
        return rng.choice(FLOATS)
    if kind == 4:
        return [rng.choice(NUMBERS) for _ in range(rng.choice((1, 2, 2, 3, 9)))]
    return rng.choice(NUMBERS) if kind < 7 else rng.choice(TEXTS)


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    if end > len(content) or end > 1 << 20:
        return _bytes(content, rng)
    header = _json(content[8:end], rng)
    if rng.random() < 0.8:
        header += b" " * (-len(header) % 64 + 56)
    return len(header).to_bytes(8, "little") + header + content[end:]


# GGUF

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_fields(content: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]]:
    """Where numbers of the header stand (offset, width), where keys with their values do, and where tensors do."""
    numbers, keys, tensors = [(4, 4), (8, 8), (16, 8)], [], []
    num_tensors, num_keys = struct.unpack_from("<QQ", content, 8)
    at = 24

    def within(at: int) -> int:
        if at > len(content):
            raise IndexError(at)
        return at

    def text(at: int) -> int:
        numbers.append((at, 8))
        return within(at + 8 + struct.unpack_from("<Q", content, at)[0])

    def value(kind: int, at: int) -> int:
        if kind == 8:
            return text(at)
        if kind == 9:
            inner, count = struct.unpack_from("<IQ", content, at)
            numbers.extend(((at, 4), (at + 4, 8)))
            at += 12
            if inner in _SIZES:
                numbers.append((at, _SIZES[inner]))
                return within(at + count * _SIZES[inner])
            for _ in range(count):
                at = within(value(inner, at))
            return at
        numbers.append((at, _SIZES[kind]))
        return at + _SIZES[kind]

    for _ in range(num_keys):
        start, at = at, text(at)
        numbers.append((at, 4))
        at = value(struct.unpack_from("<I", content, at)[0], at + 4)
        keys.append((start, at))
    for _ in range(num_tensors):
        start, at = at, text(at)
        dims = struct.unpack_from("<I", content, at)[0]
        within(at + 16 + 8 * dims)
        numbers += [
            (at, 4),
            *((at + 4 + 8 * axis, 8) for axis in range(dims)),
            (at + 4 + 8 * dims, 4),
            (at + 8 + 8 * dims, 8),
        ]
        at += 16 + 8 * dims
        tensors.append((start, at))
    return numbers, keys, tensors


def _gguf(content: bytes, rng: random.Random) -> bytes:
    try:
        numbers, keys, tensors = gguf_fields(content)
    except (struct.error, KeyError, IndexError, RecursionError):
        return _bytes(content, rng)
    way = rng.randrange(6)
    if way < 2:
        at, wide = rng.choice(numbers)
        return content[:at] + _number(rng, wide) + content[at + wide :]
    if way == 2:
        at, wide = rng.choice(numbers)
        near = int.from_bytes(content[at : at + wide], "little") + rng.choice((-1, 1, 8, 32, -32, 64))
        return content[:at] + (near & (1 << 8 * wide) - 1).to_bytes(wide, "little") + content[at + wide :]
    records = keys if way < 5 or not tensors else tensors
    if not records:
        return _bytes(content, rng)
    return _gguf_record(content, records, records is keys, rng)


def _gguf_record(content: bytes, records: list[tuple[int, int]], are_keys: bool, rng: random.Random) -> bytes:
    """A key or a tensor left out, doubled, or with another value; the header tells the new count."""
    begin, end = rng.choice(records)
    data_begin = -(-records[-1][1] // 32) * 32 if not are_keys else None
    own, place = content[begin:end], 16 if are_keys else 8
    count = int.from_bytes(content[place : place + 8], "little")
    way = rng.randrange(3)
    if way == 0:
        own, count = b"", count - 1
    elif way == 1:
        own, count = own + own, count + 1
    elif are_keys:
        key_end = 8 + int.from_bytes(own[:8], "little")
        own = own[:key_end] + _gguf_value(rng)
    else:
        other = rng.choice(records)
        own = own[: 8 + own[0]] + content[other[0] : other[1]][8 + content[other[0]] :]
    head = content[:begin] + own + content[end : records[-1][1]]
    rest = content[records[-1][1] :] if data_begin is None else bytes(-len(head) % 32) + content[data_begin:]
    head = head[:place] + (count & (1 << 64) - 1).to_bytes(8, "little") + head[place + 8 :]
    return head + rest


def _gguf_value(rng: random.Random) -> bytes:
    kind = rng.choice((0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12))
    if kind == 8:
        text = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
        return struct.pack("<IQ", 8, len(text)) + text
    if kind == 9:
        inner = rng.choice((0, 4, 5, 6, 7, 8, 9, 12))
        count = rng.choice((0, 1, 2, 10))
        if inner in (8, 9):
            return struct.pack("<IIQ", 9, inner, count) + struct.pack("<Q", 1) * 2 * count
        return struct.pack("<IIQ", 9, inner, count) + b"".join(_number(rng, _SIZES[inner]) for _ in range(count))
    return struct.pack("<I", kind) + _number(rng, _SIZES[kind])


# Files of torch.save


def _pth(content: bytes, rng: random.Random) -> bytes:
    try:
        with zipfile.ZipFile(BytesIO(content)) as file:
            entries = {info.filename: file.read(info) for info in file.infolist()}
    except Exception:
        return _bytes(content, rng)
    pickle = next((name for name in entries if name.endswith("data.pkl")), None)
    if pickle is None or rng.random() < 0.2:
        return _zip_record(content, rng)
    entries[pickle] = _pickle(entries[pickle], rng)
    if rng.random() < 0.1:
        entries[rng.choice(TEXTS) or "x"] = b"more"
    out = BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED,) * 9 + (zipfile.ZIP_DEFLATED,))) as file:
        for name, data in entries.items():
            file.writestr(name.encode("utf-8", "replace").decode().replace("\0", "?") or "?", data)
    return out.getvalue()


def _zip_record(content: bytes, rng: random.Random) -> bytes:
    """A number within a header of an entry, of the directory, or of the end."""
    signature = rng.choice((b"PK\3\4", b"PK\1\2", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7"))
    places, at = [], content.find(signature)
    while at >= 0 and len(places) < 100:
        places.append(at)
        at = content.find(signature, at + 1)
    if not places:
        return _bytes(content, rng)
    at, wide = rng.choice(places) + rng.randrange(4, 56), rng.choice((1, 2, 2, 4, 4, 8))
    return content[:at] + _number(rng, wide) + content[at + wide :]


def _pickle(content: bytes, rng: random.Random) -> bytes:
    try:
        starts = [at for _, _, at in pickletools.genops(content)]
    except Exception:
        return _bytes(content, rng)
    parts = [content[begin:end] for begin, end in zip(starts, [*starts[1:], len(content)], strict=True)]
    at, way = rng.randrange(len(parts)), rng.randrange(6)
    if way == 0:
        del parts[at]
    elif way == 1:
        parts[at:at] = [parts[at]] * rng.choice((1, 2, 50))
    elif way == 2:
        other = rng.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif way == 3:
        parts.insert(at, rng.choice(_PIECES))
    elif way == 4 and len(parts[at]) > 1:
        wide = min(len(parts[at]) - 1, rng.choice((1, 2, 4, 8)))
        begin = rng.randrange(1, len(parts[at]) - wide + 1)
        parts[at] = parts[at][:begin] + _number(rng, wide) + parts[at][begin + wide :]
    else:
        parts[at] = rng.choice(_PIECES)
    return b"".join(parts)


def _onnx(content: bytes, rng: random.Random) -> bytes:
    try:
        return mutate_onnx.damaged(content, rng)
    except (ValueError, IndexError):
        return _bytes(content, rng)


# Texts


def _template(content: bytes, rng: random.Random) -> bytes:
    text = content.decode("utf-8", "replace")
    at = rng.choice([0, len(text), *(at + 2 for at in range(len(text)) if text[at : at + 2] in ("%}", "}}"))])
    return (text[:at] + rng.choice(TEMPLATES) + text[at:]).encode("utf-8", "replace")


def _lines(content: bytes, rng: random.Random) -> bytes:
    """For a tokenizer.model of ranks; any other has few lines and gets other bytes."""
    lines = content.split(b"\n")
    if len(lines) < 100:
        return _bytes(content, rng)
    at, way = rng.randrange(len(lines)), rng.randrange(5)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(at, rng.choice(lines))
    elif way == 2:
        lines[at] = lines[at].split(b" ")[0] + b" %d" % rng.choice(NUMBERS)
    elif way == 3:
        lines[at] = rng.choice((b"", b" ", b"YQ== 1 2", b"= 3", b"\xff 1", b"YQ== \xd9\xa3", b"YQ== 1_0", b"YQ==\t7"))
    else:
        lines[at] = (b"YWFh" * rng.choice((1, 30, 90, 1000))) + b" %d" % at
    return b"\n".join(lines)


Way = Callable[[bytes, random.Random], bytes]
_WAYS: dict[str, tuple[Way, ...]] = {
    "json": (_json,),
    "safetensors": (_safetensors,),
    "gguf": (_gguf,),
    "pth": (_pth,),
    "pt": (_pth,),
    "onnx": (_onnx,),
    "jinja": (_template,),
    "model": (_lines,),
}

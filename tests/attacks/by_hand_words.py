"""Attacks on JSON files, tokenizers and chat templates."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any

import readers
from mutate import TEMPLATES
from plants import Attack, edited, replaced
from readers import files_of

# Texts

_JSON = {
    "nothing": b"", "a list": b"[]", "deep lists": b"[" * 200_000, "deep objects": b'{"a":' * 200_000,
    "no UTF-8": b"\xff\xff{}", "nul": b"\0",
    "closed deep lists": b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "half a pair": b'{"bos_token": "\\ud800"}',
    "a number of a million digits": b'{"a": ' + b"9" * 1_000_000 + b"}", "a byte order mark": b"\xef\xbb\xbf[]",
    "UTF-16": "{}x".encode("utf-16"), "a key twice": b'{"a": 1, "b": {}, "a": 1}',
    "a key twice within": b'{"a": [{"b": 1, "b": 1}]}',
}  # fmt: skip


def json_files() -> Iterator[tuple[str, Attack]]:
    """By name."""
    places = {"hf-shards": ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                            "model.safetensors.index.json"), "bitnet-packed": ("tokenizer.json",),
              "meta-shards": ("params.json",), "gpu": ("config.json",),
              "onnx-genai": ("genai_config.json",)}  # fmt: skip
    for seed, files in places.items():
        for file in files:
            for name, content in _JSON.items():
                harmless = name in ("half a pair", "closed deep lists")
                yield f"{file} is {name}", Attack(seed, replaced(file, content), readers.everything, harmless)
            yield f"{file} of a gigabyte", Attack(seed, partial(_sparse, file), readers.everything)
    keys = ("bos_token", "eos_token", "chat_template", "add_bos_token", "added_tokens_decoder", "pad_token")
    for key in keys:
        for value in (1, True, [], {}, [[]], {"content": 1}, "\ud800", "\0", "x" * 100_000, [{"name": 1,
        "template": "x"}], [{}], [None],
                      {"content": "\x1b[2J\n"}, "", [{"name": "x" * 5000, "template": "{{"}], [{"name": [],
                      "template": ""}]):  # fmt: skip
            plant = edited("tokenizer_config.json", lambda c, k=key, v=value: c.update({k: v}))
            yield f"{key} = {value!r:.30}", Attack("bitnet-packed", plant, readers.words, harmless=True)


def _sparse(name: str, root: Path) -> None:
    with (root / name).open("ab") as file:
        file.truncate(1 << 30)


def words() -> Iterator[tuple[str, Attack]]:
    """By name."""

    def changed(name: str, change: Callable[[Any], object], examine: Any = readers.run) -> tuple[str, Attack]:
        return name, Attack("bitnet-packed", edited("tokenizer.json", change), examine, harmless=True)

    for regex in (
        "(a+)+$",
        "(?:a|a)*b",
        "(",
        "\\",
        "[",
        "(?<=a+)b",
        "a{1000000}",
        "(a{1000}){1000}",
        "\\p{X}",
        "(?R)",
        "",
        "(.*)*(.*)*x",
        "\\K",
    ):
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        yield changed(f"the pattern {regex!r}", lambda t, s=split: t.update(pre_tokenizer=s), _long_text)
        replace = {"type": "Replace", "pattern": {"Regex": regex}, "content": "aa"}
        yield changed(f"a normaliser of {regex!r}", lambda t, r=replace: t.update(normalizer=r), _long_text)
    grows = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40}
    yield changed("a normaliser that doubles 40 times", lambda t: t.update(normalizer=grows), _long_text)
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for key, steps in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        often = {"type": "Sequence", steps: [letters] * 40}
        yield changed(f"bytes as letters 40 times in the {key}", lambda t, k=key, o=often: t.update({k: o}), _long_text)
    nothing = {"type": "Precompiled", "precompiled_charsmap": b64encode(pack("<I1024x", 1024)).decode()}
    behind = {"type": "Sequence", "normalizers": [nothing, *[letters] * 40]}
    yield changed("bytes as letters 40 times behind no texts", lambda t: t.update(normalizer=behind), _long_text)
    text, token = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}
    for name, pieces in (("10 million tokens", [*[token] * 1000, text]), ("10,000 texts", [text] * 10_000)):
        around = {"type": "TemplateProcessing", "single": pieces, "pair": pieces,
                  "special_tokens": {"x": {"id": "x", "ids": [0] * 10_000, "tokens": ["x"] * 10_000}}}  # fmt: skip
        yield changed(f"{name} around a text", lambda t, a=around: t.update(post_processor=a), _long_text)
    for key in (
        "model",
        "pre_tokenizer",
        "decoder",
        "normalizer",
        "post_processor",
        "added_tokens",
        "version",
        "truncation",
        "padding",
    ):
        for value in (
            None,
            [],
            {},
            "x",
            1,
            {"type": "x"},
            [[]],
            [{}],
            {"type": "Sequence"},
            {"type": "Sequence", "decoders": []},
        ):
            yield changed(f"{key} = {value!r}", lambda t, k=key, v=value: t.update({k: v}))
    for number in (1 << 24, (1 << 24) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, -1, 383, 384, 1_000_000):
        yield changed(
            f"a token has the id {number}", lambda t, n=number: t["model"]["vocab"].update({"Hello": n, "H": n})
        )
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
            padding={"strategy": {"Fixed": s}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "x"},
        ))  # fmt: skip
    for line in (
        "",
        "YQ== 5",
        "YQ== 99999999999999999999",
        "YQ== -1",
        "= 1",
        "YQ==",
        "YQ== 1 2",
        "\xff 1",
        "Y" * 4_000_000 + " 543",
    ):
        content = files_of("meta-shards")["tokenizer.model"] + line.encode("latin-1") + b"\n"
        yield f"a rank {line[:20]!r}", Attack("meta-shards", replaced("tokenizer.model", content), readers.words)
    for data in (b"\x0a\xff\xff\xff\xff\x0f", b"\x0a" + b"\xff" * 9 + b"\1", b"\x0a\0" * 600_000, b"\x08\1", b"\x0b",
    b"\xff" * 100, b"\x0a\2\x0a\xff",
                 b"\x0a\3\x0a\1\xff", b"\x0d\0\0\xc0\x7f", b"\0" * 1000):  # fmt: skip
        yield f"a message {data[:12]!r}", Attack("hf-shards", replaced("tokenizer.model", data), readers.words)


def _long_text(root: Path) -> None:
    """Have it cut a text that costs patterns the most."""
    from bitnet_inference.text.tokenizer import Tokenizer

    Tokenizer.from_folder(root).encode("a" * 40 + "é!")


def templates() -> Iterator[tuple[str, Attack]]:
    """By name."""
    more = (
        "{% for i in range(10**6) %}{% for j in range(10**6) %}{% endfor %}{% endfor %}", "{{ range(10**12) | list }}",
        "x" * 300_000,
        "{{ ''.join(['a' * 10**7] * 10**3) }}",
        "{% set x = [] %}{% for i in range(99999) %}{% set x = x + [x] %}{% endfor %}{{ x }}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{{ " + "1+" * 20_000 + "1 }}",
        "{% if 1 %}" * 2000 + "{% endif %}" * 2000, "{{ messages[0].content.format.__globals__ }}",
        "{{ ('%c' * 10**8) % 1 }}",
        "{{ 'a' | replace('', 'a' * 10**6) | replace('', 'a' * 10**6) }}", "{{ 10 ** 10 ** 10 }}", "{{ 1 << 10**9 }}",
        "{{ 'é' * 2 ** 40 }}",
        "{{ 'x' | indent(10**9) }}", "{{ messages | tojson | urlize(10**9) }}", "{{ '\\ud800' }}",
        "{{ dict(a=1).items() | list * 10**9 }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{{ cycler.__init__.__globals__.os.system('ls') }}",
        "{{ ''.__class__ }}",
        "{{ self.__init__.__globals__ }}", "{{ messages.append(1) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a'.encode().fromhex('00') }}", "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!' | wordwrap(1) }}",
        "{{ '9' * 10**6 | int }}", "{{ ('9' * 100000) | int }}",
        "{{ 1e308 * 10 }}", "{{ messages | xmlattr }}", "{{ joiner('x')() * 10**9 }}",
        "{% raw %}{% endraw %}{{ 'a' | center(2**62) }}",
    )  # fmt: skip
    for number, source in enumerate((*TEMPLATES, *more)):
        name = f"template {number} {source[:50]!r}"
        yield name, Attack("bitnet-packed", replaced("chat_template.jinja", source), readers.words, harmless=True)

"""Our own file: what stands in it, what comes back, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bitnet_inference import convert
from bitnet_inference.cli.commands import app
from bitnet_inference.errors import BitNetError, FormatError, InvalidParams, VersionError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import (
    Dense,
    Experts,
    LocalLayers,
    ModelConfig,
    RopeScaling,
    Ternary,
    expected_shapes,
)
from bitnet_inference.formats.packed_config import read_config, write_config
from bitnet_inference.formats.packed_writer import write_packed
from bitnet_inference.model_folder import find_model, load_text_files, load_tokenizer
from bitnet_inference.ternary import unpack
from bitnet_inference.text.embedded import to_embedded

GOLDEN = Path(__file__).parents[1] / "golden"


def write(folder: Path, path: Path, **options: Any) -> Path:
    checkpoint = open_checkpoint(folder)
    write_packed(checkpoint, to_embedded(load_text_files(checkpoint)), path, **options)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    return write(GOLDEN / "bitnet-packed", tmp_path_factory.mktemp("sound") / "model.safetensors").read_bytes()


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)  # the data begin at a multiple of 64
    return len(text).to_bytes(8, "little") + text + data


def problems(tmp_path: Path, header: dict[str, Any], data: bytes) -> str:
    """What is said about a file with this header, by opening or by checking it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(joined(header, data))
    try:
        return "\n".join(open_checkpoint(path).check())
    except FormatError as error:
        return str(error)


def test_what_stands_in_a_file(sound):
    header, data = split(sound)
    said = header.pop("__metadata__")
    assert said["format"] == "bitnet-inference"
    assert said["version"] == "2"
    assert said["source"] == "bitnet-packed"
    assert said["source_format"] == "a Hugging Face folder"
    assert said["compressed"] == "{}"
    assert all(isinstance(value, str) for value in said.values())
    assert json.loads(said["sha256"]).keys() == header.keys()
    assert (len(sound) - len(data)) % 64 == 0
    begins = {name: entry["data_offsets"][0] for name, entry in header.items()}
    assert not [name for name, begin in begins.items() if begin % 64 and not name.startswith("padding.")]
    begin, end = header["file.tokenizer.json"]["data_offsets"]
    assert data[begin:end] == (GOLDEN / "bitnet-packed" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    "name", ["bitnet-packed", "llama3-bf16", "llama-f16", "llama-f32", "llama-rms-norm", "qwen2-bitlinear", "default"]
)
def test_everything_comes_back(tmp_path, name, compressed):
    folder = find_model("default") if name == "default" else GOLDEN / name
    written = write(folder, tmp_path / "a.safetensors", compressed=compressed)
    original, packed = open_checkpoint(folder), open_checkpoint(written)
    assert packed.check() == list(packed.verify()) == []
    assert packed.config == original.config
    for each, shape in expected_shapes(original.config):
        if len(shape) == 1:
            assert np.array_equal(packed.vector(each), original.vector(each))
            continue
        found, expected = packed.matrix(each), original.matrix(each)
        if isinstance(expected, Dense):
            assert isinstance(found, Dense)
            assert found.dtype == expected.dtype
            assert found.data.tobytes() == expected.data.tobytes()
        else:
            assert isinstance(found, Ternary)
            codes = (unpack(each.data, each.layout, each.shape) for each in (found, expected))
            assert np.array_equal(*codes)
            assert np.float32(found.scale) == np.float32(expected.scale)
    texts, others = load_text_files(original), load_text_files(packed)
    assert vars(others) == vars(texts) | {"path": packed.path}
    assert load_tokenizer(packed).encode("a b") == load_tokenizer(original).encode("a b")


def test_written_twice_it_has_the_same_bytes(tmp_path, sound):
    again = write(GOLDEN / "bitnet-packed", tmp_path / "b.safetensors")
    assert again.read_bytes() == sound
    write_packed(open_checkpoint(again), to_embedded(load_text_files(open_checkpoint(again))), again)  # onto itself
    assert split(again.read_bytes())[1] == split(sound)[1]


def scaling(kind: str, factors: tuple[float, ...] = ()) -> RopeScaling:
    return RopeScaling(
        kind=kind, factor=8.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_positions=77, factors=factors
    )


@pytest.mark.parametrize("rope", [scaling("linear"), scaling("llama3"), scaling("factors", (1.5,)), None])
def test_every_field_of_a_configuration_comes_back(rope):
    config = ModelConfig(
        family="some", vocab_size=2, hidden_size=3, intermediate_size=5, num_layers=7, num_heads=6, num_kv_heads=3,
        head_dim=4, max_positions=8, activation="silu", norm_eps=0.1, rope_theta=0.3, rope_scaling=rope,
        tie_embeddings=True, sub_norms=True, linear_norm=True, linear_norm_eps=1e-7, post_norms=True, head_norms=True,
        qkv_bias=True, experts=Experts(count=3, used=2, renormalized=False), rotary_dim=2, plain_global=True,
        embed_scale=2.5, attention_scale=0.7, local=LocalLayers(layers=(0, 2), window=9, rope_theta=0.4),
        pooling="mean", bos_id=1, eos_ids=(0, 1),
    )  # fmt: skip
    defaults = [field.name for field in fields(config) if getattr(config, field.name) == field.default]
    assert defaults == ([] if rope else ["rope_scaling"]), "a field that this test does not know"
    assert read_config(write_config(config), Path("x")) == config
    assert read_config(write_config(replace(config, bos_id=None, eos_ids=())), Path("x")).bos_id is None


def test_a_model_without_biases_says_nothing_of_them(tmp_path):
    """So that its file is the one that it was before they were known, and older programs read it."""
    for name, said in (("bitnet-packed", {}), ("qwen2-bf16", {"qkv_bias": True})):
        header, _ = split(write(GOLDEN / name, tmp_path / f"{name}.safetensors").read_bytes())
        config = json.loads(header["__metadata__"]["config"])
        assert {key: value for key, value in config.items() if key == "qkv_bias"} == said


@pytest.mark.parametrize("value", [1, "true", [True]])
def test_a_flag_of_biases_that_is_none(tmp_path, sound, value):
    header, data = split(sound)
    config = json.loads(header["__metadata__"]["config"]) | {"qkv_bias": value}
    header["__metadata__"]["config"] = json.dumps(config)
    assert "__metadata__.config" in problems(tmp_path, header, data)


def test_biases_of_a_packed_file_are_there_or_named(tmp_path):
    header, data = split(write(GOLDEN / "qwen2-bf16", tmp_path / "a.safetensors").read_bytes())
    other = json.loads(json.dumps(header).replace('"layers.1.k.bias"', '"layers.1.o.bias"'))
    found = problems(tmp_path, other, data)
    assert "layers.1.k.bias: is missing" in found and "layers.1.o.bias': no tensor of this model" in found
    other = json.loads(json.dumps(header))
    other["__metadata__"]["config"] = other["__metadata__"]["config"].replace('"qkv_bias": true', '"qkv_bias": false')
    assert "layers.0.q.bias': no tensor of this model" in problems(tmp_path, other, data)


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    checkpoint.vector = lambda name: (_ for _ in ()).throw(FormatError(path, name, "broken"))
    with pytest.raises(FormatError, match="broken"):
        write_packed(checkpoint, {}, path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("a.safetensors", b"before")]
    with pytest.raises(InvalidParams, match="such a name"):
        write_packed(checkpoint, {}, tmp_path / "a.bin")


def test_a_file_of_version_1_opens_and_becomes_one_of_the_newest(tmp_path):
    """The file was written when 1 was the newest version."""
    path = Path(__file__).with_name("packed_v1.safetensors")
    older = open_checkpoint(path)
    assert older.check() == list(older.verify()) == []
    assert older.notes()[:2] == [
        "packed file, version 1",
        "version 2 is the newest: `bitnet convert` writes it, and loses nothing",
    ]
    convert(path, tmp_path / "plain.safetensors")
    convert(path, tmp_path / "compressed.safetensors", compressed=True)
    assert open_checkpoint(tmp_path / "plain.safetensors").notes()[:2] == [
        "packed file, version 2",
        "source: 'bitnet-packed'",
    ]
    data = [split(file.read_bytes())[0] for file in (path, tmp_path / "plain.safetensors")]
    hashes = [json.loads(header["__metadata__"]["sha256"]) for header in data]
    # The screen of so small a head is not made anew.
    assert {name: each for name, each in hashes[0].items() if "screen" not in name and "padding" not in name} == {
        name: each for name, each in hashes[1].items() if "padding" not in name
    }
    for name in ("plain", "compressed"):
        newer = open_checkpoint(tmp_path / f"{name}.safetensors")
        assert newer.config == older.config
        assert load_tokenizer(newer).encode("a b") == load_tokenizer(older).encode("a b")
        for each, shape in expected_shapes(older.config):
            if len(shape) == 2 and older.is_ternary(each):
                matrices = (newer.matrix(each), older.matrix(each))
                assert np.array_equal(*(unpack(matrix.data, matrix.layout, matrix.shape) for matrix in matrices))


def test_newer_versions_are_refused(tmp_path, sound):
    header, data = split(sound)
    header["__metadata__"]["version"] = "3"
    with pytest.raises(VersionError, match="version 3 found, at most 2"):
        problems(tmp_path, header, data)


@pytest.mark.parametrize("version", [None, 1, "", "0", "-1", "1.0", "\u0661", "9" * 50])
def test_versions_that_are_none(tmp_path, sound, version):
    header, data = split(sound)
    header["__metadata__"]["version"] = version
    assert "is no version" in problems(tmp_path, header, data)


CONFIG = {
    "hidden_size": 1 << 40, "num_layers": -1, "num_heads": 3, "head_dim": 33, "activation": "tanh", "norm_eps": 0,
    "rope_theta": float("inf"), "tie_embeddings": 1, "family": "a\nb", "eos_ids": [1 << 40], "bos_id": [1, 2],
    "rope_scaling": {}, "vocab_size": True, "max_positions": 0.5, "more": 1,
}  # fmt: skip


@pytest.mark.parametrize("key", CONFIG)
def test_impossible_configurations(tmp_path, sound, key):
    header, data = split(sound)
    config = json.loads(header["__metadata__"]["config"]) | {key: CONFIG[key]}
    header["__metadata__"]["config"] = json.dumps(config)
    assert "__metadata__.config" in problems(tmp_path, header, data)


@pytest.mark.parametrize("text", ["", "[]", "{}", "\ud800", "[" * 100_000, None])
def test_configurations_that_are_none(tmp_path, sound, text):
    header, data = split(sound)
    header["__metadata__"]["config"] = text
    assert "__metadata__.config" in problems(tmp_path, header, data)


def renamed(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("norm", "norms", "norm: is missing"),
        ("layers.0.q.scale", "layers.0.q.scale64", "layers.0.q.scale64: is F32 [], not F32"),
        ("layers.0.q.u2", "layers.0.q.u3", "layers.0.q: is missing"),
        ("embed", "embed.u2", "embed: is missing"),
        ("layers.0.up.u2", "padding", "layers.0.up: is missing"),
    ],
)
def test_tensors_under_wrong_names(tmp_path, sound, old, new, says):
    header, data = split(sound)
    renamed(header, old, new)
    found = problems(tmp_path, header, data)
    assert says in found
    assert f"{new!r}: no tensor of this model" in found or new in says


def test_a_screen_of_another_head(tmp_path, sound):
    header, data = split(sound)
    header["screen.low"] = {"dtype": "U8", "shape": [64], "data_offsets": [len(data), len(data) + 64]}
    found = problems(tmp_path, header, data + bytes(64))
    assert "screen.high: is missing" in found
    assert "screen.low: is U8 [64], not U8" in found


def test_scales_and_norms_that_are_no_numbers(tmp_path, sound):
    header, data = split(sound)
    for name in ("layers.0.q.scale", "layers.1.mlp_norm"):
        begin = header[name]["data_offsets"][0]
        data = data[:begin] + np.float32(np.nan).tobytes() + data[begin + 4 :]
    found = problems(tmp_path, header, data)
    assert "layers.0.q.scale: holds what is NaN" in found
    assert "layers.1.mlp_norm: holds what is NaN" in found


def test_a_code_that_is_none_is_told_where_it_is_read(tmp_path, sound):
    header, data = split(sound)
    begin = header["layers.0.q.u2"]["data_offsets"][0]
    path = tmp_path / "model.safetensors"
    path.write_bytes(joined(header, data[:begin] + b"\xff" + data[begin + 1 :]))
    for name in ("x.gguf", "x.onnx"):
        with pytest.raises(FormatError, match=r"layers\.0\.q: row 0, column 0 holds the 2-bit code 3.*download"):
            convert(path, tmp_path / name)


def test_tensors_at_odd_places(tmp_path, sound):
    header, data = split(sound)
    path = tmp_path / "model.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(
        (len(text) + -len(text) % 64 + 1).to_bytes(8, "little") + text + b" " * (-len(text) % 64 + 1) + data
    )
    assert "no multiple of 64" in open_checkpoint(path).check()[0]


TEXT = {"named": {}, "add_bos": None, "add_eos": False, "templates": {}, "generation": {}}
WRONG = [
    {"named": []},
    {"named": {"bos_token": 1}},
    {"add_eos": 1},
    {"templates": {"a": None}},
    {"generation": 2},
    {"x": 1},
]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, *(json.dumps(TEXT | wrong).encode() for wrong in WRONG)],
)
def test_broken_texts(tmp_path, content):
    path = tmp_path / "model.safetensors"
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    write_packed(checkpoint, to_embedded(load_text_files(checkpoint)) | {"text.json": content}, path)
    with pytest.raises(FormatError, match="text"):
        load_tokenizer(open_checkpoint(path))
    write_packed(checkpoint, {}, path)
    with pytest.raises(FormatError, match="is missing"):
        load_tokenizer(open_checkpoint(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_change_is_noticed_or_refused(tmp_path, sound, data):
    """Cut, change or insert bytes of the header or behind it: an error of ours, or a sound file."""
    start = data.draw(st.integers(0, 8 + int.from_bytes(sound[:8], "little") + 500))
    removed, insert = data.draw(st.integers(0, 4)), data.draw(st.binary(max_size=4))
    path = tmp_path / "model.safetensors"
    path.write_bytes(sound[:start] + insert + sound[start + removed :])
    try:
        checkpoint = open_checkpoint(path)
        list(checkpoint.verify())
        if not checkpoint.check():
            for name, shape in expected_shapes(checkpoint.config):
                checkpoint.vector(name) if len(shape) == 1 else checkpoint.matrix(name)
            load_tokenizer(checkpoint)
    except BitNetError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("length", [0, 7, 8, 1000, -1])
def test_truncated(tmp_path, sound, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(sound[:length])
    with pytest.raises(FormatError):
        open_checkpoint(path)


def test_the_command_converts_there_and_back(tmp_path):
    packed, there, back = tmp_path / "a.safetensors", tmp_path / "a.gguf", tmp_path / "b.gguf"
    written = CliRunner().invoke(app, ["convert", "default", str(packed)])
    assert written.exit_code == 0
    assert re.fullmatch(rf"{packed}: 3\.1 MB, opens in [0-9.]+ s\n", written.stdout)
    convert("default", there)
    convert(packed, back)
    one, other = map(open_checkpoint, (there, back))
    for name, shape in expected_shapes(one.config):
        if len(shape) == 2:
            assert one.matrix(name).data.tobytes() == other.matrix(name).data.tobytes()
    refused = CliRunner().invoke(app, ["convert", "default", str(packed), "--type", "f16"])
    assert refused.exit_code == 2
    assert "leave the type f16 out" in refused.stderr
    refused = CliRunner().invoke(app, ["convert", "default", str(there), "--compress"])
    assert refused.exit_code == 2
    assert "leave --compress out" in refused.stderr


def test_inspect_verifies(tmp_path, sound):
    path = tmp_path / "model.safetensors"
    path.write_bytes(sound)
    assert CliRunner().invoke(app, ["inspect", str(path), "--verify"]).exit_code == 0
    path.write_bytes(sound[:-1] + b"\x01")
    assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 0
    changed = CliRunner().invoke(app, ["inspect", str(path), "--verify"])
    assert changed.exit_code == 2
    assert "copy the file again" in changed.stderr
    place = sound.index(b"rope_theta") + 15
    path.write_bytes(sound[:place] + b"2" + sound[place + 1 :])
    changed = CliRunner().invoke(app, ["inspect", str(path), "--verify"])
    assert changed.exit_code == 2
    assert "__metadata__.config" in changed.stderr
    other = CliRunner().invoke(app, ["inspect", str(GOLDEN / "bitnet-packed"), "--verify"])
    assert "only packed files" in other.stderr

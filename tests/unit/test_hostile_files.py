"""Broken and lying files end in one line with the file's name, in well under a second and without eating memory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import modest
from tiny_folders import OFFLINE, Folder, file_bytes, floats_of, folder, safetensors_bytes, sharded

from bitnet_inference.errors import FormatError, ModelError, NotFound, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.safetensors_files import read_header

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture(autouse=True)
def bounded():
    with modest(max_bytes=200e6):
        yield


def refused(path: Path, *parts: str) -> str:
    """The message with which a folder or file is refused."""
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    message.encode("ascii")
    for part in parts:
        assert part in message
    return message


def header_refused(tmp_path, header: object, *parts: str, data: bytes = bytes(8)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(file_bytes(text, data))
    refused(tmp_path, "model.safetensors", *parts)


# The safetensors file


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1])
def test_truncated(tmp_path, length):
    folder(quantization=OFFLINE).write(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refused(tmp_path, "model.safetensors")


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 30, 100])
def test_a_header_longer_than_the_file(tmp_path, length):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    refused(tmp_path, "model.safetensors", "header")


def test_a_huge_header_that_is_there(tmp_path):
    folder(quantization=OFFLINE).write(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30) + b"{")
        file.truncate((1 << 30) + 8)
    refused(tmp_path, "header", "1073741824 bytes")


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"null", b"{", b"not json", b'{"a": 1}', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_a_header_that_is_no_object(tmp_path, header):
    header_refused(tmp_path, header)


def test_a_number_of_a_million_digits(tmp_path):
    header_refused(tmp_path, b'{"a": {"dtype": "F32", "data_offsets": [0, 8], "shape": [' + b"9" * 1_000_000 + b"]}}")


def test_doubled_names(tmp_path):
    entry = json.dumps(ENTRY)
    header_refused(tmp_path, f'{{"a": {entry}, "a": {entry}}}'.encode(), "'a' stands there twice")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F33"},
        {"dtype": "F4"},
        {"dtype": None},
        {"dtype": ["F32"]},
        {"shape": [-2]},
        {"shape": [True, 2]},
        {"shape": [2.0]},
        {"shape": "2"},
        {"shape": None},
        {"shape": [1] * 100_002 + [2]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [1 << 200]},
        {"shape": [3]},
        {"shape": [0]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [0]},
        {"data_offsets": [0, 4, 8]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": [1 << 70, (1 << 70) + 8]},
        {"data_offsets": [8, 16]},
        {"more": 1},
    ],
)
def test_lying_entries(tmp_path, entry):
    header_refused(tmp_path, {"a\nb\ud800": {**ENTRY, **entry}})


@pytest.mark.parametrize("entry", [None, [], "F32", {}, {"dtype": "F32", "shape": [2]}])
def test_entries_that_are_none(tmp_path, entry):
    header_refused(tmp_path, {"a": entry})


def test_overlap(tmp_path):
    header_refused(tmp_path, {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, "overlaps", data=bytes(12))


def test_two_names_for_the_same_bytes(tmp_path):
    header_refused(tmp_path, {"a": ENTRY, "b": ENTRY}, "overlaps")


def test_a_gap(tmp_path):
    header_refused(tmp_path, {"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, "a gap before", data=bytes(20))


def test_bytes_after_the_last_tensor(tmp_path):
    header_refused(tmp_path, {"a": ENTRY}, "the tensors end at byte", data=bytes(9))


def test_metadata_and_empty_tensors_are_sound(tmp_path):
    empty = {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]}
    header = {"__metadata__": {"format": "pt"}, "a": ENTRY, "b": empty}
    (tmp_path / "x").write_bytes(file_bytes(json.dumps(header).encode(), bytes(8)))
    assert {name: tensor.array().shape for name, tensor in read_header(tmp_path / "x")} == {"a": (2,), "b": (0, 5)}


SOUND = safetensors_bytes({"a": floats_of((2, 3)), "b": np.zeros(5, np.uint8)})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, len(SOUND) - 1), st.binary(min_size=0, max_size=4), st.integers(0, 4))
def test_any_change_of_a_file_is_read_or_refused(tmp_path, start, insert, removed):
    path = tmp_path / "x"
    path.write_bytes(SOUND[:start] + insert + SOUND[start + removed :])
    try:
        for _, tensor in read_header(path):
            tensor.array()
    except FormatError as error:
        assert str(path) in str(error)


# The folder


def test_nothing_there(tmp_path):
    with pytest.raises(NotFound, match="there is no such file"):
        open_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("name", ["\0", "a" * 5000])
def test_impossible_paths(name):
    with pytest.raises(ModelError):
        open_checkpoint(name)


def test_an_empty_folder(tmp_path):
    refused(tmp_path, "holds no model")


def test_other_kinds_of_files_are_named(tmp_path):
    (tmp_path / "m.pt").write_bytes(b"PK\3\4....")
    with pytest.raises(Unsupported, match="a PyTorch file is not supported: use a Hugging Face folder"):
        open_checkpoint(tmp_path / "m.pt")


def test_folders_of_onnx_without_its_file(tmp_path):
    (tmp_path / "genai_config.json").write_text("{}")
    refused(tmp_path, "holds none of model.onnx")
    (tmp_path / "genai_config.json").unlink()
    (tmp_path / "model_q4.onnx").write_bytes(b"\x08\x07")
    refused(tmp_path, "give one of its files, such as model_q4.onnx")


def test_files_of_no_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "no model file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_a_model_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model")
    refused(tmp_path / "model", "neither a file nor a folder")


def test_a_safetensors_file_points_to_its_folder(tmp_path):
    refused(folder(quantization=OFFLINE).write(tmp_path) / "model.safetensors", "give the folder")


def test_pickles_are_not_read(tmp_path):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(Unsupported, match="pickles"):
        open_checkpoint(tmp_path)


def test_no_weights(tmp_path):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "neither model.safetensors nor")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nowhere_is_named(tmp_path, name):
    folder(quantization=OFFLINE).write(tmp_path)
    for file in ("model.safetensors", name):
        (tmp_path / file).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("nowhere")
    refused(tmp_path, name, "cannot be read (No such file")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_folder_in_place_of_a_file(tmp_path, name):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    refused(tmp_path, name, "not a regular file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_pipe_does_not_hang(tmp_path, name):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    refused(tmp_path, name, "not a regular file")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"nul", b"[1]", b'"x"', b"\xff\xff", b"[" * 100_000, b'{"a":' * 100_000, b'{"a": 1, "a": 2}']
)
def test_files_that_are_no_json_object(tmp_path, name, content):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, name)


def test_a_config_of_a_gigabyte(tmp_path):
    folder(quantization=OFFLINE).write(tmp_path)
    os.truncate(tmp_path / "config.json", 1 << 30)
    refused(tmp_path, "config.json", "larger than")


def test_a_config_that_lies_about_sizes_allocates_nothing(tmp_path):
    model = folder(quantization=OFFLINE)
    sizes = {"hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 512, "vocab_size": 1 << 21}
    model.config |= {**sizes, "num_attention_heads": 512, "num_key_value_heads": 512}
    checkpoint = open_checkpoint(model.write(tmp_path))
    assert checkpoint.check()
    with pytest.raises(FormatError):
        checkpoint.matrix("layers.0.q")


# Shards


def shards(tmp_path) -> dict[str, object]:
    return sharded(tmp_path, folder(quantization=OFFLINE))


def rewrite(tmp_path, weight_map: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_missing_shard(tmp_path):
    shards(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    refused(tmp_path, "model-1.safetensors", "download")


@pytest.mark.parametrize("weight_map", [None, {}, [], "model-0.safetensors", {"a": 1}, {"a": None}, {"a": ["b"]}])
def test_an_index_that_maps_nothing(tmp_path, weight_map):
    shards(tmp_path)
    rewrite(tmp_path, weight_map)
    refused(tmp_path, "index.json", "weight_map")


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/../../secret", "sub/x", "..", ".", "", "a\\b", "a\0b"])
def test_shards_outside_the_folder(tmp_path, file):
    inner = tmp_path / "inner"
    weight_map = sharded(inner, folder(quantization=OFFLINE))["weight_map"]
    (tmp_path / "secret").write_bytes(SOUND)
    rewrite(inner, {**weight_map, "a": file})
    refused(inner, "plain name")


def test_a_tensor_that_its_shard_does_not_hold(tmp_path):
    weight_map = shards(tmp_path)["weight_map"]
    rewrite(tmp_path, {**weight_map, "more": "model-0.safetensors"})
    refused(tmp_path, "more", "does not hold")


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path):
    weight_map = shards(tmp_path)["weight_map"]
    rewrite(tmp_path, {**weight_map, "model.embed_tokens.weight": "model-1.safetensors"})
    refused(tmp_path, "model.embed_tokens.weight", "does not hold")


def test_a_tensor_in_two_shards(tmp_path):
    shards(tmp_path)
    doubled = Folder({}, {"model.embed_tokens.weight": floats_of((1,)), "model.norm.weight": floats_of((8,))})
    (tmp_path / "model-1.safetensors").write_bytes(safetensors_bytes(doubled.tensors))
    refused(tmp_path, "is in model-0.safetensors too")


# Links


def linked(tmp_path, target: Path) -> Path:
    """A sound folder whose weights are a link to `target`, where they really lie."""
    folder(quantization=OFFLINE).write(tmp_path)
    target.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "model.safetensors").rename(target)
    (tmp_path / "model.safetensors").symlink_to(target)
    return tmp_path


def test_a_snapshot_of_the_cache_links_to_blobs(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    linked(snapshot, tmp_path / "models--a--b" / "blobs" / "4567")
    (snapshot / "config.json").rename(tmp_path / "models--a--b" / "blobs" / "89")
    (snapshot / "config.json").symlink_to("../../blobs/89")
    assert open_checkpoint(snapshot).check() == []


def test_a_link_within_the_folder(tmp_path):
    assert open_checkpoint(linked(tmp_path, tmp_path / "weights" / "1")).check() == []


def test_a_link_to_the_folder_itself(tmp_path):
    (tmp_path / "a").mkdir()
    folder(quantization=OFFLINE).write(tmp_path / "a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert open_checkpoint(tmp_path / "b").check() == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.gguf", "x.onnx"])
def test_a_pointer_in_place_of_a_file(tmp_path, name):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    refused(tmp_path / name if name.startswith("x") else tmp_path, name, "a pointer of Git LFS", "git lfs pull")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_the_folder(tmp_path, name):
    inner = tmp_path / "inner"
    inner.mkdir()
    folder(quantization=OFFLINE).write(inner)
    (inner / name).rename(tmp_path / "elsewhere")
    (inner / name).symlink_to("../elsewhere")
    refused(inner, name, "leads out of the folder")


def test_a_snapshot_that_links_beside_the_blobs(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    refused(linked(snapshot, tmp_path / "models--a--b" / "blobs-2" / "4567"), "leads out of the folder")


@pytest.mark.parametrize("target", ["model.safetensors", "gone"])
def test_a_link_that_leads_nowhere(tmp_path, target):
    folder(quantization=OFFLINE).write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(target)
    refused(tmp_path, "model.safetensors")

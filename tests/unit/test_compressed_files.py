"""Compressed tensors of our own file: what they save; hostile ones end in one line, quickly, in little memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import modest
from typer.testing import CliRunner

from bitnet_inference import convert
from bitnet_inference.cli.commands import app
from bitnet_inference.errors import BitNetError, FormatError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, expected_shapes
from bitnet_inference.formats.compressed import CHUNK_BYTES, MAX_RATIO, Compressed, compress
from bitnet_inference.formats.safetensors_files import Tensor
from bitnet_inference.model_folder import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(autouse=True)
def bounded():
    with modest(max_bytes=200e6):
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "model.safetensors"
    convert(GOLDEN / "llama3-bf16", path, compressed=True)
    return path.read_bytes()


def split(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header, what its __metadata__ says of compressed tensors, and the data."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    return header, json.loads(header["__metadata__"]["compressed"]), content[end:]


def written(path: Path, header: dict[str, Any], entries: Any, data: bytes) -> Path:
    """A file with the tensors of `header`, and behind them what is left of the data."""
    header["__metadata__"]["compressed"] = json.dumps(entries)
    begin = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    if begin < len(data):
        header["padding.more"] = {"dtype": "U8", "shape": [len(data) - begin], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64 + 56)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def refused(path: Path, *parts: str) -> None:
    """Opening, checking or reading the file says so in one line, with its name."""
    with pytest.raises(FormatError) as caught:
        checkpoint = open_checkpoint(path)
        if problems := checkpoint.check():
            raise FormatError(path, "", problems[0])
        checkpoint.matrix("embed")
        load_tokenizer(checkpoint)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in (path.name, *parts)), message


def tensor_of(stored: np.ndarray, shape: tuple[int, ...], dtype: str, ends: tuple[int, ...]) -> Compressed:
    content: Any = bytes(stored)
    tensor = Tensor(Path("x"), "U8", stored.shape, 0, len(content), content)
    return Compressed("x", dtype, shape, tensor, ends)


@pytest.fixture
def unmapped(monkeypatch):
    """Bytes have no pages to give back."""
    monkeypatch.setattr(Tensor, "release", lambda self: None)


@pytest.mark.parametrize(("dtype", "name"), [(np.uint8, "U8"), (np.uint16, "BF16"), (np.float32, "F32")])
@pytest.mark.parametrize("size", [-1, 0, 1, 2 * CHUNK_BYTES])
def test_what_is_compressed_comes_back(unmapped, dtype, name, size):
    items = max(1, CHUNK_BYTES // np.dtype(dtype).itemsize + size // np.dtype(dtype).itemsize + (size == 1))
    data = np.random.default_rng(1).integers(0, 20, items).astype(dtype)
    found = compress(data)
    assert found is not None
    stored, ends = found
    assert len(ends) == -(-data.nbytes // CHUNK_BYTES)
    assert np.array_equal(tensor_of(stored, data.shape, name, ends).array(), data)


@pytest.mark.parametrize("data", [np.zeros(1 << 20, np.uint8), np.arange(100, dtype=np.uint8), np.zeros(0, np.uint8)])
def test_what_saves_too_little_or_too_much_stays_as_it_is(data):
    assert compress(data) is None


def test_noise_stays_as_it_is():
    assert compress(np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)) is None


def test_a_compressed_file_is_smaller_and_any_tool_can_list_it(tmp_path, sound):
    convert(GOLDEN / "llama3-bf16", tmp_path / "plain.safetensors")
    assert len(sound) < 0.8 * (tmp_path / "plain.safetensors").stat().st_size
    header, entries, _ = split(sound)
    assert header["embed.zst"]["dtype"] == "U8"
    assert {"embed", "file.tokenizer.json"} <= entries.keys()
    assert entries["embed"]["dtype"] == "BF16"
    assert header["embed.zst"]["data_offsets"][0] % 64 == 0


def test_ternary_matrices_are_not_compressed_but_have_fewer_bits(tmp_path):
    convert("default", tmp_path / "a.safetensors", compressed=True)
    header, entries, _ = split((tmp_path / "a.safetensors").read_bytes())
    assert header["layers.0.down.t5"]["shape"] == [8, 40, 128]
    assert not [name for name in entries if name.endswith(".t5")]


def test_everything_becomes_the_same_gguf_file(tmp_path):
    convert("default", tmp_path / "compressed.safetensors", compressed=True)
    convert(tmp_path / "compressed.safetensors", tmp_path / "plain.safetensors")
    files = [tmp_path / f"{name}.gguf" for name in ("folder", "compressed", "plain")]
    for source, file in zip(("default", *(each.with_suffix(".safetensors") for each in files[1:])), files, strict=True):
        convert(source, file)
    one, *others = map(open_checkpoint, files)
    for other in others:
        for name, shape in expected_shapes(one.config):
            read = (each.vector(name) if len(shape) == 1 else each.matrix(name).data for each in (one, other))
            assert np.array_equal(*read)


def test_damage_is_found_by_loading_and_by_verifying(tmp_path, sound):
    path = tmp_path / "model.safetensors"
    path.write_bytes(sound)
    assert CliRunner().invoke(app, ["inspect", str(path), "--verify"]).exit_code == 0
    header, _, data = split(sound)
    place = len(sound) - len(data) + sum(header["embed.zst"]["data_offsets"]) // 2
    path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
    verified = CliRunner().invoke(app, ["inspect", str(path), "--verify"])
    assert verified.exit_code == 2
    assert "embed.zst" in verified.stderr
    refused(path, "embed", "copy the file again")


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda entry: entry | {key: value}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed("shape", [1 << 20, 1 << 19]), "times as many"),
        (changed("shape", [256, 128]), "not F32"),
        (changed("shape", [0, 64]), "no dtype and shape"),
        (changed("shape", [-1, 64]), "no dtype and shape"),
        (changed("shape", "64"), "no dtype and shape"),
        (changed("shape", [True, 64]), "no dtype and shape"),
        (changed("shape", [1 << 62, 1 << 62]), "no dtype and shape"),
        (changed("dtype", "F64"), "no dtype and shape"),
        (changed("dtype", ["F32"]), "no dtype and shape"),
        (changed("ends", []), "not in frames"),
        (changed("ends", [1, 2]), "not in frames"),
        (changed("ends", [1]), "do not lie"),
        (changed("ends", [1.5]), "not in frames"),
        (changed("more", 1), "exactly dtype, shape and ends"),
        (lambda entry: None, "exactly dtype, shape and ends"),
        (lambda entry: [], "exactly dtype, shape and ends"),
    ],
)
def test_sizes_that_cannot_be(tmp_path, sound, change, says):
    header, entries, data = split(sound)
    entries["embed"] = change(entries["embed"])
    refused(written(tmp_path / "model.safetensors", header, entries, data), "embed", says)


def test_entries_without_bytes_and_bytes_without_entries(tmp_path, sound):
    header, entries, data = split(sound)
    path = written(tmp_path / "a.safetensors", header, entries | {"nothing": entries["embed"]}, data)
    refused(path, "'nothing': there is no")
    del entries["embed"]
    refused(written(tmp_path / "b.safetensors", header, entries, data), "embed: is missing")


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"a": 1, "a": 2}', "\ud800", None, 3])
def test_tables_that_are_none(tmp_path, sound, text):
    header, entries, data = split(sound)
    path = written(tmp_path / "model.safetensors", header, entries, data)
    header["__metadata__"]["compressed"] = text
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)
    refused(path, "__metadata__.compressed")


def frames(tmp_path: Path, sound: bytes, frame: bytes, name: str = "embed", shape: list[int] | None = None) -> Path:
    """The file with another frame in place of a tensor's."""
    header, entries, data = split(sound)
    old = header.pop(f"{name}.zst")
    header["padding.old"] = old
    begin = len(data)
    header[f"{name}.zst"] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [begin, begin + len(frame)]}
    entries[name]["ends"] = [len(frame)]
    entries[name]["shape"] = shape or entries[name]["shape"]
    return written(tmp_path / "model.safetensors", header, entries, data + frame)


def forged(frame: bytes, window_log: int, size: int) -> bytes:
    """The frame with a header that says this of window and content."""
    blocks = frame[zstandard.frame_header_size(frame) :]
    return frame[:4] + bytes([0xC4, (window_log - 10) << 3]) + size.to_bytes(8, "little") + blocks


def test_frames_that_are_not_what_they_should_be(tmp_path, sound):
    _, entries, _ = split(sound)
    size = 2 * int(np.prod(entries["embed"]["shape"]))
    content = np.random.default_rng(0).bytes(size)
    good = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    checkpoint = open_checkpoint(frames(tmp_path, sound, good))
    assert checkpoint.matrix("embed").data.nbytes == size
    unsized = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(content)
    for frame in (
        zstandard.ZstdCompressor(write_checksum=True).compress(content + b"x"),
        zstandard.ZstdCompressor(write_checksum=True).compress(content[1:]),
        zstandard.ZstdCompressor(write_checksum=False).compress(content),
        unsized,
        forged(good, window_log=24, size=size),
        good + b"more",
        good[:-5],
        good[:3],
        b"\x50\x2a\x4d\x18" + size.to_bytes(4, "little") + content,  # a frame to be skipped
        b"no frame at all, but some bytes" * 1000,
    ):
        refused(frames(tmp_path, sound, frame), "embed")


def test_a_frame_that_would_fill_the_memory(tmp_path, sound):
    """A header that lies about what follows, and gigabytes of zeros in few bytes."""
    bomb = zstandard.ZstdCompressor(level=1).compressobj(size=4 << 30)
    content = b"".join(bomb.compress(bytes(1 << 24)) for _ in range(4))
    refused(frames(tmp_path, sound, content + bytes(1 << 13)), "embed", "frame")
    lie = forged(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 12)), 10, 4 << 30)
    refused(frames(tmp_path, sound, lie + bytes(1 << 13)), "embed", "frame")
    zeros = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 20))
    shape = [1 << 19, 1]
    refused(frames(tmp_path, sound, zeros, shape=shape), "embed", f"more than {MAX_RATIO} times")


def test_texts_that_are_too_large_are_not_read(tmp_path, sound):
    """41 MiB of a tokenizer.json in as many bytes as the ratio allows."""
    header, entries, data = split(sound)
    size, stored = 41 << 20, (41 << 20) // MAX_RATIO
    header["padding.old"] = header.pop("file.tokenizer.json.zst")
    begin, ends = len(data), [stored - 40 + each for each in range(41)]
    entry = {"dtype": "U8", "shape": [stored], "data_offsets": [begin, begin + stored]}
    header["file.tokenizer.json.zst"] = entry
    entries["file.tokenizer.json"] = {"dtype": "U8", "shape": [size], "ends": ends}
    refused(
        written(tmp_path / "model.safetensors", header, entries, data + bytes(stored)), "larger than 41943040 bytes"
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_change_is_noticed(tmp_path, sound, data):
    """Change bytes anywhere: an error of ours, or what was written."""
    start = data.draw(st.integers(0, len(sound) - 1))
    path = tmp_path / "model.safetensors"
    path.write_bytes(sound[:start] + data.draw(st.binary(min_size=1, max_size=4)) + sound[start + 1 :])
    try:
        checkpoint = open_checkpoint(path)
        if not checkpoint.check():
            matrix = checkpoint.matrix("embed")
            assert isinstance(matrix, Dense)
            expected = open_checkpoint(GOLDEN / "llama3-bf16").matrix("embed")
            assert hashlib.sha256(matrix.data).digest() == hashlib.sha256(expected.data).digest()
    except BitNetError as error:
        assert "\n" not in str(error)

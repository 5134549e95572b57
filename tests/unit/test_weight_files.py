"""Hugging Face folders whose weights torch.save wrote: pytorch_model.bin, or shards of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from meta_samples import name, pickled, torch_bytes, torch_entries, zip_bytes

from bitnet_inference import LLM
from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.safetensors_files import open_tensors

GOLDEN = Path(__file__).parent.parent / "golden"
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


@pytest.fixture
def folder(tmp_path):
    """A dense model without its safetensors file."""
    folder = shutil.copytree(GOLDEN / "llama3-bf16", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    return folder


def weights() -> dict[str, np.ndarray]:
    return {name: tensor.array() for name, tensor in open_tensors(GOLDEN / "llama3-bf16").tensors.items()}


def write_shards(folder: Path) -> dict[str, str]:
    """Two files, and the index that says what is where."""
    tensors = list(weights().items())
    files = {
        "pytorch_model-00001-of-00002.bin": dict(tensors[:5]),
        "pytorch_model-00002-of-00002.bin": dict(tensors[5:]),
    }
    for file, held in files.items():
        (folder / file).write_bytes(torch_bytes(held))
    return {name: file for file, held in files.items() for name in held}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def logits(path: Path) -> bytes:
    with LLM.load(path, device="cpu", threads=1) as llm:
        return llm.logits(list(range(3, 40))).tobytes()


def test_one_file_and_shards_give_the_bits_of_safetensors(folder):
    expected = logits(GOLDEN / "llama3-bf16")
    (folder / SINGLE).write_bytes(torch_bytes(weights()))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.check() == []
    assert checkpoint.notes()[0] == "Hugging Face folder, files of torch.save: 1"
    assert logits(folder) == expected
    (folder / SINGLE).unlink()
    write_index(folder, write_shards(folder))
    assert open_checkpoint(folder).notes()[0] == "Hugging Face folder, files of torch.save: 2"
    assert logits(folder) == expected


def test_safetensors_count_where_both_are(folder):
    shutil.copy(GOLDEN / "llama3-bf16" / "model.safetensors", folder)
    (folder / SINGLE).write_bytes(b"PK\3\4 no torch file")
    assert open_checkpoint(folder).notes()[0] == "Hugging Face folder, safetensors files: 1"


def test_a_file_that_is_nothing_but_a_pickle_is_not_read(folder):
    (folder / SINGLE).write_bytes(b"\x80\2}q\0.")
    with pytest.raises(Unsupported, match="pickles"):
        open_checkpoint(folder)


def test_what_is_no_file_of_this_folder_is_not_opened(folder, tmp_path):
    """To open a pipe is to wait, and a link may lead to one."""
    path = folder / SINGLE
    os.mkfifo(path)
    with pytest.raises(FormatError, match="not a regular file"):
        open_checkpoint(folder)
    path.unlink()
    for target, why in (("/dev/zero", "out of the folder"), (tmp_path / "x", "out of the folder"), (SINGLE, "nowhere")):
        path.symlink_to(target)
        with pytest.raises(FormatError, match=why):
            open_checkpoint(folder)
        path.unlink()


@pytest.mark.parametrize(
    ("data", "why"), [(b"", "is empty"), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")]
)
def test_what_was_not_fetched_is_no_pickle(folder, data, why):
    (folder / SINGLE).write_bytes(data)
    with pytest.raises(FormatError, match=why):
        open_checkpoint(folder)


def test_parts_without_their_index_and_single_ones(folder):
    file = folder / min(write_shards(folder).values())
    with pytest.raises(FormatError, match=r"pytorch_model\.bin\.index\.json: is missing"):
        open_checkpoint(folder)
    with pytest.raises(FormatError, match="give the folder"):
        open_checkpoint(file)


def test_no_code_is_run(folder):
    evil = pickled(("model.norm.weight", name("os", "system") + b"(X\4\0\0\0exitt" + b"R"))
    (folder / SINGLE).write_bytes(zip_bytes(torch_entries(evil)))
    with pytest.raises(FormatError, match=r"os\.system"):
        open_checkpoint(folder)


def test_an_index_that_does_not_say_the_truth(folder):
    said = write_shards(folder)
    for wrong in (
        {"model.norm.weight": "pytorch_model-00001-of-00002.bin"},
        {"lm_head.weight": said["model.norm.weight"]},
    ):
        write_index(folder, said | wrong)
        with pytest.raises(FormatError, match="does not hold the tensor"):
            open_checkpoint(folder)
    for file in ("../x.bin", "/etc/passwd", "absent.bin"):
        write_index(folder, said | {"model.norm.weight": file})
        with pytest.raises(FormatError):
            open_checkpoint(folder)
    write_index(folder, said)
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(b"\x80\2}q\0.")
    with pytest.raises(FormatError, match=r"torch\.save"):
        open_checkpoint(folder)

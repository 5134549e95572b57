"""Core ML packages that are broken, that lie or that lead elsewhere end in one line, before Core ML sees them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import modest

from bitnet_inference.backends.coreml_library import coremltools
from bitnet_inference.conversion.coreml_files import write_coreml_package
from bitnet_inference.errors import BitNetError, FormatError, ModelError, Unsupported
from bitnet_inference.formats import coreml_program, open_checkpoint
from bitnet_inference.model_folder import load_text_files

GOLDEN = Path(__file__).parents[1] / "golden"
PROGRAM, WEIGHTS = "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"
CONFIG, MANIFEST = "Data/bitnet-inference/config.json", "Manifest.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    checkpoint = open_checkpoint(GOLDEN / "bitnet-packed")
    checkpoint.config = replace(checkpoint.config, num_layers=1)
    path = tmp_path_factory.mktemp("coreml") / "x.mlpackage"
    write_coreml_package(checkpoint, load_text_files(checkpoint), path, context=16)
    assert open_checkpoint(path).num_parameters > 10_000
    return path


@pytest.fixture
def package(tmp_path, sound) -> Path:
    """One to be changed."""
    return Path(shutil.copytree(sound, tmp_path / "x.mlpackage"))


def refused(path: Path, *parts: str, kind: type[ModelError] = FormatError) -> None:
    """It is not opened, and a line says why."""
    with modest(max_bytes=50e6), pytest.raises(kind) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    message.encode("ascii")
    for part in parts:
        assert part in message


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values))


def change_program(package: Path, change: Callable[[Any], object]) -> None:
    spec = coremltools().utils.load_spec(str(package))
    change(spec)
    (package / PROGRAM).write_bytes(spec.SerializeToString())


def block(spec: Any, name: str = "main") -> Any:
    return spec.mlProgram.functions[name].block_specializations["CoreML8"]


def blobs(spec: Any, kind: str) -> list[Any]:
    """Where "constants", and "arguments" that stand at their operation, say that their values lie."""
    operations = [each for name in ("main", "prompt") for each in block(spec, name).operations]
    if kind == "constants":
        values = [value for each in operations for value in each.attributes.values()]
    else:
        bound = [argument.arguments for each in operations for argument in each.inputs.values()]
        values = [binding.value for bindings in bound for binding in bindings]
    return [each.blobFileValue for each in values if each.blobFileValue.fileName]


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "com.apple.CoreML/../../../x", "com.apple.CoreML", "", "a\nb"])
def test_items_elsewhere(package, path):
    def lead_there(manifest: dict[str, Any]) -> None:
        next(iter(manifest["itemInfoEntries"].values()))["path"] = path

    change_json(package / MANIFEST, lead_there)
    refused(package, MANIFEST, "is not one of")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda manifest: manifest.pop("itemInfoEntries"), "is missing"),
        (lambda manifest: manifest.update(itemInfoEntries=[]), "is not an object"),
        (lambda manifest: manifest.update(itemInfoEntries={"a": 1}), "is not an object"),
        (lambda manifest: manifest.update(rootModelIdentifier="a"), "rootModelIdentifier"),
        (lambda manifest: manifest.update(rootModelIdentifier=7), "is not a string"),
    ],
)
def test_manifests(package, change, part):
    change_json(package / MANIFEST, change)
    refused(package, MANIFEST, part)


def test_packages_of_others(package):
    change_json(package / MANIFEST, lambda manifest: manifest["itemInfoEntries"].update(a={"path": "b"}))
    refused(package, "has 4 items", kind=Unsupported)
    (package / MANIFEST).write_text('{"a": 1, "a": 2}')
    refused(package, MANIFEST)
    (package / MANIFEST).unlink()
    refused(package)


@pytest.mark.parametrize("name", [PROGRAM, WEIGHTS, MANIFEST, CONFIG, "Data/bitnet-inference", "Data"])
def test_links_that_lead_out(package, tmp_path, name):
    shutil.move(package / name, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", package / name)
    refused(package, "leads out of the folder")


@pytest.mark.parametrize("name", [PROGRAM, WEIGHTS, MANIFEST, CONFIG])
def test_what_is_no_file(package, name):
    (package / name).unlink()
    refused(package)
    (package / name).mkdir()
    refused(package)


@pytest.mark.parametrize("length", [0, 1, 2, 10, 1000, 20_000])
def test_truncated(package, length):
    path = package / PROGRAM
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    refused(package, "model.mlmodel", kind=ModelError)
    path.write_bytes(whole[:-1])
    refused(package, "model.mlmodel", kind=ModelError)


@pytest.mark.parametrize("length", [0, 64, 200, -1])
def test_truncated_weights(package, length):
    path = package / WEIGHTS
    path.write_bytes(path.read_bytes()[:length])
    refused(package, "download")


@pytest.mark.parametrize("kind", ["constants", "arguments"])
@pytest.mark.parametrize("offset", [1, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_weights_that_lie_elsewhere(package, kind, offset):
    change_program(package, lambda spec: setattr(blobs(spec, kind)[-1], "offset", offset))
    refused(package, "model.mlmodel", kind=FormatError)


@pytest.mark.parametrize("name", ["@model_path/../../../weight.bin", "/etc/passwd", "@model_path/weights/other.bin"])
def test_weights_in_other_files(package, name):
    change_program(package, lambda spec: setattr(blobs(spec, "arguments")[0], "fileName", name))
    refused(package, "its values lie in", "not in @model_path/weights/weight.bin")


def test_shapes_that_their_bytes_don_t_fit(package):
    def widen(spec: Any) -> None:
        operation = next(each for each in block(spec).operations if each.outputs[0].name == "embed")
        operation.attributes["val"].type.tensorType.dimensions[0].constant.size = 1 << 31

    change_program(package, widen)
    refused(package, "needs 274877906944 bytes")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda spec: setattr(block(spec).operations[-1], "type", "while_loop"), "'while_loop' is none of those"),
        (lambda spec: setattr(block(spec).operations[-1], "type", "a\x1b[2J"), "is none of those"),
        (lambda spec: block(spec).operations[-1].blocks.add(), "is none of those"),
        (lambda spec: setattr(spec, "specificationVersion", 10), "no Core ML program of version 9"),
        (lambda spec: spec.pipeline.SetInParent(), "no Core ML program of version 9"),
    ],
)
def test_programs_of_others(package, change, part):
    change_program(package, change)
    refused(package, part, kind=Unsupported)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda spec: spec.mlProgram.functions.pop("prompt"), "is missing"),
        (lambda spec: spec.mlProgram.functions["other"].SetInParent(), "'other' is not described"),
        (lambda spec: spec.description.functions.pop(), "is not described"),
        (lambda spec: spec.description.functions[0].state.pop(), "has no values among its states"),
        (lambda spec: spec.description.functions[0].input[0].type.Clear(), "is no array"),
        (lambda spec: spec.description.functions.append(spec.description.functions[0]), "describes a function twice"),
        (lambda spec: spec.description.functions[0].input.append(spec.description.functions[0].input[0]), "twice"),
        (lambda spec: spec.description.functions[1].output.pop(0), "has no logits among its outputs"),
    ],
)
def test_functions_that_are_not_there(package, change, part):
    change_program(package, change)
    refused(package, part)


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("vocab_size", 383, "logits of main is float16 [1, 1, 384], not float16 [1, 1, 383]"),
        ("num_hidden_layers", 2, "keys of main"),
        ("head_dim", 8, "keys of main"),
        ("vocab_size", 1 << 40, "vocab_size"),
        ("head_dim", None, "head_dim: is missing"),
    ],
)
def test_another_model_s_config(package, key, value, part):
    change_json(package / CONFIG, lambda config: config.update({key: value}))
    refused(package, part)


def test_millions_of_operations(package, monkeypatch):
    monkeypatch.setattr(coreml_program, "_MAX_FIELDS", 1 << 12)
    refused(package, "more than 4096 fields")


def test_any_other_byte(package):
    """It opens, or a line says why not; no other error comes out."""
    rng, path = np.random.default_rng(3), package / PROGRAM
    whole = path.read_bytes()
    for at in rng.integers(0, len(whole), 25).tolist():
        path.write_bytes(whole[:at] + bytes([rng.integers(256)]) + whole[at + 1 :])
        try:
            open_checkpoint(package)
        except BitNetError as error:
            assert "\n" not in str(error)

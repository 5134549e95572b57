"""ONNX files that are broken, that lie or that lead elsewhere end in one line, in little time and memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_samples import FLOAT16, GOLDEN, Kind, attribute_graph, make_decoder, outside, write_genai, write_model
from scripted import modest

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import BitNetError, FormatError, KernelError, ModelError, Unsupported
from bitnet_inference.formats import open_checkpoint, protobuf
from bitnet_inference.summary import summarize

DECODER = make_decoder().SerializeToString()


@pytest.fixture(autouse=True)
def bounded():
    with modest(max_bytes=200e6):
        yield


@pytest.fixture
def model():
    """A sound decoder, to be changed."""
    return onnx.load_from_string(DECODER)


def refused(path: Path, *parts: str, kind: type[ModelError] = FormatError) -> None:
    """It is not opened, and a line says why."""
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 700
    message.encode("ascii")
    for part in parts:
        assert part in message


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def part(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


# Bytes that are no ONNX file


@pytest.mark.parametrize("length", [0, 1, 2, 10, 1000, len(DECODER) // 2, len(DECODER) - 1])
def test_truncated(tmp_path, length):
    path = tmp_path / "model.onnx"
    path.write_bytes(DECODER[:length])
    refused(path, "model.onnx")


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\x08\x0a",
        b"\x08\x0a\x3b\x3c",
        b"\x08" + b"\xff" * 20,
        b"\x08\x0a" + part(7, b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        b"\x08\x0a" + part(7, b"") * 2,
        b"\x08\x0a\x38\x01",
        b"\x08\x0a" + part(7, part(1, part(4, b"\xff\xfe"))),
        b"\x08\x0a" + part(7, part(1, part(4, b"x" * 70_000))),
        b"\x08\x0a" + part(7, part(11, part(1, b"x"))),
    ],
)
def test_no_messages(tmp_path, data):
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    refused(path, "model.onnx")


def test_a_file_of_2_gb(tmp_path):
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        file.write(b"\x08\x0a")
        file.truncate(1 << 31)
    refused(path, "2147483648 bytes")


def test_millions_of_empty_nodes(tmp_path, monkeypatch):
    """A library would make gigabytes of objects of them. The limit itself is half a second away."""
    monkeypatch.setattr(protobuf, "MAX_FIELDS", 1 << 14)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x08\x0a" + part(7, part(1, b"") * 5_000_000))
    refused(path, "more than 16384 fields")


def test_a_million_ints(tmp_path):
    path = tmp_path / "model.onnx"
    tensor = part(1, b"\x01" * 10_000_000)
    path.write_bytes(b"\x08\x0a" + part(7, part(5, tensor)))
    refused(path, "more than 8 numbers")


def test_graphs_within_graphs(tmp_path, model):
    body = helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "g", [], [])
    for _ in range(25):
        node = helper.make_node("Loop", ["a"], ["b"])
        node.attribute.append(attribute_graph(body))
        body = helper.make_graph([node], "g", [], [])
    model.graph.node.append(body.node[0])
    refused(write_model(tmp_path / "model.onnx", model), "graphs within each other")


@settings(max_examples=25, deadline=None)
@given(at=st.integers(0, len(DECODER) - 1), value=st.integers(0, 255), cut=st.none() | st.integers(0, len(DECODER)))
def test_any_byte_changed(tmp_path_factory, at, value, cut):
    path = tmp_path_factory.mktemp("any") / "model.onnx"
    data = bytearray(DECODER)
    data[at] = value
    path.write_bytes(data[:cut])
    try:
        open_checkpoint(path)
    except BitNetError as error:
        assert "\n" not in str(error)


# Tensors that lie


def table(model):
    """The tensor of the embeddings."""
    return next(tensor for tensor in model.graph.initializer if tensor.name == "embed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.dims.__setitem__(0, 1 << 40), "its shape takes"),
        (lambda t: t.dims.__setitem__(0, -1), "the shape"),
        (lambda t: t.dims.extend([1] * 8), "more than 8 numbers"),
        (lambda t: t.dims.__setitem__(0, 1 << 62), "the shape"),
        (lambda t: t.__setattr__("raw_data", t.raw_data[:-1]), "its shape takes"),
        (lambda t: t.__setattr__("raw_data", b""), "its shape takes"),
        (lambda t: t.__setattr__("data_type", TensorProto.DOUBLE), "its shape takes"),
        (lambda t: t.__setattr__("data_type", TensorProto.STRING), "the type string"),
        (lambda t: t.__setattr__("data_type", 99), "the type 99"),
        (lambda t: t.__setattr__("data_type", 0), "the type 0"),
        (lambda t: t.float_data.extend([1.0]), "twice"),
        (lambda t: t.int64_data.extend([1]), "another type"),
        (lambda t: t.__setattr__("data_location", 1), "here and elsewhere"),
        (lambda t: t.external_data.add(key="location", value="x"), "here and elsewhere"),
    ],
)
def test_lying_tensors(tmp_path, model, change, words):
    change(table(model))
    refused(write_model(tmp_path / "model.onnx", model), "initializer", words)


def test_tensors_of_attributes_and_subgraphs_are_checked_too(tmp_path, model):
    value = helper.make_tensor("c", TensorProto.FLOAT, [2], [1.0, 2.0])
    value.dims[0] = 1 << 39
    constant = helper.make_node("Constant", [], ["c"], value=value)
    branch = helper.make_graph([constant], "g", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    model.graph.node.append(node)
    refused(write_model(tmp_path / "model.onnx", model), "tensor 0 'c'", "its shape takes 549755813888 numbers")


@pytest.mark.parametrize(
    ("dtype", "values", "dims"),
    [
        (TensorProto.FLOAT, [1.0, 2.0], [2]),
        (TensorProto.INT64, [1, -(1 << 60), 3], [3]),
        (TensorProto.INT8, [1, -2, 3], [3]),
        (TensorProto.FLOAT16, [1.0, 2.0], [2]),
        (TensorProto.INT4, [1, -2, 3], [3]),
        (TensorProto.DOUBLE, [1.0], [1]),
        (TensorProto.COMPLEX64, [1j, 2.0], [2]),
        (TensorProto.BOOL, [True, False], [2]),
        (TensorProto.UINT64, [1 << 63], [1]),
        (TensorProto.FLOAT, [], [0, 5]),
    ],
)
def test_numbers_in_fields_of_their_type(tmp_path, model, dtype, values, dims):
    model.graph.initializer.append(helper.make_tensor("more", dtype, dims, values))
    open_checkpoint(write_model(tmp_path / "model.onnx", model))
    model.graph.initializer[-1].dims[0] += 2 if dims != [0, 5] else 1
    refused(write_model(tmp_path / "model.onnx", model), "'more'", "its shape takes")


def test_doubled_names(tmp_path, model):
    model.graph.initializer.append(table(model))
    refused(write_model(tmp_path / "model.onnx", model), "twice")


# Data outside of the file


@pytest.fixture
def beside(tmp_path, model):
    """A folder whose model has its data beside it, and how to change the entries of the first tensor."""
    folder = tmp_path / "model"
    write_model(folder / "model.onnx", model)
    onnx.save(outside(model), folder / "model.onnx", save_as_external_data=False)

    def change(**entries):
        tensor = table(model)
        for key, value in entries.items():
            found = [entry for entry in tensor.external_data if entry.key == key]
            entry = found[0] if found else tensor.external_data.add(key=key)
            entry.value = str(value)
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        return folder

    return change


def test_data_beside_the_file(beside):
    folder = beside()
    assert (folder / "model.onnx").stat().st_size < 40_000
    checkpoint = open_checkpoint(folder)
    assert checkpoint.num_bytes > 400_000
    load_model(checkpoint, EngineConfig(threads=1)).close()


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd", "../secret", "..", ".", "", "a/../../secret", "sub/secret", "\\\\host\\x", "a\0b", "nowhere",
        "*/_ORT_MEM_ADDR_/*", "file:///etc/passwd", "link", "chain", "folder", "x" * 5000,
    ],
)  # fmt: skip
def test_data_elsewhere(beside, location):
    folder = beside(location=location)
    (folder.parent / "secret").write_bytes(bytes(1 << 20))
    (folder / "link").symlink_to("../secret")
    (folder / "chain").symlink_to("link")
    (folder / "folder").mkdir()
    refused(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": 1 << 40},
        {"offset": -4},
        {"offset": "0x10"},
        {"offset": " 0"},
        {"offset": "9" * 30},
        {"length": 4},
        {"length": 1 << 40},
        {"length": -1},
        {"length": ""},
    ],
)
def test_ranges_that_are_not_there(beside, entries):
    refused(beside(**entries), "'embed'")


def test_ranges_that_overlap(beside):
    refused(beside(offset=64), "overlaps another tensor")


def test_entries_that_are_not_known(beside):
    refused(beside(prepacked_0="x"), "prepacked_0", kind=Unsupported)


def test_data_that_was_cut(beside):
    folder = beside()
    data = folder / "model.onnx_data"
    os.truncate(data, data.stat().st_size - 1)
    refused(folder, "ends at byte")


@pytest.mark.parametrize("below", ["", "onnx"])
def test_links_of_the_cache_of_hugging_face(tmp_path, beside, below):
    """In it, every file of a snapshot is a link to a blob of the same model."""
    source, snapshot = beside(), tmp_path / "models--a--b" / "snapshots" / "123"
    blobs = snapshot.parent.parent / "blobs"
    (snapshot / below).mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        place = snapshot / (below if "onnx" in path.name else "") / path.name
        place.symlink_to(os.path.relpath(blobs / str(number), place.parent))
    load_model(open_checkpoint(snapshot), EngineConfig(threads=1)).close()
    (snapshot / below / "model.onnx_data").unlink()
    (snapshot / below / "model.onnx_data").symlink_to(tmp_path / "model" / "model.onnx_data")
    (tmp_path / "model" / "model.onnx_data").write_bytes(bytes(1 << 20))
    refused(snapshot, "leads out of the folder")


# Graphs that are not run


def renamed(port, name):
    port.name = name


def set_size(port, index, size):
    port.type.tensor_type.shape.dim[index].dim_value = size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda g: renamed(g.input[0], "tokens"), "the input 'tokens' is not known"),
        (lambda g: g.input.pop(0), "the input 'input_ids' is missing"),
        (lambda g: renamed(g.input[3], "past.0"), "'past_key_values.0.key' is missing"),
        (lambda g: g.input.__delitem__(slice(3, None)), "so there is no cache"),
        (lambda g: g.input.pop(4), "'past_key_values.0.value' is missing"),
        (lambda g: g.output.pop(0), "the output 'logits' is missing"),
        (lambda g: renamed(g.output[2], "other"), "the output 'present.0.value' is missing"),
        (lambda g: g.input.append(helper.make_tensor_value_info("lora", 1, [1])), "the input 'lora' is not known"),
        (lambda g: setattr(g.input[0].type.tensor_type, "elem_type", 1), "'input_ids' is float32 [b, s], not int64"),
        (lambda g: setattr(g.input[4].type.tensor_type, "elem_type", FLOAT16), "differs in type"),
        (lambda g: setattr(g.input[3].type.tensor_type, "elem_type", 16), "is bfloat16"),
        (lambda g: set_size(g.input[0], 1, 1), "'input_ids' is int64 [b, 1], not int64"),
        (lambda g: set_size(g.input[0], 0, 1 << 40), "'input_ids' is int64 [1099511627776, s]"),
        (lambda g: set_size(g.input[3], 2, 16), "past_key_values.0.key"),
        (lambda g: set_size(g.input[5], 1, 4), "past_key_values.1.key"),
        (lambda g: set_size(g.output[0], 1, 1), "'logits' is float32 [b, 1, 384]"),
        (lambda g: set_size(g.output[2], 3, 8), "present.0.value"),
        (lambda g: g.node.append(helper.make_node("Run", [], [], domain="evil")), "the operator 'Run' of 'evil'"),
        (lambda g: g.sparse_initializer.add(), "sparse"),
    ],
)
def test_other_graphs(tmp_path, model, change, words):
    change(model.graph)
    refused(write_model(tmp_path / "model.onnx", model), "model.onnx", words, kind=Unsupported)


def test_sizes_of_heads_that_only_the_configuration_knows(tmp_path, model):
    for port in (*model.graph.input[3:], *model.graph.output[1:]):
        for index in (1, 3):
            port.type.tensor_type.shape.dim[index].Clear()
    path = write_model(tmp_path / "model.onnx", model)
    decoder = open_checkpoint(path).decoder
    assert (decoder.num_kv_heads, decoder.head_dim) == (2, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": None}))
    assert open_checkpoint(path).decoder.head_dim == 64 // 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    with pytest.raises(KernelError, match="ONNX Runtime fails in a step"):  # it notices what the file does not say
        run_once(open_checkpoint(path))
    (tmp_path / "config.json").unlink()
    refused(path, "which config.json does not say", kind=Unsupported)


@pytest.mark.parametrize(
    ("at", "index", "size"), [(0, 2, 1 << 22), (0, 2, 0), (0, 2, -1), ("past", 1, 1 << 20), ("past", 3, 0)]
)
def test_absurd_sizes(tmp_path, model, at, index, size):
    graph = model.graph
    for port in (*graph.input[3:], *graph.output[1:]) if at == "past" else (graph.output[0],):
        set_size(port, index, size)
    refused(write_model(tmp_path / "model.onnx", model), str(size))


def test_words_of_a_file_do_not_reach_the_terminal_as_they_are(tmp_path, model):
    evil = "\x1b[31m\n" + "x" * 200
    model.producer_name = evil
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = evil
    model.graph.output.append(helper.make_tensor_value_info(evil, 1, [evil]))
    model.opset_import.append(helper.make_opsetid(evil, 1))
    path = write_model(tmp_path / "model.onnx", model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": evil}))
    for lines in summarize(path).groups.values():
        for _, value in lines:
            assert value.isprintable()
            assert len(value) < 300
    model.graph.input[0].type.tensor_type.elem_type = 1
    refused(write_model(tmp_path / "model.onnx", model), "input_ids", kind=Unsupported)


def test_functions(tmp_path, model):
    model.functions.add(name="f", domain="local")
    refused(write_model(tmp_path / "model.onnx", model), "functions", kind=Unsupported)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("vocab_size", 385, "contradicts model.onnx, which has 384"),
        ("num_hidden_layers", 3, "contradicts model.onnx, which has 2"),
        ("num_key_value_heads", 4, "contradicts"),
        ("head_dim", 8, "contradicts"),
        ("head_dim", "16", "is not a whole number"),
        ("max_position_embeddings", None, "max_position_embeddings is said nowhere"),
        ("max_position_embeddings", 1 << 40, "is not a whole number"),
    ],
)
def test_configurations_that_contradict_the_graph(tmp_path, model, key, value, words):
    path = write_model(tmp_path / "model.onnx", model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    refused(path, words)


def test_a_vocabulary_that_only_the_configuration_knows(tmp_path, model):
    model.graph.output[0].type.tensor_type.shape.dim[2].Clear()
    path = write_model(tmp_path / "model.onnx", model)
    assert open_checkpoint(path).config.vocab_size == 384
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    refused(path, "vocabulary", kind=Unsupported)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda model, decoder: decoder.update(filename="../x.onnx"), FormatError),
        (lambda model, decoder: decoder.update(filename="absent.onnx"), FormatError),
        (lambda model, decoder: decoder.update(pipeline=[]), Unsupported),
        (lambda model, decoder: decoder["inputs"].update(past_key_names="%s%n"), FormatError),
        (lambda model, decoder: decoder["inputs"].update(past_key_names="past"), FormatError),
        (lambda model, decoder: decoder["outputs"].update(present_value_names="present.%d.key"), Unsupported),
        (lambda model, decoder: decoder["inputs"].update(position_ids="attention_mask"), Unsupported),
        (lambda model, decoder: decoder.update(num_hidden_layers=3), FormatError),
        (lambda model, decoder: model.update(context_length=0), FormatError),
        (lambda model, decoder: model.update(decoder=[]), FormatError),
    ],
)
def test_broken_configurations_of_genai(tmp_path, change, kind):
    folder = write_genai(tmp_path, make_decoder(Kind(is_genai=True, has_positions=False)))
    about = json.loads((folder / "genai_config.json").read_text())
    change(about["model"], about["model"]["decoder"])
    (folder / "genai_config.json").write_text(json.dumps(about))
    refused(folder, kind=kind)


# What only the runtime finds out


def test_what_the_runtime_refuses_is_one_line(tmp_path, model):
    model.graph.node[0].input[0] = "nobody"
    checkpoint = open_checkpoint(write_model(tmp_path / "model.onnx", model))
    with pytest.raises(FormatError, match=r"model\.onnx: ONNX Runtime refuses it .*nobody") as caught:
        load_model(checkpoint, EngineConfig(threads=1))
    assert "\n" not in str(caught.value)


def test_an_operator_that_the_runtime_does_not_have(tmp_path, model):
    model.graph.node[0].op_type = "Gathers"
    checkpoint = open_checkpoint(write_model(tmp_path / "model.onnx", model))
    with pytest.raises(ModelError, match="ONNX Runtime"):
        load_model(checkpoint, EngineConfig(threads=1))


def test_a_graph_that_gives_other_shapes_than_it_says(tmp_path, model):
    set_size(model.graph.output[0], 2, 380)
    path = write_model(tmp_path / "model.onnx", model)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 256}')
    checkpoint = open_checkpoint(path)
    with pytest.raises((FormatError, KernelError), match="ONNX Runtime") as caught:
        run_once(checkpoint)
    assert "\n" not in str(caught.value)


def run_once(checkpoint):
    from bitnet_inference.model.contract import Batch

    loaded = load_model(checkpoint, EngineConfig(threads=1))
    loaded.reserve(1)
    zero = np.zeros(1, np.int32)
    loaded.forward(Batch(zero, zero, zero, np.array([0, 1], np.int32), zero[None]))


# What it is


def test_inspect(tmp_path, model):
    shape = [64, 2, 8]
    weights = helper.make_tensor("packed", TensorProto.UINT8, shape, bytes(1024), raw=True)
    scales = helper.make_tensor("scales", TensorProto.FLOAT, [64, 2], bytes(512), raw=True)
    before = open_checkpoint(write_model(tmp_path / "model.onnx", model)).num_parameters
    with np.load(GOLDEN / "golden.npz") as golden:
        assert golden["logits"].shape[1] == 384
    model.graph.initializer.extend([weights, scales])
    node = helper.make_node(
        "MatMulNBits", ["x", "packed", "scales"], ["y"], domain="com.microsoft", K=64, N=64, bits=2, block_size=32
    )
    model.graph.node.append(node)
    path = write_model(tmp_path / "model.onnx", model)
    assert open_checkpoint(path).num_parameters == before + 64 * 64
    summary = summarize(path)
    assert summary.problems == []
    text = "\n".join(f"{name}: {value}" for lines in summary.groups.values() for name, value in lines)
    for line in (
        "layers: 2 with a cache",
        "attention: 2 heads of 16 for keys and values, in float32",
        "vocabulary: 384 tokens",
        "context: 256 tokens",
        "input: input_ids int64 [b, s]",
        "input: past_key_values.0.key and 3 more, float32 [b, 2, p, 16]",
        "opsets: ai.onnx 17, com.microsoft 1",
        "quantised: 1 MatMulNBits (2 bits)",
        "texts cannot be embedded",
    ):
        assert line in text


def test_the_weights_that_are_counted(tmp_path, model):
    """Matrices and norms: what Transformers counts for this Llama."""
    found = open_checkpoint(write_model(tmp_path / "model.onnx", model)).num_parameters
    expected = open_checkpoint(GOLDEN).num_parameters
    assert expected <= found < expected + 100  # and a few numbers that formulas need

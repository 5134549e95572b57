"""GGUF files of the model in the package: the same matrices, words and text as its folder; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_samples import codes_of, write_default, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import modest

from bitnet_inference import LLM, SamplingParams, convert
from bitnet_inference.errors import BitNetError, FormatError, ModelError, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Dense, RopeScaling, Ternary, expected_shapes
from bitnet_inference.formats.gguf_config import is_longrope, read_config
from bitnet_inference.formats.gguf_file import read_gguf
from bitnet_inference.formats.gguf_parts import read_part
from bitnet_inference.formats.yarn import yarn_attention, yarn_factors
from bitnet_inference.model.rope import inverse_frequencies
from bitnet_inference.model_folder import find_model, load_tokenizer
from bitnet_inference.summary import summarize

TALK = [{"role": "user", "content": "Tell me a story about a fox"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def answer():
    with LLM.load("default") as llm:
        return llm.chat(TALK, GREEDY).token_ids


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "default.gguf"
    write_default(path, "I2_S")
    return path


@pytest.mark.parametrize("kind", ["I2_S", "TQ1_0", "TQ2_0", "F16", "F32"])
@pytest.mark.parametrize("arch", ["bitnet-b1.58", "bitnet-25"])
def test_the_same_matrices_and_text_as_the_folder(tmp_path, answer, kind, arch):
    path = tmp_path / "model.gguf"
    folder = write_default(path, kind, arch=arch)
    found = open_checkpoint(path)
    assert found.check() == []
    ours, theirs = vars(found.config), vars(folder.config)
    assert {key: value for key, value in ours.items() if key != "eos_ids"} == pytest.approx(
        {key: value for key, value in theirs.items() if key != "eos_ids"}
    )
    for name, shape in expected_shapes(found.config):
        if len(shape) == 1:
            assert np.array_equal(found.vector(name), folder.vector(name))
            continue
        one, other = found.matrix(name), folder.matrix(name)
        assert found.is_ternary(name) == isinstance(one, Ternary) == folder.is_ternary(name)
        assert found.group_size(name) == 0
        if isinstance(one, Ternary):
            assert one.scale == other.scale and np.array_equal(codes_of(one), codes_of(other))
        else:
            assert one.dtype == other.dtype and np.array_equal(one.data, other.data.view(one.data.dtype))
        found.release(name)
    with LLM.load(path) as llm:
        assert llm.chat(TALK, GREEDY).token_ids == answer


def test_the_words_are_those_of_the_folder(file):
    found, folder = load_tokenizer(open_checkpoint(file)), load_tokenizer(open_checkpoint(find_model("default")))
    assert found.vocabulary() == folder.vocabulary() and found.special == folder.special
    assert (found.bos_id, found.templates) == (folder.bos_id, folder.templates)
    assert set(folder.eos_ids) <= set(found.eos_ids)
    for text in ("Mia's fox, 123 times!", "  two  spaces\n\n", "naïve 狐狸 🦊", "<|eot_id|> is text", "don't WE'LL"):
        assert found.encode(text) == folder.encode(text)
        assert found.encode(text, parse_special=True) == folder.encode(text, parse_special=True)


def test_inspect_tells_what_it_is(file, tmp_path):
    summary = summarize(file)
    notes = [value for name, value in summary.groups["model"] if name == "note"]
    assert not summary.problems and "1 BF16, 25 F32, 42 I2_S" in notes[0] and "128" in notes[1]
    write_default(tmp_path / "f.gguf", "F16", arch="bitnet")
    assert "as ternary ones" in " ".join(open_checkpoint(tmp_path / "f.gguf").notes())
    assert open_checkpoint(tmp_path / "f.gguf").config.activation == "silu"


def test_rows_of_llama_files_are_put_in_order(tmp_path):
    """Row 2j + p of a head is the decoder's row p * D/2 + j, of ternary and of dense matrices."""
    path = tmp_path / "llama.gguf"
    folder = open_checkpoint(find_model("default"))
    drop = [name for name, _ in expected_shapes(folder.config) if "sub_norm" in name]
    half = folder.config.head_dim // 2
    change = {}
    for name in ("layers.0.q", "layers.1.k"):
        codes = codes_of(folder.matrix(name))
        mixed = codes.reshape(-1, 2, half, codes.shape[1]).transpose(0, 2, 1, 3).reshape(codes.shape)
        change[name] = Ternary(np.ascontiguousarray(mixed), "codes", codes.shape, folder.matrix(name).scale)
    write_default(path, "TQ2_0", arch="llama", drop=drop, change=change)
    found = open_checkpoint(path)
    assert found.check() == [] and found.config.tie_embeddings and found.config.activation == "silu"
    for name in change:
        assert np.array_equal(codes_of(found.matrix(name)), codes_of(folder.matrix(name)))
    write_default(path, "F16", arch="llama", drop=drop, change=change)
    dense = open_checkpoint(path).matrix("layers.0.q")
    assert isinstance(dense, Dense) and np.array_equal(np.sign(dense.data), codes_of(folder.matrix("layers.0.q")))


def test_blocks_with_several_scales_are_groups(tmp_path):
    path = tmp_path / "groups.gguf"
    folder = open_checkpoint(find_model("default"))
    codes = codes_of(folder.matrix("layers.0.down"))
    values = codes * np.repeat(np.array([[0.5, 0.25, 2.0]], np.float32), 256, axis=1)
    write_default(path, "TQ2_0", change={"layers.0.down": Dense(values, "float32")})
    found = open_checkpoint(path)
    assert (found.group_size("layers.0.down"), found.group_size("layers.1.down")) == (128, 0)
    matrix = found.matrix("layers.0.down")
    assert not matrix.problem() and np.array_equal(codes_of(matrix) * np.repeat(matrix.scale, 128, axis=1), values)
    with LLM.load(path) as llm:
        assert llm.generate("a", GREEDY).token_ids


def test_blocks_that_all_have_the_same_negative_scale(tmp_path):
    path = tmp_path / "negative.gguf"
    codes = codes_of(write_default(path, "TQ2_0").matrix("layers.0.up"))
    tensor = open_checkpoint(path)._tensors["blk.0.ffn_up.weight"]
    for begin in range(tensor.begin, tensor.end, 66):
        _overwrite(path, begin + 64, np.float16(-0.5).tobytes())
    found = open_checkpoint(path).matrix("layers.0.up")
    assert found.scale == 0.5 and np.array_equal(codes_of(found), -codes)


@pytest.mark.parametrize("kind", ["TQ2_0", "F16", "Q8_0"])
def test_a_scale_beside_a_matrix_multiplies_it(tmp_path, kind):
    folder = open_checkpoint(find_model("default"))
    drop = [name for name, _ in expected_shapes(folder.config) if "sub_norm" in name]
    models = []
    for shape in (None, 1, ()):  # early converters wrote it without any dimension
        extra = {} if shape is None else {"blk.1.attn_q.scale": np.full(shape, 0.25, np.float32)}
        write_default(tmp_path / f"{shape}", kind, arch="llama", drop=drop, extra=extra)
        models.append(open_checkpoint(tmp_path / f"{shape}"))
        assert models[-1].check() == []
    plain, *scaled = (model.matrix("layers.1.q") for model in models)
    for matrix in scaled:
        if kind == "TQ2_0":
            assert matrix.scale == plain.scale / 4
        else:
            assert np.array_equal(matrix.data, plain.data.astype(np.float32) / 4) and matrix.dtype == "float32"
    for name, value in (("blk.1.attn_q.scale", np.nan), ("blk.1.attn_norm.scale", 1.0)):
        bad = {name: np.full(1, value, np.float32)}
        write_default(tmp_path / "bad", kind, arch="llama", drop=drop, extra=bad)
        assert len(open_checkpoint(tmp_path / "bad").check()) == 1


def test_a_model_of_microsofts_under_the_wrong_name():
    """Upstream's converter calls it "bitnet", which stands for SiLU; the vocabulary gives it away."""
    sizes = {"context_length": 64, "embedding_length": 64, "feed_forward_length": 64, "block_count": 1}
    values = sizes | {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": "bitnet"} | {f"bitnet.{key}": value for key, value in values.items()}
    assert read_config(Path("x"), metadata, 128256, True, ()).activation == "relu2"
    assert read_config(Path("x"), metadata, 32002, True, ()).activation == "silu"


def config_of(tensor_factors=(), arch="llama", **keys):
    """The configuration of a file with these keys of its architecture; "__" stands for a dot."""
    values = {
        "context_length": 64, "embedding_length": 128, "feed_forward_length": 64, "block_count": 1,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500000.0,
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    metadata = {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in values.items()}
    return read_config(Path("x"), metadata, 1000, True, tensor_factors)


def test_factors_of_rotary_frequencies():
    """Those of Llama 3.1 are known as its rule; any others divide one by one."""
    plain = config_of()
    stretched = replace(plain, rope_scaling=RopeScaling(kind="llama3", factor=8.0))
    factors = inverse_frequencies(plain) / inverse_frequencies(stretched)
    assert config_of(tuple(map(float, factors))).rope_scaling == stretched.rope_scaling
    halves = config_of((2.0,) * 64)
    assert np.array_equal(inverse_frequencies(halves), inverse_frequencies(plain) / 2)
    with pytest.raises(Unsupported, match="beside rope_freqs"):
        config_of((2.0,) * 64, rope__scaling__factor=4.0)
    with pytest.raises(FormatError, match="no 64 factors"):
        config_of((2.0,))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.scale"])
def test_factors_without_end_are_not_read(tmp_path, name):
    write_default(tmp_path / "x.gguf", extra={name: np.ones(1 << 20, np.float32)})
    with modest(max_bytes=20e6), pytest.raises(FormatError, match=f"{name}.*should be"):
        raise FormatError(tmp_path, "", open_checkpoint(tmp_path / "x.gguf").check()[0])


@pytest.mark.parametrize(
    "keys, factor",
    [
        ({"rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scale_linear": 4.0}, 4.0),
        ({"rope__scaling__factor": 0.5, "rope__scale_linear": 4.0}, 0.5),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 4.0),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__attn_factor": 1.0}, None),
    ],
)
def test_positions_are_divided_as_llama_cpp_divides_them(keys, factor):
    """Measured: llama.cpp takes a factor without a type for a linear one, under its older name too."""
    assert config_of(**keys).rope_scaling == (factor and RopeScaling(kind="linear", factor=factor))


YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 512}


def yarn_keys(**keys):
    return {f"rope__scaling__{key}": value for key, value in (YARN | keys).items()}


@pytest.mark.parametrize(("keys", "sharpness"), [({}, 1.0), ({"yarn_beta_fast": 16.0, "yarn_attn_factor": 1.5}, 1.5)])
def test_yarn_is_that_of_folders(keys, sharpness):
    config, plain = config_of(**yarn_keys(**keys)), config_of()
    factors = yarn_factors(4.0, 512, plain.rope_theta, 128, beta_fast=keys.get("yarn_beta_fast", 32.0))
    assert config.rope_scaling == RopeScaling(kind="factors", factor=4.0, factors=factors)
    assert config.score_scale == pytest.approx((sharpness * yarn_attention(4.0)) ** 2 / 128**0.5, rel=1e-12)
    assert config_of(**yarn_keys(factor=0.0)) == plain


@pytest.mark.parametrize(
    ("key", "value"), [("yarn_ext_factor", 0.5), ("yarn_ext_factor", np.ones(2)), ("yarn_log_multiplier", 0.1)]
)
def test_yarn_of_other_kinds_is_refused(key, value):
    with pytest.raises(Unsupported, match=key):
        config_of(**yarn_keys(**{key: value}))


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"attention__causal": False}, "attention.causal is false"),
        ({"rope__scaling__attn_factor": 0.5}, "attn_factor is not 1"),
        ({"rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ({"rope__scaling__factor": -2.0}, "is not a finite number above 0"),
        ({"rope__scaling__factor": np.ones(2)}, "is not a finite number above 0"),
    ],
)
def test_what_a_key_says_is_not_ignored(keys, message):
    for factors in ((), (2.0,) * 64):
        with pytest.raises(ModelError, match=message):
            config_of(factors, **keys)


def test_a_kind_of_scaling_that_is_a_list_is_none():
    metadata = {"general.architecture": "llama", "llama.rope.scaling.type": np.ones(2, np.int32)}
    assert not is_longrope(metadata)
    with pytest.raises(FormatError, match="is not a string"):
        config_of(rope__scaling__type=metadata["llama.rope.scaling.type"])


def test_sizes_may_stand_there_for_each_layer():
    sizes = {"feed_forward_length": 64, "attention__head_count": 4, "attention__head_count_kv": 2, "block_count": 3}
    lists = {key: np.full(3, value, np.uint32) for key, value in sizes.items() if key != "block_count"}
    assert config_of(**sizes | lists) == config_of(**sizes)
    for key in lists:
        with pytest.raises(Unsupported, match=f"{key.replace('__', '.')} differs from layer to layer"):
            config_of(**sizes | {key: np.array([4, 4, 2], np.int32)})
        for bad in (np.zeros(0, np.int32), np.full(3, 2.5), ["4", "4"]):
            with pytest.raises(FormatError, match="is not a whole number"):
                config_of(**sizes | {key: bad})


def test_local_layers_may_be_named_one_by_one():
    def local(pattern):
        keys = {"attention__sliding_window": 8, "attention__sliding_window_pattern": pattern}
        return config_of(arch="gemma3", block_count=4, **keys).local

    assert local(np.array([True, True, False, True])) == local(3)
    assert local(np.array([False, True, True, False])).layers == (1, 2)
    assert local(np.zeros(4, bool)) is None
    for bad in (np.ones(3, bool), np.ones(4, np.int32)):
        with pytest.raises(FormatError, match="is neither a number nor a list of 4 flags"):
            local(bad)


class Bytes:
    """A GGUF file by hand."""

    def __init__(self, version: int = 3) -> None:
        self.version, self.keys, self.tensors, self.data = version, [], [], b""

    def key(self, name: bytes, kind: int, value: bytes) -> Bytes:
        self.keys.append(len(name).to_bytes(8, "little") + name + kind.to_bytes(4, "little") + value)
        return self

    def tensor(self, name: bytes, sizes: list[int], kind: int, offset: int) -> Bytes:
        head = len(name).to_bytes(8, "little") + name + len(sizes).to_bytes(4, "little")
        body = b"".join(size.to_bytes(8, "little") for size in sizes)
        self.tensors.append(head + body + kind.to_bytes(4, "little") + offset.to_bytes(8, "little"))
        return self

    def write(self, path: Path, num_tensors: int | None = None, num_keys: int | None = None) -> Path:
        counts = (len(self.tensors) if num_tensors is None else num_tensors, len(self.keys))
        head = b"GGUF" + self.version.to_bytes(4, "little") + counts[0].to_bytes(8, "little", signed=True)
        head += (counts[1] if num_keys is None else num_keys).to_bytes(8, "little", signed=True)
        body = head + b"".join(self.keys) + b"".join(self.tensors)
        path.write_bytes(body + bytes(-len(body) % 32) + self.data)
        return path


ARCH = (b"general.architecture", 8, (5).to_bytes(8, "little") + b"llama")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: Bytes(1).write(p), "version 1"),
        (lambda p: Bytes(0x03000000).write(p), "big-endian"),
        (lambda p: Bytes().write(p, num_tensors=-1), "number of tensors is -1"),
        (lambda p: Bytes().write(p, num_keys=1 << 60), "number of keys"),
        (lambda p: Bytes().write(p, num_keys=3), "the file ends within it"),
        (lambda p: Bytes().key(b"a", 4, bytes(4)).key(b"a", 4, bytes(4)).write(p), "twice"),
        (lambda p: Bytes().key(b"a", 13, bytes(4)).write(p), "type 13"),
        (lambda p: Bytes().key(b"\xff", 4, bytes(4)).write(p), "not UTF-8"),
        (lambda p: Bytes().key(b"a", 8, b"\xff" * 8).write(p), "a string of"),
        (lambda p: Bytes().key(b"a", 9, b"\x08\0\0\0" + b"\xff" * 8).write(p), "strings: no vocabulary"),
        (lambda p: Bytes().key(b"a", 9, b"\x09\0\0\0" + bytes(8)).write(p), "an array of type 9"),
        (lambda p: Bytes().key(b"a", 9, b"\x04\0\0\0" + b"\xff" * 7 + b"\0").write(p), "the file ends within it"),
        (lambda p: Bytes().key(b"general.alignment", 4, b"\x03\0\0\0").write(p), "no power of two"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4] * 5, 0, 0).write(p), "5 dimensions"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [1 << 39, 1 << 39], 0, 0).write(p), "is not one"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4], 99, 0).write(p), "type 99"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [256], 10, 0).write(p), r"type Q2_K are .*: use the model in Q8_0"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [256], 39, 0).write(p), "TL2"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [256], 135, 0).write(p), "take the I2_S file"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4], 8, 0).write(p), "no multiple of 32"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4], 36, 0).write(p), "no multiple of 128"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4], 0, 3).write(p), "is no multiple of 32"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4], 0, 1 << 62).write(p), "the file at"),
        (lambda p: Bytes().key(*ARCH).tensor(b"x", [4], 0, 0).tensor(b"y", [4], 0, 0).write(p), "overlaps|ends at"),
        (lambda p: Bytes().key(*ARCH).write(p), "table of embeddings is missing"),
        (
            lambda p: Bytes().key(*ARCH).key(b"general.type", 8, (7).to_bytes(8, "little") + b"adapter").write(p),
            "is 'adapter', and no model",
        ),
        (lambda p: Bytes().write(p), "is no name"),
        (lambda p: Bytes().key(b"general.architecture", 8, (4).to_bytes(8, "little") + b"mpt9").write(p), "mpt9"),
    ],
)
def test_broken_files_are_named(tmp_path, make, message):
    path = make(tmp_path / "broken.gguf")
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_missing_or_has_the_wrong_shape(tmp_path):
    path = tmp_path / "model.gguf"
    change = {"layers.3.attn_norm": np.ones(7, np.float32), "norm": np.full(256, np.nan, np.float32)}
    write_default(path, drop=["layers.2.q"], change=change)
    problems = " ".join(open_checkpoint(path).check())
    assert (
        "blk.2.attn_q.weight: the tensor is missing" in problems and "[7], not [256]" in problems and "NaN" in problems
    )
    with pytest.raises(FormatError, match="missing"):
        LLM.load(path)


def test_what_is_wrong_with_biases(tmp_path):
    folder, path = Path(__file__).parents[1] / "golden" / "qwen2-bf16", tmp_path / "x.gguf"
    change = {"layers.0.q.bias": np.full(64, np.nan, np.float32), "layers.1.k.bias": np.ones(64, np.float32)}
    extra = {"blk.0.attn_output.bias": np.ones(64, np.float32)}
    write_model(path, folder, "qwen2", "BF16", "BF16", drop=("layers.1.v.bias",), change=change, extra=extra)
    assert open_checkpoint(path).check() == [
        f"{path}: blk.0.attn_q.bias: a bias is NaN or infinite: download the file again",
        f"{path}: blk.1.attn_k.bias: has the shape [64], not [16]: download the file again",
        f"{path}: blk.1.attn_v.bias: the tensor is missing: download the file again",
        f"{path}: the architecture has no place for 1 tensors, such as 'blk.0.attn_output.bias': use another model",
    ]
    write_model(path, folder, "llama", "BF16", "BF16")  # whose architecture has none
    (line,) = open_checkpoint(path).check()
    assert "no place for 6 tensors, such as 'blk.0.attn_q.bias'" in line


def test_a_folder_of_gguf_files_says_which_to_give(tmp_path, file):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"give one of them, such as a\.gguf"):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def header(file) -> bytes:
    return file.read_bytes()[:60_000]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 59_999), value=st.integers(0, 255), end=st.sampled_from([None, 100, 5_000, 59_000]))
def test_damaged_headers_are_refused_or_read(tmp_path, file, header, at, value, end):
    damaged = bytearray(header + file.read_bytes()[60_000:] if end is None else header[:end])
    if at < len(damaged):
        damaged[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.check()
        load_tokenizer(checkpoint)
    except BitNetError as error:
        assert "\n" not in str(error)


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    write_default(tmp_path / "model.gguf", "TQ2_0", per_file=30)
    found = sorted(tmp_path.glob("model-*"))
    assert [path.name for path in found] == [f"model-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    return found


def test_a_model_in_several_files(parts, tmp_path, answer):
    """Any of them stands for all; what is written from them is one file."""
    for path in parts:
        with LLM.load(path) as llm:
            assert llm.chat(TALK, GREEDY).token_ids == answer
    checkpoint = open_checkpoint(parts[1])
    assert checkpoint.num_bytes == sum(path.stat().st_size for path in parts)
    assert "the model is in 3 files" in checkpoint.notes()
    whole = open_checkpoint(convert(parts[0], tmp_path / "whole.gguf", "tq2_0").path)
    assert whole.check() == [] and not any(key.startswith("split.") for key in whole.metadata)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_parts_are_aligned_as_the_first_one_says(tmp_path, alignment):
    write_default(tmp_path / "model.gguf", "TQ2_0", alignment=alignment, per_file=30)
    source = open_checkpoint(find_model("default"))
    for path in tmp_path.glob("model-*"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.check() == []
        for name in ("layers.0.up", f"layers.{source.config.num_layers - 1}.down"):
            assert np.array_equal(codes_of(checkpoint.matrix(name)), codes_of(source.matrix(name)))


@pytest.mark.parametrize("alignment", [8, 16, 64, 4096])
def test_a_part_may_have_the_usual_alignment_all_the_same(parts, alignment):
    expected, found = read_gguf(parts[1]).tensors, read_part(parts[1], alignment).tensors
    assert [(each.begin, each.end) for each in found.values()] == [(each.begin, each.end) for each in expected.values()]


def test_a_part_that_is_missing_or_has_another_name(parts):
    parts[1].rename(parts[1].with_name("b.gguf"))
    with pytest.raises(FormatError, match=r"model-00002-of-00003\.gguf: this part of the model is missing"):
        open_checkpoint(parts[0])
    with pytest.raises(FormatError, match=r"one of 3 parts is called NAME-00001-of-00003\.gguf"):
        open_checkpoint(parts[1].with_name("b.gguf"))
    parts[0].rename(parts[1])
    with pytest.raises(FormatError, match=r"model-00001-of-00003\.gguf: this part"):
        open_checkpoint(parts[1])
    parts[1].rename(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(FormatError, match="says part 2 of 3 from 0 on"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize("count", [1 << 15, "3"])
def test_numbers_of_parts_that_cannot_be(tmp_path, count):
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_key_value("split.count", count, gguf.GGUFValueType.STRING if count == "3" else gguf.GGUFValueType.UINT32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(FormatError, match="is no number of parts"):
        open_checkpoint(tmp_path / "part.gguf")


def test_codes_of_3_are_looked_at_closely(tmp_path):
    """I2_S takes them for 0. In TQ2_0 they are +2, which is not ternary, unless the block's scale is 0."""
    path = tmp_path / "x.gguf"
    source = write_default(path, "I2_S")
    tensor = open_checkpoint(path)._tensors["blk.0.ffn_up.weight"]
    expected = codes_of(source.matrix("layers.0.up")).reshape(-1)
    expected[[0, 32, 64, 96]] = 0
    _overwrite(path, tensor.begin, b"\xff")
    assert np.array_equal(codes_of(open_checkpoint(path).matrix("layers.0.up")).reshape(-1), expected)
    write_default(path, "TQ2_0")
    tensor = open_checkpoint(path)._tensors["blk.0.ffn_up.weight"]
    _overwrite(path, tensor.begin, b"\xff")
    with pytest.raises(Unsupported, match=r"blk.0.ffn_up.weight: holds weights of \+2"):
        open_checkpoint(path).matrix("layers.0.up")
    _overwrite(path, tensor.begin + 64, b"\0\0")
    codes = codes_of(open_checkpoint(path).matrix("layers.0.up"))
    assert not codes[0].any() and np.array_equal(codes[1:], codes_of(source.matrix("layers.0.up"))[1:])


def _overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)

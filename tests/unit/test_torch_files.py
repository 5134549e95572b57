"""Files of torch.save: what is read from them, and that no file runs code, or takes much memory or time."""

from __future__ import annotations

import struct
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meta_samples import (
    Entry,
    many,
    name,
    number,
    ordered,
    parameter,
    pickled,
    storage,
    tensor,
    text,
    torch_bytes,
    torch_entries,
    zip_bytes,
)
from scripted import modest

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.pickles import MAX_PICKLE_BYTES
from bitnet_inference.formats.torch_files import read_torch_file

FLOATS = np.arange(6, dtype=np.float32)
DATA = FLOATS.tobytes()
FIRST = storage("0", "FloatStorage", 6)
SOUND_TENSOR = tensor(FIRST, (2, 3), (3, 1))


@pytest.fixture(autouse=True)
def bounded():
    with modest(max_bytes=100e6):
        yield


def arrays(tmp_path, content: bytes):
    path = tmp_path / "x.pth"
    path.write_bytes(content)
    return {name: tensor.array() for name, tensor in read_torch_file(path).items()}


def refused(tmp_path, content: bytes, *parts: str) -> None:
    with pytest.raises(FormatError) as caught:
        arrays(tmp_path, content)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    message.encode("ascii")
    for part in ("x.pth", *parts):
        assert part in message, message


def from_pickle(pickle: bytes, *storages: bytes) -> bytes:
    return zip_bytes(torch_entries(pickle, storages or (DATA,)))


def entries(**more: object) -> list[Entry]:
    """Those of a sound file, the one with the data changed."""
    whole = torch_entries(pickled(("a", SOUND_TENSOR)), (DATA,))
    for key, value in more.items():
        setattr(whole[2], key, value)
    return whole


# What is read


@pytest.mark.parametrize("zip64", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_tensors_are_mapped_where_they_lie(tmp_path, zip64, wide):
    found = arrays(tmp_path, zip_bytes(entries(), zip64, wide))
    assert np.array_equal(found["a"], FLOATS.reshape(2, 3))
    assert not found["a"].flags.writeable
    assert not found["a"].flags.owndata


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_all_dtypes_and_ranks(tmp_path, dtype):
    tensors = {str(rank): np.ones((2,) * rank, dtype) for rank in range(5)} | {"none": np.ones((0, 3), dtype)}
    found = arrays(tmp_path, torch_bytes(tensors))
    assert all(np.array_equal(found[own], array) and found[own].shape == array.shape for own, array in tensors.items())


def test_a_zip_file_of_the_library(tmp_path):
    path = tmp_path / "y.pth"
    with zipfile.ZipFile(path, "w") as file:  # not aligned to anything
        for entry in entries():
            file.writestr(entry.name, entry.data)
    assert np.array_equal(read_torch_file(path)["a"].array(), FLOATS.reshape(2, 3))


def test_parts_of_one_storage(tmp_path):
    parts = ("a", tensor(FIRST, (2,), (1,))), ("b", tensor(FIRST, (2, 2), (2, 1), 2)), ("c", tensor(FIRST, (), (), 5))
    found = arrays(tmp_path, from_pickle(pickled(*parts)))
    assert [found[own].ravel().tolist() for own in "abc"] == [[0, 1], [2, 3, 4, 5], [5]]


def test_a_stride_of_a_single_row_says_nothing(tmp_path):
    assert arrays(tmp_path, from_pickle(pickled(("a", tensor(FIRST, (1, 6), (77, 1))))))["a"].shape == (1, 6)


def test_parameters_and_plain_dictionaries(tmp_path):
    pickle = b"\x80\2}" + text("a") + parameter(SOUND_TENSOR) + b"s."
    assert arrays(tmp_path, from_pickle(pickle))["a"].shape == (2, 3)


def test_the_metadata_of_a_state_dict(tmp_path):
    versions = b"}" + text("_metadata") + ordered() + text("") + b"}" + text("version") + number(1) + b"sss"
    assert set(arrays(tmp_path, from_pickle(pickled(("a", SOUND_TENSOR))[:-1] + versions + b"b."))) == {"a"}


# Pickles that want more than tensors


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("posix", "system"), ("os", "system"), ("builtins", "eval"), ("builtins", "exec"), ("__builtin__", "getattr"),
        ("subprocess", "Popen"), ("numpy.core.multiarray", "_reconstruct"), ("torch", "load"), ("torch.hub", "load"),
        ("torch._utils", "_rebuild_tensor_v3"), ("torch", "DoubleStorage"), ("torch.storage", "_load_from_bytes"),
        ("collections", "defaultdict"), ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("bitnet_inference.errors", "FormatError"), ("", ""), ("\x1b[31m", "ü"),
    ],
)  # fmt: skip
def test_names_that_are_not_allowed(tmp_path, module, attribute):
    call = name(module, attribute) + many(text("echo pwned")) + b"R"
    refused(tmp_path, from_pickle(pickled(("a", call))), "data.pkl, byte", "not allowed")


@pytest.mark.parametrize(
    ("instruction", "shown"),
    [
        (b"(" + text("id") + b"iposix\nsystem\n", "INST"), (b"(" + name("collections", "OrderedDict") + b"o", "OBJ"),
        (name("collections", "OrderedDict") + b")\x81", "NEWOBJ"),
        (text("os") + text("system") + b"\x93", "STACK_GLOBAL"),
        (b"\x82\1", "EXT1"), (b"\x84\1\0\0\0", "EXT4"), (b"P0\n", "PERSID"), (b"G" + bytes(8), "BINFLOAT"),
        (b"]", "EMPTY_LIST"), (b"\x8b\xff\xff\xff\x7f", "LONG4"), (b"\x96" + b"\xff" * 8, "x96"), (b"\0", "x00"),
        (b"\x80\4", "PROTO"), (b"I1\n", "'I'"),
    ],
)  # fmt: skip
def test_instructions_that_are_not_allowed(tmp_path, instruction, shown):
    refused(tmp_path, from_pickle(pickled(("a", instruction))), "instruction", shown, "not allowed")


@pytest.mark.parametrize("protocol", [b"\x80\1", b"\x80\3", b"\x80\4", b"(dp0", b"\x80", b""])
def test_other_protocols(tmp_path, protocol):
    refused(tmp_path, from_pickle(protocol + pickled()[2:] if len(protocol) > 1 else protocol), "data.pkl")


@pytest.mark.parametrize(
    "value",
    [
        number(1), text("x"), b"N", b"\x88", b"}", b")", name("torch", "FloatStorage"), FIRST,
        name("torch", "FloatStorage") + b")R", text("x") + b")R", FIRST + b")R", ordered() + b")R",
        name("collections", "OrderedDict") + number(1) + b"R", name("collections", "OrderedDict") + many(b")") + b"R",
        many(text("storage")) + b"Q", number(0) + b"Q", many(b"N", b"N", b"N", b"N", b"N") + b"Q",
        storage("0", "FloatStorage", 6)[:-1] + b"Q" + b"Q", storage("../0", "FloatStorage", 6),
        storage("0" * 11, "FloatStorage", 6), parameter(b"N"), parameter(FIRST), b"J", b"X\xff\xff\xff\xff",
        b"\x8a\xff",
        b"X\1\0\0\0\xff", b"ctorch", b"ctorch\nx", b"c" + b"x" * 9999 + b"\ny\n", b"h\x09", b"j\0\0\0\1", b"R", b"\x87",
        b"Q", b"t", b"tt", b"ttt", b"q", b"(q\0", b"u", b"s", b"b", b"}b", b"N}b", b")}u", number(1 << 70),
        b"}(" + number(1) + b"Nu", b"}(" + text("a") + b"u", b"}(" + b"Nu", b"}" + text("x") + b"NsN}b",
    ],
)  # fmt: skip
def test_values_that_are_no_tensors_and_broken_stacks(tmp_path, value):
    refused(tmp_path, from_pickle(pickled(("a", value))))


@pytest.mark.parametrize(
    "pickle", [b"\x80\2N.", b"\x80\2.", b"\x80\2}(.", b"\x80\2}}.", b"\x80\2}", b"\x80\2}..", b"\x80\2(}."]
)
def test_pickles_that_do_not_end_with_a_dictionary(tmp_path, pickle):
    refused(tmp_path, from_pickle(pickle), "data.pkl")


def test_attributes(tmp_path):
    refused(tmp_path, from_pickle(b"\x80\2}}" + text("__class__") + b"Nsb."), "sets attributes")


def test_doubled_names(tmp_path):
    refused(tmp_path, from_pickle(pickled(("a\n", SOUND_TENSOR), ("a\n", SOUND_TENSOR))), "stands there twice")


def test_names_are_shown_on_one_line(tmp_path):
    refused(tmp_path, from_pickle(pickled(("a\n\u202e" * 999, b"N"))), "is no tensor")


def test_half_a_surrogate(tmp_path):
    refused(tmp_path, from_pickle(pickled(("\ud800", SOUND_TENSOR))), "not UTF-8")


LENGTH = 1 << 17  # what they cost grows with it, up to MAX_PICKLE_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"N" + b"q\0h\0\x86" * (LENGTH // 5),  # a tuple of itself, twice, and so on: 2 ** 26,000 items
        b"N" + b"\x85" * LENGTH,  # as deep as it is long
        b"}" * LENGTH,
        b"(" * LENGTH,
        b")" * LENGTH,
        b"N" + b"".join(b"r" + struct.pack("<I", index * 999) for index in range(LENGTH // 5)),
        b"}" + b"q\0" + b"h\0" * (LENGTH // 2),
        name("collections", "OrderedDict") + b"q\0)R" + b"h\0)R" * (LENGTH // 4 - 20),
        (number(1) * 60_000).join([b"(", b"t"]),
    ],
)
def test_bombs(tmp_path, body):
    refused(tmp_path, from_pickle(b"\x80\2" + body + b"."), "data.pkl, byte")


def test_bombs_as_keys_and_values_are_never_hashed_compared_or_printed(tmp_path):
    bomb = b"N" + b"q\0h\0\x86" * 300
    bombs = [("a", bomb), ("b", bomb + b"Q"), ("c", name("torch._utils", "_rebuild_tensor_v2") + bomb + b"R")]
    bombs += [("d", tensor(bomb, (1,), (1,))), ("e", many(*[bomb] * 5) + b"Q"), ("f", b"}(" + bomb + b"Nu")]
    sized = [
        name(*("torch._utils", "_rebuild_tensor_v2")),
        many(FIRST, number(0), bomb, bomb, b"\x89", ordered()),
        b"R",
    ]
    for key, value in [*bombs, ("g", b"".join(sized))]:
        refused(tmp_path, from_pickle(pickled((key, value))))


def test_a_pickle_of_a_gigabyte(tmp_path):
    size = 1 << 30
    whole = zip_bytes([Entry("archive/data.pkl", b"", central={"size": size})], zip64=False, begin=64 + size)
    with (tmp_path / "x.pth").open("wb") as file:
        file.write(whole[:64])
        file.seek(64 + size)
        file.write(whole[64:])
    with pytest.raises(FormatError, match=f"more than {MAX_PICKLE_BYTES}"):
        read_torch_file(tmp_path / "x.pth")


# Lies about tensors


@pytest.mark.parametrize(
    "lie",
    [
        tensor(FIRST, (2, 3), (0, 0)), tensor(FIRST, (10**6, 10**6), (0, 0)), tensor(FIRST, (3, 2), (1, 3)),
        tensor(FIRST, (2, 2), (3, 1)), tensor(FIRST, (2,), (2,)), tensor(FIRST, (7,), (1,)),
        tensor(FIRST, (2, 3), (3, 1), 1), tensor(FIRST, (0,), (1,), 7), tensor(FIRST, (2, 3), (3,)),
        tensor(FIRST, (2, -3), (3, 1)), tensor(FIRST, (-2, -3), (-3, 1)), tensor(FIRST, (6,), (1,), -1),
        tensor(FIRST, (1,) * 9, (1,) * 9), tensor(FIRST, (1 << 62, 1 << 62), (1 << 62, 1)),
        tensor(storage("0", "FloatStorage", 7), (6,), (1,)), tensor(storage("0", "FloatStorage", 5), (5,), (1,)),
        tensor(storage("0", "HalfStorage", 6), (6,), (1,)), tensor(storage("0", "FloatStorage", 1 << 62), (1,), (1,)),
        tensor(storage("0", "FloatStorage", -6), (1,), (1,)), tensor(storage("1", "FloatStorage", 6), (6,), (1,)),
        tensor(FIRST, (), ()).replace(number(0) + b"(t(t", number(0) + b"NN"),
        tensor(FIRST, (6,), (1,)).replace(b"\x89", number(0)), tensor(FIRST, (6,), (1,)).replace(b"(K\6t", b"(\x88t"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_their_storage(tmp_path, lie):
    refused(tmp_path, from_pickle(pickled(("a", lie))))


# Lies of the zip file


@pytest.mark.parametrize("change", [{"method": 8}, {"method": 99}, {"flags": 1}, {"flags": 0x40}, {"flags": 0x2000}])
def test_compressed_and_encrypted_entries(tmp_path, change):
    refused(tmp_path, zip_bytes(entries(**change)), "data/0")


def test_an_unused_entry_is_not_inflated_either(tmp_path):
    refused(tmp_path, zip_bytes([*entries(), Entry("archive/more", b"?", method=8)]), "archive/more", "compressed")


@pytest.mark.parametrize(
    "lie",
    [
        {"size": 25}, {"size": 23}, {"size": 1 << 31}, {"packed": 1}, {"start": 0}, {"start": 1}, {"start": 1 << 31},
        {"disk": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("wide", [True, False])
def test_a_directory_that_lies(tmp_path, lie, wide):
    refused(tmp_path, zip_bytes(entries(central=lie), wide=wide))


@pytest.mark.parametrize(
    "lie", [{"size": 1 << 63}, {"start": (1 << 64) - 1}, {"extra": 20}, {"extra": 9}, {"extra": 0}]
)
def test_a_64_bit_field_that_lies(tmp_path, lie):
    refused(tmp_path, zip_bytes(entries(central=lie), wide=True))


@pytest.mark.parametrize("lie", [{"name": "archive/data/1"}, {"signature": b"PK\1\2"}, {"method": 8}, {"flags": 1}])
def test_a_local_header_that_lies(tmp_path, lie):
    refused(tmp_path, zip_bytes(entries(local=lie)), "data/0")


@pytest.mark.parametrize(
    "end",
    [
        {"count": 3},
        {"count": 5},
        {"count": 0},
        {"size": 0},
        {"size": 1},
        {"begin": 0},
        {"begin": 1 << 31},
        {"size": 1 << 31},
    ],
)
@pytest.mark.parametrize("zip64", [True, False])
def test_an_end_that_lies(tmp_path, end, zip64):
    refused(tmp_path, zip_bytes(entries(), zip64, **end))


def test_two_ends_that_disagree(tmp_path):
    refused(tmp_path, zip_bytes(entries())[:-22] + zip_bytes(entries()[:3])[-22:], "what, its end says")


def test_a_64_bit_end_elsewhere(tmp_path):
    refused(tmp_path, zip_bytes(entries(), record=0), "64-bit end")


@pytest.mark.parametrize(
    "own",
    [
        "/etc/passwd",
        "../x",
        "archive/../x",
        "archive/",
        "archive//x",
        "x",
        "",
        "a\\b/c",
        "archive/\n",
        "archive/\0",
        "archive/ü",
    ],
)
def test_names_of_entries(tmp_path, own):
    refused(tmp_path, zip_bytes([*entries(), Entry(own, b"")]))


def test_an_entry_twice(tmp_path):
    refused(tmp_path, zip_bytes([*entries(), entries()[2]]), "archive/data/0", "twice")


def test_two_entries_with_the_same_bytes(tmp_path):
    start = zip_bytes(entries()).index(b"archive/data/0") - 30
    refused(tmp_path, zip_bytes([*entries(), Entry("archive/data/1", DATA, central={"start": start})]), "overlaps")


def test_two_folders(tmp_path):
    refused(tmp_path, zip_bytes([*entries(), Entry("other/data.pkl", b"")]), "2 folders")


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_entries(tmp_path, missing):
    whole = entries()
    del whole[missing]
    refused(tmp_path, zip_bytes(whole), "missing")


def test_no_entries(tmp_path):
    refused(tmp_path, zip_bytes([]))


@pytest.mark.parametrize("order", [b"big", b"", b"little\n"])
def test_the_other_byte_order(tmp_path, order):
    whole = entries()
    whole[1].data = order
    refused(tmp_path, zip_bytes(whole), "byteorder")


def test_a_directory_of_many_megabytes(tmp_path):
    more = [Entry(f"archive/{number:060000}", b"") for number in range(70)]
    refused(tmp_path, zip_bytes(more), "directory")


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\3\4", b"PK\5\6", b"\x80\2}.", bytes(100), b"PK\5\6" + bytes(18)])
def test_what_is_no_zip_file(tmp_path, content):
    refused(tmp_path, content)


def test_cut_short(tmp_path):
    whole = zip_bytes(entries())
    for length in range(0, len(whole), 7):
        refused(tmp_path, whole[:length])


SOUND = zip_bytes(entries())
SOUND_PICKLE = pickled(("a", SOUND_TENSOR), ("b", parameter(SOUND_TENSOR)))
EACH_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def read_or_refused(tmp_path, content: bytes) -> None:
    try:
        arrays(tmp_path, content)
    except FormatError as error:
        assert "\n" not in str(error)
        assert "x.pth" in str(error)


@EACH_EXAMPLE
@given(st.integers(0, len(SOUND) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_any_change_of_a_file_is_read_or_refused(tmp_path, start, insert, removed):
    read_or_refused(tmp_path, SOUND[:start] + insert + SOUND[start + removed :])


@EACH_EXAMPLE
@given(st.integers(2, len(SOUND_PICKLE) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_any_change_of_a_pickle_is_read_or_refused(tmp_path, start, insert, removed):
    read_or_refused(tmp_path, from_pickle(SOUND_PICKLE[:start] + insert + SOUND_PICKLE[start + removed :]))


@EACH_EXAMPLE
@given(
    st.lists(
        st.sampled_from(
            [SOUND_TENSOR, FIRST, text("a"), number(1), *(bytes([c]) for c in b"(tu}sRQb)N"), b"q\0", b"h\0"]
        )
    )
)
def test_any_program_is_read_or_refused(tmp_path, parts):
    read_or_refused(tmp_path, from_pickle(b"\x80\2}" + b"".join(parts) + b"."))

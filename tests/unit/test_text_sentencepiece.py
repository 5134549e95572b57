"""tokenizer.model, SentencePiece's own file, in a folder without tokenizer.json. The files are written here by hand
from the vocabularies of sentencepiece.json, whose ids the sentencepiece library gave."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_inference.errors import FormatError, ModelError, Unsupported
from bitnet_inference.text.tokenizer import Tokenizer

SAMPLES = json.loads((Path(__file__).parent / "sentencepiece.json").read_text(encoding="utf-8"))
BPE = {3: 2}  # of the trainer's settings
AS_IT_IS = {4: 0}  # of the normalizer's: spaces stay


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    low = b""
    while value > 0x7F:
        low, value = low + bytes([value & 0x7F | 0x80]), value >> 7
    return low + bytes([value])


def message(fields) -> bytes:
    """Fields of whole numbers, floats, strings and messages."""
    data = b""
    for number, value in fields.items() if isinstance(fields, dict) else fields:
        if isinstance(value, int):
            data += varint(number << 3) + varint(value)
        elif isinstance(value, float):
            data += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            value = value.encode() if isinstance(value, str) else value
            data += varint(number << 3 | 2) + varint(len(value)) + value
    return data


def model(kind="prefix", trainer=BPE, normalizer=AS_IT_IS, scores=None) -> bytes:
    sample = SAMPLES[kind]
    rows = zip(sample["tokens"], scores or sample["scores"], sample["types"], strict=True)
    pieces = [(1, message({1: token, 2: float(score), 3: number})) for token, score, number in rows]
    more = {**normalizer, 3: int(kind == "prefix")}
    return message([*pieces, (2, message({**trainer, 41: 1, 43: -1})), (3, message({1: "identity", **more}))])


def folder(path: Path, data: bytes, **config) -> Path:
    (path / "tokenizer.model").write_bytes(data)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_ids_are_those_of_the_library(tmp_path, kind):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model(kind)))
    for text, ids in SAMPLES[kind]["ids"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text


def test_the_configuration_says_where_a_space_is_put_in_front(tmp_path):
    """As Transformers 5 reads it: always, at the beginning of a text, or never."""
    for config, ids in (
        ({}, [["▁a"], ["</s>", "▁a"]]),
        ({"legacy": False}, [["▁a"], ["</s>", "a"]]),
        ({"legacy": False, "add_prefix_space": False}, [["a"], ["</s>", "a"]]),
    ):
        tokenizer = Tokenizer.from_folder(folder(tmp_path, model(), **config))
        for text, tokens in zip(("a", "</s>a"), ids, strict=True):
            found = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
            assert [tokenizer.id_to_token(token_id) for token_id in found] == tokens, (config, text)
            assert tokenizer.decode(found) == "a"


def test_llama_2_has_one_beside_params_json(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(model())
    (tmp_path / "params.json").write_text("{}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    for text, ids in SAMPLES["prefix"]["ids"].items():
        assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.eos_ids == (2,) and not tokenizer.templates


def test_a_text_begins_with_the_bos_unless_the_configuration_says_no(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model()))
    assert tokenizer.encode("a")[0] == tokenizer.bos_id == 1 and tokenizer.eos_ids == (2,)
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model(), add_bos_token=False, eos_token="<s>"))
    assert tokenizer.encode("a")[0] != 1 and tokenizer.eos_ids == (1, 2)
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model(), add_bos_token=True, add_eos_token=True))
    assert (tokenizer.encode("a")[0], tokenizer.encode("a")[-1]) == (1, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {3: 1}},
        {"trainer": {}},
        {"trainer": {**BPE, 24: 1}},
        {"normalizer": {4: 1}},
        {"normalizer": {}},
        {"normalizer": {4: 0, 2: "x"}},
    ],
)
def test_what_is_not_done(tmp_path, changes):
    with pytest.raises(Unsupported, match=r"tokenizer\.json of the model beside it"):
        Tokenizer.from_folder(folder(tmp_path, model(**changes)))


def test_a_list_of_ranks_is_no_sentencepiece_model(tmp_path):
    with pytest.raises(Unsupported, match=r"a list of ranks.*put the tokenizer\.json of the model beside it"):
        Tokenizer.from_folder(folder(tmp_path, b"IQ== 0\nIg== 1\n"))


def test_user_defined_spaces_are_found_in_a_text(tmp_path):
    """Gemma has such pieces for runs of spaces."""
    piece = (1, message({1: "▁▁", 2: 0.0, 3: 4}))
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model("plain") + message([piece])))
    spaces = len(SAMPLES["plain"]["tokens"])
    one = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a  a", add_special_tokens=False) == [*one, spaces, *one]
    assert tokenizer.decode([*one, spaces, *one]) == "a  a"


def test_no_space_is_put_behind_a_user_defined_piece(tmp_path):
    """As the library cuts it, and Transformers 5: a space stands before the text alone."""
    pieces = [(1, message({1: piece, 2: 0.0, 3: 4})) for piece in ("\n", "<X>", "a b")]
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model() + b"".join(message([each]) for each in pieces)))
    for text, tokens in (
        ("a\na", ["▁a", "\n", "a"]),
        ("\na<X>", ["▁", "\n", "a", "<X>"]),
        ("aa ba", ["▁a", "a▁b", "a"]),
        ("</s>a", ["</s>", "▁a"]),
    ):
        found = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert [tokenizer.id_to_token(token_id) for token_id in found] == tokens
        assert tokenizer.decode(found) == text.removeprefix("</s>")


def test_user_defined_pieces_by_the_thousand(tmp_path):
    """As a vocabulary has that keeps places for later."""
    names = [f"<reserved_{number}>" for number in range(1000)]
    pieces = b"".join(message([(1, message({1: name, 2: 0.0, 3: 4}))]) for name in names)
    tokenizer = Tokenizer.from_folder(folder(tmp_path, model() + pieces))
    for text, tokens in (
        ("a<reserved_999>a", ["▁a", "<reserved_999>", "a"]),
        ("<reserved_0>a", ["▁", "<reserved_0>", "a"]),
        ("<reserved_500>", ["<reserved_500>"]),
    ):
        found = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.id_to_token(token_id) for token_id in found] == tokens
        assert tokenizer.decode(found) == text


def test_a_broken_file_is_named(tmp_path):
    whole = model()
    scores = [float("nan")] * len(SAMPLES["prefix"]["tokens"])
    too_many = message([(1, b"")]) * ((1 << 19) + 1)
    not_utf8, not_messages = b"\x0a\x03\x0a\x01\xff", b"\x08\x01"
    for data in (
        b"",
        whole[:-1],
        b"\x0b" + whole,
        b"\x80" * 11,
        not_messages,
        model(scores=scores),
        not_utf8,
        too_many,
    ):
        with pytest.raises(FormatError, match=r"tokenizer\.model"):
            Tokenizer.from_folder(folder(tmp_path, data))


@given(at=st.integers(0, 1 << 16), byte=st.integers(0, 255))
def test_any_change_of_a_byte_gives_a_tokenizer_or_an_error_of_ours(tmp_path_factory, at, byte):
    data = bytearray(model())
    data[at % len(data)] = byte
    try:
        Tokenizer.from_folder(folder(tmp_path_factory.mktemp("changed"), bytes(data)))
    except ModelError as error:
        assert "\n" not in str(error)

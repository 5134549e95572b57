"""Meta's tokenizer.model gives the ids that tiktoken gives, and hostile ones end in one line."""

from __future__ import annotations

import base64
import itertools
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from meta_samples import rank_lines, write_ranks

from bitnet_inference.errors import BitNetError, FormatError, InvalidParams, Unsupported
from bitnet_inference.text import ranks
from bitnet_inference.text.chat import Chat
from bitnet_inference.text.tokenizer import Tokenizer

NUM_RANKS = len(rank_lines())
EACH_EXAMPLE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


def tiktoken_ids(tokens: list[bytes], word: bytes) -> list[int]:
    """What tiktoken does: a word is a token, or the neighbours of the lowest rank are merged, the leftmost first."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if word in ranks:
        return [ranks[word]]
    parts = [word[at : at + 1] for at in range(len(word))]
    while True:
        found = [ranks.get(left + right, math.inf) for left, right in itertools.pairwise(parts)]
        if min(found, default=math.inf) == math.inf:
            return [ranks[part] for part in parts]
        at = found.index(min(found))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_it_is_found_and_has_the_special_tokens_of_llama_3(tmp_path):
    tokenizer = Tokenizer.from_folder(write_ranks(tmp_path))
    assert tokenizer.vocab_size == NUM_RANKS + 256
    assert tokenizer.bos_id == NUM_RANKS
    assert tokenizer.eos_ids == (NUM_RANKS + 1, NUM_RANKS + 9)
    names = {0: "begin_of_text", 1: "end_of_text", 2: "reserved_special_token_0", 5: "reserved_special_token_3",
             6: "start_header_id", 7: "end_header_id", 8: "reserved_special_token_4", 9: "eot_id",
             10: "reserved_special_token_5", 255: "reserved_special_token_250"}  # fmt: skip
    for at, name in names.items():
        assert tokenizer.special[f"<|{name}|>"] == NUM_RANKS + at


def test_llama_31_has_others(tmp_path):
    (tmp_path / "params.json").write_text('{"use_scaled_rope": true}')
    tokenizer = Tokenizer.from_folder(write_ranks(tmp_path))
    names = {3: "reserved_special_token_1", 4: "finetune_right_pad_id", 5: "step_id", 6: "start_header_id", 8: "eom_id",
             9: "eot_id", 10: "python_tag", 11: "reserved_special_token_2",
             255: "reserved_special_token_246"}  # fmt: skip
    for at, name in names.items():
        assert tokenizer.special[f"<|{name}|>"] == NUM_RANKS + at
    assert tokenizer.eos_ids == (NUM_RANKS + 1, NUM_RANKS + 8, NUM_RANKS + 9)


# From tiktoken 0.14 with this file of ranks and Llama 3's pattern.
IDS = {
    "hello the band": [282, 260, 223, 157, 264],
    "The  other   an\n\n\nan": [171, 261, 223, 223, 144, 139, 151, 257, 271, 266, 279, 245, 263],
    "aaaaaaa aaaaa": [270, 269, 265, 270],
    "abcabc xabc": [273, 273, 223, 135, 273],
    "1234567 12": [277, 203, 202, 201, 200, 223, 276],
    "café'S 'll ſ": [156, 158, 153, 275, 216, 172, 223, 216, 147, 147, 223, 58, 64],
    "a\r\n \tb  ": [158, 242, 245, 223, 246, 157, 271],
    "'ſst<<|": [216, 58, 64, 285, 195, 195, 131],
}


@pytest.mark.parametrize("text", IDS)
def test_ids_are_those_of_tiktoken(tmp_path, text):
    tokenizer = Tokenizer.from_folder(write_ranks(tmp_path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == IDS[text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [NUM_RANKS, *ids]


@EACH_EXAMPLE
@given(
    st.lists(st.text("ab", min_size=2, max_size=6), unique=True, max_size=25), st.text("ab", min_size=1, max_size=24)
)
def test_any_vocabulary_merges_as_tiktoken_does(tmp_path, words, text):
    tokens = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)]
    tokenizer = Tokenizer.from_folder(
        write_ranks(tmp_path, [line(*pair) for pair in zip(tokens, range(len(tokens)), strict=True)])
    )
    assert tokenizer.encode(text, add_special_tokens=False) == tiktoken_ids(tokens, text.encode())


def test_the_order_of_the_lines_does_not_count(tmp_path):
    tokenizer = Tokenizer.from_folder(write_ranks(tmp_path / "a"))
    other = Tokenizer.from_folder(write_ranks(tmp_path / "b", reversed(rank_lines())))
    assert tokenizer.vocabulary() == other.vocabulary()


def test_special_tokens_in_a_text_are_plain(tmp_path):
    tokenizer = Tokenizer.from_folder(write_ranks(tmp_path))
    plain = tokenizer.encode("<|eot_id|>", add_special_tokens=False)
    assert len(plain) == 10
    assert tokenizer.encode("<|eot_id|>", add_special_tokens=False, parse_special=True) == [NUM_RANKS + 9]


def test_chats_are_encoded_as_meta_does(tmp_path):
    tokenizer = Tokenizer.from_folder(write_ranks(tmp_path))

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def header(role: str) -> list[int]:
        return [NUM_RANKS + 6, *plain(role), NUM_RANKS + 7, *plain("\n\n")]

    messages = [{"role": "system", "content": " the\n"}, {"role": "user", "content": "hello <|eot_id|>"}]
    expected = [NUM_RANKS, *header("system"), *plain("the"), NUM_RANKS + 9]
    expected += [*header("user"), *plain("hello <|eot_id|>"), NUM_RANKS + 9, *header("assistant")]
    assert Chat(tokenizer).encode(messages) == expected


def test_tools_are_refused(tmp_path):
    chat = Chat(Tokenizer.from_folder(write_ranks(tmp_path)))
    with pytest.raises(InvalidParams, match="no tools"):
        chat.render([{"role": "user", "content": "hello"}], tools=[{"type": "function"}])
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(InvalidParams, match="no tools"):
        chat.render([{"role": "assistant", "tool_calls": [call]}])


def test_a_tokenizer_json_goes_first(tmp_path):
    words = Tokenizer.from_folder(write_ranks(tmp_path)).to_json()
    (tmp_path / "tokenizer.json").write_text(words)
    (tmp_path / "tokenizer.model").unlink()
    assert Tokenizer.from_folder(tmp_path).vocab_size == NUM_RANKS + 256


# Hostile files


def refused(folder, *parts: str) -> None:
    with pytest.raises(BitNetError) as caught:
        Tokenizer.from_folder(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for part in ("tokenizer.model", *parts):
        assert part in message


def test_no_ranks(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    refused(tmp_path, "the file is missing")


def test_sentencepiece_is_named(tmp_path):
    """Microsoft's GPU code has ranks."""
    write_ranks(tmp_path)
    (tmp_path / "model_state_int2.pt").touch()
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2")
    with pytest.raises(Unsupported, match=r"SentencePiece.*tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        b"AA==",
        b"AA== 1 2",
        b"AA== x",
        b"AA== 1.0",
        b"\xff\xff 1",
        b"A 1",
        b"A?== 1",
        b"AA== " + b"9" * 9999,
        b"",
        b"x" * 9999,
    ],
)
def test_lines_that_are_none(tmp_path, bad):
    refused(write_ranks(tmp_path, [*rank_lines()[:9], bad, *rank_lines()[9:]]), "line 10")


@pytest.mark.parametrize(
    "lines",
    [
        rank_lines()[1:],  # ranks from 1
        [*rank_lines(), rank_lines()[0]],
        [*rank_lines(), line(b"new", 3)],
        [*rank_lines(), line(b"new", -1)],
        [*rank_lines(), line(b"new", 10**9)],
        [*rank_lines(), line(b"new" * 99, NUM_RANKS)],
        [line(bytes([byte]), byte) for byte in range(255)],
    ],
)
def test_ranks_that_are_none(tmp_path, lines):
    refused(write_ranks(tmp_path, lines))


def test_a_special_token_with_a_rank(tmp_path):
    refused(write_ranks(tmp_path, rank_lines([b"<|eot_id|>"])), "<|eot_id|>", "has a rank too")


def test_a_file_of_a_gigabyte(tmp_path):
    write_ranks(tmp_path)
    with (tmp_path / "tokenizer.model").open("ab") as file:
        file.truncate(1 << 30)
    refused(tmp_path, "at most")


def test_tokens_that_can_be_cut_everywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "MAX_TOKENIZER_BYTES", 20_000)
    deep = ["a" * length for length in range(2, 120)]
    refused(write_ranks(tmp_path, rank_lines(word.encode() for word in deep)), "bytes of merges")


SOUND = b"\n".join(rank_lines()) + b"\n"


@EACH_EXAMPLE
@given(st.integers(0, len(SOUND) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_any_change_is_read_or_refused(tmp_path, start, insert, removed):
    write_ranks(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(SOUND[:start] + insert + SOUND[start + removed :])
    try:
        Tokenizer.from_folder(tmp_path).encode("hello the and", add_special_tokens=False)
    except BitNetError as error:
        assert "\n" not in str(error)


def test_params_that_are_no_object(tmp_path):
    write_ranks(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps([1]))
    with pytest.raises(FormatError, match=r"params.json"):
        Tokenizer.from_folder(tmp_path)

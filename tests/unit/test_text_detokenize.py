import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import byte_level_json, metaspace_json, sentencepiece_json, write_folder
from tokenizers import Tokenizer as Rust
from tokenizers import decoders

from bitnet_inference.errors import InvalidParams, Unsupported
from bitnet_inference.text.detokenize import Detokenizer, StopStrings
from bitnet_inference.text.pieces import read_decoding
from bitnet_inference.text.tokenizer import Tokenizer

KINDS = {"bytes": byte_level_json, "sentencepiece": sentencepiece_json, "metaspace": metaspace_json}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("text"), KINDS[request.param]()))


def pieces(tokenizer, ids, **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()], detokenizer


@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_ids_join_to_what_decoding_gives(tokenizer, data, skip):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    texts, _ = pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=60))
def test_pieces_of_any_text_join_to_the_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    texts, _ = pieces(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids)
    if tokenizer.decoding.byte_level:
        assert "".join(texts) == text
        assert all("\ufffd" not in piece for piece in texts) or "\ufffd" in text


def test_a_character_comes_when_it_is_whole():
    assert_streams(byte_level_json(), "a🦊b", ["a", "", "", "", "🦊", "b", ""])


def test_bytes_of_a_run_come_with_the_token_behind_it(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, sentencepiece_json()))
    ids = [*(tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()), tokenizer.token_to_id("a")]
    assert pieces(tokenizer, ids)[0] == ["", "", "éa", ""]
    assert pieces(tokenizer, ids[:1])[0] == ["", "\ufffd"]


def assert_streams(tokenizer_json, text, expected):
    rust = Rust.from_str(tokenizer_json)
    tokenizer = Vocabulary(rust)
    assert pieces(tokenizer, [rust.token_to_id(token) for token in rust.encode(text).tokens[1:]])[0] == expected


class Vocabulary:
    def __init__(self, rust):
        self.rust, self.decoding = rust, read_decoding(rust.decoder.__getstate__())

    def piece(self, token_id, skip_special_tokens, opening):
        return self.decoding.piece(self.rust.id_to_token(token_id), opening)


def test_a_continuation_keeps_its_first_space(tmp_path):
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, sentencepiece_json()))
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)[0]) == "the fox"
    assert "".join(pieces(tokenizer, ids, opening=False)[0]) == " the fox"


def test_ids_that_no_token_has_say_nothing(tokenizer):
    assert pieces(tokenizer, [tokenizer.vocab_size, -1])[0] == ["", "", ""]


def first_stop(text, stops):
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(ends, default=None)


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30)),
)
def test_stop_strings_cut_and_hold_exactly(text, stops, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    matcher, given_so_far = StopStrings(stops), ""
    for start, end in pairwise(edges):
        given_so_far += matcher.push(text[start:end])
        if matcher.stopped is None:
            held = text[len(given_so_far) : end]
            begins = [n for n in range(end + 1) if any(stop.startswith(text[n:end]) for stop in stops)]
            assert held == text[min(begins, default=end) : end]
    found = first_stop(text, stops)
    rest = matcher.finish()
    assert matcher.stopped == (found and found[2])
    assert given_so_far + rest == (text if found is None else text[: found[0] - len(found[2])])


def test_stopped_text_stays_stopped(tokenizer):
    ids = tokenizer.encode("the fox met a small owl", add_special_tokens=False)
    texts, detokenizer = pieces(tokenizer, ids, stop=["x met", "owl"])
    assert "".join(texts).strip() == "the fo" and detokenizer.stopped == "x met"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidParams, match="stop string is empty"):
        StopStrings(["a", ""])


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
    ],
)
def test_other_decoders_are_refused_by_name(decoder, tmp_path):
    rust = Rust.from_str(byte_level_json())
    rust.decoder = decoder
    with pytest.raises(Unsupported, match="decoder"):
        Tokenizer.from_folder(write_folder(tmp_path, rust.to_str()))


def test_no_decoder_joins_with_spaces(tmp_path):
    state = json.loads(byte_level_json()) | {"decoder": None}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, json.dumps(state)))
    assert "".join(pieces(tokenizer, [40, 41, 42])[0]) == tokenizer.decode([40, 41, 42])

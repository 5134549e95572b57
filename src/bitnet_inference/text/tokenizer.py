"""Text to tokens and back: the one door to the `tokenizers` library."""

from __future__ import annotations

import json
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from bitnet_inference.config import check_unicode
from bitnet_inference.errors import EngineError, FormatError, InvalidParams, Unsupported, is_of_library, said
from bitnet_inference.text.folder import NAMED_TOKENS, TextFiles, lack_of_words
from bitnet_inference.text.folders import read_folder
from bitnet_inference.text.growth import check_growth, check_template
from bitnet_inference.text.pieces import Decoding, read_decoding
from bitnet_inference.text.untaken import check_untaken
from bitnet_inference.text.vocab import END_OF_TURN, text_files

LONG_TEXT = 1 << 13  # characters
# A text takes a hundred times its length while it is encoded: of those that are huge only so many at a time.
HUGE_TEXT, MAX_HUGE = 1 << 17, 2
MAX_VOCAB_SIZE = 1 << 21  # as in formats/sizes.py; some steps take memory for every id below the highest

Result = TypeVar("Result")


class Tokenizer:
    """The tokenizer of a model.

    `vocab_size` is one more than the highest id. `bos_id` is None where the model knows no beginning of text.
    `eos_ids` are all tokens that end an answer: the named one, the generation configuration's, the ends of turns.
    `special` maps the text of special tokens to their ids; `named` maps "bos_token" and its like to their text.
    `templates` are the chat templates by name, `generation` is the generation configuration.
    Where a model has no tokenizer, `has_words` is False: texts are not encoded, and tokens add nothing to a text.
    """

    def __init__(self, files: TextFiles, num_tokens: int = 0) -> None:
        """`num_tokens`: of the model, for files without a tokenizer, which are refused where it is not said."""
        self.path = files.path
        self.named: Mapping[str, str] = files.named
        self.templates: Mapping[str, str] = files.templates
        self.generation: Mapping[str, Any] = files.generation
        self.has_words = files.has_words
        if not self.has_words and not num_tokens:
            raise lack_of_words(self.path)
        self._file = files.path / "tokenizer.json" if files.path.is_dir() else files.path
        self._rust = self._at_the_door(lambda: _load(files))
        self._huge = threading.Semaphore(MAX_HUGE)
        self._read_vocabulary(num_tokens)
        self.bos_id = self._named_id("bos_token")
        self.eos_ids = self._read_eos_ids()
        self.decoding = self._at_the_door(self._read_decoding)
        self._prefix, self._suffix = self._read_affixes()
        self._pieces: dict[int, bytes | str | None] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer {self.path}, {self.vocab_size} tokens{'' if self.has_words else ' without words'}>"

    def __getstate__(self) -> dict[str, Any]:  # for a copy, and for other processes
        return {name: value for name, value in vars(self).items() if name not in ("_huge", "_plain")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _huge=threading.Semaphore(MAX_HUGE))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises NotFound, FormatError and Unsupported."""
        return cls(read_folder(path))

    @classmethod
    def from_metadata(cls, path: str | Path, metadata: Mapping[str, Any], num_tokens: int = 0) -> Tokenizer:
        """The tokenizer in the metadata of a GGUF file. Raises FormatError and Unsupported."""
        return cls(text_files(Path(path), metadata), num_tokens)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text.

        `add_special_tokens` adds what the model wants around a text, as a rule the BOS in front; a text that begins
        with it already (then `parse_special` is on) gets no second one. Without `parse_special`, special tokens
        written in the text are plain text. Raises InvalidParams for what is no text, Unsupported without words.
        """
        if not isinstance(text, str):
            raise InvalidParams(f"a text to encode must be a string, not {type(text).__name__}")
        self.check_words()
        ids = self._encode(self._rust, text)
        if not parse_special and not self.special_ids.isdisjoint(ids):
            ids = self._encode(self._plain, text)
            if not (self.special_ids - self._unknown_ids).isdisjoint(ids):
                raise InvalidParams("the text spells a special token that this tokenizer cannot write as plain text")
        if not add_special_tokens:
            return ids
        prefix = [] if ids[: len(self._prefix)] == self._prefix else self._prefix
        return prefix + ids + self._suffix

    def check_words(self) -> None:
        """Raise Unsupported where there is no tokenizer, for whoever needs one."""
        if not self.has_words:
            raise Unsupported(str(lack_of_words(self.path)))

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a rendered conversation: special tokens count, a BOS goes in front if none is there, no EOS."""
        ids = self.encode(text, add_special_tokens=False, parse_special=True)
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """As encode_prompt, for a text in pieces; True with a piece that is plain text, special tokens and all."""
        ids: list[int] = []
        # A line break in front keeps SentencePiece from adding a space, as it does at the beginning of every text.
        newline = self.encode("\n", add_special_tokens=False)
        for text, plain in pieces:
            lead = newline if ids else []
            piece = self.encode("\n" + text if lead else text, add_special_tokens=False, parse_special=not plain)
            if piece[: len(lead)] != lead:
                lead, piece = [], self.encode(text, add_special_tokens=False, parse_special=not plain)
            ids += piece[len(lead) :]
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; what is no UTF-8 becomes U+FFFD. Raises InvalidParams for an id outside the vocabulary."""
        if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):
            raise InvalidParams(f"ids to decode are {ids!r:.60}: give a list of token ids, as in [1, 2]")
        checked = [self._checked(token_id) for token_id in ids]
        return self._at_the_door(lambda: self._rust.decode(checked, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None where the id is a gap. Raises InvalidParams."""
        return self._rust.id_to_token(self._checked(token_id))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None where it has no such token."""
        return self._rust.token_to_id(token)

    def vocabulary(self) -> dict[str, int]:
        """All tokens, as the vocabulary spells them, and their ids."""
        return self._rust.get_vocab(with_added_tokens=True)

    def added_beyond(self, num_tokens: int) -> list[str]:
        """The tokens that a model of so many has no rows for, as Gemma 3 has none for its image token.

        Raises Unsupported where one of them is more than an added token, or begins or ends a text.
        """
        added = {token_id: token.content for token_id, token in self._rust.get_added_tokens_decoder().items()}
        needed = {self.bos_id, *self.eos_ids, *self._prefix, *self._suffix}
        beyond = [token_id for token_id in self.vocabulary().values() if token_id >= num_tokens]
        if any(token_id in needed or token_id not in added for token_id in beyond):
            why = f"the tokenizer has {self.vocab_size} tokens, the model {num_tokens}: they do not belong together"
            raise Unsupported(f"{self.path}: {why}")
        return [added[token_id] for token_id in sorted(beyond)]

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the model wants before and behind a text."""
        return list(self._prefix), list(self._suffix)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, with all special tokens marked as such, and what goes around
        a text."""
        return self._at_the_door(lambda: self._rust.to_str())

    def piece(self, token_id: int, skip_special_tokens: bool = True, opening: bool = False) -> bytes | str | None:
        """What one token adds to a text (see pieces.py); None for a skipped token and for an unknown id."""
        if skip_special_tokens and token_id in self.special_ids:
            return None
        if opening:
            return self._piece(token_id, opening=True)
        if token_id not in self._pieces:
            self._pieces[token_id] = self._piece(token_id, opening=False)
        return self._pieces[token_id]

    def _piece(self, token_id: int, opening: bool) -> bytes | str | None:
        token = self._rust.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return None if token is None else self.decoding.piece(token, opening)

    @cached_property
    def _unknown_ids(self) -> set[int | None]:
        """What the model writes for a character that it cannot spell: no text says it, and any may have it."""
        model = self._rust.model
        if isinstance(model, tokenizers.models.Unigram):  # whose state alone tells
            return {json.loads(model.__getstate__())["unk_id"]}
        unknown = getattr(model, "unk_token", None)
        return {None if unknown is None else self._rust.token_to_id(unknown)}

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A twin for which special tokens are plain text; a twin and not a switch, because threads share us."""
        twin = self._at_the_door(lambda: tokenizers.Tokenizer.from_str(self.to_json()))
        twin.encode_special_tokens = True
        return twin

    def _encode(self, rust: tokenizers.Tokenizer, text: str) -> list[int]:
        check_unicode("the text", text)
        if len(text) < LONG_TEXT:
            return self._at_the_door(lambda: rust.encode(text, add_special_tokens=False).ids)
        # Only batches let other threads run meanwhile. They start threads too, which short texts do without.
        with self._huge if len(text) >= HUGE_TEXT else nullcontext():
            return self._at_the_door(lambda: rust.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _checked(self, token_id: int) -> int:
        try:
            number = operator.index(token_id)
        except TypeError:
            raise InvalidParams(f"a token id must be a whole number, not {token_id!r}") from None
        if not 0 <= number < self.vocab_size:
            why = f"token id {number} is outside the vocabulary of {self.vocab_size} tokens"
            raise InvalidParams(f"{why}: give 0 to {self.vocab_size - 1}")
        return number

    def _at_the_door(self, work: Callable[[], Result]) -> Result:
        """Run the library; it raises bare exceptions, and panics that are no Exception at all."""
        try:
            return work()
        except Unsupported as error:
            raise Unsupported(f"{self._file}: {error}") from None
        except BaseException as error:
            if not is_of_library("tokenizers", error):
                raise
            if "ThreadPoolBuildError" in (why := said(error)):
                cure = "raise the limit of processes (ulimit -u), or set TOKENIZERS_PARALLELISM=false"
                raise EngineError(f"the system does not give the tokenizers library its threads: {cure}") from None
            place = re.search(r" at (line \d+ column \d+)$", why)
            where = place.group(1) if place else ""
            why = why[: place.start()] if place else why
            raise FormatError(self._file, where, f"broken tokenizer ({why}): download the file again") from None

    def _read_vocabulary(self, num_tokens: int) -> None:
        highest = max(self._rust.get_vocab().values(), default=-1) if self.has_words else num_tokens - 1
        if not 0 <= highest < MAX_VOCAB_SIZE:
            raise FormatError(self._file, "model.vocab", f"the highest id is {highest}: download the file again")
        self.vocab_size = highest + 1
        added = self._rust.get_added_tokens_decoder()
        self.special = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special.values())

    def _named_id(self, name: str) -> int | None:
        return self._rust.token_to_id(self.named[name]) if name in self.named else None

    def _read_eos_ids(self) -> tuple[int, ...]:
        listed = self.generation.get("eos_token_id")
        ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
            file = self.path / "generation_config.json"
            raise FormatError(file, "eos_token_id", f"must be an id or a list of ids, not {listed!r:.60}: correct it")
        added = self._rust.get_added_tokens_decoder()
        turns = [token_id for token_id, token in added.items() if token.content in END_OF_TURN]
        named = self._named_id("eos_token")
        inside = (token_id for token_id in ids if 0 <= token_id < self.vocab_size)  # -1 is written for none
        return tuple(sorted({*inside, *turns, *([] if named is None else [named])}))

    def _read_decoding(self) -> Decoding:
        rust = self._rust
        parts = (rust.normalizer, rust.pre_tokenizer, rust.post_processor, rust.decoder)
        states = (None if part is None else part.__getstate__() for part in parts)  # an empty sequence counts as false
        normalizer, pre_tokenizer, post_processor, decoder = states
        check_growth("normalizer and pre_tokenizer", normalizer, pre_tokenizer)
        check_template(post_processor)
        check_growth("decoder", decoder)
        return read_decoding(decoder)

    def _read_affixes(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts around a text."""
        probes = [self._encode(self._rust, text) for text in ("a", "0", " ")]
        bare = next((ids for ids in probes if ids), [])
        text = ("a", "0", " ")[probes.index(bare)]
        whole = self._at_the_door(lambda: self._rust.encode(text, add_special_tokens=True).ids)
        if (highest := max(whole, default=0)) >= self.vocab_size:
            raise FormatError(self._file, "post_processor", f"adds the id {highest}, which no token has: correct it")
        length = len(bare)
        for start in range(len(whole) - length, -1, -1):
            if whole[start : start + length] == bare:
                return whole[:start], whole[start + length :]
        raise FormatError(
            self._file, "post_processor", "changes the text's own tokens, which is not supported: use another model"
        )


def _load(files: TextFiles) -> tokenizers.Tokenizer:
    check_untaken(files.tokenizer_json)
    rust = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
    rust.no_truncation()
    rust.no_padding()
    if getattr(rust.model, "dropout", None):  # of training: a text would be other tokens every time
        rust.model.dropout = None
    _make_special(rust, files.named)
    if files.add_bos is not None:
        wanted = (("bos_token", files.add_bos), ("eos_token", files.add_eos))
        rust.post_processor = _around(rust, *(files.named.get(name) if adds else None for name, adds in wanted))
    return rust


def _make_special(rust: tokenizers.Tokenizer, named: Mapping[str, str]) -> None:
    """What the configuration names is special, even where tokenizer.json forgot to say so.

    But padding or the unknown token may be any token of the vocabulary, as "!" is, the first one of many: those are
    special only if they are listed as added tokens, which no ordinary text is made of.
    """
    listed = {token.content: token for token in rust.get_added_tokens_decoder().values()}
    for role in filter(named.__contains__, NAMED_TOKENS):  # the model's own names are for its templates alone
        token = listed.get(text := named[role])
        if token is None and role not in ("pad_token", "unk_token") and rust.token_to_id(text) is not None:
            token = tokenizers.AddedToken(text, normalized=False)
        if token is not None and not token.special:  # those that are keep the spaces that they take in
            token.special = True
            rust.add_special_tokens([token])


def _around(rust: tokenizers.Tokenizer, *names: str | None) -> tokenizers.processors.PostProcessor:
    """Puts a token in front of a text and one behind it, where there are such tokens."""
    ids = {name: token_id for name in names if name and (token_id := rust.token_to_id(name)) is not None}
    begin, end = ([{"SpecialToken": {"id": name, "type_id": 0}}] if name in ids else [] for name in names)
    single, second = ([*begin, {"Sequence": {"id": text, "type_id": 0}}, *end] for text in "AB")
    special = {name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in ids.items()}
    state = {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": special}
    processor = tokenizers.processors.TemplateProcessing()
    processor.__setstate__(json.dumps(state).encode())
    return processor

"""Which tokens a grammar leaves, step by step: the one door to the `llguidance` library."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from bitnet_inference.errors import EngineError, InvalidParams, is_of_library

MAX_KEPT = 16  # compiled grammars
MAX_WORDS = 300  # of the library's, in an error
# What the library says of options that nobody here can set, or too shortly; and what is said in its place.
_OWN_WORDS = {
    "<non-verbose/>": "",
    "NoExtensionBias": "it allows no text",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf":
        "the cases of oneOf are told apart by their types, or by constants, their own or those of a property; "
        "those of anyOf may overlap",
}  # fmt: skip
# One line, with or without a space after commas and colons: free white space lets a model write blanks for ever.
_JSON_STYLE: llguidance._lib.JsonCompileOptions = {
    "whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"
}  # fmt: skip
# Or a name that a schema knows is another one to the library, in escapes. What it says itself of control characters
# needs them.
_ESCAPES: llguidance._lib.JsonCompileOptions = {"json_allowed_escapes": 'nrtbf\\"'}
_CONTROL = re.compile(r"\\u00(?:[01]|7[fF])")
# Strings, regular expressions and comments of Lark.
_TEXTS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])*/')
# Or the library (1.9.1) follows what must come next to its end: for ever where there is none, as in start: /a*/ start
_ONE_STEP_AT_A_TIME = '\n%llguidance {"no_forcing": true}\n'

Result = TypeVar("Result")


def schema_grammar(schema: str) -> str:
    """The library's grammar for a JSON schema."""
    style = _JSON_STYLE if _CONTROL.search(schema) else _JSON_STYLE | _ESCAPES
    return _at_the_door("json_schema", lambda: llguidance.LLMatcher.grammar_from_json_schema(schema, None, style))


def regex_grammar(regex: str) -> str:
    """The library's grammar for a regular expression."""
    return _at_the_door("regex", lambda: llguidance.LLMatcher.grammar_from_regex(regex))


def lark_grammar(lark: str) -> str:
    """The library's grammar for one in its dialect of Lark."""
    return _at_the_door("lark", lambda: llguidance.LLMatcher.grammar_from_lark(lark + _ONE_STEP_AT_A_TIME))


def gbnf_grammar(gbnf: str) -> str:
    """The library's grammar for one of llama.cpp."""
    return lark_grammar(_at_the_door("gbnf", lambda: gbnf_to_lark(gbnf)))


def refusal(source: str) -> str:
    """Why the library refuses a grammar, in one line; empty if it does not."""
    refused, messages = _at_the_door(
        "it", lambda: llguidance.LLMatcher.validate_grammar_with_warnings(source, None, limits=_limits())
    )
    return _line(messages[0]) if refused else ""


class Openings(NamedTuple):
    """The tokens that an answer may begin with, where a decoder drops a space in front: those with it, and without.

    No other space is in them: Metaspace drops all marks of the first token.
    """

    spaced: NDArray[np.uint32]
    plain: NDArray[np.uint32]


class Matchers:
    """Makes matchers for one vocabulary. May be shared by threads."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str],
        with_own_words: Callable[[], tuple[str, Collection[str]]],
        num_tokens: int,
        end_ids: Iterable[int],
    ) -> None:
        """There are ids 0 to `num_tokens` - 1.

        `with_own_words()`, asked when the first matcher is made, is a tokenizer.json, and those of its tokens that are
        used where a text spells them, though the library would not. For grammars that name one of these as a token
        there is `tokenizer_json()`.
        """
        self._read, self._read_words = tokenizer_json, with_own_words
        self._num_tokens, self._end_ids = num_tokens, sorted(end_ids)
        self._tokens: llguidance.LLTokenizer | None = None
        self._words: Collection[str] = ()
        self._named: llguidance.LLTokenizer | None = None
        self._first: Openings | None = None
        self._compiled: OrderedDict[tuple[str, bool], list[llguidance.LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, kind: str, source: str, end_ids: Iterable[int], drops_space: bool) -> Matcher:
        """A new matcher for a text that these tokens end, and which a space in front is no part of if `drops_space`.

        `kind` and `source` are those of a Grammar. Raises InvalidParams for one that allows nothing.
        """
        with self._lock:
            compiled = self._compiled.pop((source, drops_space), None) or self._compile(kind, source, drops_space)
            self._compiled[source, drops_space] = compiled
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
            return self._start(compiled, end_ids)

    def _compile(self, kind: str, source: str, drops_space: bool) -> list[llguidance.LLMatcher]:
        """The grammar, and behind a space."""
        tokens, words = self._vocabulary(source)
        end = "" if _is_forced(source) and not _spells_token(source, tokens, words) else _ONE_STEP_AT_A_TIME
        if end and _is_forced(source):
            source = _within(f"start: @whole{end}", "whole", source)
        sources = [source, *([_within(f'start: " " @text{end}', "text", source)] if drops_space else ())]
        compiled = [llguidance.LLMatcher(tokens, each, log_level=0, limits=_limits()) for each in sources]
        trial = self._start(compiled, ())
        try:
            for _ in range(2):  # what is too much for the library shows here, and not in the engine's thread
                trial.accept_any()
        except EngineError as error:
            raise InvalidParams(f"grammar: {kind}: {error}") from None
        return compiled

    def _vocabulary(self, source: str) -> tuple[llguidance.LLTokenizer, Collection[str]]:
        if self._tokens is None:
            tokenizer_json, self._words = self._read_words()
            self._tokens = self._read_tokens(tokenizer_json)
        names = _TEXTS.sub("", _lark(source))
        if not any(word in names for word in self._words):
            return self._tokens, self._words
        self._named = self._named or self._read_tokens(self._read())
        return self._named, ()

    def _start(self, compiled: list[llguidance.LLMatcher], end_ids: Iterable[int]) -> Matcher:
        assert self._tokens is not None, "there is a grammar, so there are tokens"
        plain, *spaced = (each.deep_copy() for each in compiled)
        started = Matcher(plain, self._num_tokens, end_ids, self._tokens.eos_tokens)
        if spaced:
            self._first = self._first or self._openings(self._tokens)
            started.behind_space(spaced[0], self._first)
        return started

    def _openings(self, tokens: llguidance.LLTokenizer) -> Openings:
        def such_as(regex: str) -> NDArray[np.uint32]:
            matcher = llguidance.LLMatcher(tokens, regex_grammar(regex), log_level=0)
            return Matcher(matcher, self._num_tokens, (), tokens.eos_tokens).mask()

        special = ~such_as("(?s).*")
        return Openings(such_as(" [^ ]*|"), such_as("[^ ]*") | special)

    def _read_tokens(self, tokenizer_json: str) -> llguidance.LLTokenizer:
        def read() -> llguidance.LLTokenizer:
            return llguidance.LLTokenizer(tokenizer_json, n_vocab=self._num_tokens, eos_token=self._end_ids or None)

        return _at_the_door("this model's tokenizer", read)


class Matcher:
    """How far one text has come in its grammar; see engine.constraint.Constraint.

    End tokens may follow exactly where the grammar is complete; special tokens never, unless it names them.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, num_tokens: int, end_ids: Iterable[int], library_ends: Iterable[int]
    ) -> None:
        """`library_ends`: what the library takes for ends, which may be more than `end_ids`."""
        end_ids = [token_id for token_id in end_ids if 0 <= token_id < num_tokens]
        self._matcher = matcher
        self._bits = np.zeros(-(-num_tokens // 32), dtype=np.uint32)
        self._address = self._bits.ctypes.data
        self._ends = _with_bits(len(self._bits), end_ids)
        self._others = ~(self._ends | _with_bits(len(self._bits), library_ends))
        self._spaced: llguidance.LLMatcher | None = None
        self.is_done = False

    def behind_space(self, spaced: llguidance.LLMatcher, first: Openings) -> None:
        """Let the text have a space in front that is dropped: then `spaced` follows it."""
        self._spaced, self._first = spaced, first

    def mask(self) -> NDArray[np.uint32]:
        """See Constraint. Raises EngineError when the library gives up, InvalidParams where no token fits."""
        self._compute(self._matcher)
        if self._spaced is not None:  # or the form of a text could begin with the space that is dropped
            plain = self._bits & self._first.plain
            self._compute(self._spaced)
            self._bits[:] = plain | (self._bits & self._first.spaced)
        self._bits &= self._others
        can_end, can_go_on = self._matcher.is_accepting(), self._bits.any()
        if not can_end and not can_go_on:
            why = "no token of the vocabulary can follow, but for those that stop_token_ids takes"
            raise InvalidParams(f"grammar: {why}: allow more")
        self.is_done = not can_go_on
        if can_end:
            self._bits |= self._ends
        return self._bits

    def accept(self, token_id: int) -> None:
        """See Constraint. Raises EngineError when the library gives up."""
        if self._spaced is not None:
            is_spaced = self._first.spaced[token_id // 32] >> np.uint32(token_id % 32) & 1
            self._matcher, self._spaced = (self._spaced if is_spaced else self._matcher), None
        self._matcher.consume_token(token_id)
        self._raise_error(self._matcher)
        self.is_done = self._matcher.is_stopped()

    def accept_any(self) -> None:
        """Take a step with some token that may follow, if one may."""
        bits = self.mask() & self._others
        for word in np.flatnonzero(bits)[:1].tolist():
            self.accept(32 * word + int(bits[word]).bit_length() - 1)

    def _compute(self, matcher: llguidance.LLMatcher) -> None:
        matcher.unsafe_compute_mask_ptr(self._address, self._bits.nbytes)
        self._raise_error(matcher)

    def _raise_error(self, matcher: llguidance.LLMatcher) -> None:
        if matcher.is_error():
            raise EngineError(f"{_line(matcher.get_error())}: make the grammar simpler")


def _lark(source: str) -> str:
    """What of a grammar is Lark."""
    if not _is_forced(source):
        return source
    return "\n".join(each.get("lark_grammar") or "" for each in json.loads(source)["grammars"])


def _spells_token(source: str, tokens: llguidance.LLTokenizer, words: Collection[str]) -> bool:
    """Whether it has the text of a special token, or of a word that is one token.

    Where the former must come, the library allows that token alone, and where the latter must, all others.
    """
    text = source.replace("\\", "")
    has_word = any(word in text for word in words)
    return has_word or any(map(tokens.is_special_token, tokens.tokenize_str(text)))


def _is_forced(source: str) -> bool:
    """Whether the library follows what must come next in this grammar; Lark alone says that it shall not."""
    return source.startswith('{"grammars"')


def _within(lark: str, name: str, source: str) -> str:
    """A Lark grammar in which @`name` stands for this one."""
    first, *others = json.loads(source)["grammars"] if _is_forced(source) else [{"lark_grammar": source}]
    start = {"name": "start", "lark_grammar": lark}
    return json.dumps({"grammars": [start, {**first, "name": name}, *others]})


def _with_bits(num_words: int, token_ids: Iterable[int]) -> NDArray[np.uint32]:
    bits = np.zeros(num_words, dtype=np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return bits


def _limits() -> llguidance.LLParserLimits:
    # Less work than by default before the library gives up on a grammar.
    return llguidance.LLParserLimits(initial_lexer_fuel=300_000, verbose_errors=False)


def _line(text: str) -> str:
    """The first part of the library's words, in one line."""
    for words, own in _OWN_WORDS.items():
        text = text.replace(words, own)
    text = " ".join(text.split())
    return re.sub(r" \d+ \| .*", "", text)[:MAX_WORDS].rstrip(" .:")


def _at_the_door(what: str, work: Callable[[], Result]) -> Result:
    """Run the library; it raises bare exceptions, and panics that are no Exception at all."""
    try:
        return work()
    except BaseException as error:
        if not is_of_library("llguidance", error):
            raise
        why = _line(str(error)) or type(error).__name__
        raise InvalidParams(f"grammar: {what} is not supported ({why}): change it") from None

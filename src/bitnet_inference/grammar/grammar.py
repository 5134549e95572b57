"""Grammar: the form that a caller demands of a text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from bitnet_inference.config import check_unicode
from bitnet_inference.errors import InvalidParams
from bitnet_inference.grammar.endless import is_endless
from bitnet_inference.grammar.fault import fault_place
from bitnet_inference.grammar.readable import readable_schema
from bitnet_inference.grammar.regex import check_counts, check_regex, plain_classes
from bitnet_inference.grammar.runs import with_runs
from bitnet_inference.grammar.schema import check_multiples, check_schema, parts_of, without_null_keywords

MAX_CHARS = 1 << 16
MAX_CHOICES = 1000
MAX_RULES = 500  # some thousands in a chain overflow the library's stack

_RULE_SIGNS = re.compile(r"[:(\[]")
_LENIENT = re.compile(r'"(?:lenient|coerce_one_of)"\s*:\s*true')  # would ignore parts of a schema
_LARK_JSON = re.compile(r"%json\s*")
_GBNF_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\[(?:[^\]\\\n]|\\.)*+\]?|#[^\n]*|\{[^}\n]*\}|[\w-]+|[.)]')
_GBNF_SIGNS = {".": r'(.|"\n")', ")": ' "")'}
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)")
_NO_EFFECT = re.compile(r"\b(?:temperature|stop)\s*=(?=[^\n]*\]\s*:)")


@dataclass(frozen=True, init=False)
class Grammar:
    """The form of a text: give exactly one of these. Raises InvalidParams for what is impossible or not supported.

    `json_schema`: a JSON schema, as a dict or as its text. The text is one line of JSON that is valid for it.
    `json_object`: True for any JSON object.
    `regex`: a regular expression that the whole text matches, in the syntax of Rust's regex crate.
    `lark`: a grammar in llguidance's dialect of Lark; its first rule is `start`.
    `gbnf`: a grammar in the syntax of llama.cpp; its first rule is `root`.
    `choice`: the text is one of these strings.

    `kind` is the name of what was given. `source` is its text in the form that the library reads.
    """

    kind: str
    source: str

    def __init__(
        self,
        *,
        json_schema: Mapping[str, Any] | str | None = None,
        json_object: bool = False,
        regex: str | None = None,
        lark: str | None = None,
        gbnf: str | None = None,
        choice: Sequence[str] | None = None,
    ) -> None:
        wanted = {"json_schema": json_schema, "regex": regex, "lark": lark, "gbnf": gbnf, "choice": choice}
        given = {kind: value for kind, value in wanted.items() if value is not None}
        if not isinstance(json_object, bool):
            raise InvalidParams(f"grammar: json_object is {json_object!r}: give True, or leave it out")
        if json_object:
            given["json_object"] = {"type": "object"}
        if len(given) != 1:
            names = ", ".join([*wanted, "json_object"])
            raise InvalidParams(f"a grammar has {' and '.join(given) or 'nothing'}: give exactly one of {names}")
        ((kind, value),) = given.items()
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "source", _READERS[kind](value))
        self._check(value)

    @classmethod
    def around(cls, lark: str, **parts: Grammar) -> Grammar:
        """A Lark grammar in which @name stands for one of the parts. Raises InvalidParams."""
        grammars = [{"name": "start", "lark_grammar": lark}]
        grammars += [{**part._alone(), "name": name} for name, part in parts.items()]
        whole = object.__new__(cls)
        object.__setattr__(whole, "kind", "lark")
        object.__setattr__(whole, "source", json.dumps({"grammars": grammars}))
        whole._check()
        return whole

    def _alone(self) -> dict[str, Any]:
        """As one of several grammars."""
        if self.kind in ("lark", "gbnf"):  # whose source is the library's dialect of Lark
            return {"lark_grammar": self.source}
        (only,) = json.loads(self.source)["grammars"]
        return dict(only)

    def _check(self, given: object = None) -> None:
        from bitnet_inference.grammar.matcher import refusal  # the library is loaded when it is needed

        if why := refusal(self.source):
            place = self._fault_place(given, refusal) if self.kind == "json_schema" else None
            where = f"at {place}: " if place else ""
            raise InvalidParams(f"grammar: {self.kind}: {where}{why}: change it")
        if self.kind == "json_schema" and is_endless(self._alone()["json_schema"]):
            cure = "make a property optional, or let it be null"
            raise InvalidParams(f"grammar: json_schema: no text ends that fits, because it requires itself: {cure}")

    def _fault_place(self, given: object, refusal: Callable[[str], str]) -> str | None:
        whole = self._alone()

        def reason(schema: Mapping[str, Any]) -> str:
            return refusal(json.dumps({"grammars": [{**whole, "json_schema": schema}]}))

        return fault_place(parsed_schema(given), whole["json_schema"], reason)


def parsed_schema(schema: object) -> Mapping[str, Any]:
    """A JSON schema that is given as an object, or as its text. Raises InvalidParams."""
    if isinstance(schema, str):
        schema = _parsed("json_schema", _checked_text("json_schema", schema))
    if isinstance(schema, type):
        cure = "give its schema, as what model_json_schema() of Pydantic's classes returns"
        raise InvalidParams(f"grammar: json_schema is the class {schema.__name__}: {cure}")
    if not isinstance(schema, Mapping):
        raise InvalidParams(f"grammar: json_schema is {type(schema).__name__}: give a JSON object, a dict or text")
    return without_null_keywords(schema)


def _read_schema(given: object) -> str:
    schema = parsed_schema(given)
    check_schema(schema)
    try:
        text = json.dumps(readable_schema(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidParams(f"grammar: json_schema is no JSON ({error}): give dicts, lists, strings, numbers") from None
    _checked_text("json_schema", text)
    from bitnet_inference.grammar.matcher import schema_grammar

    return schema_grammar(text)


def _parsed(kind: str, text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise InvalidParams(f"grammar: {kind}: too deeply nested: make it flatter") from None
    except ValueError as error:
        raise InvalidParams(f"grammar: {kind} is no JSON ({error}): correct it") from None


def _read_regex(regex: object) -> str:
    from bitnet_inference.grammar.matcher import regex_grammar

    text = _checked_text("regex", regex)
    check_regex("regex", text)
    return regex_grammar(text)


def _read_lark(lark: object) -> str:
    text = _checked_text("lark", lark)
    _check_rules("lark", text)
    if found := _NO_EFFECT.search(text) or _LENIENT.search(text):
        raise InvalidParams(f"grammar: lark: {found[0]} cannot be kept: leave it out")
    from bitnet_inference.grammar.matcher import lark_grammar

    return lark_grammar(_with_readable_schemas(text))


def _with_readable_schemas(lark: str) -> str:
    """The schemas in it are checked as others are, and in words that the library reads rightly.

    Also what only seems to be one, in a string or a comment: who is to tell that as the library does?
    """
    parts, at, all_schemas = [], 0, list[Mapping[str, Any]]()
    while found := _LARK_JSON.search(lark, at):
        parts.append(lark[at : found.end()])
        try:
            given, at = json.JSONDecoder().raw_decode(lark, found.end())
        except (ValueError, RecursionError) as error:
            raise InvalidParams(f"grammar: lark: no JSON stands behind %json ({error}): correct it") from None
        schema = parsed_schema(given)
        check_schema(schema)
        all_schemas += parts_of(schema)
        parts.append(json.dumps(readable_schema(schema)))
    check_multiples("", all_schemas)
    return "".join([*parts, lark[at:]])


def _read_gbnf(gbnf: object) -> str:
    from bitnet_inference.grammar.matcher import gbnf_grammar

    text = _checked_text("gbnf", gbnf)
    _check_rules("gbnf", text)
    return gbnf_grammar(_readable_gbnf(with_runs(text)))


def _readable_gbnf(text: str) -> str:
    """In words that the library reads rightly: characters for their numbers, and `.` for the end of a line, too.

    It takes rules of names that differ by case for one, calls the first one start, and writes ("a"*)* as "a"**. Where
    no other rule uses the first one, that stands behind another, so that all is one terminal if no rule uses itself:
    it reads each terminal as far as it goes, and "ab" as [a-z]+ "b" would never end.
    """
    others: dict[str, str] = {}

    def renamed(name: str) -> str:
        if name not in others:
            plain, taken = _plain_name(name), {"root", "start", *map(_plain_name, others.values())}
            free = (f"{plain}{number}" for number in count())
            others[name] = name if plain not in taken else next(each for each in free if each not in taken)
        return others[name]

    def part(found: re.Match[str]) -> str:
        sign = found[0]
        if sign[0] in '"[':
            return _GBNF_ESCAPE.sub(_character, plain_classes(sign) if sign[0] == "[" else sign)
        return sign if sign[0] in "#{" else _GBNF_SIGNS.get(sign) or renamed(sign)

    readable = _GBNF_PARTS.sub(part, text)
    return f"{readable}\nroot ::= {others['root']}\n" if "root" in others else readable


def _plain_name(name: str) -> str:
    """As the library writes a rule's name, but for its case."""
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("-", "_")).lower()


def _character(escape: re.Match[str]) -> str:
    if escape[1] is None and escape[2] is None:
        return escape[0]
    number = int(escape[1] or escape[2], 16)
    if number > sys.maxunicode or 0xD800 <= number < 0xE000:
        raise InvalidParams(f"grammar: gbnf: {escape[0]} is no character: correct it")
    if number < 0x80:
        return f"\\x{number:02x}"
    return chr(number)


def _read_choice(choice: object) -> str:
    from bitnet_inference.grammar.matcher import regex_grammar

    if not isinstance(choice, Sequence) or isinstance(choice, str | bytes) or not choice:
        raise InvalidParams(f"grammar: choice is {choice!r:.100}: give a list of strings")
    if not all(isinstance(each, str) for each in choice):
        raise InvalidParams(f"grammar: choice is {choice!r:.100}: give a list of strings")
    if len(choice) > MAX_CHOICES:
        raise InvalidParams(f"grammar: choice has {len(choice)} strings: give at most {MAX_CHOICES}")
    escaped = "|".join(re.sub(r"([^\w\s<>])", _escape, each) for each in choice)  # \< is the beginning of a word
    return regex_grammar(_checked_text("choice", escaped))


def _escape(match: re.Match[str]) -> str:
    return f"\\{match[0]}" if match[0].isascii() else match[0]


_READERS: Mapping[str, Callable[[Any], str]] = {
    "json_schema": _read_schema,
    "json_object": _read_schema,
    "regex": _read_regex,
    "lark": _read_lark,
    "gbnf": _read_gbnf,
    "choice": _read_choice,
}


def _checked_text(kind: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidParams(f"grammar: {kind} is {type(text).__name__}: give a string")
    if len(text) > MAX_CHARS:
        raise InvalidParams(f"grammar: {kind} has {len(text)} characters: give at most {MAX_CHARS}")
    if not text and kind != "choice":
        raise InvalidParams(f"grammar: {kind} is empty: leave it out")
    check_unicode(f"grammar: {kind}", text)
    return text


def _check_rules(kind: str, text: str) -> None:
    check_counts(kind, text)
    if (count := len(_RULE_SIGNS.findall(text))) > MAX_RULES:
        raise InvalidParams(f"grammar: {kind} has {count} rules and groups: give at most {MAX_RULES}")

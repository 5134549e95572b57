"""Prompts in a JSONL file, an object a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitnet_inference.config import check_unicode, checked_count
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import FormatError, InvalidParams
from bitnet_inference.grammar.grammar import Grammar
from bitnet_inference.in_flight import MAX_IN_FLIGHT
from bitnet_inference.json_objects import parse_object, shown, without_nulls
from bitnet_inference.line_file import CURE, numbered_lines
from bitnet_inference.prompts import is_one_prompt
from bitnet_inference.text.messages import check_messages

KEYS = ("prompt", "messages", "id", "n", "best_of", "params")
OPENAI_KEYS = ("custom_id", "method", "url", "body")  # of a line of OpenAI's Batch API


@dataclass(frozen=True)
class PromptLine:
    """What stands in a line: a prompt to continue or messages to answer, an id that is passed on, and own options.

    `number` counts the lines of the file from 1. `num_choices` are wanted, None for a single text, the best ones of
    `best_of`, where that is given.
    """

    number: int
    prompt: str | list[int] | None
    messages: list[dict[str, str]] | None
    id: str | int | None
    options: Mapping[str, Any]
    num_choices: int | None = None
    best_of: int | None = None

    @property
    def num_texts(self) -> int:
        """How many are generated."""
        return self.best_of or self.num_choices or 1

    def params(self, shared: SamplingParams) -> SamplingParams:
        """The shared parameters, but for its own; line n draws with the shared seed + n - 1. Raises InvalidParams."""
        seed = None if shared.seed is None else (shared.seed + self.number - 1) % (1 << 64)
        return replace(shared, **{"seed": seed, **self.options})


def is_openai_batch(path: Path) -> bool:
    """Whether the first line of a file is of OpenAI's Batch API, and not one of ours. Raises what LineFile raises."""
    if not path.is_file():
        return False
    for number, data in numbered_lines(path):
        if data:
            try:
                return not parse_object(data, path, f"line {number}", CURE).keys().isdisjoint(OPENAI_KEYS)
            except FormatError:  # which is told when the file is checked
                return False
    return False


def read_prompt(path: Path, number: int, data: bytes) -> PromptLine:
    """The line with this number of a file. Raises FormatError."""
    where = f"line {number}"
    fields = _given(parse_object(data, path, where, CURE))
    try:
        prompt, messages, options = _prompt(fields), fields.get("messages"), _options(fields.get("params"))
        talk = None if messages is None else check_messages(messages)
        numbers = _num_choices(fields)
    except InvalidParams as error:
        raise FormatError(path, where, str(error)) from None
    return PromptLine(number, prompt, talk, fields.get("id"), options, *numbers)


def _given(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what is null, which is left out: tables have a null in every column that a line does not use.

    But where nothing else is a prompt, that is what is wrong with it.
    """
    given: Mapping[str, Any] = without_nulls(fields)
    return given if given.keys() & {"prompt", "messages"} else fields


def _prompt(fields: Mapping[str, Any]) -> str | list[int] | None:
    if theirs := [key for key in fields if key in OPENAI_KEYS]:
        why = "which bitnet batch takes in files where all lines are of it"
        raise InvalidParams(f"the key {shown(theirs[0])} is of OpenAI's Batch API, {why}")
    if unknown := [key for key in fields if key not in KEYS]:
        raise InvalidParams(f"the key {shown(unknown[0])} is not known: there are {', '.join(KEYS)}")
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidParams('give either "prompt" or "messages"')
    identity = fields.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int | None):
        raise InvalidParams(f"id is {shown(identity)}: give a string or a whole number")
    if "prompt" not in fields:
        if fields["messages"] is None:
            raise InvalidParams("messages are null: give a list")
        return None
    if not is_one_prompt(fields["prompt"]) or not fields["prompt"]:
        raise InvalidParams("prompt must be a text, or a list of token ids, that is not empty")
    prompt: str | list[int] = fields["prompt"]
    if isinstance(prompt, str):
        check_unicode("prompt", prompt)
    return prompt


def _num_choices(fields: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """`n`, 1 where `best_of` stands alone, and that."""
    given = {name: checked_count(name, fields[name]) for name in ("n", "best_of") if fields.get(name) is not None}
    best_of = given.get("best_of")
    number = given.get("n", None if best_of is None else 1)
    if most := [name for name, count in given.items() if count > MAX_IN_FLIGHT]:
        raise InvalidParams(f"{most[0]} is {given[most[0]]}: give at most {MAX_IN_FLIGHT}")
    if best_of is not None and number is not None and best_of < number:
        raise InvalidParams(f"best_of is {best_of}, n is {number}: give best_of at least n")
    return number, best_of


def _options(options: object) -> dict[str, Any]:
    """Sampling options in the types that SamplingParams wants: JSON has no whole numbers as keys, and no Grammar."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise InvalidParams(f"params is {shown(options)}: give an object of sampling options")
    read: dict[str, Any] = without_nulls(options)
    if beside := [name for name in ("n", "best_of") if name in read]:
        raise InvalidParams(f"{beside[0]} is no sampling option: write it beside params, not into them")
    if isinstance(bias := read.get("logit_bias"), dict):
        read["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    if isinstance(form := read.get("grammar"), dict):
        try:
            read["grammar"] = Grammar(**form)
        except TypeError:
            raise InvalidParams(f'grammar is {shown(form)}: give one like {{"regex": "[0-9]+"}}') from None
    SamplingParams.from_mapping({"max_tokens": None, **read})  # whether min_tokens fits shows with the shared ones
    return read


def _token_id(key: str) -> int | str:
    return int(key) if key.isdecimal() and len(key) < 20 else key

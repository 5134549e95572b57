"""The options of `bitnet run` that demand a form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.options import argument, values_of
from bitnet_inference.config import read_text
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.grammar.grammar import Grammar

FORM: Mapping[str, Any] = {
    "json_schema": Annotated[
        str | None, typer.Option(metavar="FILE|TEXT", help="Answer in JSON that is valid for this JSON schema.")
    ],
    "regex": Annotated[
        str | None, typer.Option(metavar="REGEX", help="The whole answer matches this regular expression.")
    ],
    "grammar": Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer follows this grammar, in Lark or GBNF.")
    ],
    "choice": Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The answer is one of these. Repeat it.")],
}


def grammar_option(ctx: typer.Context) -> Grammar | None:
    """What the options of FORM demand; they exclude each other."""
    from bitnet_inference.grammar.closing import closed_schema
    from bitnet_inference.grammar.grammar import Grammar, parsed_schema

    given = values_of(ctx, FORM)
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in given)
        raise InvalidParams(f"{names} exclude each other: give one of them")
    if "grammar" in given:
        file = given["grammar"]
        text = read_text(file).replace("\r\n", "\n")
        return Grammar(gbnf=text) if _is_gbnf(file, text) else Grammar(lark=text)
    if "choice" in given:
        return Grammar(choice=[argument("--choice", text) for text in given["choice"]])
    if "regex" in given:
        return Grammar(regex=argument("--regex", given["regex"]))
    schema = given["json_schema"]
    is_text = schema.lstrip().startswith("{")
    text = argument("--json-schema", schema) if is_text else read_text(Path(schema))
    return Grammar(json_schema=closed_schema(parsed_schema(text)))


def _is_gbnf(file: Path, text: str) -> bool:
    """By its ending, or else by what only GBNF has."""
    return file.suffix == ".gbnf" or (file.suffix != ".lark" and "::=" in text)

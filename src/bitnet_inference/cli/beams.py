"""The options of `bitnet run` that make it write several answers, or search for the likeliest one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.form import FORM
from bitnet_inference.cli.options import DRAFTS, SAMPLING, argument, values_of
from bitnet_inference.errors import InvalidParams

if TYPE_CHECKING:
    from bitnet_inference.engine.beam import BeamParams

BEAMS: Mapping[str, Any] = {
    "beams": Annotated[
        int | None,
        typer.Option(metavar="K", help="Follow the K likeliest beginnings, and print the likeliest text at the end."),
    ],
    "length_penalty": Annotated[
        float | None,
        typer.Option(metavar="X", help="With --beams: above 0 favours long texts, below 0 short ones. Default: 1."),
    ],
    "early_stopping": Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help='With --beams, when to end: "true", "false" (default) or "never"; see BeamParams.'
        ),
    ],
}
CHOICES: Mapping[str, Any] = {
    "num_choices": Annotated[
        int | None, typer.Option(metavar="N", help="Write N answers, which differ where the temperature is not 0.")
    ],
    "best_of": Annotated[
        int | None, typer.Option(metavar="M", help="Write M answers, and print the likeliest, or the N likeliest.")
    ],
}
_SHARED = ("repetition_penalty", "stop", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos")
_STOPPING: Mapping[str, Any] = {"true": True, "false": False, "never": "never"}


def beam_params(ctx: typer.Context) -> BeamParams | None:
    """What the options of BEAMS ask for; None without --beams. Raises InvalidParams for what a search cannot keep."""
    from bitnet_inference.engine.beam import BeamParams

    given = {name: value for name, value in ctx.params.items() if value not in (None, [], ()) and value is not False}
    if "beams" not in given:
        for name in BEAMS:
            if name in given:
                raise InvalidParams(f"{_option(name)} is for --beams only: add it")
        return None
    for name in (*CHOICES, *SAMPLING, *FORM, *DRAFTS, "logprobs"):
        if name in given and name not in _SHARED:
            raise InvalidParams(f"{_option(name)} has no meaning with --beams: leave it out")
    stopping = given.get("early_stopping", "false")
    if stopping not in _STOPPING:
        raise InvalidParams(f'--early-stopping is {stopping!r}: give "true", "false" or "never"')
    options = {name: given[name] for name in (*_SHARED, "length_penalty") if name in given}
    if "stop" in options:
        options["stop"] = [argument("--stop", text) for text in options["stop"]]
    return BeamParams(num_beams=given["beams"], early_stopping=_STOPPING[stopping], **options)


def wanted_choices(ctx: typer.Context) -> tuple[int, int | None] | None:
    """How many answers CHOICES ask for, and out of how many, None for all; None where one is to be streamed.

    Raises InvalidParams.
    """
    from bitnet_inference.config import checked_count

    given = {name: checked_count(_option(name), value) for name, value in values_of(ctx, CHOICES).items()}
    if not given:
        return None
    number, best_of = given.get("num_choices", 1), given.get("best_of")
    if best_of is not None and best_of < number:
        raise InvalidParams(f"--best-of is {best_of}, --num-choices {number}: give --best-of at least as many")
    return number, best_of


def _option(name: str) -> str:
    return {"stop_token_ids": "--stop-token"}.get(name, "--" + name.replace("_", "-"))

"""The options of `bitnet run` that make it search for the likeliest answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bitnet_inference.cli.form import FORM
from bitnet_inference.cli.options import DRAFTS, SAMPLING, argument
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
    for name in (*SAMPLING, *FORM, *DRAFTS, "logprobs"):
        if name in given and name not in _SHARED:
            raise InvalidParams(f"{_option(name)} has no meaning with --beams: leave it out")
    stopping = given.get("early_stopping", "false")
    if stopping not in _STOPPING:
        raise InvalidParams(f'--early-stopping is {stopping!r}: give "true", "false" or "never"')
    options = {name: given[name] for name in (*_SHARED, "length_penalty") if name in given}
    if "stop" in options:
        options["stop"] = [argument("--stop", text) for text in options["stop"]]
    return BeamParams(num_beams=given["beams"], early_stopping=_STOPPING[stopping], **options)


def _option(name: str) -> str:
    return {"stop_token_ids": "--stop-token"}.get(name, "--" + name.replace("_", "-"))

"""`bitnet convert`: a model in another file format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bitnet_inference.cli.options import MODEL_HELP, print_notes, progress_bar
from bitnet_inference.cli.reports import print_table

if TYPE_CHECKING:
    from bitnet_inference.conversion import Conversion
    from bitnet_inference.gguf_tensors import Kind


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help=MODEL_HELP)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: X.gguf, or X.safetensors.")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help='Of GGUF: "i2_s" (exact; the default), "tq2_0" (for llama.cpp) or "f16".',
        ),
    ] = None,
    compress: Annotated[
        bool, typer.Option("--compress", help="A packed file that is smaller, and takes longer to load.")
    ] = False,
    quantize: Annotated[
        str | None, typer.Option(help='"ternary": round the layers\' dense matrices so, for models trained for it.')
    ] = None,
) -> None:
    """Write a model as a GGUF file, or as a packed file, which loads fastest.

    A packed file (X.safetensors) keeps everything as it is, compressed or not; one of an older version becomes one of
    the newest. For X.gguf, TYPE is what ternary matrices become: i2_s keeps them to the bit, tq2_0 rounds their scales
    to float16, f16 makes every matrix float16. A matrix that the type has no room for becomes float16. What was
    written, how exact it is, how long it takes to open here, and what has no place in the file is told in the end. The
    tokenizer and the chat templates go into both. OUT appears when it is whole; what was there before stays until then.
    """
    from bitnet_inference.conversion import convert as convert_model
    from bitnet_inference.conversion import seconds_to_open
    from bitnet_inference.errors import OutOfMemory

    with progress_bar("converting") as progress:
        result = convert_model(
            source, target, cast("Kind | None", kind), progress, compressed=compress, quantize=quantize or "none"
        )
    if result.tensors:
        print_table(_table(result))
    try:
        with progress_bar("opening") as progress:
            opened = f"opens in {seconds_to_open(target, progress):.2f} s"
    except OutOfMemory:
        opened = "this machine has not the memory to open it"
    typer.echo(f"{result.path}: {result.num_bytes / 1e6:.1f} MB, {opened}")
    print_notes(result.notes)


def _table(result: Conversion) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("type", "tensors", "weights", "MB", "values")]
    for name in dict.fromkeys(each.type for each in result.tensors):
        tensors = [each for each in result.tensors if each.type == name]
        weights, size = (sum(math.prod(each.shape) for each in tensors), sum(each.num_bytes for each in tensors))
        error = max(each.error for each in tensors)
        values = f"off by up to {100 * error:.2g}% of the largest" if error else "exact"
        rows.append((name, str(len(tensors)), str(weights), f"{size / 1e6:.1f}", values))
    total = sum(int(row[2]) for row in rows[1:])
    return [*rows, ("file", str(len(result.tensors)), str(total), f"{result.num_bytes / 1e6:.1f}", str(result.path))]

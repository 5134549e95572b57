"""`bitnet convert`: a model in another file format."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bitnet_inference.amounts import told_bytes
from bitnet_inference.cli.options import MODEL_HELP, print_notes, progress_bar
from bitnet_inference.cli.reports import print_table

if TYPE_CHECKING:
    from bitnet_inference.backends.onnx_check import Agreement
    from bitnet_inference.conversion.convert import Conversion
    from bitnet_inference.conversion.coreml_weights import Compute
    from bitnet_inference.conversion.gguf_tensors import Kind


# Options of ONNX and of Core ML.
Small = Annotated[
    bool,
    typer.Option("--small", help="Of ONNX: ternary weights in 2 bits, dense ones in 8. Of Core ML: dense ones in 8."),
]
Check = Annotated[
    bool, typer.Option("--check/--no-check", help="Of ONNX: run the file and compare it before it is put in place.")
]
ComputeType = Annotated[
    str | None,
    typer.Option(help='Of Core ML: "float16" (the Neural Engine\'s; the default), or "float32" (exact, slower).'),
]
Context = Annotated[
    int | None,
    typer.Option(metavar="N", help="Of Core ML: tokens that a sequence may have. Default: 4096 at most."),
]


def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help=MODEL_HELP)],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="What to write: X.gguf, X.onnx, X.safetensors or X.mlpackage.")
    ],
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
        str, typer.Option(help='"ternary": round the layers\' dense matrices so, for models trained for it.')
    ] = "none",
    small: Small = False,
    check: Check = True,
    arm_i2_s: Annotated[
        bool, typer.Option("--arm-i2-s", help="IN has I2_S weights in the order that bitnet.cpp wrote on ARM.")
    ] = False,
    compute: ComputeType = None,
    context: Context = None,
) -> None:
    """Write a model in another format.

    OUT is a GGUF file, an ONNX file, a Core ML package, or a packed file, which loads fastest. A packed file
    (X.safetensors) keeps everything as it is, compressed or not; one of an older version becomes one of the newest.
    For X.gguf, TYPE is what ternary matrices become: i2_s keeps them to the bit, tq2_0 rounds their scales to
    float16, f16 makes every matrix float16. A matrix that the type has no room for becomes float16. What was
    written, how exact it is, how long it takes to open here, and what has no place in the file is told in the end.
    The tokenizer and the chat templates go into the file.

    X.onnx is a decoder with past, with Optimum's names. Its weights are in X.onnx.data where they are many, tokenizer
    and config.json beside it. X.mlpackage is a folder for Macs and iPhones, with all of it inside.

    OUT appears when it is whole; what was there before stays until then.
    """
    from bitnet_inference.conversion.convert import convert as convert_model

    with progress_bar("converting") as progress:
        result = convert_model(
            source, target, cast("Kind | None", kind), progress, compressed=compress, quantize=quantize,
            small=small, check=check, arm_i2_s=arm_i2_s, compute=cast("Compute | None", compute), context=context,
        )  # fmt: skip
    if result.tensors:
        print_table(_table(result))
    typer.echo(f"{result.path}: {told_bytes(result.num_bytes)}{_opened(target)}")
    if result.agreement:
        typer.echo(_agreement(result.agreement))
    print_notes(result.notes)


def _opened(target: Path) -> str:
    """How long it takes to open, or why it does not here; of ONNX and Core ML, which others run, nothing is said."""
    from bitnet_inference.conversion.convert import seconds_to_open
    from bitnet_inference.errors import BitNetError, OutOfMemory

    if target.suffix in (".onnx", ".mlpackage"):
        return ""
    try:
        with progress_bar("opening") as progress:
            return f", opens in {seconds_to_open(target, progress):.2f} s"
    except OutOfMemory:
        return ", this machine has not the memory to open it"
    except BitNetError as error:
        return f", does not open here: {error}"


def _agreement(found: Agreement) -> str:
    usual, whole, stepwise = (f"{error:.1e}" for error in found[:3])
    greedy = f"{found.num_greedy} of {found.num_tokens} greedy tokens are the same"
    errors = f"{usual} for most tokens, {whole} in all, {stepwise} behind a cache"
    return f"run in ONNX Runtime: logits are off by {errors} (relative RMS); {greedy}"


def _table(result: Conversion) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("type", "tensors", "weights", "size", "values")]
    for name in dict.fromkeys(each.type for each in result.tensors):
        tensors = [each for each in result.tensors if each.type == name]
        weights, size = (sum(math.prod(each.shape) for each in tensors), sum(each.num_bytes for each in tensors))
        error = max(each.error for each in tensors)
        values = f"off by up to {100 * error:.2g}% of the largest" if error else "exact"
        rows.append((name, str(len(tensors)), str(weights), told_bytes(size), values))
    total = sum(int(row[2]) for row in rows[1:])
    return [*rows, ("file", str(len(result.tensors)), str(total), told_bytes(result.num_bytes), str(result.path))]

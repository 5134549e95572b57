"""A checkpoint as a Core ML package, with its tokenizer in it: written, and only then put in its place."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Any, get_args

from bitnet_inference.backends.coreml_library import quiet, writing_coremltools
from bitnet_inference.conversion.coreml_programs import coreml_program
from bitnet_inference.conversion.coreml_weights import Arrays, Compute
from bitnet_inference.errors import InvalidParams, Unsupported
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.coreml import CoreMLCheckpoint
from bitnet_inference.formats.coreml_package import MANIFEST, SUFFIX, TEXTS
from bitnet_inference.formats.hf_config_writer import config_json
from bitnet_inference.json_objects import shown
from bitnet_inference.model.loader import Progress
from bitnet_inference.output_files import whole_folder
from bitnet_inference.text.folder import TextFiles
from bitnet_inference.text.folder_writer import folder_files, to_json
from bitnet_inference.text.tokenizer import Tokenizer

COMPUTES: tuple[Compute, ...] = get_args(Compute)
_OF_WEIGHTS = "[MIL File"  # how the library's own errors of writing weights begin; the others are Python's
DEFAULT_CONTEXT = 4096  # at most: every step computes scores for all of it


@dataclass(frozen=True)
class WrittenPackage:
    """The size of the program with its weights, and what its user should know."""

    num_bytes: int
    notes: tuple[str, ...]


def write_coreml_package(
    checkpoint: Checkpoint,
    texts: TextFiles,
    target: Path,
    *,
    compute: Compute = "float16",
    context: int | None = None,
    small: bool = False,
    progress: Progress | None = None,
) -> WrittenPackage:
    """Write the folder `target`. `context` is the room of its states in tokens; `small`: dense matrices in 8 bits.

    Nothing is there, or changed, where this raises: Unavailable without coremltools, Unsupported for models of
    embeddings and for weights that have no place in it, InvalidParams.
    """
    if checkpoint.config.pooling is not None:
        raise Unsupported(f"{checkpoint.path} is a model of embeddings: only decoders are written as Core ML packages")
    library, most = writing_coremltools(), checkpoint.config.max_positions
    context = min(most, DEFAULT_CONTEXT) if context is None else context
    if not 2 <= context <= most:
        raise InvalidParams(f"context is {context}, but the model has {most} positions: give a number from 2 to {most}")
    Tokenizer(texts, checkpoint.config.vocab_size)  # what cannot be read again is not written
    config = config_json(checkpoint.config) | {"max_position_embeddings": context}
    beside = folder_files(texts) | {"config.json": to_json(config)}
    with whole_folder(target) as folder:
        made = folder / f"made{SUFFIX}"
        arrays = Arrays(checkpoint, compute, small, progress or (lambda done, total: None))
        _write_program(library, coreml_program(library, arrays, context), made, target)
        _add_texts(made, beside)
        num_bytes = CoreMLCheckpoint(made).num_bytes
    cut = f"its states have room for {context} of the model's {most} tokens"
    return WrittenPackage(num_bytes, (cut,) if context < most else ())


def _write_program(library: Any, program: Any, path: Path, target: Path) -> None:
    """As it is: no pass shall round in another order. It is written for `target`."""
    try:
        with quiet():
            library.convert(
                program,
                convert_to="mlprogram",
                minimum_deployment_target=library.target.iOS18,
                compute_precision=library.precision.FLOAT32,  # which means: no casts are added
                pass_pipeline=library.PassPipeline.EMPTY,
                skip_model_load=True,
                package_dir=str(path),
            )
    except RuntimeError as error:
        if not str(error).startswith(_OF_WEIGHTS):
            raise
        space = f"free space there, and in {gettempdir()}, where the weights are written first"
        raise InvalidParams(f"{target} cannot be written: {shown(str(error))}: {space}") from None


def _add_texts(package: Path, files: dict[str, bytes]) -> None:
    folder = package / "Data" / TEXTS
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest = json.loads((package / MANIFEST).read_bytes())
    about = {"author": TEXTS, "description": "Tokenizer and sizes", "name": TEXTS, "path": TEXTS}
    manifest["itemInfoEntries"][str(uuid.uuid4())] = about
    (package / MANIFEST).write_bytes(to_json(manifest))

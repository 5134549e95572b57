"""A checkpoint as an ONNX file with what belongs beside it: written, checked, and only then put in its place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.backends.onnx_check import Agreement, compare, require_runtime
from bitnet_inference.conversion.onnx_graphs import onnx_graph
from bitnet_inference.errors import BackendError, InvalidParams, Unsupported
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.hf_config_writer import config_json
from bitnet_inference.formats.onnx_writer import MAX_INLINE_BYTES, data_file, write_onnx
from bitnet_inference.model.loader import Progress
from bitnet_inference.output_files import whole_files
from bitnet_inference.text.folder import TextFiles
from bitnet_inference.text.folder_writer import folder_files, to_json
from bitnet_inference.text.tokenizer import Tokenizer

MAX_ERROR = (
    0.1  # a rounding that falls the other way is seen behind all layers: 5% were found, and more in no way but wrong
)
_TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the warm sun until the evening comes."
_NUM_CHECKED = 16


@dataclass(frozen=True)
class Written:
    """The size of the file with its weights, and how it agrees with this engine; None where that was not checked."""

    num_bytes: int
    agreement: Agreement | None
    notes: tuple[str, ...]


def write_onnx_model(
    checkpoint: Checkpoint,
    texts: TextFiles,
    target: Path,
    *,
    small: bool = False,
    check: bool = True,
    max_inline_bytes: int = MAX_INLINE_BYTES,
    progress: Progress | None = None,
) -> Written:
    """Write `target`, its data where they are more than `max_inline_bytes`, the tokenizer's files and config.json.

    Nothing is there, or changed, where this raises: Unsupported for models of embeddings, InvalidParams for other files
    in the place of those beside it, Unavailable without ONNX Runtime, BackendError where it computes something else.
    """
    target = target.resolve()
    if checkpoint.config.pooling is not None:
        raise Unsupported(f"{checkpoint.path} is a model of embeddings: only decoders are written as ONNX files")
    if check:
        require_runtime()
    tokenizer = Tokenizer(texts, checkpoint.config.vocab_size)  # what cannot be read again is not written
    beside = folder_files(texts) | {"config.json": to_json(config_json(checkpoint.config))}
    _refuse_others(target, beside)
    graph = onnx_graph(checkpoint, small)
    about = {"family": checkpoint.config.family, "max_positions": str(checkpoint.config.max_positions)}
    with whole_files(target) as folder:
        path = folder / target.name
        write_onnx(graph, path, about, max_inline_bytes=max_inline_bytes, progress=progress)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        agreement = compare(checkpoint, path, _some_tokens(checkpoint, tokenizer)) if check else None
        if agreement:
            _require_agreement(target, agreement)
        is_alone = not data_file(path).exists()
        for name, content in beside.items():
            (folder / name).write_bytes(content)
    old = data_file(target)
    notes = (f"{old} is of the file that was there before: it is no longer used",) if is_alone and old.exists() else ()
    return Written(num_bytes, agreement, notes)


def _some_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer) -> list[int]:
    """Two at least."""
    text = tokenizer.encode(_TEXT) if tokenizer.has_words else range(_NUM_CHECKED)
    known = [each for each in text if each < checkpoint.config.vocab_size]
    return [*known, 0, 0][: min(_NUM_CHECKED, checkpoint.config.max_positions)]


def _refuse_others(target: Path, beside: dict[str, bytes]) -> None:
    """Files of another model are not replaced; those of this one may be there already."""
    cure = "write to a folder of its own, or remove it"
    data = data_file(target)
    if os.path.lexists(data) and not (target.exists() and data.is_file()):
        raise InvalidParams(f"{data} is there, and no data of a file {target.name}: {cure}")
    if target.with_name("params.json").exists() and not target.with_name("config.json").exists():
        raise InvalidParams(f"{target.parent} has Meta's weights, which a config.json would hide: {cure}")
    for name, content in beside.items():
        file = target.with_name(name)
        same = file.is_file() and file.stat().st_size == len(content) and file.read_bytes() == content
        if os.path.lexists(file) and not same:
            raise InvalidParams(f"{file} is there, and says something else than this model's: {cure}")


def _require_agreement(target: Path, agreement: Agreement) -> None:
    if max(agreement.error, agreement.error_with_past) > MAX_ERROR:
        found = f"{agreement.error:.2g} at once and {agreement.error_with_past:.2g} token by token"
        why = f"its logits in ONNX Runtime are off by {found}, at most {MAX_ERROR:g} is expected"
        raise BackendError(f"{target}: {why}: it was not written; another version of onnxruntime may compute it right")

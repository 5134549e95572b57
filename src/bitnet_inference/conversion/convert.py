"""Other files from a checkpoint: GGUF, with metadata and tokenizer in it, ONNX, Core ML, and our own packed file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

from bitnet_inference.backends.choose import load_model
from bitnet_inference.backends.onnx_check import Agreement
from bitnet_inference.config import EngineConfig, check_progress
from bitnet_inference.conversion.coreml_files import COMPUTES, write_coreml_package
from bitnet_inference.conversion.coreml_weights import Compute
from bitnet_inference.conversion.gguf_tensors import GgufTensors, Kind, Written
from bitnet_inference.conversion.onnx_files import write_onnx_model
from bitnet_inference.errors import FormatError, InvalidParams, Unsupported
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint, expected_shapes, is_projection, require_sound
from bitnet_inference.formats.coreml_package import MANIFEST, SUFFIX
from bitnet_inference.formats.gguf import GgufCheckpoint
from bitnet_inference.formats.gguf_config import ARCHITECTURES, read_architecture
from bitnet_inference.formats.gguf_metadata import architecture_of, describe
from bitnet_inference.formats.gguf_parts import files_of
from bitnet_inference.formats.gguf_writer import record, write_gguf
from bitnet_inference.formats.gpu import is_gpu_folder
from bitnet_inference.formats.kinds import refuse_graph
from bitnet_inference.formats.onnx import find_onnx
from bitnet_inference.formats.packed import is_packed
from bitnet_inference.formats.packed_writer import write_packed
from bitnet_inference.formats.safetensors_files import INDEX, SINGLE
from bitnet_inference.formats.ternarized import findings_of, quantized
from bitnet_inference.formats.titles import title_of
from bitnet_inference.model.loader import Progress
from bitnet_inference.model_folder import defaults_of, find_model, load_text_files, load_tokenizer
from bitnet_inference.output_files import refuse_unwritable, whole_file
from bitnet_inference.text.embedded import to_embedded
from bitnet_inference.text.recommended import recommended_keys, without_place
from bitnet_inference.text.tokenizer import Tokenizer
from bitnet_inference.text.vocab import PREFIX, corrections
from bitnet_inference.text.vocab_metadata import end_ids, metadata_of

KINDS: tuple[Kind, ...] = get_args(Kind)
_FILE_TYPES = {"i2_s": 40, "tq2_0": 37, "f16": 1}
_GGUF, _PACKED, _ONNX, _COREML = _TARGETS = (".gguf", ".safetensors", ".onnx", SUFFIX)


@dataclass(frozen=True)
class Conversion:
    """A file that was written: its tensors (of GGUF), and what was not possible or has no place in it, a line each.

    `num_bytes` count an ONNX file's data too; `agreement` is how it computes in ONNX Runtime, where it was checked.
    """

    path: Path
    num_bytes: int
    tensors: tuple[Written, ...]
    notes: tuple[str, ...]
    agreement: Agreement | None = None


def convert(
    source: str | Path,
    target: str | Path,
    kind: Kind | None = None,
    progress: Progress | None = None,
    *,
    compressed: bool = False,
    quantize: str = "none",
    small: bool = False,
    check: bool = True,
    arm_i2_s: bool = False,
    compute: Compute | None = None,
    context: int | None = None,
) -> Conversion:
    """Write the model of a folder or file, or "default", with its tokenizer.

    `target` is X.gguf, X.onnx, a packed X.safetensors, or the folder X.mlpackage for Core ML.

    `kind`, for GGUF only, is what ternary matrices become: "i2_s", the default, keeps them to the bit, "tq2_0" rounds
    their scales to float16, and "f16" makes every matrix float16. What a kind has no room for becomes float16; `notes`
    say so. A packed file that is `compressed` is smaller, and takes longer to load. `quantize`: "ternary" rounds the
    layers' dense matrices first, see EngineConfig. For ONNX, `small` writes ternary matrices in 2 bits and dense
    ones in 8, for an operator of ONNX Runtime; without `check`, the file is not run and compared before it is put in
    place. Tokenizer and config.json go beside it. For Core ML, `small` writes dense matrices in 8 bits, where ternary
    ones have 2 always; `compute` is "float16", the default, which the Neural Engine has, or "float32", which is exact
    and runs elsewhere; `context` is for how many tokens a sequence has room, at most 4,096 where nothing is said.
    `arm_i2_s`: the source has I2_S weights in ARM's order.

    The target appears when it is whole. `progress` gets the weights written so far, and those in all; for ONNX, bytes.
    Raises NotFound, FormatError, Unsupported, InvalidParams, Unavailable, and for ONNX BackendError.
    """
    path, target = find_model(source), Path(target)
    check_progress(progress)
    _check_quantize(quantize)
    _check_target(path, target, kind, compressed, small, check)
    _check_coreml(target, compute, context)
    checkpoint = _open_source(path, arm_i2_s, target)
    weights = quantized(checkpoint, quantize)
    if target.suffix == _ONNX:
        texts = load_text_files(checkpoint)
        written = write_onnx_model(weights, texts, target, small=small, check=check, progress=progress)
        return Conversion(target, written.num_bytes, (), (*written.notes, *findings_of(weights)), written.agreement)
    if target.suffix == _COREML:
        package = write_coreml_package(
            weights, load_text_files(checkpoint), target,
            compute=compute or "float16", context=context, small=small, progress=progress,
        )  # fmt: skip
        return Conversion(target, package.num_bytes, (), (*package.notes, *findings_of(weights)))
    if target.suffix == _PACKED:
        defaults_of(load_tokenizer(checkpoint))  # what cannot be read again is not written
        files = to_embedded(load_text_files(checkpoint))
        write_packed(weights, files, target, compressed=compressed, progress=progress)
        return Conversion(target, target.stat().st_size, (), findings_of(weights))
    return _write_gguf(path, checkpoint, weights, target, kind or "i2_s", progress)


def _open_source(path: Path, arm_i2_s: bool, target: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path, arm_i2_s=arm_i2_s)
    refuse_graph(checkpoint)
    if checkpoint.config.experts is not None and target.suffix != _PACKED:
        raise Unsupported(f"{path}: has experts, for which only packed files are written: give X{_PACKED}")
    require_sound(checkpoint)
    return checkpoint


def seconds_to_open(path: Path, progress: Progress | None) -> float:
    """How long a model takes to be ready to run, with its tokenizer. Raises as LLM.load does."""
    start = perf_counter()
    checkpoint = open_checkpoint(path)
    defaults_of(load_tokenizer(checkpoint))
    load_model(checkpoint, EngineConfig.from_env(), progress).close()
    return perf_counter() - start


def _write_gguf(
    path: Path, checkpoint: Checkpoint, weights: Checkpoint, target: Path, kind: Kind, progress: Progress | None
) -> Conversion:
    """`weights` is the checkpoint, quantised or not."""
    _refuse_remade(weights)
    metadata, notes = _metadata(checkpoint)
    metadata["general.file_type"] = record("general.file_type", _FILE_TYPES[kind])
    metadata.pop("general.alignment", None)
    permuted = ARCHITECTURES[architecture_of(path, checkpoint.config)].permuted
    tensors = GgufTensors(weights, kind, permuted, progress or (lambda done, total: None))
    with whole_file(target) as out:
        write_gguf(out, metadata.values(), tensors.shapes, tensors.encode)
    notes = [*tensors.notes(), *notes, *findings_of(weights)]
    return Conversion(target, target.stat().st_size, tuple(tensors.written), tuple(notes))


def _refuse_remade(weights: Checkpoint) -> None:
    """Refuse projections that a GGUF file of the architecture gives back as others: as ternary, with one scale."""
    if not (weights.config.sub_norms or weights.config.linear_norm):
        return
    for name in (name for name, _ in expected_shapes(weights.config) if is_projection(name)):
        if not weights.is_ternary(name):
            why, cure = "is dense", "or round it with --quantize ternary"
        elif weights.group_size(name):
            why, cure = "has scales for groups of columns", "which keep them"
        else:
            continue
        lost = "and would be read from GGUF as ternary with one scale"
        raise Unsupported(f"{weights.path}: {name} {why}, {lost}: write X{_PACKED} or X{_ONNX}, {cure}")


def _check_quantize(quantize: str) -> None:
    if quantize not in ("none", "ternary"):
        raise InvalidParams(f"quantize is {quantize!r}: files are written with it as none or ternary: choose one")


def _check_target(source: Path, target: Path, kind: str | None, compressed: bool, small: bool, check: bool) -> None:
    if kind not in (None, *KINDS):
        raise InvalidParams(f"the type {kind!r} is not known: choose one of {', '.join(KINDS)}")
    if target.suffix not in _TARGETS:
        raise InvalidParams(f"{target}: what to write shows in the name: end it in {', '.join(_TARGETS)}")
    if kind and target.suffix != _GGUF:
        raise InvalidParams(f"{target}: only GGUF files have types: leave the type {kind} out")
    if compressed and target.suffix != _PACKED:
        raise InvalidParams(f"{target}: only packed files are compressed: give X{_PACKED}, or leave --compress out")
    if small and target.suffix not in (_ONNX, _COREML):
        raise InvalidParams(f"{target}: only ONNX and Core ML are written small: give X{_ONNX}, or leave --small out")
    if not check and target.suffix != _ONNX:
        raise InvalidParams(f"{target}: only ONNX files are run and compared: give X{_ONNX}, or leave --no-check out")
    if target.suffix == _COREML:
        _check_folder(target)
        return
    refuse_unwritable(target)
    if target.exists() and not (target.is_file() and _is_free(source, target)):
        raise InvalidParams(f"{target} cannot be written: it is the source, or no file: give another name")
    if target.suffix == _PACKED:
        _check_packed(target)


def _is_free(source: Path, target: Path) -> bool:
    """Whether a file is not the source, nor another part of a model that is in several files."""
    return not any(os.path.samefile(each, target) for each in files_of(source))


def _check_packed(target: Path) -> None:
    """A packed file of before is replaced; weights of a folder, which may be the source, are not, nor hidden."""
    try:
        is_free = not target.exists() or target.stat().st_size == 0 or is_packed(target)
    except FormatError:  # what is broken may have been anything
        is_free = False
    if not is_free:
        raise InvalidParams(f"{target} is there, and no packed file: give another name, or remove it")
    if target.name != SINGLE:
        return
    is_other = not target.exists() and (is_gpu_folder(target.parent) or find_onnx(target.parent))
    if is_other or (target.parent / INDEX).exists():
        raise InvalidParams(f"{target} would be read in the place of the weights of that folder: give another name")


def _check_folder(target: Path) -> None:
    """A package of before is replaced, and nothing else."""
    is_there = os.path.exists(target)  # Path.exists raises for names that are too long
    if is_there and not (target / MANIFEST).is_file():
        raise InvalidParams(f"{target} is there, and no Core ML package: give another name, or remove it")
    refuse_unwritable(target.resolve() / MANIFEST if is_there else target)


def _check_coreml(target: Path, compute: str | None, context: int | None) -> None:
    if compute not in (None, *COMPUTES):
        raise InvalidParams(f"compute is {compute!r}: choose one of {', '.join(COMPUTES)}")
    if target.suffix != _COREML and (compute, context) != (None, None):
        raise InvalidParams(
            f"{target}: only Core ML packages have --compute and --context: give X{_COREML}, or leave them out"
        )


def _metadata(checkpoint: Checkpoint) -> tuple[dict[str, bytes | memoryview], list[str]]:
    """The records by key, those of a GGUF file put right; and what has no place among them."""
    if isinstance(checkpoint, GgufCheckpoint):
        if f"{PREFIX}tokens" in checkpoint.metadata:
            load_tokenizer(checkpoint)  # what cannot be read again is not written
        corrected: dict[str, Any] = dict(corrections(checkpoint.metadata))
        records, source = dict(checkpoint.records), read_architecture(checkpoint.path, checkpoint.metadata)
        if source.multiplied:  # what its keys say is in the weights now
            records = {key: value for key, value in records.items() if not key.startswith(f"{source.name}.")}
            corrected |= describe(checkpoint.path, checkpoint.config, title_of(checkpoint))
        return records | {key: record(key, value) for key, value in corrected.items()}, []
    config, tokenizer = checkpoint.config, load_tokenizer(checkpoint)
    defaults_of(tokenizer)  # what cannot be read again is not written
    values = describe(checkpoint.path, config, title_of(checkpoint))
    values |= recommended_keys(tokenizer.generation) | metadata_of(tokenizer, config.vocab_size)
    if not tokenizer.has_words and config.bos_id is not None:
        values[f"{PREFIX}bos_token_id"] = config.bos_id
    found = Tokenizer.from_metadata(checkpoint.path, values, config.vocab_size)
    more, left = end_ids((*config.eos_ids, *tokenizer.eos_ids), found)
    notes = [f"the end tokens {', '.join(map(str, left))} have no place in the file"] if left else []
    advice = without_place(tokenizer.generation)
    notes += [f"generation_config.json has no place in the file: {', '.join(advice)}"] if advice else []
    return {key: record(key, value) for key, value in (values | more).items()}, notes

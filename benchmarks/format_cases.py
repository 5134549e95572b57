"""The files that each family can be, and how far this engine is from the reference on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import format_gguf
import format_meta
import numpy as np
from format_models import NUM_GREEDY, Expected, Family, expected

from bitnet_inference.backends import load_model
from bitnet_inference.backends.reference import ternary_codes
from bitnet_inference.config import EngineConfig
from bitnet_inference.conversion.convert import KINDS, convert
from bitnet_inference.conversion.gguf_tensors import Kind
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.errors import BitNetError
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.formats.checkpoint import Checkpoint, Ternary
from bitnet_inference.formats.gguf import GgufCheckpoint
from bitnet_inference.llm import LLM
from bitnet_inference.model_folder import load_tokenizer

_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "gate_proj": "gate", "up_proj": "up",
                "down_proj": "down"}  # fmt: skip
MAX_ERROR = 0.05  # of a logit, by the RMS of all: where an int8 code flipped; else it is some 1e-6
_WHOLE_FILES = ("Q4_K_M", "Q6_K", "TQ1_0", "TQ2_0")


@dataclass(frozen=True)
class Case:
    """A file of a family: `make` writes it into a folder, and gives its path and the model that it holds.

    `has_codes`: ternary matrices are those of the family.
    """

    format: str
    make: Callable[[Path], tuple[Path, Any]]
    arm: bool = False
    has_codes: bool = True


@dataclass(frozen=True)
class Cell:
    """What came of a case; see _text for `text`. `error` is None where nothing was compared, and `why` says why."""

    error: float | None = None
    text: str = ""
    why: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the numbers are those of the reference, but for rounding; what is refused is not wrong."""
        if self.error is None:
            return self.why.startswith("refused")
        return self.error < MAX_ERROR and self.text != "!"

    def __str__(self) -> str:
        if self.error is None:
            return self.why.partition(":")[0]
        return f"{self.error:.0e} {self.text}"


def cases(family: Family) -> Iterator[Case]:
    """Every file that the family can be."""
    has_ternary = any(is_ternary for _, _, is_ternary in family.weights())
    yield Case("folder", lambda room: (family.folder, family.model))
    yield Case("packed file", partial(_packed, family))
    if format_meta.is_possible(family):
        yield Case("Meta .pth", partial(_meta, family))
    for kind in format_gguf.TYPES:
        if format_gguf.is_possible(family) and (has_ternary or kind not in format_gguf.TERNARY):
            make = partial(_gguf, family, kind)
            yield Case(f"GGUF {kind}", make, arm=kind == "I2_S ARM", has_codes=kind != "Q1_0")
    for kind in _WHOLE_FILES:
        if llama_cpp_knows(family) and (has_ternary or not kind.startswith("TQ")):
            yield Case(f"llama.cpp {kind}", partial(_by_llama_cpp, family, kind))
    yield Case("convert onnx", partial(_onnx, family))
    for each in KINDS:
        if has_ternary or each == "f16":
            yield Case(f"convert {each}", partial(_converted, family, each))


def llama_cpp_knows(family: Family) -> bool:
    """Whether it computes this family as it is meant: it has no relu2 and no norms before projections."""
    has_norms = bool((family.spec.quantization or {}).get("use_rms_norm"))
    return format_gguf.architecture(family) != "bitnet-b1.58" and not has_norms


def run(family: Family, case: Case, room: Path) -> tuple[Cell, Path | None]:
    """Make the file, and compare; the path where it opened."""
    try:
        path, model = case.make(room)
        return _compare(family, path, expected(model), case), path
    except BitNetError as error:
        return Cell(why=f"refused: {error}"), None


def _compare(family: Family, path: Path, wanted: Expected, case: Case) -> Cell:
    checkpoint: Checkpoint = GgufCheckpoint(path, arm=True) if case.arm else open_checkpoint(path)
    if problems := checkpoint.check():
        return Cell(why=f"unsound: {problems[0]}")
    for module, values, is_ternary in family.weights() if case.has_codes else ():
        if is_ternary and (name := _canonical(module)) and checkpoint.is_ternary(name):
            matrix = checkpoint.matrix(name)
            if not isinstance(matrix, Ternary) or not np.array_equal(ternary_codes(matrix), np.sign(values)):
                return Cell(why=f"wrong codes: {name}")
    device = "onnx" if path.suffix == ".onnx" else "cpu"
    model = load_model(checkpoint, EngineConfig(device=device, cache_dtype="float32", threads=1))
    with LLM(model, load_tokenizer(checkpoint)) as llm:
        logits = llm.logits(wanted.ids)
        params = SamplingParams(temperature=0.0, max_tokens=NUM_GREEDY, ignore_eos=True)
        greedy = llm.generate(wanted.ids, params).token_ids
    error = float(np.abs(logits - wanted.logits).max() / np.sqrt(np.square(wanted.logits).mean()))
    return Cell(error, _text(greedy, wanted))


def _text(greedy: list[int], wanted: Expected) -> str:
    """ "=" where all tokens are the same, "~" where the first other one was nearly as good, else "!"."""
    pairs = zip(greedy, wanted.greedy, wanted.margins, strict=True)
    margin = next((margin for ours, theirs, margin in pairs if ours != theirs), None)
    return "=" if margin is None else "~" if margin < MAX_ERROR else "!"


def _canonical(module: str) -> str:
    if module == "lm_head":
        return "head"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"layers.{layer}.{_PROJECTIONS[part.rpartition('.')[2]]}"


def _packed(family: Family, room: Path) -> tuple[Path, Any]:
    return convert(family.folder, room / "packed.safetensors").path, family.model


def _onnx(family: Family, room: Path) -> tuple[Path, Any]:
    (folder := room / "onnx").mkdir()  # it brings its tokenizer with it
    return convert(family.folder, folder / "model.onnx").path, family.model


def _meta(family: Family, room: Path) -> tuple[Path, Any]:
    format_meta.write(family, room / "meta")
    return room / "meta", family.model


def _gguf(family: Family, kind: str, room: Path) -> tuple[Path, Any]:
    path = room / f"{kind.replace(' ', '_')}.gguf"
    return path, family.with_weights(format_gguf.write(family, kind, path))


def _by_llama_cpp(family: Family, kind: str, room: Path) -> tuple[Path, Any]:
    source, path = room / "F32.gguf", room / f"llama_cpp_{kind}.gguf"
    format_gguf.quantise_file(source, path, kind)
    return path, family.with_weights(format_gguf.read(family, path))


def _converted(family: Family, kind: Kind, room: Path) -> tuple[Path, Any]:
    path = convert(family.folder, room / f"ours_{kind}.gguf", kind).path
    return path, family.model if kind == "i2_s" else family.with_weights(format_gguf.read(family, path))

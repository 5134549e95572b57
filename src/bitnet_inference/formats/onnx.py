"""ONNX decoders: a graph with a cache, and the files beside it that say what it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.closed import ClosedCheckpoint
from bitnet_inference.formats.json_files import Fields
from bitnet_inference.formats.onnx_config import GENAI, heads_said, read_files, read_onnx_config, read_section
from bitnet_inference.formats.onnx_decoder import Decoder, names_of, read_decoder
from bitnet_inference.formats.onnx_graph import plain, read_graph
from bitnet_inference.own_files import inside

FILES = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
SUBFOLDER = "onnx"
_ADVICE = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


class OnnxCheckpoint(ClosedCheckpoint):
    """A file with a decoder. Opening reads its structure, no weights; ONNX Runtime computes it, and only that.

    `decoder` says how it is fed. `folder` holds the words and configurations. `generation` is what genai_config.json
    recommends, by the names of generation_config.json. Of `config`, what neither the graph nor a configuration says is
    0 or a default without meaning: activation, norms and rotations are the graph's own.
    """

    _closed = "an ONNX graph"

    def __init__(self, path: Path) -> None:
        """Raises FormatError for broken files and contradictions, Unsupported for graphs that are no such decoder."""
        folder = path if path.is_dir() else path.parent
        self.folder = _text_folder(folder)
        genai = read_section(self.folder, "model")
        self.path = _model_file(folder, genai) if path.is_dir() else path  # which may be a link: it was named
        self.metadata: dict[str, Any] = {}
        self.graph = read_graph(self.path)
        names, files = names_of(genai and genai.section("decoder")), read_files(self.folder, genai)
        self.decoder: Decoder = read_decoder(self.graph, names, heads_said(files))
        self.config = read_onnx_config(self.path, self.folder, files, self.decoder)
        search = read_section(self.folder, "search")
        self.generation = {key: search.values[key] for key in _ADVICE if key in search} if search else {}
        self._has_genai = genai is not None

    @property
    def num_parameters(self) -> int:
        """The weights in the tensors of the graph, without what only indexes and reshapes."""
        return self.graph.num_weights

    @property
    def num_bytes(self) -> int:
        """The size of the file, and of the tensors in files beside it."""
        return self.graph.num_bytes

    def notes(self) -> list[str]:
        """How the files are meant, and what was ignored in them: a line each, for `bitnet inspect`."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        yield f"ONNX file{f' by {plain(self.graph.producer)}' if self.graph.producer else ''}"
        if self._has_genai:
            yield f"{GENAI}: names, sizes and sampling are used, its session_options are not"
        fetched = {self.decoder.logits, self.decoder.hidden, *self.decoder.presents}
        if unread := self.graph.outputs.keys() - fetched:
            yield f"outputs that are not asked for: {len(unread)}"
        if self.decoder.hidden is None:
            yield "no output of hidden states: texts cannot be embedded"


def find_onnx(folder: Path) -> Path | None:
    """The folder of a model's ONNX file, this or the one below it; None where there is none of a known name."""
    below = [inside(folder, SUBFOLDER)] if os.path.lexists(folder / SUBFOLDER) else []
    for each in (folder, *below):
        if any(os.path.lexists(each / name) for name in (GENAI, *FILES)):
            return each
    return None


def _text_folder(folder: Path) -> Path:
    """Where configurations and words lie: beside the file, or above its folder "onnx"."""
    names = (GENAI, "config.json", "tokenizer.json")
    is_below = folder.absolute().name == SUBFOLDER and not any(os.path.lexists(folder / name) for name in names)
    return folder.absolute().parent if is_below else folder


def _model_file(folder: Path, genai: Fields | None) -> Path:
    decoder = genai and genai.section("decoder")
    if decoder is not None:
        if "pipeline" in decoder:
            raise Unsupported(f"{decoder.path}: decoder.pipeline: models in several parts are not supported")
        return inside(folder, decoder.text("filename", FILES[0]))
    for name in FILES:
        if os.path.lexists(folder / name):
            return inside(folder, name)
    raise FormatError(folder, "", f"holds none of {', '.join(FILES)}: give the ONNX file itself")

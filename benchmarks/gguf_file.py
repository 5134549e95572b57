"""Writes a BitNet checkpoint for llama.cpp: ternary matrices as TQ2_0, embedding and head (one table) as F16."""

from __future__ import annotations

from pathlib import Path

from bitnet_inference.conversion.gguf_tensors import GgufTensors
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.gguf_metadata import describe
from bitnet_inference.formats.gguf_writer import Put, record, write_gguf
from bitnet_inference.output_files import whole_file

TABLE = "token_embd.weight"


def write_file(checkpoint: Checkpoint, path: Path) -> None:
    """Write the file, without words: token ids go in and out. Raises Unsupported for models of other shapes.

    llama.cpp knows Microsoft's models only by the name "bitnet" (with SiLU, which takes it as long as relu2).
    """
    described = describe(path, checkpoint.config, path.stem)
    values = {key.replace("bitnet-b1.58.", "bitnet."): value for key, value in described.items()}
    values |= {"general.architecture": "bitnet", "tokenizer.ggml.model": "no_vocab"}
    tensors, halves = (GgufTensors(checkpoint, kind, False, lambda done, total: None) for kind in ("tq2_0", "f16"))

    def encode(name: str, put: Put) -> int:
        return (halves if name == TABLE else tensors).encode(name, put)

    with whole_file(path) as out:
        write_gguf(out, [record(key, value) for key, value in values.items()], tensors.shapes, encode)

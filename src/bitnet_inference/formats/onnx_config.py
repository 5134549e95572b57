"""The configuration of an ONNX decoder: sizes of its graph, and what the files beside it add and confirm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bitnet_inference.errors import FormatError, Unsupported
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.hf_pooling import read_pooling
from bitnet_inference.formats.json_files import Fields, read_json
from bitnet_inference.formats.onnx_decoder import Decoder
from bitnet_inference.formats.sizes import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_POSITIONS,
    MAX_VOCAB,
)
from bitnet_inference.own_files import inside

GENAI = "genai_config.json"
_POSITIONS = ("max_position_embeddings", "n_positions", "context_length")


def read_section(folder: Path, key: str) -> Fields | None:
    """The section under a key of genai_config.json; None where there is no such file, or no such section."""
    return read_json(inside(folder, GENAI)).section(key) if os.path.lexists(folder / GENAI) else None


def read_files(folder: Path, genai: Fields | None) -> list[Fields]:
    """What says something of the model: its section `genai`, the section "decoder" in that, and config.json."""
    decoder = genai and genai.section("decoder")
    plain = read_json(inside(folder, "config.json")) if os.path.lexists(folder / "config.json") else None
    return [fields for fields in (genai, decoder, plain) if fields is not None]


def heads_said(files: list[Fields]) -> tuple[int | None, int | None]:
    """Heads of keys and values, and their features; None where the files do not say it."""
    num_heads = _first(files, ("num_attention_heads",), MAX_HEADS)
    head_dim = _first(files, ("head_size", "head_dim"), MAX_HEAD_DIM)
    of_whole = _first(files, ("hidden_size",), MAX_HIDDEN) // max(1, num_heads)
    return _first(files, ("num_key_value_heads",), MAX_HEADS) or num_heads or None, head_dim or of_whole or None


def read_onnx_config(path: Path, folder: Path, files: list[Fields], decoder: Decoder) -> ModelConfig:
    """The configuration of the model at `path`, whose other files are in `folder`.

    Raises FormatError where the files contradict the graph or leave out the length of the context.
    """
    for fields in files:
        for key, size in _sizes(decoder).items():
            if size is not None and key in fields and fields.size(key, MAX_VOCAB) != size:
                why = f"contradicts {path.name}, which has {size}: they do not belong together: download both again"
                raise fields.wrong(key, why)
    vocab_size = decoder.vocab_size or _first(files, ("vocab_size",), MAX_VOCAB)
    if not vocab_size:
        raise Unsupported(f"{path}: the size of the vocabulary is said nowhere: copy the model's config.json beside it")
    bos_ids = [token for fields in files for token in fields.ids("bos_token_id")]
    return ModelConfig(
        family=next(
            (fields.text(key, "") for fields in files for key in ("model_type", "type") if key in fields), "onnx"
        ),
        vocab_size=vocab_size,
        hidden_size=decoder.hidden_size or _first(files, ("hidden_size",), MAX_HIDDEN),
        intermediate_size=_first(files, ("intermediate_size",), MAX_INTERMEDIATE),
        num_layers=decoder.num_layers,
        num_heads=_first(files, ("num_attention_heads",), MAX_HEADS) or decoder.num_kv_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        max_positions=_max_positions(path, folder, files),
        activation="silu",
        norm_eps=0.0,
        rope_theta=0.0,
        pooling=read_pooling(folder),
        bos_id=next((token for token in bos_ids if token < vocab_size), None),
        eos_ids=tuple(dict.fromkeys(token for token in _eos_ids(folder, files) if token < vocab_size)),
    )


def _sizes(decoder: Decoder) -> dict[str, int | None]:
    """What configurations may say of a graph, by the keys of both kinds of them."""
    return {
        "vocab_size": decoder.vocab_size,
        "hidden_size": decoder.hidden_size,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "head_size": decoder.head_dim,
    }


def _first(files: list[Fields], keys: tuple[str, ...], most: int) -> int:
    """The size under the first key that is there; 0 where none is."""
    return next((fields.size(key, most) for fields in files for key in keys if key in fields), 0)


def _max_positions(path: Path, folder: Path, files: list[Fields]) -> int:
    found = [fields.size(key, MAX_POSITIONS) for fields in files for key in _POSITIONS if key in fields]
    if not found:
        why = f"max_position_embeddings is said nowhere, and how long {path.name} can go on shows nowhere else"
        raise FormatError(folder / "config.json", "", f"{why}: copy the model's config.json beside it")
    return min(found)


def _eos_ids(folder: Path, files: list[Fields]) -> Iterator[int]:
    if os.path.lexists(folder / "generation_config.json"):
        files = [*files, read_json(inside(folder, "generation_config.json"))]
    for fields in files:
        yield from fields.ids("eos_token_id")

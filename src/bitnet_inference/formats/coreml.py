"""Core ML packages of `bitnet convert`: a program with states, and tokenizer and sizes in the same folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bitnet_inference.errors import FormatError
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.formats.closed import ClosedCheckpoint
from bitnet_inference.formats.coreml_package import open_package
from bitnet_inference.formats.coreml_program import FLOAT16, FLOAT32, INT32, Function, Port, read_program
from bitnet_inference.formats.json_files import Fields, read_json
from bitnet_inference.formats.sizes import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
)
from bitnet_inference.own_files import inside

ONE, SEVERAL = "main", "prompt"  # the functions for one token, and for `chunk_tokens`
KEYS, VALUES = "keys", "values"  # the states
_CURE = "convert the model again"


class CoreMLCheckpoint(ClosedCheckpoint):
    """A package. Opening reads its structure, no weights; Core ML computes it, and only that.

    `folder` holds the words and config.json. `chunk_tokens` are computed at a time by the function SEVERAL.
    Of `config`, `max_positions` is the length of the states, and activation, norms and rotations are the program's own.
    """

    _closed = "a Core ML program"

    def __init__(self, path: Path) -> None:
        """Raises FormatError for broken files and contradictions, Unsupported for packages of others."""
        self.path, self.metadata = path, dict[str, Any]()
        self.package = open_package(path)
        self.folder = self.package.texts
        self.program = read_program(self.package)
        for name in os.listdir(self.folder):
            inside(self.folder, name)
        self.config = self._read_config(read_json(inside(self.folder, "config.json")))
        self.chunk_tokens = self._num_tokens(SEVERAL)
        self._check_functions()

    @property
    def num_parameters(self) -> int:
        """The weights of the model."""
        return sum(self.program.weights.values())

    @property
    def num_bytes(self) -> int:
        """The size of the program and its weights."""
        return self.package.num_bytes

    def notes(self) -> list[str]:
        """How the files are meant: a line each, for `bitnet inspect`."""
        return ["Core ML package: runs on macOS 15 or newer"]

    def _read_config(self, fields: Fields) -> ModelConfig:
        keys = self._port("states", ONE, KEYS).shape
        if len(keys) != 4 or keys[2] > MAX_POSITIONS:
            raise self._wrong(f"the state keys is {list(keys)}, not [layers, heads, tokens, features]")
        vocab_size = fields.size("vocab_size", MAX_VOCAB)
        more = inside(self.folder, "generation_config.json")
        files = [fields, *([read_json(more)] if os.path.lexists(more) else [])]
        eos_ids = [token for each in files for token in each.ids("eos_token_id") if token < vocab_size]
        return ModelConfig(
            family=fields.text("model_type", "coreml"),
            vocab_size=vocab_size,
            hidden_size=fields.size("hidden_size", MAX_HIDDEN),
            intermediate_size=fields.size("intermediate_size", MAX_INTERMEDIATE),
            num_layers=fields.size("num_hidden_layers", MAX_LAYERS),
            num_heads=fields.size("num_attention_heads", MAX_HEADS),
            num_kv_heads=fields.size("num_key_value_heads", MAX_HEADS),
            head_dim=fields.size("head_dim", MAX_HEAD_DIM),
            max_positions=keys[2],
            activation="silu",
            norm_eps=0.0,
            rope_theta=0.0,
            bos_id=next((token for token in fields.ids("bos_token_id") if token < vocab_size), None),
            eos_ids=tuple(dict.fromkeys(eos_ids)),
        )

    def _check_functions(self) -> None:
        """Raises FormatError where functions don't have the shapes that config.json says."""
        config = self.config
        cache = (config.num_layers, config.num_kv_heads, config.max_positions, config.head_dim)
        for name, tokens in ((ONE, 1), (SEVERAL, self.chunk_tokens)):
            rows = (*cache[:2], tokens, cache[3])
            for kind, port, shape, dtypes in (
                ("inputs", "input_ids", (1, tokens), (INT32,)),
                ("inputs", "position", (1,), (INT32,)),
                ("states", KEYS, cache, (FLOAT16,)),
                ("states", VALUES, cache, (FLOAT16,)),
                ("outputs", "logits", (1, tokens, config.vocab_size), (FLOAT16, FLOAT32)),
                ("outputs", "new_keys", rows, (FLOAT16,)),
                ("outputs", "new_values", rows, (FLOAT16,)),
            ):
                found = self._port(kind, name, port)
                if found.shape != shape or found.dtype not in dtypes:
                    raise self._wrong(f"{port} of {name} is {found}, not {Port(dtypes[0], shape)} as config.json says")

    def _num_tokens(self, name: str) -> int:
        shape = self._port("inputs", name, "input_ids").shape
        if not shape or not 1 <= shape[-1] <= self.config.max_positions:
            raise self._wrong(f"input_ids of {name} is {list(shape)}")
        return shape[-1]

    def _port(self, kind: str, function: str, name: str) -> Port:
        found: Function | None = self.program.functions.get(function)
        ports: dict[str, Port] = getattr(found, kind) if found else {}
        if name not in ports:
            raise self._wrong(f"the function {function} has no {name} among its {kind}")
        return ports[name]

    def _wrong(self, why: str) -> FormatError:
        return FormatError(self.package.program, "", f"{why}: {_CURE}")

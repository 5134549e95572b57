"""The Core ML backend: Core ML computes the program of a package, on macOS, one sequence after the other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.coreml_cache import BLOCK_TOKENS, Blocks, Held, States
from bitnet_inference.backends.coreml_library import running_coremltools
from bitnet_inference.backends.onnx import MAX_LOGITS_BYTES, OnnxOutput
from bitnet_inference.config import EngineConfig, available_bytes
from bitnet_inference.errors import KernelError, Stopped, Unsupported, said
from bitnet_inference.formats.coreml import KEYS, ONE, SEVERAL, VALUES, CoreMLCheckpoint
from bitnet_inference.model.contract import Batch, Capabilities
from bitnet_inference.model.loader import Progress

MAX_STATES = 4  # each as long as the context
_LEAST_CHUNK = 8  # tokens for which the function for several is quicker than one by one


class CoreMLModel:
    """A `Model` on the Neural Engine, the GPU or the processors of a Mac, as Core ML chooses.

    Each sequence of a batch is a run of its own, so no number depends on its neighbours; it may depend on how a prompt
    is cut into steps.
    """

    def __init__(self, checkpoint: CoreMLCheckpoint, config: EngineConfig, progress: Progress) -> None:
        """Raises Unavailable elsewhere than on macOS 15, Unsupported where Core ML refuses the program."""
        self.config, self._path, self._chunk = checkpoint.config, checkpoint.path, checkpoint.chunk_tokens
        self._compiled, self._functions = _load(checkpoint)
        self._weight_bytes, sizes = checkpoint.num_bytes, checkpoint.config
        self._blocks = Blocks(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
        self._states = States(lambda: self._functions[ONE].make_state(), MAX_STATES)
        self._logits = np.empty((0, sizes.vocab_size), np.float32)
        self.capabilities = Capabilities(
            block_size=BLOCK_TOKENS,
            block_bytes=self._blocks.block_bytes,
            max_sequences=256,
            max_tokens=max(1, min(config.batch_tokens, MAX_LOGITS_BYTES // (4 * sizes.vocab_size))),
            available_bytes=available_bytes() // 2,
            has_hidden=False,
        )
        progress(checkpoint.num_parameters, checkpoint.num_parameters)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, as large as in the files, and of the reserved cache."""
        return self._weight_bytes + self._blocks.num_bytes

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; what was cached before is gone."""
        self._states.clear()
        self._blocks.reserve(num_blocks)

    def forward(self, batch: Batch) -> OnnxOutput:
        """Advance every sequence of the batch by its tokens."""
        if not self._functions:
            raise Stopped("the model is closed: load it again")
        if len(self._logits) < len(batch.token_ids):
            self._logits = np.empty((len(batch.token_ids), self.config.vocab_size), np.float32)
        for table, (begin, end) in zip(batch.block_tables, pairwise(batch.starts.tolist()), strict=True):
            if end > begin:
                self._advance(batch.token_ids[begin:end], int(batch.positions[begin]), table, begin)
        return OnnxOutput(self._path, self._logits, None)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        self._blocks.copy(pairs)
        self._states.forget({target for _, target in pairs})

    def close(self) -> None:
        """Give all memory back."""
        self._functions = {}
        self._compiled.cleanup()
        self._states.clear()
        self._blocks.reserve(0)
        self._logits = self._logits[:0].copy()

    def _advance(self, token_ids: NDArray[np.int32], past: int, table: NDArray[np.int32], row: int) -> None:
        """Run a sequence behind so many tokens in its blocks; its first token has that row of the logits."""
        held = self._states.take(table, past)
        if past and not held.has(tuple(map(int, table)), past):
            self._restore(held, table, past)
        at, held.num_tokens = 0, 0  # should a run fail
        while at < len(token_ids):
            at += self._run_piece(held, token_ids[at:], past + at, table, row + at)
        held.blocks, held.num_tokens = tuple(map(int, table)), past + len(token_ids)
        self._states.forget(set(held.blocks[past // BLOCK_TOKENS : -(-held.num_tokens // BLOCK_TOKENS)]), held)

    def _run_piece(
        self, held: Held, token_ids: NDArray[np.int32], past: int, table: NDArray[np.int32], row: int
    ) -> int:
        """Run the first of these tokens, as many as a function takes; returns how many."""
        has_room = past + self._chunk <= self.config.max_positions
        name, size = (SEVERAL, self._chunk) if has_room and len(token_ids) >= _LEAST_CHUNK else (ONE, 1)
        piece = token_ids[:size]
        count = len(piece)
        made = self._run(name, held, np.pad(piece, (0, size - count)), past)
        self._logits[row : row + count] = np.asarray(made["logits"]).reshape(size, -1)[:count]
        new = np.stack([np.asarray(made[f"new_{each}"], np.float16) for each in (KEYS, VALUES)])
        self._blocks.put(table, past, new[:, :, :, :count])
        return count

    def _restore(self, held: Held, table: NDArray[np.int32], num_tokens: int) -> None:
        """Put a sequence that is in blocks back into a state."""
        whole = self._blocks.get(table, num_tokens, self.config.max_positions)
        for name, rows in zip((KEYS, VALUES), whole, strict=True):
            held.state.write_state(name, rows)

    def _run(self, name: str, held: Held, token_ids: NDArray[np.int32], position: int) -> dict[str, Any]:
        inputs = {"input_ids": token_ids[None].astype(np.int32), "position": np.array([position], np.int32)}
        try:
            found: dict[str, Any] = self._functions[name].predict(inputs, state=held.state)
        except Exception as error:  # the library's have no ancestor of their own
            raise KernelError(f"{self._path}: Core ML fails in a step ({said(error)}): convert it again") from error
        return found


def _load(checkpoint: CoreMLCheckpoint) -> tuple[TemporaryDirectory[str], dict[str, Any]]:
    """The functions of the program, and the folder into which it was compiled for this machine.

    All paths in the package have been checked; Core ML opens them again.
    """
    library = running_coremltools()
    folder = TemporaryDirectory(suffix=".coreml")
    try:
        path = library.utils.compile_model(str(checkpoint.path.resolve()), str(Path(folder.name) / "program.mlmodelc"))
        return folder, {name: library.models.CompiledMLModel(path, function_name=name) for name in (ONE, SEVERAL)}
    except Exception as error:
        folder.cleanup()
        raise Unsupported(f"{checkpoint.path}: Core ML refuses it ({said(error)}): convert it again") from error

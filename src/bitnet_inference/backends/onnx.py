"""The ONNX backend: ONNX Runtime computes the graph of a file, one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.onnx_cache import BLOCK_TOKENS, OnnxCache
from bitnet_inference.config import EngineConfig, available_bytes
from bitnet_inference.errors import (
    BitNetError,
    FormatError,
    KernelError,
    OutOfMemory,
    Stopped,
    Unavailable,
    Unsupported,
    said,
)
from bitnet_inference.formats.onnx import OnnxCheckpoint
from bitnet_inference.model.contract import Batch, Capabilities, WholeHead, best_of
from bitnet_inference.model.loader import Progress

MAX_LOGITS_BYTES = 1 << 28  # of a step: a graph gives those of all tokens


class OnnxModel:
    """A `Model` on the processors of ONNX Runtime.

    Each sequence of a batch is a run of its own, so no number depends on its neighbours. It may depend on how a prompt
    is cut into steps, for the runtime chooses its kernels by shapes.
    """

    def __init__(self, checkpoint: OnnxCheckpoint, config: EngineConfig, progress: Progress) -> None:
        """Raises Unavailable without ONNX Runtime, FormatError and Unsupported for a graph that it refuses."""
        self.config, self._path, self._decoder = checkpoint.config, checkpoint.path, checkpoint.decoder
        self._session: Any = _start(checkpoint, config.threads or 1)
        self._weight_bytes = checkpoint.num_bytes
        decoder = self._decoder
        self._cache = OnnxCache(len(decoder.pasts), decoder.num_kv_heads, decoder.head_dim, decoder.cache_dtype)
        self._rows: dict[str, NDArray[Any]] = {
            decoder.logits: np.empty((0, self.config.vocab_size), decoder.logits_dtype)
        }
        self._hidden = decoder.hidden if self.config.hidden_size else None  # how wide it is, nobody may say
        if self._hidden is not None:
            self._rows[self._hidden] = np.empty((0, self.config.hidden_size), decoder.hidden_dtype)
        row_bytes = sum(rows.shape[1] * rows.itemsize for rows in self._rows.values())
        self.capabilities = Capabilities(
            block_size=BLOCK_TOKENS,
            block_bytes=self._cache.block_bytes,
            max_sequences=256,
            max_tokens=max(1, min(config.batch_tokens, MAX_LOGITS_BYTES // row_bytes)),
            available_bytes=available_bytes() // 2,
            has_hidden=self._hidden is not None,
        )
        progress(checkpoint.num_parameters, checkpoint.num_parameters)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, as large as in the files, and of the reserved cache."""
        return self._weight_bytes + self._cache.num_bytes

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; what was cached before is gone."""
        self._cache.reserve(num_blocks)

    def forward(self, batch: Batch) -> OnnxOutput:
        """Advance every sequence of the batch by its tokens."""
        if self._session is None:
            raise Stopped("the model is closed: load it again")
        num_tokens = len(batch.token_ids)
        for name, rows in self._rows.items():
            if len(rows) < num_tokens:
                self._rows[name] = np.empty((num_tokens, rows.shape[1]), rows.dtype)
        for table, (begin, end) in zip(batch.block_tables, pairwise(batch.starts.tolist()), strict=True):
            if end > begin:
                self._advance(batch.token_ids[begin:end], int(batch.positions[begin]), table, begin)
        hidden = None if self._hidden is None else self._rows[self._hidden]
        return OnnxOutput(self._path, self._rows[self._decoder.logits], hidden)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        self._cache.copy(pairs)

    def close(self) -> None:
        """Give all memory and threads back."""
        self._session = None
        self._rows.clear()
        self._cache.close()

    def _advance(self, token_ids: NDArray[np.int32], past: int, blocks: NDArray[np.int32], row: int) -> None:
        """Run a sequence behind so many tokens in its blocks; its first token has that row of the outputs."""
        total, decoder = past + len(token_ids), self._decoder
        numbers: dict[str | None, NDArray[Any]] = {
            decoder.input_ids: token_ids,
            decoder.attention_mask: np.ones(total),
            decoder.position_ids: np.arange(past, total),
        }
        inputs = {name: values[None].astype(decoder.integers[name]) for name, values in numbers.items() if name}
        if decoder.use_cache is not None:
            inputs[decoder.use_cache] = np.array([past > 0])
        if decoder.logits_kept is not None:
            inputs[decoder.logits_kept] = np.zeros((), np.int64)
        inputs |= dict(zip(decoder.pasts, self._cache.gather(blocks, past)[:, None], strict=True))
        outputs = dict(zip(decoder.presents, self._cache.present(total)[:, None], strict=True))
        outputs |= {name: rows[None, row : row + len(token_ids)] for name, rows in self._rows.items()}
        self._run(inputs, outputs)
        self._cache.keep(blocks, past, total)

    def _run(self, inputs: dict[str, NDArray[Any]], outputs: dict[str, NDArray[Any]]) -> None:
        """The runtime reads and writes our arrays; it checks that what it computes has the shapes of the outputs."""
        binding = self._session.io_binding()
        try:
            for name, array in inputs.items():
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            for name, array in outputs.items():
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            self._session.run_with_iobinding(binding)
        except Exception as error:  # the runtime's have no ancestor of their own
            raise _failed(self._path, error) from error


class OnnxOutput(WholeHead):
    """Logits, and hidden states where the graph gives them, of the tokens of a forward."""

    def __init__(self, path: Path, logits: NDArray[Any], hidden: NDArray[Any] | None) -> None:
        self._path, self._logits, self._hidden = path, logits, hidden

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these tokens: [len(rows), vocab]."""
        return self._logits[np.asarray(rows, np.intp)].astype(np.float32, copy=False)

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See Output."""
        return best_of(self.full(rows), k)

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states after the final norm: [len(rows), hidden]. Raises Unsupported where there are none."""
        if self._hidden is None:
            raise Unsupported(f"{self._path}: the graph gives no hidden states: embed with the model it is made of")
        return self._hidden[np.asarray(rows, np.intp)].astype(np.float32, copy=False)


def _start(checkpoint: OnnxCheckpoint, threads: int) -> Any:
    """A session of the runtime. All paths in the file have been checked; the runtime opens them again."""
    try:
        import onnxruntime
    except ImportError as error:
        install = 'pip install "bitnet-inference[onnx]"'
        raise Unavailable("onnx", "the package onnxruntime is not installed", install) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.enable_mem_pattern = False  # it keeps a plan for every length that it has seen
    options.log_severity_level = 4  # errors are raised, and are not to be printed too
    options.add_session_config_entry("session.load_model_format", "ONNX")  # what was checked, whatever its name
    options.add_session_config_entry("session.force_spinning_stop", "1")  # threads sleep between the runs
    try:
        session = onnxruntime.InferenceSession(str(checkpoint.path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refused(checkpoint.path, error) from error
    if {each.name for each in session.get_inputs()} != checkpoint.graph.inputs.keys():
        raise FormatError(checkpoint.path, "", "ONNX Runtime finds other inputs in it: export it again")
    return session


def _refused(path: Path, error: Exception) -> BitNetError:
    if "NOT_IMPLEMENTED" in str(error):
        return Unsupported(f"{path}: ONNX Runtime does not compute it ({said(error)}): export it otherwise")
    if _is_memory(error):
        return OutOfMemory(f"{path}: memory ran out while loading it: free memory, or choose a smaller model")
    is_newer = "opset" in str(error) or "IR version" in str(error)
    cure = "update onnxruntime, or export it for an older opset" if is_newer else "export it again"
    return FormatError(path, "", f"ONNX Runtime refuses it ({said(error)}): {cure}")


def _failed(path: Path, error: Exception) -> BitNetError:
    if _is_memory(error):
        return OutOfMemory(f"{path}: a step finds no memory: free memory, or lower max_batch_tokens")
    return KernelError(f"{path}: ONNX Runtime fails in a step ({said(error)}): export the model again")


def _is_memory(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate memory" in text

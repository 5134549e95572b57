"""llama.cpp through llama-cpp-python's low-level interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

CHUNK = 512


SILENCE: Any = llama_cpp.llama_log_callback(lambda level, text, data: None)  # or it prints every step of its loading


class LlamaCpp:
    """A GGUF model. Single sequences and batches have contexts of their own."""

    version = f"llama-cpp-python {llama_cpp.__version__}"

    def __init__(
        self, path: Path, threads: int, max_context: int, max_batch: int, num_batch_steps: int, *, reorders: bool = True
    ) -> None:
        """Loads the model; raises OSError where llama.cpp cannot.

        `reorders`: some types of weights are put in another order for this processor when they are loaded.
        """
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(SILENCE, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers, parameters.use_extra_bufts = 0, reorders
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise OSError(f"{path}: llama.cpp cannot load it")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._single = self._context(max_context, 1, threads)
        self._several = self._context(max_batch * max(64, num_batch_steps), max_batch, threads)
        self._batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self._words = np.random.default_rng(0).integers(0, self._vocab_size, max(max_context, max_batch))

    def _context(self, num_tokens: int, num_sequences: int, threads: int) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = num_tokens, num_sequences
        parameters.n_batch = parameters.n_ubatch = CHUNK
        parameters.n_threads = parameters.n_threads_batch = threads
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise OSError("llama.cpp cannot make a context")
        return context

    def prompt(self, length: int) -> None:
        """A prompt, up to the choice of the first token of the answer."""
        self._forget(self._single, 0)
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            wants = [at == length - 1 for at in range(start, end)]
            self._decode(self._single, self._words[start:end], range(start, end), [0] * (end - start), wants)
        self._best(self._single, (length - 1) % CHUNK)

    def decode(self, context: int, num_steps: int, num_sequences: int) -> None:
        """Greedy steps of all sequences, behind what lies in the cache."""
        where = self._single if num_sequences == 1 else self._several
        self._forget(where, context)
        tokens: Any = self._words[:num_sequences]
        for position in range(context, context + num_steps):
            self._decode(where, tokens, [position] * num_sequences, range(num_sequences), [True] * num_sequences)
            tokens = [self._best(where, row) for row in range(num_sequences)]

    def _forget(self, context: Any, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), -1, length, -1)

    def _decode(self, context: Any, tokens: Any, positions: Any, sequences: Any, wants: list[bool]) -> None:
        batch = self._batch
        batch.n_tokens = len(wants)
        for i, (token, position, sequence, wanted) in enumerate(zip(tokens, positions, sequences, wants, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if (code := llama_cpp.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")

    def _best(self, context: Any, row: int) -> int:
        return int(np.argmax(self.logits(context, row)))

    def logits(self, context: Any, row: int) -> NDArray[np.float32]:
        """The logits of a token of the last batch."""
        pointer = llama_cpp.llama_get_logits_ith(context, row)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))

    def logits_of(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits behind each of some tokens: [tokens, vocab]."""
        self._forget(self._single, 0)
        count = len(token_ids)
        self._decode(self._single, token_ids, range(count), [0] * count, [True] * count)
        return np.stack([self.logits(self._single, row).copy() for row in range(count)])

    def encode(self, text: str, special: bool) -> list[int]:
        """The tokens of a text, those around it too; with `special`, special tokens that it spells count as such."""
        vocab, data = llama_cpp.llama_model_get_vocab(self._model), text.encode()
        room = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(vocab, data, len(data), room, len(room), True, special)
        return list(room[:count])

    def close(self) -> None:
        """Give all memory back."""
        llama_cpp.llama_batch_free(self._batch)
        for context in (self._single, self._several):
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self._model)

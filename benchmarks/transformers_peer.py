"""Transformers as its users run it on a CPU: `from_pretrained(FOLDER, dtype=torch.bfloat16)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


class Transformers:
    """A model in bfloat16: its ternary matrices are unpacked when it is loaded."""

    version = f"transformers {transformers.__version__} (torch {torch.__version__})"

    def __init__(self, folder: Path, threads: int, max_context: int) -> None:
        """Loads the model; raises what Transformers raises where it cannot."""
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, local_files_only=True
        )
        random = torch.Generator().manual_seed(0)
        self._words = torch.randint(self._model.config.vocab_size, (max(max_context, 1024),), generator=random)
        self._cache: Any = None

    def prompt(self, length: int) -> None:
        """A prompt, up to the choice of the first token of the answer."""
        self._cache = transformers.DynamicCache(config=self._model.config)
        self._step(self._words[None, :length])

    def decode(self, context: int, num_steps: int, num_sequences: int) -> None:
        """Greedy steps of all sequences, behind what lies in the cache."""
        if context:
            self._cache.crop(min(0, context - self._cache.get_seq_length()))
        else:
            self._cache = transformers.DynamicCache(config=self._model.config)
        tokens = self._words[:num_sequences, None]
        for _ in range(num_steps):
            tokens = self._step(tokens)

    def _step(self, tokens: torch.Tensor) -> torch.Tensor:
        output = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        best: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return best

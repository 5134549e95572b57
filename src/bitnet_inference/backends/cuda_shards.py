"""A model on several GPUs of one machine, each with a part of every layer, in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.backends.cuda_ranks import Ranks
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import Unavailable
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.gguf import GgufCheckpoint
from bitnet_inference.formats.ternarized import TernarizedCheckpoint
from bitnet_inference.model.contract import Batch, Capabilities, WholeHead, threads_of
from bitnet_inference.model.loader import Progress
from bitnet_inference.model.shards import require_shards

PATIENCE_S = 600.0  # where no process has ended; kernels are compiled when they are first needed


class ShardedModel:
    """A `Model` whose parts are CudaModels in `config.gpus` processes; this one only hands on what it is asked.

    It yields the same bits as one GPU, for every product is split by rows (model/shards.py).
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, progress: Progress, patience_s: float = PATIENCE_S
    ) -> None:
        """Every process opens the files again, and reads its part of the weights.

        Raises what CudaModel raises, InvalidParams where the model has too few heads, and BackendError where a process
        ends or does not answer for `patience_s` seconds, as all other calls do.
        """
        _require_libraries()
        require_shards(checkpoint.config, config.gpus)
        self.config = checkpoint.config
        self._ranks = Ranks(config.gpus, patience_s)
        opened = checkpoint.original if isinstance(checkpoint, TernarizedCheckpoint) else checkpoint
        arm = isinstance(opened, GgufCheckpoint) and opened.is_arm
        words = {"verb": "load", "path": str(opened.path.absolute()), "arm": arm, "config": asdict(config)}
        try:
            loaded = [words for words, _ in self._ranks.ask(words, on_progress=lambda done: progress(*done))]
        except BaseException:
            self._ranks.close()
            raise
        self.notes: tuple[str, ...] = tuple(loaded[0]["notes"])  # what its user should know
        self._weight_bytes: int = sum(each["num_bytes"] for each in loaded)
        self._cache_bytes, self._first_tokens = 0, [each["first_token"] for each in loaded]
        self._executor: Any = native.Executor(config.isa, config.threads)  # samples from what the GPUs bring
        able = _together([Capabilities(**each["capabilities"]) for each in loaded])
        self.capabilities = replace(able, looks_ahead=False, threads=threads_of(self))

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and of the reserved cache, on all GPUs."""
        return self._weight_bytes + self._cache_bytes

    @property
    def process_ids(self) -> list[int]:
        """The processes of the GPUs, in their order; none when it is closed."""
        return self._ranks.process_ids

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; what was cached before is gone."""
        self._ranks.ask({"verb": "reserve", "num_blocks": num_blocks})
        self._cache_bytes = num_blocks * self.capabilities.block_bytes

    def forward(self, batch: Batch) -> ShardedOutput:
        """Queue a step that advances every sequence of the batch by its tokens."""
        arrays = (batch.token_ids, batch.positions, batch.slots, batch.starts, batch.block_tables)
        self._ranks.ask({"verb": "forward"}, arrays)
        return ShardedOutput(self)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        self._ranks.ask({"verb": "copy_blocks"}, [np.asarray(pairs, np.int32).reshape(-1, 2)])

    def close(self) -> None:
        """End the processes, and with them give all memory back."""
        self._executor = None
        self._ranks.close()

    def ask(self, verb: str, rows: Sequence[int], **words: Any) -> list[list[NDArray[Any]]]:
        """What each GPU says of these rows of the last step."""
        answers = self._ranks.ask({"verb": verb, **words}, [np.asarray(rows, np.int32)])
        return [arrays for _, arrays in answers]

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of these rows of the last step."""
        return best_of(self.ask("top", rows, k=k), self._first_tokens, k)


def best_of(
    parts: Sequence[Sequence[NDArray[Any]]], first_tokens: Sequence[int], k: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k best of the best of each GPU, [R, ...] ids and logits; ids count from the first token of each.

    Best first, lowest id first among equals; NaN is better than all numbers, as on one GPU.
    """
    ids = np.concatenate([ids + first for (ids, _), first in zip(parts, first_tokens, strict=True)], axis=1)
    logits = np.concatenate([logits for _, logits in parts], axis=1)
    best = np.lexsort((-logits, ~np.isnan(logits)), axis=1)[:, :k]  # in the order of ids where they are equal
    return np.take_along_axis(ids, best, axis=1), np.take_along_axis(logits, best, axis=1)


def _require_libraries() -> None:
    if sys.platform == "win32":
        raise Unavailable("cuda", "several GPUs need NCCL, which Windows has not", "choose one GPU")
    for library in ("torch", "triton"):
        if find_spec(library) is None:
            raise Unavailable("cuda", f"{library} is not installed", 'pip install "bitnet-inference[cuda]"')


def _together(ranks: list[Capabilities]) -> Capabilities:
    """A block lies on all GPUs, which have more or fewer heads of it; there are as many as the fullest has room for."""
    num_blocks = min(each.available_bytes // each.block_bytes for each in ranks)
    block_bytes = sum(each.block_bytes for each in ranks)
    return replace(ranks[0], block_bytes=block_bytes, available_bytes=num_blocks * block_bytes)


class ShardedOutput(WholeHead):
    """The final hidden rows of a forward, before the last norm: [T, hidden], on every GPU."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these tokens: [len(rows), vocab]."""
        return np.concatenate([logits for (logits,) in self._model.ask("full", rows)], axis=1)

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of each row, best first, lowest id first among equals."""
        return self._model.top(rows, k)

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states after the final norm: [len(rows), hidden]."""
        return self._model.ask("hidden", rows)[0][0]

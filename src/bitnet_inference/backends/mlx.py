"""The backend for Apple's GPUs: MLX computes the verbs, and decodes in steps that were compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends.mlx_batch import Group, Step, any_step, decoding
from bitnet_inference.backends.mlx_cache import BLOCK_TOKENS, MlxCache, Rows
from bitnet_inference.backends.mlx_metal import metal_products
from bitnet_inference.backends.mlx_ops import MlxOps, StepOps, Weights
from bitnet_inference.backends.mlx_weights import Stack, WeightReader
from bitnet_inference.config import EngineConfig, available_bytes
from bitnet_inference.errors import InvalidParams, KernelError, OutOfMemory, Stopped, said
from bitnet_inference.formats.checkpoint import Checkpoint, ModelConfig, expected_shapes
from bitnet_inference.formats.ternarized import findings_of
from bitnet_inference.model.contract import Batch, Capabilities, WholeHead, best_of
from bitnet_inference.model.decoder import decoder, final_norm, head
from bitnet_inference.model.loader import Progress, num_weights, record
from bitnet_inference.model.rope import inverse_frequencies

HEAD_ROWS = 64  # logits are computed for so many rows at a time
Last = Callable[[Any, ModelConfig, mx.array], tuple[mx.array, ...]]  # the end of a step, in the verbs of MlxOps
_OUT_OF_MEMORY = ("allocat", "emory", "maximum allowed buffer size")


class MlxModel:
    """A `Model` on Apple's GPU, or on the processor where MLX has no other.

    What a step computes for the cache is written when the next one begins. So a step that fails leaves the cache as it
    was, and nothing that reads it is still running: only then does MLX write in place.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, progress: Progress, compiled: bool | None = None
    ) -> None:
        """`compiled`: whether steps of decoding are; None: on a GPU, because for processors MLX needs a C++ compiler.

        Raises FormatError, Unsupported, OutOfMemory.
        """
        if config.head not in ("exact", "unscreened"):
            raise InvalidParams(f'head is "{config.head}", but device "mlx" rounds no head: choose "exact"')
        self.config = checkpoint.config
        self._compiled = mx.metal.is_available() if compiled is None else compiled
        with running(f"{checkpoint.path}: loading it"):
            self._weights: Weights | None = _load(checkpoint, config.quantize, progress)
        self._weight_bytes = _num_bytes(self._weights)
        sizes = self.config
        self._cache = MlxCache(config.cache_dtype, sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)
        self._decode = self._decoding_step()
        self._rows: tuple[mx.array, list[Rows]] | None = None  # of the last step, and their slots in the cache
        self._is_running = False
        self.notes = findings_of(checkpoint, config)  # what its user should know
        self.capabilities = Capabilities(
            block_size=BLOCK_TOKENS,
            block_bytes=self._cache.block_bytes,
            max_sequences=256,
            max_tokens=config.batch_tokens,
            available_bytes=_room() * 3 // 4,
        )

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and of the reserved cache."""
        return self._weight_bytes + self._cache.num_bytes

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; what was cached before is gone."""
        self._open_weights()
        self._rows = None
        wanted = num_blocks * self.capabilities.block_bytes
        what = f"a cache of {num_blocks} blocks ({told_bytes(wanted)})"
        if wanted > _room() + self._cache.num_bytes:
            raise OutOfMemory(f"{what} finds no memory: lower the context or the load")
        with running(what):
            self._cache.reserve(num_blocks)
        self._decode = self._decoding_step()  # forgets the steps that were compiled for the other size

    def forward(self, batch: Batch) -> MlxOutput:
        """Advance every sequence of the batch by its tokens."""
        weights = self._open_weights()
        with running(f"a step of {len(batch.token_ids)} tokens"):
            self._settle()
            arrays = decoding(batch, self._cache)
            if arrays is not None:
                token_ids, positions, slots, past = map(mx.array, arrays)
                hidden, rows = self._decode(token_ids, positions, past, self._cache.layers)
            else:
                slots, step = mx.array(batch.slots), any_step(batch, self._cache)
                hidden, rows = _computed(StepOps(weights, self._cache, step, self._cache.layers))
            mx.async_eval(hidden, rows)  # takes what memory it needs, or fails
            if arrays is None:
                mx.synchronize()  # else nobody may wait for it, and the engine would take it for quick
        self._rows, self._is_running = (slots, rows), arrays is not None
        return MlxOutput(self, hidden)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        self._open_weights()
        with running(f"a copy of {len(pairs)} blocks"):
            self._settle()
            self._cache.copy(pairs)

    def close(self) -> None:
        """Give all memory back."""
        with suppress(RuntimeError):  # of a GPU that has failed
            mx.eval(self._cache.layers)  # what still runs gives its memory back after clear_cache
        self._weights = self._rows = None
        self._cache.layers.clear()
        self._decode = self._decoding_step()
        mx.clear_cache()

    def finish(self, hidden: mx.array, rows: Sequence[int], last: Last, *outputs: NDArray[Any]) -> None:
        """Fill arrays, row by row, with what `last` makes of these rows of hidden states."""
        ops = MlxOps(self._open_weights())
        with running(f"the end of a step, of {len(rows)} rows,"):
            for begin in range(0, len(rows), HEAD_ROWS):
                chosen = mx.array(np.asarray(rows[begin : begin + HEAD_ROWS], np.int32))
                found = last(ops, self.config, hidden[chosen])
                mx.eval(found)  # lets other threads run
                for output, part in zip(outputs, found, strict=True):
                    output[begin : begin + HEAD_ROWS] = part
        self._is_running = False

    def _open_weights(self) -> Weights:
        if self._weights is None:
            raise Stopped("the model is closed: load it again")
        return self._weights

    def _settle(self) -> None:
        """Write into the cache what the last step has computed for it."""
        if self._is_running:
            mx.synchronize()
        self._is_running, rows, self._rows = False, self._rows, None
        if rows is not None:
            self._cache.write(*rows)

    def _decoding_step(self) -> Callable[..., tuple[mx.array, list[Rows]]]:
        """A step of one token a sequence, on arrays whose shapes repeat; see mlx_batch.decoding."""
        weights, cache = self._weights, self._cache

        def decode(
            token_ids: mx.array, positions: mx.array, past: mx.array, layers: list[Rows]
        ) -> tuple[mx.array, list[Rows]]:
            assert weights is not None, "the model is closed"
            step = Step(token_ids, positions, (Group(None, positions[:, None], past),))
            return _computed(StepOps(weights, cache, step, layers))

        return mx.compile(decode) if self._compiled else decode


class MlxOutput(WholeHead):
    """The final hidden rows of a forward, before the last norm: [T, hidden]."""

    def __init__(self, model: MlxModel, hidden: mx.array) -> None:
        self._model, self._hidden = model, hidden

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these tokens: [len(rows), vocab]."""
        output = np.empty((len(rows), self._model.config.vocab_size), np.float32)
        self._model.finish(self._hidden, rows, lambda *given: (head(*given),), output)
        return output

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of each row, best first, lowest id first among equals."""
        if k == 1:
            ids, best = np.empty((len(rows), 1), np.int32), np.empty((len(rows), 1), np.float32)
            self._model.finish(self._hidden, rows, _best, ids, best)
            return ids, best
        return best_of(self.full(rows), k)

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states after the final norm: [len(rows), hidden]."""
        output = np.empty((len(rows), self._model.config.hidden_size), np.float32)
        self._model.finish(self._hidden, rows, lambda *given: (final_norm(*given),), output)
        return output


@contextmanager
def running(what: str) -> Iterator[None]:
    """Errors of MLX become ours: OutOfMemory, or KernelError."""
    try:
        yield
    except MemoryError as error:
        raise OutOfMemory(f"{what} finds no memory: free some, or lower the context or the load") from error
    except (RuntimeError, ValueError) as error:
        text = said(error)
        if any(word in text for word in _OUT_OF_MEMORY):
            raise OutOfMemory(f"{what} finds no memory ({text}): lower the context or the load") from error
        raise KernelError(f'{what} fails in MLX ({text}): choose device "cpu"') from error


def _load(checkpoint: Checkpoint, quantize: str, progress: Progress) -> Weights:
    config, shapes = checkpoint.config, dict(expected_shapes(checkpoint.config))
    plans = record(config)
    steps = (*plans.body.steps, *plans.head.steps)
    groups = dict.fromkeys(step.weights for step in steps if step.verb in ("embed", "linear"))
    reader = WeightReader(checkpoint, quantize)
    stacks: dict[tuple[str, ...], Stack] = {}
    done, total = 0, sum(num_weights(shapes, names) for names in groups)
    for names in groups:
        stacks[names] = reader.read(names)
        done += num_weights(shapes, names)
        progress(done, total)
    vectors = {name: mx.array(checkpoint.vector(name)) for name, shape in shapes.items() if len(shape) == 1}
    turns, local_turns = (mx.array(inverse_frequencies(config, local)) for local in (False, True))
    return Weights(config, stacks, vectors, (turns, local_turns), metal_products())


def _computed(ops: StepOps) -> tuple[mx.array, list[Rows]]:
    """Hidden states, and what is to be written into the cache."""
    return decoder(ops, ops.config), ops.rows


def _best(ops: Any, config: ModelConfig, hidden: mx.array) -> tuple[mx.array, mx.array]:
    logits = head(ops, config, hidden)
    ids = mx.argmax(logits, axis=1, keepdims=True)
    return ids, mx.take_along_axis(logits, ids, axis=1)


def _num_bytes(weights: Weights) -> int:
    """Of all arrays, each once."""
    kept = [each for stack in weights.stacks.values() for part in stack for each in part]
    arrays = {id(each): each for each in (*kept, *weights.vectors.values()) if isinstance(each, mx.array)}
    return sum(array.nbytes for array in arrays.values())


def _room() -> int:
    """Memory that arrays may still take: what Metal recommends, or what the system has."""
    if not mx.metal.is_available():
        return available_bytes()
    recommended: int = mx.device_info()["max_recommended_working_set_size"]
    used: int = mx.get_active_memory()
    return max(0, recommended - used)

"""The CUDA backend: the fused plan as Triton kernels over PyTorch's memory, launched as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends.cuda_attention import scratch_bytes
from bitnet_inference.backends.cuda_cache import BLOCK_TOKENS, Cache, CacheDtype
from bitnet_inference.backends.cuda_device import Gpu
from bitnet_inference.backends.cuda_head import HEAD_ROWS, Best, Head
from bitnet_inference.backends.cuda_inputs import Inputs, usual_shapes
from bitnet_inference.backends.cuda_loading import cuda_plans, load_vectors, load_weights
from bitnet_inference.backends.cuda_program import Parts, Program, weight_key
from bitnet_inference.backends.cuda_self_check import check_products
from bitnet_inference.backends.cuda_steps import MAX_SEQUENCES, Steps
from bitnet_inference.backends.cuda_top import QUICK_TOP
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import InvalidParams, OutOfMemory, Stopped
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.formats.ternarized import findings_of
from bitnet_inference.model.contract import Batch, Capabilities, WholeHead, threads_of
from bitnet_inference.model.fusion import PRODUCTS
from bitnet_inference.model.loader import Progress
from bitnet_inference.model.shard_plans import shard
from bitnet_inference.model.shard_weights import ShardCheckpoint
from bitnet_inference.model.shards import rank_config

if TYPE_CHECKING:
    from bitnet_inference.backends.cuda_group import Group

_CACHE_SHARE = 0.9  # of the memory that is left: kernels and graphs take some too
Part = TypeVar("Part")
Answer = TypeVar("Answer")


class CudaModel:
    """A `Model` on an NVIDIA GPU; see EngineConfig for device, cache dtype, head and quantize.

    With `layers`, the last stage of it (see backends/split.py): these layers, and the head.
    Weights lie there once. `forward` returns when the work is queued; who asks its Output for numbers waits for them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        progress: Progress,
        layers: range | None = None,
        group: Group | None = None,
    ) -> None:
        """Moves the weights; raises Unavailable, FormatError where one cannot be used, OutOfMemory, InvalidParams.

        With `layers` it is a stage. As a rank of a `group` it has a part of all weights, and does all that it is asked
        together with the others; its tokens are those of its part of the vocabulary, counted from 0.
        """
        assert layers is None or group is None, "a stage has no ranks"
        self.config, self._max_tokens = checkpoint.config, config.batch_tokens
        _check_head(checkpoint, config.head)
        self._gpu = Gpu(config.device)
        self._executor: Any = native.Executor(config.isa, config.threads)  # samples from what the GPU brings
        with self._gpu.working():
            if self._gpu.is_real:
                check_products(self._gpu.device)
            self._load(checkpoint, config, progress, layers, group)
            free_bytes = int(self._gpu.free_bytes * _CACHE_SHARE) - self._scratch_bytes
        self.notes = findings_of(checkpoint, config)  # what its user should know
        self.capabilities = Capabilities(
            block_size=BLOCK_TOKENS,
            block_bytes=self._cache.block_bytes,
            max_sequences=MAX_SEQUENCES,
            max_tokens=self._max_tokens,
            available_bytes=max(0, free_bytes),
            quick_top=QUICK_TOP,
            looks_ahead=True,
            threads=threads_of(self),
        )

    def _load(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig,
        progress: Progress,
        layers: range | None,
        group: Group | None,
    ) -> None:
        sizes, device = self.config, self._gpu.device
        rounded = {"round_layers": config.quantize == "int8", "round_head": config.head == "int8"}
        plans = cuda_plans(checkpoint, layers, **rounded)
        if group is not None:
            group.join(device)
            plans, sizes = shard(plans, sizes, group.rank, group.size), rank_config(sizes, group.rank, group.size)
            checkpoint = ShardCheckpoint(checkpoint, group.rank, group.size)
        weights = load_weights(checkpoint, plans, device, progress)
        self._weight_bytes: int = sum(weight.num_bytes for weight in weights.values())
        products = (step for step in (*plans.body.steps, *plans.head.steps) if step.parts[0] in PRODUCTS)
        self._read_bytes: int = sum(weights[key].num_bytes for key in {weight_key(step) for step in products})
        cache_dtype = cast(CacheDtype, config.cache_dtype)
        self._cache: Any = Cache(cache_dtype, len(plans.body.layers), sizes.num_kv_heads, sizes.head_dim, device)
        self._scratch_bytes = scratch_bytes(self._max_tokens, sizes.num_heads, sizes.head_dim)
        parts = Parts(sizes, weights, load_vectors(checkpoint, plans, device), self._cache, device, group)
        self._body: Any = Program(plans.body, parts, self._max_tokens)
        self._hidden: Any = torch.zeros(self._max_tokens, sizes.hidden_size, device=device)
        self._given: Any = None if plans.body.input is None else torch.zeros_like(self._hidden)
        self._head: Any = Head(plans, parts, self._gpu, self._hidden, self._body.arena)
        self._steps: Any = Steps(self._gpu, self._launch, self._max_tokens, captures=group is None)

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and of the reserved cache, on the GPU."""
        return self._weight_bytes + (0 if self._cache is None else self._cache.num_bytes)

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; what was cached before is gone."""
        wanted = num_blocks * self.capabilities.block_bytes
        with self._gpu.working():
            self._opened(self._steps).clear()  # they know where the cache was
            self._cache.reserve(0)
            if wanted > self._gpu.free_bytes:
                too_much = f"a cache of {num_blocks} blocks takes {told_bytes(wanted)}"
                raise OutOfMemory(f"{too_much}: lower the context or the load")
            self._cache.reserve(num_blocks)
            if self._gpu.is_real:
                self._steps.prepare(usual_shapes(self._max_tokens, MAX_SEQUENCES))
                self._head.prepare()

    def forward(self, batch: Batch, hidden: NDArray[np.float32] | None = None) -> CudaOutput:
        """Queue a step that advances every sequence by its tokens; the last stage, from `hidden` of the one before."""
        with self._gpu.working():
            if hidden is not None:
                self._opened(self._given)[: len(hidden)].copy_(torch.from_numpy(hidden))
                batch = replace(batch, has_next=False)  # the stage before computes the next step first
            self._opened(self._steps).forward(batch)
        num_tokens = len(batch.token_ids)
        self._head.num_known = num_tokens if self._steps.has_best and num_tokens <= HEAD_ROWS else 0
        return CudaOutput(self)

    def bytes_read(self, contexts: Sequence[int]) -> int:
        """Bytes of weights and cache that a step of one token a sequence reads, behind so many tokens each."""
        size, block_bytes = self.capabilities.block_size, self.capabilities.block_bytes
        return self._read_bytes + sum((context + 1) * block_bytes // size for context in contexts)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        with self._gpu.working():
            self._opened(self._steps).forget_ahead()
            self._cache.copy(pairs)

    def close(self) -> None:
        """Give all memory back."""
        steps, self._steps = self._steps, None
        self._cache = self._body = self._head = self._hidden = self._given = self._executor = None
        with suppress(RuntimeError):  # of a GPU that has failed: the system takes its memory back
            if steps is not None:
                steps.clear()
            self._gpu.free()

    def ask(self, question: Callable[[Head], Answer]) -> Answer:
        """What the head says of rows of the last step."""
        with self._gpu.working():
            self._opened(self._steps).bring_back()
            return question(self._head)

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of these rows of the last step; the best one may be on its way already."""
        steps: Steps = self._opened(self._steps)
        if k == 1 and steps.has_best:
            with self._gpu.working():
                return steps.best(rows)
        return self.ask(lambda head: head.top(rows, k))

    def _launch(self, inputs: Inputs) -> Best | None:
        """Queue the body and, where each sequence has one token, the head: the next tokens are wanted at once."""
        count = inputs.shape.num_tokens
        self._body.run(count, self._hidden, batch=inputs.batch, input=self._given)
        return self._head.queue_best(count) if inputs.shape.decodes else None

    def _opened(self, part: Part | None) -> Part:
        if part is None:
            raise Stopped("the model is closed: load it again")
        return part


class CudaOutput(WholeHead):
    """The final hidden rows of a forward, before the last norm, on the GPU."""

    def __init__(self, model: CudaModel) -> None:
        self._model = model

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these tokens: [len(rows), vocab]."""
        return self._model.ask(lambda head: head.full(rows))

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of each row, best first, lowest id first among equals."""
        return self._model.top(rows, k)

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states after the final norm: [len(rows), hidden]."""
        return self._model.ask(lambda head: head.normed(rows))


def _check_head(checkpoint: Checkpoint, head: str) -> None:
    if head == "int6":
        raise InvalidParams('head is "int6", which the CPU has and a GPU has not: choose "int8" or "exact"')
    name = "embed" if checkpoint.config.tie_embeddings else "head"
    if head == "int8" and checkpoint.is_ternary(name):
        raise InvalidParams('head is "int8", but the head of this model is ternary: choose "exact"')

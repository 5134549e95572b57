"""The two contracts of the house: `Model` (what the engine sees) and `Ops` (what the decoder sees)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod, ref

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.formats.checkpoint import Experts, ModelConfig
from bitnet_inference.native import UNDECIDED, Executor, SamplingRule

Tensor = TypeVar("Tensor")
# A rule, and what `RowSampler.sample` takes behind it: tokens, num_prompt, ban_ends, seed, choice, position, mask.
Draw = tuple[SamplingRule, NDArray[np.int32], int, bool, int, int, int, NDArray[np.uint32] | None]


@dataclass(frozen=True)
class Capabilities:
    """What the scheduler must obey.

    A cache block holds `block_size` tokens and costs `block_bytes` over all layers; a batch has at most `max_tokens`
    tokens of at most `max_sequences` sequences; `available_bytes` is what the cache may take. `Output.top` costs less
    than `Output.full` for up to `quick_top` tokens, and so does `Output.sample` where it `samples`. `same_bits`: what a
    token yields does not depend on the rest of the batch. `has_hidden`: Output.hidden gives hidden states.
    `looks_ahead`: it may compute a step before it is asked for, where the batch before it `has_next`. Beyond a multiple
    of `tile_tokens`, one token costs as much as so many. `threads` gives the threads that the model computes with, for
    other work between its calls; None when it is closed. `begin`, where there is one, puts a batch into the background,
    best of about `background_tokens` tokens: a model has one there at a time, and forgets the one before.
    """

    block_size: int
    block_bytes: int
    max_sequences: int
    max_tokens: int
    available_bytes: int
    quick_top: int = 1
    samples: bool = False
    paged: bool = True
    same_bits: bool = False
    has_hidden: bool = True
    looks_ahead: bool = False
    tile_tokens: int = 16
    background_tokens: int = 256
    threads: Callable[[], Executor | None] | None = field(default=None, compare=False, repr=False)
    begin: Callable[[Batch], Background] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Batch:
    """S sequences with T tokens in all, flat.

    `token_ids`, `positions`, `slots`: int32 [T]; a token's key and value go into cache slot
    block * block_size + offset. `starts`: int32 [S + 1], the first token of each sequence, then T.
    `block_tables`: int32 [S, B], the blocks of each sequence in order, padded with 0. `has_next`: each has that of the
    position behind its last token, too. `wanted`: int32, ascending: no rows but those of these tokens will be asked of
    the output; None: any may be.
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    has_next: bool = False
    wanted: NDArray[np.int32] | None = None


class Output(Protocol):
    """A handle on the final hidden rows of one forward; valid until the next forward of the model."""

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these tokens of the batch: [len(rows), vocab]. The caller may write into it."""
        ...

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of each row, as `best_of` has them: ids and logits, [len(rows), k]."""
        ...

    def sample(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """What `RowSampler.sample` chooses from `full` of each row, without computing all; UNDECIDED if unsure."""
        ...

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states after the final norm: [len(rows), hidden]."""
        ...


class Background(Protocol):
    """A batch that is computed beside others, over as many forwards of these as that takes."""

    @property
    def output(self) -> Output | None:
        """None until it is done."""
        ...

    def forward(self, batch: Batch) -> Output:
        """As Model.forward; meanwhile, and while its output is used, this one goes on where that leaves room."""
        ...

    def go_on(self, seconds: float) -> None:
        """Compute it, and nothing else, for so long or until it is done. Outputs of batches beside it stay valid."""
        ...

    def close(self) -> None:
        """Compute no more of it; nothing happens if it is done."""
        ...


def best_of(logits: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k best of each row of logits and where they are: best first, lowest id first among equals, both [rows, k].

    What is not a number comes before all, so that whoever reads the best sees that something is wrong.
    """
    if k == 1:
        best = logits.argmax(axis=1, keepdims=True)
    else:
        best = np.argsort(np.where(np.isnan(logits), -np.inf, -logits), axis=1, kind="stable")[:, :k]
    return best.astype(np.int32), logits[np.arange(len(logits))[:, None], best]


def threads_of(model: Any) -> Callable[[], Executor | None]:
    """What `Capabilities.threads` is to be for a model with an `_executor`, without keeping it in memory."""
    known = ref(model)
    return lambda: (alive := known()) and alive._executor


def weakly(begin: Callable[[Batch], Background]) -> Callable[[Batch], Background]:
    """What `Capabilities.begin` is to be for a model with this method, without keeping it in memory."""
    known = WeakMethod(begin)

    def begun(batch: Batch) -> Background:
        method = known()
        assert method is not None, "the model is gone"
        return method(batch)

    return begun


class WholeHead:
    """The `sample` of an `Output` that tells tokens from all logits only."""

    def sample(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """See Output."""
        return [UNDECIDED] * len(rows)


class Model(Protocol):
    """What the engine sees of a model."""

    config: ModelConfig
    capabilities: Capabilities

    @property
    def num_bytes(self) -> int:
        """Memory that the weights and the reserved cache take; without the arrays of a step."""
        ...

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; raises OutOfMemory."""
        ...

    def forward(self, batch: Batch) -> Output:
        """Advance every sequence of the batch by its tokens."""
        ...

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        ...

    def close(self) -> None:
        """Give all memory and threads back; further calls are errors."""
        ...


class Ops(Protocol[Tensor]):
    """The verbs of the decoder. Tensors are rows of float32, one row a token; weights are opaque handles."""

    def weight(self, names: Sequence[str]) -> Any:
        """A handle on the matrices under these canonical names, stacked along their rows."""
        ...

    def embed(self, table: Any, scale: float) -> Tensor:
        """The rows of the table for the batch's token ids, times the scale: [T, hidden]."""
        ...

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        """RMSNorm: x * rsqrt(mean(x^2) + eps) * weight, the weight being the vector under the canonical name.

        Where a row is several times as long as the vector, each part of it is normed on its own.
        """
        ...

    def linear(self, x: Tensor, weight: Any, biases: Sequence[str] = ()) -> tuple[Tensor, ...]:
        """x @ W^T, one result a stacked matrix. Ternary weights quantise x per token to int8 first.

        Where there are `biases`, canonical names of a vector for each, the vector is added to the rounded product.
        """
        ...

    def rope(self, x: Tensor, local: bool) -> Tensor:
        """Rotate the halves of each head by the token's position, by the frequencies of local layers or of others.

        Where not all of a head is rotated, those of its first features.
        """
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Write k and v into the layer's cache, then causal attention of q over it: [T, heads * head_dim].

        In a local layer a token sees the positions of its window only.
        """
        ...

    def gate(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up."""
        ...

    def mix(self, x: Tensor, scores: Tensor, experts: Experts, expert: Expert[Tensor]) -> Tensor:
        """What the experts with the best scores, [T, count], make of each token, added up by their shares: [T, hidden].

        Of equal scores the lower number is better. `expert(ops, e, rows)` is what expert e makes of some tokens.
        """
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""
        ...


Expert = Callable[[Ops[Tensor], int, Tensor], Tensor]

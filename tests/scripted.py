"""What many tests share: a model that needs no weights and catches wrong bookkeeping, and a sink that takes notes."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import Event, Finished, Preempted, Queued, Replaced, Scheduled, Stepped, Token
from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.errors import OutOfMemory
from bitnet_inference.formats.checkpoint import ModelConfig
from bitnet_inference.model.contract import Batch, Capabilities, WholeHead

_MASK = (1 << 64) - 1
# What a listener has heard of a request before each event.
_MAY_FOLLOW: dict[type, set[str | None]] = {
    Queued: {None},
    Scheduled: {"Queued", "Preempted"},
    Token: {"Scheduled", "Token", "Preempted"},  # the last for the head of a search
    Preempted: {"Scheduled", "Token"},
    Finished: {"Queued", "Scheduled", "Token", "Preempted"},
}


class ScriptedModel:
    """A Model whose logits depend on the whole history of a sequence, which it reads back from its own paged cache.

    The cache holds tokens. A wrong slot, position, block table or a block shared by mistake fails an assertion or
    changes the text. `before_forward(batch)` and `change_logits(history, logits)` let tests break things. With
    `background_tokens` it has a background, in which a batch is done when it has gone on three times, or for ever;
    `go_on(batch, seconds)` may tell otherwise. Until then its slots hold anything.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 23,
        max_positions: int = 64,
        block_size: int = 4,
        num_blocks: int = 1000,
        max_sequences: int = 8,
        max_tokens: int = 64,
        looks_ahead: bool = False,
        background_tokens: int = 0,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        self.config = _config(vocab_size, max_positions, eos_ids)
        self.capabilities = Capabilities(
            block_size=block_size,
            block_bytes=1,
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            looks_ahead=looks_ahead,
            available_bytes=num_blocks,
            background_tokens=background_tokens,
            begin=(lambda batch: ScriptedBackground(self, batch)) if background_tokens else None,
        )
        self.go_on: Callable[[Batch, float], bool] | None = None
        self.before_forward: Callable[[Batch], None] = lambda batch: None
        self.change_logits: Callable[[list[int], NDArray[np.float32]], None] = lambda history, logits: None
        self.num_forwards = 0
        self.num_tokens = 0
        self.full_rows: list[int] = []
        self.num_full = 0  # how often the head was read
        self._cache = np.full((0, 2), -1)  # token and position of each slot

    @property
    def num_bytes(self) -> int:
        return len(self._cache)

    def reserve(self, num_blocks: int) -> None:
        if num_blocks > self.capabilities.available_bytes:
            raise OutOfMemory("the scripted model has no room")
        self._cache = np.full((num_blocks * self.capabilities.block_size, 2), -1)

    def forward(self, batch: Batch) -> ScriptedOutput:
        self.before_forward(batch)
        self.num_forwards += 1
        return self.compute(batch)

    def compute(self, batch: Batch) -> ScriptedOutput:
        """What a forward makes of a batch."""
        self.num_tokens += len(batch.token_ids)
        self.check(batch)
        self._cache[batch.slots, 0], self._cache[batch.slots, 1] = batch.token_ids, batch.positions
        histories = []
        for sequence, (start, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
            for position in batch.positions[start:end]:
                histories.append(self._history(batch.block_tables[sequence], int(position)))
        if batch.has_next:  # a model may write there what nobody will read
            self._cache[self._slots_behind(batch)] = -7
        return ScriptedOutput(self, self.num_forwards, histories, batch.wanted)

    def _slots_behind(self, batch: Batch) -> NDArray[np.int32]:
        size, positions = self.capabilities.block_size, batch.positions[batch.starts[1:] - 1] + 1
        return batch.block_tables[np.arange(len(positions)), positions // size] * size + positions % size

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        size = self.capabilities.block_size
        for source, target in pairs:
            self._cache[target * size : target * size + size] = self._cache[source * size : source * size + size]

    def close(self) -> None:
        self._cache = np.full((0, 2), -1)

    def logits_after(self, history: list[int]) -> NDArray[np.float32]:
        """The logits that follow this history: a hash of it, spread over -3 to 3."""
        state = 0
        for token in history:
            state = (state * 6364136223846793005 + token + 1442695040888963407) & _MASK
        mixed = np.arange(self.config.vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(state)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        logits = (mixed >> np.uint64(40)).astype(np.float32) * np.float32(6 / (1 << 24)) - np.float32(3)
        self.change_logits(history, logits)
        return logits

    def spoil(self, batch: Batch) -> None:
        """Write what is nothing yet where the batch will have its tokens."""
        self._cache[batch.slots] = -9

    def check(self, batch: Batch) -> tuple[set[int], set[int]]:
        """The blocks that the batch uses, and those that it writes; fails where its caller's books are wrong."""
        limits, size = self.capabilities, self.capabilities.block_size
        counts = np.diff(batch.starts)
        arrays = [each for each in vars(batch).values() if each is not batch.has_next and each is not None]
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
        assert 1 <= len(counts) <= limits.max_sequences and (counts >= 1).all()
        assert batch.starts[0] == 0 and batch.starts[-1] == len(batch.token_ids) <= limits.max_tokens
        assert len(batch.positions) == len(batch.slots) == len(batch.token_ids)
        assert (batch.token_ids >= 0).all() and (batch.token_ids < self.config.vocab_size).all()
        assert (batch.positions < self.config.max_positions).all()
        used: list[int] = []
        written: list[int] = []
        for sequence, (start, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
            positions, table = batch.positions[start:end], batch.block_tables[sequence]
            assert (np.diff(positions) == 1).all()
            assert (batch.slots[start:end] == table[positions // size] * size + positions % size).all()
            used += table[: positions[-1] // size + 1].tolist()
            last = positions[-1] + int(batch.has_next)
            assert last // size < len(table), "a table lacks the block of the position behind"
            used += table[positions[-1] // size + 1 : last // size + 1].tolist()
            written += table[positions[0] // size : last // size + 1].tolist()
        assert all(used.count(block) == 1 for block in written), "a sequence writes into a block that another uses"
        return set(used), set(written)

    def _history(self, table: NDArray[np.int32], position: int) -> list[int]:
        positions = np.arange(position + 1)
        size = self.capabilities.block_size
        entries = self._cache[table[positions // size] * size + positions % size]
        assert (entries[:, 1] == positions).all(), "the cache lacks a token that it should hold"
        return entries[:, 0].tolist()


class ScriptedBackground:
    """The Background of a ScriptedModel: see there."""

    def __init__(self, model: ScriptedModel, batch: Batch) -> None:
        self.output: ScriptedOutput | None = None
        self._model, self._batch, self._num_left, self._is_closed = model, batch, 3, False
        self._used, self._written = model.check(batch)

    def forward(self, batch: Batch) -> ScriptedOutput:
        assert self.output is None, "it was done"
        used, written = self._model.check(batch)
        assert not used & self._written and not written & self._used, "a block that somebody writes is used beside"
        self._model.spoil(self._batch)
        return self._model.forward(batch)

    def go_on(self, seconds: float) -> None:
        assert self.output is None and not self._is_closed, "it was done, or nobody wants it"
        self._num_left -= 1
        is_done = seconds == math.inf or self._num_left == 0
        if is_done if self._model.go_on is None else self._model.go_on(self._batch, seconds):
            self.output = self._model.compute(self._batch)

    def close(self) -> None:
        self._is_closed = True


class ScriptedOutput(WholeHead):
    """The Output of a ScriptedModel; notices when it is used after the next forward."""

    def __init__(
        self, model: ScriptedModel, forward: int, histories: list[list[int]], wanted: NDArray[np.int32] | None
    ) -> None:
        self._model, self._forward, self._histories = model, forward, histories
        self._wanted = range(len(histories)) if wanted is None else wanted.tolist()

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        self._model.full_rows += rows
        self._model.num_full += 1
        return self._logits(rows)

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        logits = self._logits(rows)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        return best.astype(np.int32), np.take_along_axis(logits, best, axis=1)

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self._logits(rows)[:, : self._model.config.hidden_size]

    def _logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        assert self._forward == self._model.num_forwards, "an output is valid until the next forward"
        assert set(self._wanted).issuperset(rows), "nobody said that these rows were wanted"
        return np.stack([self._model.logits_after(self._histories[row]) for row in rows])


class Listener:
    """A Sink that keeps what it hears; `stop_at` tokens it wants to stop, at `fail_at` it raises.

    From `full_at` tokens on it is full, and whenever `is_full` is set.
    """

    def __init__(self, *, stop_at: int | None = None, fail_at: int | None = None, full_at: int | None = None) -> None:
        self.is_full, self._full_at = False, full_at
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.finishes: list[Finish] = []
        self.usage: Usage | None = None
        self._stop_at, self._fail_at = stop_at, fail_at

    @property
    def reason(self) -> str:
        """Why the request ended; it must have ended once."""
        assert len(self.finishes) == 1, f"ended {len(self.finishes)} times"
        return self.finishes[0].reason

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        assert not self.finishes, "a token after the end"
        self.token_ids.append(token_id)
        self.logprobs.append(logprobs)
        self.is_full = self.is_full or len(self.token_ids) == self._full_at
        if len(self.token_ids) == self._fail_at:
            raise RuntimeError("the listener fell over")
        return len(self.token_ids) == self._stop_at

    def finish(self, finish: Finish, usage: Usage) -> None:
        self.finishes.append(finish)
        self.usage = usage


@contextmanager
def modest(max_bytes: float) -> Iterator[None]:
    """What is done here takes no more than that, and 5 s of this process: others may be busy; tracing is slow."""
    tracemalloc.start()
    start = time.process_time()
    yield
    assert time.process_time() - start < 5
    assert tracemalloc.get_traced_memory()[1] < max_bytes
    tracemalloc.stop()


def run(engine: Engine, max_steps: int = 10000) -> None:
    """Step until no request is left."""
    while engine.has_work:
        max_steps -= 1
        assert max_steps, "the engine does not come to an end"
        engine.step()


def check_events(heard: Sequence[Event], requests: Sequence[Request]) -> None:
    """Each request was told of as its life allows, from its queue to one end; all of them, and no others."""
    states: dict[int, str] = {}
    num_tokens: Counter[int] = Counter()
    for event in (event for event in heard if not isinstance(event, Stepped | Replaced)):
        before, states[event.request] = states.get(event.request), type(event).__name__
        assert before in _MAY_FOLLOW[type(event)], f"{event} after {before}"
        if isinstance(event, Token):
            assert event.index == num_tokens[event.request]
            num_tokens[event.request] += 1
        if isinstance(event, Finished):
            assert event.usage.num_output_tokens == num_tokens[event.request]
    assert states == {request.number: "Finished" for request in requests}


def generate(model: ScriptedModel, prompt: Any, params: SamplingParams, **options: Any) -> Listener:
    """What a request hears that has an engine of its own; `listener` and Request's own options may be given."""
    engine, listener = Engine(model), options.pop("listener", None) or Listener()
    num_blocks = engine.num_free_blocks
    engine.submit(Request(prompt, params, listener, **options))
    run(engine)
    assert engine.num_free_blocks == num_blocks
    return listener


def greedy_text(model: ScriptedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The most likely continuation, computed without an engine."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(model.logits_after(tokens))))
    return tokens[len(prompt) :]


def _config(vocab_size: int, max_positions: int, eos_ids: tuple[int, ...]) -> ModelConfig:
    return ModelConfig(
        family="scripted",
        vocab_size=vocab_size,
        hidden_size=3,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_positions=max_positions,
        activation="silu",
        norm_eps=1e-5,
        rope_theta=10000.0,
        eos_ids=eos_ids,
    )

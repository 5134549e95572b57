"""The native CPU backend: a recorded and fused plan, compiled into one program that runs in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_inference import native
from bitnet_inference.amounts import told_bytes
from bitnet_inference.backends.cpu_program import NativePlan, Weights, compile_plan
from bitnet_inference.backends.cpu_weights import load_weights, quantised, rounded_table
from bitnet_inference.backends.packing import packing
from bitnet_inference.config import EngineConfig, available_bytes
from bitnet_inference.errors import FormatError, InvalidParams, OutOfMemory, Stopped, Unavailable
from bitnet_inference.formats.checkpoint import Checkpoint, expected_shapes, is_projection
from bitnet_inference.formats.packed import PackedCheckpoint
from bitnet_inference.formats.ternarized import findings_of
from bitnet_inference.model.contract import Batch, Capabilities, Draw, best_of, threads_of, weakly
from bitnet_inference.model.fusion import PRODUCTS
from bitnet_inference.model.loader import Progress, fused, record
from bitnet_inference.model.plan import Plan, StepTime

HEAD_ROWS = 64  # logits are computed for so many rows at a time
MIN_SCREENED_WEIGHTS = 1 << 18  # heads below that take no longer than what a screen does besides its products
MAX_SCREENED_TOP = 64  # beyond, the rows that must be computed exactly are too many
ROUNDED_HEADS = {"int8": 8, "int6": 6}  # bits


class CpuModel:
    """A `Model` on the CPU; see EngineConfig for threads, instruction set and cache dtype.

    With `layers`, a stage of it (see backends/split.py): these layers, what comes before the first, or behind the last.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig, progress: Progress, layers: range | None = None
    ) -> None:
        """Packs the weights; raises FormatError where one cannot be packed, OutOfMemory."""
        self.config = checkpoint.config
        self._check_head(checkpoint, config.head)
        self._check_widths(config.quantize)
        plans = fused(record(self.config, layers), checkpoint, config.quantize == "int8")
        self._executor: Any = _start(config)
        weights = load_weights(checkpoint, plans, packing(checkpoint, config), self._executor, progress)
        self._cache: Any = native.Cache(
            config.cache_dtype, len(plans.body.layers), self.config.num_kv_heads, self.config.head_dim
        )
        head_names = plans.head.steps[-1].weights if plans.head.steps else ()
        head = weights.get(head_names)
        self._screen, bits = self._make_screen(checkpoint, head, config.head), ROUNDED_HEADS.get(config.head)
        self._rounded: Any = bits and head and quantised(checkpoint, head_names, head, bits, self._executor)
        table = rounded_table(checkpoint, weights, self._executor) if config.embedding == "int8" else {}
        unread = ({head_names} if self._rounded else set()) | (table.keys() - {head_names})
        for names in unread:
            checkpoint.release(names[0])
        self._beside: Any = None  # the native.Background, from the first use on
        # What was computed behind others took, and the screen or the rounded head; they are no steps of a plan.
        self._beside_s = self._screen_s = 0.0
        parts = (plans.body, weights | table), (None if self._rounded else plans.head, weights), (plans.norm, weights)
        self._body, self._head, self._norm = (
            compile_plan(plan, self.config, has, checkpoint.vector, self._cache) if plan and plan.steps else None
            for plan, has in parts
        )
        experts = [plan for step in plans.body.steps for plan in step.plans]
        self._product_bytes = _product_bytes([plans.body], weights)
        self._expert_bytes = _product_bytes(experts, weights)
        self._head_bytes: int = _sum_bytes([self._rounded or head])
        kept = (weight for names, weight in weights.items() if names not in unread)
        self._kept_bytes: int = _sum_bytes(kept, table.values(), [self._screen, self._rounded])
        self._cache_bytes = 0
        self.notes = findings_of(checkpoint, config)  # what its user should know
        self.capabilities = self._limits(config)

    def _limits(self, config: EngineConfig) -> Capabilities:
        """What the scheduler must know.

        Where matrices are multiplied in tiles a step with tokens of prompts reads no weights twice, and takes hardly
        longer for the first ones; and small models are in a cache.
        """
        has_tiles = config.isa == "avx512amx"
        body = self._body if self._body is not None and self._body.selects else None
        has_background = body is not None and not has_tiles and not body.program.is_small
        return Capabilities(
            block_size=native.BLOCK_TOKENS,
            block_bytes=self._cache.block_bytes,
            max_sequences=256,
            max_tokens=config.batch_tokens,
            available_bytes=max(0, available_bytes() - native.promised_bytes()) * 3 // 4,
            quick_top=1 if self._screen is None else MAX_SCREENED_TOP,
            samples=self._screen is not None,
            same_bits=True,
            tile_tokens=16 if has_tiles else 1,
            threads=threads_of(self),
            begin=weakly(self.begin) if has_background else None,
        )

    def _check_head(self, checkpoint: Checkpoint, head: str) -> None:
        name = "embed" if self.config.tie_embeddings else "head"
        if head in ROUNDED_HEADS and checkpoint.is_ternary(name):
            raise InvalidParams(f'head is "{head}", but the head of this model is ternary: choose "exact"')
        if head in ROUNDED_HEADS and self.config.hidden_size > native.MAX_HEAD_COLUMNS:
            raise InvalidParams(f'head is "{head}", but this model is too wide for that: choose "exact"')

    def _check_widths(self, quantize: str) -> None:
        shapes = (shape for name, shape in expected_shapes(self.config) if is_projection(name))
        if quantize == "int8" and max(columns for _, columns in shapes) > native.MAX_HEAD_COLUMNS:
            raise InvalidParams('quantize is "int8", but this model is too wide for that: choose "none"')

    def _make_screen(self, checkpoint: Checkpoint, weight: Any, head: str) -> Any:
        """The certified screen, for dense heads so large that reading them is what a token costs."""
        fits = isinstance(weight, native.DenseWeight) and weight.columns <= native.MAX_HEAD_COLUMNS
        if head != "exact" or not fits or weight.rows * weight.columns < MIN_SCREENED_WEIGHTS:
            return None
        if isinstance(checkpoint, PackedCheckpoint) and not weight.has_codes and (parts := checkpoint.screen()):
            return _screen_of(checkpoint, weight, parts, self._executor)
        return native.Screen(weight, self._executor)

    def reserve(self, num_blocks: int) -> None:
        """Make room for this many cache blocks; what was cached before is gone."""
        wanted = num_blocks * self.capabilities.block_bytes
        too_much = f"a cache of {num_blocks} blocks takes {told_bytes(wanted)}: lower the context or the load"
        if wanted > available_bytes() - native.promised_bytes(self._cache):
            raise OutOfMemory(too_much)
        self._open_executor()
        try:
            self._cache.reserve(num_blocks)
        except MemoryError as error:
            raise OutOfMemory(too_much) from error
        self._cache_bytes = wanted

    @property
    def num_bytes(self) -> int:
        """Memory of the weights and of the reserved cache."""
        return self._kept_bytes + self._cache_bytes

    def forward(self, batch: Batch, hidden: NDArray[np.float32] | None = None) -> CpuOutput:
        """Advance every sequence of the batch by its tokens; a later stage, from `hidden` of the one before."""
        return CpuOutput(self, self.advance(batch, hidden), self._wanted(batch))

    def begin(self, batch: Batch) -> CpuBackground:
        """Compute this batch beside those of later forwards; what was begun before is forgotten."""
        executor, body, hidden = self._open_executor(), self._body, self._room(batch)
        assert body is not None, "this plan was not compiled"
        if self._beside is None:
            self._beside = native.Background(executor)
        with _enough_memory(batch):
            self._beside.begin(body.program, _arrays(batch), hidden, self._wanted(batch))
        return CpuBackground(self, self._beside, CpuOutput(self, hidden, self._wanted(batch)))

    def note_beside(self, seconds: float) -> None:
        """So long nothing was computed but what was begun; for `time_steps`."""
        self._beside_s += seconds

    def advance(self, batch: Batch, hidden: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """The same, but gives what the next stage is to be fed with: hidden states of all tokens, [T, hidden]."""
        output = self._room(batch)
        with _enough_memory(batch):
            self._run(self._body, _arrays(batch), hidden, output, self._wanted(batch))
        return output

    def _room(self, batch: Batch) -> NDArray[np.float32]:
        wanted = self._wanted(batch)
        return np.empty((len(batch.token_ids if wanted is None else wanted), self.config.hidden_size), np.float32)

    def _wanted(self, batch: Batch) -> NDArray[np.int32] | None:
        return batch.wanted if self._body is not None and self._body.selects else None

    def bytes_read(self, contexts: Sequence[int]) -> int:
        """Bytes of weights and cache that a greedy step of one token a sequence reads, behind so many tokens each.

        Of a screened head it counts the screen, not the few rows that are then computed exactly; of experts, as many as
        that many tokens meet if all are chosen alike.
        """
        block_size, block_bytes = self.capabilities.block_size, self.capabilities.block_bytes
        screen, head_bytes = self._screen, self._head_bytes
        if screen is not None:
            head_bytes = screen.bytes_read(self._executor, len(contexts))
        cache_bytes = sum((context + 1) * block_bytes // block_size for context in contexts)
        return self._product_bytes + self._met_bytes(len(contexts)) + head_bytes + cache_bytes

    def _met_bytes(self, num_tokens: int) -> int:
        experts = self.config.experts
        missed = 0.0 if experts is None else (1 - experts.used / experts.count) ** num_tokens
        return int(self._expert_bytes * (1 - missed))

    def time_steps(self) -> Callable[[], tuple[StepTime, ...]]:
        """From now on, measure every step of the plans; the function tells how long each took since it was last asked.

        What ran not at all is left out. A screened or rounded head counts as one step "screen" or "rounded".
        """
        for plan in (self._body, self._norm, self._head):
            if plan is not None:
                plan.time_steps()
        self._beside_s = self._screen_s = 0.0
        return self._take_times

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole cache blocks, (from, to), in order."""
        self._open_executor()
        for source, target in pairs:
            self._cache.copy(source, target)

    def close(self) -> None:
        """Give all memory and threads back."""
        self._executor = self._cache = self._body = self._head = self._norm = self._screen = self._rounded = None
        self._beside = None

    def top(self, hidden: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of rows of hidden states and their logits: through the screen where there is one."""
        if self._screen is not None and k <= MAX_SCREENED_TOP:
            normed = self.rows(hidden, logits=False)
            with self._timing_screen():
                ids, logits, _ = self._screen.top(self._executor, normed, k)
            return ids, logits
        return best_of(self.rows(hidden, logits=True), k)

    def sample(self, hidden: NDArray[np.float32], draws: Sequence[Draw]) -> list[int]:
        """What the draws choose from rows of hidden states, through the screen; UNDECIDED where it cannot tell."""
        if self._screen is None:
            return [native.UNDECIDED] * len(draws)
        normed = self.rows(hidden, logits=False)
        with self._timing_screen():
            tokens: list[int] = self._screen.sample(self._executor, normed, draws)
        return tokens

    def rows(self, hidden: NDArray[np.float32], logits: bool) -> NDArray[np.float32]:
        """Logits, or normed hidden states, of rows of hidden states."""
        if logits and self._rounded is not None:
            return self._rounded_logits(hidden)
        plan, width = (self._head, self.config.vocab_size) if logits else (self._norm, self.config.hidden_size)
        output = np.empty((len(hidden), width), np.float32)
        for begin in range(0, len(hidden), HEAD_ROWS):
            end = begin + HEAD_ROWS
            self._run(plan, None, hidden[begin:end], output[begin:end])
        return output

    def _rounded_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        normed = self.rows(hidden, logits=False)
        output = np.empty((len(hidden), self.config.vocab_size), np.float32)
        with self._timing_screen():
            self._rounded.scores(self._executor, normed, output)
        return output

    @contextmanager
    def _timing_screen(self) -> Iterator[None]:
        start = perf_counter()
        yield
        self._screen_s += perf_counter() - start

    def _take_times(self) -> tuple[StepTime, ...]:
        times = [
            time
            for name, plan in (("body", self._body), ("norm", self._norm), ("head", self._head))
            if plan is not None
            for time in plan.take_times(name)
        ]
        if self._beside_s:
            times.append(StepTime("body", "beside", self._beside_s))
            self._beside_s = 0.0
        if self._screen_s:
            times.append(StepTime("head", "screen" if self._rounded is None else "rounded", self._screen_s))
            self._screen_s = 0.0
        return tuple(times)

    def _run(self, plan: NativePlan | None, arrays: Any, input: Any, output: Any, wanted: Any = None) -> None:
        executor = self._open_executor()
        assert plan is not None, "this plan was not compiled"
        plan.run(executor, arrays, input, output, wanted)

    def _open_executor(self) -> Any:
        if self._executor is None:
            raise Stopped("the model is closed: load it again")
        return self._executor


class CpuOutput:
    """The final hidden rows of a forward, before the last norm: [T, hidden], or of the `wanted` tokens alone."""

    def __init__(self, model: CpuModel, hidden: NDArray[np.float32], wanted: NDArray[np.int32] | None = None) -> None:
        self._model, self._hidden, self._wanted = model, hidden, wanted

    def full(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The logits of these tokens: [len(rows), vocab]."""
        return self._model.rows(self._of(rows), logits=True)

    def top(self, rows: Sequence[int], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of each row, best first, lowest id first among equals."""
        return self._model.top(self._of(rows), k)

    def sample(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[int]:
        """What each draw chooses, from the logits that it takes; UNDECIDED where it may take all."""
        return self._model.sample(self._of(rows), draws)

    def hidden(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """The hidden states after the final norm: [len(rows), hidden]."""
        return self._model.rows(self._of(rows), logits=False)

    def _of(self, rows: Sequence[int]) -> NDArray[np.float32]:
        places = rows if self._wanted is None else np.searchsorted(self._wanted, rows).tolist()
        assert self._wanted is None or np.array_equal(self._wanted[places], rows), "a row that the batch did not want"
        is_whole = places == list(range(len(self._hidden)))
        return self._hidden if is_whole else self._hidden[np.asarray(places, np.intp)]


class CpuBackground:
    """See Background of the contract; the newest one of its model."""

    def __init__(self, model: CpuModel, background: Any, output: CpuOutput) -> None:
        """It is under way in a native.Background; `output` is what it will have."""
        self._model, self._background, self._output = model, background, output

    @property
    def output(self) -> CpuOutput | None:
        """None until it is done."""
        return None if self._background.is_under_way else self._output

    def forward(self, batch: Batch) -> CpuOutput:
        """As CpuModel.forward; meanwhile this one goes on, and while the output is used."""
        self._background.run_beside()
        return self._model.forward(batch)

    def go_on(self, seconds: float) -> None:
        """Compute it, and nothing else, for so long or until it is done."""
        begin = perf_counter()
        self._background.go_on(seconds)
        self._model.note_beside(perf_counter() - begin)

    def close(self) -> None:
        """Compute no more of it."""
        self._background.forget()


def _arrays(batch: Batch) -> tuple[NDArray[np.int32], ...]:
    return batch.token_ids, batch.positions, batch.slots, batch.starts, batch.block_tables


@contextmanager
def _enough_memory(batch: Batch) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        cure = "free memory, or lower max_batch_tokens"
        raise OutOfMemory(f"a step of {len(batch.token_ids)} tokens finds no memory: {cure}") from error


def _screen_of(checkpoint: PackedCheckpoint, weight: Any, parts: Any, executor: Any) -> Any:
    try:
        screen = native.Screen(weight, *parts, executor)
    except ValueError as error:
        raise FormatError(checkpoint.path, "screen", f"{error}: convert the model again") from error
    checkpoint.release_screen()
    return screen


def _product_bytes(plans: Iterable[Plan], weights: Weights) -> int:
    products = (step.weights for plan in plans for step in plan.steps if step.parts[0] in PRODUCTS)
    return _sum_bytes(weights[names] for names in products)


def _sum_bytes(*groups: Iterable[Any]) -> int:
    return sum(each.num_bytes for group in groups for each in group if each is not None)


def _start(config: EngineConfig) -> Any:
    try:
        return native.Executor(config.isa, config.threads)
    except RuntimeError as error:  # of the system
        why = f"the system does not give this process {config.threads} threads"
        raise Unavailable("cpu", why, "lower `threads`, or raise the limit of processes (ulimit -u)") from error

"""Steps of the CUDA backend that are queued ahead of the engine, on a model of a line: the sum of what it has read."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from triton.runtime.interpreter import GridExecutor  # noqa: E402

from bitnet_inference.backends import cuda_attention, cuda_top  # noqa: E402
from bitnet_inference.backends.cuda_device import CAPTURING, Gpu  # noqa: E402
from bitnet_inference.backends.cuda_graphs import NOTHING, GraphStep  # noqa: E402
from bitnet_inference.backends.cuda_inputs import Inputs, Shape, padded_shape, usual_shapes  # noqa: E402
from bitnet_inference.backends.cuda_steps import MIN_STREAK, Steps  # noqa: E402
from bitnet_inference.model.contract import Batch  # noqa: E402

# Steps that compute on the host cannot be captured.
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="on a GPU test_cuda_model.py runs steps")
BLOCK, NUM_BLOCKS, VOCAB = 16, 64, 1009


def answer(token_ids: list[int]) -> int:
    """What follows these tokens, in that order."""
    value = 0
    for token_id in token_ids:
        value = (31 * value + token_id + 1) % VOCAB
    return value


class Line:
    """A cache of token ids, and steps that write and read it through the arrays on the device."""

    def __init__(self) -> None:
        self.cache = np.full(NUM_BLOCKS * BLOCK, -1)
        self.launched: list[int] = []  # tokens of each step
        self.steps = Steps(Gpu("cuda"), self.launch, 256)

    def launch(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor] | None:
        batch = inputs.batch
        token_ids, positions, slots, starts = (each.numpy() for each in batch[:4])
        self.launched.append(int(starts[-1]))
        written = slots >= 0
        assert written.sum() == starts[-1], "tokens that fill up are written nowhere"
        self.cache[slots[written]] = token_ids[written]
        best = np.zeros((len(token_ids), 1), np.int32)
        for row, table in enumerate(batch.block_tables.numpy()):
            for token in range(starts[row], starts[row + 1]):
                assert batch.sequences[token] == row
                at = np.arange(positions[token] + 1)
                best[token] = answer(self.cache[table[at // BLOCK] * BLOCK + at % BLOCK].tolist())
        if not inputs.shape.decodes:
            return None
        return torch.from_numpy(best), torch.from_numpy(best.astype(np.float32))


class Text:
    """Token ids and the blocks that they lie in."""

    def __init__(self, prompt: list[int], pool: list[int]) -> None:
        self.token_ids, self.pool, self.num_computed = list(prompt), pool, 0
        self.blocks: list[int] = []

    def take(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at = np.arange(self.num_computed, len(self.token_ids), dtype=np.int32)
        num_held = len(self.token_ids) + (len(self.pool) > 30)  # of many, one ahead
        while len(self.blocks) * BLOCK < num_held:
            self.blocks.append(self.pool.pop())
        self.num_computed = len(self.token_ids)
        slots = np.array(self.blocks, np.int32)[at // BLOCK] * BLOCK + at % BLOCK
        return np.array(self.token_ids, np.int32)[at], at, slots

    def end(self) -> None:
        self.pool.extend(self.blocks)


def batch_of(texts: list[Text]) -> Batch:
    arrays = [text.take() for text in texts]
    starts = np.cumsum([0, *(len(ids) for ids, _, _ in arrays)], dtype=np.int32)
    tables = np.zeros((len(texts), max(len(text.blocks) for text in texts)), np.int32)
    for row, text in zip(tables, texts, strict=True):
        row[: len(text.blocks)] = text.blocks
    has_next = all(len(text.token_ids) < len(text.blocks) * BLOCK for text in texts)
    return Batch(*map(np.concatenate, zip(*arrays, strict=True)), starts, tables, has_next)


def step(line: Line, texts: list[Text]) -> None:
    """Forward, and one token for each text; where each has one token, the steps know it."""
    line.steps.forward(batch_of(texts))
    expected = [answer(text.token_ids) for text in texts]
    if line.steps.has_best:
        ids, scores = line.steps.best(range(len(texts)))
        assert ids[:, 0].tolist() == expected and scores[:, 0].tolist() == expected
    for text, token_id in zip(texts, expected, strict=True):
        text.token_ids.append(token_id)


def test_greedy_steps_are_queued_ahead_and_not_again(monkeypatch):
    launch = GridExecutor.__call__

    def told(self, *arguments, **options):
        assert "enable_fp_fusion" in options, "Triton warns of a launch on a GPU that does not say"
        return launch(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", told)
    line, pool = Line(), list(range(NUM_BLOCKS))
    texts = [Text([5, 6, 7], pool), Text([9], pool)]
    for _ in range(3 * BLOCK):
        step(line, texts)
    num_ahead = line.steps.num_ahead
    assert num_ahead >= 3 * BLOCK - MIN_STREAK - 4, "but for the first steps"
    assert len(line.launched) <= 3 * BLOCK + 1, "none was queued for nothing, but the last"


def test_what_was_queued_ahead_serves_those_that_go_on():
    line, pool = Line(), list(range(NUM_BLOCKS))
    texts = [Text([number], pool) for number in range(5)]
    for _ in range(MIN_STREAK + 3):
        step(line, texts)
    count = len(line.launched)
    texts.pop(1).end()
    texts.pop(3).end()
    step(line, texts)
    assert len(line.launched) == count, "it was queued with the others"
    line.steps.bring_back()
    assert line.launched[count:] == [3], "rows on the device are those of the batch"
    step(line, texts)


def test_whoever_wants_more_gets_the_step_again():
    line, pool = Line(), list(range(NUM_BLOCKS))
    texts = [Text([5, 6, 7], pool), Text([9], pool)]
    for _ in range(MIN_STREAK + 3):
        step(line, texts)
    line.steps.forward(batch_of(texts))
    cache, count = line.cache.copy(), len(line.launched)
    line.steps.bring_back()
    assert len(line.launched) == count + 1 and np.array_equal(line.cache, cache)
    line.steps.bring_back()
    assert len(line.launched) == count + 1, "it is there already"
    ids, _ = line.steps.best([1, 0])
    assert ids[:, 0].tolist() == [answer(text.token_ids) for text in texts[::-1]]


@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_requests(seed):
    """Texts come, with prompts, and go; some steps are no greedy ones; freed blocks are used again at once."""
    random = np.random.default_rng(seed)
    line, pool = Line(), list(range(NUM_BLOCKS))
    texts = [Text([1, 2], pool)]
    for _ in range(250):
        draw = random.random()
        if draw < 0.03 and len(texts) < 6:
            texts.append(Text(random.integers(0, VOCAB, random.integers(1, 40)).tolist(), pool))
        elif draw < 0.06 and len(texts) > 1:
            texts.pop(random.integers(len(texts))).end()
        elif draw < 0.08:
            random.shuffle(texts)
        elif draw < 0.10:
            line.steps.bring_back() if line.launched else None
        for text in [text for text in texts if len(text.token_ids) > 120]:
            texts.remove(text)
            text.end()
        texts = texts or [Text([3], pool)]
        step(line, texts)
    assert line.steps.num_ahead > 20


def test_other_tokens_than_the_likeliest_are_computed():
    line, pool = Line(), list(range(NUM_BLOCKS))
    texts = [Text([5], pool)]
    for _ in range(MIN_STREAK + 2):
        step(line, texts)
    texts[0].token_ids[-1] += 1  # as if it had been drawn
    count = len(line.launched)
    step(line, texts)
    assert len(line.launched) > count


def test_other_blocks_are_read():
    line, pool = Line(), list(range(NUM_BLOCKS))
    texts = [Text(list(range(BLOCK)), pool)]
    for _ in range(MIN_STREAK + 2):
        step(line, texts)
    texts[0].token_ids[:BLOCK], texts[0].blocks[0] = [7] * BLOCK, pool.pop()
    line.cache[texts[0].blocks[0] * BLOCK :][:BLOCK] = 7
    texts[0].token_ids[-1] = int(line.steps.best([0])[0][0, 0])  # all else is as it was expected
    step(line, texts)


def test_nothing_is_queued_for_positions_without_a_block():
    line, pool = Line(), [5, 4, 3, 2, 1, 0]  # few: nobody holds one ahead
    texts = [Text(list(range(BLOCK + 2)), pool), Text([1], pool)]
    for _ in range(2 * BLOCK):
        step(line, texts)
    assert texts[0].blocks[0] == 0, "what a table is padded with is the first one's"
    assert line.steps.num_ahead > 0


def test_batches_of_nothing_write_nothing():
    """What kernels are compiled and captured with."""
    line = Line()
    line.steps.prepare(usual_shapes(64, 4))
    assert line.launched == [0] * 2 * 6 and (line.cache == -1).all()


@pytest.mark.parametrize(
    ("kernel", "number"), [(cuda_attention._few, "slots"), (cuda_attention._merge, "slots"), (cuda_top._take, "k")]
)
def test_numbers_that_grow_while_serving_compile_nothing_anew(kernel, number):
    """Triton compiles a kernel again for a number that is a multiple of 16 where the last was none."""
    assert number in kernel.arg_names and number in kernel.kwargs["do_not_specialize"]


def test_a_step_that_cannot_be_captured_is_launched_as_before(monkeypatch, caplog):
    """A capture whose end PyTorch refuses, as it does where something in it was not allowed or memory ran out."""

    @contextmanager
    def capture(*arguments, **options):
        yield
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

    for name, stand_in in (("CUDAGraph", object), ("current_stream", object), ("graph", capture)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    line = Line()
    step = GraphStep(Inputs(Shape(1, 1, 32, True), line.steps._gpu), line.launch, pool=object())
    for _ in range(4):
        step.inputs.send(NOTHING)
        assert step.run() is not None
    assert len(line.launched) == 5, "once in vain"
    assert [record.message for record in caplog.records] == [
        "no CUDA graph of Shape(num_tokens=1, num_sequences=1, num_blocks=32, decodes=True): its steps are launched "
        "kernel by kernel, and take longer: CUDA error: operation not permitted when stream is capturing"
    ]


def test_no_memory_is_given_back_while_a_graph_is_captured(monkeypatch):
    gpu, held = Gpu("cuda"), []
    gpu.is_real = True
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: held.append(CAPTURING._is_owned()))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 9))
    assert gpu.free_bytes == 5
    gpu.free()
    assert held == [True, True] and not CAPTURING._is_owned()
    with CAPTURING:
        gpu.free()  # of a model that the garbage collector finds in the thread that captures


def test_shapes_have_room_for_their_batches():
    random = np.random.default_rng(0)
    for _ in range(200):
        counts = random.integers(1, 4, random.integers(1, 80))
        positions = np.concatenate([np.arange(count) + random.integers(0, 5000) for count in counts]).astype(np.int32)
        starts = np.cumsum([0, *counts], dtype=np.int32)
        batch = Batch(positions, positions, positions, starts, np.zeros((len(counts), 1), np.int32))
        max_tokens = random.choice([len(positions), 300])
        shape = padded_shape(batch, max_tokens, 100)
        assert len(positions) <= shape.num_tokens <= max_tokens and len(counts) <= shape.num_sequences <= 100
        assert positions.max() < shape.num_blocks * BLOCK < 4 * positions.max() + 1024
        assert shape.decodes == bool((counts == 1).all())


def batch_of_prompts(num_sequences: int, num_tokens: int) -> Batch:
    """Sequences with as many tokens each, behind nothing."""
    positions = np.tile(np.arange(num_tokens, dtype=np.int32), num_sequences)
    starts = np.arange(num_sequences + 1, dtype=np.int32) * num_tokens
    return Batch(positions, positions, positions, starts, np.zeros((num_sequences, 1), np.int32))


@pytest.mark.parametrize(("max_tokens", "max_sequences"), [(4096, 256), (600, 256), (100, 256), (64, 4)])
def test_usual_shapes_are_those_of_decoding_and_of_a_prompt_alone(max_tokens, max_sequences):
    batches = [batch_of_prompts(count, 1) for count in range(1, min(max_tokens, max_sequences) + 1)]
    batches += [batch_of_prompts(1, count) for count in range(2, max_tokens + 1)]
    expected = {padded_shape(batch, max_tokens, max_sequences) for batch in batches}
    shapes = list(usual_shapes(max_tokens, max_sequences))
    assert set(shapes) == expected and len(shapes) == len(expected)

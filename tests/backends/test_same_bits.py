"""The promise: the CPU backend gives the same bits on every path. Whole models, every logit, and text.

A path is a way to the same result. The plain one computes it once: generic kernels, one thread, every request alone.
Every other path is held to it, and so every pair of paths is compared. docs/reproducibility.md tells why it holds.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
import pytest
from expert_samples import write_file

from bitnet_inference import LLM, SamplingParams, native
from bitnet_inference import config as config_module
from bitnet_inference.backends import cpu, load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.events import EngineListener, Preempted
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch, Model, Output
from bitnet_inference.stream import Generation
from bitnet_inference.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
DEFAULT = Path(config_module.__file__).parent / "default_model"
NAMES = ("llama-rms-norm", "llama3-bf16", "llama-partial", "qwen2-bitlinear", "qwen3-bitlinear", "gemma3-bf16")
ROUNDED = GOLDEN / "llama-f32"  # its matrices, to int8
MAPLE = Path("maple.gguf")  # is written when it is its turn: with experts, and a scale for each row
FOLDERS = [DEFAULT, *(GOLDEN / name for name in NAMES), ROUNDED, MAPLE]
NUM_TOKENS = 70


class Tally:
    """Counts what was compared, and says so at the end of the run."""

    def __init__(self) -> None:
        self.paths: set[str] = set()  # the names of the tests, each of which is a path
        self.num_comparisons = self.num_tokens = self.num_different_bits = 0

    def logits(self, found: np.ndarray, expected: np.ndarray) -> None:
        assert found.shape == expected.shape
        self.compare(found.tobytes(), expected.tobytes(), len(found))

    def texts(self, found: Sequence[Generation], expected: Sequence[Generation]) -> None:
        num_tokens = sum(len(each.token_ids) for each in expected)
        self.compare(*(b"".join(map(as_bytes, texts)) for texts in (found, expected)), num_tokens)

    def compare(self, found: bytes, expected: bytes, num_tokens: int) -> None:
        different = num_different_bits(found, expected)
        self.num_comparisons += 1
        self.num_tokens += num_tokens
        self.num_different_bits += different
        assert different == 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        paths = f"{len(self.paths)} paths on {', '.join(native.isas())}"
        counts = (
            f"{self.num_comparisons} comparisons, {self.num_tokens} tokens, {self.num_different_bits} bits different"
        )
        terminalreporter.write_line(f"same bits: {paths}; {counts}")


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    tally = Tally()
    pytestconfig.pluginmanager.register(tally)
    return tally


@pytest.fixture
def same(tally: Tally, request: pytest.FixtureRequest) -> Tally:
    tally.paths.add(request.node.nodeid)
    return tally


def num_different_bits(found: bytes, expected: bytes) -> int:
    if found == expected:
        return 0
    num_common = min(len(found), len(expected))
    one, other = (np.frombuffer(each, np.uint8)[:num_common] for each in (found, expected))
    return int(np.unpackbits(one ^ other).sum()) + 8 * (max(len(found), len(expected)) - num_common)


def as_bytes(each: Generation) -> bytes:
    """Everything that a caller gets to see, the floats of log-probabilities to the bit."""
    logprobs = [(at.logprob, *(value for pair in at.top for value in pair)) for at in each.logprobs or ()]
    parts = [each.text.encode(), each.finish_reason.encode(), np.array(each.token_ids, np.int32).tobytes()]
    return b"".join([*parts, *(np.array(row, np.float64).tobytes() for row in logprobs)])


def load(folder: Path, isa: str, threads: int, cache_dtype: str = "bfloat16", ternary_format: str = "u2") -> Model:
    model = load_model(
        open_checkpoint(folder),
        EngineConfig(
            isa=isa,
            threads=threads,
            cache_dtype=cache_dtype,
            ternary_format=ternary_format,
            quantize="int8" if folder == ROUNDED else "none",
        ),
    )
    model.reserve(80)
    return model


def sequence(model: Model, ids: np.ndarray, start: int, first_block: int) -> tuple[np.ndarray, ...]:
    """Token ids, positions, slots and the block table of a piece of a sequence that has every second block."""
    size = model.capabilities.block_size
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    table = (first_block + 2 * np.arange(max(NUM_TOKENS, start + len(ids)) // size + 1)).astype(np.int32)
    return ids, positions, table[positions // size] * size + positions % size, table


def batch_of(pieces: list[tuple[np.ndarray, ...]], wanted: Sequence[int] | None = None) -> Batch:
    """Several pieces, of which these rows are wanted."""
    ids, positions, slots, tables = zip(*pieces, strict=True)
    starts = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    flat = [np.concatenate(part).astype(np.int32) for part in (ids, positions, slots)]
    rows = None if wanted is None else np.array(wanted, np.int32)
    return Batch(*flat, starts, np.stack(tables), wanted=rows)


def forward(model: Model, pieces: list[tuple[np.ndarray, ...]], wanted: Sequence[int] | None = None) -> Output:
    return model.forward(batch_of(pieces, wanted))


def logits(model: Model, pieces: list[tuple[np.ndarray, ...]]) -> np.ndarray:
    return forward(model, pieces).full(range(sum(len(ids) for ids, *_ in pieces)))


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_file(tmp_path_factory.mktemp("maple") / MAPLE) if request.param == MAPLE else request.param


@pytest.fixture(scope="module")
def ids(folder: Path) -> np.ndarray:
    vocab = open_checkpoint(folder).config.vocab_size
    return np.random.default_rng(0).integers(0, vocab, NUM_TOKENS, np.int32)


@pytest.fixture(scope="module")
def expected(folder: Path, ids: np.ndarray) -> np.ndarray:
    model = load(folder, "generic", 1)
    return logits(model, [sequence(model, ids, 0, 0)])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_instruction_sets_and_threads(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str, threads: int
) -> None:
    model = load(folder, isa, threads)
    same.logits(logits(model, [sequence(model, ids, 0, 0)]), expected)


ONE_BY_ONE = tuple(range(1, NUM_TOKENS))
CHUNKS_OF_1_TO_11_TOKENS = (1, 3, 6, 10, 15, 21, 28, 36, 45, 55, 66)


@pytest.mark.parametrize("cuts", [(32,), (31, 33, 64), CHUNKS_OF_1_TO_11_TOKENS, ONE_BY_ONE], ids=len)
@pytest.mark.parametrize("isa", native.isas())
def test_chunks_of_the_prompt(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str, cuts: tuple[int, ...]
) -> None:
    model = load(folder, isa, 2)
    chunks = [logits(model, [sequence(model, ids[a:b], a, 1)]) for a, b in pairwise([0, *cuts, NUM_TOKENS])]
    same.logits(np.concatenate(chunks), expected)


@pytest.mark.parametrize("isa", native.isas())
def test_formats_in_memory(same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str) -> None:
    model = load(folder, isa, 2, ternary_format="t5")
    first = logits(model, [sequence(model, ids[:66], 0, 1)])
    one_by_one = [logits(model, [sequence(model, ids[i : i + 1], i, 1)]) for i in range(66, NUM_TOKENS)]
    same.logits(np.concatenate([first, *one_by_one]), expected)


@pytest.fixture(scope="module")
def expected_int8(folder: Path, ids: np.ndarray, expected: np.ndarray) -> np.ndarray:
    model = load(folder, "generic", 1, "int8")
    whole = logits(model, [sequence(model, ids, 0, 0)])
    assert 0 < np.sqrt(np.mean((whole - expected) ** 2) / np.mean(expected**2)) < 0.05
    return whole


@pytest.mark.parametrize("isa", native.isas())
def test_an_int8_cache(same: Tally, folder: Path, ids: np.ndarray, expected_int8: np.ndarray, isa: str) -> None:
    model = load(folder, isa, 2, "int8")
    chunks = [logits(model, [sequence(model, ids[a:b], a, 1)]) for a, b in pairwise([0, 5, 40, NUM_TOKENS])]
    same.logits(np.concatenate(chunks), expected_int8)


@pytest.mark.parametrize("isa", native.isas())
def test_neighbours_in_the_batch(same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str) -> None:
    model = load(folder, isa, 2)
    logits(model, [sequence(model, ids[::-1].copy(), 0, 1)])
    first = logits(model, [sequence(model, ids[:40], 0, 0), sequence(model, ids[::-1][:7].copy(), 0, 1)])
    second = logits(model, [sequence(model, ids[::-1][7:30].copy(), 7, 1), sequence(model, ids[40:], 40, 0)])
    same.logits(np.concatenate([first[:40], second[23:]]), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_rows_that_are_wanted_alone(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str, threads: int
) -> None:
    """Of two sequences: those of both, of one, of none; scattered, one, all."""
    model, others = load(folder, isa, threads), ids[::-1].copy()
    pieces = [sequence(model, others[:9], 0, 1), sequence(model, ids[:60], 0, 0)]
    for wanted in ([8, 68], [10, 11, 12, 40, 41], [9], range(2, 60), range(69), [], [68]):
        output = forward(model, pieces, wanted)
        rows = [row for row in wanted if row >= 9]
        same.logits(output.full(rows), expected[[row - 9 for row in rows]])
    last = forward(model, [sequence(model, others[9:13], 9, 1), sequence(model, ids[60:], 60, 0)], [13])
    same.logits(last.full([13]), expected[69:])


@pytest.mark.parametrize("isa", native.isas())
def test_batches_of_every_size(same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str) -> None:
    model, most = load(folder, isa, 3), 13  # one more than a tile of the kernels takes
    logits(model, [sequence(model, ids[:i], 0, 6 * i) for i in range(1, most)])
    for size in range(1, most + 1):
        same.logits(logits(model, [sequence(model, ids[i : i + 1], i, 6 * i) for i in range(size)]), expected[:size])


@pytest.mark.parametrize("isa", native.isas())
def test_sequences_that_threads_share_out(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str
) -> None:
    """Of one token to 46, then of five each, of which some are wanted."""
    model, cuts = load(folder, isa, 2), range(1, 49, 3)
    model.reserve(6 * len(cuts))
    first = logits(model, [sequence(model, ids[:cut], 0, 6 * i) for i, cut in enumerate(cuts)])
    same.logits(first, np.concatenate([expected[:cut] for cut in cuts]))
    pieces = [sequence(model, ids[cut : cut + 5], cut, 6 * i) for i, cut in enumerate(cuts)]
    following = np.concatenate([expected[cut : cut + 5] for cut in cuts])
    for wanted in (range(len(following)), [0, 7, 8, 39, 41, 78], range(4, len(following), 5), [2, 3]):
        same.logits(forward(model, pieces, wanted).full([*wanted]), following[[*wanted]])


@pytest.mark.parametrize("isa", native.isas())
def test_sequences_that_read_what_others_write(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str
) -> None:
    model = load(folder, isa, 2)
    for _ in range(4):
        model.reserve(80)  # nothing of the last time is left
        same.logits(logits(model, [sequence(model, ids[:36], 0, 0), sequence(model, ids[36:], 36, 0)]), expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("isa", native.isas())
def test_a_prompt_beside_a_stream(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str, threads: int
) -> None:
    """The prompt goes on a little with every token of the stream, then at once; each of them is as if it were alone."""
    model = load(folder, isa, threads)
    assert isinstance(model, cpu.CpuModel)
    prompt = batch_of([sequence(model, ids, 0, 0)], wanted := [0, 40, 69])
    background = model.begin(prompt)
    for i in range(12):
        token = [sequence(model, ids[i : i + 1], i, 1)]
        same.logits(background.forward(batch_of(token)).full([0]), expected[i : i + 1])
        background.go_on(0.0)
        assert background.output is None or i > 0, "a little is not all"
    background.go_on(math.inf)
    assert background.output is not None
    same.logits(background.output.full(wanted), expected[wanted])
    same.logits(logits(model, [sequence(model, ids[12:], 12, 1)]), expected[12:])


@pytest.mark.parametrize("isa", native.isas())
def test_rows_of_the_head_alone_and_screened(
    same: Tally, folder: Path, ids: np.ndarray, expected: np.ndarray, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_read = []
    for least in (1, 1 << 60):
        monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", least)
        model = load(folder, isa, 2)
        bytes_read.append(model.bytes_read([0]))
        output = forward(model, [sequence(model, ids, 0, 0)])
        same.logits(np.concatenate([output.full([row]) for row in range(NUM_TOKENS)]), expected)
        same.logits(output.full([69, 3]), expected[[69, 3]])
        for k in (1, 3):
            for rows in ([5], range(NUM_TOKENS)):
                same_best(same, *output.top(rows, k), expected[list(rows)], k)
    assert bytes_read[0] < bytes_read[1]  # it was screened


def same_best(same: Tally, best: np.ndarray, values: np.ndarray, expected: np.ndarray, k: int) -> None:
    order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
    assert best.tolist() == order.tolist()
    same.logits(values, np.take_along_axis(expected, order, axis=1))


NUM_LONG, LAST = 261, range(255, 261)  # attention starts a second segment of positions at 256


@pytest.fixture(scope="module")
def long_expected() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(1).integers(0, open_checkpoint(DEFAULT).config.vocab_size, NUM_LONG, np.int32)
    model = load(DEFAULT, "generic", 1)
    return ids, forward(model, [sequence(model, ids, 0, 0)]).full(LAST)


@pytest.mark.parametrize("isa", native.isas())
def test_a_long_context(same: Tally, long_expected: tuple[np.ndarray, np.ndarray], isa: str) -> None:
    ids, expected = long_expected
    model = load(DEFAULT, isa, 3)
    logits(model, [sequence(model, ids[:255], 0, 1)])
    steps = [logits(model, [sequence(model, ids[a:b], a, 1)]) for a, b in pairwise([255, 256, 257, NUM_LONG])]
    same.logits(np.concatenate(steps), expected)


# A model of which one token alone is work for several threads, with a head that is screened; 34 + 17 million weights.
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_hidden_layers": 3,
        "vocab_size": 17000, "bos_token_id": 16998, "eos_token_id": 16999}  # fmt: skip
NUM_WIDE = 3


class Wide(NamedTuple):
    folder: Path
    ids: np.ndarray
    expected: np.ndarray


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Wide:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import synthesize

        patch.setitem(synthesize.SHAPES, "wide", synthesize.SHAPES["tiny"] | WIDE)
        folder = tmp_path_factory.mktemp("wide") / "model"
        synthesize.synthesize("wide", folder)
    ids = np.random.default_rng(0).integers(0, 17000, NUM_WIDE, np.int32)
    model = load(folder, "generic", 1)
    return Wide(folder, ids, logits(model, [sequence(model, ids, 0, 0)]))


@pytest.mark.parametrize("ternary_format", ["u2", "t5"])
@pytest.mark.parametrize("isa", native.isas())
def test_one_token_on_several_threads(
    same: Tally, wide: Wide, isa: str, ternary_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    for threads in (2, 3):
        model, steps = load(wide.folder, isa, threads, ternary_format=ternary_format), []
        for i in range(NUM_WIDE):
            output = forward(model, [sequence(model, wide.ids[i : i + 1], i, 0)])
            steps.append(output.full([0]))
            for _ in range(3):  # what a thread has seen first decides what it screens
                same_best(same, *output.top([0], 1), wide.expected[i : i + 1], 1)
        same.logits(np.concatenate(steps), wide.expected)


def test_texts_beside_prompts(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts enter while a stream runs; what was cancelled on the way does not come back."""
    begun: list[Batch] = []
    begin = cpu.CpuModel.begin
    monkeypatch.setattr(cpu.CpuModel, "begin", lambda model, batch: begun.append(batch) or begin(model, batch))
    prompts = [np.random.default_rng(seed).integers(0, 16000, 200).tolist() for seed in range(3)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
    with LLM.load(wide.folder, threads=2, isa="auto", drafts="none") as llm:
        running = iter(llm.stream(prompts[0][:5], replace(params, max_tokens=400)))
        pieces = [next(running) for _ in range(8)]
        together = llm.generate(prompts, params)
        cancelled = llm.stream(prompts[0][::-1], params)
        cancelled.cancel()
        pieces += list(running)
        alone = [llm.generate(prompt, params) for prompt in prompts]
        text = llm.generate(prompts[0][:5], replace(params, max_tokens=400))
    if native.isas()[0] != "avx512amx":
        assert begun, "no prompt was computed beside the stream"
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert "".join(piece.text for piece in pieces) == text.text


# Text: what callers see. Every request of JOBS on every path, by itself and among the others.
STORY = (
    "Once upon a time there was a fox who lived under an old oak near the river. Every morning she ran to the "
    "water and looked for her friend the heron. One day the heron did not come. The fox waited until the sun stood "
    "high. Then she went to look for him."
)


class Job(NamedTuple):
    prompt: str
    params: SamplingParams


JOBS = (
    Job("Once upon a time", SamplingParams(temperature=0.0, max_tokens=16)),
    Job(STORY, SamplingParams(temperature=0.0, max_tokens=12)),
    Job("The owl said", SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=6, max_tokens=16)),
    Job("The little mole", SamplingParams(temperature=0.0, max_tokens=10, repetition_penalty=1.3, logprobs=3)),
    Job("The owl said", SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=16, logprobs=2)),
    Job("The owl said", SamplingParams(temperature=1.3, top_p=0.9, seed=8, max_tokens=16)),
    Job(
        STORY[:100], SamplingParams(temperature=0.8, top_k=40, min_p=0.02, presence_penalty=0.5, seed=9, max_tokens=12)
    ),
)


class Watch:
    """Holds a model's first step until `open`, so that all requests are there, and counts what the steps compute."""

    def __init__(self, model: Model) -> None:
        self._model_forward, self._gate = model.forward, Event()
        self.num_tokens = self.most_tokens = self.most_sequences = 0
        model.forward = self.forward  # type: ignore[method-assign]

    def open(self) -> None:
        self._gate.set()

    def forward(self, batch: Batch) -> Output:
        self._gate.wait()
        self.num_tokens += len(batch.token_ids)
        self.most_tokens = max(self.most_tokens, len(batch.token_ids))
        self.most_sequences = max(self.most_sequences, len(batch.starts) - 1)
        return self._model_forward(batch)


def load_llm(
    max_cache_tokens: int = 2048, folder: Path = DEFAULT, listener: EngineListener | None = None, **options: object
) -> tuple[LLM, Watch]:
    watch = Watch(model := load_model(open_checkpoint(folder), EngineConfig(**options)))  # type: ignore[arg-type]
    return LLM(model, Tokenizer.from_folder(folder), max_cache_tokens=max_cache_tokens, listener=listener), watch


def alone(llm: LLM) -> list[Generation]:
    return [llm.generate(*job) for job in JOBS]


def together(llm: LLM) -> list[Generation]:
    return llm.generate([job.prompt for job in JOBS], [job.params for job in JOBS])


@pytest.fixture(scope="module")
def texts() -> list[Generation]:
    llm, watch = load_llm(isa="generic", threads=1, ternary_format="u2")
    watch.open()
    with llm:
        return alone(llm)


def paths_of_text() -> Iterator[tuple[str, int, str, int]]:
    """Instruction set, threads, format, max_batch_tokens: all of them differ from one to the next."""
    for isa in native.isas():
        yield isa, 2, "t5", 16
        if isa != "generic":  # it is slow, and computes what is expected
            yield isa, 1, "u2", 512
            yield isa, 3, "u2", 5


@pytest.mark.parametrize(("isa", "threads", "ternary_format", "max_batch_tokens"), list(paths_of_text()))
def test_text(
    same: Tally, texts: list[Generation], isa: str, threads: int, ternary_format: str, max_batch_tokens: int
) -> None:
    llm, watch = load_llm(isa=isa, threads=threads, ternary_format=ternary_format, max_batch_tokens=max_batch_tokens)
    with llm:
        streams = [llm.stream(*job) for job in JOBS]
        watch.open()
        same.texts([stream.read() for stream in streams], texts)
        assert watch.most_sequences > 2 and watch.most_tokens <= max_batch_tokens
        if isa != "generic":
            same.texts(alone(llm), texts)
            same.texts(together(llm), texts)


READ = [STORY, "The owl said", STORY[:150] + " But the owl said no.", STORY[:33]]


def read(llm: LLM, prompts: list[str]) -> list[bytes]:
    """The vectors and scores of each prompt."""
    last, mean = llm.embed(prompts, normalize=False), llm.embed(prompts, pooling="mean")
    scores, ends = llm.score(prompts), llm.score(prompts, start=2)
    assert [each[2:] for each in scores] == ends
    return [
        b"".join([x.tobytes(), y.tobytes(), *(struct.pack("d", at) for at in z)])
        for x, y, z in zip(last, mean, scores, strict=True)
    ]


@pytest.fixture(scope="module", params=[DEFAULT, GOLDEN / "llama3-bf16"], ids=lambda folder: folder.name)
def what_is_read(request: pytest.FixtureRequest) -> tuple[Path, list[bytes]]:
    llm, watch = load_llm(folder=request.param, isa="generic", threads=1, ternary_format="u2")
    watch.open()
    with llm:
        return request.param, [read(llm, [prompt])[0] for prompt in READ]


@pytest.mark.parametrize(("isa", "threads", "ternary_format", "max_batch_tokens"), list(paths_of_text()))
def test_vectors_and_scores(
    same: Tally,
    what_is_read: tuple[Path, list[bytes]],
    isa: str,
    threads: int,
    ternary_format: str,
    max_batch_tokens: int,
) -> None:
    folder, expected = what_is_read
    options = {"isa": isa, "threads": threads, "ternary_format": ternary_format, "max_batch_tokens": max_batch_tokens}
    llm, watch = load_llm(folder=folder, **options)
    watch.open()
    with llm:
        num_tokens = sum(len(llm.tokenizer.encode(prompt)) for prompt in READ)
        for prompts in (READ, READ[::-1]):  # the second time with what the cache has
            found = read(llm, prompts)
            same.compare(b"".join(found), b"".join(expected if prompts is READ else expected[::-1]), num_tokens)


def test_text_of_repeated_runs(same: Tally, texts: list[Generation]) -> None:
    for _ in range(3):
        llm, watch = load_llm()
        watch.open()
        with llm:
            for _ in range(3):
                same.texts(alone(llm), texts)


def test_text_among_requests_that_come_and_go(same: Tally, texts: list[Generation]) -> None:
    llm, watch = load_llm(max_batch_tokens=24)
    watch.open()
    endless = SamplingParams(seed=1, max_tokens=None, ignore_eos=True)
    with llm, llm.stream("The bear", endless) as neighbour:
        pieces = iter(neighbour)
        for job, expected in zip(JOBS, texts, strict=True):
            next(pieces)
            with llm.stream("The badger", endless) as passing:
                stream = llm.stream(*job)
                next(iter(passing))
            same.texts([stream.read()], [expected])


def test_text_of_requests_that_lose_their_cache(same: Tally, texts: list[Generation]) -> None:
    """Four blocks of 32 tokens: whoever came last gives its blocks back; what others take of them it computes again."""
    heard: list[object] = []
    llm, watch = load_llm(max_cache_tokens=128, listener=heard.append)
    with llm:
        streams = [llm.stream(*job) for job in JOBS]
        watch.open()
        same.texts([stream.read() for stream in streams], texts)
    assert any(isinstance(event, Preempted) for event in heard)


@pytest.mark.parametrize("isa", native.isas())
def test_text_through_the_screened_head(
    same: Tally, texts: list[Generation], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "MIN_SCREENED_WEIGHTS", 1)
    llm, watch = load_llm(isa=isa)
    watch.open()
    with llm:
        same.texts(together(llm), texts)

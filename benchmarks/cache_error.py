"""What a smaller KV cache costs in accuracy: `cache_error.py MODEL` compares bfloat16 and int8 with float32.

The text is one that the model writes itself with a float32 cache (`--text FILE` gives another, `--random` random
tokens, for random weights). It is computed once with each cache, and the logits of all positions are compared:

- relative RMS: the root of the mean square of the differences, over that of the float32 logits about the mean of their
  position; of all positions, and of the worst;
- same best: positions whose likeliest token is the same;
- perplexity of the text, of every token after those before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.params import SamplingParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.llm import LLM
from bitnet_inference.model.contract import Batch, Model
from bitnet_inference.model_folder import find_model

DTYPES = ("float32", "bfloat16", "int8")
CHUNK = 64  # positions whose logits are in memory at once


@dataclass
class Error:
    """How far the logits with a cache are from those with float32, and what they make of the text."""

    squares: list[float] = field(default_factory=list)  # mean squares of a position: of the differences,
    spreads: list[float] = field(default_factory=list)  # and of the float32 logits about their mean
    num_same: int = 0
    losses: list[float] = field(default_factory=list)

    def add(self, exact: NDArray[np.float32], found: NDArray[np.float32], targets: Sequence[int]) -> None:
        """Some positions: logits [n, vocab] of both, and the tokens that follow, as far as there are any."""
        wide, other = exact.astype(np.float64), found.astype(np.float64)
        self.squares += np.mean((other - wide) ** 2, axis=1).tolist()
        self.spreads += np.var(wide, axis=1).tolist()
        self.num_same += int((wide.argmax(axis=1) == other.argmax(axis=1)).sum())
        other -= other.max(axis=1, keepdims=True)
        rows = np.arange(len(targets))
        self.losses += (np.log(np.exp(other).sum(axis=1))[rows] - other[rows, targets]).tolist()

    def cells(self) -> list[str]:
        """Relative RMS, that of the worst position, same best, perplexity."""
        squares, spreads = np.array(self.squares), np.array(self.spreads)
        whole, worst = np.sqrt(squares.mean() / spreads.mean()), np.sqrt((squares / spreads).max())
        same = self.num_same / len(squares)
        return [
            f"{100 * whole:.3f}%",
            f"{100 * worst:.2f}%",
            f"{100 * same:.2f}%",
            f"{np.exp(np.mean(self.losses)):.4f}",
        ]


def compare(path: Path, token_ids: Sequence[int], threads: int | None = None) -> dict[str, Error]:
    """The error of each cache over the whole text, by dtype."""
    errors = {dtype: Error() for dtype in DTYPES}
    with ExitStack() as stack:
        runs = []
        for dtype in DTYPES:
            model = load_model(open_checkpoint(path), EngineConfig.from_env(cache_dtype=dtype, threads=threads))
            stack.callback(model.close)
            runs.append(_logits(model, token_ids))
        for at, rows in enumerate(zip(*runs, strict=True)):
            targets = token_ids[at * CHUNK + 1 : (at + 1) * CHUNK + 1]
            for dtype, found in zip(DTYPES, rows, strict=True):
                errors[dtype].add(rows[0], found, targets)
    return errors


def _logits(model: Model, token_ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
    """The logits of the text, some positions at a time."""
    size = model.capabilities.block_size
    model.reserve(-(-len(token_ids) // size))
    table = np.arange(-(-len(token_ids) // size), dtype=np.int32)[None]
    assert model.capabilities.max_tokens >= CHUNK, "the model takes fewer tokens at a time than are compared"
    for start in range(0, len(token_ids), CHUNK):
        ids = np.array(token_ids[start : start + CHUNK], np.int32)
        at = np.arange(start, start + len(ids), dtype=np.int32)
        output = model.forward(Batch(ids, at, at, np.array([0, len(ids)], np.int32), table))
        yield output.full(range(len(ids)))


def table(errors: dict[str, Error]) -> str:
    """The rows in Markdown."""
    rows = [f"| {dtype} | {' | '.join(error.cells())} |" for dtype, error in errors.items()]
    head = "| cache | relative RMS of the logits | worst position | same best token | perplexity |"
    return "\n".join([head, "| --- | ---: | ---: | ---: | ---: |", *rows])


def own_text(path: Path, num_tokens: int, threads: int | None = None) -> list[int]:
    """What the model writes by itself, at temperature 1."""
    with LLM.load(path, cache_dtype="float32", threads=threads) as llm:
        start = llm.tokenizer.encode("Once upon a time")
        params = SamplingParams(seed=0, max_tokens=num_tokens - len(start), ignore_eos=True)
        return start + llm.generate(start, params).token_ids


def _token_ids(args: argparse.Namespace, path: Path) -> list[int]:
    if args.random:
        vocab_size = open_checkpoint(path).config.vocab_size
        return np.random.default_rng(0).integers(0, vocab_size, args.tokens).tolist()  # type: ignore[no-any-return]
    if args.text is None:
        return own_text(path, args.tokens, args.threads)
    with LLM.load(path, threads=args.threads) as llm:
        return llm.tokenizer.encode(args.text.read_text(encoding="utf-8"))[: args.tokens]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help='a model folder, or "default"')
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="length of the text (1024)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="this text, not one that the model writes")
    parser.add_argument("--random", action="store_true", help="random tokens")
    parser.add_argument("--threads", type=int, metavar="N")
    args = parser.parse_args()
    path = find_model(args.model)
    token_ids = _token_ids(args, path)
    print(f"{args.model}, {len(token_ids)} tokens\n\n{table(compare(path, token_ids, args.threads))}")


if __name__ == "__main__":
    main()

"""A written ONNX file, run in ONNX Runtime, beside what this engine computes from the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.backends.choose import load_model
from bitnet_inference.config import EngineConfig, num_cores
from bitnet_inference.errors import BackendError, Unavailable, said
from bitnet_inference.formats.checkpoint import Checkpoint
from bitnet_inference.model.contract import Batch

_INSTALL = 'pip install "bitnet-inference[onnx]"'
Floats = NDArray[np.float32]


class Agreement(NamedTuple):
    """How far logits are off, as the root of the mean square of the difference over that of the logits.

    `error` is that of a text at once, `error_with_past` that of the same text token by token, from the second half on.
    `usual_error` is the median of those of tokens at once: where a rounding fell the other way, a token is off by more.
    `num_greedy` of the `num_tokens` have the same likeliest successor, both ways.
    """

    usual_error: float
    error: float
    error_with_past: float
    num_tokens: int
    num_greedy: int


def require_runtime() -> None:
    """Raises Unavailable without ONNX Runtime."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise Unavailable("onnx", f"what is written is checked with ONNX Runtime ({error})", _INSTALL) from None


def compare(checkpoint: Checkpoint, path: Path, token_ids: Sequence[int]) -> Agreement:
    """Run both, one after the other, on the same tokens. Raises BackendError where ONNX Runtime refuses the file."""
    expected = _own_logits(checkpoint, token_ids)
    try:
        whole, stepwise = _logits(path, token_ids)
    except Exception as error:  # the runtime's have no ancestor of their own
        text = said(error)
        raise BackendError(f"{path.name}: ONNX Runtime refuses it: {text}") from error
    half = len(token_ids) // 2
    best = expected.argmax(axis=1)
    same = whole.argmax(axis=1) == best
    same[half:] &= stepwise.argmax(axis=1) == best[half:]
    usual = float(np.median(list(map(relative_rms, whole, expected))))
    errors = relative_rms(whole, expected), relative_rms(stepwise, expected[half:])
    return Agreement(usual, *errors, len(token_ids), int(same.sum()))


def relative_rms(found: Floats, expected: Floats) -> float:
    """The root of the mean square of the difference, over that of what is expected; infinite where it is no number."""
    difference, size = (np.sqrt(np.mean(np.square(x, dtype=np.float64))) for x in (found - expected, expected))
    if difference == 0:
        return 0.0
    return float(difference / size) if np.isfinite(difference) and size else float("inf")


def _own_logits(checkpoint: Checkpoint, token_ids: Sequence[int]) -> Floats:
    """Those of all tokens, [tokens, vocab], with a cache that rounds nothing, for nothing is rounded there either."""
    model = load_model(checkpoint, EngineConfig(device="cpu", cache_dtype="float32", head="unscreened"))
    try:
        count, size = len(token_ids), model.capabilities.block_size
        model.reserve(-(-count // size))
        places, table = np.arange(count, dtype=np.int32), np.arange(-(-count // size), dtype=np.int32)[None]
        batch = Batch(np.array(token_ids, np.int32), places, places, np.array([0, count], np.int32), table)
        return model.forward(batch).full(range(count))
    finally:
        model.close()


def _logits(path: Path, token_ids: Sequence[int]) -> tuple[Floats, Floats]:
    """Those of all tokens at once; and those from the middle on, each behind the cache of all before."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = num_cores(), 4  # errors are raised, not printed too
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    shapes = {each.name: each.shape for each in session.get_inputs() if each.name.startswith("past")}
    start = {name: np.zeros((1, shape[1], 0, shape[3]), np.float32) for name, shape in shapes.items()}
    whole, _ = _run(session, token_ids, start)
    half, rows = len(token_ids) // 2, []
    _, past = _run(session, token_ids[:half], start)
    for token_id in token_ids[half:]:
        logits, past = _run(session, [token_id], past)
        rows.append(logits)
    return whole, np.concatenate(rows)


def _run(session: Any, token_ids: Sequence[int], past: dict[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
    """The logits [tokens, vocab], and the cache behind these tokens."""
    before = next(iter(past.values())).shape[2]
    after = before + len(token_ids)
    numbers = {"input_ids": token_ids, "attention_mask": np.ones(after), "position_ids": range(before, after)}
    inputs = {name: np.array(values, np.int64)[None] for name, values in numbers.items()}
    logits, *present = session.run(None, inputs | past)
    return logits[0], dict(zip(past, present, strict=True))

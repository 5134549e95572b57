"""ONNX decoders on the engine: held to Transformers' numbers, and each text to that of its request alone."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_samples import FLOAT16, GOLDEN, INT32, Kind, make_decoder, write_genai, write_model

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.errors import Stopped
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Batch

KINDS = {
    "plain": Kind(),
    "float16": Kind(cache=FLOAT16, half_logits=True),
    "int32": Kind(integers=INT32),
    "no positions": Kind(has_positions=False),
    "merged": Kind(is_merged=True),
    "hidden": Kind(has_hidden=True),
    "kept logits": Kind(keeps_logits=True),
}


def path_of(tmp_path, kind: Kind):
    model = make_decoder(kind)
    return write_genai(tmp_path, model) if kind.is_genai else write_model(tmp_path / "model.onnx", model)


def load(path):
    return load_model(open_checkpoint(path), EngineConfig(threads=1))


def logits_in_steps(model, ids, cuts):
    """All logits of one sequence that is computed in parts, in blocks that lie backwards."""
    size = model.capabilities.block_size
    model.reserve(8)
    table = np.arange(8, dtype=np.int32)[::-1]
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        at = np.arange(begin, end, dtype=np.int32)
        slots = table[at // size] * size + at % size
        starts = np.array([0, end - begin], np.int32)
        output = model.forward(Batch(ids[begin:end], at, slots, starts, table[None]))
        found.append(output.full(range(end - begin)))
    return np.concatenate(found)


@pytest.mark.parametrize("kind", [*KINDS.values(), Kind(is_genai=True, has_positions=False)], ids=[*KINDS, "genai"])
@pytest.mark.parametrize("cuts", [[], [1, 2, 9, 23]])
def test_logits_are_those_of_transformers(tmp_path, kind, cuts):
    golden = np.load(GOLDEN / "golden.npz")
    model = load(path_of(tmp_path, kind))
    found = logits_in_steps(model, golden["token_ids"], cuts)
    assert found.dtype == np.float32
    error = np.sqrt(np.square(found - golden["logits"]).mean() / np.square(golden["logits"]).mean())
    assert error < (2e-3 if kind.half_logits else 1e-5)
    model.close()


def test_a_closed_model_says_so(tmp_path):
    model = load(path_of(tmp_path, Kind()))
    model.close()
    with pytest.raises(Stopped, match="closed"):
        logits_in_steps(model, np.zeros(3, np.int32), [])

"""What Transformers' beam search finds with a golden checkpoint: sequences and scores of several settings."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import outputs
import torch
from models import BOS, Spec
from transformers import GenerationConfig

NAMES = ("bitnet-packed", "llama-ternary-head", "llama-f32")
PROMPT = [BOS, 17, 203, 42, 42, 90]
NUM_TOKENS, NUM_BEAMS = 12, 4


def write(folder: Path, spec: Spec) -> None:
    """Write beams.json into a checkpoint's folder: {"prompt", "cases": [{options, "texts": [[token ids, score]]}]}."""
    model = outputs.load(folder, spec)
    plain = _search(model, [], {"num_beams": NUM_BEAMS})
    # Tokens that a plain search finds early and late, so that texts end at several lengths.
    ends = sorted({plain[0][0][2], plain[0][0][7], plain[1][0][5], plain[3][0][9]})
    settings: list[dict[str, Any]] = [
        {"num_beams": beams, "early_stopping": early, "length_penalty": penalty}
        for beams, early, penalty in product((2, NUM_BEAMS), (False, True, "never"), (1.0, 0.0, -1.0, 2.0))
    ]
    more = ({"min_new_tokens": 6}, {"repetition_penalty": 1.3}, {"repetition_penalty": 0.9})
    settings += [{"num_beams": 3, **options} for options in more]
    cases = []
    for options, chosen in product(settings, ([], ends)):
        texts = _search(model, chosen, options)
        cases.append(options | {"ends": chosen, "texts": [[ids, round(score, 5)] for ids, score in texts]})
    lines = ",\n".join(json.dumps(case) for case in cases)
    (folder / "beams.json").write_text(f'{{"prompt": {PROMPT}, "max_tokens": {NUM_TOKENS}, "cases": [\n{lines}\n]}}\n')


def _search(model: torch.nn.Module, ends: list[int], options: dict[str, Any]) -> list[tuple[list[int], float]]:
    """All beams of a search: new tokens up to the end token, it included, and the score."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        max_new_tokens=NUM_TOKENS,
        num_return_sequences=options["num_beams"],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    with torch.no_grad():
        found = model.generate(torch.tensor([PROMPT]))
    scores = found.sequences_scores.tolist()
    return [
        (_cut(row.tolist()[len(PROMPT) :], ends), score) for row, score in zip(found.sequences, scores, strict=True)
    ]


def _cut(ids: list[int], ends: list[int]) -> list[int]:
    last = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: last + 1]

"""How the maker of a model would have tokens chosen: generation_config.json, and keys of a GGUF file that say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_inference.errors import FormatError

_PREFIX = "general.sampling."
_CHOICE = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_NAMES = {**_CHOICE, "penalty_repeat": "repetition_penalty"}


def samples(generation: Mapping[str, Any]) -> Any:
    """Whether tokens are drawn: what do_sample says, or whether there is a temperature and not do_sample."""
    said = generation.get("do_sample")
    return generation.get("temperature") is not None if said is None else said


def read_recommended(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say. Raises FormatError for what is no number."""
    found: dict[str, Any] = {}
    for key, name in _NAMES.items():
        value = metadata.get(_PREFIX + key)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise FormatError(path, _PREFIX + key, "is no number: download the file again")
        # As it was before it became float32: 0.6, and not 0.60000002.
        found[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    return found | ({"do_sample": True} if found.keys() & {*_CHOICE.values()} else {})


def recommended_keys(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say so, for numbers that are possible."""
    return dict(_recommended(generation))


def without_place(generation: Mapping[str, Any]) -> list[str]:
    """What else it says, of which a GGUF file says nothing; not what Transformers itself is to do."""
    known = {"do_sample", "transformers_version", "use_cache", *_NAMES.values()}
    left = (key for key, value in generation.items() if value not in (None, False) and key not in known)
    return sorted(key for key in left if not key.endswith("_token_id") and key[0] != "_")


def _recommended(generation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    draws = samples(generation)
    for key, name in _NAMES.items():
        value = generation.get(name, 1.0 if name == "temperature" else None)
        if value is not None and (draws or key not in _CHOICE):
            yield _PREFIX + key, max(value, 0) if name == "top_k" else float(value)
    if generation.get(_NAMES["penalty_repeat"]) is not None:  # of the whole text, where llama.cpp takes 64 tokens
        yield f"{_PREFIX}penalty_last_n", -1

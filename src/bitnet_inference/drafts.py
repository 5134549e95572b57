"""Who guesses tokens ahead for an LLM: nobody, its own text, or a smaller model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from bitnet_inference.backends import load_model
from bitnet_inference.config import EngineConfig
from bitnet_inference.engine.draft_model import ModelDrafter
from bitnet_inference.engine.lookup import LookupDrafter
from bitnet_inference.engine.speculative import Drafter
from bitnet_inference.errors import InvalidParams, NotFound
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.model.contract import Model
from bitnet_inference.model_folder import find_model, load_tokenizer
from bitnet_inference.text.tokenizer import Tokenizer

Drafts = Literal["auto", "lookup", "none"] | Model
_WORDS = ("auto", "lookup", "none")
_CURE = 'give "auto", "lookup", "none", or a smaller model'
_NUM_CONTEXTS = 16  # of the draft model at most, so that most of the memory is left to the large one
_SHARE = 16  # of the memory: the large model may count on nine tenths of it for its own cache


def load_drafts(drafts: str | Path, tokenizer: Tokenizer, config: EngineConfig) -> Drafts:
    """What `drafts` of LLM.load stands for: one of the words, or the model under a path.

    Raises InvalidParams for a model with other tokens, and what loading raises.
    """
    if drafts in _WORDS:
        return drafts  # type: ignore[return-value]  # one of the words
    if not isinstance(drafts, str | Path):
        raise InvalidParams(f"drafts is {drafts!r:.60}: {_CURE}")
    try:
        path = find_model(drafts)
    except NotFound as error:
        raise NotFound(f"drafts: {error}; {_CURE}") from None
    checkpoint = open_checkpoint(path)
    if load_tokenizer(checkpoint).vocabulary() != tokenizer.vocabulary():
        raise InvalidParams(f"{drafts} has other tokens than the model: choose a draft model of the same vocabulary")
    return load_model(checkpoint, replace(config, quantize="none", embedding="exact", gpu_layers=None, gpus=1))


def make_drafter(model: Model, drafts: Drafts, max_cache_tokens: int | None) -> Drafter | None:
    """The drafter for a model. Raises InvalidParams where vocabularies differ, and OutOfMemory."""
    if drafts == "none" or (drafts == "auto" and not model.capabilities.same_bits):
        return None
    if isinstance(drafts, str):
        return LookupDrafter()
    limits = drafts.capabilities
    num_tokens = min(max_cache_tokens or drafts.config.max_positions * _NUM_CONTEXTS, 1 << 31)
    num_blocks = max(1, min(num_tokens // limits.block_size, limits.available_bytes // _SHARE // limits.block_bytes))
    return ModelDrafter(drafts, model.config.vocab_size, num_blocks)

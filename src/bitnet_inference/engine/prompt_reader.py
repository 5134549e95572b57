"""Who wants to know more of a prompt than what follows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.errors import EngineError


@dataclass(frozen=True)
class PromptReader:
    """Gets rows of a prompt, as they are computed.

    `read(first, rows)` gets those of `positions`, all of which lie in the prompt, in order, each once and some at a
    time: `first` is the position of the first one. The array is valid during the call only. `kind` says what they are:
    "logits" [n, vocab], what follows the token there, or "hidden" [n, hidden], its state after the final norm. Tokens
    before `positions` may come from the cache.

    It is called in the engine's thread. If it raises, the request ends with that error.
    """

    read: Callable[[int, NDArray[np.float32]], None]
    positions: range
    kind: Literal["logits", "hidden"] = "logits"


def broken(what: str) -> EngineError:
    """What is said of numbers of a model that nothing can be made of: "logits hold NaN"."""
    cure = "its weights are broken, or not what its config.json says: download the model again"
    return EngineError(f"the model's {what}: {cure}")

"""What a request gets of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bitnet_inference.engine.request import Request
from bitnet_inference.engine.room import Chunk


class Share(NamedTuple):
    """What a request gets of a step: its next `num_tokens` known tokens are computed.

    And behind them those of a `draft`, which may turn out to be its next ones; then `num_tokens` are all that it lacks.
    """

    request: Request
    num_tokens: int
    draft: Sequence[int] = ()

    @property
    def chunk(self) -> Chunk:
        """What the known tokens cost; until they are computed."""
        return Chunk(self.request.num_computed, self.num_tokens)

"""Tokens of prompts that are computed beside streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bitnet_inference.engine.batch import build_batch
from bitnet_inference.engine.request import Rank, Request
from bitnet_inference.engine.share import Share
from bitnet_inference.model.contract import Background, Batch, Capabilities, Output

class Aside:
    """Shares that the model computes in its background, over as many steps of others as that takes.

    Until it is done nobody may have the blocks of their requests, and no step has tokens of these.
    """

    def __init__(self, limits: Capabilities) -> None:
        """Takes up to `num_tokens` tokens; none where the model has no background."""
        self._begin, self._block_size = limits.begin, limits.block_size
        self.num_tokens = 0 if limits.begin is None else min(limits.background_tokens, limits.max_tokens)
        self.put(())
        self.most_s: float | None = math.inf  # that the next step may take for them; None: they pause

    def put(self, shares: Sequence[Share]) -> None:
        """These are to be computed; what was under way is forgotten."""
        self.shares, self._requests = shares, frozenset(share.request for share in shares)
        self._background: Background | None = None

    def __contains__(self, request: Request) -> bool:
        """Whether the request has one of the shares."""
        return request in self._requests

    @property
    def current(self) -> Sequence[Share]:
        """The shares, if the next step computes some of them."""
        return () if self.most_s is None else self.shares

    @property
    def new(self) -> Sequence[Share]:
        """The shares, if the next step is the first that computes some of them."""
        return self.current if self._background is None else ()

    @property
    def rank(self) -> Rank:
        """Of the first of the requests; there is one."""
        return min(request.rank for request in self._requests)

    def drop(self, request: Request) -> None:
        """Forget all shares if the request, whose blocks others get, has one: the rest are computed anew."""
        if request in self:
            self.put(())

    def forward(self, batch: Batch | None) -> Output | None:
        """Compute the batch, if there is one, and meanwhile some of the shares; without one all that is left."""
        if self._background is None:
            assert self._begin is not None, "shares for a model without a background"
            self._background = self._begin(build_batch(self.shares, self._block_size))
        if batch is None:
            self._background.finish()
            return None
        assert self.most_s is not None, "shares that pause"
        return self._background.forward(batch, self.most_s)

    def done(self) -> Iterator[tuple[Output, Sequence[Share]]]:
        """The shares, once they are computed: nothing is under way then."""
        if self._background is not None and (output := self._background.output) is not None:
            shares = self.shares
            self.put(())
            yield output, shares

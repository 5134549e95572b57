"""Tokens of a prompt that are computed beside streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bitnet_inference.engine.batch import build_batch
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.share import Share
from bitnet_inference.model.contract import Background, Batch, Capabilities, Output


class Aside:
    """A share that the model computes in its background, over as many steps of others as that takes.

    Until it is done nobody may have the blocks of its request, and no step has tokens of that.
    """

    def __init__(self, limits: Capabilities) -> None:
        """`num_tokens` are the most for a share: 0 where the model has no background."""
        self._begin, self._block_size = limits.begin, limits.block_size
        self.num_tokens = 0 if limits.begin is None else min(limits.background_tokens, limits.max_tokens)
        self.share: Share | None = None
        self.most_s: float | None = math.inf  # that the next step may take for it; None: it pauses
        self._background: Background | None = None  # once it has begun

    @property
    def request(self) -> Request | None:
        """Whose share it is."""
        return None if self.share is None else self.share.request

    @property
    def current(self) -> Sequence[Share]:
        """The share, if the next step computes some of it."""
        return () if self.share is None or self.most_s is None else (self.share,)

    @property
    def new(self) -> Sequence[Share]:
        """The share, if the next step begins with it."""
        return self.current if self._background is None else ()

    def drop(self, request: Request) -> None:
        """Forget the share if it is this request's, whose blocks others get."""
        if self.share is None or self.share.request is not request:
            return
        if self._background is not None:
            self._background.close()
        self.share = self._background = None

    def begin(self) -> None:
        """Have the model begin with the share, if the step does."""
        if self.new:
            assert self._begin is not None, "a share for a model without a background"
            self._background = self._begin(build_batch(self.new, self._block_size))

    def forward(self, batch: Batch) -> Output:
        """Compute the batch; the share, which has begun, goes on meanwhile, and while the output is used."""
        assert self._background is not None, "nothing is under way"
        return self._background.forward(batch)

    def go_on(self, spent_s: float) -> None:
        """Compute the share for what is left of the step, of which so much is over."""
        if self._background is not None and self._background.output is None and self.most_s is not None:
            self._background.go_on(max(0.0, self.most_s - spent_s))

    def done(self) -> Iterator[tuple[Output, Sequence[Share]]]:
        """The share, once it is computed; from then on there is none."""
        share, output = self.share, None if self._background is None else self._background.output
        if share is not None and output is not None:
            self.share = self._background = None
            yield output, [share]

"""What the engine asks of whoever says which tokens a request may take."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Follows one request's output. It sees accepted tokens only, once each, so preemption does not touch it.

    Its methods are called by one thread at a time; an error of theirs ends the request and leaves its neighbours alone.
    """

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end may follow: the request ends with "stop". Known after `mask` or `accept`."""
        ...

    def mask(self) -> NDArray[np.uint32]:
        """Bit j of word i is set where token 32 * i + j may come next, end tokens too; valid until the next call."""
        ...

    def accept(self, token_id: int) -> None:
        """This token has become part of the output; end tokens do not."""
        ...

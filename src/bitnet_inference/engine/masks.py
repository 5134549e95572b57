"""Masks of the tokens that are chosen next, computed while the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from bitnet_inference.engine.constraint import Constraint
from bitnet_inference.engine.request import Finish, Request
from bitnet_inference.engine.share import Share


class Masks:
    """Asks the constraints of a step's requests in a thread of its own, which starts with the first of them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bitnet-masks")
        self._outcomes: Future[dict[Request, Finish | None]] | None = None

    def start(self, shares: Sequence[Share]) -> None:
        """Begin with the requests that get a token in the step of these shares."""
        constrained = [share for share in shares if share.request.constraint is not None]
        requests = [share.request for share in constrained if _gets_token(share)]
        try:
            self._outcomes = self._thread.submit(_compute, requests) if requests else None
        except RuntimeError:  # the system allows no more threads, or did so before: none is asked again
            self._thread.shutdown(cancel_futures=True)
            self._outcomes = Future()
            self._outcomes.set_result(_compute(requests))

    def take(self, request: Request) -> Finish | None:
        """Wait for a constrained request's mask, then in `request.mask`; or its end, where no token may follow."""
        outcomes = {} if self._outcomes is None else self._outcomes.result()
        return outcomes[request] if request in outcomes else mask_next(request)

    def close(self) -> None:
        """End the thread: nothing more is asked."""
        self._thread.shutdown()


def _gets_token(share: Share) -> bool:
    return share.request.num_pending == share.num_tokens and not share.request.has_enough


def mask_next(request: Request) -> Finish | None:
    """Ask a request's constraint, if it has one, for the next mask; the request's end, where no token may follow."""
    if request.constraint is None:
        return None
    try:
        request.mask = request.constraint.mask()
    except Exception as error:
        return Finish("error", error=error)
    return Finish("stop") if request.constraint.is_done else None


def advance(constraint: Constraint, token_id: int) -> bool:
    """Tell a request's constraint of a token; whether nothing may follow."""
    constraint.accept(token_id)
    return constraint.is_done


def _compute(requests: Sequence[Request]) -> dict[Request, Finish | None]:
    return {request: mask_next(request) for request in requests}

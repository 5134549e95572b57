"""Python callables that change a request's logits, or choose its tokens."""

from __future__ import annotations

from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.request import Request
from bitnet_inference.errors import EngineError, InvalidParams


def processed(request: Request, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """A copy of the row [vocab] that the request's processors have edited. Raises their errors, and EngineError."""
    row, tokens = logits.copy(), _known(request)
    for processor in request.params.processors:
        assert not isinstance(processor, str), "names are looked up before"
        result: object = processor(tokens, row[:])  # whatever it does to the view's shape, type or flags is its own
        if result is not None:
            given = f"the processor {_name(processor)} returned {type(result).__name__}"
            raise EngineError(f"{given}: edit the logits in place and return None")
    if np.isnan(row).any() or np.isposinf(row).any():
        names = ", ".join(map(_name, request.params.processors))
        raise EngineError(f"a processor ({names}) left NaN or infinity at position {request.position}: use -inf to ban")
    return row


def chosen(request: Request, logits: NDArray[np.float32]) -> int:
    """The token that the request's strategy chooses from a row [vocab]. Raises its errors and those of the engine."""
    strategy, row = request.params.strategy, _edited(request, logits)
    assert callable(strategy), "names are looked up before"
    allowed = row > -np.inf
    if not allowed.any():
        raise no_token_left(request)
    token_id: object = strategy(_known(request), row)
    name, place = f"the strategy {_name(strategy)}", f"at position {request.position}"
    if isinstance(token_id, bool) or not isinstance(token_id, Integral):
        raise EngineError(f"{name} chose {token_id!r:.60} {place}: return a token id")
    token_id = int(token_id)
    if not 0 <= token_id < len(allowed):
        raise EngineError(f"{name} chose token {token_id} {place}: the vocabulary has 0 to {len(allowed) - 1}")
    if not allowed[token_id]:
        raise EngineError(f"{name} chose token {token_id} {place}, which is banned: leave out logits of -inf")
    return token_id


def no_token_left(request: Request) -> InvalidParams:
    """What is said where all tokens are banned."""
    who = "the grammar, min_tokens, logit_bias and processors"
    cure = "lower min_tokens, or ban fewer tokens"
    return InvalidParams(f"{who} leave no token to choose from at position {request.position}: {cure}")


def _edited(request: Request, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """A copy after grammar, bias, bans and penalties, to the bit what kernels/sampling.cpp makes of the row."""
    row, params, tokens = logits.copy(), request.params, request.tokens.view
    if request.mask is not None:
        row[np.unpackbits(request.mask.view(np.uint8), count=len(row), bitorder="little") == 0] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += np.float32(bias)
    if request.bans_ends:
        row[sorted(request.end_ids)] = -np.inf
    if params.repetition_penalty != 1.0:
        seen, penalty = np.unique(tokens), np.float32(params.repetition_penalty)
        row[seen] = np.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    said, counts = np.unique(tokens[request.num_prompt :], return_counts=True)
    row[said] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    row[said] -= np.float32(params.presence_penalty)
    return row


def _known(request: Request) -> NDArray[np.int32]:
    tokens = request.tokens.view
    tokens.flags.writeable = False
    return tokens


def _name(called: object) -> str:
    return str(getattr(called, "__name__", type(called).__name__))

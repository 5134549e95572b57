"""Drafts by a smaller model of the same vocabulary, which follows the requests in a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from bitnet_inference.engine.batch import build_batch
from bitnet_inference.engine.blocks import BlockPool
from bitnet_inference.engine.logprobs import TokenLogprobs
from bitnet_inference.engine.request import Finish, Request, Usage
from bitnet_inference.engine.sampler import Rows, Sampler
from bitnet_inference.engine.share import Share
from bitnet_inference.engine.speculative import Draft
from bitnet_inference.errors import InvalidParams
from bitnet_inference.model.contract import Model, Output

MAX_CATCH_UP = 128  # tokens of a prompt at a time, because running streams wait meanwhile


class ModelDrafter:
    """A request has a follower: the same tokens, and drafted ones behind, on the smaller model.

    Drafted tokens are chosen with the request's own parameters and noise, so that they are often those of the model.
    """

    costs_time = True

    def __init__(self, model: Model, vocab_size: int, num_blocks: int) -> None:
        """Reserves the cache of the smaller model; raises OutOfMemory, and InvalidParams where vocabularies differ."""
        if model.config.vocab_size != vocab_size:
            sizes = f"{model.config.vocab_size} tokens in place of {vocab_size}"
            raise InvalidParams(f"the draft model has {sizes}: choose one with the same vocabulary")
        self._model, self._limits = model, model.capabilities
        model.reserve(num_blocks)
        self._pool = BlockPool(num_blocks)
        self._sampler = Sampler(vocab_size, self._limits)
        self._followers: dict[Request, Request] = {}

    def draft(self, wanted: Sequence[tuple[Request, int]]) -> list[Draft]:
        """See Drafter."""
        followers = {request: self._follow(request) for request, _ in wanted[: self._limits.max_sequences]}
        self._catch_up(list(followers.values()))
        counts = {followers[request]: count for request, count in wanted if request in followers}
        for depth in range(max(counts.values())):
            ready = [each for each, count in counts.items() if each.num_pending == 1 and depth < count]
            shares = [Share(each, 1) for each in ready[: self._limits.max_tokens] if self._has_room(each, 1)]
            if not shares:
                break
            self._choose(self._compute(shares), shares)
        return [_drafted(request, followers.get(request)) for request, _ in wanted]

    def forget(self, request: Request) -> None:
        """See Drafter."""
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._pool.release(follower.blocks.view.tolist())

    def _follow(self, request: Request) -> Request:
        """The follower of a request, with its tokens; what was drafted wrong is taken back."""
        follower, known = self._followers.get(request), request.tokens.view
        if follower is None:
            # Processors and strategies may count their calls: they are asked for the model's own tokens alone.
            params = replace(request.params, logprobs=None, prompt_logprobs=None, prompt_logprobs_from=0)
            params = replace(params, processors=(), strategy=None)
            follower = Request(known, params, _Nobody(), choice=request.choice)
            follower.num_prompt, follower.end_ids, follower.seed = request.num_prompt, request.end_ids, request.seed
            follower.past = request.past
            self._sampler.prepare(follower)
            self._followers[request] = follower
            return follower
        both = min(len(known), len(follower.tokens))
        differ = np.flatnonzero(known[:both] != follower.tokens.view[:both])
        follower.tokens.cut(int(differ[0]) if len(differ) else both)
        follower.num_computed = min(follower.num_computed, len(follower.tokens), len(known) - 1)
        follower.tokens.extend(known[len(follower.tokens) :].tolist())
        return follower

    def _catch_up(self, followers: Sequence[Request]) -> None:
        """Compute all known tokens but the last, or the next part of them."""
        budget = min(MAX_CATCH_UP, self._limits.max_tokens)
        shares = []
        for follower in followers:
            count = min(follower.num_pending - 1, budget)
            if count > 0 and self._has_room(follower, count):
                shares.append(Share(follower, count))
                budget -= count
        if shares:
            self._compute(shares)

    def _has_room(self, follower: Request, num_tokens: int) -> bool:
        end = follower.num_computed + num_tokens
        missing = -(-end // self._limits.block_size) - len(follower.blocks)
        if end > self._model.config.max_positions or missing > self._pool.num_free:
            return False
        follower.blocks.extend(self._pool.allocate(max(missing, 0)))
        return True

    def _compute(self, shares: Sequence[Share]) -> Output:
        output = self._model.forward(build_batch(shares, self._limits.block_size))
        for share in shares:
            share.request.num_computed += share.num_tokens
        return output

    def _choose(self, output: Output, shares: Sequence[Share]) -> None:
        rows = [Rows(share.request, row) for row, share in enumerate(shares)]
        for scores in chain.from_iterable(self._sampler.scores(output, rows)):
            if scores.first is not None and scores.first.error is None:
                scores.request.tokens.append(scores.first.token_id)


def _drafted(request: Request, follower: Request | None) -> Draft:
    return Draft(follower.tokens.view[len(request.tokens) :].tolist() if follower is not None else ())


class _Nobody:
    """The sink of a follower, which no engine runs."""

    is_full = False

    def token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Never called."""
        raise AssertionError("a follower has no reader")

    def finish(self, finish: Finish, usage: Usage) -> None:
        """Never called."""
        raise AssertionError("a follower does not end")

"""Texts that begin alike share the blocks of their beginning."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_inference.engine.blocks import BlockPool, Parent
from bitnet_inference.engine.request import Request

_MAX_LOOKED_AT = 16  # blocks that come after the same content


class Beginning(NamedTuple):
    """What a request need not compute: full blocks to share, their contents, and perhaps a block to copy.

    `contents` begins with the salt, and has one number a block after it. `num_tokens` are in the cache in all.
    """

    blocks: list[int]
    contents: list[Parent]
    num_tokens: int
    partial: int | None = None


class Prefixes:
    """Finds the beginning of a request in the cache, and publishes what requests have computed, prompt and output.

    Full blocks alone are shared, and nobody writes into a full block. Of one that begins as the request goes on, full
    or left by who had not filled it, the request gets a copy; and a choice of the same prompt or another beam of a
    search of one that is being filled. What a request must compute itself (see Request.num_reusable) is never taken
    from the cache.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._min_copied = max(1, block_size // 8)  # tokens of a block

    def find(self, request: Request) -> Beginning:
        """The longest beginning of the request that the cache has, of what it need not compute itself."""
        return max(self._published(request), self._of_leader(request), key=lambda beginning: beginning.num_tokens)

    def take(self, request: Request, beginning: Beginning) -> None:
        """Give a request that has no blocks this beginning; the block to copy is not its own."""
        self._pool.share(beginning.blocks)
        request.blocks.extend(beginning.blocks)
        request.contents = list(beginning.contents)
        request.num_computed = beginning.num_tokens
        if request.num_cached is None:
            request.num_cached = beginning.num_tokens

    def publish(self, request: Request) -> None:
        """Let others find the blocks that the request has filled."""
        contents = request.contents
        while len(contents) * self._block_size <= request.num_computed:
            index = len(contents) - 1
            contents.append(self._pool.publish(request.blocks[index], contents[-1], self._tokens(request, index)))

    def publish_rest(self, request: Request) -> None:
        """Let others copy the block that a request leaves, which it has not filled."""
        index, parent = len(request.contents) - 1, request.contents[-1]
        rest = request.num_computed - index * self._block_size
        if rest >= self._min_copied and request.search is None:  # what a search writes down last is the text of another
            self._pool.publish_rest(request.blocks[index], parent, self._tokens(request, index)[: 4 * rest])

    def _published(self, request: Request) -> Beginning:
        blocks: list[int] = []
        contents = list(request.contents)
        for index in range(request.num_reusable // self._block_size):
            content = self._pool.find(contents[-1], self._tokens(request, index))
            if content is None:
                break
            blocks.append(content.block)
            contents.append(content.number)
        num_tokens = len(blocks) * self._block_size
        partial, num_common = self._begun(contents[-1], request.tokens.view[num_tokens : request.num_reusable])
        return Beginning(blocks, contents, num_tokens + num_common, partial)

    def _begun(self, parent: Parent, tokens: NDArray[np.int32]) -> tuple[int | None, int]:
        """The block after that content that begins with the most of these tokens, and with how many; none for few."""
        best, wanted, mine = None, 4 * self._min_copied, tokens[: self._block_size].tobytes()
        for block, known in self._pool.newest_after(parent, _MAX_LOOKED_AT):
            both = min(len(mine), len(known))
            if both >= wanted and known[:wanted] == mine[:wanted]:
                differ = np.flatnonzero(np.frombuffer(known[:both], np.int32) != np.frombuffer(mine[:both], np.int32))
                num_common = int(differ[0]) if len(differ) else both // 4
                best, wanted = block, 4 * (num_common + 1)
        return best, wanted // 4 - 1 if best is not None else 0

    def _of_leader(self, request: Request) -> Beginning:
        """What it has in common with another choice or beam that holds it, but what it must compute itself."""
        leader = request.leader
        if leader is None or leader.past.num_slides:
            return Beginning([], request.contents, 0)
        num_tokens = min(request.num_shared, leader.num_computed, request.num_reusable)
        num_full, rest = divmod(num_tokens, self._block_size)
        blocks = leader.blocks.view.tolist()
        partial = blocks[num_full] if rest else None
        return Beginning(blocks[:num_full], leader.contents[: num_full + 1], num_tokens, partial)

    def _tokens(self, request: Request, index: int) -> bytes:
        return request.tokens.view[index * self._block_size : (index + 1) * self._block_size].tobytes()

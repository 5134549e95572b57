"""Texts that begin alike share the blocks of their beginning."""

from __future__ import annotations

from bitnet_inference.engine.blocks import BlockPool, Content
from bitnet_inference.engine.request import Request


class Prefixes:
    """Finds the beginning of a request in the cache, and publishes what requests have computed, prompt and output.

    Full blocks alone are shared, and nobody writes into a full block. The last known token is never taken from the
    cache, because somebody must compute what follows it.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size

    def find(self, request: Request) -> list[Content]:
        """The longest beginning of the request that the cache has; nothing for a request that wants prompt logits."""
        found: list[Content] = []
        if request.on_prompt_logits is None:
            parent = request.last_content
            for index in range((len(request.tokens) - 1) // self._block_size):
                content = self._pool.find(parent, self._tokens(request, index))
                if content is None:
                    break
                found.append(content)
                parent = content.number
        return found

    def take(self, request: Request, found: list[Content]) -> None:
        """Give a request that has no blocks this beginning."""
        blocks = [content.block for content in found]
        self._pool.share(blocks)
        request.blocks.extend(blocks)
        request.num_computed = len(blocks) * self._block_size
        request.num_published = len(blocks)
        request.last_content = found[-1].number if found else request.last_content
        if request.num_cached is None:
            request.num_cached = request.num_computed

    def publish(self, request: Request) -> None:
        """Let others find the blocks that the request has filled."""
        for index in range(request.num_published, request.num_computed // self._block_size):
            block, tokens = int(request.blocks.view[index]), self._tokens(request, index)
            request.last_content = self._pool.publish(block, request.last_content, tokens)
            request.num_published = index + 1

    def _tokens(self, request: Request, index: int) -> bytes:
        return request.tokens.view[index * self._block_size : (index + 1) * self._block_size].tobytes()

"""Who holds which block of the KV cache, and what can be found in it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import count, islice
from typing import NamedTuple

from bitnet_inference.amounts import told_bytes
from bitnet_inference.errors import OutOfMemory
from bitnet_inference.model.contract import Capabilities

Parent = int | str  # the content before, by its number; for the first block of a text the salt


class Content(NamedTuple):
    """A full block that can be found: `number` stands for its tokens and all before them, and is never used again."""

    block: int
    number: int


class BlockPool:
    """Block ids 0 to num_blocks - 1 and counted references.

    A full block may be published under its tokens and the content before them; who looks for the same gets the block.
    Keys are compared whole, tokens and all, so two texts never meet in one block. A published block stays when nobody
    holds it, until its room is needed; the one released longest ago goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blank = deque(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and held by nobody
        self._num_references = [0] * num_blocks
        self._contents: dict[tuple[Parent, bytes], Content] = {}
        self._keys: dict[int, tuple[Parent, bytes]] = {}
        self._after: dict[Parent, dict[int, bytes]] = {}  # published blocks and their tokens, by the content before
        self._numbers = count()

    @property
    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self._blank) + len(self._idle)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(block in self._idle for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """So many free blocks, each with one reference; the caller has made sure that there are enough."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        blocks = [self._blank.popleft() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            assert self._num_references[block] == 0, f"free block {block} is referenced"
            self._num_references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of the blocks, which are held or published."""
        for block in blocks:
            assert self._num_references[block] > 0 or block in self._idle, f"block {block} is free: nothing to share"
            self._idle.pop(block, None)
            self._num_references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less; a block without any is free. Give a text's last block first: it goes first."""
        for block in blocks:
            assert self._num_references[block] > 0, f"block {block} is freed twice"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, parent: Parent, tokens: bytes) -> int:
        """Let a full block be found, unless one with the same content can be; the number of the content."""
        assert self._num_references[block] > 0 and block not in self._keys, f"block {block} cannot be published"
        key = (parent, tokens)
        if key not in self._contents:
            self._contents[key] = Content(block, next(self._numbers))
            self._keys[block] = key
            self._after.setdefault(parent, {})[block] = tokens
        return self._contents[key].number

    def publish_rest(self, block: int, parent: Parent, tokens: bytes) -> None:
        """The same of a block that is not full, where it has one holder, who leaves it: nobody writes into it now."""
        if self._num_references[block] == 1 and block not in self._keys:
            self.publish(block, parent, tokens)

    def find(self, parent: Parent, tokens: bytes) -> Content | None:
        """The block with these tokens after that content, if there is one."""
        return self._contents.get((parent, tokens))

    def newest_after(self, parent: Parent, count: int) -> list[tuple[int, bytes]]:
        """Up to so many published blocks that come after that content, and their tokens, the newest first."""
        return list(islice(reversed(self._after.get(parent, {}).items()), count))

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys.pop(block)
        del self._contents[key]
        siblings = self._after[key[0]]
        del siblings[block]
        if not siblings:
            del self._after[key[0]]
        return block


def affordable(limits: Capabilities, max_positions: int, max_num_blocks: int | None) -> int:
    """As many as fit into memory, but no more than full sequences in full number could use."""
    useful = limits.max_sequences * -(-max_positions // limits.block_size)
    num_blocks = min(limits.available_bytes // limits.block_bytes, useful)
    if max_num_blocks is not None:
        num_blocks = min(num_blocks, max_num_blocks)
    if num_blocks < 1:
        needed = f"a block takes {told_bytes(limits.block_bytes)}, {told_bytes(limits.available_bytes)} are available"
        raise OutOfMemory(f"no room for the KV cache: {needed}: free memory or choose a smaller model")
    return num_blocks

"""Who computes how many tokens in the next step."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from operator import attrgetter

from bitnet_inference.engine.aside import Aside
from bitnet_inference.engine.blocks import BlockPool
from bitnet_inference.engine.events import Events
from bitnet_inference.engine.pace import MAX_SLOWER, Pace
from bitnet_inference.engine.prefixes import Prefixes
from bitnet_inference.engine.request import Rank, Request
from bitnet_inference.engine.room import Room
from bitnet_inference.engine.share import Share
from bitnet_inference.errors import QueueFull
from bitnet_inference.model.contract import Capabilities

MAX_WAITING = 1024  # requests, unless an engine is told otherwise

_RANK = attrgetter("rank")


class Scheduler:
    """Higher priority first, then first come, first served, under a budget of tokens a step.

    There is no prefill and no decode phase: a request has tokens known and tokens computed, and each step lets the
    second catch up with the first as far as the budget goes. Requests that lack one token, so that they decode, come
    first; the others share what is left, and while somebody decodes no more than `pace` allows, so that a long prompt
    does not hold up running streams. Where the model has a background they go there, so many tokens of the one of
    the highest rank at a time. Those that run and those that wait come by rank: priority, then arrival. A request
    is admitted when there are blocks for all its known tokens, those that the cache has already among them, and none
    that waits overtakes it, unless it waits for a choice of the same prompt. Beams that wait for others of their search
    give way to these, and to whoever ranks before them. When a running request needs a block and none is free, the
    running one of the lowest rank gives its blocks back and computes its tokens anew later; so the one of the highest
    rank always gets on, and within a priority none starves.

    Who is not read waits: a request whose sink is full gives place and blocks back. It keeps its rank, and finds again
    in the cache what of its tokens has not had to make room.
    """

    def __init__(self, pool: BlockPool, events: Events, limits: Capabilities, *, max_waiting: int) -> None:
        """A step is within the limits of the model; at most `max_waiting` requests wait.

        Where the limits say `looks_ahead`, those that decode get the block of the token behind the next one, too, if
        many are free.
        """
        self._events, self.max_waiting = events, max_waiting
        self._take(pool, limits)
        self.running: list[Request] = []  # this one and the next in order of rank
        self.waiting: list[Request] = []
        self.is_measuring = False  # prompts wait for a step that shows what the others take
        self._copies: list[tuple[int, int]] = []
        self._timed: set[Request] = set()
        self._numbers = count()
        # Other threads append here and nothing else; the engine's thread empties them.
        self._arrivals: deque[Request] = deque()
        self._cancellations: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        """Whether a request is running or waiting."""
        return bool(self.running or self.waiting or self._arrivals)

    @property
    def has_turn(self) -> bool:
        """Whether a step would do something now: there is news, or a request that doesn't wait for its reader."""
        if self.running or self._arrivals:
            return True
        return bool(self.waiting) and (bool(self._cancellations) or any(each.can_run for each in self.waiting))

    @property
    def next_deadline(self) -> float | None:
        """When the first request's time is over; of those that have been welcomed."""
        return min((request.deadline for request in self._timed if request.deadline is not None), default=None)

    @property
    def num_waiting(self) -> int:
        """How many requests are not running; those that are cancelled do not count, even if they are still there."""
        if not self._cancellations:
            return len(self.waiting) + len(self._arrivals)
        leaving = set(self._cancellations.copy())  # copies, as other threads append meanwhile
        return sum(request not in leaving for request in [*self.waiting, *self._arrivals.copy()])

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull. May be called from any thread."""
        assert request.leader is None or request.leader.was_submitted, "a leader is submitted first"
        if self.num_waiting >= self.max_waiting:
            raise QueueFull(f"{self.num_waiting} requests are waiting already: try again later")
        request.mark("submitted")
        self._arrivals.append(request)

    def cancel(self, request: Request) -> None:
        """Have `drop_cancelled` drop this request. May be called from any thread, at any time."""
        if request.finish is None:
            self._cancellations.append(request)

    def drop_cancelled(self) -> Iterator[Request]:
        """Forget the cancelled requests that have not ended, and give their blocks back."""
        while self._cancellations:
            request = self._cancellations.popleft()
            self._welcome()  # only now: whoever cancelled it has submitted it before
            if request in self.running or request in self.waiting:
                self.drop(request)
                yield request

    def drop_expired(self, now: float) -> list[Request]:
        """Forget the requests whose time is over, and give their blocks back."""
        self._welcome()
        if not self._timed:
            return []
        expired = [request for request in self._timed if request.deadline is not None and request.deadline <= now]
        for request in expired:
            self.drop(request)
        return expired

    def schedule(self) -> list[Share]:
        """The next step's shares; empty only if all requests that are left wait for their readers."""
        self._welcome()
        for request in [each for each in self.running if each.sink.is_full]:
            self.send_back(request)
        decoding = self._decode()
        self.is_measuring, self.aside.most_s = False, math.inf
        if not self.waiting and len(decoding) == len(self.running):
            return decoding
        # Who has begun a step ago came with those that wait now: it waits once for their prompts, which are not cut.
        if not any(share.request.num_output > 1 for share in decoding):
            return decoding + self._prompts(Room(self.max_tokens - len(decoding)))
        if self.aside.num_tokens:
            return decoding + self._prompts_beside(len(decoding))
        room = self.pace.room(self.max_tokens - len(decoding), len(decoding))
        self.is_measuring = not room.is_left
        return decoding + self._prompts(room)

    def room_behind(self, request: Request, num_tokens: int) -> int:
        """Get blocks for so many tokens behind the known ones, or as many as are free; how many have room."""
        wanted = self.num_blocks_for(request.tokens.length + num_tokens) - request.blocks.length
        request.blocks.extend(self.pool.allocate(max(0, min(wanted, self.pool.num_free))))
        return min(num_tokens, request.blocks.length * self.block_size - request.tokens.length)

    def join(self, request: Request) -> None:
        """Let a request wait that has its rank already."""
        insort(self.waiting, request, key=_RANK)

    def send_back(self, request: Request) -> None:
        """Have a request wait again, without its blocks; it may be waiting already."""
        self._release(request)
        if request in self.running:
            self.running.remove(request)
            insort(self.waiting, request, key=_RANK)
            self._events.preempted(request)

    def put_last(self, request: Request) -> None:
        """Have one that waits go behind all others of its priority that are there."""
        self._welcome()
        self.waiting.remove(request)
        self._queue(request)

    def move(self, pool: BlockPool, limits: Capabilities) -> None:
        """Go on with another model's cache, in which nothing is: all who run wait, and compute anew."""
        for request in self.running[::-1]:
            self.send_back(request)
        self._take(pool, limits)

    def take_copies(self) -> list[tuple[int, int]]:
        """Which blocks are to be copied, (from, to) in order, before the step that was scheduled last."""
        copies, self._copies = self._copies, []
        return copies

    def drop(self, request: Request) -> None:
        """Forget a request that ends, and give its blocks back."""
        self._release(request)
        self._timed.discard(request)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def all_requests(self) -> list[Request]:
        """Every request that has not ended."""
        self._welcome()
        return [*self.running, *self.waiting]

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def _take(self, pool: BlockPool, limits: Capabilities) -> None:
        self.pool, self.block_size, self._looks_ahead = pool, limits.block_size, limits.looks_ahead
        self.pace, self.prefixes = Pace(limits.tile_tokens), Prefixes(pool, limits.block_size)
        self.aside = Aside(limits)
        self.max_sequences, self.max_tokens = limits.max_sequences, limits.max_tokens

    def _welcome(self) -> None:
        while self._arrivals:
            request = self._arrivals.popleft()
            self._queue(request)
            self._events.queued(request)
            if request.deadline is not None:
                self._timed.add(request)

    def _queue(self, request: Request) -> None:
        request.rank = (-request.terms.priority, next(self._numbers))
        insort(self.waiting, request, key=_RANK)

    def _decode(self) -> list[Share]:
        """One token for each running request that lacks no more, as far as the budget goes."""
        shares: list[Share] = []
        aside = self.aside.request
        for request in self.running:  # whose end may be sent back meanwhile
            if len(shares) == self.max_tokens:
                break
            if request.num_pending == 1 and request is not aside and self._make_room(request):
                shares.append(Share(request, 1))
                if self._looks_ahead:
                    self._hold_next(request)
        return shares

    def _hold_next(self, request: Request) -> None:
        is_last = request.tokens.length >= request.max_context
        if request.tokens.length == request.blocks.length * self.block_size and not is_last:
            request.blocks.extend(self.pool.allocate(int(self.pool.num_free > len(self.running))))

    def _prompts_beside(self, num_decoding: int) -> list[Share]:
        """Have prompts go on aside; in the step itself there are those that come before what is under way."""
        aside, pace = self.aside, self.pace
        aside.most_s = pace.most_s(num_decoding)
        self.is_measuring = aside.most_s is None
        if self.is_measuring:
            return []
        if aside.request is not None:
            # Half of the time, as the tokens before came ahead of what was computed aside.
            room = pace.room(self.max_tokens - num_decoding, num_decoding, MAX_SLOWER / 2)
            return self._prompts(room, aside.request.rank)
        # One alone: the next one's tokens would hold up the first of its answer.
        for request in islice(self._prompts_by_rank(None), 1):
            aside.share = Share(request, min(request.num_pending, aside.num_tokens))
        return []

    def _prompts(self, room: Room, end: Rank | None = None) -> list[Share]:
        """As much of prompts as there is room for, of those that come before this rank."""
        shares: list[Share] = []
        prompts = self._prompts_by_rank(end)
        while room.is_left and (request := next(prompts, None)):
            shares.append(Share(request, room.take(request.num_computed, request.num_pending)))
        return shares

    def _prompts_by_rank(self, end: Rank | None) -> Iterator[Request]:
        """Running requests that lack more than a token, and waiting ones as long as the next of them finds a place.

        None that comes behind this rank.
        """
        running = deque(
            each
            for each in self.running
            if each.num_pending > 1 and each is not self.aside.request and (end is None or each.rank < end)
        )
        while newcomer := next((each for each in self.waiting if each.can_run), None):
            if end is not None and newcomer.rank > end:
                break
            while running and running[0].rank < newcomer.rank:
                yield running.popleft()
            if not self._find_place(newcomer):
                break
            self.waiting.remove(newcomer)
            insort(self.running, newcomer, key=_RANK)
            newcomer.mark("scheduled")
            self._events.scheduled(newcomer)
            yield newcomer
        yield from running

    def _make_room(self, request: Request) -> bool:
        """Get a block for the request's next token if it has none, at the cost of those of the lowest rank.

        Whether there is room; else the blocks were its own.
        """
        if request.num_computed < request.blocks.length * self.block_size:
            return True
        while self.pool.num_free == 0:
            victim = self.running[-1]
            self.send_back(victim)
            if victim is request:
                return False
        request.blocks.extend(self.pool.allocate(1))
        return True

    def _find_place(self, request: Request) -> bool:
        """A place among the running and blocks, if need be those of beams that wait; whether there are."""
        while len(self.running) >= self.max_sequences or not self._give_blocks(request):
            yielding = [
                each
                for each in self.running
                if each.is_parked and (each.rank > request.rank or each.search is request.search)
            ]
            if not yielding:
                return False
            self.send_back(yielding[-1])
        return True

    def _give_blocks(self, request: Request) -> bool:
        """Blocks for all known tokens, if there are enough; what the cache has already is shared or copied."""
        request.share_scores()  # or all of its prompt would be computed for them
        beginning = self.prefixes.find(request)
        num_new = self.num_blocks_for(len(request.tokens)) - len(beginning.blocks)
        copied = [] if beginning.partial is None else [beginning.partial]
        if copied and num_new + self.pool.num_idle(beginning.blocks + copied) > self.pool.num_free:
            num_full = len(beginning.blocks) * self.block_size
            beginning, copied = beginning._replace(num_tokens=num_full, partial=None), []
        if num_new + self.pool.num_idle(beginning.blocks) > self.pool.num_free:
            return False
        self.prefixes.take(request, beginning)
        self.pool.share(copied)  # so that it is none of the new ones; what others make of it later comes after the copy
        blocks = self.pool.allocate(num_new)
        self.pool.release(copied)
        request.blocks.extend(blocks)
        self._copies += [(block, blocks[0]) for block in copied]
        return True

    def _release(self, request: Request) -> None:
        self.aside.drop(request)
        self.prefixes.publish_rest(request)
        self.pool.release(request.blocks.view.tolist()[::-1])
        request.forget()

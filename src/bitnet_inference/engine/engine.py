"""Runs requests on a model, a step at a time."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from bitnet_inference.engine.batch import Batches
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.blocks import BlockPool, affordable
from bitnet_inference.engine.events import EngineListener, Events, PlanTimes
from bitnet_inference.engine.masks import Masks, advance, mask_next
from bitnet_inference.engine.prompt_rows import prompt_rows, show_prompts
from bitnet_inference.engine.request import Finish, Request
from bitnet_inference.engine.sampler import Pick, Rows, Sampler, Scores
from bitnet_inference.engine.scheduler import MAX_WAITING, Scheduler
from bitnet_inference.engine.share import Share
from bitnet_inference.engine.speculative import Drafter, Speculation
from bitnet_inference.engine.wakeups import Wakeups
from bitnet_inference.engine.window import check_window
from bitnet_inference.errors import BackendError, InvalidParams, OutOfMemory, PromptTooLong
from bitnet_inference.model.contract import Model, Output


class Engine:
    """Requests in, tokens out. One thread calls `step`; `submit` and `cancel` may be called from any.

    A request ends exactly once: with the Finish that its sink gets.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_num_blocks: int | None = None,
        max_waiting: int = MAX_WAITING,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = monotonic,
        listener: EngineListener | None = None,
        plan_times: PlanTimes | None = None,
        fallback: Callable[[BackendError], Model] | None = None,
    ) -> None:
        """Reserves the model's cache: as much as it allows, at most `max_num_blocks`; raises OutOfMemory.

        `max_waiting`: so many requests may wait for their turn or their readers, one more raises QueueFull. `drafter`
        guesses tokens, which are checked where that is likely to pay. `clock` tells seconds. `listener` hears of
        events, see there; `plan_times` tells it how long the steps of plans took. `fallback` gives a model of the same
        configuration that goes on where this one raises a BackendError; it is called once, and closes the other.
        """
        self._clock, self._fallback, self.max_waiting = clock, fallback, max_waiting
        self._loss: BackendError | None = None  # how the model has failed, where no other one takes its place
        self._masks = Masks()
        self._stragglers: deque[Request] = deque()  # that were checked while another model took over
        self.wakeups = Wakeups(clock)  # of those who wait for what the engine's thread does
        self._events = Events(listener, plan_times)
        pool = self._take(model, max_num_blocks)
        self._scheduler = Scheduler(pool, self._events, self._limits, max_waiting=max_waiting)
        self._speculation = drafter and Speculation(drafter, self._scheduler)

    @property
    def is_lost(self) -> bool:
        """Whether the model has failed, and no other one takes its place: no request is taken any more."""
        return self._loss is not None

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self._scheduler.has_work

    @property
    def has_turn(self) -> bool:
        """Whether a step would do something now. False also while all requests wait for their readers."""
        return self._scheduler.has_turn

    def seconds_to_deadline(self) -> float | None:
        """How long it is until the time of a request is over; None if none has a limit. For the engine's thread."""
        deadline = self._scheduler.next_deadline
        return None if deadline is None else max(0.0, deadline - self._clock())

    @property
    def num_free_blocks(self) -> int:
        """How many cache blocks no request holds."""
        return self._scheduler.pool.num_free

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidParams, PromptTooLong or OutOfMemory for one that can never run, QueueFull if too many wait, and
        BackendError once the model is lost; its sink then hears nothing.
        """
        if self._loss is not None:
            raise BackendError(f"the model has failed: {self._loss}")
        sampler = self._sampler  # the last thing that another model changes
        self._check(request)
        request.max_context = self.max_context
        self._sampler.prepare(request)
        if isinstance(request.sink, Beams):
            request.sink.prepare(self._sampler.vocab_size, self.max_context)
        if request.terms.timeout_s is not None:
            request.deadline = self._clock() + request.terms.timeout_s
        self._scheduler.submit(request)
        if self._sampler is not sampler:
            self._stragglers.append(request)

    def cancel(self, request: Request) -> None:
        """End a request with the next step; nothing happens if it has ended."""
        self._scheduler.cancel(request)

    def step(self) -> None:
        """Compute and sample once for every request that is at it. An error ends the requests that it concerns."""
        self._events.begin_step()
        shares = self._schedule()
        aside = self._scheduler.aside
        self._events.forward([*shares, *aside.new])
        if computed := [*shares, *aside.current]:
            try:
                self._compute(shares)
            except Exception as error:
                if not self._fall_back(error):
                    self._fail([share.request for share in computed], error)
        scheduler = self._scheduler
        self._events.end_step(scheduler.num_waiting, len(scheduler.running), scheduler.pool)

    def end_all(self, finish: Finish) -> None:
        """End every request at once, and the engine. All sinks hear of it, even if our own books are wrong."""
        for request in self._scheduler.all_requests():
            if request.finish is None:  # else it was a beam, which has ended with its search
                self._tell(request, finish)
        for request in self._scheduler.all_requests():
            self._scheduler.drop(request)
        self.wakeups.make()
        self._masks.close()

    def _take(self, model: Model, max_num_blocks: int | None) -> BlockPool:
        """Compute with this model from now on; its cache, in which nothing is. Nothing changes if there is no room."""
        num_blocks = affordable(model.capabilities, model.config.max_positions, max_num_blocks)
        model.reserve(num_blocks)
        self._model, self._limits = model, model.capabilities
        self.max_context = min(model.config.max_positions, num_blocks * self._limits.block_size)
        self._batches = Batches(self._limits.block_size)
        self._sampler = Sampler(model.config.vocab_size, self._limits)
        return BlockPool(num_blocks)

    def _fall_back(self, error: Exception) -> bool:
        """Go on with another model after this error, if that can be: requests keep their tokens; whether it can."""
        if not isinstance(error, BackendError):
            return False
        fallback, self._fallback = self._fallback, None
        if fallback is None:
            self._loss = error
            return False
        self.wakeups.make()  # it may take long
        log = logging.getLogger(__name__)
        log.error("the model failed, another one takes its place: %s", error)
        num_tokens, max_context = self._scheduler.pool.num_blocks * self._limits.block_size, self.max_context
        try:
            model = fallback(error)
            pool = self._take(model, -(-num_tokens // model.capabilities.block_size))
        except Exception:
            log.exception("there is no other model")
            self._loss = error
            return False
        self._scheduler.move(pool, self._limits)
        self._events.replaced(error)
        self._replaced = error, self.max_context < max_context
        for request in self._scheduler.all_requests():
            self._adapt(request)
        return True

    def _adapt(self, request: Request) -> None:
        """Prepare a request for another model, or end it with the error of the one before where it doesn't fit."""
        error, has_shrunk = self._replaced
        request.max_context = self.max_context
        self._sampler.prepare(request)
        was_planned = request.search is not None or request.params.overflow == "sliding"  # for the larger one
        if has_shrunk and (was_planned or request.tokens.length + request.least_room > self.max_context):
            self._fail([request], error)

    def _fail(self, requests: Sequence[Request], error: Exception) -> None:
        for request in requests:
            # The last block may be a copy that was not made: nobody shall find it in the cache.
            full = max(0, len(request.contents) - 1) * self._scheduler.block_size
            request.num_computed = min(request.num_computed, full)
            if request.finish is None:  # the end of a beam is that of others
                self._end(request, Finish("error", error=error))

    def _check(self, request: Request) -> None:
        if request.reads == "hidden" and not self._limits.has_hidden:
            cure = "use the model that it is made of"
            raise InvalidParams(f"embeddings are hidden states, which this model's file does not give: {cure}")
        vocab_size, max_positions = self._model.config.vocab_size, self._model.config.max_positions
        highest = int(request.tokens.view.max())
        if highest >= vocab_size:
            cure = "give a text, or ids of this model's tokenizer"
            raise InvalidParams(f"the prompt holds token {highest}: the vocabulary has 0 to {vocab_size - 1}: {cure}")
        if request.num_prompt + request.least_room > max_positions:
            raise PromptTooLong(request.num_prompt, self.max_context - request.least_room)
        if request.num_prompt + request.least_room > self.max_context:
            cure = "shorten it, free memory, or raise max_cache_tokens"
            raise OutOfMemory(f"the cache holds {self.max_context} tokens, the prompt has {request.num_prompt}: {cure}")
        check_window(request.params, self.max_context)

    def _schedule(self) -> list[Share]:
        while self._stragglers:
            request = self._stragglers.popleft()
            if request in self._scheduler.all_requests():
                self._adapt(request)
        for request in self._scheduler.drop_cancelled():
            self._tell(request, Finish("filtered" if request.is_filtered else "cancelled"))
        for request in self._scheduler.drop_expired(self._clock()):
            self._tell(request, Finish("timeout"))
        shares = self._scheduler.schedule()
        self._events.enter("draft")
        if not self._speculation:
            return shares
        # Drafts may be computed, but not where a step takes less than a reader may wait.
        self.wakeups.make(self._scheduler.pace.step_s(len(shares)) or math.inf)
        return self._speculation.add(shares)

    def _compute(self, shares: Sequence[Share]) -> None:
        prompts = [share.chunk for share in shares if share.request.num_pending > 1]
        start = self._clock()
        self._masks.start(shares)
        if copies := self._scheduler.take_copies():
            self._model.copy_blocks(copies)
        self._begin_aside()
        batch = self._batches.build(shares) if shares else None
        num_tokens = 0 if batch is None else len(batch.token_ids)
        num_decoding = num_tokens - sum(chunk.num_tokens for chunk in prompts)  # drafts are theirs
        aside, pace = self._scheduler.aside, self._scheduler.pace
        is_alone = not aside.current
        self.wakeups.make((is_alone and not prompts and pace.step_s(num_decoding)) or math.inf)
        if batch is not None:
            self._choose(self._model.forward(batch) if is_alone else aside.forward(batch), shares)
        seconds = self._clock() - start
        if not is_alone:
            self._go_on_aside(seconds)
        elif batch is not None:
            pace.note(num_decoding, prompts, seconds)

    def _begin_aside(self) -> None:
        """Have the model begin with a prompt in its background; where there is no memory for it, that request ends."""
        aside = self._scheduler.aside
        try:
            aside.begin()
        except OutOfMemory as error:
            self._fail([share.request for share in aside.new], error)

    def _go_on_aside(self, spent_s: float) -> None:
        """Give what is left of a step to the prompts beside it."""
        aside = self._scheduler.aside
        self._scheduler.pace.note_beside()
        self.wakeups.make()
        self._events.enter("forward")
        aside.go_on(spent_s)
        for computed in aside.done():
            self._choose(*computed)

    def _choose(self, output: Output, shares: Sequence[Share]) -> None:
        """The next tokens of those whose known ones are computed."""
        self._events.enter("sample")
        for part in self._sampler.scores(output, self._take_note(output, shares)):
            self._events.enter("deliver")
            for scores in part:
                self._go_on(scores)
            self._events.enter("sample")

    def _take_note(self, output: Output, shares: Sequence[Share]) -> list[Rows]:
        """Write down what has been computed; the rows that tell next tokens."""
        wanted, shown, end = [], [], 0
        for request, num_tokens, draft in shares:
            end += num_tokens
            request.num_computed += num_tokens
            self._scheduler.prefixes.publish(request)
            if request.unread:
                shown += prompt_rows(request, end)
            if request.num_computed == request.tokens.length:
                wanted.append(Rows(request, end - 1, draft))
            end += len(draft)
        for request, error in show_prompts(output, shown, self._sampler.vocab_size) if shown else ():
            self._end(request, Finish("error", error=error))
        return [rows for rows in wanted if self._gets_token(rows.request)]

    def _gets_token(self, request: Request) -> bool:
        """Whether a request whose known tokens are computed goes on; else it has ended, or does now."""
        if request.finish is not None:
            return False
        if request.params.max_tokens == 0:
            finish: Finish | None = Finish("length")
        elif request.constraint is not None:
            finish = self._masks.take(request)
        else:
            return True
        if finish is not None:
            self._end(request, finish)
        return finish is None

    def _go_on(self, scores: Scores) -> None:
        """Give the request its next token, and those behind it as long as they are the ones of its draft."""
        request, pick = scores.request, scores.first
        request.mark("sampled")
        if isinstance(request.sink, Beams):
            self._branch(request.sink, scores)
            return
        assert pick is not None, "only beams choose for themselves"
        finish = self._accept(pick)
        for index, drafted in enumerate(scores.draft, 1):
            if finish is not None or pick.token_id != drafted:
                break
            request.num_computed += 1
            self._scheduler.prefixes.publish(request)
            finish = mask_next(request)
            if finish is None:
                pick = self._next_pick(scores, index)
                finish = self._accept(pick)
        if finish is not None:
            self._end(request, finish)

    def _next_pick(self, scores: Scores, index: int) -> Pick:
        self._events.enter("sample")
        pick = self._sampler.pick(scores, index)
        self._events.enter("deliver")
        return pick

    def _branch(self, beams: Beams, scores: Scores) -> None:
        """Let the beam's search have its candidates, and go on if it has those of all."""
        request, finish = scores.request, None
        if beams.is_over:
            return
        try:
            beams.take(request, scores.logits[scores.row], self._sampler.rows)
            if beams.is_complete and (finish := beams.branch(self._scheduler)) is not None:
                self._conclude(beams)
                self._end(beams.head, finish)
        except Exception as error:
            self._end(request, Finish("error", error=error))

    def _conclude(self, beams: Beams) -> None:
        """The best text of a search becomes that of its head, which counts for the whole search."""
        beams.head.is_searching = False
        beams.head.tokens.cut(beams.head.num_prompt)
        for token_id in beams.best[0].token_ids:
            beams.head.tokens.append(token_id)
            self._events.token(beams.head)

    def _accept(self, pick: Pick) -> Finish | None:
        """Give the token to its sink; the end of the request, if this is it."""
        request = pick.request
        if pick.error is not None:
            return Finish("error", error=pick.error)
        if pick.token_id in request.end_ids:
            return Finish("stop", token_id=pick.token_id, logprobs=pick.logprobs)
        request.tokens.append(pick.token_id)
        self._events.token(request)
        try:
            wants_end = request.sink.token(pick.token_id, pick.logprobs)
            is_complete = request.constraint is not None and advance(request.constraint, pick.token_id)
        except Exception as error:
            return Finish("error", error=error)
        if wants_end or is_complete:
            return Finish("stop")
        is_full = request.tokens.length >= self.max_context
        if is_full and request.params.overflow == "sliding" and not request.has_enough:
            self._slide(request)
            return None
        return Finish("length") if is_full or request.has_enough else None

    def _slide(self, request: Request) -> None:
        self._scheduler.send_back(request)
        if self._speculation:
            self._speculation.forget(request)
        request.slide(self.max_context)
        self._scheduler.put_last(request)  # or a text without an end would keep out for ever who needs its room

    def _end(self, request: Request, finish: Finish) -> None:
        self._scheduler.drop(request)
        self._tell(request, finish)

    def _tell(self, request: Request, finish: Finish) -> None:
        assert request.finish is None, "a request ends once"
        request.finish, usage = finish, request.usage()
        if self._speculation:
            self._speculation.forget(request)
        self._events.finished(request, finish, usage)  # first, so that it counts for whoever has read the answer
        try:
            request.sink.finish(finish, usage)
        except Exception:  # nobody is left to tell
            logging.getLogger(__name__).exception("the sink of a finished request raised")
        for other in request.sink.requests if isinstance(request.sink, Beams) else ():
            if other.finish is None:
                self._end(other, finish)

"""LLM: a model, its words and an engine, wired together. The only place that knows all three."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack, overload

from bitnet_inference.backends import decided
from bitnet_inference.config import EngineConfig, EngineOptions, check_progress, checked_count
from bitnet_inference.drafts import Drafts, load_drafts, make_drafter
from bitnet_inference.engine.beam import BeamParams
from bitnet_inference.engine.beams import Beams
from bitnet_inference.engine.engine import Engine
from bitnet_inference.engine.events import EngineListener, check_listener
from bitnet_inference.engine.params import Processor, SamplingParams, Strategy
from bitnet_inference.engine.request import Request
from bitnet_inference.engine.terms import Terms
from bitnet_inference.engine.worker import Worker
from bitnet_inference.errors import InvalidParams
from bitnet_inference.formats import open_checkpoint
from bitnet_inference.held import Held, Holder, made_on
from bitnet_inference.in_flight import read_all
from bitnet_inference.mailbox import MAX_UNREAD, Mailbox
from bitnet_inference.model.contract import Model
from bitnet_inference.model_folder import defaults_of, find_model, load_tokenizer
from bitnet_inference.named import Named
from bitnet_inference.overflow import Fitted, Talk, fit
from bitnet_inference.prompt_numbers import PromptNumbers
from bitnet_inference.prompts import (
    BatchOptions,
    BatchProgress,
    BatchTalkOptions,
    ChatOptions,
    Params,
    Progress,
    Prompt,
    TalkOptions,
    TermOptions,
    count,
    encode_each,
    is_many,
    is_one_prompt,
    is_one_talk,
    one_for_all,
    params_of_each,
    read_terms,
    split_terms,
)
from bitnet_inference.ranked import RankedTexts, Search, cancelling
from bitnet_inference.stream import Generation, Stream
from bitnet_inference.text.chat import Chat
from bitnet_inference.text.detokenize import Detokenizer
from bitnet_inference.text.filter import Filter, Filters
from bitnet_inference.text.messages import Message
from bitnet_inference.text.own_words import readable_json, with_own_words
from bitnet_inference.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bitnet_inference.grammar.matcher import Matchers


class LLM(PromptNumbers, RankedTexts, Holder):
    """A loaded model. All methods may be called from several threads at once; requests share the engine's steps.

    `tokenizer` encodes and decodes; `config` is the model's configuration; `default_params` are what the model's
    generation_config.json recommends.
    Close it, or use it in a `with` block, to give memory and threads back.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        max_cache_tokens: int | None = None,
        drafts: Drafts = "auto",
        filters: Sequence[Filter] = (),
        listener: EngineListener | None = None,
        profile: bool = False,
        fallback: Callable[[], Model] | None = None,
    ) -> None:
        """For models that are loaded already; see `load`. One for `drafts` is closed with it.

        `fallback` gives the model that goes on where this one raises a BackendError; it may take its time. Raises
        OutOfMemory, and InvalidParams for what is no filter and for a profile that cannot be made.
        """
        check_listener(listener, profile)
        self._filters, self._held = Filters(filters), Held(model, drafts, fallback)
        if self._filters:
            tokenizer.check_words()
        block_size = model.capabilities.block_size
        engine = Engine(
            model,
            max_num_blocks=None if max_cache_tokens is None else max(1, -(-max_cache_tokens // block_size)),
            drafter=make_drafter(model, drafts, max_cache_tokens),
            listener=listener,
            plan_times=self._held.plan_times() if profile else None,
            fallback=self._held.fallback,
        )
        self.tokenizer = tokenizer
        self.config = model.config
        self._engine = engine
        self.default_params = defaults_of(tokenizer)
        self._bos_ids = frozenset(each for each in (model.config.bos_id, tokenizer.bos_id) if each is not None)
        self.eos_ids = tuple(sorted({*model.config.eos_ids, *tokenizer.eos_ids}))
        self._chat, self._unfiltered = Chat(tokenizer, self._filters), Chat(tokenizer)
        self._named = Named()
        worker = self._worker = Worker(engine)
        self._mailbox = partial(Mailbox, on_room=worker.wake, later=engine.wakeups.add, check_wait=worker.check_wait)
        self._requests: weakref.WeakSet[Request] = weakref.WeakSet()
        self._noting = threading.Lock()
        self._close = weakref.finalize(self, self._held.close, worker)

    @classmethod
    def load(
        cls,
        model: str | Path = "default",
        *,
        max_cache_tokens: int | None = None,
        drafts: str | Path = "auto",
        filters: Sequence[Filter] = (),
        progress: Progress | None = None,
        listener: EngineListener | None = None,
        profile: bool = False,
        arm_i2_s: bool = False,
        **engine: Unpack[EngineOptions],
    ) -> LLM:
        """Load a model: "default" for the one that comes with the package, a path, or the name of one that was pulled.

        `engine`: where and how it runs, as device="cpu", threads=2, head="int8"; see EngineConfig. Where they are left
        out, the environment has its say about `isa` and `threads` (BITNET_ISA, BITNET_THREADS). `max_cache_tokens`: the
        KV cache holds at most so many tokens, up to whole blocks of 32, of all requests together; None takes what is
        free. `drafts`: who guesses tokens ahead, which are checked several at a time where that saves time: "lookup"
        (what followed the same tokens earlier in the text), the path of a smaller model with the same vocabulary, or
        "none"; "auto" is "lookup" where a check changes no bit, as on the CPU. `filters` look at all prompts and
        answers, see Filter. `progress(done, total)` is called while weights are read. `listener(event)` is called in
        the engine's thread with all that happens (engine.events): see Counts and Trace. With `profile` it hears the
        time of each step of the plan too, on device "cpu". `arm_i2_s`: a GGUF file has I2_S weights in the order that
        bitnet.cpp wrote on ARM machines, which no file says. Raises NotFound, FormatError, Unsupported, Unavailable,
        OutOfMemory and InvalidParams, and TypeError for an option that is not known.
        """
        if max_cache_tokens is not None:
            max_cache_tokens = checked_count("max_cache_tokens", max_cache_tokens)
        check_listener(listener, profile)
        check_progress(progress)
        Filters(filters)  # wrong ones are refused before anything is read
        config = EngineConfig.from_env(**engine)
        checkpoint = open_checkpoint(find_model(model), arm_i2_s=arm_i2_s)
        tokenizer, choice = load_tokenizer(checkpoint), decided(checkpoint, config, max_cache_tokens)
        drafting = load_drafts(drafts, tokenizer, config)
        make = partial(
            cls, tokenizer=tokenizer, max_cache_tokens=max_cache_tokens, drafts=drafting, filters=filters,
            listener=listener, profile=profile,
        )  # fmt: skip
        llm, choice = made_on(choice, checkpoint, progress, make)
        llm._held.tell(choice)
        return llm

    @overload
    def generate(  # type: ignore[overload-overlap]  # a string is a sequence of strings
        self, prompts: str | Sequence[int], params: Params = None, **terms: Unpack[BatchOptions]
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: Iterable[str] | Iterable[Sequence[int]], params: Params = None, **terms: Unpack[BatchOptions]
    ) -> list[Generation]: ...
    def generate(
        self, prompts: Any, params: Params = None, *, progress: BatchProgress = None, **terms: Unpack[TermOptions]
    ) -> Any:
        """Continue a prompt (a string or a list of token ids), or many: a list of either, or anything that yields them.

        Many give a list, in their order. They are taken as they are needed: some hundreds are under way at a time.
        `progress(done, total)` is called as they end; total is None where nobody knows. Without `params`,
        `default_params` are used; a list of params has one entry a prompt. `terms`: see Terms. Raises RequestErrors for
        bad prompts and parameters, and EngineErrors; then, and on Ctrl-C, all of these requests are cancelled.
        """
        one = not is_many(prompts)
        outputs = self._generate([prompts] if one else prompts, self._encode, params, read_terms(terms), progress)
        return outputs[0] if one else outputs

    @overload
    def chat(
        self, messages: Sequence[Message], params: Params = None, **options: Unpack[BatchTalkOptions]
    ) -> Generation: ...
    @overload
    def chat(
        self, messages: Iterable[Sequence[Message]], params: Params = None, **options: Unpack[BatchTalkOptions]
    ) -> list[Generation]: ...
    def chat(
        self, messages: Any, params: Params = None, *, progress: BatchProgress = None, **options: Unpack[TalkOptions]
    ) -> Any:
        """Answer a conversation, a list of {"role": ..., "content": ...}, or many (a list of such lists).

        Otherwise as `generate`. Raises Unsupported for a model without a chat template.
        """
        one = is_one_talk(messages)
        terms, others = split_terms(options)
        encode = partial(self._talk, options=others)
        outputs = self._generate([messages] if one else messages, encode, params, terms, progress, opening=True)
        return outputs[0] if one else outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **terms: Unpack[TermOptions]) -> Stream:
        """Continue one prompt, piece by piece. What is wrong with the request is raised at once."""
        if not is_one_prompt(prompt):
            raise InvalidParams("stream takes one prompt: open a stream for each")
        return self._stream(self._encode(prompt), self._params(params, 1)[0], read_terms(terms), max_unread=MAX_UNREAD)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Unpack[TalkOptions]
    ) -> Stream:
        """Answer one conversation, piece by piece."""
        terms, others = split_terms(options)
        prompt, chosen = self._talk(messages, others), self._params(params, 1)[0]
        return self._stream(prompt, chosen, terms, opening=True, max_unread=MAX_UNREAD)

    def stream_choices(
        self, prompt: Prompt, num_choices: int, params: SamplingParams | None = None, **terms: Unpack[TermOptions]
    ) -> list[Stream]:
        """Continue one prompt in several ways: the choices of one seed. The prompt is computed and kept once."""
        if not is_one_prompt(prompt):
            raise InvalidParams("choices are of one prompt: call stream_choices for each")
        return self._choices(self._encode(prompt), num_choices, self._params(params, 1)[0], read_terms(terms))

    def stream_chat_choices(
        self,
        messages: Sequence[Message],
        num_choices: int,
        params: SamplingParams | None = None,
        **options: Unpack[TalkOptions],
    ) -> list[Stream]:
        """Answer one conversation in several ways, as stream_choices."""
        terms, others = split_terms(options)
        prompt = self._talk(messages, others)
        return self._choices(prompt, num_choices, self._params(params, 1)[0], terms, opening=True)

    def encode_chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins. Special tokens in messages are plain text."""
        return self._chat.encode(messages, **options)

    def register_processor(self, name: str, processor: Processor) -> None:
        """Let SamplingParams(processors=[name]) mean this one. Raises InvalidParams for a name that is taken."""
        self._named.add_processor(name, processor)

    def register_strategy(self, name: str, strategy: Strategy) -> None:
        """Let SamplingParams(strategy=name) mean this one. Raises InvalidParams for a name that is taken."""
        self._named.add_strategy(name, strategy)

    def resolved(self, params: SamplingParams | None) -> SamplingParams:
        """The same parameters with callables in place of names, `default_params` for None. Raises InvalidParams."""
        return self._named.resolve(self.default_params if params is None else params)

    @property
    def max_context(self) -> int:
        """How many tokens, prompt and answer together, fit."""
        return self._engine.max_context

    @property
    def is_busy(self) -> bool:
        """Whether the engine has a request that has not ended. False in a forked process, where nothing runs."""
        if self._worker.is_forked:
            return False
        with self._noting:
            return any(request.was_submitted and request.finish is None for request in self._requests)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests (they raise Stopped) and wait until those that are there have ended.

        Waits at most `timeout_s` seconds; returns whether all have ended. A stream that waits for its reader does not
        end: give a limit where some may lie unread. Close the LLM afterwards. EngineError in the engine's thread.
        """
        has_stopped = self._worker.drain(0.0 if timeout_s == 0 else Terms(timeout_s=timeout_s).timeout_s)
        return has_stopped or not self.is_busy  # with nothing left the engine's thread may lack a moment to its end

    def close(self) -> None:
        """End all requests and give memory and threads back. Further requests raise Stopped."""
        self._worker.stop(drain=False)  # Ctrl-C may end this wait, and a finalizer is called once
        self._close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or sent to another process: load the model there")

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidParams("the prompt is empty: give some text")
            self._filters.check(prompt)
            return self.tokenizer.encode(prompt)
        if self._filters:
            self._filters.check(self.tokenizer.decode(prompt))
        return prompt

    def _talk(self, messages: Sequence[Message], options: dict[str, Any]) -> Talk:
        token_ids = self.encode_chat(messages, **options)
        return Talk(messages, token_ids, lambda kept: self._unfiltered.encode(kept, **options))  # they have seen all

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        return [self.resolved(each) for each in params_of_each(params, count)]

    def _generate(
        self,
        prompts: Iterable[Any],
        encode: Callable[[Any], Sequence[int] | Talk],
        params: Params,
        terms: Terms,
        progress: BatchProgress,
        opening: bool = False,
    ) -> list[Generation]:
        total = count(prompts)
        chosen = self._params(params, total) if total is not None else repeat(self._params(one_for_all(params), 1)[0])
        items = zip(encode_each(prompts, encode), chosen, strict=False)
        return read_all(items, lambda item: self._stream(*item, terms, opening), total, progress)

    def _choices(
        self,
        prompt: Sequence[int] | Talk,
        num_choices: int,
        params: SamplingParams,
        terms: Terms,
        opening: bool = False,
        max_unread: int | None = MAX_UNREAD,
    ) -> list[Stream]:
        num_choices, most = checked_count("num_choices", num_choices), self._engine.max_waiting
        if num_choices > most:
            raise InvalidParams(f"{num_choices} choices are more than may wait at a time: ask for {most} at most")
        fitted = fit(prompt, params, self.max_context, self._bos_ids)  # a long conversation, once for all
        streams: list[Stream] = []
        with cancelling(streams):
            for choice in range(num_choices):
                leader = streams[0].request if streams else None
                streams.append(self._stream(fitted, params, terms, opening, max_unread, choice=choice, leader=leader))
        return streams

    def _search(self, prompt: Sequence[int], params: BeamParams, terms: Terms, opening: bool) -> Search:
        if not isinstance(params, BeamParams):
            raise InvalidParams("params must be BeamParams, as in BeamParams(num_beams=4)")
        reading, *detokenizers = (
            Detokenizer(self.tokenizer, params.stop, opening=opening) for _ in range(1 + params.num_choices)
        )
        boxes = [self._mailbox(each) for each in detokenizers]
        looking = reading if params.stop else None
        beams = Beams(prompt, params, boxes, eos_ids=self.eos_ids, terms=terms, reading=looking)
        streams = [Stream(box, beams.head, self._cancel, False, self._filters.start()) for box in boxes]
        self._submit(beams.head)
        return Search(beams, streams)

    def _submit(self, request: Request) -> None:
        self._worker.check_wait()  # in a fork the lock may be held by nobody
        with self._noting:
            self._requests.add(request)
        self._worker.submit(request)

    def _stream(
        self,
        prompt: Sequence[int] | Talk | Fitted,
        params: SamplingParams,
        terms: Terms | None = None,
        opening: bool = False,
        max_unread: int | None = None,  # for who reads when all is over, there must be no limit
        **options: Any,
    ) -> Stream:
        if params.stop or params.grammar is not None:
            self.tokenizer.check_words()
        detokenizer = Detokenizer(self.tokenizer, params.stop, opening=opening)
        mailbox = self._mailbox(detokenizer, max_unread=max_unread)
        fitted = fit(prompt, params, self.max_context, self._bos_ids)
        options |= {"eos_ids": self.eos_ids, "terms": terms, "num_dropped": fitted.num_dropped}
        request = Request(fitted.token_ids, params, mailbox, **options)
        if (grammar := params.grammar) is not None:
            drops_space = opening and self.tokenizer.decoding.drops_space
            request.constraint = self._matchers.matcher(grammar.kind, grammar.source, request.end_ids, drops_space)
        screen = self._filters.start()
        stream = Stream(mailbox, request, self._cancel, params.logprobs is not None, screen)
        self._submit(request)  # which the stream ends from now on, should an interrupt take it
        return stream

    @cached_property
    def _matchers(self) -> Matchers:
        from bitnet_inference.grammar.matcher import Matchers  # the library behind it is loaded when it is needed

        num_tokens = max(self.config.vocab_size, self.tokenizer.vocab_size)
        named, own_words = partial(readable_json, self.tokenizer), partial(with_own_words, self.tokenizer)
        return Matchers(named, own_words, num_tokens, self.eos_ids)

    def _cancel(self, request: Request) -> None:
        # Streams hold this method, and so the LLM: it is not closed while one of them is read.
        self._worker.cancel(request)
